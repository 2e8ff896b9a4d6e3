"""A block-sparse product that gathers blocks of x, multiplies them in a batch, and adds up by rows.

``y = zeros; y[row[p]] += x[:, col[p]] @ block_p^T`` with ``bmm`` for all p: the parts of x that the
blocks multiply are gathered by a table, and ``index_add`` or an accumulating ``index_put`` adds the
products. A table needs no proof here but to be in range: a place that comes twice counts twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..fx_utils import aten
from ..weights.block_places import Blocks, Reader, Unread, is_move, moved


@dataclasses.dataclass(frozen=True)
class BlockSum:
    """``end`` is x [M, K] times the blocks, in the order of [M, N]."""

    x: fx.Node
    blocks: Blocks
    end: fx.Node
    sizes: tuple[int, int, int]  # M, N, K


def read_sum(product: fx.Node) -> BlockSum | Rejection:
    """The sum that ``product``, a bmm, is part of; the code is NOT_QUANTIZED if there is none."""
    parts, weights = fx_utils.arguments(product, "self", "mat2")
    gather, sum_ = _gather_of(parts), _sum_of(product)
    if gather is None or sum_ is None:
        return Rejection(RejectionCode.NOT_QUANTIZED, "", product.name)
    try:
        with compat.real_tensors(), torch.no_grad():
            return _read(product, weights, gather, sum_)
    except Unread as reason:
        return reason.rejection


def _gather_of(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The ``index`` that ``node`` is moved from, and the nodes that move it, in order."""
    moves: list[fx.Node] = []
    while is_move(node):
        moves.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return (node, moves) if node.target == aten.index.Tensor else None


def _sum_of(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The accumulating ``index_put`` of ``node``, and the nodes that move it there."""
    moves: list[fx.Node] = []
    while (user := fx_utils.single_user(node)) is not None and is_move(user):
        moves.append(user)
        node = user
    if user is None or user.target != aten.index_put.default or len(user.args) != 4:
        return None
    return (user, moves) if user.args[2] is node and user.args[3] is True else None


def _read(
    product: fx.Node,
    weights: fx.Node,
    gather: tuple[fx.Node, list[fx.Node]],
    sum_: tuple[fx.Node, list[fx.Node]],
) -> BlockSum:
    count, m, block_n = _shape(product)
    block_k = _shape(weights)[1]
    (index, to_parts), (put, to_put) = gather, sum_
    reader = Reader()

    # x: [M, K / BK, BK] with a table in place of the blocks, then [count, M, BK]
    at, column = _table(reader, index)
    base = index.args[0]
    assert isinstance(base, fx.Node)
    x = Reader()
    order = x.numbers(base).movedim(at, 1)
    k = order.numel() // m
    in_order = torch.arange(1, order.numel() + 1, dtype=torch.int32).view(m, -1, block_k)
    if x.source is None or order.shape != in_order.shape or not torch.equal(order, in_order):
        raise Unread("x is not gathered in blocks of its columns", index)
    sides = [size for size in range(3) if size != at]
    wanted = _strides(_shape(index))
    _check(moved(to_parts, _shape(index)), [wanted[at], *(wanted[side] for side in sides)], index)

    # the sum: zeros with N / BN places where the table is
    target, row = _table(reader, put)
    if bool(reader.numbers(put.args[0]).any()):  # type: ignore[arg-type]
        raise Unread("it adds to more than zeros", put)
    shape = _shape(put)
    n = shape[target] * block_n
    rest = [side for side in range(3) if side != target]
    if tuple(shape[side] for side in rest) == (block_n, m) != (m, block_n):
        rest.reverse()
    to = _strides((count, m, block_n))
    found = moved(to_put, (count, m, block_n))
    _check(found.permute(target, *rest), list(to), put)

    blocks = reader.numbers(weights).transpose(1, 2) - 1  # [count, BN, BK]
    scale = reader.scale_of(weights, lambda read: read.transpose(1, 2))
    start = blocks[:, 0, 0]
    strides = int(blocks[0, 1, 0] - start[0]), int(blocks[0, 0, 1] - start[0])
    i, j = torch.arange(block_n)[:, None], torch.arange(block_k)
    within = (i * strides[0] + j * strides[1]).int()
    if reader.source is None or not torch.equal(blocks, start[:, None, None] + within):
        raise Unread("what is stored does not make whole blocks", weights)
    row, column = _in_range(row, shape[target], put), _in_range(column, k // block_k, index)
    by_row = (row * (k // block_k) + column).argsort(stable=True)
    places = row[by_row], column[by_row], start.long()[by_row]
    if scale is not None:
        scale = dataclasses.replace(scale, at=scale.at[by_row])
    stored = Blocks(reader.source, (block_n, block_k), *places, strides, reader.nodes, scale)
    return BlockSum(x.source, stored, _end(put, (target, *rest), (m, n)), (m, n, k))


def _shape(node: fx.Node) -> tuple[int, ...]:
    shape = tuple(fx_utils.value(node).shape)
    if len(shape) != 3 or any(map(fx_utils.is_symbolic, shape)):
        raise Unread(f"a shape of {list(shape)}", node)
    return shape


def _table(reader: Reader, node: fx.Node) -> tuple[int, torch.Tensor]:
    """The one dimension that ``node`` indexes, and the table, a vector."""
    given = list(node.args[1])  # type: ignore[arg-type]
    tables = [(at, table) for at, table in enumerate(given) if table is not None]
    values = [reader.values(table) for _, table in tables]
    if len(values) != 1 or values[0].dim() != 1 or values[0].dtype == torch.bool:
        raise Unread("it indexes with more than a vector", node)
    return tables[0][0], values[0].long()


def _in_range(table: torch.Tensor, size: int, node: fx.Node) -> torch.Tensor:
    if bool(((table < -size) | (table >= size)).any()):
        raise Unread("an index is out of range", node)
    return table % size


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _check(view: torch.Tensor, strides: list[int], node: fx.Node) -> None:
    """Raises unless the dimensions of ``view`` have these strides; one of size 1 has any."""
    pairs = zip(view.shape, view.stride(), strides, strict=True)
    if any(size != 1 and have != want for size, have, want in pairs):
        raise Unread("it is moved in another order", node)


def _end(put: fx.Node, dims: tuple[int, ...], sizes: tuple[int, int]) -> fx.Node:
    """The first node after ``put`` whose elements are those of [M, N] in order. ``dims``: where the
    rows of blocks, M and the rows of a block are in ``put``."""
    row, rows, inner = dims
    numbers = torch.arange(1, sizes[0] * sizes[1] + 1, dtype=torch.int32).view(_shape(put))
    wanted = numbers.permute(rows, row, inner).flatten()
    reader = Reader()
    reader.put(put, numbers)
    node = put
    while not torch.equal(reader.numbers(node).flatten(), wanted):
        user = fx_utils.single_user(node)
        if user is None or not is_move(user):
            raise Unread("the sum is not put in order", node)
        node = user
    return node
