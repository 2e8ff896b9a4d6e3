"""What the scripts of tests/support conclude from other programs' output."""

from __future__ import annotations

import pytest

from tests.support import upstream
from tests.support.gpu import racecheck

KERNEL = """
@gluon.jit
def triton_tem_fused_0(arg_X):
    x = tma.make_tensor_descriptor(
        arg_X, [64, 64]
    )
    y = tile.load()
    gl.warp_specialize([(first, (x,))], [1], [24])
"""
REPORT = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at triton_tem_fused_0+0x1b0 in c6.py:{}
=========     and Write access at triton_tem_fused_0+0x8e50 in c6.py:{} [253 hazards]
=========
KERNEL w8a8_mm ok (0.2 s)
"""


def test_a_hazard_is_the_kernels_own_unless_each_access_is_of_tritons_constructs(tmp_path):
    (tmp_path / "c6").mkdir()
    (tmp_path / "c6" / "c6.py").write_text(KERNEL)

    def own(*lines):
        text = "".join(REPORT.format(*pair) for pair in lines)
        count, found = racecheck.own_hazards(text, tmp_path)
        assert count == len(lines)
        return found

    assert own((3, 3), (3, 8), (5, 5)) == []
    assert len(own((3, 7), (8, 3), (7, 7))) == 2
    assert len(racecheck.own_hazards(REPORT.format(3, 3), tmp_path / "c6" / "none")[1]) == 1


def test_a_failure_with_this_package_alone_is_ours_to_explain():
    passed, failed = ("passed", "", 1), ("failed", "why\n", 0)
    skipped = ("skipped", "", 0)
    before = {"a": passed, "b": failed, "c": failed, "d": skipped}
    lines, is_ours = upstream.compare(before, {**before, "c": passed})
    assert not is_ours
    assert lines[0].startswith("c: failed without, passed with")
    lines, is_ours = upstream.compare(before, {**before, "a": failed})
    assert is_ours
    assert lines[0] == "a: passed without, failed with\nwhy\n"
    assert upstream.compare(before, {"a": passed})[1], "three ran in one run only"
    assert upstream.compare({}, {})[1], "nothing ran"


@pytest.mark.slow
def test_both_runs_are_compared(tmp_path):
    """Of a failing, a passing and a skipped test, run by pytest with and without."""
    (tmp_path / "test_theirs.py").write_text(
        "import inductor_quant.backend, pytest\n"
        "def test_a(): assert inductor_quant.backend._process_options is None, 'enabled'\n"
        "def test_b(): pass\n"
        "@pytest.mark.skip\ndef test_c(): pass\n"
    )
    out = tmp_path / "out"
    assert upstream.main([str(tmp_path), "--tests", "test_theirs.py", "--out", str(out)]) == 1
    found = {run: upstream.outcomes(out, run) for run in (upstream.WITHOUT, upstream.WITH)}
    assert [outcome[0] for outcome in found["without"].values()] == ["passed", "passed", "skipped"]
    assert [outcome[0] for outcome in found["with"].values()] == ["failed", "passed", "skipped"]
    assert "enabled" in found["with"]["test_theirs.py::test_a"][1]
