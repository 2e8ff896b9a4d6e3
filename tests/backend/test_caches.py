"""A stale cache is a wrong answer: what the cache key covers, and that Inductor honours it.

The programs here compile for real CPU tensors with the kernels in Triton's interpreter, so that a
result shows which kernel computed it.
"""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

import inductor_quant
from inductor_quant.options import Options
from inductor_quant.patterns import graph_pass
from inductor_quant.patterns.graph_pass import for_options
from inductor_quant.simulate import generate, virtual_gpu
from tests.support.forks import Program

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).parents[2]
TEMPLATE = Path("inductor_quant/kernels/scaled_mm/epilogue.jinja")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture
def package(tmp_path):
    """A copy of the package, linked folder included."""
    return copy_package(tmp_path / "package")


def copy_package(folder):
    folder.mkdir()
    shutil.copytree(ROOT / "patterns", folder / "patterns", ignore=IGNORED)
    shutil.copytree(
        ROOT / "inductor_quant", folder / "inductor_quant", ignore=IGNORED, symlinks=True
    )
    return folder


# ------------------------------------------------------------------------------------------
# the key

HASHED = sorted(
    path.relative_to(ROOT)
    for folder in ("inductor_quant", "patterns")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".jinja", ".json") and "inductor_quant/patterns" not in str(path)
)


@pytest.fixture
def source_hash(package, monkeypatch):
    """``source_hash`` of the copy."""
    monkeypatch.setattr(graph_pass, "__file__", str(package / "patterns/graph_pass.py"))
    monkeypatch.setattr(inductor_quant, "__file__", str(package / "inductor_quant/__init__.py"))
    return graph_pass.source_hash.__wrapped__


def test_the_hash_changes_with_the_files_of_both_folders(source_hash, package):
    """One of each kind in each folder: every file would take the square of their number."""
    before = source_hash()
    unnoticed = []
    for name in {(name.parent, name.suffix): name for name in HASHED}.values():
        content = (package / name).read_bytes()
        (package / name).write_bytes(content + b"\n")
        unnoticed += [name] if source_hash() == before else []
        (package / name).write_bytes(content)
    assert unnoticed == []
    assert source_hash() == before


def test_the_hash_covers_both_folders_and_templates_and_tables():
    names = {str(path) for path in HASHED}
    assert {"patterns/graph_pass.py", "inductor_quant/lowering/w8a8.py", str(TEMPLATE)} <= names
    assert "inductor_quant/kernels/tuning/configs/w8a8_mm_sm90.json" in names


def test_the_hash_changes_with_a_new_name_and_a_new_file(source_hash, package):
    before = source_hash()
    (package / "patterns/new.py").touch()
    added = source_hash()
    (package / "patterns/new.py").rename(package / "patterns/newer.py")
    assert len({before, added, source_hash()}) == 3


def test_the_hash_does_not_change_when_python_compiles_the_files(source_hash, package):
    before = source_hash()
    for folder in ("inductor_quant", "patterns"):
        (package / folder / "__pycache__").mkdir()
        (package / folder / "__pycache__/report.cpython-311.pyc").touch()
    assert source_hash() == before


def test_the_uuid_changes_with_options():
    ids = {
        for_options(options).uuid()
        for options in (
            Options(),
            Options(families=()),
            Options(include_modules=("a",)),
            Options(exclude_modules=("a",)),
            Options(on_error="raise"),
            Options(max_choices=1),
        )
    }
    assert len(ids) == 6


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_uuid_changes_with_versions(monkeypatch, name):
    before = for_options(Options()).uuid()
    monkeypatch.setattr(getattr(graph_pass, name), "__version__", "0.0.0")
    assert for_options(Options()).uuid() != before


def test_the_uuid_of_an_enabled_pass_is_that_of_its_options():
    from inductor_quant import backend

    ambient = backend._ambient_pass()
    inactive = ambient.uuid()
    with backend.enabled(max_choices=3):
        assert ambient.uuid() == for_options(Options(max_choices=3)).uuid() != inactive
    assert ambient.uuid() == inactive


# ------------------------------------------------------------------------------------------
# Inductor's caches, between processes

