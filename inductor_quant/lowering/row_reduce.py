"""Lowering of ``inductor_quant::row_reduce``: Inductor's own reduction, never split.

For few long rows Inductor splits a reduction over several CTAs. The partial results then need a
kernel of their own, and the quantization needs another that reads the rows again: three launches
instead of one. A row of an activation is a few tens of kilobytes, which one CTA reads quickly, and
only once: up to LONGEST elements stay in registers between reduction and quantization, and the ops
before them (GELU, a norm) are computed once.
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.lowering.select import lowering_of
from inductor_quant.ops import row_reduce as op

LONGEST = 16384


@fallback.lowering(op.op)
def lower(x: Any, kind: str, keepdim: bool) -> Any:
    compat.keep_rows_in_registers(op.op, LONGEST)
    with compat.inductor_config().patch(split_reductions=False):
        if kind == "absmax":
            return _absmax(x, keepdim)
        return lowering_of(op.KINDS[kind])(x, [-1], keepdim)


def _absmax(x: Any, keepdim: bool) -> Any:
    """The largest absolute value, by comparing bits."""
    cast = lowering_of(torch.ops.prims.convert_element_type.default)
    bits = absolute_bits(cast(x, torch.float32))
    largest = lowering_of(op.KINDS["amax"])(bits, [-1], keepdim)
    return cast(from_bits(largest), x.get_dtype())


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
