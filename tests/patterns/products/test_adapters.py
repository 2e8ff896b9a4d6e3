"""Ops of quantizers that are replaced by the formula that they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import inductor_quant
from inductor_quant import simulate
from inductor_quant.options import Options
from inductor_quant.spec import formulas
from tests.support.checkpoints.models import Distance
from tests.support.graphs.post_grad import capture
from tests.support.producers.registry import need_package

N, K = 96, 512


class Gemm4bit(nn.Module):
    def __init__(self, kind: str, nested: bool, bias: bool, size: int = 64) -> None:
        super().__init__()
        weight = torch.randn(N, K).bfloat16()
        ops: Any = torch.ops.bitsandbytes
        packed, absmax = ops.quantize_4bit(weight, size, kind, torch.uint8)
        self.kind, self.size = kind, size
        self.packed, self.absmax = nn.Buffer(packed), nn.Buffer(absmax)
        self.bias = nn.Buffer(torch.randn(N).bfloat16()) if bias else None
        for name in ("codes", "code", "offset"):
            self.register_buffer(name, None)
        if nested:
            from bitsandbytes.functional import create_dynamic_map

            code, offset = create_dynamic_map(), absmax.mean()
            codes, absmax = ops.quantize_blockwise(absmax - offset, code, 256)
            self.absmax = nn.Buffer(absmax)
            self.code, self.offset, self.codes = map(nn.Buffer, (code, offset, codes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops: Any = torch.ops.bitsandbytes
        return ops.gemm_4bit(x, self.packed, [N, K], self.absmax, self.size, self.kind, self.bias,
                             self.codes, self.code, self.offset)  # fmt: skip


def activation(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(autouse=True)
def _setting():
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def bitsandbytes() -> None:
    need_package("bitsandbytes")


@pytest.mark.usefixtures("bitsandbytes")
class TestBitsandbytes:
    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("kind", ["nf4", "fp4"])
    def test_4_bits(self, kind: str, nested: bool) -> None:
        module, x = Gemm4bit(kind, nested, bias=nested), activation(2, 5)
        out, [rewrite] = capture(module, [x])
        [match] = rewrite.report.matches
        assert match.family == "weight_only"
        assert match.exactness.value == "reassociated"  # how the op rounds is not known
        assert match.site.op == "bitsandbytes.gemm_4bit"
        assert (match.n, match.k) == (N, K)
        assert Distance.of(out, module(x)).rms < 2e-3

    def test_any_number_of_rows(self) -> None:
        module, x = Gemm4bit("nf4", True, bias=True), activation(2, 5)
        out, [rewrite] = capture(module, [x], dynamic=True)
        assert len(rewrite.report.matches) == 1
        assert Distance.of(out, module(x)).rms < 2e-3

    def test_blocks_across_rows_stay(self) -> None:
        _, [rewrite] = capture(Gemm4bit("nf4", False, bias=False, size=1024), [activation(5)])
        assert rewrite.codes == ["opaque"]
        assert rewrite.is_untouched

    def test_strict_numerics_leave_the_op(self) -> None:
        options = Options(numerics="strict", on_error="raise")
        _, [rewrite] = capture(Gemm4bit("nf4", False, bias=False), [activation(5)], options=options)
        assert rewrite.codes == ["opaque"]
        [rejection] = rewrite.report.rejections
        assert "an op of bitsandbytes" in rejection.detail
        assert rewrite.is_untouched

    def test_a_family_that_is_off_leaves_the_op(self) -> None:
        options = Options(families=("w8a8",), on_error="raise")
        _, [rewrite] = capture(Gemm4bit("nf4", True, bias=False), [activation(5)], options=options)
        assert rewrite.is_untouched

    def test_older_calls(self) -> None:
        """A vector has an op of its own; otherwise the weight is dequantized, its scales too."""
        held, ops = Gemm4bit("fp4", True, bias=True), torch.ops.bitsandbytes
        x, code = activation(1), torch.tensor(formulas.FP4)

        def scales() -> torch.Tensor:
            given = (held.codes, held.absmax, held.code, 256, torch.float32)
            return ops.dequantize_blockwise(*given) + held.offset

        def vector(x: torch.Tensor) -> torch.Tensor:
            return ops.gemv_4bit(x, held.packed, [N, K], scales(), code, 64)

        def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            given = (held.packed, scales(), 64, "fp4", [N, K], x.dtype)
            return nn.functional.linear(x, ops.dequantize_4bit(*given), bias)

        def matrix(x: torch.Tensor) -> torch.Tensor:
            return product(x, held.bias)

        # On a CPU with AVX512 for bf16 the vector's op reads another layout of the codes.
        cases = ((vector, x, None), (matrix, x, held.bias), (matrix, activation(2, 5), held.bias))
        for fn, rows, bias in cases:
            out, [rewrite] = capture(fn, [rows])
            [match] = rewrite.report.matches
            assert "lut/64x1" in str(match.spec)
            assert Distance.of(out, product(rows, bias)).rms < 2e-3

    def test_int8(self) -> None:
        ops: Any = torch.ops.bitsandbytes
        b, columns, _ = ops.int8_vectorwise_quant(torch.randn(N, K).half(), 0.0)
        bias, x = torch.randn(N).bfloat16(), activation(5)

        def fn(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a, rows, _ = ops.int8_vectorwise_quant(x.half(), 0.0)
            return ops.int8_scaled_mm(a, b, rows, columns, bias=bias, dtype=torch.bfloat16)

        out, [rewrite] = capture(fn, [x, b])
        [match] = rewrite.report.matches
        assert match.family == "w8a8"
        assert Distance.of(out, fn(x, b)).rms < 2e-3


def test_a_schema_that_has_changed_stays_opaque() -> None:
    with torch.library._scoped_library("bitsandbytes_other", "DEF") as library:
        library.define("gemm_4bit(Tensor A, Tensor B, int[] shapeB) -> Tensor")

        def meaning(a: torch.Tensor, b: torch.Tensor, shape: list[int]) -> torch.Tensor:
            return a.new_zeros(*a.shape[:-1], shape[0])

        library.impl("gemm_4bit", meaning, "CompositeExplicitAutograd")
        op = torch.ops.bitsandbytes_other.gemm_4bit
        packed = torch.zeros(N * K // 2, 1, dtype=torch.uint8)
        _, [rewrite] = capture(lambda x, w: op(x, w, [N, K]), [activation(5), packed])
    assert rewrite.codes == ["opaque"]


# ------------------------------------------------------------------------------------------
# tinygemm: the CUDA kernel's packing, read from int4mm.cu


def packed_by_the_kernel(q: torch.Tensor, inner: int) -> torch.Tensor:
    """``matrix_to_m16n8k16_Bint4_layout``, one thread after another."""
    n, k = q.shape
    out = torch.zeros(n // 8, k // (inner * 16), 32, inner // 2, dtype=torch.int64)
    for a, b, lane, tile in torch.cartesian_prod(*map(torch.arange, out.shape)).tolist():
        row, first = 8 * a + lane // 4, (b * inner + 2 * tile) * 16 + lane % 4 * 2
        low = [first, first + 8, first + 16, first + 24]  # of four pairs of neighbours along k
        for i, place in enumerate(low):
            out[a, b, lane, tile] += int(q[row, place]) << (4 * i)
            out[a, b, lane, tile] += int(q[row, place + 1]) << (4 * i + 16)
    return torch.where(out >= 2**31, out - 2**32, out).int()


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_the_layout_of_tinygemm(inner: int) -> None:
    n, k, group = 16, 256, 64
    q = torch.randint(0, 16, (n, k))
    scales, zeros = torch.rand(k // group, n).bfloat16(), torch.randn(k // group, n).bfloat16()
    exact = (q.double() - 8).view(n, k // group, group) * scales.double().t()[..., None]
    exact = (exact + zeros.double().t()[..., None]).view(n, k)
    both, words = torch.stack([scales, zeros], -1), packed_by_the_kernel(q, inner)
    identity = torch.eye(k, dtype=torch.bfloat16)
    weight = formulas.int4pack_mm(identity, words, group, both).t()
    assert torch.equal(weight, exact.float().bfloat16())


class Tinygemm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Buffer(torch.empty(N // 8, K // 128, 32, 4, dtype=torch.int32))
        self.both = nn.Buffer(torch.empty(K // 64, N, 2, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, self.words, 64, self.both)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_tinygemm_is_matched_on_a_card(dynamic: bool) -> None:
    with simulate.virtual_gpu(90), FakeTensorMode(), torch.device("cuda"):
        module, x = Tinygemm(), torch.empty(5, K, dtype=torch.bfloat16)
        explanation = inductor_quant.explain(
            module, x, timings=False, verbose=False, dynamic=dynamic
        )
    [match] = explanation.matches
    assert "u4/64x1" in str(match.spec)


def test_a_row_of_tinygemm_is_matched_where_inductor_makes_sums_of_products() -> None:
    """torchao's ``quantize_`` sets the option."""
    torch.compiler.reset()
    option = torch._inductor.config.patch(coordinate_descent_tuning=True)
    with option, simulate.virtual_gpu(90), FakeTensorMode(), torch.device("cuda"):
        module, x = Tinygemm(), torch.empty(1, K, dtype=torch.bfloat16)
        explanation = inductor_quant.explain(module, x, timings=False, verbose=False)
    assert [match.family for match in explanation.matches] == ["weight_only"]


