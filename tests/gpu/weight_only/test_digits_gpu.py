"""``weight_only_direct`` and ``weight_only_mm_sm90`` on a GPU, in the tiles that come first."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant.kernels.config import GemmConfig, parse_config
from inductor_quant.kernels.problem import DECODE_M, MEDIUM_M
from inductor_quant.kernels.weight_only.direct.kernel import MAX_M, WEIGHT_ONLY_DIRECT
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.kernels.weight_only.mm_sm90.loop import exchanged_slices
from inductor_quant.ops import weight_only
from inductor_quant.report.events import collect
from tests.support.gemms import formats
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    assert_right,
    described,
    exact,
    gemm,
    loadable,
    make_inputs,
)

pytestmark = pytest.mark.gpu

bf16, f16 = torch.bfloat16, torch.float16


SMALL_N = 1024


def kernel_of(case):
    is_direct = case.m <= DECODE_M or (case.m <= MAX_M and case.n <= SMALL_N)
    return WEIGHT_ONLY_DIRECT if is_direct else WEIGHT_ONLY_MM_SM90


def run(case, inputs, config):
    torch._dynamo.reset()
    pinned = (f"{kernel_of(case).name} {config}",)
    options = {"inductor_quant.on_error": "raise", "inductor_quant.configs": pinned}
    with collect() as report:
        compiled = torch.compile(
            gemm(case), backend="inductor_quant", dynamic=False, options=options
        )
        got = compiled(*inputs)
    assert report.kernels[-1].chosen.startswith(kernel_of(case).name)
    return got


def configs_of(case):
    spec, problem = described(case)
    problem = dataclasses.replace(problem, has_aligned_rows=True, has_weight_descriptors=True)
    found = kernel_of(case).configs(spec, problem, device(90))
    assert found
    tiles: dict[GemmConfig, GemmConfig] = {}
    for config in found:
        tiles.setdefault(dataclasses.replace(config, split_k=1), config)
    return [*tiles.values()][:4]  # the best of each tile


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    ("name", "m", "dtype"),
    [
        *(("awq", m, f16) for m in (1, 9, 17, 40, 100, 250)),
        *(("hqq", m, bf16) for m in (1, 16, 20, 64, 200)),
        *(("int8_group", m, bf16) for m in (3, 16, 17, 128)),
        *(("nf4", m, f16) for m in (2, 12, 33, 70)),
        *(("mxfp4", m, bf16) for m in (1, 16, 20, 70)),
        ("mxfp4", 40, f16),  # in fp32
        *(("nvfp4", m, bf16) for m in (2, 13, 64)),
        *(("halves_of_k", m, bf16) for m in (1, 16, 33, 100, 250)),
        *(("crossing", m, f16) for m in (1, 13)),
        *(("shards", m, bf16) for m in (1, 16)),
        *(("act_order", m, dtype) for m in (1, 7, 16) for dtype in (bf16, f16)),
        ("int8_channel", 50, bf16),
        ("int8_folded", 5, bf16),
        *(("int8_zero_channel", m, f16) for m in (7, 70)),
        *(("uint2", m, bf16) for m in (8, 30)),
        *(("fp8_row", m, bf16) for m in (33, 128)),
        *(("fp8_block", m, f16) for m in (20, 200)),
        ("e5m2_group", 64, bf16),
    ],
)
def test_the_best_tiles_are_close_to_fp64(name, m, dtype, group, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    n = 14336 if m > MEDIUM_M // 2 else 2048  # above, W written once is the alternative
    check(Case(name, m, n, 4096, dtype, bias=True, column_scale="channel"))


@pytest.mark.parametrize(("m", "n"), [(64, 2048), (100, 2048), (70, 14336)])
def test_tiles_whose_columns_are_far_apart_are_close_to_fp64(m, n, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    check(Case("groups_of_n", m, n, 4096, bf16, bias=True, column_scale="channel"))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2048, 4096), (7, 1024, 4160), (16, 2048, 4096)])
def test_where_x_is_scaled_it_is_rounded_instead_of_w(m, n, k, group, monkeypatch):
    """The limit is that of sums of W as it is, times 1.5: x is rounded, and of 32,768 results the
    largest error is about 4 times the rms, 0.0024."""
    monkeypatch.setattr(formats, "GROUP", group)
    case = Case("groups_of_n", m, n, k, bf16, bias=True)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    for config in configs_of(case):
        assert_close(run(case, inputs, config), exact(case, inputs), slack=1.5)


def check(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    for config in configs_of(case):
        assert_right(run(case, inputs, config), case, inputs)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    ("name", "m", "n", "k", "dtype"),
    [
        ("gptq", 20, 1000, 640, f16),
        ("gptq", 64, 1024, 1024, bf16),
        ("awq", 29, 1024, 1152, f16),
        ("hqq", 33, 512, 1024, bf16),
        ("nibble_pairs", 17, 520, 1152, bf16),
        ("int8_channel", 48, 1000, 640, f16),
        ("int8_group", 57, 768, 1024, bf16),
        ("int8_zero_channel", 32, 512, 640, bf16),
        ("fp8_row", 64, 1024, 640, bf16),
        ("nf4", 40, 512, 1024, f16),
        ("uint2", 32, 1024, 1024, bf16),
        ("shards", 40, 1000, 1024, bf16),
        ("crossing", 40, 1024, 1024, f16),
        ("act_order", 20, 1024, 4096, f16),
        ("act_order", 32, 1024, 8192, bf16),
        ("nibble_pairs", 100, 520, 1152, bf16),
        ("int8_channel", 250, 1024, 640, f16),
        ("gptq", 200, 520, 640, f16),
    ],
)
def test_more_rows_of_small_layers(name, m, n, k, dtype, group, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    check(Case(name, m, n, k, dtype, bias=True, column_scale="channel"))


@pytest.mark.parametrize(
    "name",
    ["gptq", "nibble_pairs", "awq", "hqq", "int8_group", "nf4", "mxfp4", "fp8_row", "act_order"],
)
@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize(("m", "n"), [(16, 512), (64, 512), (64, 2048)])
def test_one_hot_rows_give_the_weight_bit_for_bit(m, n, name, dtype, monkeypatch):
    """Groups of 32, which no other kernel prefers; scales of x's dtype and of another one."""
    if name == "awq" and (m, n) == (64, 512):
        m = 32  # beyond, weight_only_mm_sm90 is faster
    if name == "act_order" and m > DECODE_M:
        pytest.skip("W is written once")
    monkeypatch.setattr(formats, "GROUP", 32)
    case = Case(name, m, n, 1024, dtype)
    _, _, _, *weight = make_inputs(case, "cuda")
    want = weight_only.dequantize(case.packed.format, weight).to(dtype)
    rows = torch.zeros(m, 1024, dtype=dtype, device="cuda")
    at = 1024 // m * torch.arange(m, device="cuda")
    rows[torch.arange(m), at] = 1
    for config in configs_of(case):
        got = run(case, (rows, None, None, *weight), config)
        assert torch.equal(got, want[at]), config


