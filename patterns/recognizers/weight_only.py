"""Weight-only: a float activation times a weight made of stored, quantized elements.

``weights.decode`` reads what the weight is made of, whoever produced it; ``matmul_ops`` knows the
ops that multiply.
"""

from __future__ import annotations

import torch
from torch import fx

from inductor_quant.errors import SpecError
from inductor_quant.ops import weight_only as op
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.exactness import Exactness

from .. import fx_utils
from ..match import Operand, Pattern, RecognizedGemm
from ..matching.epilogue import Epilogue, read_column_epilogue
from ..matching.known_weights import WeightOf
from ..matching.operands import per_channel, reject_mutated, reject_operands
from ..products.matmul_ops import Matmul, anchors, read_matmul
from ..symbolic import Reader, attempt
from ..weights.decode import Weight

FAMILY = "weight_only"


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """``anchor``: one of the ops of ``matmul_ops``."""
    weight_of = WeightOf()
    try:
        found = attempt(
            lambda reader: _read(anchor, reader, weight_of), lambda found: isinstance(found, tuple)
        )
    except RecursionError:
        if anchor.target == torch.ops.aten.sum.dim_IntList:
            return None
        return Rejection(RejectionCode.WEIGHT_FORM, "computed in too many steps", anchor.name)
    if isinstance(found, Rejection):
        weight_of.decline(found)
    if not isinstance(found, tuple):
        return found
    product, weight = found
    rejection = reject_mutated(product.dequantization())
    if rejection is not None:
        return rejection
    epilogue = _read_epilogue(anchor, product, weight)
    stored = (node for node in weight.sources if isinstance(node, fx.Node))
    read = (product.x, *stored, product.bias, epilogue.column_scale, epilogue.bias)
    rejection = reject_operands(read, anchor)
    if rejection is not None:
        return rejection
    if fx_utils.value(product.x).dtype not in op.X_DTYPES:
        return Rejection(
            RejectionCode.ACTIVATION, f"it is {fx_utils.value(product.x).dtype}", product.x.name
        )
    return _assemble(product, weight, epilogue)


def _read(
    anchor: fx.Node, reader: Reader, weight_of: WeightOf
) -> tuple[Matmul, Weight] | Rejection | None:
    product = read_matmul(anchor, reader)
    if product is None or isinstance(product, Rejection):
        return product
    found = weight_of.read(product, reader)
    if isinstance(found, Weight):
        return product, found
    is_sum = anchor.target == torch.ops.aten.sum.dim_IntList
    return None if is_sum and found.code is RejectionCode.NOT_QUANTIZED else found


def _read_epilogue(anchor: fx.Node, product: Matmul, weight: Weight) -> Epilogue:
    """A bias, and a scale per channel unless the weight has a scale already.

    The scheduler would fuse another scale as well, and the bias; but not into the library's GEMM,
    which serves large M and takes a bias.
    """
    is_scaled = any(step.kind in ("mul", "div") for step in weight.format.dequant_ops)
    return read_column_epilogue(anchor, has_scale=is_scaled, has_bias=product.bias is not None)


def _assemble(product: Matmul, weight: Weight, found: Epilogue) -> RecognizedGemm | Rejection:
    bias = found.bias or product.bias
    scale = per_channel(found.column_scale)
    tensors = list(map(fx_utils.described, weight.sources))
    dtypes = [tensor.dtype for tensor in tensors]
    types = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    try:
        op.check_format(weight.format, types)
    except SpecError as error:
        return Rejection(RejectionCode.WEIGHT_FORM, str(error), product.node.name)
    x_dtype = fx_utils.value(product.x).dtype
    is_same = x_dtype in weight.same_for
    same = Exactness.SAME_WEIGHT_ROUNDING if is_same else Exactness.FEWER_ROUNDINGS
    spec = op.make_spec(
        weight.format,
        dtypes,
        x_dtype=x_dtype,
        column_scale=None if scale is None else scale.spec,
        out_dtype=found.out_dtype,
        bias=bias is not None,
    )
    return RecognizedGemm(
        family=FAMILY,
        spec=spec,
        anchor=product.anchor,
        end=found.end,
        interior=(*product.dequantization(), *found.interior),
        op=op.op,
        args=(
            Operand(product.x, (-1, product.k)),
            list(weight.sources),
            scale and scale.argument,
            bias and Operand(bias, (-1,)),
        ),
        kwargs={"format": weight.format.encode(), "out_dtype": found.out_dtype},
        m=fx_utils.size_name(product.rows),
        n=product.n,
        k=product.k,
        shape=found.shape or product.shape,
        weight_class=Exactness.REASSOCIATED if weight.is_reordered else same,
    )


PATTERN = Pattern(name="weight_only", family=FAMILY, anchors=anchors(), recognize=recognize)
