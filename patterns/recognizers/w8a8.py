"""W8A8: ``aten._int_mm`` of two int8 operands, multiplied by scales per token and per channel.

Matches torchao, gpt-fast and plain PyTorch: 2-D or 3-D activations, scales in any order and between
casts, zero points, and a bias. ``matching/epilogue.py`` reads everything that follows the product.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from inductor_quant.ops import w8a8 as op
from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..match import Derived, Operand, Pattern, RecognizedGemm
from ..matching.epilogue import Epilogue, read_epilogue
from ..matching.operands import Scale, ScaledMatmul, per_channel, per_token, reject_operands
from ..matching.zero_point import frozen_sums

FAMILY = "w8a8"


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection:
    """``anchor``: an ``aten._int_mm(a [M, K], b [K, N])``."""
    a, b = fx_utils.arguments(anchor, "self", "mat2")
    if not fx_utils.is_tensor_node(a) or not fx_utils.is_tensor_node(b):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    rejection = _reject_matrices(anchor, a, b)
    if rejection is not None:
        return rejection
    found = read_epilogue(anchor)
    if isinstance(found, Rejection):
        return found
    zeros = found.zero_point.reads if found.zero_point else ()
    read = (a, b, found.row_scale, found.column_scale, found.bias, *zeros)
    return reject_operands(read, anchor) or _assemble(anchor, a, b, found)


def _reject_matrices(anchor: fx.Node, a: fx.Node, b: fx.Node) -> Rejection | None:
    dtypes = [fx_utils.value(operand).dtype for operand in (a, b)]
    if dtypes != [torch.int8, torch.int8]:
        return Rejection(RejectionCode.DTYPE, f"operands are {dtypes}, not int8", anchor.name)
    k = fx_utils.value(a).shape[1]
    if fx_utils.is_symbolic(k):
        return Rejection(RejectionCode.DYNAMIC_K, f"K is {k}", anchor.name)
    return reject_long_k(anchor, k)


def reject_long_k(
    anchor: fx.Node, k: int, a_zero_kind: str = "", b_zero_kind: str = ""
) -> Rejection | None:
    """Rejects a K whose int32 sums may overflow; zero point kinds as in ``OperandSpec.zero``."""
    longest = op.max_k(a_zero_kind, b_zero_kind)
    if k <= longest:
        return None
    detail = f"K={k}, the most {'with these zero points ' * bool(a_zero_kind or b_zero_kind)}is"
    return Rejection(RejectionCode.K_TOO_LONG, f"{detail} {longest}", anchor.name)


def _assemble(
    anchor: fx.Node, a: fx.Node, b: fx.Node, found: Epilogue
) -> RecognizedGemm | Rejection:
    zero = found.zero_point
    (m, n), k = fx_utils.value(anchor).shape, fx_utils.value(a).shape[1]
    zeros: tuple[Any, ...] = ()
    if zero is not None:
        is_tensor = isinstance(zero.zero, Operand)
        zeros = (zero.zero if is_tensor else None, None, zero.sums or frozen_sums(b))
    matmul = ScaledMatmul(
        anchor=anchor,
        end=found.end,
        a=a,
        b=b,
        sizes=(m, n, k),
        a_scale=as_factor(per_token(found.row_scale), found),
        b_scale=as_factor(per_channel(found.column_scale), found),
        bias=found.bias,
        interior=tuple(found.interior),
        shape=found.shape,
    )
    return assemble(
        matmul,
        alpha=found.alpha,
        row_scale=found.row_scale,
        zeros=zeros,
        a_zero=zero.zero if zero is not None and isinstance(zero.zero, int) else 0,
        kinds=(zero.kind if zero else "", ""),
    )


def as_factor(scale: Scale | None, found: Epilogue) -> Scale | None:
    """``scale``, or one over it in fp32 if the graph divides by it; fp64 becomes fp32."""
    is_divisor = scale is not None and scale.node is found.divisor
    if scale is None or not (is_divisor or fx_utils.value(scale.node).dtype == torch.float64):
        return scale
    value = Derived(fx_utils.CAST, (scale.node, torch.float32))
    if is_divisor:
        value = Derived(fx_utils.aten.reciprocal.default, (value,))
    argument = dataclasses.replace(scale.argument, node=value)
    return dataclasses.replace(scale, argument=argument, dtype=torch.float32)


def assemble(
    matmul: ScaledMatmul,
    *,
    row_scale: fx.Node | None,
    alpha: float = 1.0,
    zeros: tuple[Any, ...] = (),
    a_zero: int = 0,
    kinds: tuple[str, str] = ("", ""),
) -> RecognizedGemm | Rejection:
    """The call of ``inductor_quant::w8a8``.

    ``zeros``: its zero points and sums after the bias; ``kinds``: of both operands' zero points, as
    in ``OperandSpec.zero``.
    """
    a_scale, b_scale = matmul.scale_specs
    spec = op.make_spec(
        a_scale=a_scale,
        b_scale=b_scale,
        out_dtype=matmul.out_dtype,
        bias=matmul.bias is not None,
        a_zero=kinds[0],
        b_zero=kinds[1],
    )
    kwargs: dict[str, Any] = {"alpha": alpha, "out_dtype": matmul.out_dtype}
    if a_zero:
        kwargs["a_zero"] = a_zero
    rejection = reject_long_k(matmul.anchor, matmul.sizes[2], *kinds)
    return rejection or matmul.gemm(FAMILY, spec, op.op, kwargs, zeros, row_scale=row_scale)


PATTERN = Pattern(
    name="int_mm_scale",
    family=FAMILY,
    anchors=(torch.ops.aten._int_mm.default,),
    recognize=recognize,
)
