"""The benchmarks without a GPU: worker protocol, resuming, models and quantizers."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from examples.benchmarks import gemm, harness, models
from examples.benchmarks.workers import architectures, linear, model, quantizers
from tests.support.benchmarks import WORKER, run_main
from tests.support.graphs.post_grad import capture

# ------------------------------------------------------------------------------------------
# processes


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(gemm, "WORKER", WORKER)


def test_systems_are_timed_in_turn_and_compared_with_ours():
    with harness.open_systems(["ours", "peer"], WORKER) as systems:
        row = harness.measure(systems, {"m": 1}, rounds=3)
    assert row["systems"]["peer"]["us"] == [4.0, 4.0, 4.0]
    assert row["ratios"] == {"ours/peer": [0.5, 0.5, 0.5]}
    assert harness.geometric_means([row, row]) == {"ours/peer": (0.5, 2)}


def test_a_system_that_raises_dies_or_hangs_says_why_and_leaves_the_others():
    names = ["ours", "raises", "dies", "hangs", "lacks"]
    with harness.open_systems(names, WORKER) as systems:
        row = harness.measure(systems, {}, rounds=2, limit_s=3)
        assert "us" in row["systems"]["ours"]
        reasons = {name: row["systems"][name]["failed"] for name in names[1:]}
        assert reasons["raises"] == "ValueError: no such shape"
        assert reasons["dies"] == "the process died: out of memory"
        assert "no answer within" in reasons["hangs"]
        assert reasons["lacks"] == "not measured: give a file"
        replies = row["systems"]
        assert [harness.is_unknown(replies[n]) for n in names] == [False, False] + 3 * [True]
        # the next shape starts them anew
        assert systems[2].ask(do="time") == {"us": 4.0}
    found = harness.failures([row, row], lambda row: "shape")
    assert found["raises", "ValueError: no such shape"] == ["shape", "shape"]


def test_rows_in_the_file_are_not_measured_again(worker, tmp_path, monkeypatch, capsys):
    path = tmp_path / "gemm.json"
    arguments = ("--tiny", "--systems", "ours", "peer", "--rounds", 2, "--check", "--json", path)
    assert run_main(monkeypatch, gemm, *arguments) == 0
    first = json.loads(path.read_text())
    assert len(first["rows"]) == 2
    assert run_main(monkeypatch, gemm, *arguments) == 0
    assert json.loads(path.read_text()) == first
    assert "geometric mean" in capsys.readouterr().out
    # another measure is another row; 'gemm' and 'linear' are never in one table
    assert run_main(monkeypatch, gemm, *arguments, "--measure", "linear") == 0
    assert len(json.loads(path.read_text())["rows"]) == 4
    # figures of another card do not mix
    path.write_text(json.dumps(first | {"machine": {"gpu": "other", "torch": "none"}}))
    with pytest.raises(SystemExit, match="other"):
        run_main(monkeypatch, gemm, *arguments)


def test_check_fails_on_a_wrong_result_and_where_ours_does_not_run(worker, monkeypatch, capsys):
    tiny = ("--tiny", "--rounds", 1)
    assert run_main(monkeypatch, gemm, *tiny, "--systems", "ours", "wrong") == 0
    assert run_main(monkeypatch, gemm, *tiny, "--systems", "ours", "wrong", "--check") == 1
    monkeypatch.setattr(gemm, "TINY", [(13, 64, 64)])
    assert run_main(monkeypatch, gemm, *tiny, "--systems", "ours", "--check") == 1
    assert capsys.readouterr().out.count("ours fails: ValueError: no such shape: 13x64x64") == 1


@pytest.mark.parametrize("family", ["w4a8", "w4a8_channel"])
def test_systems_of_w4a8_compute_the_same_and_ours_reads_the_packed_weight(family, monkeypatch):
    make, systems = linear.FAMILIES[family]
    problem = make("gemm", 20, 64, 256, "cpu")
    arguments = (problem.a, problem.packed, problem.sa, problem.scale, problem.bias)
    _, [rewrite] = capture(problem.gemm, arguments)
    assert [match.family for match in rewrite.report.matches] == ["w4a8"]
    monkeypatch.setattr(torch, "compile", lambda fn, **how: fn)
    for measure in ("gemm", "linear"):
        problem = make(measure, 20, 64, 256, "cpu")
        for entry in systems.values():
            if measure in entry.measures:
                got, want = entry.build(problem)[-1]().double(), entry.reference(problem)
                assert (got - want).square().mean() < (entry.bound**2) * want.square().mean()


def test_random_sizes_have_groups_and_are_large():
    sizes = gemm.random_sizes(20, 1, None)
    assert sizes == gemm.random_sizes(20, 1, None) != gemm.random_sizes(20, 2, None)
    assert all(n * k >= 1 << 22 and k % 128 == 0 for _, n, k in sizes)
    assert len({m for m, _, _ in sizes}) > 5


def test_a_spent_budget_leaves_the_rest_out(worker, monkeypatch, capsys):
    assert run_main(monkeypatch, gemm, "--tiny", "--systems", "ours", "--budget", 0) == 1
    assert "2 of 2 shapes left out" in capsys.readouterr().out


def test_the_first_half_of_the_grid_covers_the_range():
    options = gemm.argparse.Namespace(tiny=False, random=0, family="w8a8", m=None, grid=None)
    grid = gemm.grid_of(options)
    assert {m for m, _, _ in grid[: len(grid) // 2]} == {1, 64, 1024}
    assert len(set(grid)) == 24


def test_a_plot_is_written(worker, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    assert run_main(monkeypatch, gemm, "--tiny", "--systems", "ours", "--plot", path) == 0
    assert path.stat().st_size > 1000


# ------------------------------------------------------------------------------------------
# models


# Two layers of random weights in groups of 128: 15 levels cost far more than 255.
KINDS = {"plain": (quantizers.Int8Linear, 0.05), "int4": (quantizers.Int4Linear, 0.3)}


@pytest.mark.parametrize("quantizer", KINDS)
@pytest.mark.parametrize("case", [name for name in architectures.CASES if name != "sam"])
@torch.no_grad()
def test_a_quantized_model_is_near_its_bf16_model(case, quantizer):
    kind, bound = KINDS[quantizer]
    model, inputs = architectures.CASES[case]("cpu", True)
    again, same_inputs = architectures.CASES[case]("cpu", True)
    plain = model(*inputs)
    assert torch.equal(plain, again(*same_inputs)), "not the same in every process"
    assert torch.isfinite(plain).all()
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    quantizers.QUANTIZERS[quantizer](model)
    quantized = [name for name, m in model.named_modules() if isinstance(m, kind)]
    assert quantized == [name for name in linears if name != "lm_head"]
    with quantizers.any_batch_size():
        out = model(*inputs)
    error = (out - plain).float().square().mean().sqrt() / plain.float().square().mean().sqrt()
    assert 0 < error < bound


@pytest.mark.slow
@torch.no_grad()
def test_sam_is_built_from_transformers_and_its_positions_are_theirs(monkeypatch):
    sam = pytest.importorskip("transformers.models.sam.modeling_sam")
    original = sam.SamVisionAttention.get_rel_pos
    monkeypatch.setattr(sam.SamVisionAttention, "get_rel_pos", original)
    table = torch.randn(2 * 14 - 1, 8)
    ours = architectures.relative_positions(None, 14, 14, table)
    assert torch.equal(ours, original(None, 14, 14, table))
    model, inputs = architectures.CASES["sam"]("cpu", True)
    plain = model(*inputs)
    quantizers.QUANTIZERS["plain"](model)
    error = (model(*inputs) - plain).float().square().mean().sqrt()
    assert 0 < error < 0.05 * plain.float().square().mean().sqrt()


@torch.no_grad()
def test_int8_linear_is_the_product_of_what_it_stores():
    torch.manual_seed(0)
    linear = nn.Linear(96, 64, dtype=torch.bfloat16)
    x = torch.randn(2, 9, 96, dtype=torch.bfloat16)
    quantized = quantizers.Int8Linear(linear)
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    a = (x / scale).round().double()
    weight = quantized.weight.double() * quantized.scale.double()[:, None]
    expected = (a * scale.double()) @ weight.t() + linear.bias.double()
    error = (quantized(x).double() - expected).abs().max()
    assert error <= 2**-8 * expected.abs().max()
    assert (weight - linear.weight.double()).abs().max() <= 0.51 * quantized.scale.max()
    with quantizers.any_batch_size():
        assert torch.equal(quantized(x[:1, :1]), quantized(x)[:1, :1])


@torch.no_grad()
def test_int4_linear_is_the_product_of_what_it_stores():
    torch.manual_seed(0)
    linear = nn.Linear(256, 64, dtype=torch.bfloat16)
    quantized = quantizers.Int4Linear(linear)
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
    llama, _ = architectures.CASES["llama-decode-1"]("cpu", True)
    kept = sum(p.nbytes for p in llama.parameters()) + llama.cos.nbytes + llama.sin.nbytes
    assert model.weights_gb(llama) == kept / 1e9


def test_ours_is_compared_with_the_faster_bf16():
    row = {
        "systems": {name: {"ms": [t] * 3} for name, t in (("bf16", 2.0), ("bf16-autotune", 1.0))},
        "ratios": {"ours/bf16": [0.4] * 3, "ours/bf16-autotune": [0.8] * 3, "ours/stock": [1] * 3},
    }
    ratios = models.with_best_bf16(row)["ratios"]
    assert ratios == {"ours/stock": [1] * 3, "ours/bf16 (best)": [0.8] * 3}
