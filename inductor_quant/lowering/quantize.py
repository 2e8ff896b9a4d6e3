"""Lowering of ``inductor_quant::round_to_int8``: two instructions an element.

Inductor's rounding and NaN-keeping clamp take 14 instructions an element, and it divides each
element by ``div.full.f32``, a product with an approximate reciprocal; here the reciprocal is taken
once a row. Row quantization is bound by instructions, not by memory.
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.lowering.select import lowering_of
from inductor_quant.ops import quantize as op

aten = torch.ops.aten
# PTX ISA, cvt: rounds to nearest, ties to even; saturates at -128 and 127; NaN gives 0.
ROUND_TO_INT8 = "cvt.rni.sat.s8.f32 $0, $1;"


@fallback.lowering(op.op)
def lower(x: Any, scale: Any = None, low: int = -128, high: int = 127) -> Any:
    ops = compat.ops()

    def convert(x: Any) -> Any:
        rounded = ops.inline_asm_elementwise(
            x, asm=ROUND_TO_INT8, constraints="=r,r", dtype=torch.int32, is_pure=True, pack=1
        )
        if low > -128:
            rounded = ops.maximum(rounded, ops.constant(low, torch.int32))
        if high < 127:
            rounded = ops.minimum(rounded, ops.constant(high, torch.int32))
        return ops.to_dtype(rounded, torch.int8, src_dtype=torch.int32)

    x = lowering_of(torch.ops.prims.convert_element_type.default)(x, torch.float32)
    if scale is not None:
        x = lowering_of(aten.mul.Tensor)(x, lowering_of(aten.reciprocal.default)(scale))
    return compat.make_pointwise(convert, override_return_dtype=torch.int8)(x)
