"""Float products with a weight of which only some blocks are stored, or kept by a mask."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.ops import block_sparse as op
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.exactness import Exactness
from inductor_quant.spec.gemm import ScaleSpec

from .. import fx_utils
from ..fx_utils import aten
from ..match import Constant, Derived, Operand, Pattern, RecognizedGemm
from ..matching.operands import reject_mutated, reject_operands, transposed
from ..products.block_sums import read_sum
from ..products.matmul_ops import reject_bias
from ..weights.block_places import Blocks, BlockScale, read_blocks

FAMILY = "block_sparse"
TORCHAO = "blocksparse.addmm.default"
_TO_DENSE = "blocksparse.bsr_to_dense.default"  # torchao's too


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """``anchor``: ``mm``, ``addmm``, ``bmm``, ``_int_mm``, or torchao's ``blocksparse.addmm``."""
    if str(anchor.target) == TORCHAO:
        return _recognize_op(anchor)
    if anchor.target == aten.bmm.default:
        return _recognize_sum(anchor)
    bias = None
    if anchor.target == aten.addmm.default:
        bias, x, w = fx_utils.arguments(anchor, "self", "mat1", "mat2")
        if refused := reject_bias(anchor, bias):
            return refused
    else:
        x, w = fx_utils.arguments(anchor, "self", "mat2")
    if not fx_utils.is_tensor_node(x) or not fx_utils.is_tensor_node(w):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    if (dense := _to_dense(w)) is not None:
        return _recognize_dense(anchor, dense, x, bias)
    blocks = read_blocks(w)
    if isinstance(blocks, Rejection):
        return blocks
    scale = None if blocks.scale is None else blocks.scale.source
    given = (x, blocks.source, scale, bias)
    rejection = reject_mutated(blocks.nodes) or reject_operands(given, anchor)
    rejection = rejection or _reject_dtype(x)
    if rejection is not None:
        return rejection
    m, n = fx_utils.value(anchor).shape
    k = fx_utils.value(x).shape[-1]
    with compat.real_tensors():
        found = _assemble(anchor, anchor, (x, bias), blocks, (m, n, k))
    if isinstance(found, Rejection):
        return found
    stored = found.spec.b
    if stored.dtype in op.QUANTIZED and stored.blocks and stored.blocks.stored_share(n, k) == 1:
        return Rejection(RejectionCode.NOT_QUANTIZED, "", anchor.name)  # a dense int8 or FP8 weight
    is_slower = op.prefers_dense(fx_utils.size_hint(m), n, k, found.spec)
    return dataclasses.replace(found, too_many_rows=is_slower)


def _recognize_sum(anchor: fx.Node) -> RecognizedGemm | Rejection:
    """Products of gathered parts of x, added up."""
    found = read_sum(anchor)
    if isinstance(found, Rejection):
        return found
    rejection = reject_mutated(found.blocks.nodes)
    scale = None if found.blocks.scale is None else found.blocks.scale.source
    rejection = rejection or reject_operands((found.x, found.blocks.source, scale), anchor)
    rejection = rejection or _reject_dtype(found.x)
    if rejection is not None:
        return rejection
    with compat.real_tensors():
        gemm = _assemble(anchor, found.end, (found.x, None), found.blocks, found.sizes)
    if isinstance(gemm, Rejection):
        return gemm
    shape = tuple(fx_utils.value(found.end).shape)
    return dataclasses.replace(
        gemm,
        shape=None if shape == found.sizes[:2] else shape,
        weight_class=Exactness.FEWER_ROUNDINGS,
    )


def _reject_dtype(x: fx.Node) -> Rejection | None:
    dtype = fx_utils.value(x).dtype
    return None if dtype in op.STORED else Rejection(RejectionCode.ACTIVATION, f"{dtype}", x.name)


