"""Sweeps of every family as far as they go without a GPU: workers, time box, resuming, tables."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import bench_systems  # noqa: E402
import models_candidates  # noqa: E402
import models_field  # noqa: E402
import tune_check  # noqa: E402
import tune_family  # noqa: E402
import tune_worker  # noqa: E402

from inductor_quant.kernels import KERNELS, measured  # noqa: E402
from inductor_quant.kernels.config import Device, parse_config  # noqa: E402

# Without torch. "slow" and what takes its name from it take 6 us, "fast" 4; one is wrong.
WORKER = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from bench_systems import serve

NAMES = ["w8a8_mm 32x64x128_w4_s4_g8", "w8a8_mm 64x64x128_w4_s4_g8", "w8a8_mm 64x32x128_w4_s4_g8"]
US = dict(zip(NAMES, (6.0, 4.0, 4.1)))

def compile(case, name):
    if name == NAMES[2] and case[1] == 64:
        return {{"failed": "wrong: relative RMS error 1"}}
    return {{"chosen": NAMES[0] if name in ("default", "max-autotune") else name}}

serve({{
    "machine": lambda: {{"gpu": "H200", "torch": "2", "triton": "3", "date": "today",
                         "arch": 90, "num_sms": 132}},
    "describe": lambda case, name: compile(case, name) | {{"choices": NAMES, "key": "a key"}},
    "compile": compile,
    "time": lambda case, names: {{name: US.get(name, 6.0) for name in names}},
    "forget": dict,
}})
"""
FAST = "w8a8_mm 64x64x128_w4_s4_g8"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    monkeypatch.setattr(models_field, "WORKER", path)
    monkeypatch.setattr(models_field, "TIMING_S", 0)


def run_main(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", ["examples/prog.py", *map(str, arguments)])
    return module.main()


def test_a_sweep_becomes_a_table_that_the_package_reads(worker, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.json"
    arguments = ("--family", "w8a8", "--workers", 2, "--nk", 64, 128, "--json", path)
    assert run_main(monkeypatch, tune_family, *arguments, "--m", 16, 64) == 0
    first = json.loads(path.read_text())
    assert [(row["m"], row["left"], row["best"]) for row in first["rows"]] == [
        (16, 0, FAST),
        (64, 0, FAST),
    ]
    assert first["rows"][1]["systems"]["w8a8_mm 64x32x128_w4_s4_g8"]["failed"].startswith("wrong")
    # what is there is not measured again; other rows come to it
    assert run_main(monkeypatch, tune_family, *arguments, "--m", 16, 64, 32) == 0
    assert json.loads(path.read_text())["rows"][:2] == first["rows"]
    assert run_main(monkeypatch, tune_family, "--table", path, "--out", tmp_path) == 0
    assert "3 GEMMs measured, a rule is beaten in 3" in capsys.readouterr().out
    table = measured.parse(json.loads((tmp_path / "w8a8_sm90.json").read_text()))
    command = "examples/tune_family.py --family w8a8 --m 16 64{} --nk 64 128"
    assert table.measured["by"] == f"{command.format('')}; {command.format(' 32')}"
    assert [(row.m, row.us[1], row.rule_us[1]) for row in table.rows] == [
        (m, 4.0, 6.0) for m in (16, 32, 64)
    ]
    near = {row.m: row.choices for row in table.rows}
    assert near == {16: (FAST, "w8a8_mm 64x32x128_w4_s4_g8"), 32: near[16], 64: (FAST,)}
    # a later run's GEMMs replace the table's, the others stay
    later = json.loads(path.read_text())
    del later["rows"][1:]
    later["rows"][0]["ratios"]["default"] = [1, 1, 1]
    (tmp_path / "b.json").write_text(json.dumps(later))
    tune_family.merge([tmp_path / "b.json"], tmp_path)
    table = measured.parse(json.loads((tmp_path / "w8a8_sm90.json").read_text()))
    assert [row.m for row in table.rows] == [32, 64]
    # neither files nor tables of another card mix with them
    later["machine"]["num_sms"] = 114
    (tmp_path / "b.json").write_text(json.dumps(later))
    for paths, why in (
        ([path, tmp_path / "b.json"], "several cards"),
        ([tmp_path / "b.json"], "again"),
    ):
        with pytest.raises(SystemExit, match=why):
            tune_family.merge(paths, tmp_path)
    later["machine"]["gpu"] = "virtual H200"
    (tmp_path / "b.json").write_text(json.dumps(later))
    with pytest.raises(SystemExit, match="invented"):
        tune_family.merge([tmp_path / "b.json"], tune_family.CONFIGS)


def test_a_rule_that_is_as_good_gets_no_row_and_a_family_without_rows_no_table(tmp_path):
    times = {"default": {"us": [4.0, 4.1, 4.2]}, FAST: {"us": [3.9, 4.0, 4.1]}}
    row = {"family": "w8a8", "key": "k", "m": 1, "n": 2, "k": 3, "best": FAST}
    row |= {"finals": list(times), "systems": times, "ratios": {"default": [1.0, 1.03, 1.05]}}
    assert tune_family.table_row(row) is None
    machine = dict.fromkeys(("gpu", "torch", "triton", "date"), "x") | {"arch": 90, "num_sms": 132}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"machine": machine, "by": "x", "rows": [row]}))
    assert "no table" in tune_family.merge([path], tmp_path)[0]
    assert list(tmp_path.iterdir()) == [path]
    times["default"]["us"] = [4.2, 4.3, 4.4]
    assert tune_family.table_row(row)["choices"] == [FAST]