@pytest.mark.parametrize(
    ("name", "config", "rows"),
    [
        ("nibble_pairs", "64x64x128_w4_s4_g8", (33, 56, 64, 100)),  # two swizzles a K iteration
        ("int8_channel", "128x128x128_w8_s4_g8", (65, 96, 160, 300)),
        ("halves_of_k", "128x128x64_w8_s8_g8", (65, 100, 200)),
        ("nibble_pairs", "256x128x64_w8_s4_g8", (129, 192, 300)),
        ("nibble_pairs", "16x64x256_w4_s4_g8", (9, 12, 16)),
        ("hqq", "32x64x256_w4_s4_g8", (17, 24, 40)),
        ("halves_of_k", "64x128x256_w8_s4_g8", (33, 40, 64, 100)),  # two swizzles a part of K
    ],
)
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_tiles_that_lack_rows_are_loaded_without_them(name, config, rows, is_dynamic):
    compiled = None
    for m in rows:
        case = Case(name, m, 1024, 2048, bf16, bias=True)
        torch.manual_seed(0)
        inputs = make_inputs(case, "cuda")
        if compiled is None or not is_dynamic:
            torch._dynamo.reset()
            pinned = (f"{WEIGHT_ONLY_MM_SM90.name} {config}",)
            compiled = torch.compile(
                gemm(case),
                backend="inductor_quant",
                dynamic=False if not is_dynamic else None,
                options={
                    "inductor_quant.on_error": "raise",
                    "inductor_quant.configs": pinned,
                    "inductor_quant.row_buckets": False,
                },
            )
        if is_dynamic:
            torch._dynamo.maybe_mark_dynamic(inputs[0], 0)
        assert_right(compiled(*inputs), case, inputs)


