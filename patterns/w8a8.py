"""W8A8: ``aten._int_mm`` of two int8 operands, multiplied by scales per token and per channel.

The spellings of torchao, gpt-fast and plain PyTorch: 2-D or 3-D activations, scales in any order
and between casts, a bias behind them. Only what ``epilogue`` reads differs; there is one pattern.
"""

from __future__ import annotations

import torch
from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.ops import w8a8 as op
from inductor_quant.patterns import graph
from inductor_quant.patterns.correction import frozen_sums
from inductor_quant.patterns.epilogue import CAST, Epilogue, read_epilogue
from inductor_quant.patterns.pattern import Derived, Operand, Pattern, RecognizedGemm
from inductor_quant.spec import ScaleSpec

FAMILY = "w8a8"


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection:
    """``anchor``: an ``aten._int_mm(a [M, K], b [K, N])``."""
    a, b = graph.arguments(anchor, "self", "mat2")
    if not graph.is_tensor_node(a) or not graph.is_tensor_node(b):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    rejection = _check_operands(anchor, a, b)
    if rejection is not None:
        return rejection
    epilogue = read_epilogue(anchor)
    if isinstance(epilogue, Rejection):
        return epilogue
    # The canonical op reads everything where the epilogue ends.
    zeros = epilogue.correction.reads if epilogue.correction else ()
    for operand in (a, b, epilogue.row_scale, epilogue.column_scale, epilogue.bias, *zeros):
        if operand is not None and graph.is_mutated(operand):
            return Rejection(
                RejectionCode.MUTATED_OPERAND, f"{operand.name} is written to", operand.name
            )
    return _assemble(anchor, a, b, epilogue)


def _check_operands(anchor: fx.Node, a: fx.Node, b: fx.Node) -> Rejection | None:
    dtypes = [graph.value(operand).dtype for operand in (a, b)]
    if dtypes != [torch.int8, torch.int8]:
        return Rejection(RejectionCode.DTYPE, f"operands are {dtypes}, not int8", anchor.name)
    k = graph.value(a).shape[1]
    if graph.is_symbolic(k):
        return Rejection(RejectionCode.DYNAMIC_K, f"K is {k}", anchor.name)
    if k > op.MAX_K:
        return Rejection(RejectionCode.K_TOO_LONG, f"K={k}, the most is {op.MAX_K}", anchor.name)
    return None


def _assemble(
    anchor: fx.Node, a: fx.Node, b: fx.Node, found: Epilogue
) -> RecognizedGemm | Rejection:
    m, n = graph.value(anchor).shape
    k = graph.value(a).shape[1]
    row, column, bias = found.row_scale, found.column_scale, found.bias
    zero = found.correction
    longest = op.max_k(zero.kind if zero else "", "")
    if k > longest:
        detail = f"K={k}, with this zero point the most is {longest}"
        return Rejection(RejectionCode.K_TOO_LONG, detail, anchor.name)
    zeros: tuple[object, ...] = ()
    number = 0
    if zero is not None:
        is_tensor = isinstance(zero.zero, Operand)
        zeros = (zero.zero if is_tensor else None, None, zero.sums or frozen_sums(b))
        number = 0 if is_tensor else zero.zero  # type: ignore[assignment]
    is_per_token, is_per_channel = (_varies(scale) for scale in (row, column))
    spec = op.make_spec(
        a_scale=_scale_spec(row, (1, -1), found),
        b_scale=_scale_spec(column, (-1, 1), found),
        out_dtype=found.out_dtype,
        bias=bias is not None,
        a_zero=zero.kind if zero else "",
    )
    return RecognizedGemm(
        family=FAMILY,
        spec=spec,
        anchor=anchor,
        end=found.end,
        interior=tuple(found.interior),
        op=op.op,
        args=(
            a,
            b,
            row and Operand(_factor(row, found), (-1, 1) if is_per_token else (1, 1)),
            column and Operand(_factor(column, found), (1, -1) if is_per_channel else (1, 1)),
            bias and Operand(bias, (-1,)),
            *zeros,
        ),
        kwargs={"alpha": found.alpha, "out_dtype": found.out_dtype}
        | ({"a_zero": number} if number else {}),
        m=graph.size_name(m),
        n=graph.size_name(n),
        k=graph.size_name(k),
        row_scale=row,
        shape=found.reshape and found.reshape.args[1],  # type: ignore[arg-type]
    )


def _factor(scale: fx.Node, found: Epilogue) -> fx.Node | Derived:
    """What is multiplied by: the scale, or one over it in fp32."""
    if scale is not found.divisor:
        return scale
    return Derived(graph.aten.reciprocal.default, (Derived(CAST, (scale, torch.float32)),))


def _scale_spec(scale: fx.Node | None, full: tuple[int, int], found: Epilogue) -> ScaleSpec | None:
    if scale is None:
        return None
    dtype = torch.float32 if scale is found.divisor else graph.value(scale).dtype
    return ScaleSpec(dtype, full if _varies(scale) else (-1, -1))


def _varies(scale: fx.Node | None) -> bool:
    return scale is not None and not all(graph.is_one(s) for s in graph.value(scale).shape)


PATTERN = Pattern(
    name="int_mm_scale",
    family=FAMILY,
    anchors=(torch.ops.aten._int_mm.default,),
    recognize=recognize,
)