# ------------------------------------------------------------------------------------------
# mslk: stand-ins by its schemas, computed from the packing of its documentation


@pytest.fixture
def mslk():
    def int4(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Any:
        q = torch.stack([w.int() & 15, w.int() >> 4 & 15], -1).flatten(1)
        q = torch.where(q > 7, q - 16, q).double()
        size = q.shape[1] // len(scales)
        scales, zeros = (t.double().t().repeat_interleave(size, 1) for t in (scales, zeros))
        weight = (q * scales + zeros).float().bfloat16()
        return (x.double() @ weight.double().t()).bfloat16()

    def fp8(a: Any, b: Any, rows: Any, columns: Any, bias: Any = None, fast: bool = True) -> Any:
        out = (a.double() @ b.double().t()) * rows.double()[:, None] * columns.double()
        return (out if bias is None else out + bias.double()).bfloat16()

    with torch.library._scoped_library("mslk", "FRAGMENT") as library:
        for schema, meaning in (
            ("bf16i4bf16_rowwise(Tensor X, Tensor W, Tensor w_scale_group, Tensor w_zero_group)",
             int4),
            ("f8f8bf16_rowwise(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, "
             "Tensor? bias=None, bool use_fast_accum=True)", fp8),
        ):  # fmt: skip
            name = schema.partition("(")[0]
            library.define(f"{schema} -> Tensor")
            library.impl(name, meaning, "CPU")
            library.impl(name, lambda x, w, *_: x.new_empty(*x.shape[:-1], w.shape[0],
                         dtype=torch.bfloat16), "Meta")  # fmt: skip
        yield torch.ops.mslk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_of_mslk(mslk: Any, dtype: torch.dtype) -> None:
    packed = torch.randint(-128, 128, (N, K // 2), dtype=torch.int8)
    scales, zeros = torch.rand(K // 64, N).to(dtype), torch.randn(K // 64, N).to(dtype)
    x = activation(2, 5)
    out, [rewrite] = capture(mslk.bf16i4bf16_rowwise, [x, packed, scales, zeros])
    [match] = rewrite.report.matches
    assert match.site.op == "mslk.bf16i4bf16_rowwise"
    assert "i4/64x1" in str(match.spec)
    assert Distance.of(out, mslk.bf16i4bf16_rowwise(x, packed, scales, zeros)).rms < 2e-3
    # where ours are not known to be as fast
    _, [many] = capture(mslk.bf16i4bf16_rowwise, [activation(17), packed, scales, zeros])
    assert many.is_untouched
    assert many.codes == ["opaque"]
    _, [symbolic] = capture(mslk.bf16i4bf16_rowwise, [x, packed, scales, zeros], dynamic=True)
    assert symbolic.is_untouched


@pytest.mark.parametrize("has_bias", [False, True])
def test_fp8_of_mslk(mslk: Any, has_bias: bool) -> None:
    a, b = (torch.randn(rows, K).to(torch.float8_e4m3fn) for rows in (5, N))
    bias = torch.randn(N).bfloat16() if has_bias else None
    given = [a, b, torch.rand(5), torch.rand(N), bias]
    out, [rewrite] = capture(mslk.f8f8bf16_rowwise, given)
    [match] = rewrite.report.matches
    assert match.family == "fp8"
    assert match.spec.fast_accum
    assert Distance.of(out, mslk.f8f8bf16_rowwise(*given)).rms < 2e-3
    exact = capture(lambda *t: mslk.f8f8bf16_rowwise(*t, use_fast_accum=False), given)[1][0]
    assert [match.spec.fast_accum for match in exact.report.matches] == [False]
    many = [torch.randn(65, K).to(torch.float8_e4m3fn), b, torch.rand(65), torch.rand(N), None]
    assert capture(mslk.f8f8bf16_rowwise, many)[1][0].is_untouched
