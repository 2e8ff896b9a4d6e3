"""Imports go down only, private torch stays inside its boundary, and importing us is cheap."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
MAX_LINES = 500

# layer -> the layers that it may import. A layer is a folder or a module, under its longest name
# here; a layer always may import itself.
PLAIN = {"_version", "errors", "options", "spec"}
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "options": {"errors"},
    "spec": {"errors"},
    "simulate": {"_compat"},
    "_compat": set(),
    "_compat.gluon": {"_compat", "simulate"},  # what Gluon is under Triton's interpreter
    "report.events": PLAIN,
    "ops": PLAIN | {"_compat", "report.events"},
    "fallback": PLAIN | {"_compat", "report.events"},
    # the FX half
    "patterns.match": PLAIN,
    "patterns.fx_utils": {"_compat"},
    "patterns.symbolic": {"_compat", "patterns.fx_utils", "patterns.match"},
    "patterns.rewrite": {"_compat", "fallback", "ops", "patterns.fx_utils", "patterns.match"},
    "patterns.weights": PLAIN
    | {"_compat", "ops", "patterns.fx_utils", "patterns.match", "patterns.symbolic"},
    "patterns.products": PLAIN
    | {"_compat", "patterns.fx_utils", "patterns.match", "patterns.rewrite", "patterns.symbolic"}
    | {"patterns.weights"},
    "patterns.matching": PLAIN
    | {"_compat", "ops", "patterns.fx_utils", "patterns.match", "patterns.products"}
    | {"patterns.symbolic", "patterns.weights"},
    "patterns.recognizers": PLAIN
    | {"_compat", "ops", "patterns.fx_utils", "patterns.match", "patterns.matching"}
    | {"patterns.products", "patterns.symbolic", "patterns.weights"},
    "patterns.reporting": PLAIN
    | {"_compat", "ops", "patterns.fx_utils", "patterns.match", "patterns.matching"},
    "patterns.fusion": PLAIN
    | {"_compat", "ops", "report.events", "patterns.fx_utils", "patterns.match"}
    | {"patterns.matching", "patterns.reporting", "patterns.rewrite"},
    "patterns": {"patterns.match", "patterns.recognizers"},
    "patterns.graph_pass": PLAIN | {"_compat", "fallback", "ops", "report.events", "patterns"},
    # the kernel half
    "kernels.problem": PLAIN,
    "kernels.config": PLAIN | {"kernels.problem"},
    "kernels.kernel": PLAIN | {"kernels.codegen", "kernels.config", "kernels.problem"},
    "kernels.tuning": PLAIN | {"kernels.config", "kernels.problem"},
    "kernels.codegen": PLAIN | {"ops", "kernels.config", "kernels.problem"},
    "kernels.shared": PLAIN
    | {"ops", "kernels.codegen", "kernels.config", "kernels.kernel", "kernels.problem"},
    "kernels.scaled_mm": PLAIN
    | {"ops", "kernels.codegen", "kernels.config", "kernels.kernel", "kernels.problem"}
    | {"kernels.shared", "kernels.tuning"},
    "kernels.weight_only": PLAIN
    | {"ops", "kernels.codegen", "kernels.config", "kernels.kernel", "kernels.problem"}
    | {"kernels.scaled_mm", "kernels.shared", "kernels.tuning"},
    "kernels.block_sparse": PLAIN
    | {"kernels.codegen", "kernels.config", "kernels.kernel", "kernels.problem", "kernels.shared"},
    "kernels.w4a8": PLAIN
    | {"ops", "kernels.codegen", "kernels.config", "kernels.kernel", "kernels.problem"}
    | {"kernels.scaled_mm", "kernels.shared", "kernels.weight_only"},
    "kernels.experts": PLAIN
    | {"kernels.codegen", "kernels.config", "kernels.kernel", "kernels.problem", "kernels.shared"}
    | {"kernels.weight_only"},
    "kernels.scaled_experts": PLAIN
    | {"kernels.config", "kernels.experts", "kernels.problem", "kernels.scaled_mm"},
    "kernels": PLAIN
    | {"kernels.block_sparse", "kernels.kernel", "kernels.scaled_mm", "kernels.w4a8"}
    | {"kernels.weight_only"},
    "lowering": PLAIN | {"_compat", "fallback", "ops", "report.events", "kernels"},
    "row_buckets": PLAIN | {"_compat", "fallback", "report.events"},
    # what users call
    "tables": PLAIN | {"_compat", "patterns.symbolic"},
    "backend": PLAIN
    | {"_compat", "fallback", "lowering", "ops", "patterns", "row_buckets", "tables"},
    "prepack": PLAIN | {"_compat", "kernels", "ops", "patterns", "tables"},
    "prepare": PLAIN,
    "report": PLAIN | {"_compat", "backend", "kernels", "ops", "prepare", "report.events"},
    "__main__": {"report"},
}
ON_TOP = {"__init__"}  # may name every layer, but only resolves them on first use
BOUNDARY = {"_compat", "simulate"}
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
    """``patterns.matching`` for ``inductor_quant.patterns.matching.epilogue``."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in ALLOWED:
            return ".".join(parts[:length])
    return parts[0] if parts else "__init__"


