"""Lowering of ``inductor_quant::w8a8``."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant import _torch_compat as compat
from inductor_quant.lowering.common import describe_problem, lower_gemm, lowering_of
from inductor_quant.ops import w8a8 as op
from inductor_quant.spec import ScaleSpec

aten, prims = torch.ops.aten, torch.ops.prims


@compat.register_lowering(op.op, type_promotion_kind=None)
def lower(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype,
) -> Any:
    m, n = a.get_size()[0], b.get_size()[1]
    device = a.get_device()
    if compat.known_int(m) == 0 or compat.known_int(n) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=out_dtype, device=device)
    spec = op.make_spec(
        a_scale=_scale_spec(a_scale, (1, -1), dim=0),
        b_scale=_scale_spec(b_scale, (-1, 1), dim=1),
        out_dtype=out_dtype,
        bias=bias is not None,
    )
    inputs = [compat.realize(t) for t in (a, b, a_scale, b_scale, bias) if t is not None]
    result = lower_gemm(
        "w8a8",
        spec,
        describe_problem(inputs[0], inputs[1], out_dtype),
        inputs,
        compat.FixedLayout(device, out_dtype, [m, n]),
        {"ALPHA": alpha},
    )
    if result is not None:
        return result
    return _unfused(a, b, a_scale, b_scale, bias, alpha=alpha, out_dtype=out_dtype)


def _scale_spec(scale: Any, full: tuple[int, int], *, dim: int) -> ScaleSpec | None:
    if scale is None:
        return None
    is_full = compat.known_int(scale.get_size()[dim]) != 1
    return ScaleSpec(scale.get_dtype(), full if is_full else (-1, -1))


def _unfused(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    *,
    alpha: float,
    out_dtype: torch.dtype,
) -> Any:
    """The graph that was matched, in Inductor's own lowerings: for a device without a kernel."""
    cast = lowering_of(prims.convert_element_type.default)
    multiply = lowering_of(aten.mul.Tensor)
    out = cast(lowering_of(aten._int_mm.default)(a, b), torch.float32)
    if alpha != 1.0:
        out = multiply(out, alpha)
    for scale in (a_scale, b_scale):
        if scale is not None:
            out = multiply(out, cast(scale, torch.float32))
    if bias is not None:
        out = lowering_of(aten.add.Tensor)(out, cast(bias, torch.float32))
    return cast(out, out_dtype)
