"""Experts of 8-bit rows: each quantized row times the 8-bit weight of a stack that it selects.

In ``_grouped_mm``, and in a ``bmm`` with gathered weights, both operands are integers or FP8 values
that the graph converts, with scales for rows, columns or blocks. ``_scaled_grouped_mm`` takes them
as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from inductor_quant.ops import experts as experts_op
from inductor_quant.ops import fp8_block
from inductor_quant.ops import scaled_experts as op
from inductor_quant.ops import w8a8 as w8a8_op
from inductor_quant.spec import row_ranges
from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..fx_utils import CAST, aten
from ..match import Derived, Operand, Pattern, RecognizedGemm
from ..matching.chosen_rows import Chosen, rows_of, ungathered
from ..matching.operands import reject_mutated, reject_operands
from ..matching.scaled_elements import BLOCKS, ElementReader, Place, unwound
from ..matching.value_numbering import Numbering
from ..products import stock
from ..products.sum_of_products import comes_from
from ..symbolic.expr import FLOAT8, Expr, Load, Op
from ..symbolic.index import ROW, ZERO, IndexExpr, Unsupported
from ..symbolic.reader import for_any, sizes
from . import scaled_grouped_mm
from .experts import FALLBACK
from .scaled_grouped_mm import VERSIONS, Product
from .w8a8 import reject_long_k

FAMILY = "scaled_experts"
_ELEMENTS = frozenset((torch.int8, *FLOAT8))
# Rows an expert, in the mean, up to which our kernels surely are faster than the library's product
# of FP8 on a card whose tiles were not measured. On the one where they were, they always are.
_MAX_MEAN_ROWS = 16
# Elements along K of a block of scales, from which its scaling is hidden behind products.
_MIN_BLOCK = 128
_LONGEST = 128  # block along K that models have; longer ones are all of K
_CHOOSING = (
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default),
    *(aten.gather.default, aten.embedding.default),
)
_NOT_QUANTIZED = Rejection(
    RejectionCode.NOT_QUANTIZED, "the activation is not made of quantized values"
)


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """``anchor``: ``_scaled_grouped_mm``, ``_grouped_mm`` or ``bmm``; None if that is no product
    with a stack."""
    if str(anchor.target) in VERSIONS:
        found = scaled_grouped_mm.read(anchor)
        return found if isinstance(found, Rejection) else _assemble(anchor, found)
    is_bmm = anchor.target == aten.bmm.default
    names = ("input", "weight") if str(anchor.target) == FALLBACK else ("self", "mat2")
    operands = fx_utils.arguments(anchor, *names)
    if not all(fx_utils.is_tensor_node(x) and comes_from(x, _ELEMENTS) for x in operands):
        return None if is_bmm else _NOT_QUANTIZED
    rows = fx_utils.value(anchor).shape[0]
    try:
        # Rows that are gathered come from a tensor with another symbol.
        with for_any(rows, fx_utils.value(ungathered(operands[0]).source).shape[0]):
            product = _Reading(anchor).product(*operands)
    except (Unsupported, RecursionError) as reason:
        return Rejection(RejectionCode.WEIGHT_FORM, str(reason), anchor.name)
    return _assemble(anchor, product) if isinstance(product, Product) else product


@dataclasses.dataclass(frozen=True)
class _Axes:
    """Variables of a product with a stack, and their sizes. ``row`` is one of a's source; ``times``
    rows of the product share it."""

    row: IndexExpr
    e: IndexExpr
    n: IndexExpr
    k: IndexExpr
    rows: int
    sizes: tuple[int, int, int]  # of e, n and k


@dataclasses.dataclass(frozen=True)
class _Scales:
    """``of_a``: the node, with ``each`` scales for a row, or one for all if that is 0; ``of_b``:
    the argument; ``block``: that of b, whose K is a's too. None: 1."""

    of_a: fx.Node | None
    each: int
    of_b: Any
    block: tuple[int, int]

    def of_columns_alone(self, count: int, n: int) -> _Scales:
        """One for all rows becomes a factor of the columns' [E, 1, N]."""
        if self.of_a is None or self.each:
            return self
        own = Operand(self.of_a, (1, 1, 1))
        if self.of_b is None:
            of_b = Derived(aten.expand.default, (own, (count, 1, n)))
        else:
            wide = (Derived(CAST, (scale, torch.float32)) for scale in (self.of_b, own))
            of_b = Derived(aten.mul.Tensor, tuple(wide))
        return dataclasses.replace(self, of_a=None, of_b=of_b)