def imports(module: str) -> Iterator[str]:
    """Full names of everything that ``module`` imports, wherever the statement stands, and of
    modules of ours that it names in a string, as for ``importlib``."""
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
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield argument.value


def imported_modules(module: str) -> set[str]:
    """Modules of ours that ``module`` imports."""
    found = set()
    for name in imports(module):
        while name and name not in SOURCES:
            name = name.rpartition(".")[0]
        if name not in ("", "inductor_quant", module):
            found.add(name)
    return found


def imported_layers(module: str) -> set[str]:
    return {layer_of(name) for name in imported_modules(module)}


def allows(layer: str, other: str) -> bool:
    """Whether ``layer`` may import ``other``, or a layer that holds it."""
    allowed = ALLOWED[layer] | {layer}
    parts = other.split(".")
    return any(".".join(parts[:length]) in allowed for length in range(1, len(parts) + 1))


def cycles() -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components)."""
    graph = {module: imported_modules(module) for module in SOURCES}
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            at = path.index(module)
            found.append(path[at:])
            del path[at:]

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return [group for group in found if len(group) > 1]


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


def test_no_modules_import_each_other():
    assert cycles() == []


def test_imports_go_down_only():
    upwards = [
        f"{module} imports {layer}"
        for module in sorted(set(SOURCES) - {"inductor_quant"})
        for layer in imported_layers(module)
        if not allows(layer_of(module), layer)
    ]
    assert upwards == []


def test_patterns_and_kernels_meet_only_in_the_ops():
    for layer, below in ALLOWED.items():
        reached = {name.split(".")[0] for name in below}
        if layer.startswith("patterns"):
            assert reached.isdisjoint({"kernels", "lowering"})
        if layer.startswith(("kernels", "lowering")):
            assert "patterns" not in reached


def test_private_torch_is_named_at_the_boundary_only():
    found = {
        module: names
        for module in SOURCES
        if layer_of(module).split(".")[0] not in BOUNDARY and (names := private_torch(module))
    }
    assert found == {}


def test_the_boundary_does_name_private_torch():
    """That is: the test above would see it."""
    assert "torch._inductor.select_algorithm" in private_torch("inductor_quant._compat.symbols")
    assert private_torch("inductor_quant.simulate._cuda")


def test_only_the_boundary_imports_simulate():
    users = {name for name in SOURCES if "simulate" in imported_layers(name)}
    assert {layer_of(name) for name in users} <= {"simulate", "_compat.gluon"}


def test_a_file_has_at_most_500_lines():
    lengths = {m: len(p.read_text(encoding="utf-8").splitlines()) for m, p in SOURCES.items()}
    assert {m: length for m, length in lengths.items() if length > MAX_LINES} == {}


def test_every_module_has_a_docstring():
    assert [module for module, tree in TREES.items() if not ast.get_docstring(tree)] == []


# ------------------------------------------------------------------------------------------
# importing


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# One process for four questions: importing torch and Inductor takes seconds.
IMPORTING = """
import json, sys
import inductor_quant

def loaded():
    return {name for name in sys.modules if name.split(".")[0] in ("torch", "triton")}

alone = loaded()
for name in [name for name in sys.modules if name.split(".")[0] == "inductor_quant"]:
    del sys.modules[name]
import torch
before = loaded()
import inductor_quant
after_torch = loaded() - before
import inductor_quant.simulate
with_simulate = loaded() & {"triton", "torch._inductor"}
unresolved = [
    name
    for name in inductor_quant.__all__
    if getattr(inductor_quant, name) is None or name not in dir(inductor_quant)
]
print(json.dumps([sorted(alone), sorted(after_torch), sorted(with_simulate), unresolved]))
"""


def test_importing_us_imports_neither_torch_nor_inductor_and_every_public_name_resolves():
    alone, after_torch, with_simulate, unresolved = json.loads(run(IMPORTING))
    assert alone == []
    assert after_torch == []
    assert with_simulate == []
    assert unresolved == []


def test_importing_the_package_takes_less_than_30_ms_beyond_torch():
    code = "import time\nstart = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
    times = [float(run(code.format("import inductor_quant"))) for _ in range(7)]
    # 12 ms on a quiet machine; the shortest, since other work only ever adds to it
    assert min(times) < 0.030, times


def test_an_unknown_name_is_an_attribute_error():
    import inductor_quant

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = inductor_quant.no_such_name