def test_a_case_that_is_cut_by_the_time_says_so_and_is_swept_anew(worker, tmp_path, monkeypatch):
    # a second passes whenever someone looks: before the batch, twice in describing, at each choice
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(models_field, "time", clock)
    case = ("w8a8", 16, 64, 128)
    with models_field.open_field("cuda", 1) as (field, machine):
        results = bench_systems.Results(None, {"machine": machine}, models_field.KEY)
        [row] = models_field.sweep(field, [case], results, until=4)
        assert row["left"] == 2
        [row] = models_field.sweep(field, [case], results, until=1000)
        assert row["left"] == 0
        assert results.rows == [row]


def test_the_check_judges_what_is_swept_to_the_end(worker, tmp_path, monkeypatch, capsys):
    path = tmp_path / "c.json"
    arguments = ("--workers", 2, "--nk", 64, 128, "--m", 16, "--json", path)
    assert run_main(monkeypatch, tune_check, *arguments) == 1
    out = capsys.readouterr().out
    assert "default: at most 1.500 of the best on 1 of 1 shapes; 1 beyond the limit of 1.1" in out
    raw = json.loads(path.read_text())
    for name, ratio in (("default", 1.1), ("max-autotune", 1.03)):
        raw["rows"][0]["ratios"][name] = [ratio] * 3
    path.write_text(json.dumps(raw))
    assert run_main(monkeypatch, tune_check, "--merge", path) == 0
    raw["rows"][0]["left"] = 1
    path.write_text(json.dumps(raw))
    assert run_main(monkeypatch, tune_check, "--merge", path) == 1


def test_every_kernel_of_a_gemm_has_a_space_or_a_list_of_its_own():
    names = {kernel.name for kernel in KERNELS if kernel.family != "weight_only_dequantize"}
    assert set(models_candidates.SPACES) <= names
    assert names - set(models_candidates.SPACES) == {
        *("w8a8_gluon", "fp8_gluon", "fp8_block_gluon", "w8a8_few_gluon", "fp8_block_few_gluon"),
        *("fp8_block_pairs", "w8a8_few_quantizing"),
    }


@pytest.mark.compiles
@pytest.mark.parametrize(("family", "m"), [("weight_only", 16), ("fp8_block", 64)])
def test_a_swept_configuration_is_legal_compiles_and_becomes_the_default(family, m, monkeypatch):
    worker, case = tune_worker.Worker("virtual"), (family, m, 4096, 4096)
    with tune_worker.watched() as asked:
        found = worker.describe(case, "default")
    [(op, spec, problem, device)] = asked
    choices = found["choices"]
    assert len(choices) >= 50
    assert choices[0] == found["chosen"]
    kernels = {kernel.name: kernel for kernel in KERNELS}
    for text in choices:
        name, _, config = text.rpartition(" ")
        assert kernels[name].legal(spec, problem, parse_config(config), device) is None
    last = choices[-1]
    compiled = worker.compile(case, last)
    assert compiled["chosen"] == last != choices[0]
    assert compiled["spills"] == 0
    assert compiled["shared"] <= Device(90, 132, 232448).shared_memory
    row = {"key": found["key"], "m": m, "n": 4096, "k": 4096, "choices": [last]}
    table = {
        "family": op,
        **worker.device.machine(),
        "measured": dict.fromkeys(measured.PROVENANCE, "x"),
        "rows": [{**row, "us": [1, 1, 1], "rule_us": [2, 2, 2]}],
    }
    monkeypatch.setattr(measured, "load", lambda *_: measured.parse(table))
    assert worker.compile(case, "default")["chosen"] == last
