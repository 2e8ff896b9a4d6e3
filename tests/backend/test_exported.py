"""Models exported to AOTInductor on a CPU, where canonical ops are lowered to C++: a package needs
nothing of ours. (Kernels of a GPU: ``tests/gpu/test_exported_gpu.py``.)"""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._inductor import config

from inductor_quant.patterns import graph_pass
from tests.support.forks import Program
from tests.support.graphs import exported

# The program reads the name of its package from stdin.
GIVEN = 'import io, sys\nsys.stdin = io.StringIO(sys.argv.pop() + "\\n")\n'

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]


def test_a_package_runs_in_a_process_without_the_plugin_with_other_constants_too(tmp_path, forks):
    """Tables of another order of rows are read, the sums of another weight computed; for more rows
    than it was exported with."""
    package = tmp_path / "folded.pt2"
    anew = config.patch(force_disable_caches=True)
    with pytest.MonkeyPatch.context() as patch, anew:
        # as if there were a kernel for a CPU; the lowering then does without
        patch.setattr(graph_pass, "_policy", lambda *_: None)
        # (the activation of w8a8 is quantized in Triton's assembly)
        module = exported.layers(("zero", "act_order"))
        matched = exported.export(module, package, 17, "cpu", "folded", dynamic=True)
    assert matched == ["layers.act_order", "layers.zero"]
    run = Program(GIVEN + exported.RUN, ("folded", "cpu", str(package)), str(tmp_path))
    assert forks.run(run) == ["equal, then equal"]


@pytest.mark.slow
def test_a_package_of_frozen_blocks(tmp_path, monkeypatch):
    """Their tables are constants of the package. (A CPU calls the op: this process has it.)"""
    package = tmp_path / "blocks.pt2"
    monkeypatch.setenv("CXX", exported.compiler())
    monkeypatch.setattr(graph_pass, "_policy", lambda *_: None)
    with config.patch(force_disable_caches=True):
        matched = exported.export(exported.layers(("blocks",)), package, 17, "cpu", "frozen")
    assert matched == ["layers.blocks"]
    (x, [want]), *_ = torch.load(package.with_suffix(".pt"))
    loaded = torch._inductor.aoti_load_package(str(package))
    [got] = loaded(x)
    assert torch.equal(got, want)
    assert sum("int32" in name for name in loaded.get_constant_fqns()) == 3  # crow, col, order
