"""Lowering of ``inductor_quant::row_reduce`` and ``inductor_quant::quantize``: a row is read
once, and reduced and rounded in few instructions, which bound its time.

The reduction is Inductor's own, never split. For few long rows Inductor splits a reduction over
several CTAs. The partial results then need a kernel of their own, and the quantization needs
another that reads the rows again: three launches instead of one. A row of an activation is a few
tens of kilobytes, which one CTA reads quickly, and only once: up to LONGEST elements stay in
registers between reduction and quantization, and the ops before them (GELU, a norm) are computed
once.

Inductor's rounding and NaN-keeping clamp take 14 instructions an element, and it divides each
element by ``div.full.f32``, a product with an approximate reciprocal. Here rounding takes two, and
the reciprocal is taken once a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.lowering.select import lowering_of
from inductor_quant.ops.fusion import quantize, row_reduce

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default
LONGEST = 16384
# PTX ISA, cvt: rounds to nearest, ties to even; saturates at -128 and 127; NaN gives 0.
ROUND_TO_INT8 = "cvt.rni.sat.s8.f32 $0, $1;"
# x / scale, from x, -scale, 1 / scale and their product q: q + (x - q * scale) / scale. Its error
# is far below the distance of another quotient from a number halfway between two of e4m3.
DIVIDE = "{ .reg .f32 e; fma.rn.f32 e, $4, $2, $1; fma.rn.f32 $0, e, $3, $4; }"
_LARGEST = torch.finfo(torch.float32).max


@fallback.lowering(row_reduce.op)
def lower_row_reduce(x: Any, kind: str, keepdim: bool) -> Any:
    compat.keep_rows_in_registers(row_reduce.op, LONGEST)
    with compat.inductor_config().patch(split_reductions=False):
        if kind == "absmax":
            return _absmax(x, keepdim)
        return lowering_of(row_reduce.KINDS[kind])(x, [-1], keepdim)


def _absmax(x: Any, keepdim: bool) -> Any:
    """The largest absolute value, by comparing bits."""
    bits = absolute_bits(lowering_of(cast)(x, torch.float32))
    largest = lowering_of(row_reduce.KINDS["amax"])(bits, [-1], keepdim)
    return lowering_of(cast)(from_bits(largest), x.get_dtype())


def absolute_bits(x: Any) -> Any:
    """The bits of |x|, fp32, as int32. They compare like the values, with NaN above all, and an
    integer maximum is one instruction; a float maximum that keeps NaN takes three."""
    ops = compat.ops()

    def bits(x: Any) -> Any:
        return ops.to_dtype_bitcast(ops.abs(x), torch.int32, torch.float32)

    return compat.make_pointwise(bits, override_return_dtype=torch.int32)(x)


def from_bits(bits: Any) -> Any:
    """The fp32 values of ``absolute_bits``."""
    ops = compat.ops()

    def value(x: Any) -> Any:
        return ops.to_dtype_bitcast(x, torch.float32, torch.int32)

    return compat.make_pointwise(value, override_return_dtype=torch.float32)(bits)


@fallback.lowering(quantize.op)
def lower_quantize(
    x: Any, scale: Any = None, low: int = -128, high: int = 127, *, dtype: torch.dtype
) -> Any:
    if dtype == torch.int8:
        x = lowering_of(cast)(x, torch.float32)
        if scale is not None:
            x = lowering_of(aten.mul.Tensor)(x, lowering_of(aten.reciprocal.default)(scale))
        return _pointwise(functools.partial(_to_int8, low=low, high=high), dtype)(x)
    given = [x] if scale is None else [x, scale]
    quotient = functools.reduce(torch.promote_types, (each.get_dtype() for each in given))
    wide = [lowering_of(cast)(each, torch.float32) for each in given]
    if scale is not None:
        wide.append(_pointwise(_inverse, torch.float32)(wide[1]))
    wide = wide[:1] + [lowering_of(aten.expand.default)(each, x.get_size()) for each in wide[1:]]
    return _pointwise(functools.partial(_to_float8, quotient=quotient, dtype=dtype), dtype)(*wide)


def _pointwise(convert: Callable[..., Any], dtype: torch.dtype) -> Any:
    return compat.make_pointwise(convert, override_return_dtype=dtype)


def _to_int8(x: Any, *, low: int, high: int) -> Any:
    ops = compat.ops()
    rounded = ops.inline_asm_elementwise(
        x, asm=ROUND_TO_INT8, constraints="=r,r", dtype=torch.int32, is_pure=True, pack=1
    )
    if low > -128:
        rounded = ops.maximum(rounded, ops.constant(low, torch.int32))
    if high < 127:
        rounded = ops.minimum(rounded, ops.constant(high, torch.int32))
    return ops.to_dtype(rounded, torch.int8, src_dtype=torch.int32)


def _inverse(scale: Any) -> Any:
    """1 / scale, finite unless scale is 0."""
    ops = compat.ops()
    zero, tiny, most = (ops.constant(value, torch.float32) for value in (0.0, 2.0**-126, _LARGEST))
    is_subnormal = ops.and_(ops.gt(scale, zero), ops.lt(scale, tiny))
    return ops.where(is_subnormal, most, ops.reciprocal(scale))


def _to_float8(
    x: Any, scale: Any = None, inverse: Any = None, *, quotient: torch.dtype, dtype: torch.dtype
) -> Any:
    """As in eager mode, where Inductor's own division is not exact, and does not round to 16 bits.
    The cast saturates and keeps NaN."""
    ops = compat.ops()
    if scale is not None:
        product = ops.mul(x, inverse)
        x = ops.inline_asm_elementwise(
            *(x, ops.neg(scale), inverse, product),
            asm=DIVIDE,
            constraints="=f,f,f,f,f",
            dtype=torch.float32,
            is_pure=True,
            pack=1,
        )
        x = ops.where(ops.eq(x, x), x, product)  # 0, infinite and NaN need no correction
    if scale is not None and quotient != torch.float32:
        x = ops.to_dtype(x, quotient, src_dtype=torch.float32, use_compute_types=False)
        x = ops.to_dtype(x, torch.float32, src_dtype=quotient)
    return ops.to_dtype(x, dtype, src_dtype=torch.float32)
