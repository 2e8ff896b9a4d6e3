"""W8A8 without an integer product: both operands are quantized and back, and meet in a float one.

What compressed-tensors runs, and the graphs of PT2E. Where the activation is shown to be made of
integers of eight bits (``fake_quantized``) and the weight is stored as such (``operand``), the
integers are multiplied instead, and the scales applied to the sums.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.ops import w8a8 as op
from inductor_quant.patterns import graph
from inductor_quant.patterns.bounds import bounds
from inductor_quant.patterns.correction import frozen_sums
from inductor_quant.patterns.epilogue import CAST, Epilogue, read_float_epilogue
from inductor_quant.patterns.fake_quantized import FakeQuantized, Vector, read_fake_quantized
from inductor_quant.patterns.graph import aten
from inductor_quant.patterns.operand import Weight, attempt, decode
from inductor_quant.patterns.pattern import Derived, Operand, Pattern, RecognizedGemm
from inductor_quant.patterns.product import Product, product_of
from inductor_quant.patterns.symbolic import Reader
from inductor_quant.spec import ScaleSpec
from inductor_quant.weight_format import Field, Form

FAMILY = "w8a8"
_ANCHORS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.linear.default, aten.sum.dim_IntList),
)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """``(stored - zero[n]) * scale[n] * alpha``, ``stored`` int8 [K, N], or [N, K] if
    ``transposed``; ``scale`` and ``zero`` are [N] or single in the order of n."""

    stored: fx.Node
    transposed: bool
    scale: Vector | None = None  # its axis is "column" or "tensor"
    zero: Vector | None = None
    alpha: float = 1.0

    def matrix(self) -> fx.Node | Derived:
        if not self.transposed:
            return self.stored
        return Derived(aten.permute.default, (self.stored, [1, 0]))

    def zero_point(self) -> tuple[Operand | None, str]:
        if self.zero is None:
            return None, ""
        node = self.zero.node
        dtype = graph.value(node).dtype
        known = bounds(node)
        if dtype == torch.int8:
            value: fx.Node | Derived = node
        elif known.is_integer and known.is_within(-128, 127):
            dtype, value = torch.int8, Derived(CAST, (node, torch.int8))
        else:
            dtype, value = torch.float32, Derived(CAST, (node, torch.float32))
        return Operand(value, _column_shape(self.zero)), op.zero_kind(dtype)


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """``anchor``: a product of floats. None: its operands are not both quantized and back, and
    another pattern may know it."""
    if not any(read_fake_quantized(node) for node in _factors(anchor)):
        return None
    try:
        found = attempt(
            lambda reader: _read(anchor, reader), lambda found: isinstance(found, tuple)
        )
    except RecursionError:
        return None
    if found is None:
        return None
    product, x, weight = found
    epilogue = _read_epilogue(product, x, weight)
    if epilogue is None:
        return None
    vectors = [v.node for v in (x.scale, x.zero, weight.zero) if isinstance(v, Vector)]
    scales = (epilogue.row_scale, epilogue.column_scale)
    for node in (x.q, weight.stored, product.bias, epilogue.bias, *vectors, *scales):
        if node is not None and graph.value(node).device != graph.value(anchor).device:
            return Rejection(RejectionCode.DEVICE, f"{node.name} is elsewhere", node.name)
        if node is not None and graph.is_mutated(node):
            return Rejection(RejectionCode.MUTATED_OPERAND, f"{node.name} is written to", node.name)
    for node in _dequantization(product):
        if graph.is_mutated(node):
            return Rejection(RejectionCode.MUTATED_OPERAND, f"{node.name} is written to", node.name)
    return _assemble(product, x, weight, epilogue)


def _factors(anchor: fx.Node) -> list[fx.Node]:
    """What may be the activation among the inputs of a product."""
    inputs = anchor.all_input_nodes
    if anchor.target == aten.sum.dim_IntList:  # of x[m, k, 1] * w[1, k, n]
        inputs = [node for product in inputs for node in product.all_input_nodes]
        inputs = [node.args[0] for node in inputs if node.target == aten.unsqueeze.default]  # type: ignore[misc]
    return [node for node in inputs if graph.is_tensor_node(node) and not _is_float_input(node)]


def _is_float_input(node: fx.Node) -> bool:
    """What every product of floats has, and nothing is known of."""
    return graph.value(node).is_floating_point() and graph.is_stored(node)


def _read(anchor: fx.Node, reader: Reader) -> tuple[Product, FakeQuantized, Int8Weight] | None:
    product = product_of(anchor, reader)
    if not isinstance(product, Product) or min(product.k, product.n) < 2:
        return None
    x = read_fake_quantized(product.x)
    if x is None:
        return None
    weight = decode(reader, product.weight, product.node)
    stored = read_int8(weight) if isinstance(weight, Weight) else None
    return None if stored is None else (product, x, stored)


def read_int8(weight: Weight) -> Int8Weight | None:
    """The weight as one matrix of int8 with a scale and a zero point of the columns or of all."""
    form = weight.format
    if len(form.k) != 1 or len(form.n) != 1 or not _is_plain(form.element):
        return None
    node = weight.sources[form.element.source]
    k, n = Form(linear=(("k0", 1),)), Form(linear=(("n0", 1),))
    if graph.value(node).dtype != torch.int8 or form.element.index not in ((k, n), (n, k)):
        return None
    transposed = form.element.index == (n, k)
    if list(graph.value(node).shape) != [*(form.shape[::-1] if transposed else form.shape)]:
        return None
    found = Int8Weight(node, transposed)
    for step in form.steps:
        operand = step.operand
        if isinstance(operand, Field):
            vector = _vector(operand, weight)
            if vector is None:
                return None
            is_float = graph.value(vector.node).dtype in _SCALES
            if step.kind == "mul" and found.scale is None and is_float:
                found = dataclasses.replace(found, scale=vector)
            elif step.kind == "sub" and not (found.zero or found.scale) and found.alpha == 1:
                found = dataclasses.replace(found, zero=vector)
            else:
                return None
        elif step.kind == "mul":
            found = dataclasses.replace(found, alpha=found.alpha * operand)
        elif step.kind not in ("add", "sub") or operand != 0:
            return None
    return found


def _is_plain(field: Field) -> bool:
    return dataclasses.replace(field, source=0, index=()) == Field(0, ())


def _vector(field: Field, weight: Weight) -> Vector | None:
    if not _is_plain(field):
        return None
    node = weight.sources[field.source]
    forms = [form for form in field.index if form != Form()]
    numel = math.prod(graph.value(node).shape)
    if not forms and numel == 1:
        return Vector(node, "tensor")
    is_column = forms == [Form(linear=(("n0", 1),))] and numel == weight.format.shape[1]
    return Vector(node, "column") if is_column else None


def _column_shape(vector: Vector) -> tuple[int, int]:
    return (1, -1) if vector.axis == "column" else (1, 1)


def _read_epilogue(product: Product, x: FakeQuantized, weight: Int8Weight) -> Epilogue | None:
    alpha = x.alpha * weight.alpha
    if not math.isfinite(alpha) or not torch.finfo(torch.float32).tiny <= abs(alpha):
        return None
    found = read_float_epilogue(
        product.anchor,
        has_bias=product.bias is not None,
        row_scale=None if x.scale is None else x.scale.node,
        column_scale=None if weight.scale is None else weight.scale.node,
        alpha=alpha,
    )
    return found if found.out_dtype in op.SCALE_DTYPES else None


def _assemble(
    product: Product, x: FakeQuantized, weight: Int8Weight, found: Epilogue
) -> RecognizedGemm | Rejection:
    row, column, bias = found.row_scale, found.column_scale, found.bias or product.bias
    if bias is not None and graph.value(bias).dtype not in op.SCALE_DTYPES:
        return Rejection(RejectionCode.BIAS, f"it is {graph.value(bias).dtype}", bias.name)
    a_zero, a_kind = x.zero_point()
    b_zero, b_kind = weight.zero_point()
    if isinstance(a_zero, int) and not -128 <= a_zero <= 127:
        return Rejection(RejectionCode.DTYPE, f"a zero point of {a_zero}", product.anchor.name)
    longest = op.max_k(a_kind, b_kind)
    if product.k > longest:
        detail = f"K={product.k}, the most is {longest}"
        return Rejection(RejectionCode.K_TOO_LONG, detail, product.anchor.name)
    is_token, is_channel = (node is not None and not _is_single(node) for node in (row, column))
    spec = op.make_spec(
        a_scale=_scale_spec(row, (1 if is_token else -1, -1)),
        b_scale=_scale_spec(column, (-1, 1 if is_channel else -1)),
        out_dtype=found.out_dtype,
        bias=bias is not None,
        a_zero=a_kind,
        b_zero=b_kind,
    )
    rows: Any = 1
    for size in graph.value(product.x).shape[:-1]:
        rows = rows * size
    zeros: tuple[Any, ...] = (None if isinstance(a_zero, int) else a_zero, b_zero)
    if a_kind and b_zero is None and (sums := frozen_sums(weight.matrix())) is not None:
        zeros = (*zeros, sums)
    return RecognizedGemm(
        family=FAMILY,
        spec=spec,
        anchor=product.anchor,
        end=found.end,
        interior=(*_dequantization(product), *found.interior),
        op=op.op,
        args=(
            Operand(x.int8(), (-1, product.k)),
            weight.matrix(),
            row and Operand(row, (-1, 1) if is_token else (1, 1)),
            column and Operand(column, (1, -1) if is_channel else (1, 1)),
            bias and Operand(bias, (-1,)),
            *(zeros if any(zero is not None for zero in zeros) else ()),
        ),
        kwargs={"alpha": found.alpha, "out_dtype": found.out_dtype}
        | ({"a_zero": a_zero} if isinstance(a_zero, int) and a_zero else {}),
        m=graph.size_name(rows),
        n=product.n,
        k=product.k,
        row_scale=row,
        shape=found.reshape.args[1] if found.reshape is not None else product.shape,  # type: ignore[arg-type]
    )


def _scale_spec(scale: fx.Node | None, block: tuple[int, int]) -> ScaleSpec | None:
    return None if scale is None else ScaleSpec(graph.value(scale).dtype, block)


def _is_single(node: fx.Node) -> bool:
    return all(map(graph.is_one, graph.value(node).shape))


def _dequantization(product: Product) -> list[fx.Node]:
    """The nodes between the product and the stored weight, in graph order."""
    inside = {*product.reader.nodes(), *product.anchor.all_input_nodes} - {product.x}
    return sorted(node for node in inside if node.op == "call_function")


PATTERN = Pattern(name="qdq", family=FAMILY, anchors=_ANCHORS, recognize=recognize)
