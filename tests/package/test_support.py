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


def test_errors_that_are_no_hazards_are_kept():
    errors = ["========= Error: process didn't terminate", "========= Internal Sanitizer Error"]
    text = "\n".join([REPORT.format(3, 3), *errors, "========= Warning: a limit"])
    assert racecheck.other_errors(text) == errors


def test_names_of_file_and_kernel_may_be_exchanged_and_a_line_may_stand_in_another_report(tmp_path):
    (tmp_path / "c6.py").write_text(KERNEL)
    short = "\n========= Warning: Race reported between Read access at /x/c6.py+0x630\n"
    long = short.rstrip() + " in triton_tem_fused_0:{}\n"
    assert racecheck.own_hazards(short + long.format(8), tmp_path) == (2, [])
    assert len(racecheck.own_hazards(short + long.format(7), tmp_path)[1]) == 2
    assert len(racecheck.own_hazards(short, tmp_path)[1]) == 1


def test_a_failure_with_this_package_alone_is_ours_to_explain():
    passed, failed, skipped = ("passed", "", 1), ("failed", "why\n", 0), ("skipped", "", 0)
    ours = {"a": passed, "b": failed, "c": skipped}

    def verdict(again, without, names="abc"):
        return upstream.verdict(list(names), ours, {"b": again}, {"b": without})

    lines, is_ours = verdict(failed, failed)
    assert not is_ours
    assert lines[-2:] == [
        "1 fail without this package as well",
        "0 of 3 failed with this package only",
    ]
    for again in (failed, passed):
        for without in (passed, skipped):
            lines, is_ours = verdict(again, without)
            assert is_ours
            states = f"failed with, {again[0]} when run again, {without[0]} without"
            assert lines[:2] == [f"b: {states}\nwhy\n", "1 of them: why"]
    assert upstream.verdict(["b"], {"b": failed}, {}, {})[1], "not known how it is without"
    lines, is_ours = verdict(failed, failed, "abcde")
    assert is_ours
    assert lines[0] == "2 of 5 were not run, from d on"
    assert upstream.verdict([], {}, {}, {})[1], "nothing ran"


def test_each_reason_is_counted_once_however_many_tests_give_it():
    raised = "test_x.py:3: in test\n    check()\nE   AssertionError: 0 != 1\nE   torch's advice\n"
    ours = dict.fromkeys("ab", ("failed", raised, 1)) | {"c": ("failed", "crashed\n", 0)}
    lines, _ = upstream.verdict(list("abc"), ours, {}, {})
    assert lines[3:5] == ["2 of them: AssertionError: 0 != 1", "1 of them: crashed"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("-n", "2")])
def test_what_fails_runs_again_with_and_without(tmp_path, arguments, capsys):
    """Tests that fail always, with us only, once only, and never."""
    (tmp_path / "test_theirs.py").write_text(
        "import inductor_quant.backend, pathlib, pytest\n"
        "def test_a():\n    options = inductor_quant.backend._process_options\n"
        "    assert options is None, f'enabled, {options.max_choices}'\n"
        "def test_b(): pass\n"
        "@pytest.mark.skip\ndef test_c(): pass\n"
        "def test_d(): assert False\n"
        "def test_e():\n    path = pathlib.Path('begun')\n"
        "    assert path.exists() or path.write_text('x') is None\n"
    )
    out = tmp_path / "out"
    command = [str(tmp_path), "--tests", "test_theirs.py", "--out", str(out), "--max-choices", "3"]
    command += ["--", *arguments]
    assert upstream.main(command) == 1
    found = {
        run: {name[-1]: outcome for name, (outcome, _, _) in upstream.outcomes(out, run).items()}
        for run in ("with", "again", "without")
    }
    failed, passed = "failed", "passed"
    assert found["with"] == {"a": failed, "b": passed, "c": "skipped", "d": failed, "e": failed}
    assert found["again"] == {"a": failed, "d": failed, "e": passed}
    assert found["without"] == {"a": passed, "d": failed, "e": passed}
    assert "enabled, 3" in upstream.outcomes(out, "with")["test_theirs.py::test_a"][1]
    assert {path.name for path in out.glob("*.xml")} == {f"{run}.xml" for run in found}
    printed = capsys.readouterr().out
    assert "test_e: failed with, passed when run again, passed without" in printed
    assert "2 of 5 failed with this package only" in printed


@pytest.mark.slow
def test_files_are_tested_beside_each_other_as_if_alone(tmp_path):
    """One allows TF32 when it is imported; max-autotune is limited in all."""
    check = "def test(): assert torch.get_float32_matmul_precision() == {!r}\n"
    (tmp_path / "test_a.py").write_text(
        f"import torch\ntorch.set_float32_matmul_precision('high')\n{check.format('high')}"
    )
    (tmp_path / "test_b.py").write_text(
        f"import torch\nimport torch._inductor.config as config\n{check.format('highest')}"
        "def test_limit(): assert config.test_configs.max_mm_configs == 3\n"
    )
    out = tmp_path / "out"
    files = ["test_a.py", "test_b.py"]
    command = [str(tmp_path), "--tests", *files, "--out", str(out), "--max-choices", "3"]
    assert upstream.main(command) == 0, (out / "with.log").read_text()
    assert {name for name, _, _ in upstream.outcomes(out, "with").values()} == {"passed"}


@pytest.mark.slow
def test_a_budget_that_is_spent_leaves_what_has_run(tmp_path, capsys):
    (tmp_path / "test_theirs.py").write_text(
        "import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\n"
    )
    out = tmp_path / "out"
    command = [str(tmp_path), "--tests", "test_theirs.py", "--out", str(out), "--budget", "40"]
    assert upstream.main(command) == 1
    assert "1 of 2 were not run, from test_theirs.py::test_b on" in capsys.readouterr().out
    assert 'name="test_a"' in (out / "with.xml").read_text()
