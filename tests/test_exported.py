"""Models exported to AOTInductor on a CPU, where canonical ops are lowered to C++: a package needs
nothing of ours. (Kernels of a GPU: ``tests/gpu/test_exported_gpu.py``.)"""

from __future__ import annotations

import shutil

import pytest
from torch._inductor import config

from inductor_quant.patterns import pipeline
from tests.support import exported

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "folded.pt2"
    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
        # as if there were a kernel for a CPU; the lowering then does without
        patch.setattr(pipeline, "_policy", lambda *_: None)
        # (the activation of w8a8 is quantized in Triton's assembly)
        module = exported.layers(("zero", "gptq", "act_order"))
        matched = exported.export(module, path, 17, "cpu", "folded")
    return path, matched


def test_exported_models_are_matched(package):
    assert package[1] == ["layers.act_order", "layers.gptq", "layers.zero"]


def test_a_package_runs_in_a_process_without_the_plugin_with_other_constants_too(package):
    """Tables of another order of rows are read, the sums of another weight computed."""
    found = exported.run([package[0]])
    assert found == {"folded": (0, "equal, then equal")}
