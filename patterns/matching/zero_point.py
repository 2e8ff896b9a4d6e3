"""The zero point of an activation after an integer product: ``acc - zero[m] * sum[n]``.

The rank-1 term is read as a product of factors that vary along one axis each. If it is subtracted
after scales (``acc * s[m] - (zero * s)[m] * sum[n]``), they must be among its factors; the rest is
the zero point and the sums. If the sums prove to be the weight's column sums, the kernel may
compute them itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat

from .. import fx_utils
from ..fx_utils import CAST, aten
from ..match import Derived, Operand
from ..symbolic.expr import FLOATS, INTEGERS, Bits, Position
from ..symbolic.index import Unsupported
from ..symbolic.reader import Reader, sizes
from .value_numbering import Numbering
from .value_range import constant, may_wrap, value_range

_MAX_DEPTH = 20
_VECTOR_VIEWS = (*fx_utils.RESHAPES, *fx_utils.SQUEEZES, aten.expand.default)
# The axis of a tensor broadcast to a shape: "row", "column", "tensor", or None.
AxisOf = Callable[[fx.Node, Sequence[Any]], str | None]


@dataclasses.dataclass(frozen=True)
class ZeroPoint:
    """The term ``- zero * sums``: ``zero`` [M, 1] or [1, 1] or a number; ``sums`` [1, N], None: the
    weight's column sums. ``reads``: the graph nodes among them."""

    zero: Operand | int
    sums: Operand | None
    kind: str  # as OperandSpec.zero
    reads: tuple[fx.Node, ...]


def read_zero_point(
    term: fx.Node,
    sign: int,
    target: Sequence[Any],
    axis_of: AxisOf,
    scales: Sequence[tuple[fx.Node, str]],
    alpha: float,
    weight: fx.Node,
    dtype: torch.dtype,
) -> ZeroPoint | None:
    """The zero point in ``value - sign * term``, or None.

    ``value`` has shape ``target`` and ``dtype``; it is the product with ``weight`` [K, N] times
    ``scales`` (with their axes) times ``alpha``.
    """
    reader = _Reader(axis_of, list(scales))
    if not reader.read_full(term, target) or reader.scales:
        return None
    number = sign * reader.number / alpha
    column = [node for node, axis in reader.factors if axis == "column"]
    rows = [(node, axis) for node, axis in reader.factors if axis != "column"]
    if len(column) != 1 or len(rows) > 1 or number * alpha != sign * reader.number:
        return None
    [sums] = column
    # a 0-d tensor may be on the CPU
    if any(
        fx_utils.value(node).device != fx_utils.value(weight).device for node, _ in reader.factors
    ):
        return None
    is_sum = is_sum_of_columns(sums, weight)
    if not is_sum and fx_utils.value(sums).dtype not in (*INTEGERS, *FLOATS):
        return None
    # int32 is modulo 2**32 in the graph and in the kernel.
    is_int32 = dtype == fx_utils.value(sums).dtype == torch.int32
    zero: Operand | int
    if rows:
        zero, kind = _zero_tensor(*rows[0], number, is_exact=is_sum or is_int32)
    elif number in range(-128, 128) and number and (is_sum or is_int32):
        zero, kind = int(number), "const"
    else:
        return None
    given = None
    if not is_sum:
        given = _as_float(Operand(sums, (1, -1)), sums, keep=kind != "float")
    is_exact = kind != "float" and (is_sum or is_int32)
    if not is_exact and (reader.wraps or _difference_wraps(term, weight, dtype)):
        return None  # the kernel computes it in fp32, which does not wrap
    reads = (sums, *(node for node, _ in rows))
    return ZeroPoint(zero, given, kind, () if is_sum and not rows else reads)


def _difference_wraps(term: fx.Node, weight: fx.Node, dtype: torch.dtype) -> bool:
    """Whether the product minus the term may overflow its integer dtype."""
    if dtype not in INTEGERS:
        return False
    k = fx_utils.value(weight).shape[0]
    found = value_range(term)
    most = max(abs(found.low), abs(found.high)) + 2**14 * k
    return not most <= torch.iinfo(dtype).max


