"""``python -m inductor_quant which``: the kernel that a compilation takes, without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from inductor_quant import __main__, simulate
from inductor_quant.errors import SpecError
from inductor_quant.kernels import KERNELS, dispatch
from inductor_quant.ops import fp8, fp8_block, w4a8, w8a8, weight_only
from inductor_quant.options import FAMILIES
from inductor_quant.report import formats, which
from inductor_quant.report.events import collect
from inductor_quant.report.formats import Gemm
from tests.support.gemms.generated import device, generate

ROOT = Path(__file__).parents[2]
bf16, f32 = torch.bfloat16, torch.float32

# family, format, (M, N, K), arch -> kernel
CHOSEN = [
    ("w8a8", "per_token", (1, 4096, 4096), 90, "w8a8_decode"),
    ("w8a8", "per_token", (16, 4096, 4096), 90, "w8a8_mm"),
    ("w8a8", "per_token", (1, 4096, 4096), 80, "w8a8_mm"),
    ("w8a8", "per_tensor", (4096, 14336, 4096), 90, "w8a8_large_m_sm90"),
    ("w8a8", "per_token", (8192, 14336, 4096), 100, "w8a8_mm"),
    ("w8a8", "asymmetric", (16, 4096, 4096), 90, "w8a8_mm"),
    ("w8a8", "group", (4, 4096, 4096), 90, "w8a8_mm"),
    ("w4a8", "int4_bytes", (1, 4096, 4096), 90, "w4a8_direct"),
    ("w4a8", "int4_channel", (256, 4096, 4096), 90, "w4a8_mm_sm90"),
    ("w4a8", "qqq_group", (16, 4096, 4096), 90, "w4a8_direct"),
    ("w4a8", "qserve", (64, 4096, 4096), 90, "w4a8_mm_sm90"),
    ("w4a8", "int4_channel", (64, 4096, 4096), 80, "w4a8_mm"),
    ("w4a8", "gptq", (256, 4096, 4096), 89, "w4a8_mm"),
    ("weight_only", "gptq", (1, 4096, 4096), 90, "weight_only_decode"),
    ("weight_only", "gptq", (16, 28672, 4096), 90, "weight_only_small_m_sm90"),
    ("weight_only", "gptq", (24, 4096, 4096), 80, "weight_only_small_m"),
    ("weight_only", "gptq", (128, 4096, 4096), 90, "weight_only_mm_sm90"),
    ("weight_only", "gptq", (2048, 4096, 4096), 90, "weight_only_mm_sm90"),
    ("weight_only", "gptq", (300, 4096, 4096), 80, "weight_only_dequantize"),
    ("weight_only", "int8", (1, 4096, 4096), 90, "weight_only_direct"),
    ("weight_only", "int8", (20, 4096, 4096), 80, "weight_only_bytes"),
    ("weight_only", "nf4", (1, 4096, 4096), 90, "weight_only_direct"),
    ("weight_only", "nf4", (40, 4096, 4096), 80, "weight_only_mm"),
    ("fp8", "rowwise", (16, 4096, 4096), 90, "fp8_split_k"),
    ("fp8", "rowwise", (300, 512, 512), 90, "fp8_mm"),
    ("fp8", "tensorwise", (4096, 14336, 4096), 90, "fp8_large_m_sm90"),
    ("fp8_block", "block_128", (1, 4096, 7168), 90, "fp8_block_decode"),
    ("fp8_block", "block_128", (32, 4096, 7168), 90, "fp8_block_split_k"),
    ("fp8_block", "block_128", (4096, 4096, 7168), 90, "fp8_block_large_m_sm90"),
    ("block_sparse", "block_32", (1, 4096, 4096), 90, "block_sparse_direct"),
    ("block_sparse", "block_16", (1, 4096, 4096), 90, "block_sparse_mm"),
    ("block_sparse", "int8_block_32", (1, 4096, 4096), 90, "block_sparse_direct"),
    ("block_sparse", "block_64", (256, 4096, 4096), 90, "block_sparse_mm"),
    ("block_sparse", "block_64", (4096, 4096, 4096), 90, "block_sparse_mm_tma"),
    ("block_sparse", "block_128", (4096, 4096, 4096), 80, "block_sparse_mm"),
]


@pytest.mark.parametrize(("family", "format", "sizes", "arch", "kernel"), CHOSEN)
def test_the_kernel_of_a_gemm(family, format, sizes, arch, kernel):
    decision = which.which(family, Gemm(*sizes), format=format, arch=arch)
    assert decision.kernel is not None
    assert decision.kernel.name == kernel
    assert (ROOT / which.module_path(decision.kernel)).is_file()
    names = [each.name for each in KERNELS if each.family == family]
    before = names[: names.index(kernel)] if kernel in names else names
    assert [each.name for each, _ in decision.rejected] == before
    assert all(rejection.detail for _, rejection in decision.rejected)


@pytest.mark.parametrize("arch", simulate.GPUS)
def test_the_devices_are_those_of_the_virtual_gpus(arch):
    assert which.DEVICES[arch] == device(arch)


@pytest.mark.parametrize("name", formats.WEIGHT_ONLY)
@pytest.mark.parametrize("m", [1, 64])
def test_every_packed_format_has_a_kernel(name, m):
    decision = which.which("weight_only", Gemm(m, 512, 1024), format=name)
    assert decision.kernel is not None


@pytest.mark.parametrize(
    ("family", "format", "m", "is_sorted", "kernel"),
    [
        ("experts", "compressed_tensors", 4 * 32, True, "experts_direct"),
        ("experts", "mxfp4", 64 * 32, True, "experts_mm_sm90"),
        ("experts", "gptq_act_order", 64 * 32, True, "experts_mm"),
        ("experts", "gptq_act_order", 8, False, "experts_mm"),
        ("scaled_experts", "fp8_block", 4 * 32, True, "scaled_experts_mm"),
        ("scaled_experts", "fp8_block", 512 * 32, True, "scaled_experts_large_m_sm90"),
        ("scaled_experts", "int8", 8, False, "scaled_experts_int8_mm"),
    ],
)
def test_the_kernel_of_experts(family, format, m, is_sorted, kernel):
    gemm = Gemm(m, 512, 1024, experts=32, is_sorted=is_sorted)
    assert which.which(family, gemm, format=format).kernel.name == kernel
    with pytest.raises(SpecError, match="experts"):
        which.which(family, Gemm(m, 512, 1024), format=format)


@pytest.mark.parametrize("name", formats.WEIGHT_ONLY)
def test_every_packed_format_has_a_kernel_of_experts(name):
    gemm = Gemm(64, 512, 1024, experts=8)
    assert which.which("experts", gemm, format=name).kernel is not None


def call(family: str, format: str, gemm: Gemm):
    """The canonical op of ``formats``, and its operands on a device."""
    m, n, k = gemm.m, gemm.n, gemm.k
    if family == "weight_only":
        weight, tensors = formats.WEIGHT_ONLY[format](k, n, gemm.dtype)
        text = weight.encode()

        def make(device):
            empty = (torch.empty(shape, dtype=dtype, device=device) for dtype, shape in tensors)
            return torch.empty(m, k, dtype=gemm.dtype, device=device), *empty

        def fn(x, *weight):
            return weight_only.op(x, list(weight), None, None, format=text, out_dtype=gemm.dtype)

        return fn, make
    if family == "w4a8":
        _, problem = formats.packed_int8(format, gemm)
        text = problem.weight.format.encode()

        def make(device):
            a = torch.empty(m, k, dtype=torch.int8, device=device)
            scales = torch.empty(m, 1, device=device), torch.empty(1, n, device=device)
            tensors = problem.weight.tensors
            return (
                a,
                *scales,
                *(torch.empty(t.shape, dtype=t.dtype, device=device) for t in tensors),
            )

        def fn(a, a_scale, b_scale, *weight):
            operands = (a, list(weight), a_scale, b_scale, None)
            return w4a8.op(*operands, format=text, out_dtype=gemm.dtype)

        return fn, make
    scaled = formats.SCALED[family][format]
    op, options = {
        "w8a8": (w8a8.op, {}),
        "fp8": (fp8.op, {}),
        "fp8_block": (fp8_block.op, {"block_k": scaled.b[0], "block_n": scaled.b[1]}),
    }[family]
    dtype = torch.int8 if family == "w8a8" else torch.float8_e4m3fn

    def make(device):
        def scale(shape, block):
            pairs = zip(shape, block, strict=True)
            sizes = [1 if size == -1 else -(-length // size) for length, size in pairs]
            return torch.empty(sizes, dtype=scaled.dtype, device=device)

        a = torch.empty(m, k, dtype=dtype, device=device)
        w = torch.empty(n, k, dtype=dtype, device=device)
        return a, w, scale((m, k), scaled.a), scale((k, n), scaled.b)

    def fn(a, w, a_scale, b_scale):
        return op(a, w.t(), a_scale, b_scale, None, out_dtype=gemm.dtype, **options)

    return fn, make


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("family", "format", "sizes", "arch"),
    [
        ("w8a8", "per_token", (1, 4096, 4096), 90),
        ("w8a8", "group", (20, 512, 512), 80),
        ("w4a8", "compressed_tensors", (40, 512, 512), 90),
        ("w4a8", "qqq_group", (3, 512, 512), 90),
        ("w4a8", "int4_channel", (40, 512, 512), 80),
        ("w4a8", "gptq", (200, 512, 512), 89),
        ("weight_only", "gptq", (16, 4096, 4096), 90),
        ("weight_only", "hqq", (300, 512, 512), 90),
        ("weight_only", "int8_group", (2, 512, 512), 89),
        ("fp8", "rowwise", (16, 512, 512), 80),
        ("fp8_block", "block_128", (1, 4096, 7168), 90),
    ],
)
def test_it_says_what_a_compilation_takes(family, format, sizes, arch):
    gemm = Gemm(*sizes)
    with collect() as report:
        generate(*call(family, format, gemm), arch=arch)
    [choice] = report.kernels
    decision = which.which(family, gemm, format=format, arch=arch)
    if decision.kernel.family == dispatch.DEQUANTIZE:
        assert choice.chosen == dispatch.DEQUANTIZE_THEN_MM
        assert any(dispatch.DEQUANTIZE_THEN_MM in note for note in decision.notes)
    else:
        assert choice.chosen == f"{decision.kernel.name} {decision.config}"


def test_floats_are_quantized_in_the_gemm_for_few_rows():
    few = which.which("w8a8", Gemm(1, 4096, 4096), linear=True)
    assert few.kernel.name == "w8a8_decode_quantize"
    many = which.which("w8a8", Gemm(5, 4096, 4096), linear=True)
    assert many.kernel.name == "w8a8_decode"
    assert many.notes == ("a kernel before the GEMM quantizes x: M > 4",)


def test_what_nothing_of_ours_computes_has_no_note_of_a_kernel():
    decision = which.which("weight_only", Gemm(8, 4096, 4096), format="fp8", arch=80)
    assert decision.kernel is None
    assert decision.notes == ()


def test_a_small_layer_that_is_faster_in_the_library_says_so():
    decision = which.which("weight_only", Gemm(512, 1216, 1216), format="int8", arch=90)
    assert decision.kernel.name == "weight_only_dequantize"
    assert decision.rejected[-1][0].name == "weight_only_mm_sm90"  # no later kernel was asked
    assert ": that is faster" in decision.notes[0]


def test_a_product_that_cublaslt_keeps_says_so():
    decision = which.which("fp8_block", Gemm(128, 24576, 1536))
    assert "many_rows" in decision.notes[0]
    assert "many_rows" in which.which("fp8", Gemm(128, 24576, 1536)).notes[0]
    assert not which.which("fp8", Gemm(128, 4096, 1536)).notes


@pytest.mark.parametrize("family", ["weight_only", "w8a8"])
def test_sizes_that_a_format_cannot_have_are_refused(family):
    format = {"weight_only": "gptq", "w8a8": "group"}[family]
    with pytest.raises(SpecError, match="no multiple"):
        which.which(family, Gemm(1, 512, 200), format=format)


def test_the_command_prints_kernel_rejections_and_files(forks):
    gemm = "weight_only --m 24 --n 4096 --k 4096 --arch 80".split()  # noqa: SIM905
    status, printed = forks.python("inductor_quant", "which", *gemm)
    assert status == 0
    lines = printed.splitlines()
    assert lines[0].startswith("gemm      (a=bf16, b=u4/128x1:bf16 zero=packed, out=bf16) on sm_80")
    assert "not       weight_only_small_m_sm90  " in lines[1]
    [kernel, module, template] = lines[-3:]
    assert kernel.startswith("runs      weight_only_small_m ")
    assert module.split() == ["module", "inductor_quant/kernels/weight_only/small_m/kernel.py"]
    assert (ROOT / template.split()[1]).is_file()


def test_the_list_has_a_line_for_each_format(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["inductor_quant", "which", "--list"])
    assert __main__.main() == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    expected = [name for family in FAMILIES for name in (family, *formats.names(family))]
    assert listed == expected


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("w8a8 --m 1 --n 16", "--m, --n and --k are required"),
        ("fp8 --m 1 --n 16 --k 32 --format gptq", "the formats of fp8 are rowwise"),
        ("fp8 --m 1 --n 16 --k 32 --linear", "--linear is for w8a8"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["inductor_quant", "which", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        __main__.main()
    assert error in capsys.readouterr().err
