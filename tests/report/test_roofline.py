"""What a report says of a GEMM: the bytes of packed operands, and which families are timed."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from inductor_quant.lowering import autotune_timing
from inductor_quant.ops import block_sparse, weight_only
from inductor_quant.report import events, explain, roofline
from inductor_quant.report.events import KernelChoice, Report
from inductor_quant.spec.decisions import Match, Site
from inductor_quant.spec.gemm import OperandSpec, QuantGemmSpec, ScaleSpec
from tests.support.gemms.formats import FORMATS, build

bf16, f32 = torch.bfloat16, torch.float32


def spec(a: OperandSpec, b: OperandSpec) -> QuantGemmSpec:
    return QuantGemmSpec(a, b, bf16)


@pytest.mark.parametrize(
    ("b", "weight_bytes"),
    [
        (OperandSpec(torch.int8, ScaleSpec(f32, (-1, 1))), 512 * 256 + 4 * 256),
        (OperandSpec(torch.int8, ScaleSpec(f32, (-1, -1))), 512 * 256 + 4),
        (OperandSpec(torch.uint8, ScaleSpec(bf16, (64, 1)), bits=4), 512 * 128 + 2 * 8 * 256),
        (OperandSpec(torch.float8_e4m3fn, ScaleSpec(f32, (128, 128))), 512 * 256 + 4 * 4 * 2),
        (OperandSpec(torch.uint8, ScaleSpec(bf16, (0, 1)), bits=4), 512 * 128),
    ],
    ids=str,
)
def test_packed_weights_count_by_their_bits(b: OperandSpec, weight_bytes: int) -> None:
    activation, result = 2 * 16 * 512, 2 * 16 * 256
    found = roofline.gemm_bytes(spec(OperandSpec(bf16), b), 16, 256, 512)
    assert found == activation + weight_bytes + result


def test_of_a_sparse_weight_the_stored_blocks_count() -> None:
    found = block_sparse.make_spec(bf16, (32, 64), 7, bias=True)
    blocks = 7 * 32 * 64
    assert roofline.gemm_bytes(found, 16, 256, 512) == 2 * (16 * 512 + blocks + 16 * 256)
    assert roofline.gemm_operations(found, 16, 256, 512) == 2 * 16 * blocks
    inputs = roofline._sparse_inputs(found, 16, 256, 512, torch.device("cpu"))
    assert len(inputs) >= 2
    *given, dense = inputs[0]
    assert dense is not None
    assert block_sparse.spec_of(*given, n=256) == found  # type: ignore[arg-type]
    assert roofline._block_sparse(*inputs[0]).isfinite().all()
    assert roofline._dense(*inputs[0]).shape == (16, 256)


def test_every_family_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def time_gemm(*arguments: object, weight: object) -> roofline.Timing:
        timed.append(arguments)
        return roofline.Timing(1.0, 2.0, 0.5)

    monkeypatch.setattr(roofline, "time_gemm", time_gemm)
    monkeypatch.setattr(roofline, "roofs", lambda device: {})
    int8 = OperandSpec(torch.int8, ScaleSpec(f32, (-1, 1)))
    site = Site("mm", "aten.mm", 1, 16, 256, 512, "bf16", "bf16", "cuda:0")
    specs = {"w8a8": spec(int8, int8), "weight_only": spec(OperandSpec(bf16), int8)}
    report = Report()
    for family, of in specs.items():
        report.decisions.append(Match(family, of, 16, 256, 512, "mm", call=family, site=site))
        choice = KernelChoice(family, str(of), ("a kernel",), node=family, sizes=(16, 256, 512))
        report.kernels.append(choice)
    rows = explain._explanation(report, None, True).rows
    assert len(timed) == 2
    has_timing = {row.decision.family: row.timing is not None for row in rows}  # type: ignore[union-attr]
    assert has_timing == {"w8a8": True, "weight_only": True}


@pytest.mark.parametrize("name", FORMATS)
def test_operands_of_every_packed_format_are_valid(name: str) -> None:
    """As many as the format reads, and every number that is a position lies within its tensor."""
    packed = build(name, 320, 64)
    tensors = tuple((dtype, shape) for _, shape, dtype in packed.tensors)
    operands = roofline.packed_operands((packed.format, tensors), torch.device("cpu"))
    assert [(t.dtype, tuple(t.shape)) for t in operands] == list(tensors)
    if name != "shift_table":  # whose shifts are any numbers
        assert weight_only.dequantize(packed.format, operands).shape == packed.format.shape


def test_a_weight_only_row_without_its_weight_has_no_time() -> None:
    of = spec(OperandSpec(bf16), OperandSpec(torch.uint8, bits=4))
    assert roofline.time_gemm(of, 16, 256, 512, torch.device("cpu"), None) is None


@pytest.mark.parametrize("b_block", [(-1, 1), (128, 128), (128, 1)])
def test_operands_of_fp8_are_what_the_op_and_stock_torch_take(b_block: tuple[int, int]) -> None:
    is_block, is_plain = b_block == (128, 128), b_block == (-1, 1)
    blocks = (1, 128 if is_block else -1), b_block
    e4m3 = torch.float8_e4m3fn
    a, b = (OperandSpec(e4m3, ScaleSpec(f32, block)) for block in blocks)
    of = QuantGemmSpec(a, b, bf16, bias=not is_block)
    [first, second] = roofline.operands(of, 48, 256, 384, torch.device("cpu"))
    assert first[1] is not second[1]
    out = roofline.canonical(of)(*first)
    assert (out.shape, out.dtype) == ((48, 256), bf16)
    if is_plain:  # blocks are for a GPU, and torch has no groups
        torch.testing.assert_close(roofline.plain(of)(*first), out, rtol=2e-2, atol=0.5)


def test_fp8_without_a_scale_of_its_activation_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    e4m3 = OperandSpec(torch.float8_e4m3fn)
    monkeypatch.setattr(roofline, "operands", lambda *given: [()])
    monkeypatch.setattr(roofline, "_captured", lambda *given: list)
    monkeypatch.setattr(roofline, "_median_us", lambda runs: [4.0, 8.0])
    monkeypatch.setattr(roofline, "floor_us", lambda *given: 2.0)
    timing = roofline.time_gemm(spec(e4m3, e4m3), 16, 256, 512, torch.device("cpu"), None)
    assert timing == roofline.Timing(4.0, 8.0, 0.5)


def test_a_configuration_must_be_clearly_faster_than_the_best_guess() -> None:
    def chosen(*times: float | None) -> str:
        return KernelChoice("w8a8", "spec", ("guess", "second", "third"), times_us=times).chosen

    assert chosen(None, None, None) == "guess"
    assert chosen(10.0, 9.9, 9.85) == "guess"
    assert chosen(10.0, 9.9, 9.7) == "third"

    request: Any = types.SimpleNamespace(benchmark=lambda *inputs, out: 3.0)
    choice, out = types.SimpleNamespace(bmreq=request), torch.empty(1)
    autotune_timing.time_in_graph(choice, events.HANDICAP)
    assert choice.benchmark(out, out=out) == pytest.approx(3.0 * events.HANDICAP)
