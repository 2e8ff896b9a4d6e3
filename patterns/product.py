"""The ops that multiply by a weight, and what each of them is: x [M, K] times W [K, N].

``product_of`` reads one op; all that the recogniser needs of it is in the ``Product``. An op of a
producer's own that hides its dequantization is an entry of ``_ADAPTERS``: its name and its meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.patterns import arithmetic, graph
from inductor_quant.patterns.digits import Index, Unsupported
from inductor_quant.patterns.expression import FLOAT8, Bits, Expr, Load, Op, digits
from inductor_quant.patterns.graph import aten
from inductor_quant.patterns.reader import sizes
from inductor_quant.patterns.symbolic import Reader

prims = torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Product:
    """``out = x @ W + bias``, in the shape of ``anchor``.

    x        the activation; reshaped to [-1, K] it is [M, K]
    weight   W[k, n], read in the axes "k" and "n" of ``reader``
    node     the node of the weight, for messages
    shape    of the result, as arguments of a reshape; None: [M, N]
    """

    anchor: fx.Node
    x: fx.Node
    weight: Expr
    node: fx.Node
    reader: Reader
    k: int
    n: int
    bias: fx.Node | None = None
    shape: tuple[int, ...] | None = None


def product_of(anchor: fx.Node, reader: Reader) -> Product | Rejection | None:
    """What ``anchor`` multiplies; None where it is no product at all (a plain sum)."""
    read = _READERS.get(anchor.target) or _ADAPTERS.get(str(anchor.target))
    if read is None:
        return None
    try:
        return read(anchor, reader)
    except Unsupported as reason:
        return Rejection(RejectionCode.WEIGHT_FORM, str(reason), anchor.name)


def anchors() -> tuple[Any, ...]:
    """The ops that products are read from, those of producers by their names."""
    return (*_READERS, *_ADAPTERS)


def _axes(reader: Reader, k: int, n: int) -> tuple[Index, Index]:
    return reader.space.variable("k", k), reader.space.variable("n", n)


def _matrix(
    anchor: fx.Node, reader: Reader, x: Any, w: Any, *, transposed: bool = False, bias: Any = None
) -> Product | Rejection:
    """A product with a weight [K, N], or [N, K] where it is ``transposed``."""
    if not graph.is_tensor_node(x) or not graph.is_tensor_node(w):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    if graph.value(w).dim() != 2:
        return Rejection(RejectionCode.WEIGHT_FORM, "it is no matrix", w.name)
    n, k = sizes(w) if transposed else reversed(sizes(w))
    row, column = _axes(reader, k, n)
    weight = reader.read(w, (column, row) if transposed else (row, column))
    return Product(anchor, x, weight, w, reader, k, n, bias, _shape(anchor))


def _shape(anchor: fx.Node) -> tuple[int, ...] | None:
    """The arguments of a reshape to the shape of ``anchor``; None where that is [M, N]."""
    shape = graph.value(anchor).shape
    if len(shape) == 2:
        return None
    if sum(map(graph.is_symbolic, shape)) > 1:
        raise Unsupported("a result of several symbolic sizes")
    return tuple(-1 if graph.is_symbolic(size) else int(size) for size in shape)


def _mm(anchor: fx.Node, reader: Reader) -> Product | Rejection:
    return _matrix(anchor, reader, *graph.arguments(anchor, "self", "mat2"))


def _addmm(anchor: fx.Node, reader: Reader) -> Product | Rejection:
    bias, x, w = graph.arguments(anchor, "self", "mat1", "mat2")
    return _plain_bias(anchor, bias) or _matrix(anchor, reader, x, w, bias=bias)


def _plain_bias(anchor: fx.Node, bias: Any) -> Rejection | None:
    """What keeps the first term of addmm or baddbmm from being a bias of the columns."""
    if any(anchor.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return Rejection(RejectionCode.BIAS, "the terms have factors", anchor.name)
    if not graph.is_tensor_node(bias):
        return Rejection(RejectionCode.BIAS, "the bias is no tensor", anchor.name)
    *lead, last = graph.value(bias).shape or [0]
    if not all(map(graph.is_one, lead)) or not graph.same_size(last, graph.value(anchor).shape[-1]):
        shape = list(graph.value(bias).shape)
        return Rejection(RejectionCode.BIAS, f"a bias of shape {shape}", bias.name)
    return None


def _linear(anchor: fx.Node, reader: Reader) -> Product | Rejection:
    x, w, bias = graph.arguments(anchor, "input", "weight", "bias")
    refused = bias is not None and _plain_bias(anchor, bias)
    return refused or _matrix(anchor, reader, x, w, transposed=True, bias=bias)


def _mv(anchor: fx.Node, reader: Reader) -> Product | Rejection:
    w, x = graph.arguments(anchor, "self", "vec")
    return _matrix(anchor, reader, x, w, transposed=True)


def _bmm(anchor: fx.Node, reader: Reader) -> Product | Rejection:
    return _batched(anchor, reader, *graph.arguments(anchor, "self", "mat2"))


def _baddbmm(anchor: fx.Node, reader: Reader) -> Product | Rejection:
    bias, x, w = graph.arguments(anchor, "self", "batch1", "batch2")
    return _plain_bias(anchor, bias) or _batched(anchor, reader, x, w, bias)


def _batched(
    anchor: fx.Node, reader: Reader, x: Any, w: Any, bias: Any = None
) -> Product | Rejection:
    """A batch of products with the same weight, which is one product of more rows."""
    if not graph.is_tensor_node(x) or not graph.is_tensor_node(w):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    batch, k, n = sizes(w)
    which = reader.space.variable("b", batch)
    weight = reader.read(w, (which, *_axes(reader, k, n)))
    if any(digit.axis == "b" for digit in digits(weight, reader.space)):
        return Rejection(RejectionCode.BATCHED_WEIGHT, "", w.name)
    return Product(anchor, x, weight, w, reader, k, n, bias, _shape(anchor))


def _sum(anchor: fx.Node, reader: Reader) -> Product | Rejection | None:
    """``sum(x[m, k, 1] * w[1, k, n], dim=1)``: what Inductor makes of mm for a single row or column
    under max-autotune."""
    terms, dims, keepdim = graph.arguments(anchor, "self", "dim", "keepdim")
    if not isinstance(terms, fx.Node) or terms.target != aten.mul.Tensor or keepdim:
        return None
    if not graph.is_tensor_node(terms) or graph.value(terms).dim() != 3 or list(dims) != [1]:
        return None
    if anchor.kwargs.get("dtype") not in (None, graph.value(terms).dtype):
        return None
    m, k, n = graph.value(terms).shape
    if not isinstance(k, int) or not isinstance(n, int) or not isinstance(m, int):
        return None
    left, right = graph.arguments(terms, "self", "other")
    if not graph.is_tensor_node(left) or not graph.is_tensor_node(right):
        return None
    position = (reader.space.variable("m", m), *_axes(reader, k, n))
    # The factor without n is the activation.
    factors = [(node, reader.operand(node, terms, position)) for node in (left, right)]
    for (_, x), (node, w) in (factors, reversed(factors)):
        found = _source_of_rows(reader, x, w, position, (m, k))
        if found is not None and not any(d.axis == "m" for d in digits(w, reader.space)):
            return Product(anchor, found, w, node, reader, k, n)
    return None


def _source_of_rows(
    reader: Reader, x: Expr, w: Expr, position: tuple[Index, ...], shape: tuple[int, int]
) -> fx.Node | None:
    """The tensor [M, K] (``shape``) of which ``x`` is the element (m, k).

    It is taken as it was before a widening cast where ``w`` has no more digits than its type: the
    weight is rounded to the type of the activation.
    """
    narrow, number = _unwidened(x), _unwidened(w)
    if number.dtype == narrow.dtype or isinstance(number, Bits) or number.dtype in FLOAT8:
        x = narrow
    place = (x.node, x.index) if isinstance(x, Load) else x.at if isinstance(x, Op) else None
    if place is None:
        return None
    node, index = place
    leaves = reader.space.leaves
    is_here = tuple(map(leaves, index)) == tuple(map(leaves, position[:2]))
    return node if is_here and sizes(node) == list(shape) else None


def _unwidened(expr: Expr) -> Expr:
    while isinstance(expr, Op) and expr.name == "cast" and expr.dtype == torch.float32:
        (expr,) = expr.args
    return expr


# ------------------------------------------------------------------------------------------
# ops of producers


def _scaled_rows(
    anchor: fx.Node, reader: Reader, x: Any, w: Any, scale: Any
) -> Product | Rejection:
    """``x @ (w * scale).t()`` with w [N, K] and a scale for each row, or one."""
    if not all(map(graph.is_tensor_node, (x, w, scale))):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    n, k = sizes(w)
    row, column = _axes(reader, k, n)
    shape = sizes(scale)
    if shape not in ([n], [n, 1], [1], [1, 1], []):
        return Rejection(RejectionCode.SCALE_AXIS, f"a scale of shape {shape}", scale.name)
    at = (column if shape and shape[0] != 1 else Index(), Index())[: len(shape)]
    dtype = graph.value(x).dtype
    number = arithmetic.cast(reader.read(w, (column, row)), dtype)
    weight = arithmetic.multiply(number, reader.read(scale, at), dtype)
    return Product(anchor, x, weight, w, reader, k, n, shape=_shape(anchor))


def _qbytes_mm(anchor: fx.Node, reader: Reader) -> Product | Rejection:
    """optimum-quanto: ``qbytes_mm(activations, weights [N, K], scales [N, 1])``; int8 or fp8."""
    return _scaled_rows(
        anchor, reader, *graph.arguments(anchor, "activations", "weights", "output_scales")
    )


def _int8pack_mm(anchor: fx.Node, reader: Reader) -> Product | Rejection:
    """``aten._weight_int8pack_mm(x, w [N, K], scales [N])``: the weight is not repacked."""
    return _scaled_rows(anchor, reader, *graph.arguments(anchor, "self", "mat2", "scales"))


_READERS: dict[Any, Callable[[fx.Node, Reader], Product | Rejection | None]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.linear.default: _linear,
    aten.mv.default: _mv,
    aten.sum.dim_IntList: _sum,
    aten._weight_int8pack_mm.default: _int8pack_mm,
}
# By name: they exist once their package is imported.
_ADAPTERS: dict[str, Callable[[fx.Node, Reader], Product | Rejection | None]] = {
    "quanto.qbytes_mm.default": _qbytes_mm,
}