def _zero_tensor(node: fx.Node, axis: str, number: float, *, is_exact: bool) -> tuple[Operand, str]:
    shape = (-1, 1) if axis == "row" else (1, 1)
    dtype = fx_utils.value(node).dtype
    if number == 1 and is_exact and dtype in INTEGERS and value_range(node).is_within(-128, 127):
        int8 = node if dtype == torch.int8 else Derived(CAST, (node, torch.int8))
        return Operand(int8, shape), "int"
    zero = _as_float(Operand(node, shape), node)
    if number != 1:
        zero = Operand(Derived(aten.mul.Tensor, (zero, number)), shape)
    return zero, "float"


def _as_float(operand: Operand, node: fx.Node, *, keep: bool = False) -> Operand:
    dtype = fx_utils.value(node).dtype
    if keep or dtype in (torch.float32, torch.bfloat16, torch.float16):
        return operand
    return Operand(Derived(CAST, (operand.node, torch.float32)), operand.shape)


class _Reader:
    """Splits a product into factors. ``scales``: those not yet found among the factors."""

    def __init__(self, axis_of: AxisOf, scales: list[tuple[fx.Node, str]]) -> None:
        self.axis_of = axis_of
        self.scales = scales
        self.number = 1.0
        self.factors: list[tuple[fx.Node, str]] = []
        self.wraps = False  # whether an int32 product may
        self.numbering = Numbering()

    def read_full(self, node: Any, target: Sequence[Any], depth: int = 0) -> bool:
        """Read a factor that is broadcast to ``target``."""
        if depth > _MAX_DEPTH:
            return False
        if isinstance(node, (int, float)) and not isinstance(node, bool):
            self.number *= node
            return True
        if not fx_utils.is_tensor_node(node):
            return False
        axis = self.axis_of(node, target)
        if axis is not None:
            return self.read_vector(node, axis, depth)
        if node.target in (aten.mul.Tensor, aten.neg.default) and not self._is_product(node):
            return False
        if node.target == aten.mul.Tensor:
            return all(self.read_full(arg, target, depth + 1) for arg in node.args)
        if node.target == aten.neg.default:
            self.number = -self.number
            return self.read_full(node.args[0], target, depth + 1)
        if is_widening(node) or node.target == aten.expand.default:
            return self.read_full(node.args[0], target, depth + 1)
        if node.target in fx_utils.RESHAPES and fx_utils.is_tensor_node(node.args[0]):
            source = fx_utils.value(node.args[0]).shape
            if len(source) >= 2 and fx_utils.same_size(source[-1], target[-1]):
                # a smaller shape would be repeated along the target's rows
                is_whole = fx_utils.same_shape(fx_utils.value(node).shape, target)
                return is_whole and self.read_full(node.args[0], source, depth + 1)
        return False

    def read_vector(self, node: fx.Node, axis: str, depth: int) -> bool:
        """Read a factor of one axis: a scale, a product with a scale, or any other vector."""
        node = peeled(node)
        if axis == "tensor" and (value := constant(node)) is not None:
            self.number *= value
            return True
        for scale, along in self.scales:
            # the same vector along the other axis is another factor
            is_along = axis == along or fx_utils.is_single(scale)
            if is_along and self.numbering.equal(node, peeled(scale)):
                self.scales.remove((scale, along))
                return True
        if node.target in (aten.mul.Tensor, aten.neg.default):
            saved = (list(self.scales), self.number, list(self.factors), self.wraps)
            if self._read_parts(node, axis, depth) and (
                len(self.scales) < len(saved[0]) or _is_multiple(node)
            ):
                return True
            self.scales, self.number, self.factors, self.wraps = saved
        self.factors.append((node, axis))
        return True

    def _is_product(self, node: fx.Node) -> bool:
        """Whether the value is the exact product, or equal to it modulo 2**32."""
        if not may_wrap(node):
            return True
        self.wraps = True
        return fx_utils.value(node).dtype == torch.int32

    def _read_parts(self, node: fx.Node, axis: str, depth: int) -> bool:
        if depth > _MAX_DEPTH or not self._is_product(node):
            return False
        if node.target == aten.neg.default:
            self.number = -self.number
        for part in node.args:
            if isinstance(part, (int, float)) and not isinstance(part, bool):
                self.number *= part
                continue
            if not fx_utils.is_tensor_node(part):
                return False
            assert isinstance(part, fx.Node)
            if not fx_utils.is_single(part) and not _is_same_length(part, node):
                return False
            inner = "tensor" if fx_utils.is_single(part) else axis
            if not self.read_vector(part, inner, depth + 1):
                return False
        return True


