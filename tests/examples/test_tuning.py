"""The tuning tools without a GPU: the cost model, the rendered template, sweeps of a GEMM."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import types

import pytest
import torch

from examples.benchmarks import harness
from examples.tuning import candidates, check, field, sweep
from examples.tuning.worker import Worker, watched
from inductor_quant import simulate
from inductor_quant.kernels import KERNELS
from inductor_quant.kernels.config import GemmConfig, parse_config
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.kernels.tuning.cost_model import MeasuredConfig
from inductor_quant.ops import w8a8
from tests.examples.sweep_worker import FAST
from tests.support.benchmarks import run_main
from tests.support.sampling import sampled

# ------------------------------------------------------------------------------------------
# the table of a kernel

SHAPES = [(m, n, k) for m in (16, 64, 256, 4096) for n, k in ((4096, 4096), (6144, 1536))]


@pytest.fixture
def cost():
    pytest.importorskip("scipy")
    from examples.tuning import cost

    return cost


@pytest.fixture
def card(cost):
    return cost.Card("H200", 90, 132, 232448, 233472, 65536, 2048)


def known_models():
    """Configurations whose times follow the model exactly."""
    return [
        MeasuredConfig(GemmConfig(16, 32, 256, 2, 5), 3, 4.3, 0.08, 0.12),
        MeasuredConfig(GemmConfig(64, 64, 128, 4, 4), 3, 2.5, 0.17, 0.05),
        MeasuredConfig(GemmConfig(128, 128, 128, 8, 3), 2, 4.0, 0.05, 0.25),
    ]


def samples_of(models):
    return {s: {e.config: e.predict(Problem(*s), 132) for e in models} for s in SHAPES}


def test_fit_finds_the_constants_and_leave_one_out_too(cost):
    samples = samples_of(known_models())
    for entry in known_models():
        for without in (None, SHAPES[0]):
            found = cost.fit(entry.config, entry.ctas_per_sm, samples, 132, without)
            for name in ("fixed_us", "step_us", "step_us_per_cta"):
                assert getattr(found, name) == pytest.approx(getattr(entry, name), abs=2e-3)


def test_the_cover_takes_what_complements_first(cost):
    good, other, useless = (e.config for e in known_models())
    samples = {
        (16, 1, 1): {good: 1.0, other: 2.0, useless: 1.9},
        (64, 1, 1): {good: 2.0, other: 1.0, useless: 1.9},
    }
    assert set(cost.select(samples, 2)) == {good, other}
    assert len(cost.select(samples, 9)) == 3


def test_the_table_reads_back_and_exact_samples_have_no_regret(cost, card, tmp_path):
    samples = samples_of(known_models())
    ctas = {e.config: e.ctas_per_sm for e in known_models()}
    measured = dict.fromkeys(cost_model.PROVENANCE, "x")
    made = cost.make_table("w8a8_mm", card, measured, sorted(ctas), ctas, samples, samples)
    cost.write_table(made, tmp_path / "table.json")
    text = (tmp_path / "table.json").read_text()
    assert cost_model.parse(json.loads(text)) == made
    assert len(text.splitlines()) == 8 + len(ctas) + len(SHAPES)
    for leave_out_of in (None, samples):
        regret = cost.regrets(made, card, samples, leave_out_of)
        assert max(regret["model"]) == pytest.approx(1, abs=0.02)


def test_occupancy_counts_registers_and_shared_memory(card):
    config = GemmConfig(128, 128, 128, 8, 3)
    assert card.ctas_per_sm(config, registers=116, shared=98304) == 2
    assert card.ctas_per_sm(config, registers=160, shared=98304) == 1
    assert card.ctas_per_sm(config, registers=116, shared=200000) == 1


def test_every_shape_has_candidates_and_old_measurements_are_refitted(
    card, tmp_path, monkeypatch, capsys
):
    from examples.tuning import fit_table

    assert {kernel.name for kernel in TUNED} <= set(candidates.SPACES)
    for kernel in TUNED:
        found = candidates.candidates(kernel, card.device(), [8])
        shapes = fit_table.shapes(kernel, card.device())
        assert len(found) >= 6
        assert all(sum(candidates.suits(c, s) for c in found) >= 6 for s in shapes)
    store = fit_table.Store(tmp_path / "samples.json")
    store.sweep = samples_of(known_models())
    store.resources = {e.config: (100, 65536) for e in known_models()}
    store.machine = {"card": dataclasses.asdict(card), "torch": "1", "triton": "1", "date": "x"}
    store.save()
    again = fit_table.Store(tmp_path / "samples.json")
    assert (again.sweep, again.resources) == (store.sweep, store.resources)
    out = tmp_path / "table.json"
    arguments = ("--samples", store.path, "--fit-only", "--out", out)
    assert run_main(monkeypatch, fit_table, *arguments) == 0
    assert len(cost_model.parse(json.loads(out.read_text())).configs) == 3
    assert "leave one out" in capsys.readouterr().out


def test_a_winner_of_one_final_gets_its_constants_from_the_sweep(card, tmp_path, monkeypatch):
    from examples.tuning import fit_table

    store = fit_table.Store(tmp_path / "samples.json")
    store.sweep = samples_of(known_models())
    store.resources = {e.config: (100, 65536) for e in known_models()}
    store.machine = {"card": dataclasses.asdict(card), "torch": "1", "triton": "1", "date": "x"}
    small, middle, large = (e.config for e in known_models())
    # the finals of every shape but one leave ``small`` out
    store.finals = {s: {middle: store.sweep[s][middle], large: 900.0} for s in SHAPES}
    store.finals[SHAPES[0]][small] = store.sweep[SHAPES[0]][small]
    store.save()
    out = tmp_path / "table.json"
    arguments = ("--samples", store.path, "--fit-only", "--out", out, "--max-regret", 9)
    assert run_main(monkeypatch, fit_table, *arguments) == 0
    made = {e.config: e for e in cost_model.parse(json.loads(out.read_text())).configs}
    assert made[small].fixed_us > 3
    assert made[small].step_us_per_cta > 0.05


TUNED = [kernel for kernel in KERNELS if kernel.name in sweep.TUNED]


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize("kernel", TUNED, ids=lambda kernel: kernel.name)
def test_the_rendered_template_compiles_to_what_inductor_makes_of_it(kernel, card, tmp_path):
    config = GemmConfig(128, 128, 128, 8 if "block" in kernel.name else 4, 3)
    spec = sweep.TUNED[kernel.name].spec()
    constants = kernel.constants(spec, sweep.EVEN, config, card.device())
    source, tensors, sizes = sweep.render(kernel, constants)
    element = "*i8" if kernel.family == "w8a8" else "*fp8e4nv"
    types = {"A": element, "B": element, "A_SCALE": "*fp32", "B_SCALE": "*fp32", "OUT": "*bf16"}
    ones = dict.fromkeys(("A_stride1", "B_stride0", "A_SCALE_stride0", "B_SCALE_stride1"), 1)
    ones = {name: 1 for name in ones if name in sizes}
    signature = {name: types[name] for name in (*tensors, "OUT")}
    signature |= {name: "i32" for name in sizes if name not in ones}
    blocks = {k: v for k, v in sweep.keywords(config).items() if not k.startswith("num")}
    compiled = simulate.compile_jit(
        sweep.load_kernel(source, str(tmp_path)),
        signature,
        {**blocks, **ones, **sweep.numeric(constants)},
        arch=90,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        divisible_by_16=tuple(signature),
    )
    assert compiled.spill_stores == 0
    staging = 32 * 1024 if config.num_warps == 8 else 8 * 1024  # of the result; barriers
    staging = staging + 32 if kernel.name.endswith("persistent") else 0
    scales = 4 * (128 + 128) if "block" in kernel.name else 0
    assert compiled.shared_bytes <= config.num_stages * ((128 + 128) * 128 + scales) + staging
    assert any(name.startswith("wgmma") for name in compiled.matrix_instructions())


@pytest.mark.interp
def test_the_rendered_template_computes_the_canonical_op(monkeypatch):
    simulate.install()
    monkeypatch.setattr(sweep, "WEIGHT_BYTES", 2**14)
    [kernel] = [kernel for kernel in KERNELS if kernel.name == "w8a8_mm"]
    config, shape = GemmConfig(16, 32, 64, 2, 3), (40, 48, 128)
    swept = sweep.Sweep(kernel, [config], device="cpu")
    arguments = swept.arguments(*shape)
    assert len(arguments) == 2**14 // (48 * 128)
    swept.launch(shape, config, arguments[1])
    a, b, a_scale, b_scale, out = arguments[1][:5]
    expected = w8a8.reference(a, b, a_scale, b_scale, None, out_dtype=torch.bfloat16)
    assert torch.equal(out, expected)
    assert math.isfinite(out.float().sum())


# ------------------------------------------------------------------------------------------
# sweeps of a GEMM


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(field, "WORKER", "tests.examples.sweep_worker")
    monkeypatch.setattr(field, "TIMING_S", 0)


def test_a_case_that_is_cut_by_the_time_says_so_and_is_swept_anew(worker, tmp_path, monkeypatch):
    # each look at the clock takes a second: before the batch, twice in describing, at each choice
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(field, "time", clock)
    case = ("w8a8", 16, 64, 128)
    with field.open_field("cuda", 1) as (workers, machine):
        results = harness.Results(None, {"machine": machine}, field.KEY)
        [row] = field.sweep(workers, [case], results, until=4)
        assert row["left"] == 2
        [row] = field.sweep(workers, [case], results, until=1000)
        assert row["left"] == 0
        assert results.rows == [row]


def test_the_check_judges_what_is_swept_to_the_end(worker, tmp_path, monkeypatch, capsys):
    path = tmp_path / "c.json"
    arguments = ("--workers", 2, "--nk", 64, 128, "--json", path)
    assert run_main(monkeypatch, check, *arguments, "--m", 16) == 1
    out = capsys.readouterr().out
    assert "default: at most 1.500 of the best on 1 of 1 shapes; 1 beyond the limit of 1.1" in out
    raw = json.loads(path.read_text())
    assert raw["rows"][0]["best"] == FAST
    # a later run measures new GEMMs only
    assert run_main(monkeypatch, check, *arguments, "--m", 16, 64) == 1
    again = json.loads(path.read_text())["rows"]
    assert [(row["m"], row["left"]) for row in again] == [(16, 0), (64, 0)]
    assert again[0] == raw["rows"][0]
    assert again[1]["systems"]["w8a8_mm 64x32x128_w4_s4_g8"]["failed"].startswith("wrong")
    for name, ratio in (("default", 1.1), ("max-autotune", 1.03)):
        raw["rows"][0]["ratios"][name] = [ratio] * 3
    path.write_text(json.dumps(raw))
    assert run_main(monkeypatch, check, "--merge", path) == 0
    raw["rows"][0]["left"] = 1
    path.write_text(json.dumps(raw))
    assert run_main(monkeypatch, check, "--merge", path) == 1


def test_every_kernel_of_a_gemm_has_a_space_or_a_list_of_its_own():
    names = {kernel.name for kernel in KERNELS if kernel.family != "weight_only_dequantize"}
    assert set(candidates.SPACES) <= names
    assert names - set(candidates.SPACES) == {
        *(
            "w8a8_large_m_sm90",
            "w8a8_group_large_m_sm90",
            "fp8_group_large_m_sm90",
            "fp8_large_m_sm90",
            "fp8_block_large_m_sm90",
            "w8a8_decode",
            "fp8_decode",
            "fp8_block_decode",
        ),
        *("fp8_block_two_block_sm90", "w8a8_decode_quantize", "fp8_decode_quantize"),
        *("w4a8_direct", "w4a8_mm_sm90", "experts_direct", "experts_mm", "experts_mm_sm90"),
        *("scaled_experts_mm", "scaled_experts_int8_mm"),
        *("block_sparse_direct", "block_sparse_mm", "block_sparse_mm_tma"),
        *("scaled_experts_large_m_sm90", "scaled_experts_int8_large_m_sm90"),
    }


@pytest.mark.compiles
@pytest.mark.parametrize(("family", "m"), sampled([("weight_only", 16), ("fp8_block", 64)]))
def test_a_swept_configuration_is_legal_and_compiles(family, m):
    worker, case = Worker("virtual"), (family, m, 4096, 4096)
    with watched() as seen:
        found = worker.describe(case, "default")
    [(_, spec, problem, device)] = seen
    choices = found["choices"]
    assert len(choices) >= 50
    assert choices[0] == found["chosen"]
    kernels = {kernel.name: kernel for kernel in KERNELS}
    for text in choices:
        name, _, config = text.rpartition(" ")
        assert kernels[name].config_rejection(spec, problem, parse_config(config), device) is None
    last = choices[-1]
    compiled = worker.compile(case, last)
    assert compiled["chosen"] == last != choices[0]
    assert compiled["spills"] == 0
    assert compiled["shared"] <= Device(90, 132, 232448).shared_memory


def test_dumps_of_generated_kernels_are_compared(tmp_path, capsys):
    from examples.tuning import generated_kernels

    names = [program.name for program in generated_kernels.programs()]
    assert len(names) == len(set(names)) > 80
    kernel = {"ptx": "a", "text": "b", "is_ours": True, "registers": 9, "spills": 0, "shared": 0}
    old = {"reached": ["old"], "chosen": ["old 1"], "offered": [["old 1"]], "kernels": [kernel]}
    new = {**old, "reached": ["new"], "chosen": ["new 1"], "offered": [["new 1"]]}
    for name, entry in (("before", old), ("after", new)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernels.json").write_text(json.dumps({"programs": {"p": entry}}))
    folders = tmp_path / "before", tmp_path / "after"
    assert generated_kernels.diff(*folders, {"old": "new"})
    assert not generated_kernels.diff(*folders, {})
    changed = {**new, "kernels": [{**kernel, "ptx": "c"}]}
    (folders[1] / "kernels.json").write_text(json.dumps({"programs": {"p": changed}}))
    assert not generated_kernels.diff(*folders, {"old": "new"})
    assert "kernel 0, ptx: a -> c" in capsys.readouterr().out
