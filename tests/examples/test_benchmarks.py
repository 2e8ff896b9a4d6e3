"""The benchmarks and the tuner, as far as they go without a GPU: protocol, resuming, quantization,
the cost model, and the rendered template."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from inductor_quant import simulate
from inductor_quant.kernels import KERNELS, table
from inductor_quant.kernels.config import GemmConfig, Problem
from inductor_quant.kernels.table import MeasuredConfig
from inductor_quant.ops import w8a8
from tests.support.benchmarks import run_main  # and the path to the benchmarks

import bench_gemm  # isort: skip
import bench_models  # isort: skip
import bench_systems  # isort: skip
import models_build  # isort: skip
import models_candidates  # isort: skip
import models_quantize  # isort: skip
import models_sweep  # isort: skip

# ------------------------------------------------------------------------------------------
# processes


def test_systems_are_timed_in_turn_and_compared_with_ours(worker):
    with bench_systems.open_systems(["ours", "peer"], worker) as systems:
        row = bench_systems.measure(systems, {"m": 1}, rounds=3)
    assert row["systems"]["peer"]["us"] == [4.0, 4.0, 4.0]
    assert row["ratios"] == {"ours/peer": [0.5, 0.5, 0.5]}
    assert bench_systems.geometric_means([row, row]) == {"ours/peer": (0.5, 2)}


def test_a_system_that_raises_dies_or_hangs_says_why_and_leaves_the_others(worker):
    names = ["ours", "raises", "dies", "hangs", "lacks"]
    with bench_systems.open_systems(names, worker) as systems:
        row = bench_systems.measure(systems, {}, rounds=2, limit_s=3)
        assert "us" in row["systems"]["ours"]
        reasons = {name: row["systems"][name]["failed"] for name in names[1:]}
        assert reasons["raises"] == "ValueError: no such shape"
        assert reasons["dies"] == "the process died: out of memory"
        assert "no answer within" in reasons["hangs"]
        assert reasons["lacks"] == "not measured: give a file"
        replies = row["systems"]
        assert [bench_systems.is_unknown(replies[n]) for n in names] == [False, False] + 3 * [True]
        # the next shape starts them anew
        assert systems[2].ask(do="time") == {"us": 4.0}
    found = bench_systems.failures([row, row], lambda row: "shape")
    assert found["raises", "ValueError: no such shape"] == ["shape", "shape"]


def test_rows_in_the_file_are_not_measured_again(worker, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_gemm, "WORKER", worker)
    path = tmp_path / "gemm.json"
    arguments = ("--tiny", "--systems", "ours", "peer", "--rounds", 2, "--check", "--json", path)
    assert run_main(monkeypatch, bench_gemm, *arguments) == 0
    first = json.loads(path.read_text())
    assert len(first["rows"]) == 2
    assert run_main(monkeypatch, bench_gemm, *arguments) == 0
    assert json.loads(path.read_text()) == first
    assert "geometric mean" in capsys.readouterr().out
    # another measure is another row; 'gemm' and 'linear' are never in one table
    assert run_main(monkeypatch, bench_gemm, *arguments, "--measure", "linear") == 0
    assert len(json.loads(path.read_text())["rows"]) == 4
    # figures of another card do not mix
    path.write_text(json.dumps(first | {"machine": {"gpu": "other", "torch": "none"}}))
    with pytest.raises(SystemExit, match="other"):
        run_main(monkeypatch, bench_gemm, *arguments)


def test_check_fails_on_a_wrong_result_and_where_ours_does_not_run(worker, monkeypatch, capsys):
    monkeypatch.setattr(bench_gemm, "WORKER", worker)
    tiny = ("--tiny", "--rounds", 1)
    assert run_main(monkeypatch, bench_gemm, *tiny, "--systems", "ours", "wrong") == 0
    assert run_main(monkeypatch, bench_gemm, *tiny, "--systems", "ours", "wrong", "--check") == 1
    monkeypatch.setattr(bench_gemm, "TINY", [(13, 64, 64)])
    assert run_main(monkeypatch, bench_gemm, *tiny, "--systems", "ours", "--check") == 1
    assert capsys.readouterr().out.count("ours fails: ValueError: no such shape: 13x64x64") == 1


def test_a_spent_budget_leaves_the_rest_out(worker, monkeypatch, capsys):
    monkeypatch.setattr(bench_gemm, "WORKER", worker)
    assert run_main(monkeypatch, bench_gemm, "--tiny", "--systems", "ours", "--budget", 0) == 1
    assert "2 of 2 shapes left out" in capsys.readouterr().out


def test_the_first_half_of_the_grid_covers_the_range():
    options = bench_gemm.argparse.Namespace(tiny=False, family="w8a8", m=None, grid=None)
    grid = bench_gemm.grid_of(options)
    assert {m for m, _, _ in grid[: len(grid) // 2]} == {1, 64, 1024}
    assert len(set(grid)) == 24


def test_a_plot_is_written(worker, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_gemm, "WORKER", worker)
    path = tmp_path / "roofline.png"
    assert run_main(monkeypatch, bench_gemm, "--tiny", "--systems", "ours", "--plot", path) == 0
    assert path.stat().st_size > 1000


# ------------------------------------------------------------------------------------------
# models


# Two layers of random weights in groups of 128: 15 levels cost far more than 255.
KINDS = {"plain": (models_quantize.Int8Linear, 0.05), "int4": (models_quantize.Int4Linear, 0.3)}


@pytest.mark.parametrize("quantizer", KINDS)
@pytest.mark.parametrize("case", [name for name in models_build.CASES if name != "sam"])
@torch.no_grad()
def test_a_quantized_model_is_near_its_bf16_model(case, quantizer):
    kind, bound = KINDS[quantizer]
    model, inputs = models_build.CASES[case]("cpu", True)
    again, same_inputs = models_build.CASES[case]("cpu", True)
    plain = model(*inputs)
    assert torch.equal(plain, again(*same_inputs)), "not the same in every process"
    assert torch.isfinite(plain).all()
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    models_quantize.QUANTIZERS[quantizer](model)
    quantized = [name for name, m in model.named_modules() if isinstance(m, kind)]
    assert quantized == [name for name in linears if name != "lm_head"]
    with models_quantize.any_number_of_rows():
        out = model(*inputs)
    error = (out - plain).float().square().mean().sqrt() / plain.float().square().mean().sqrt()
    assert 0 < error < bound


@torch.no_grad()
def test_sam_is_built_from_transformers_and_its_positions_are_theirs(monkeypatch):
    sam = pytest.importorskip("transformers.models.sam.modeling_sam")
    original = sam.SamVisionAttention.get_rel_pos
    monkeypatch.setattr(sam.SamVisionAttention, "get_rel_pos", original)
    table = torch.randn(2 * 14 - 1, 8)
    ours = models_build.relative_positions(None, 14, 14, table)
    assert torch.equal(ours, original(None, 14, 14, table))
    model, inputs = models_build.CASES["sam"]("cpu", True)
    plain = model(*inputs)
    models_quantize.QUANTIZERS["plain"](model)
    error = (model(*inputs) - plain).float().square().mean().sqrt()
    assert 0 < error < 0.05 * plain.float().square().mean().sqrt()


@torch.no_grad()
def test_int8_linear_is_the_product_of_what_it_stores():
    torch.manual_seed(0)
    linear = nn.Linear(96, 64, dtype=torch.bfloat16)
    x = torch.randn(2, 9, 96, dtype=torch.bfloat16)
    quantized = models_quantize.Int8Linear(linear)
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    a = (x / scale).round().double()
    weight = quantized.weight.double() * quantized.scale.double()[:, None]
    expected = (a * scale.double()) @ weight.t() + linear.bias.double()
    error = (quantized(x).double() - expected).abs().max()
    assert error <= 2**-8 * expected.abs().max()
    assert (weight - linear.weight.double()).abs().max() <= 0.51 * quantized.scale.max()
    with models_quantize.any_number_of_rows():
        assert torch.equal(quantized(x[:1, :1]), quantized(x)[:1, :1])


@torch.no_grad()
def test_int4_linear_is_the_product_of_what_it_stores():
    torch.manual_seed(0)
    linear = nn.Linear(256, 64, dtype=torch.bfloat16)
    quantized = models_quantize.Int4Linear(linear)
    weight = quantized(torch.eye(256, dtype=torch.bfloat16)) - linear.bias  # decoded, [K, N]
    scales = quantized.scales.float().repeat_interleave(128, 0)
    assert quantized.qweight.shape == (32, 64)
    assert quantized.qzeros.shape == (2, 8)
    # half a step of rounding, and what bf16 rounds
    assert ((weight - linear.weight.t()).float().abs() <= 0.6 * scales + 2**-8).all()
    word, zero = int(quantized.qweight[1, 5]), int(quantized.qzeros[0, 0])
    level, zero_point = word >> 12 & 15, zero >> 20 & 15
    decoded = (level - zero_point) * quantized.scales[0, 5].double()
    assert abs(decoded - linear.weight[5, 11]) <= 0.6 * scales[0, 5]


def test_the_weights_of_a_model_are_counted_without_its_cache():
    import models_worker

    model, _ = models_build.CASES["llama-decode-1"]("cpu", True)
    kept = sum(p.nbytes for p in model.parameters()) + model.cos.nbytes + model.sin.nbytes
    assert models_worker.weights_gb(model) == kept / 1e9


def test_ours_is_compared_with_the_faster_bf16():
    row = {
        "systems": {name: {"ms": [t] * 3} for name, t in (("bf16", 2.0), ("bf16-autotune", 1.0))},
        "ratios": {"ours/bf16": [0.4] * 3, "ours/bf16-autotune": [0.8] * 3, "ours/stock": [1] * 3},
    }
    ratios = bench_models.with_best_bf16(row)["ratios"]
    assert ratios == {"ours/stock": [1] * 3, "ours/bf16 (best)": [0.8] * 3}


# ------------------------------------------------------------------------------------------
# tuning

SHAPES = [(m, n, k) for m in (16, 64, 256, 4096) for n, k in ((4096, 4096), (6144, 1536))]


@pytest.fixture
def cost():
    pytest.importorskip("scipy")
    import models_cost

    return models_cost


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
    measured = dict.fromkeys(table.PROVENANCE, "x")
    made = cost.make_table("w8a8_mm", card, measured, sorted(ctas), ctas, samples, samples)
    cost.write_table(made, tmp_path / "table.json")
    text = (tmp_path / "table.json").read_text()
    assert table.parse(json.loads(text)) == made
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
    import tune

    assert {kernel.name for kernel in TUNED} <= set(models_candidates.SPACES)
    for kernel in TUNED:
        candidates = models_candidates.candidates(kernel, card.device(), [8])
        shapes = tune.shapes(kernel, card.device())
        assert len(candidates) >= 6
        assert all(sum(models_candidates.suits(c, s) for c in candidates) >= 6 for s in shapes)
    store = tune.Store(tmp_path / "samples.json")
    store.sweep = samples_of(known_models())
    store.resources = {e.config: (100, 65536) for e in known_models()}
    store.machine = {"card": dataclasses.asdict(card), "torch": "1", "triton": "1", "date": "x"}
    store.save()
    again = tune.Store(tmp_path / "samples.json")
    assert (again.sweep, again.resources) == (store.sweep, store.resources)
    out = tmp_path / "table.json"
    arguments = ("--samples", store.path, "--fit-only", "--out", out)
    assert run_main(monkeypatch, tune, *arguments) == 0
    assert len(table.parse(json.loads(out.read_text())).configs) == 3
    assert "leave one out" in capsys.readouterr().out


def test_a_winner_of_one_final_gets_its_constants_from_the_sweep(card, tmp_path, monkeypatch):
    import tune

    store = tune.Store(tmp_path / "samples.json")
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
    assert run_main(monkeypatch, tune, *arguments) == 0
    made = {e.config: e for e in table.parse(json.loads(out.read_text())).configs}
    assert made[small].fixed_us > 3
    assert made[small].step_us_per_cta > 0.05


TUNED = [kernel for kernel in KERNELS if kernel.name in models_sweep.TARGETS]


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", TUNED, ids=lambda kernel: kernel.name)
def test_the_rendered_template_compiles_to_what_inductor_makes_of_it(kernel, card, tmp_path):
    config = GemmConfig(128, 128, 128, 8 if "block" in kernel.name else 4, 3)
    spec = models_sweep.TARGETS[kernel.name].spec()
    constants = kernel.constants(spec, models_sweep.EVEN, config, card.device())
    source, tensors, numbers = models_sweep.render(kernel, constants)
    element = "*i8" if kernel.family == "w8a8" else "*fp8e4nv"
    types = {"A": element, "B": element, "A_SCALE": "*fp32", "B_SCALE": "*fp32", "OUT": "*bf16"}
    ones = dict.fromkeys(("A_stride1", "B_stride0", "A_SCALE_stride0", "B_SCALE_stride1"), 1)
    ones = {name: 1 for name in ones if name in numbers}
    signature = {name: types[name] for name in (*tensors, "OUT")}
    signature |= {name: "i32" for name in numbers if name not in ones}
    blocks = {k: v for k, v in models_sweep.keywords(config).items() if not k.startswith("num")}
    compiled = simulate.compile_jit(
        models_sweep.load_kernel(source, str(tmp_path)),
        signature,
        {**blocks, **ones, **models_sweep.numeric(constants)},
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
    monkeypatch.setattr(models_sweep, "WEIGHT_BYTES", 2**14)
    [kernel] = [kernel for kernel in KERNELS if kernel.name == "w8a8_mm"]
    config, shape = GemmConfig(16, 32, 64, 2, 3), (40, 48, 128)
    sweep = models_sweep.Sweep(kernel, [config], device="cpu")
    arguments = sweep.arguments(*shape)
    assert len(arguments) == 2**14 // (48 * 128)
    sweep.launch(shape, config, arguments[1])
    a, b, a_scale, b_scale, out = arguments[1][:5]
    expected = w8a8.reference(a, b, a_scale, b_scale, None, out_dtype=torch.bfloat16)
    assert torch.equal(out, expected)
    assert math.isfinite(out.float().sum())
