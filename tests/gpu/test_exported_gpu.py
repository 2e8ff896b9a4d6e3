"""torch.export and AOTInductor: a package runs in a process that knows nothing of us."""

from __future__ import annotations

import pytest

from tests.support import exported

pytestmark = pytest.mark.gpu

# name -> rows, kind of package
PACKAGES = {
    "one": (1, "folded"),
    "frozen": (16, "frozen"),
}
MATCHED = ["layers.act_order", "layers.gptq", "layers.w8a8.0", "layers.w8a8.2", "layers.zero"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return folder, exported.export_in_processes(folder, PACKAGES, "cuda")


def test_exported_models_are_matched(packages):
    _, matched = packages
    assert matched == dict.fromkeys(PACKAGES, MATCHED)


def test_packages_run_without_the_plugin_and_give_what_torch_compile_gives(packages):
    """Also once their constants are others, order of rows included."""
    folder, _ = packages
    found = exported.run([folder / f"{name}.pt2" for name in PACKAGES])
    again = "equal, then equal"
    assert found == {"one": (0, again), "frozen": (0, "equal")}
