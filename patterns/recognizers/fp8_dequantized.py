"""Products whose operands the graph dequantizes: ``mm(q.to(bf16) * s, w.to(bf16) * t)``.

Scales may be applied before or after the product, per row, column, tensor or block, in views or
repeated. A sum of products over slices of K, each with its own scales (DeepSeek's formula written
out), is read as one GEMM, and so is a batched product that is summed over the batch. No spelling is
compared: what counts is which element of which tensor is read at (m, k, n).

``PATTERN`` reads FP8; ``w8a8_groupwise`` reads int8 by the same rules, also of ``_int_mm``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..fx_utils import aten
from ..match import Derived, Operand, Pattern, RecognizedGemm
from ..matching.epilogue import Epilogue, read_epilogue
from ..matching.operands import (
    Scale,
    ScaledMatmul,
    per_channel,
    per_tensor,
    per_token,
    reject_mutated,
    transposed,
)
from ..matching.scaled_elements import BLOCKS, ElementReader, Place, place_of, unwound
from ..products.matmul_ops import reject_bias
from ..products.sum_of_products import (
    PRODUCTS,
    VIEWS,
    Elements,
    Term,
    comes_from,
    is_widening,
    operands_of,
    positions,
    roots_of,
    term_of,
    terms_of,
)
from ..symbolic.expr import FLOAT8
from ..symbolic.index import IndexExpr, Unsupported
from ..symbolic.reader import for_any, sizes
from . import scaled_mm

_SUM = aten.sum.dim_IntList
_NOT_QUANTIZED = Rejection(
    RejectionCode.NOT_QUANTIZED, "the activation is not made of quantized values"
)


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """``anchor``: an mm, addmm or bmm; of a sum of products the first."""
    found = read_dequantized(anchor, frozenset(FLOAT8))
    if isinstance(found, Rejection):
        return found
    found = _with_blocks_of_a(found)
    blocks = (found.a_scale and found.a_scale.block[1], found.b_scale and found.b_scale.block[0])
    is_block = any(block not in (None, -1) for block in blocks)
    if is_block and blocks[0] != blocks[1]:
        return Rejection(RejectionCode.SCALE_AXIS, "scales of different blocks of K", anchor.name)
    return scaled_mm.assemble(found)


def _with_blocks_of_a(found: ScaledMatmul) -> ScaledMatmul:
    """One static scale of a beside blocks of b: repeated for every row and block of K."""
    (m, _, k), a, b = found.sizes, found.a_scale, found.b_scale
    if a is None or b is None or a.block != (-1, -1) or b.block[0] == -1:
        return found
    size = b.block[0]
    rows = m if isinstance(m, int) else Derived(aten.sym_size.int, (found.a, 0))
    expanded = Derived(aten.expand.default, (a.argument, (rows, -(-k // size))))
    repeated = Derived(aten.clone.default, (expanded,))
    return dataclasses.replace(found, a_scale=Scale(a.node, (1, size), repeated))


def read_dequantized(anchor: fx.Node, elements: Elements) -> ScaledMatmul | Rejection:
    """The product that ``anchor`` is (a part of), if both operands have dtypes of ``elements``."""
    operands = operands_of(anchor)
    if not all(fx_utils.is_tensor_node(node) and comes_from(node, elements) for node in operands):
        return _NOT_QUANTIZED
    shapes = [size for node in operands for size in fx_utils.value(node).shape]
    *batch, _, k = fx_utils.value(operands[0]).shape
    if any(map(fx_utils.is_symbolic, (*batch, k, fx_utils.value(operands[1]).shape[-1]))):
        return Rejection(RejectionCode.WEIGHT_FORM, "a symbolic shape", anchor.name)
    if any(isinstance(size, int) and size == 0 for size in shapes):
        return Rejection(RejectionCode.WEIGHT_FORM, "no elements", anchor.name)
    try:
        with for_any(fx_utils.value(operands[0]).shape[-2]):
            return _read_dequantized(anchor, elements)
    except (Unsupported, RecursionError) as reason:
        return Rejection(RejectionCode.WEIGHT_FORM, str(reason), anchor.name)


def _read_dequantized(anchor: fx.Node, elements: Elements) -> ScaledMatmul | Rejection:
    if anchor.target == aten.bmm.default:
        return _batched(anchor, elements)
    for root in roots_of(anchor):
        terms = terms_of(root)
        if terms is None or len(terms) < 2:
            continue
        found = _Site(anchor, terms, elements).product(root)
        if not isinstance(found, Rejection):
            return found
    return _alone(anchor, elements)


def _alone(anchor: fx.Node, elements: Elements) -> ScaledMatmul | Rejection:
    """A single product. If a size is no multiple of the blocks, positions are read as if the last
    block were whole: ``repeat(scale)[:n]`` at n is scale[n // block].
    """
    terms = [Term(anchor, ())]
    found = _Site(anchor, terms, elements).product(anchor)
    if not isinstance(found, Rejection) or found is _NOT_QUANTIZED:
        return found
    columns, depth = sizes(anchor)[-1], sizes(operands_of(anchor)[0])[-1]
    for block in BLOCKS:
        all_n, all_k = (-(-size // block) * block for size in (columns, depth))
        for padded in dict.fromkeys(((all_n, all_k), (columns, all_k), (all_n, depth))):
            if padded == (columns, depth):
                continue
            try:
                other = _Site(anchor, terms, elements, padded).product(anchor)
            except Unsupported:
                continue
            if not isinstance(other, Rejection):
                return other
    return found


def _batched(anchor: fx.Node, elements: Elements) -> ScaledMatmul | Rejection:
    """A batch of slices of K, each with its scales, that is summed."""
    root = anchor
    while (user := fx_utils.single_user(root)) is not None and root.target != _SUM:
        if user.target not in (aten.mul.Tensor, _SUM, *VIEWS) and not is_widening(user):
            break
        root = user
    term = None
    if root.target == _SUM and len(root.args) < 3 and not root.kwargs:
        term = term_of(root.args[0], VIEWS)  # type: ignore[arg-type]
    if term is None:
        return Rejection(RejectionCode.BATCHED_WEIGHT, "", anchor.name)
    site = _Site(anchor, [term], elements)
    return site.product(root) if site.is_summed_by(root) else site.no("a sum of something else")


# ------------------------------------------------------------------------------------------
# one site


class _Site:
    """Reads the terms of one sum: a [M, K] and b [K, N] in slices of ``step`` along K.

    ``padded``: N and K rounded up to whole blocks, for reading scales.
    """

    def __init__(
        self,
        anchor: fx.Node,
        terms: list[Term],
        elements: Elements,
        padded: tuple[int, int] | None = None,
    ) -> None:
        self.anchor, self.terms, self.elements = anchor, terms, elements
        self.reader = ElementReader(elements)
        x, _ = operands_of(anchor)
        (*batch, self.rows, self.step), self.columns = sizes(x), sizes(anchor)[-1]
        self.padded_columns, self.padded_step = padded or (self.columns, self.step)
        variable = self.reader.space.variable
        self.m, self.n = variable("m", self.rows), variable("n", self.padded_columns)
        self.k = variable("k", self.padded_step)
        # slices of K: the terms of a sum, or the matrices of a batch
        self.batch = tuple(self.reader.space.variable("b", size) for size in batch)
        self.slices = batch[0] if batch else len(terms)
        self.depth = self.step * self.slices

    def product(self, root: fx.Node) -> ScaledMatmul | Rejection:
        read = [self._read(term) for term in self.terms]
        for item in read:
            if isinstance(item, Rejection):
                return item
        slices = sorted(
            (item for item in read if isinstance(item, tuple)), key=lambda item: item[0]
        )
        first, a, b, factors = zip(*slices, strict=True)
        if list(first) != [self.step * i for i in range(len(self.terms))]:
            return self.no("the slices do not cover K")
        if any(item != a[0] for item in a) or any(item != b[0] for item in b):
            return self.no("the slices are of several tensors")
        scales = self._scales(list(factors))
        return scales if isinstance(scales, Rejection) else self._finish(root, a[0], b[0], *scales)

    def no(self, detail: str) -> Rejection:
        return Rejection(RejectionCode.WEIGHT_FORM, detail, self.anchor.name)

    def _positions_after(self, product: fx.Node) -> dict[fx.Node, tuple[IndexExpr, ...]]:
        return positions(product, (*self.batch, self.m, self.n), self.reader.space)

    def is_summed_by(self, root: fx.Node) -> bool:
        """Whether ``root`` sums over the batch and gives [M, N]."""
        source, dims = fx_utils.arguments(root, "self", "dim")
        index = list(self._positions_after(self.anchor).get(source, ()))
        if len(index) != 3 or len(dims) != 1:
            return False
        found = (index.pop(dims[0]), *index)
        return all(map(self._equal, found, (*self.batch, self.m, self.n)))

    def _equal(self, left: IndexExpr, right: IndexExpr) -> bool:
        leaves = self.reader.space.leaves
        return leaves(left) == leaves(right)

    def _read(self, term: Term) -> tuple[int, Any, Any, list[tuple[str, Place]]] | Rejection:
        """(first k, a, b, scales) of one term; each scale with the side it was found on."""
        x, w = operands_of(term.product)
        if sizes(x)[-2:] != [self.rows, self.step] or sizes(w)[-2:] != [self.step, self.columns]:
            return self.no("slices of several sizes")
        sides: list[Place] = []
        scales: list[tuple[str, Place]] = []
        for side, node, index in (("a", x, (self.m, self.k)), ("b", w, (self.k, self.n))):
            element, factors = unwound(self.reader.read(node, (*self.batch, *index)), self.elements)
            if element is None:
                no_weight = "the weight is not made of quantized values"
                return _NOT_QUANTIZED if side == "a" else self.no(no_weight)
            sides.append(element)
            scales += [(side, factor) for factor in factors]
        after = self._positions_after(term.product)
        for factor, node in term.factors:
            if node not in after:
                return self.no("a factor of another shape")
            place = place_of(self.reader.operand(factor, node, after[node]))
            if place is None:
                return self.no("a factor that is no scale")
            scales.append(("", place))
        return self._placed(sides[0], sides[1], scales)

    def _placed(
        self, x: Place, w: Place, scales: list[tuple[str, Place]]
    ) -> tuple[int, Any, Any, list[tuple[str, Place]]] | Rejection:
        if x.count % self.rows or w.count % self.columns:
            return self.no("operands that are parts of others")
        depth = x.count // self.rows
        first = x.position.const
        if depth != self.depth or w.count != depth * self.columns:
            return self.no("operands that are parts of others")
        k = self.k + first
        if self.batch:
            k = self.batch[0] * self.step + k
        if not self._equal(x.position, self.m * depth + k):
            return self.no("the activation is not read in order")
        a = Operand(x.node, (-1, depth))
        if self._equal(w.position, self.n * depth + k):
            flat = Operand(w.node, (self.columns, depth))
            return first, a, transposed(flat), scales
        if self._equal(w.position, k * self.columns + self.n):
            return first, a, Operand(w.node, (depth, self.columns)), scales
        return self.no("the weight is not read in order")

    # -- scales

    def _scales(
        self, terms: list[list[tuple[str, Place]]]
    ) -> tuple[Scale | None, Scale | None] | Rejection:
        """The scales of a and b, each the same tensor in every term."""
        found: dict[str, Scale] = {}
        for scales in zip(*terms, strict=True) if len({len(t) for t in terms}) == 1 else ():
            sides = [side for side in "ab" if side not in found and scales[0][0] in ("", side)]
            for side in sides:
                scale = self._fit(side, [place for _, place in scales])
                if scale is not None:
                    found[side] = scale
                    break
            else:
                return Rejection(
                    RejectionCode.SCALE_AXIS,
                    "a factor that is no scale of rows, columns or blocks",
                    scales[0][1].node.name,
                )
        if len(found) < len(terms[0]):
            return self.no("terms with scales of their own")
        return found.get("a"), found.get("b")

    def _fit(self, side: str, places: list[Place]) -> Scale | None:
        node = places[0].node
        if any(place.node is not node for place in places):
            return None
        count, size = places[0].count, self.rows if side == "a" else self.padded_columns
        if count == 1:
            return per_tensor(node)
        for along_k in self._k_counts(count):
            parts = count // along_k
            if size % parts or (side == "a" and parts != size):
                continue
            if along_k == 1 and parts not in (1, size):
                continue  # no canonical op has blocks along N alone
            if not self._covers(side, along_k, parts):
                continue
            for is_transposed in (False, True):
                if all(
                    self._equal(place.position, self._at(side, i, along_k, parts, is_transposed))
                    for i, place in enumerate(places)
                ):
                    return self._scale(side, node, along_k, parts, is_transposed)
        return None

    def _covers(self, side: str, along_k: int, parts: int) -> bool:
        """Whether the unpadded sizes have exactly this many blocks."""
        length = self.padded_columns // parts
        block_k = self.padded_step * self.slices // along_k
        is_all_k = along_k == -(-self.depth // block_k)
        return is_all_k and (side == "a" or parts == -(-self.columns // length))

    def _k_counts(self, count: int) -> list[int]:
        """How many blocks along K a scale of ``count`` elements may have."""
        if self.slices > 1:
            return [number for number in (self.slices, 1) if count % number == 0]
        step = self.padded_step
        numbers = [step // block for block in BLOCKS if step % block == 0]
        return [
            number for number in [*dict.fromkeys([*numbers, 1])] if number and count % number == 0
        ]

    def _at(self, side: str, term: int, along_k: int, parts: int, is_transposed: bool) -> IndexExpr:
        """The position of the scale of (m, k) or (k, n) in term ``term``."""
        divmod_ = self.reader.space.divmod
        block = IndexExpr(term if along_k > 1 else 0)
        if self.batch and along_k > 1:
            block = self.batch[0]
        elif len(self.terms) == 1 and along_k > 1:
            block = divmod_(self.k, self.padded_step // along_k)[0]
        which = self.m if side == "a" else self.n
        size = self.rows if side == "a" else self.padded_columns
        part = IndexExpr() if parts == 1 else divmod_(which, size // parts)[0]
        return block * parts + part if is_transposed else part * along_k + block

    def _scale(
        self, side: str, node: fx.Node, along_k: int, parts: int, is_transposed: bool
    ) -> Scale:
        block_k = -1 if along_k == 1 else self.padded_step * self.slices // along_k
        size = self.rows if side == "a" else self.padded_columns
        length = size // parts
        if block_k == -1 and length == size:
            return per_tensor(node)
        outer = -1 if side == "a" else parts  # M may be symbolic
        stored = (along_k, outer) if is_transposed else (outer, along_k)
        argument: Any = Operand(node, stored)
        if is_transposed == (side == "a"):
            argument = transposed(argument)
        block = (1, block_k) if side == "a" else (block_k, length)
        return Scale(node, block, argument)

    # -- the result

    def _finish(
        self, root: fx.Node, a: Any, b: Any, a_scale: Scale | None, b_scale: Scale | None
    ) -> ScaledMatmul | Rejection:
        if sizes(root) != [self.rows, self.columns]:
            return self.no("a sum of another shape")
        k_blocks = {scale.block[1] for scale in [a_scale] if scale is not None}
        k_blocks |= {scale.block[0] for scale in [b_scale] if scale is not None}
        if len(k_blocks - {-1}) > 1:
            detail = "scales of different blocks of K"
            return Rejection(RejectionCode.SCALE_AXIS, detail, self.anchor.name)
        if self.slices > 1 and not k_blocks - {-1}:
            return self.no("slices of K that share their scales")
        bias = None
        if self.anchor.target == aten.addmm.default:
            bias, *_ = fx_utils.arguments(self.anchor, "self")
            refused = reject_bias(self.anchor, bias)
            if refused is not None:
                return refused
        epilogue = Epilogue(root, [root])
        if a_scale is None and b_scale is None and bias is None:
            found = read_epilogue(root)
            if isinstance(found, Epilogue) and found.alpha == 1.0 and found.reshape is None:
                epilogue, bias = found, found.bias
                a_scale = per_token(found.row_scale)
                b_scale = per_channel(found.column_scale)
        inside = {node for node in self.reader.nodes() if node.op == "call_function"}
        inside |= set(epilogue.interior) | self._between(root)
        return reject_mutated(inside) or ScaledMatmul(
            anchor=self.anchor,
            end=epilogue.end,
            a=a,
            b=b,
            sizes=(fx_utils.value(self.anchor).shape[-2], self.columns, self.depth),
            a_scale=a_scale,
            b_scale=b_scale,
            bias=bias,
            interior=tuple(sorted(inside)),
        )

    def _between(self, root: fx.Node) -> set[fx.Node]:
        """The products, and the nodes that scale and add them."""
        found = {root, *(term.product for term in self.terms)}
        todo = [term.product for term in self.terms]
        while todo:
            node = todo.pop()
            if node is root:
                continue
            for user in fx_utils.users(node):
                if user not in found:
                    found.add(user)
                    todo.append(user)
        return found


PATTERN = Pattern(
    name="fp8_dequantized",
    family="fp8",
    anchors=tuple(op for op in PRODUCTS if op is not aten._int_mm.default),
    recognize=recognize,
)