class _Reader(ElementReader):
    """While rows are read, floats that ids choose (static scales of experts) are a tensor of their
    own, with a scale for each row."""

    is_of_rows = False

    def read(self, node: fx.Node, index: tuple[IndexExpr, ...]) -> Expr:
        found = super().read(node, index)
        if not self.is_of_rows or node.target not in _CHOOSING or not isinstance(found, Load):
            return found
        is_scale = found.dtype in w8a8_op.SCALE_DTYPES
        return self.leaf(node, index) if is_scale and self._is_chosen(found) else found

    def _is_chosen(self, found: Load) -> bool:
        """By data, or by the expert of the product's row."""
        expert = {digit for digit, _ in self.selected[0].terms}
        digits = ({digit for digit, _ in part.terms} for part in found.index)
        return any(part.data for part in found.index) or any(map(expert.intersection, digits))


class _Reading:
    """Reads the operands of a product whose elements are converted in the graph."""

    def __init__(self, anchor: fx.Node) -> None:
        self.anchor, self.reader = anchor, _Reader(_ELEMENTS)

    def no(self, detail: str, code: RejectionCode = RejectionCode.WEIGHT_FORM) -> Rejection:
        return Rejection(code, detail, self.anchor.name)

    def product(self, x: fx.Node, w: fx.Node) -> Product | Rejection | None:
        if self.anchor.target == aten.bmm.default:
            return self._gathered(x, w)
        _, _, offsets, bias = fx_utils.arguments(self.anchor, "", "", "offs", "bias")
        if bias is not None or not fx_utils.is_tensor_node(offsets):
            return self.no("a bias, or no offsets")
        if len(sizes(x)) != 2 or len(sizes(w)) != 3:
            return self.no("it is no stack of matrices")
        variable, (count, k, n) = self.reader.space.variable, sizes(w)
        chosen = ungathered(x)
        rows = sizes(chosen.source)[0]
        axes = _Axes(
            *(variable(ROW, rows), variable("e", count), variable("n", n), variable("k", k)),
            *(rows, (count, n, k)),
        )
        return self._joined(
            (chosen.source, (axes.row, axes.k)),
            (w, (axes.e, axes.k, axes.n)),
            axes,
            chosen,
            offsets=offsets,
        )

    def _gathered(self, left: fx.Node, right: fx.Node) -> Product | Rejection | None:
        """``bmm(x [S, 1, K], w [S, K, N])`` or ``bmm(w [S, N, K], x [S, K, 1])``."""
        is_first = fx_utils.is_one(fx_utils.value(right).shape[2])  # the weight
        if not is_first and not fx_utils.is_one(fx_utils.value(left).shape[1]):
            return None
        x, w = (right, left) if is_first else (left, right)
        variable, (rows, *others) = self.reader.space.variable, sizes(w)
        k, n = reversed(others) if is_first else others
        row, column, depth = variable(ROW, rows), variable("n", n), variable("k", k)
        self.reader.row, self.reader.is_same = row, Numbering().equal
        at_x, at_w = ((row, ZERO, depth), (row, depth, column))
        if is_first:
            at_x, at_w = ((row, depth, ZERO), (row, column, depth))
        self.reader.read(w, at_w)
        if self.reader.ids is None:
            return None
        e, count = self.reader.selected
        axes = _Axes(row, e, column, depth, rows, (count, n, k))
        return self._joined((x, at_x), (w, at_w), axes, Chosen(x), ids=self.reader.ids)

    def _joined(
        self,
        of_x: tuple[fx.Node, tuple[IndexExpr, ...]],
        of_w: tuple[fx.Node, tuple[IndexExpr, ...]],
        axes: _Axes,
        chosen: Chosen,
        **route: fx.Node,
    ) -> Product | Rejection:
        self.reader.is_of_rows = True
        a, a_factors = unwound(self.reader.read(*of_x), _ELEMENTS)
        self.reader.is_of_rows = False
        weight = self.reader.read(*of_w)
        # What a gathered scale is cast to is no tensor of the stack: it stays as it is stored.
        weight = weight if self.reader.ids is None else _as_stored(weight)
        b, b_factors = unwound(weight, _ELEMENTS)
        if a is None:
            return _NOT_QUANTIZED
        if b is None:
            return self.no("the weight is not made of quantized values")
        (count, n, k), rows = axes.sizes, axes.rows
        times = rows * k // a.count if a.count and rows * k % a.count == 0 else 0
        if not times or rows % times or b.count != count * n * k:
            return self.no("operands that are parts of others")
        source = self.reader.space.divmod(axes.row, times)[0]
        axes = dataclasses.replace(axes, row=source, rows=rows // times)
        if not self._equal(a.position, source * k + axes.k):
            return self.no("the activation is not read in order")
        if self._equal(b.position, (axes.e * n + axes.n) * k + axes.k):
            stack: Any = _swapped(Operand(b.node, (count, n, k)))
        elif self._equal(b.position, (axes.e * k + axes.k) * n + axes.n):
            stack = Operand(b.node, (count, k, n))
        else:
            return self.no("the weight is not read in order")
        found = self._scales(a_factors, b_factors, axes)
        if found is None:
            detail = "a factor that is no scale of rows, columns or blocks"
            return self.no(detail, RejectionCode.SCALE_AXIS)
        found = found.of_columns_alone(count, n)
        if chosen.mask is not None and found.of_a is None:
            return self.no("rows are masked, and have no scale")
        stored = {a.node, b.node, *(place.node for place in (*a_factors, *b_factors))}
        stored |= {*chosen.nodes(), *route.values()}
        inside = {*self.reader.nodes(), self.anchor, *self.anchor.all_input_nodes}
        block = found.block[0]
        scales = found.of_a and rows_of(found.of_a, found.each, times, chosen)
        if scales is not None and block and found.each < k // block:
            scales = Derived(aten.expand.default, (scales, (-1, k // block)))
        return Product(
            rows_of(a.node, k, times, dataclasses.replace(chosen, mask=None)),
            stack,
            (count, n, k),
            (scales, found.of_b),
            found.block,
            stored=tuple(stored),
            interior=frozenset(inside - stored),
            **route,  # type: ignore[arg-type]
        )

    def _equal(self, left: IndexExpr, right: IndexExpr) -> bool:
        leaves = self.reader.space.leaves
        return leaves(left) == leaves(right)

    def _scales(
        self, a_factors: list[Place], b_factors: list[Place], axes: _Axes
    ) -> _Scales | None:
        if max(len(a_factors), len(b_factors)) > 1:
            return None
        k, dtypes = axes.sizes[2], {_dtype(place.node) for place in (*a_factors, *b_factors)}
        blocks = [block for block in BLOCKS if block <= k and k % block == 0]
        if not (a_factors and b_factors):
            blocks = []
        short = [block for block in blocks if block <= _LONGEST]
        # Without blocks a scale of columns is repeated; e8m0 is for blocks alone.
        tried = [(0, False), *((block, False) for block in short), (0, True)]
        tried += [(block, False) for block in blocks if block > _LONGEST]
        for block, is_repeated in tried:
            if not block and not dtypes <= set(w8a8_op.SCALE_DTYPES):
                continue
            of_a = self._scale_of_a(a_factors, axes, block)
            of_b = self._scale_of_b(b_factors, axes, block, is_repeated=is_repeated)
            if of_a is not None and of_b is not None:
                return _Scales(*of_a, of_b[0], (block, of_b[1]))
        return None

    def _scale_of_a(
        self, factors: list[Place], axes: _Axes, block: int
    ) -> tuple[fx.Node | None, int] | None:
        """A row has one scale, or one for each block; 0: all rows have the same."""
        k, rows = axes.sizes[2], axes.rows
        blocks, part = (
            (k // block, self.reader.space.divmod(axes.k, block)[0]) if block else (1, ZERO)
        )
        known = [(blocks, rows * blocks, axes.row * blocks + part), (1, rows, axes.row)]
        known += [] if block else [(0, 1, ZERO)]
        for place in factors:
            for each, count, at in known:
                if place.count == count and self._equal(place.position, at):
                    return place.node, each
            return None
        return None, 1

    def _scale_of_b(
        self, factors: list[Place], axes: _Axes, block: int, *, is_repeated: bool
    ) -> tuple[Any, int] | None:
        """The argument, and how many columns share a scale of it."""
        (count, n, k), divmod_ = axes.sizes, self.reader.space.divmod
        blocks, part = (k // block, divmod_(axes.k, block)[0]) if block else (1, ZERO)
        for place in factors:
            columns, rest = divmod(place.count, count * blocks)
            if rest or not columns or n % columns:
                return None
            width = n // columns
            if not block and width > 1 and not is_repeated:
                return None
            which = divmod_(axes.n, width)[0]
            if self._equal(place.position, (axes.e * columns + which) * blocks + part):
                if not block:
                    return _of_columns(place.node, count, columns, width), 1
                return _swapped(Operand(place.node, (count, columns, blocks))), width
            if block and self._equal(place.position, (axes.e * blocks + part) * columns + which):
                return Operand(place.node, (count, blocks, columns)), width
            return None
        return None, 1


def _as_stored(expr: Expr) -> Expr:
    """A product of loads without the casts of its factors."""
    if isinstance(expr, Op) and expr.name == "cast":
        return _as_stored(expr.args[0])
    if isinstance(expr, Op) and expr.name == "mul":
        return dataclasses.replace(expr, args=tuple(map(_as_stored, expr.args)))
    return expr


def _of_columns(node: fx.Node, count: int, columns: int, width: int) -> Any:
    """Scales [E, 1, N] of stacks with ``columns`` scales each, of ``width`` columns of N. One for
    all columns is no copy."""
    if width == 1:
        return Operand(node, (count, 1, columns))
    wide = Derived(
        aten.expand.default, (Operand(node, (count, columns, 1)), (count, columns, width))
    )
    return Derived(aten.reshape.default, (wide, (count, 1, columns * width)))


def _swapped(stack: Operand) -> Derived:
    return Derived(aten.permute.default, (stack, [0, 2, 1]))


def _assemble(anchor: fx.Node, found: Product) -> RecognizedGemm | Rejection:
    interior = sorted(node for node in found.interior if node.op == "call_function")
    rejection = reject_mutated(interior) or reject_operands(found.stored, anchor)
    if rejection is not None:
        return rejection
    count, n, k = found.sizes
    end, rows = anchor, fx_utils.value(anchor).shape[0]
    user = fx_utils.single_user(anchor)
    is_cast = user is not None and user.target == CAST
    if user is not None and is_cast and fx_utils.value(user).dtype == torch.float32:
        end, interior = user, [*interior, user]  # without the rounding before it
    a_dtype, b_dtype, *scales = map(_dtype, (found.a, found.b, *found.scales))
    rejection = _reject_dtypes(found, a_dtype, b_dtype, scales, anchor)
    if rejection is not None:
        return rejection
    out_dtype, block = fx_utils.value(end).dtype, found.block
    return RecognizedGemm(
        family=FAMILY,
        spec=op.make_spec(
            a_dtype=a_dtype,
            b_dtype=b_dtype,
            scales=(scales[0], scales[1]),
            block=block,
            out_dtype=out_dtype,
            fast_accum=found.fast_accum,
        ),
        anchor=anchor,
        end=end,
        interior=tuple(interior),
        op=op.op,
        args=(
            found.a,
            found.b,
            *found.scales,
            found.offsets,
            found.ids and Operand(found.ids, (-1,)),
        ),
        kwargs={"block_k": block[0], "block_n": block[1], "out_dtype": out_dtype}
        | ({"fast_accum": True} if found.fast_accum else {}),
        m=fx_utils.size_name(rows),
        n=n,
        k=k,
        too_many_rows=_has_too_many_rows(anchor, found, a_dtype),
        row_kind=row_ranges.kind_of(FAMILY, 0 if found.offsets is None else count),
        shape=(-1, *fx_utils.value(end).shape[1:]) if fx_utils.value(end).dim() > 2 else None,
    )


def _has_too_many_rows(anchor: fx.Node, found: Product, dtype: torch.dtype) -> bool:
    """Whether the library may be faster, in any call. A gathered weight is written for each row, a
    stack in front of ``_grouped_mm`` in each call, in twice the bytes, for a product of bf16: ours
    of 8 bits falls behind only if it decodes the weight for each tile, or scales short blocks."""
    (count, _, _), (block, _) = found.sizes, found.block
    is_fast = block == 0 or block >= _MIN_BLOCK
    if str(anchor.target) in VERSIONS:
        if stock.is_tuned(anchor):
            return False
        mean = _MAX_MEAN_ROWS
    elif (
        anchor.target != aten._grouped_mm.default
        or dtype == torch.int8
        or (is_fast and stock.has_fp8(anchor))
    ):
        return False
    else:
        mean = experts_op.MAX_MEAN_ROWS
    most = fx_utils.most(fx_utils.value(anchor).shape[0])
    return most is None or most > mean * count


def _dtype(operand: Any) -> Any:
    """Of an argument, whose value is that of its first tensor, or the other one of a mask."""
    if operand is None or isinstance(operand, fx.Node):
        return operand and fx_utils.value(operand).dtype
    if isinstance(operand, Operand):
        return _dtype(operand.node)
    if operand.target == aten.mul.Tensor:
        return operand.dtype
    return _dtype(operand.args[2 if operand.target == aten.where.self else 0])


def _reject_dtypes(
    found: Product, a: torch.dtype, b: torch.dtype, scales: list[Any], anchor: fx.Node
) -> Rejection | None:
    is_int8, is_whole = a == torch.int8, found.block == (0, 1)
    if (b == torch.int8) != is_int8:
        return Rejection(RejectionCode.DTYPE, f"{a} times {b}", anchor.name)
    if is_int8 and not is_whole:
        return Rejection(RejectionCode.SCALE_AXIS, "int8 with scales of blocks", anchor.name)
    taken = w8a8_op.SCALE_DTYPES if is_whole else fp8_block.SCALE_DTYPES
    for dtype in scales:
        if dtype is not None and dtype not in taken:
            return Rejection(RejectionCode.SCALE_DTYPE, f"the scale is {dtype}", anchor.name)
    return reject_long_k(anchor, found.sizes[2]) if is_int8 else None


PATTERN = Pattern(
    name="scaled_experts",
    family=FAMILY,
    anchors=(aten._grouped_mm.default, FALLBACK, aten.bmm.default, *VERSIONS),
    recognize=recognize,
)
