"""W8A8 as a float product: both operands are quantized and dequantized before it (QDQ).

compressed-tensors and PT2E write this. If ``fake_quantized`` proves that the activation holds 8-bit
integers, and ``weights.decode`` finds a stored int8 weight, the rewrite multiplies the integers and
applies the scales to the sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from inductor_quant.ops import w8a8 as op
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.weight_format import AffineIndex, Field

from .. import fx_utils
from ..fx_utils import CAST, aten
from ..match import Derived, Operand, Pattern, RecognizedGemm
from ..matching.epilogue import Epilogue, read_float_epilogue
from ..matching.fake_quantized import FakeQuantized, Vector, read_fake_quantized
from ..matching.known_weights import WeightOf
from ..matching.operands import (
    ScaledMatmul,
    per_channel,
    per_token,
    reject_mutated,
    reject_operands,
    transposed,
)
from ..matching.value_range import value_range
from ..matching.zero_point import frozen_sums
from ..products.matmul_ops import Matmul, read_matmul
from ..symbolic import Reader, attempt
from ..symbolic.expr import Expr
from ..weights.decode import Weight
from . import w8a8

ANCHORS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.linear.default, aten.sum.dim_IntList),
)


@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """``(stored - zero[n]) * scale[n] * alpha``; ``stored`` is int8 [K, N], or [N, K] if
    ``transposed``, ``scale`` and ``zero`` have N elements or one."""

    stored: fx.Node
    transposed: bool
    scale: Vector | None = None  # its axis is "column" or "tensor"
    zero: Vector | None = None
    alpha: float = 1.0

    @property
    def nodes(self) -> list[fx.Node]:
        """What is read of the graph, without the scale."""
        return [self.stored, *([self.zero.node] if self.zero else [])]

    def matrix(self) -> fx.Node | Derived:
        return transposed(self.stored) if self.transposed else self.stored

    def sums(self) -> Derived | None:
        """The sums of its columns, if they cost nothing."""
        return frozen_sums(self.matrix())

    def zero_point(self) -> tuple[Operand | None, str]:
        if self.zero is None:
            return None, ""
        node = self.zero.node
        dtype = fx_utils.value(node).dtype
        known = value_range(node)
        if dtype == torch.int8:
            value: fx.Node | Derived = node
        elif known.is_integer and known.is_within(-128, 127):
            dtype, value = torch.int8, Derived(CAST, (node, torch.int8))
        else:
            dtype, value = torch.float32, Derived(CAST, (node, torch.float32))
        return Operand(value, (1, -1) if self.zero.axis == "column" else (1, 1)), op.zero_kind(
            dtype
        )


class QuantizedWeight(Protocol):
    """``(matrix - zero_point) * scale * alpha`` with a scale per column; the zero point has a kind
    as in ``OperandSpec.zero``."""

    @property
    def scale(self) -> Vector | None: ...
    @property
    def alpha(self) -> float: ...
    @property
    def nodes(self) -> list[fx.Node]: ...
    def matrix(self) -> Any: ...
    def zero_point(self) -> tuple[Operand | None, str]: ...
    def sums(self) -> Derived | None: ...


W = TypeVar("W", bound=QuantizedWeight)


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """``anchor``: a product of floats. None: not both operands are quantized and dequantized, and
    another pattern may recognize it."""
    return recognize_as(anchor, read_int8, assemble)


def recognize_as(
    anchor: fx.Node,
    read_weight: Callable[[Weight], W | None],
    assemble: Callable[[Matmul, FakeQuantized, W, Epilogue], RecognizedGemm | Rejection],
    read_other: Callable[[Reader, Expr], W | None] = lambda reader, expr: None,
    element: torch.dtype = torch.int8,
) -> RecognizedGemm | Rejection | None:
    """The GEMM that ``assemble`` makes of a float product; None: no such product.

    Its activation was quantized to ``element``, and ``read_weight`` takes its weight (one without
    a ``WeightFormat``: ``read_other``)."""
    if not any(read_fake_quantized(node, element) for node in _activation_candidates(anchor)):
        return None
    weight_of = WeightOf()
    try:
        found = attempt(
            lambda reader: _read(anchor, reader, weight_of, read_weight, read_other, element),
            lambda found: isinstance(found, tuple),
        )
    except RecursionError:
        return None
    if found is None:
        return None
    product, x, weight = found
    epilogue = _read_epilogue(product, x, weight)
    if epilogue is None:
        return None
    vectors = [v.node for v in (x.scale, x.zero) if isinstance(v, Vector)]
    scales = (epilogue.row_scale, epilogue.column_scale)
    read = (x.q, *weight.nodes, product.bias, epilogue.bias, *vectors, *scales)
    rejection = reject_operands(read, anchor) or reject_mutated(product.dequantization())
    return rejection or assemble(product, x, weight, epilogue)


def _activation_candidates(anchor: fx.Node) -> list[fx.Node]:
    """The inputs of a product that may be its activation."""
    inputs = anchor.all_input_nodes
    if anchor.target == aten.sum.dim_IntList:  # of x[m, k, 1] * w[1, k, n]
        inputs = [node for product in inputs for node in product.all_input_nodes]
        inputs = [node.args[0] for node in inputs if node.target == aten.unsqueeze.default]  # type: ignore[misc]
    return [node for node in inputs if fx_utils.is_tensor_node(node) and not _is_float_input(node)]


def _is_float_input(node: fx.Node) -> bool:
    """An input of the graph: any product of floats has one, and nothing is known of its values."""
    return fx_utils.value(node).is_floating_point() and fx_utils.is_stored(node)


def _read(
    anchor: fx.Node,
    reader: Reader,
    weight_of: WeightOf,
    read_weight: Callable[[Weight], W | None],
    read_other: Callable[[Reader, Expr], W | None],
    element: torch.dtype,
) -> tuple[Matmul, FakeQuantized, W] | None:
    product = read_matmul(anchor, reader)
    if not isinstance(product, Matmul) or min(product.k, product.n) < 2:
        return None
    x = read_fake_quantized(product.x, element)
    if x is None:
        return None
    weight = weight_of.read(product, reader)
    if isinstance(weight, Weight):
        stored = read_weight(weight)
    else:
        stored = read_other(reader, product.weight)
    return None if stored is None else (product, x, stored)


def read_int8(weight: Weight) -> Int8Weight | None:
    """The weight as one int8 matrix with a scale and a zero point per channel or per tensor."""
    format = weight.format
    if len(format.k) != 1 or len(format.n) != 1 or not _is_plain(format.element):
        return None
    node = weight.sources[format.element.source]
    if not isinstance(node, fx.Node):
        return None
    k, n = AffineIndex(linear=(("k0", 1),)), AffineIndex(linear=(("n0", 1),))
    if fx_utils.value(node).dtype != torch.int8 or format.element.index not in ((k, n), (n, k)):
        return None
    is_transposed = format.element.index == (n, k)
    if list(fx_utils.value(node).shape) != [*format.shape][:: -1 if is_transposed else 1]:
        return None
    found = Int8Weight(node, is_transposed)
    for step in format.dequant_ops:
        operand = step.operand
        if isinstance(operand, Field):
            vector = vector_of(operand, weight)
            if vector is None:
                return None
            is_float = fx_utils.value(vector.node).dtype in op.SCALE_DTYPES
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


def vector_of(field: Field, weight: Weight) -> Vector | None:
    """A stored field with one element for each column, or for all, as a tensor."""
    if not _is_plain(field):
        return None
    node = weight.sources[field.source]
    if not isinstance(node, fx.Node):
        return None
    forms = [form for form in field.index if form != AffineIndex()]
    numel = math.prod(fx_utils.value(node).shape)
    if not forms and numel == 1:
        return Vector(node, "tensor")
    is_column = forms == [AffineIndex(linear=(("n0", 1),))] and numel == weight.format.shape[1]
    return Vector(node, "column") if is_column else None


def _read_epilogue(product: Matmul, x: FakeQuantized, weight: QuantizedWeight) -> Epilogue | None:
    alpha = x.alpha * weight.alpha
    if not math.isfinite(alpha) or not torch.finfo(torch.float32).tiny <= abs(alpha):
        return None
    found = read_float_epilogue(
        product.anchor,
        has_bias=product.bias is not None,
        row_scale=None if x.scale is None else x.scale.node,
        column_scale=None if weight.scale is None else weight.scale.node,
        alpha=alpha,
        divides=x.divides,
    )
    return found if found.out_dtype in op.SCALE_DTYPES else None


def assemble(
    product: Matmul, x: FakeQuantized, weight: QuantizedWeight, found: Epilogue
) -> RecognizedGemm | Rejection:
    """The call of ``inductor_quant::w8a8``."""
    row, column, bias = found.row_scale, found.column_scale, found.bias or product.bias
    if bias is not None and fx_utils.value(bias).dtype not in op.SCALE_DTYPES:
        return Rejection(RejectionCode.BIAS, f"it is {fx_utils.value(bias).dtype}", bias.name)
    a_zero, a_kind = x.zero_point()
    b_zero, b_kind = weight.zero_point()
    if isinstance(a_zero, int) and not -128 <= a_zero <= 127:
        return Rejection(RejectionCode.DTYPE, f"a zero point of {a_zero}", product.anchor.name)
    zeros: tuple[Any, ...] = (None if isinstance(a_zero, int) else a_zero, b_zero)
    if a_kind and b_zero is None and (sums := weight.sums()) is not None:
        zeros = (*zeros, sums)
    matmul = ScaledMatmul(
        anchor=product.anchor,
        end=found.end,
        a=Operand(x.int8(), (-1, product.k)),
        b=weight.matrix(),
        sizes=(product.rows, product.n, product.k),
        a_scale=w8a8.as_factor(per_token(row), found),
        b_scale=w8a8.as_factor(per_channel(column), found),
        bias=bias,
        interior=(*product.dequantization(), *found.interior),
        shape=found.shape or product.shape,
    )
    return w8a8.assemble(
        matmul,
        row_scale=row,
        alpha=found.alpha,
        zeros=zeros if any(zero is not None for zero in zeros) else (),
        a_zero=a_zero if isinstance(a_zero, int) else 0,
        kinds=(a_kind, b_kind),
    )


PATTERN = Pattern(name="qdq", family=w8a8.FAMILY, anchors=ANCHORS, recognize=recognize)