def _recognize_op(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """``addmm(x [K, M], crow, col, values, N, K, None) -> [N, M]``, and the transposition of the
    result."""
    given = ("x_padded", "crow_indices", "col_indices", "values", "M", "K", "bias")
    x, *tables, n, k, bias = fx_utils.arguments(anchor, *given)
    end = fx_utils.single_user(anchor)
    if end is None or end.target != aten.permute.default or bias is not None:
        return None
    return _stored_as_bsr((anchor, end), tuple(tables), (x, transposed(x), None), (n, k))


def _to_dense(weight: fx.Node) -> fx.Node | None:
    """``bsr_to_dense(crow, col, values, N, K)`` of a weight [K, N]."""
    if weight.target != aten.permute.default or not isinstance(weight.args[0], fx.Node):
        return None
    return weight.args[0] if str(weight.args[0].target) == _TO_DENSE else None


def _recognize_dense(
    anchor: fx.Node, dense: fx.Node, x: fx.Node, bias: fx.Node | None
) -> RecognizedGemm | Rejection | None:
    given = ("crow_indices", "col_indices", "values", "M", "K")
    *tables, n, k = fx_utils.arguments(dense, *given)
    interior = dense, *dense.users, anchor
    return _stored_as_bsr(interior, tuple(tables), (x, Operand(x, (-1, k)), bias), (n, k))


def _stored_as_bsr(
    nodes: tuple[fx.Node, ...],
    tables: tuple[fx.Node, ...],
    operands: tuple[fx.Node, Any, fx.Node | None],
    sizes: tuple[Any, Any],
) -> RecognizedGemm | Rejection | None:
    """A product with a BSR matrix; the op guarantees that crow, col and values are one.

    ``nodes``: what is replaced, the result last. ``operands``: x, x as [M, K], bias.
    """
    (crow, col, values), (x, rows, bias), (n, k) = tables, operands, sizes
    end, shape = nodes[-1], tuple(fx_utils.value(values).shape)
    if any(map(fx_utils.is_symbolic, (*shape, n, k))) or len(shape) != 3:
        return None
    rejection = reject_operands((x, *tables, bias), end) or _reject_dtype(x)
    if rejection is not None:
        return rejection
    stored, dtype = fx_utils.value(values).dtype, fx_utils.value(x).dtype
    if not {*shape[1:]} <= {*op.BLOCK_SIZES} or stored not in op.STORED[dtype]:
        detail = f"blocks of {shape[1]} x {shape[2]}, {stored}, for x in {dtype}"
        return Rejection(RejectionCode.BLOCK_PLACES, detail, values.name)
    spec = op.make_spec(dtype, shape[1:], shape[0], bias=bias is not None, stored=stored)
    return RecognizedGemm(
        family=FAMILY,
        spec=spec,
        anchor=nodes[0],
        end=end,
        interior=nodes,
        op=op.op,
        args=(rows, values, crow, col, None, None, None, bias and Operand(bias, (-1,))),
        kwargs={"n": n},
        m=fx_utils.size_name(fx_utils.value(end).shape[0]),
        n=n,
        k=k,
        weight_class=Exactness.SAME_WEIGHT_ROUNDING,
    )


def _assemble(
    anchor: fx.Node,
    end: fx.Node,
    operands: tuple[fx.Node, fx.Node | None],
    blocks: Blocks,
    sizes: tuple[Any, int, int],
) -> RecognizedGemm | Rejection:
    (x, bias), (m, n, k) = operands, sizes
    stored = _stored(blocks, n, k)
    if isinstance(stored, Rejection):
        return stored
    values, place = stored
    dtype, scale = fx_utils.value(x).dtype, None  # type: torch.dtype, Derived | None
    if fx_utils.value(blocks.source).dtype not in op.STORED[dtype]:
        detail = f"blocks of {fx_utils.value(blocks.source).dtype} for x in {dtype}"
        return Rejection(RejectionCode.DTYPE, detail, blocks.source.name)
    if blocks.scale is not None:
        read = _scale(blocks, blocks.scale, n)
        if isinstance(read, Rejection):
            return read
        scale = read
    lists = _lists(blocks, place, fx_utils.size_hint(m), (n, k))
    counts = torch.bincount(lists.row, minlength=n // blocks.shape[0] // lists.together)
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    order, longest = counts.argsort(descending=True, stable=True), int(counts.max())
    is_in_place = isinstance(values, Derived) and len(values.args[1]) == 4
    held = fx_utils.value(blocks.source).numel() // math.prod(blocks.shape), *blocks.shape
    spec = op.make_spec(
        dtype,
        blocks.shape,
        op.stored_count(() if is_in_place else held, len(lists.column), lists.together),
        bias=bias is not None,
        rows=lists.together,
        longest=longest,
        stored=fx_utils.value(blocks.source).dtype,
        scale=None
        if scale is None
        else ScaleSpec(scale.dtype, op.scale_block(scale.shape, *blocks.shape)),
    )
    return RecognizedGemm(
        family=FAMILY,
        spec=spec,
        anchor=anchor,
        end=end,
        interior=(*blocks.nodes, end),
        op=op.op,
        args=(
            Operand(x, (-1, k)),
            values,
            _table(crow),
            _table(lists.column),
            lists.place,
            _table(order),
            scale,
            bias and Operand(bias, (-1,)),
        ),
        kwargs={"n": n, "longest": longest},
        m=fx_utils.size_name(m),
        n=n,
        k=k,
        weight_class=_weight_class(blocks.scale, scale, dtype),
    )


class _Lists(NamedTuple):
    """The columns of blocks, by lists in order: list ``row[p]`` has ``column[p]``. ``place``: the
    op's."""

    row: torch.Tensor
    column: torch.Tensor
    place: Any
    together: int = 1


def _lists(
    blocks: Blocks, place: torch.Tensor | None, m: int | None, sizes: tuple[int, int]
) -> _Lists:
    """A list for each row of blocks, or for several where these share columns and there are so many
    rows of x that reading it takes the time."""
    (n, k), together = sizes, op.TOGETHER.get(blocks.shape[0], 1)
    rows, columns = n // blocks.shape[0], k // blocks.shape[1]
    if together > 1 and (m or 1) * n >= op.MIN_RESULT and not rows % together:
        at = blocks.row // together * columns + blocks.column
        listed, within = torch.unique(at, return_inverse=True)
        number = torch.full((len(listed), together), -1)
        number[within, blocks.row % together] = (
            torch.arange(len(blocks.row)) if place is None else place
        )
        # (in a sum a place may come twice)
        is_once = int((number >= 0).sum()) == len(blocks.row)
        if is_once and len(listed) * together <= op.MAX_LISTED * len(blocks.row):
            table = Derived(aten.reshape.default, (_table(number.flatten()), [-1, together]))
            return _Lists(listed // columns, listed % columns, table, together)
    return _Lists(blocks.row, blocks.column, None if place is None else _table(place))


def _weight_class(given: BlockScale | None, scale: Derived | None, dtype: torch.dtype) -> Exactness:
    if given is None or scale is None:
        return Exactness.SAME_WEIGHT_ROUNDING
    if len(scale.shape) == 1:
        return Exactness.REASSOCIATED  # it multiplies the sum
    is_rounded_once = fx_utils.value(given.by).dtype in (dtype, torch.float32)
    return Exactness.SAME_WEIGHT_ROUNDING if is_rounded_once else Exactness.FEWER_ROUNDINGS


def _scale(blocks: Blocks, scale: BlockScale, n: int) -> Derived | Rejection:
    """The op's ``scale``: of rows of W, of blocks or of their rows, as they are stored."""
    (block_n, block_k), source = blocks.shape, fx_utils.value(scale.source)
    count = fx_utils.value(blocks.source).numel() // (block_n * block_k)
    i = torch.arange(block_n)
    row, place = (blocks.row * block_n)[:, None], (blocks.start // (block_n * block_k))[:, None]
    is_stack = fx_utils.value(blocks.source).dim() != 2  # not in place
    forms = {
        (n,): row + i,
        (count, 1): place.expand_as(scale.at),
        (count, block_n): place * block_n + i,
    }
    for shape, at in forms.items():
        is_in_order = source.numel() == math.prod(shape) and torch.equal(scale.at, at)
        if is_in_order and (len(shape) == 1 or is_stack):
            return _reshaped(scale.source, shape)
    if source.numel() == 1:
        return Derived(
            aten.expand.default, (Operand(scale.source, (1,)), [n]), dtype=source.dtype, shape=(n,)
        )
    detail = f"{scale.source.name} is no scale of rows of the weight, blocks, or rows of blocks"
    return Rejection(RejectionCode.BLOCK_PLACES, detail, scale.source.name)


def _reshaped(node: fx.Node, shape: tuple[int, ...]) -> Derived:
    args = (node, list(shape))
    return Derived(aten.reshape.default, args, dtype=fx_utils.value(node).dtype, shape=shape)


def _stored(blocks: Blocks, n: int, k: int) -> tuple[Any, torch.Tensor | None] | Rejection:
    """The op's ``values`` and ``place``."""
    (block_n, block_k), start = blocks.shape, blocks.start
    size = block_n * block_k
    source, elements = blocks.source, fx_utils.value(blocks.source).numel()
    is_whole = elements % size == 0 and not bool((start % size).any())
    if is_whole and blocks.strides in ((block_k, 1), (1, block_n)):
        place = start // size
        count = elements // size
        is_in_order = len(start) == count and torch.equal(place, torch.arange(count))
        if blocks.strides == (block_k, 1):
            values: Any = Operand(source, (count, block_n, block_k))
        else:
            swapped = Operand(source, (count, block_k, block_n))
            values = Derived(aten.permute.default, (swapped, [0, 2, 1]))
        return values, None if is_in_order else place
    grid = n // block_n, k // block_k
    if blocks.strides == (k, 1) and elements == n * k:
        at = blocks.row * (block_n * k) + blocks.column * block_k
        split = Operand(source, (grid[0], block_n, grid[1], block_k))
        dims = [0, 2, 1, 3]
    else:
        at = blocks.row * block_n + blocks.column * (block_k * n)
        split = Operand(source, (grid[1], block_k, grid[0], block_n))
        dims = [2, 0, 3, 1]
    if elements != n * k or blocks.strides not in ((k, 1), (1, n)) or not torch.equal(at, start):
        detail = f"blocks lie in {source.name} neither one after the other nor as in the weight"
        return Rejection(RejectionCode.BLOCK_PLACES, detail, source.name)
    return Derived(aten.permute.default, (split, dims)), None


def _table(values: torch.Tensor) -> Constant:
    return Constant(values.to(torch.int32).numpy().tobytes(), torch.int32)


PATTERN = Pattern(
    name="block_sparse",
    family=FAMILY,
    anchors=(
        *(aten.mm.default, aten.addmm.default, aten.bmm.default),
        *(aten._int_mm.default, TORCHAO),
    ),
    recognize=recognize,
)
