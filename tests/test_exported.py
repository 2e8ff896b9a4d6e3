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
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
        # as if there were a kernel for a CPU; the lowering then does without
        patch.setattr(pipeline, "_policy", lambda *_: None)
        # (the activation of w8a8 is quantized in Triton's assembly)
        models = {"gptq": exported.models()["gptq"]}
        patch.setattr(exported, "models", lambda: models)
        matched = exported.export(folder, (16,), "cpu")
    return folder, matched


def test_exported_models_are_matched(packages):
    assert packages[1] == {"gptq_16": 2}


def test_packages_run_in_a_process_without_the_plugin(packages):
    found = exported.run(sorted(packages[0].glob("*.pt2")))
    assert found == {"gptq_16": (0, "equal")}
