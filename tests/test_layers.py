"""Imports go down only, private torch stays behind its boundary, and importing us is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
MAX_LINES = 500

# layer -> what it may import of the package. A layer is a module or a folder of it.
BASE = {
    *("_version", "errors", "decisions", "numerics", "options"),
    *("scale_recipe", "spec", "weight_format"),
}
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "spec": set(),
    "numerics": set(),
    "weight_format": set(),
    "scale_recipe": {"errors", "spec"},
    "decisions": {"spec", "numerics"},
    "options": {"errors"},
    "_torch_compat": BASE,
    "_gluon_compat": set(),
    "_gluon_warps": set(),
    "_group_reduce_compat": set(),
    "report": BASE,
    "ops": BASE | {"_torch_compat", "report"},
    "patterns": BASE | {"_torch_compat", "_group_reduce_compat", "report", "ops", "patterns"},
    "kernels": BASE | {"_torch_compat", "ops", "kernels"},
    "lowering": BASE
    | {"_torch_compat", "_gluon_compat", "_group_reduce_compat"}
    | {"report", "ops", "kernels", "lowering"},
    "tables": BASE | {"_torch_compat", "patterns"},
    "backend": BASE | {"_torch_compat", "report", "ops", "patterns", "lowering", "tables"},
    "prepack": BASE | {"_torch_compat", "ops", "patterns", "kernels", "tables"},
    "measure_fp8": BASE | {"_torch_compat", "ops"},
    "measure": BASE | {"_torch_compat", "report", "ops", "measure_fp8"},
    "doctor": BASE | {"_torch_compat", "kernels"},
    "__main__": BASE | {"doctor", "explanation"},
    "explanation": BASE | {"_torch_compat", "report", "measure", "backend"},
    "simulate": {"simulate"},
}
ON_TOP = {"__init__"}  # may name every layer, but only resolves them on first use
BOUNDARY = {"_torch_compat", "_gluon_compat", "_group_reduce_compat", "simulate"}
# Where the types of public operators live: they have no public name.
ANNOTATIONS = "torch._ops"


def sources() -> dict[str, Path]:
    """Module name -> file, the linked folder under the name that it is imported by."""
    found = {}
    for prefix, root in (
        ("inductor_quant", ROOT / "inductor_quant"),
        ("inductor_quant.patterns", ROOT / "patterns"),
    ):
        for path in root.rglob("*.py"):
            if prefix == "inductor_quant" and "patterns" in path.relative_to(root).parts:
                continue
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join((prefix, *(part for part in parts if part != "__init__")))] = path
    return found


SOURCES = sources()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(module: str) -> Iterator[str]:
    """Full names of everything that ``module`` imports, wherever the statement stands."""
    is_package = SOURCES[module].name == "__init__.py"
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: None if is_package else -1]
                parts = parts[: len(parts) - (node.level - 1)]
                base = ".".join((*parts, *filter(None, [base])))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_layers(module: str) -> set[str]:
    return {
        layer_of(name)
        for name in imports(module)
        if name.startswith("inductor_quant.") and layer_of(name) in ALLOWED
    }


def dotted(node: ast.AST) -> str:
    """``torch._inductor.config`` for such a chain of attributes, "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def private_torch(module: str) -> set[str]:
    """Private names of torch that ``module`` imports, spells out, or has as a string."""
    names = set(imports(module))
    for node in ast.walk(TREES[module]):
        names.add(dotted(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if is_private(name)}


def is_private(name: str) -> bool:
    """Whether a dotted name leads into torch through a private part; operators have such names."""
    first, *rest = name.split(".")
    if first != "torch" or " " in name or f"{name}.".startswith(f"{ANNOTATIONS}."):
        return False
    is_operator = rest[:1] == ["ops"] or (len(rest) == 1 and hasattr(torch.ops.aten, rest[0]))
    hidden = [part for part in rest if part.startswith("_") and not part.startswith("__")]
    return bool(hidden) and not is_operator


def test_every_module_is_in_a_layer():
    assert {layer_of(name) for name in SOURCES} <= {*ALLOWED, *ON_TOP}


@pytest.mark.parametrize("module", sorted(set(SOURCES) - {"inductor_quant"}))
def test_imports_go_down_only(module):
    own = layer_of(module)
    assert imported_layers(module) - {own} <= ALLOWED[own]


def test_patterns_and_kernels_meet_only_in_the_ops():
    reached = {layer: set(below) for layer, below in ALLOWED.items()}
    assert reached["patterns"].isdisjoint({"kernels", "lowering"})
    assert reached["kernels"].isdisjoint({"patterns", "lowering"})
    assert reached["lowering"].isdisjoint({"patterns"})


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_private_torch_is_named_at_the_boundary_only(module):
    if layer_of(module) not in BOUNDARY:
        assert private_torch(module) == set()


def test_the_boundary_does_name_private_torch():
    """That is: the test above would see it."""
    assert "torch._inductor.select_algorithm" in private_torch("inductor_quant._torch_compat")
    assert private_torch("inductor_quant.simulate._cuda")


def test_nothing_else_imports_simulate():
    users = {name for name in SOURCES if "simulate" in imported_layers(name)}
    assert {layer_of(name) for name in users} <= {"simulate"}


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_file_has_at_most_500_lines(module):
    assert len(SOURCES[module].read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_says_what_it_is(module):
    assert ast.get_docstring(TREES[module])


# ------------------------------------------------------------------------------------------
# importing


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_the_package_imports_nothing_of_torch():
    added = run(
        "import sys\n"
        "import inductor_quant\n"
        "print(*(name for name in sys.modules if name.split('.')[0] in ('torch', 'triton')))\n"
    )
    assert added.split() == []


def test_importing_the_package_after_torch_imports_no_inductor():
    added = run(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import inductor_quant\n"
        "print(*(set(sys.modules) - before))\n"
    )
    assert [name for name in added.split() if name.startswith(("torch", "triton"))] == []


def test_importing_the_package_takes_less_than_30_ms_beyond_torch():
    code = "import time\nstart = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
    times = [float(run(code.format("import inductor_quant"))) for _ in range(7)]
    # 12 ms on a quiet machine; the shortest, since other work only ever adds to it
    assert min(times) < 0.030, times


def test_every_public_name_resolves():
    run(
        "import inductor_quant\n"
        "for name in inductor_quant.__all__:\n"
        "    assert getattr(inductor_quant, name) is not None, name\n"
        "    assert name in dir(inductor_quant), name\n"
    )


def test_an_unknown_name_is_an_attribute_error():
    import inductor_quant

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = inductor_quant.no_such_name
