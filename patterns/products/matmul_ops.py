"""The ops that multiply by a weight, each read as x [M, K] times W [K, N].

``read_matmul`` reads one op into a ``Matmul``. A producer's custom op that hides its dequantization
is an entry of ``_CUSTOM_OPS``: its name and a function that says what it computes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..fx_utils import aten
from ..match import Derived
from ..symbolic import At, Reader, arithmetic
from ..symbolic.expr import FLOAT8, Bits, Expr, Load, Op, digits
from ..symbolic.index import IndexExpr, Unsupported
from ..symbolic.reader import for_any, sizes

prims = torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Matmul:
    """``out = x @ W + bias``, in the shape of ``anchor``.

    x        the activation; reshaped to [-1, K] it is [M, K]
    element  the expression of W[k, n] in the axes "k" and "n" of ``reader``; or where it is in
             ``node``, as long as it is not read
    node     the node of the weight, for messages
    shape    of the result, as arguments of a reshape; None: [M, N]
    """

    anchor: fx.Node
    x: fx.Node
    element: Expr | At
    node: fx.Node
    reader: Reader
    k: int
    n: int
    bias: fx.Node | None = None
    shape: tuple[Any, ...] | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether W is ``node``, as it is or transposed."""
        return isinstance(self.element, tuple)

    @property
    def weight(self) -> Expr:
        """The expression of W[k, n]."""
        if isinstance(self.element, tuple):
            return self.reader.read(self.node, self.element)
        return self.element

    @property
    def rows(self) -> Any:
        """M, which may be symbolic."""
        return math.prod(fx_utils.value(self.x).shape[:-1])

    def dequantization(self) -> list[fx.Node]:
        """The nodes between the product and the stored weight, in graph order."""
        inside = {*self.reader.nodes(), *self.anchor.all_input_nodes} - {self.x}
        return sorted(node for node in inside if node.op == "call_function")


def read_matmul(anchor: fx.Node, reader: Reader) -> Matmul | Rejection | None:
    """What ``anchor`` multiplies; None if it is no product at all (a plain sum)."""
    read = _READERS.get(anchor.target) or _CUSTOM_OPS.get(str(anchor.target))
    if read is None:
        return None
    try:
        return read(anchor, reader)
    except Unsupported as reason:
        return Rejection(RejectionCode.WEIGHT_FORM, str(reason), anchor.name)


def anchors() -> tuple[Any, ...]:
    """The ops that ``read_matmul`` knows, custom ops by name."""
    return (*_READERS, *_CUSTOM_OPS)


def _axes(reader: Reader, k: int, n: int) -> tuple[IndexExpr, IndexExpr]:
    return reader.space.variable("k", k), reader.space.variable("n", n)


def _matrix(
    anchor: fx.Node, reader: Reader, x: Any, w: Any, *, transposed: bool = False, bias: Any = None
) -> Matmul | Rejection:
    """A product with a weight [K, N], or [N, K] if ``transposed``."""
    if not fx_utils.is_tensor_node(x) or not fx_utils.is_tensor_node(w):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    if fx_utils.value(w).dim() != 2:
        return Rejection(RejectionCode.WEIGHT_FORM, "it is no matrix", w.name)
    n, k = sizes(w) if transposed else reversed(sizes(w))
    row, column = _axes(reader, k, n)
    place = (column, row) if transposed else (row, column)
    return Matmul(anchor, x, place, w, reader, k, n, bias, _shape(anchor, x))


def _shape(anchor: fx.Node, x: fx.Node) -> tuple[Any, ...] | None:
    """The arguments of a reshape to the shape of ``anchor``; None if that is [M, N]."""
    shape = fx_utils.value(anchor).shape
    if len(shape) == 2:
        return None
    symbolic = [dim for dim, size in enumerate(shape) if fx_utils.is_symbolic(size)]
    if len(symbolic) < 2:
        return tuple(-1 if dim in symbolic else int(size) for dim, size in enumerate(shape))
    # all dimensions but the last are those of x
    return tuple(
        Derived(aten.sym_size.int, (x, dim)) if dim in symbolic else int(size)
        for dim, size in enumerate(shape)
    )