PROGRAM = """
import json, os, sys, torch
from torch._dynamo.utils import counters
from torch._inductor import config
import inductor_quant
from inductor_quant.simulate import interpreted_cpu

def scaled(a, b, a_scale):
    return torch._int_mm(a, b) * a_scale

a = torch.arange(32 * 64).remainder(17).sub(8).reshape(32, 64).to(torch.int8)
b = torch.arange(64 * 48).remainder(13).sub(6).reshape(64, 48).to(torch.int8)
a_scale = torch.arange(1.0, 33.0).reshape(32, 1)
exact = a.double() @ b.double() * a_scale
results = {}
for name in sys.argv[1:]:
    torch._dynamo.reset()
    counters.clear()
    os.environ["INDUCTOR_QUANT_DISABLE"] = "01"[name == "disabled"]
    backend = "inductor" if name == "inductor" else "inductor_quant"
    with interpreted_cpu(), config.patch(force_disable_caches=False, fx_graph_cache=True):
        out = torch.compile(scaled, backend=backend)(a, b, a_scale)
    is_exact = torch.equal(out.double(), exact)
    results[name] = {
        "factor": 1 if is_exact else out.sum().item() / exact.sum().item(),
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
    }
print(json.dumps([os.path.dirname(os.path.dirname(inductor_quant.__file__)), results]))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory, interpreter_forks):
    """What processes computed that share one cache, two at a time; in this order."""
    folder = tmp_path_factory.mktemp("caches")
    cache = folder / "cache"
    cache.mkdir()
    package, edited = copy_package(folder / "package"), copy_package(folder / "edited")
    template, line = (edited / TEMPLATE).read_text(), "out = {{acc}}.to({{lib}}.float32)"
    assert template.count(f"{line}\n") == 1
    (edited / TEMPLATE).write_text(template.replace(line, f"{line} * 2"))

    def program(package, *names):
        return Program(PROGRAM, names, str(package), {"TORCHINDUCTOR_CACHE_DIR": str(cache)})

    found = {}
    for together in (
        (program(package, "cold"), program(package, "cold too")),
        (program(package, "warm"), program(edited, "edited")),
        (program(edited, "inductor", "disabled"),),
    ):
        for job, line in zip(together, interpreter_forks.run(*together), strict=True):
            used, results = json.loads(line)
            assert used == job.path
            found.update(results)
    return found


def test_two_processes_may_fill_one_cache_at_once(results):
    assert results["cold"]["factor"] == results["cold too"]["factor"] == 1
    assert results["cold"]["misses"] + results["cold too"]["misses"] >= 1


def test_a_warm_cache_serves_the_same_plugin(results):
    assert results["warm"] == {"factor": 1, "hits": 1, "misses": 0}


def test_an_edited_template_is_not_served_its_old_kernel(results):
    assert results["edited"] == {"factor": 2, "hits": 0, "misses": 1}


@pytest.mark.parametrize("name", ["disabled", "inductor"])
def test_a_compilation_without_the_plugin_is_not_served_our_kernel(results, name):
    """The kernel in the cache that must not be served is the one that gives twice the result."""
    assert results[name]["factor"] == 1
    assert results["disabled"]["misses"] + results["inductor"]["misses"] >= 1


# ------------------------------------------------------------------------------------------
# threads and cards of one process


def scaled(a, b, a_scale):
    return torch._int_mm(a, b) * a_scale


def make_inputs(device, m=32):
    return (
        torch.zeros(m, 64, dtype=torch.int8, device=device),
        torch.zeros(64, 48, dtype=torch.int8, device=device),
        torch.ones(m, 1, device=device),
    )


def test_two_threads_compile_at_once():
    from torch._subclasses.fake_tensor import FakeTensorMode

    start = threading.Barrier(2)
    outputs, errors = {}, []

    def work(m):
        def fn(a, b, a_scale):
            return scaled(a, b, a_scale) + m

        try:
            with FakeTensorMode(), torch.no_grad():
                args = make_inputs("cuda", m)
                start.wait(60)
                outputs[m] = torch.compile(fn, backend="inductor_quant")(*args)
        except BaseException as error:
            errors.append(error)

    with virtual_gpu() as trace:
        threads = [threading.Thread(target=work, args=(m,)) for m in (32, 48)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch._dynamo.reset()
    assert errors == []
    assert {m: tuple(out.shape) for m, out in outputs.items()} == {32: (32, 48), 48: (48, 48)}
    assert sum("w8a8" in wrapper for wrapper in trace.wrappers) == 2


@pytest.mark.parametrize("index", [0, 1])
def test_the_kernel_is_launched_on_the_card_of_its_inputs(index):
    def make(device):
        return make_inputs(f"{device}:{index}" if device == "cuda" else device)

    generated = generate(scaled, make, backend="inductor_quant")
    assert any("w8a8" in name for name in generated.kernels)
    assert f"torch.cuda._DeviceGuard({index})" in generated.wrapper
    assert f"get_raw_stream({index})" in generated.wrapper
    assert str(generated.output.device) == f"cuda:{index}"
