"""The benchmarks without a GPU: worker protocol, resuming, models and quantizers."""

from __future__ import annotations

import functools
import json
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.benchmarks import costs, formats, gemm, harness, models, random_linears
from examples.benchmarks.workers import architectures, linear, model, quantizers, random_linear
from examples.benchmarks.workers.formats import FORMATS, Source
from inductor_quant.report.events import collect
from tests.support.benchmarks import WORKER, run_main
from tests.support.graphs.post_grad import EagerBackend, capture
from tests.support.sampling import sampled

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


@pytest.mark.slow
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
# random sizes


def test_a_draw_is_that_of_its_seed_within_its_ranges():
    options = {"rows": (16, 64), "elements": (1e6, 4e6)}
    cells = random_linears.draw("w8a8", 40, 7, **options)
    assert cells == random_linears.draw("w8a8", 40, 7, **options)
    assert cells != random_linears.draw("w8a8", 40, 8, **options)
    assert len({(cell["m"], cell["n"], cell["k"]) for cell in cells}) == 40
    assert all(16 <= cell["m"] <= 64 and 1e6 <= cell["n"] * cell["k"] < 4e6 for cell in cells)


def test_random_linears_are_prepared_ahead_and_written_as_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(random_linears, "WORKER", WORKER)
    path = tmp_path / "rows.jsonl"
    arguments = ("--count", 5, "--rounds", 2, "--json", path, "--device", "cpu")
    assert run_main(monkeypatch, random_linears, *arguments) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["ratios"]["ours/stock"][1] for row in rows] == [0.5] * 5
    assert "fp8, all: ours/bf16 0.500, at most 0.500 (5)" in capsys.readouterr().out
    assert run_main(monkeypatch, random_linears, *arguments, "--budget", 0) == 0
    assert len(path.read_text().splitlines()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("family", random_linear.FAMILIES)
def test_a_random_linear_is_compared_with_fp64(family):
    systems = random_linears.FAMILIES[family]
    for system, epilogue in zip(systems, ("bias", "silu", "residual"), strict=False):
        worker = random_linear.Worker(system, "cpu")
        reply = worker.prepare(0, family, 20, 64, 128, epilogue)
        assert not reply["wrong"], (system, reply)
        assert worker.time(0)["us"] > 0


@pytest.mark.parametrize("name", sampled(FORMATS, 8))
@torch.no_grad()
def test_a_format_is_recognized_as_it_is_stored(name):
    format = FORMATS[name]
    stored = format.make(Source("cpu"), 256, 512)
    x = torch.randn(5, 512, dtype=format.dtype)
    want = F.linear(x, format.dequantize(512, *stored))
    backend = EagerBackend()
    with collect() as report:
        got = torch.compile(
            lambda x, *stored: F.linear(x, format.dequantize(x.shape[1], *stored)), backend=backend
        )(x, *stored)
    assert [match.family for match in report.matches] == ["weight_only"]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


def test_a_prepacked_format_computes_the_same_from_other_tensors():
    stored = FORMATS["awq"].make(Source("cpu"), 256, 512)
    x = torch.randn(5, 512, dtype=FORMATS["awq"].dtype)

    def layer(format, x, weight, bias):
        return F.linear(x, FORMATS[format].dequantize(512, *weight), bias)

    want = layer("awq", x, stored, None)
    tensors, repacked = random_linear.prepacked(functools.partial(layer, "awq"), stored, x)
    assert tensors[0].shape == (64, 256)
    torch.testing.assert_close(
        repacked(x, tensors, None), want, rtol=2e-2, atol=2e-2 * want.abs().max()
    )
    stored, wide = FORMATS["nf4"].make(Source("cpu"), 256, 512), x.to(torch.bfloat16)
    assert random_linear.prepacked(functools.partial(layer, "nf4"), stored, wide) is None


def test_formats_are_drawn_for_each_m_and_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(random_linears, "WORKER", WORKER)
    path = tmp_path / "rows.jsonl"
    arguments = ("--formats", "gptq", "nf4", "--m", 1, 33, "--rounds", 2, "--device", "cpu")
    assert run_main(monkeypatch, formats, *arguments, "--json", path, "--check") == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(row["family"], row["m"]) for row in rows} == set(product(["gptq", "nf4"], [1, 33]))
    assert "4 of 4 cells; 0 wrong or slower than stock" in capsys.readouterr().out
    monkeypatch.setattr(formats, "SLOWER", 0.4)
    assert run_main(monkeypatch, formats, *arguments, "--check") == 1