def _mm(anchor: fx.Node, reader: Reader) -> Matmul | Rejection:
    return _matrix(anchor, reader, *fx_utils.arguments(anchor, "self", "mat2"))


def _addmm(anchor: fx.Node, reader: Reader) -> Matmul | Rejection:
    bias, x, w = fx_utils.arguments(anchor, "self", "mat1", "mat2")
    return reject_bias(anchor, bias) or _matrix(anchor, reader, x, w, bias=bias)


def reject_bias(anchor: fx.Node, bias: Any) -> Rejection | None:
    """Rejects a first term of addmm or baddbmm that is no bias [N]."""
    if any(anchor.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return Rejection(RejectionCode.BIAS, "the terms have factors", anchor.name)
    if not fx_utils.is_tensor_node(bias):
        return Rejection(RejectionCode.BIAS, "the bias is no tensor", anchor.name)
    *lead, last = fx_utils.value(bias).shape or [0]
    if not all(map(fx_utils.is_one, lead)) or not fx_utils.same_size(
        last, fx_utils.value(anchor).shape[-1]
    ):
        shape = list(fx_utils.value(bias).shape)
        return Rejection(RejectionCode.BIAS, f"a bias of shape {shape}", bias.name)
    return None


def _linear(anchor: fx.Node, reader: Reader) -> Matmul | Rejection:
    x, w, bias = fx_utils.arguments(anchor, "input", "weight", "bias")
    refused = bias is not None and reject_bias(anchor, bias)
    return refused or _matrix(anchor, reader, x, w, transposed=True, bias=bias)


def _mv(anchor: fx.Node, reader: Reader) -> Matmul | Rejection:
    w, x = fx_utils.arguments(anchor, "self", "vec")
    return _matrix(anchor, reader, x, w, transposed=True)


def _bmm(anchor: fx.Node, reader: Reader) -> Matmul | Rejection:
    return _batched(anchor, reader, *fx_utils.arguments(anchor, "self", "mat2"))


def _baddbmm(anchor: fx.Node, reader: Reader) -> Matmul | Rejection:
    bias, x, w = fx_utils.arguments(anchor, "self", "batch1", "batch2")
    return reject_bias(anchor, bias) or _batched(anchor, reader, x, w, bias)


def _batched(
    anchor: fx.Node, reader: Reader, x: Any, w: Any, bias: Any = None
) -> Matmul | Rejection:
    """A batch of products that share one weight: one product with a larger M."""
    if not fx_utils.is_tensor_node(x) or not fx_utils.is_tensor_node(w):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    batch, k, n = fx_utils.value(w).shape
    if fx_utils.is_symbolic(k) or fx_utils.is_symbolic(n):
        raise Unsupported("a symbolic shape")
    with for_any(batch):
        which = reader.space.variable("b", sizes(w)[0])
        weight = reader.read(w, (which, *_axes(reader, k, n)))
    if any(digit.axis == "b" for digit in digits(weight, reader.space)):
        return Rejection(RejectionCode.BATCHED_WEIGHT, "", w.name)
    return Matmul(anchor, x, weight, w, reader, k, n, bias, _shape(anchor, x))


def _sum(anchor: fx.Node, reader: Reader) -> Matmul | Rejection | None:
    """``sum(x[m, k, 1] * w[1, k, n], dim=1)``: Inductor's decomposition of mm with M = 1 or N = 1
    under max-autotune."""
    terms, dims, keepdim = fx_utils.arguments(anchor, "self", "dim", "keepdim")
    if not isinstance(terms, fx.Node) or terms.target != aten.mul.Tensor or keepdim:
        return None
    if not fx_utils.is_tensor_node(terms) or fx_utils.value(terms).dim() != 3 or list(dims) != [1]:
        return None
    if anchor.kwargs.get("dtype") not in (None, fx_utils.value(terms).dtype):
        return None
    m, k, n = fx_utils.value(terms).shape
    if not isinstance(k, int) or not isinstance(n, int) or not isinstance(m, int):
        return None
    left, right = fx_utils.arguments(terms, "self", "other")
    if not fx_utils.is_tensor_node(left) or not fx_utils.is_tensor_node(right):
        return None
    position = (reader.space.variable("m", m), *_axes(reader, k, n))
    # The factor that does not vary with n is the activation.
    factors = [(node, reader.operand(node, terms, position)) for node in (left, right)]
    for (_, x), (node, w) in (factors, reversed(factors)):
        found = _source_of_rows(reader, x, w, position, (m, k))
        if found is not None and not any(d.axis == "m" for d in digits(w, reader.space)):
            return Matmul(anchor, found, w, node, reader, k, n)
    return None


def _source_of_rows(
    reader: Reader, x: Expr, w: Expr, position: tuple[IndexExpr, ...], shape: tuple[int, int]
) -> fx.Node | None:
    """The tensor [M, K] (``shape``), or [..., K] with M rows, of which ``x`` is the element (m, k).

    A widening cast of x is skipped if ``w`` fits x's own dtype: the kernel rounds the weight to it.
    """
    narrow, number = _unwidened(x), _unwidened(w)
    if number.dtype == narrow.dtype or isinstance(number, Bits) or number.dtype in FLOAT8:
        x = narrow
    place = (x.node, x.index) if isinstance(x, Load) else x.at if isinstance(x, Op) else None
    if place is None:
        return None
    node, index = place
    if not index:
        return None
    *rows, k = sizes(node)
    row = IndexExpr()
    for size, i in zip(rows, index, strict=False):
        row = row * size + i
    leaves = reader.space.leaves
    is_here = (leaves(row), leaves(index[-1])) == tuple(map(leaves, position[:2]))
    return node if is_here and (math.prod(rows), k) == shape else None


def _unwidened(expr: Expr) -> Expr:
    while isinstance(expr, Op) and expr.name == "cast" and expr.dtype == torch.float32:
        (expr,) = expr.args
    return expr


# ------------------------------------------------------------------------------------------
# custom ops of producers


def _scaled_rows(anchor: fx.Node, reader: Reader, x: Any, w: Any, scale: Any) -> Matmul | Rejection:
    """``x @ (w * scale).t()`` with w [N, K] and a scale per channel or per tensor."""
    if not all(map(fx_utils.is_tensor_node, (x, w, scale))):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    n, k = sizes(w)
    row, column = _axes(reader, k, n)
    shape = sizes(scale)
    if shape not in ([n], [n, 1], [1], [1, 1], []):
        return Rejection(RejectionCode.SCALE_AXIS, f"a scale of shape {shape}", scale.name)
    at = (column if shape and shape[0] != 1 else IndexExpr(), IndexExpr())[: len(shape)]
    dtype = fx_utils.value(x).dtype
    number = arithmetic.cast(reader.read(w, (column, row)), dtype)
    weight = arithmetic.multiply(number, reader.read(scale, at), dtype)
    return Matmul(anchor, x, weight, w, reader, k, n, shape=_shape(anchor, x))


def _qbytes_mm(anchor: fx.Node, reader: Reader) -> Matmul | Rejection:
    """optimum-quanto: ``qbytes_mm(activations, weights [N, K], scales [N, 1])``; int8 or fp8."""
    return _scaled_rows(
        anchor, reader, *fx_utils.arguments(anchor, "activations", "weights", "output_scales")
    )


def _int8pack_mm(anchor: fx.Node, reader: Reader) -> Matmul | Rejection:
    """``aten._weight_int8pack_mm(x, w [N, K], scales [N])``: the weight is not repacked."""
    return _scaled_rows(anchor, reader, *fx_utils.arguments(anchor, "self", "mat2", "scales"))


_READERS: dict[Any, Callable[[fx.Node, Reader], Matmul | Rejection | None]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.linear.default: _linear,
    aten.mv.default: _mv,
    aten.sum.dim_IntList: _sum,
    aten._weight_int8pack_mm.default: _int8pack_mm,
}
# By name: they exist only after their package is imported.
_CUSTOM_OPS: dict[str, Callable[[fx.Node, Reader], Matmul | Rejection | None]] = {
    "quanto.qbytes_mm.default": _qbytes_mm,
}
