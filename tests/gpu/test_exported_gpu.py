"""torch.export and AOTInductor: a package runs in a process that knows nothing of us."""

from __future__ import annotations

import pytest

from tests.support.exported import export, run

pytestmark = pytest.mark.gpu

ROWS = (1, 16, 2048)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return folder, export(folder, ROWS, "cuda")


def test_exported_models_are_matched(exported):
    _, matched = exported
    for rows in ROWS:
        is_few = rows < 2048  # with more, weight-only is left to the graph
        assert matched[f"w8a8_{rows}"] == 2
        assert matched[f"gptq_{rows}"] == (2 if is_few else 0)
        assert matched[f"act_order_{rows}"] == (1 if is_few else 0)


def test_packages_run_without_the_plugin_and_give_what_torch_compile_gives(exported):
    folder, _ = exported
    control = run(sorted(folder.glob("plain_*.pt2")))
    if any(status for status, _ in control.values()):
        pytest.skip(f"stock torch's own packages do not load on this machine: {control}")
    found = run(sorted(set(folder.glob("*.pt2")) - set(folder.glob("plain_*.pt2"))))
    assert {name: line for name, (_, line) in found.items() if line != "equal"} == {}
    assert len(found) == 3 * len(ROWS)