def compiled_in(case, config):
    """The product in tiles of ``weight_only_mm_sm90``, and in no others."""
    spec, problem = loadable(case)
    assert not WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(90))
    assert not WEIGHT_ONLY_MM_SM90.config_rejection(spec, problem, parse_config(config), device(90))
    torch._dynamo.reset()
    options = {
        "inductor_quant.configs": (f"{WEIGHT_ONLY_MM_SM90.name} {config}",),
        "inductor_quant.on_error": "raise",
    }
    return torch.compile(gemm(case), backend="inductor_quant", dynamic=False, options=options)


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "config"),
    [
        ("int8_channel", 33, 1152, 4304, "64x64x64_w4_s8_g8"),  # SigLIP
        ("int8_channel", 100, 1152, 4304, "128x64x64_w4_s4_g8_k3"),
        ("fp8_row", 300, 1152, 4304, "256x64x64_w4_s6_g8"),
        ("fp8_row", 64, 1152, 4304, "64x64x128_w4_s4_g8"),
        ("nibble_pairs", 16, 2048, 2080, "16x64x256_w4_s4_g8"),
        ("hqq", 20, 2048, 2080, "32x64x128_w4_s4_g8"),
        ("mxfp4", 64, 2880, 2880, "64x64x128_w4_s4_g8"),  # gpt-oss
    ],
)
def test_tiles_end_beyond_k(name, m, n, k, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 32)
    case = Case(name, m, n, k, bf16, bias=True)
    inputs = make_inputs(case, "cuda")
    assert_right(compiled_in(case, config)(*inputs), case, inputs)


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "config"),
    [
        (20, 1024, 4096, f16, "32x128x64_w4_s8_g8_k2"),
        (64, 10240, 8192, f16, "64x128x64_w4_s4_g8"),  # tiles that CTAs share
        (100, 4096, 4096, bf16, "128x128x64_w4_s4_g8_k4"),
        (128, 40960, 2048, f16, "128x64x64_w4_s4_g8"),  # several tiles a CTA
        (256, 2048, 4096, f16, "256x64x64_w4_s6_g8_k2"),
        (300, 14336, 4096, f16, "256x128x64_w8_s4_g8"),
        (64, 2056, 4096, f16, "64x128x64_w4_s4_g8"),  # a tile ends beyond N
        (64, 2048, 32768, f16, "64x64x64_w4_s8_g8"),  # too many rows for shared memory
        (12, 4096, 4096, bf16, "16x128x128_w4_s4_g8"),
    ],
)
def test_listed_scales_are_read_from_shared_memory(m, n, k, dtype, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    case = Case("act_order", m, n, k, dtype, bias=True)
    inputs = make_inputs(case, "cuda")
    compiled = compiled_in(case, config)
    for _ in range(3):
        assert_right(compiled(*inputs), case, inputs)


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "config"),
    [
        (33, 2048, 4096, bf16, "64x64x128_w4_s4_g8_k4"),
        (128, 4096, 8192, bf16, "128x64x64_w4_s4_g8"),
        (100, 2112, 7168, f16, "64x64x64_w4_s8_g8"),  # two iterations at a time
        (200, 1024, 2048, bf16, "256x64x64_w4_s6_g8"),
    ],
)
def test_columns_share_the_scales_of_each_k(m, n, k, dtype, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    case = Case("groups_of_n", m, n, k, dtype, bias=True)
    inputs = make_inputs(case, "cuda")
    assert_right(compiled_in(case, config)(*inputs), case, inputs)


# CTAs exchange sums (twice), store partials, exchange sums by strips, share tiles.
@pytest.mark.parametrize(
    ("m", "config"),
    [
        (192, "128x128x64_w8_s6_g8_k2"),
        (64, "64x64x64_w4_s8_g8_k4"),
        (192, "64x64x64_w4_s8_g8_k4"),
        (192, "128x64x64_w4_s4_g8_k3"),
        (192, "128x64x64_w4_s4_g8"),
        (96, "128x64x64_w8_s8_g8_k2"),
        (64, "64x64x64_w8_s8_g8_k3"),
        (16, "16x64x256_w4_s4_g8_k2"),
        (64, "64x128x256_w8_s4_g8"),
    ],
)
def test_results_are_the_same_in_every_call_beside_other_work(m, config, monkeypatch):
    """A tile that is written while it is multiplied, or summed before it is whole, would show."""
    monkeypatch.setattr(formats, "GROUP", 64)
    case = Case("hqq", m, 2304, 9216, bf16)
    inputs = make_inputs(case, "cuda")
    compiled = compiled_in(case, config)
    first = compiled(*inputs)
    assert_right(first, case, inputs)
    load, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(500):
        with torch.cuda.stream(other):
            load @ load
        assert torch.equal(compiled(*inputs), first)


@pytest.mark.parametrize(
    ("m", "n", "config"),
    [
        (33, 4096, "64x128x128_w8_s4_g8_k4"),  # one part has a row, one has none
        (64, 2048, "64x64x128_w4_s4_g8_k4"),
        (100, 4096, "128x64x64_w4_s4_g8_k4"),
        (256, 4096, "128x128x128_w8_s4_g8_k2"),
        (256, 8192, "256x128x64_w8_s4_g8_k2"),
        (300, 2048, "256x64x64_w4_s4_g8_k2"),
        (20, 4096, "32x64x128_w4_s4_g8_k4"),
        (33, 4096, "64x128x128_w8_s4_g8_k3"),  # five of eight strips have a row, three slices
        (128, 5120, "128x128x64_w8_s8_g8_k3"),
        (150, 2048, "256x128x64_w8_s4_g8_k5"),
        (64, 1280, "64x64x128_w4_s4_g8_k5"),
        (256, 1280, "256x64x64_w4_s4_g8_k6"),
        (120, 2048, "128x64x64_w8_s8_g8_k4"),  # two consumers
        (64, 1536, "64x64x64_w8_s8_g8_k5"),
        (12, 4096, "16x64x256_w4_s4_g8_k2"),
        (40, 4096, "64x128x256_w8_s3_g8_k4"),
    ],
)
@pytest.mark.parametrize("name", ["nibble_pairs", "int8_channel", "awq"])
def test_ctas_exchange_the_sums_of_slices_of_k(name, m, n, config, monkeypatch):
    """With a scale and a bias of each column, and in a second graph that is replayed beside it."""
    if m <= 16 and name != "nibble_pairs":
        pytest.skip("up to 16 rows the kernel takes up to 4 bits, in words of one column")
    monkeypatch.setattr(formats, "GROUP", 128)
    case = Case(name, m, n, 4096, bf16, column_scale="channel", bias=True)
    _, problem = described(case)
    slices = int(config[-1])
    assert exchanged_slices(problem, parse_config(config), device(90)) == slices
    inputs = make_inputs(case, "cuda")
    compiled = compiled_in(case, config)
    first = compiled(*inputs)
    assert_right(first, case, inputs)
    graphs, outputs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(compiled(*inputs))
        graphs.append((graph, torch.cuda.Stream()))
    for _ in range(50):
        for graph, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out in outputs)


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (128, 4096, 1024, "128x64x64_w8_s8_g8"),
        (100, 4096, 1152, "128x64x64_w8_s8_g8"),  # nine turns: the first consumer has five
        (33, 2048, 2176, "64x64x64_w8_s8_g8"),  # the last turn ends beyond K
        (250, 4096, 256, "128x64x64_w8_s8_g8"),  # one turn of each
        (500, 1600, 4096, "128x64x64_w8_s8_g8"),
    ],
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("nibble_pairs", f16), ("int8_channel", bf16), ("awq", bf16), ("gptq", f16), ("hqq", bf16)],
)
def test_two_consumers_take_turns_along_k(name, dtype, m, n, k, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    case = Case(name, m, n, k, dtype, column_scale="channel", bias=True)
    inputs = make_inputs(case, "cuda")
    compiled = compiled_in(case, config)
    assert_right(compiled(*inputs), case, inputs)