def _is_multiple(node: fx.Node) -> bool:
    """Whether a vector is another vector times a scalar."""
    return any(not isinstance(arg, fx.Node) or fx_utils.is_single(arg) for arg in node.args)


def peeled(node: fx.Node) -> fx.Node:
    """The vector before views that keep its order and before widening casts."""
    while True:
        source = node.args[0] if node.args else None
        if not fx_utils.is_tensor_node(source):
            return node
        assert isinstance(source, fx.Node)
        is_view = node.target in _VECTOR_VIEWS and _is_same_length(source, node)
        if not is_view and not is_widening(node):
            return node
        node = source


def _is_same_length(a: fx.Node, b: fx.Node) -> bool:
    """Whether two views hold the same elements: equal sizes except for 1s, or one size that is the
    product of several."""
    sizes_of = [[s for s in fx_utils.value(n).shape if not fx_utils.is_one(s)] for n in (a, b)]
    short, long = sorted(sizes_of, key=len)
    if len(short) == len(long):
        return all(map(fx_utils.same_size, short, long))
    if len(short) != 1:
        return False
    return fx_utils.same_size(short[0], math.prod(long))


def is_widening(node: fx.Node) -> bool:
    """Whether it is a cast between floats, from an integer to a float, or to a wider integer. The
    rounding of a cast to a 16-bit float is ignored."""
    if node.target != CAST or not fx_utils.is_tensor_node(node.args[0]):
        return False
    before = fx_utils.value(node.args[0]).dtype  # type: ignore[arg-type]
    after = fx_utils.value(node).dtype
    if after in FLOATS:
        return before in (*FLOATS, *INTEGERS)
    if before not in INTEGERS or after not in INTEGERS:
        return False
    low, high = (torch.iinfo(before).min, torch.iinfo(before).max)
    return torch.iinfo(after).min <= low and high <= torch.iinfo(after).max


def is_sum_of_columns(node: fx.Node, weight: fx.Node) -> bool:
    """Whether a vector is exactly the sum over k of ``weight`` [K, N]."""
    node = peeled(node)
    if node.target not in (aten.sum.dim_IntList, aten.sum.default):
        return False
    source, dims = fx_utils.arguments(node, "self", "dim")
    if not fx_utils.is_tensor_node(source) or fx_utils.value(node).dtype not in _WIDE:
        return False
    shape = fx_utils.value(source).shape
    if len(shape) != 2 or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return False
    along = dims[0] % 2
    reader = Reader()
    try:
        k, n = sizes(weight)
        if list(shape) != ([k, n] if along == 0 else [n, k]):
            return False
        index = (reader.space.variable("k", k), reader.space.variable("n", n))
        want = reader.read(weight, index)
        got = reader.read(_uncast(source), index if along == 0 else index[::-1])
        leaves = reader.space.leaves
        if isinstance(want, Position) and isinstance(got, Position):  # a small constant
            return leaves(want.index) == leaves(got.index)
        return (
            isinstance(want, Bits)
            and isinstance(got, Bits)
            and want.node is got.node
            and (want.width, want.signed) == (got.width, got.signed) == (8, True)
            and [leaves(i) for i in (*want.index, want.offset)]
            == [leaves(i) for i in (*got.index, got.offset)]
        )
    except Unsupported:
        return False


def frozen_sums(weight: fx.Node | Derived) -> Derived | None:
    """The column sums of ``weight`` [K, N] as a node if they are computed only once: parameters are
    about to be frozen, or a package folds its constants when it is loaded.

    None if they would be computed in every call: then the lowering finds the cheapest place.
    """
    source = fx_utils.base(weight if isinstance(weight, fx.Node) else weight.args[0])
    is_folded = source.op == "placeholder" and compat.is_freezing()
    if source.op == "get_attr" and compat.is_exporting() and fx_utils.attribute(source) is not None:
        is_folded = compat.is_freezing() or compat.folds_when_loaded()
    if not is_folded:
        return None
    return Derived(aten.sum.dim_IntList, (weight, [0], True), (("dtype", torch.int32),))


_WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)


def _uncast(node: fx.Node) -> fx.Node:
    """The tensor before widening casts of an integer."""
    while is_widening(node) and fx_utils.value(node.args[0]).dtype in INTEGERS:  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return node
