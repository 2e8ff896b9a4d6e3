"""Models exported to AOTInductor on a CPU, where canonical ops are lowered to C++: a package needs
nothing of ours. (Kernels of a GPU: ``tests/gpu/test_exported_gpu.py``.)"""

from __future__ import annotations

import shutil

import pytest
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