# ------------------------------------------------------------------------------------------
# models


# A case of each architecture; layers of random weights in groups of 128: 15 levels cost far more
# than 255, and far more still where seven layers follow each other without a residual.
MODELS = {
    "llama-decode-16": ("plain", 0.05),
    "qwen3-prefill": ("int4", 0.3),
    "mistral-decode-1": ("torchao", 0.05),
    "gemma-decode-64": ("torchao_int8_weights", 0.05),
    "deepseek": ("int4", 0.3),
    "bert": ("torchao", 0.05),
    "vit": ("plain", 0.05),
    "whisper": ("torchao", 0.05),
    "t5": ("plain", 0.05),
    "sam": ("plain", 0.05),
    "flux": ("torchao", 0.05),
    "sd3": ("plain", 0.05),
    "llama-linears-1": ("fine_grained_fp8", 0.2),
    "llama-linears-16": ("nf4", 0.4),
}


@pytest.fixture
def sams_own_positions(monkeypatch):
    sam = pytest.importorskip("transformers.models.sam.modeling_sam")
    original = sam.SamVisionAttention.get_rel_pos
    monkeypatch.setattr(sam.SamVisionAttention, "get_rel_pos", original)
    return original


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("sams_own_positions")
@pytest.mark.parametrize("case", MODELS)
@torch.no_grad()
def test_a_quantized_model_is_near_its_bf16_model(case):
    quantizer, bound = MODELS[case]
    if quantizer.startswith("torchao"):
        pytest.importorskip("torchao")
    model, inputs = architectures.build(case, "cpu", True)
    again, same_inputs = architectures.build(case, "cpu", True)
    plain = model(*inputs)
    assert torch.equal(plain, model(*inputs)), "a call changes the model"
    assert torch.equal(plain, again(*same_inputs)), "not the same in every process"
    assert torch.isfinite(plain).all()
    linears = {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    quantizers.QUANTIZERS[quantizer](model)
    left = [
        name
        for name, m in model.named_modules()
        if type(getattr(m, "weight", None)) is nn.Parameter and m.weight is linears.get(name)
    ]
    assert [name for name in left if not name.endswith("lm_head")] == []
    with quantizers.any_batch_size():
        out = model(*inputs)
    error = (out - plain).float().square().mean().sqrt() / plain.float().square().mean().sqrt()
    assert 0 < error < bound


@torch.no_grad()
def test_linear_layers_in_a_row_keep_the_size_of_x(monkeypatch):
    """Else errors have no meaning: values overflow or vanish, in fp16 first."""
    monkeypatch.setattr(architectures, "LINEARS", (512, 1792, 128, 4))
    layers, (x,) = architectures.build("llama-linears-16", "cpu", tiny=False)
    plain = layers(x)
    assert 0.5 < plain.float().square().mean().sqrt() < 2
    exact = layers.float()(x.float())
    assert model.error(plain, exact)["rms"] < 0.02
    assert model.error(layers.half()(x.half()), exact)["rms"] < 0.003
    quantizers.QUANTIZERS["nf4"](layers.bfloat16())
    assert 0.1 < model.error(layers(x), plain)["rms"] < 0.6  # of which 1.25 times is allowed


def test_a_worker_compiles_and_times_a_model():
    worker = model.Worker("eager", "cpu")
    request = {"quantizer": "nf4", "per_layer": False, "tiny": True, "dtype": "bf16", "layers": 1}
    reply = worker.prepare("llama-linears-16", **request)
    assert reply["error"]["rms"] == 0
    assert not reply["wrong"]
    assert 0.01 < reply["quantization"]["rms"] < 0.6
    assert worker.time()["ms"] > 0
    assert models.by_kind(worker.profile())["GEMM"] == 0  # of a CPU there is no profile


@pytest.mark.slow
def test_the_command_runs_without_a_gpu(monkeypatch, tmp_path, capsys):
    arguments = ("--tiny", "--device", "cpu", "--rounds", 1, "--json", tmp_path / "rows.json")
    chosen = ("--models", "bert", "llama-decode-1", "--systems", "eager", "--profile")
    assert run_main(monkeypatch, models, *arguments, *chosen) == 0
    assert "every result is right" in capsys.readouterr().out
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["bert", "llama-decode-1"]


def test_every_architecture_is_tried():
    tried = {architectures.CASES[case].architecture for case in MODELS}
    assert tried == {case.architecture for case in architectures.CASES.values()}
    assert set(models.CASES) | set(models.MODELS) >= set(architectures.CASES)


@torch.no_grad()
def test_a_decoder_reads_its_cache_and_leaves_it():
    model, (ids,) = architectures.build("llama-decode-16", "cpu", True)
    first, length = model(ids), [int(layer.get_seq_length()) for layer in model.cache.layers]
    assert length == [15, 15]
    model.cache.layers[1].keys[:, :, 3] += 1
    assert not torch.equal(model(ids), first)


def test_sams_positions_are_theirs(sams_own_positions):
    table = torch.randn(2 * 14 - 1, 8)
    ours = architectures.relative_positions(None, 14, 14, table)
    assert torch.equal(ours, sams_own_positions(None, 14, 14, table))


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
    llama, _ = architectures.build("llama-decode-1", "cpu", True)
    kept = sum(t.nbytes for t in (*llama.parameters(), *llama.buffers()))
    assert model.weights_gb(llama) == kept / 1e9
    bytes_of_bf16 = model.weights_gb(llama)
    pytest.importorskip("torchao")
    quantizers.QUANTIZERS["torchao_int8_weights"](llama)
    assert model.weights_gb(llama) < 0.8 * bytes_of_bf16


def test_kernels_are_sorted_by_what_they_do():
    kernels = {
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "GEMM",
        "triton_tem_fused__to_copy_add_w8a8_view_3": "GEMM",
        "triton_per_fused__to_copy_amax_native_layer_norm_round_2": "quantization",
        "pytorch_flash::flash_fwd_kernel": "attention",
        "triton_poi_fused_gelu_1": "rest",
    }
    reply = {"kernels": [[name, 1, 2.0] for name in kernels], "gaps_ms": 0.5, "ms": [9.0] * 3}
    kinds = {"attention": 2.0, "GEMM": 4.0, "quantization": 2.0, "rest": 2.0}
    assert models.by_kind(reply) == kinds | {"between kernels": 0.5}
    # without the attention, the rest and the gaps
    assert models.figure("linear_ms", reply, reply) == 9.0 - 4.5


def test_ours_is_compared_with_the_faster_bf16():
    row = {
        "systems": {name: {"ms": [t] * 3} for name, t in (("bf16", 2.0), ("bf16-autotune", 1.0))},
        "ratios": {"ours/bf16": [0.4] * 3, "ours/bf16-autotune": [0.8] * 3, "ours/stock": [1] * 3},
    }
    ratios = models.with_best_bf16(row)["ratios"]
    assert ratios == {"ours/stock": [1] * 3, "ours/bf16 (best)": [0.8] * 3}


# ------------------------------------------------------------------------------------------
# what it costs to use


@pytest.mark.parametrize("name", costs.MODELS)
def test_the_models_whose_cost_is_measured_run(name):
    made, x = costs.build(name, "none", "cpu", tiny=True)
    with torch.no_grad():
        assert made(x).shape[0] == x.shape[0]
    names = [
        type(layer).__name__ for layer in costs.build(name, "int8", "cpu", tiny=True)[0].modules()
    ]
    assert "Int8Linear" in names
