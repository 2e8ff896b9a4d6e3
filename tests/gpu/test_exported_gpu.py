"""torch.export and AOTInductor: a package runs in a process that knows nothing of us."""

from __future__ import annotations

import pytest

from tests.support.graphs import exported

pytestmark = pytest.mark.gpu

# name -> rows, kind of package
PACKAGES = {
    "one": (1, "folded"),
    "frozen": (16, "frozen"),
}
MATCHED = ["layers.act_order", "layers.gptq", "layers.w8a8.0", "layers.zero"]


def test_packages_run_without_the_plugin_and_give_what_torch_compile_gives(tmp_path):
    """Also once their constants are others, order of rows included."""
    found = exported.export_and_run(tmp_path, PACKAGES, "cuda")
    assert found == {"one": (MATCHED, "equal, then equal"), "frozen": (MATCHED, "equal")}


def test_a_package_of_frozen_blocks(tmp_path):
    """Which blocks a weight has is known of frozen tables only."""
    found = exported.export_and_run(tmp_path, {"blocks": (16, "frozen", "blocks")}, "cuda")
    assert found == {"blocks": (["layers.blocks"], "equal")}


def test_a_package_of_int4_weights_and_int8_activations(tmp_path):
    packages = {"int4": (32, "folded", "w4a8")}
    found = exported.export_and_run(tmp_path, packages, "cuda")
    assert found == {"int4": (["layers.w4a8"], "equal, then equal")}
