"""Weight-only: a float activation times a weight that is made of stored, quantized numbers.

What the weight is made of is read by ``operand``, whatever the producer; which ops multiply is said
by ``product``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.errors import SpecError
from inductor_quant.ops import weight_only as op
from inductor_quant.patterns import graph
from inductor_quant.patterns.epilogue import Epilogue, read_column_epilogue
from inductor_quant.patterns.operand import Weight, attempt, decode
from inductor_quant.patterns.pattern import Operand, Pattern, RecognizedGemm
from inductor_quant.patterns.product import Product, anchors, product_of
from inductor_quant.patterns.symbolic import Reader
from inductor_quant.spec import ScaleSpec

FAMILY = "weight_only"


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """``anchor``: one of the ops that ``product`` knows."""
    try:
        found = attempt(
            lambda reader: _read(anchor, reader), lambda found: isinstance(found, tuple)
        )
    except RecursionError:
        if anchor.target == torch.ops.aten.sum.dim_IntList:
            return None
        return Rejection(RejectionCode.WEIGHT_FORM, "computed in too many steps", anchor.name)
    if not isinstance(found, tuple):
        return found
    product, weight = found
    for node in _dequantization(product):
        if graph.is_mutated(node):
            return Rejection(RejectionCode.MUTATED_OPERAND, f"{node.name} is written to", node.name)
    epilogue = _read_epilogue(anchor, product, weight)
    for operand in (product.x, *weight.sources, product.bias, epilogue.column_scale, epilogue.bias):
        rejection = operand and _check_operand(operand, anchor)
        if rejection:
            return rejection
    if graph.value(product.x).dtype not in op.X_DTYPES:
        return Rejection(
            RejectionCode.ACTIVATION, f"it is {graph.value(product.x).dtype}", product.x.name
        )
    return _assemble(product, weight, epilogue)


def _read(anchor: fx.Node, reader: Reader) -> tuple[Product, Weight] | Rejection | None:
    product = product_of(anchor, reader)
    if product is None or isinstance(product, Rejection):
        return product
    weight = decode(reader, product.weight, product.node)
    if isinstance(weight, Weight):
        return product, weight
    is_sum = anchor.target == torch.ops.aten.sum.dim_IntList
    return None if is_sum and weight.code is RejectionCode.NOT_QUANTIZED else weight


def _read_epilogue(anchor: fx.Node, product: Product, weight: Weight) -> Epilogue:
    """Bias, and a scale of the columns behind a weight that is not scaled itself; behind one that
    is, the scheduler fuses another.

    It would fuse the bias too, but not behind the library's product for many rows, which adds one.
    """
    is_scaled = any(step.kind in ("mul", "div") for step in weight.format.steps)
    return read_column_epilogue(anchor, has_scale=is_scaled, has_bias=product.bias is not None)


def _check_operand(operand: fx.Node, anchor: fx.Node) -> Rejection | None:
    if graph.is_mutated(operand):
        return Rejection(
            RejectionCode.MUTATED_OPERAND, f"{operand.name} is written to", operand.name
        )
    device = graph.value(operand).device
    if device != graph.value(anchor).device:
        return Rejection(RejectionCode.DEVICE, f"{operand.name} is on {device}", operand.name)
    return None


def _assemble(product: Product, weight: Weight, found: Epilogue) -> RecognizedGemm | Rejection:
    column, bias = found.column_scale, found.bias or product.bias
    is_per_channel = column is not None and not all(map(graph.is_one, graph.value(column).shape))
    dtypes = [graph.value(node).dtype for node in weight.sources]
    types = tuple(
        (dtype, tuple(graph.value(node).shape))
        for dtype, node in zip(dtypes, weight.sources, strict=True)
    )
    try:
        op.check_format(weight.format, types)
    except SpecError as error:
        return Rejection(RejectionCode.WEIGHT_FORM, str(error), product.node.name)
    scale = None
    if column is not None:
        scale = ScaleSpec(graph.value(column).dtype, (-1, 1 if is_per_channel else -1))
    spec = op.make_spec(
        weight.format,
        dtypes,
        x_dtype=graph.value(product.x).dtype,
        column_scale=scale,
        out_dtype=found.out_dtype,
        bias=bias is not None,
    )
    return RecognizedGemm(
        family=FAMILY,
        spec=spec,
        anchor=product.anchor,
        end=found.end,
        interior=(*_dequantization(product), *found.interior),
        op=op.op,
        args=(
            Operand(product.x, (-1, product.k)),
            list(weight.sources),
            column and Operand(column, (1, -1) if is_per_channel else (1, 1)),
            bias and Operand(bias, (-1,)),
        ),
        kwargs={"format": weight.format.encode(), "out_dtype": found.out_dtype},
        m=graph.size_name(_rows(product)),
        n=product.n,
        k=product.k,
        shape=found.reshape.args[1] if found.reshape is not None else product.shape,  # type: ignore[arg-type]
    )


def _dequantization(product: Product) -> list[fx.Node]:
    """The nodes between the product and the stored numbers, in graph order."""
    inside = {*product.reader.nodes(), *product.anchor.all_input_nodes} - {product.x}
    return sorted(node for node in inside if node.op == "call_function")


def _rows(product: Product) -> Any:
    rows: Any = 1
    for size in graph.value(product.x).shape[:-1]:
        rows = rows * size
    return rows


PATTERN = Pattern(name="weight_only", family=FAMILY, anchors=anchors(), recognize=recognize)
