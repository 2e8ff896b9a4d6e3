"""Where each element of a weight comes from, if ops only move it: the blocks of a sparse weight.

A weight may be assembled from stored blocks (``index_put``, ``scatter``, a gather from a table of
blocks), or a mask may keep some of its blocks. We run the ops that do this. Tables keep their
values, which are constants of the graph; each element of the stored tensor is replaced by its
number, 1 + its position, and a zero that the graph makes is 0. So the spelling does not matter, and
indices are checked by their values: one out of range raises, and a position that is written twice
is refused.

Elements in int8 or FP8 may be cast and multiplied by a scale, before or after they are placed. A
second run, on the numbers of the scale in place of the elements, says which scale each one has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.ops.block_sparse import BLOCK_SIZES, QUANTIZED
from inductor_quant.ops.w8a8 import SCALE_DTYPES
from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..fx_utils import aten

MAX_ELEMENTS = 2**30  # of a weight; reading it takes 4 bytes for each
_MAX_STEPS = 100
_SAME = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
_VIEWS = (
    *(*fx_utils.RESHAPES, aten.permute.default, aten.t.default, aten.transpose.int),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int),
)
_FILLS = (aten.full.default, aten.full_like.default)
# The names of what may compute a table: integers and 0 or 1, so the device does not matter.
_TABLE_OPS = frozenset(
    [
        *("full", "full_like", "iota", "add", "sub", "rsub", "mul", "floor_divide"),
        *("remainder", "div", "cumsum", "diff", "searchsorted", "bucketize", "index"),
        *("gather", "index_select", "cat", "clamp", "clamp_min", "clamp_max", "minimum"),
        *("maximum", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or"),
        *("bitwise_xor", "bitwise_not", "logical_and", "logical_or", "logical_not", "where"),
        *("convert_element_type", "repeat_interleave"),
    ]
)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """W [N, K] as blocks of the tensor ``source``, in order of their rows.

    block_p [BN, BK] has its element (i, j) at ``start[p] + i * strides[0] + j * strides[1]`` of the
    memory of a contiguous ``source``, in row ``row[p]`` and column ``column[p]`` of blocks. int64.
    """

    source: fx.Node
    shape: tuple[int, int]
    row: torch.Tensor
    column: torch.Tensor
    start: torch.Tensor
    strides: tuple[int, int]
    nodes: tuple[fx.Node, ...] = ()
    scale: BlockScale | None = None


@dataclasses.dataclass(frozen=True)
class BlockScale:
    """Row i of block p is multiplied by element ``at[p, i]`` of a contiguous ``source``; ``by``:
    the node that multiplies."""

    source: fx.Node
    at: torch.Tensor
    by: fx.Node


class Unread(Exception):
    """Why something is not read. ``read_blocks`` and ``read_sum`` make it a Rejection."""

    def __init__(self, detail: str, node: fx.Node) -> None:
        super().__init__(detail)
        self.rejection = Rejection(RejectionCode.BLOCK_PLACES, detail, node.name)


def read_blocks(weight: fx.Node) -> Blocks | Rejection:
    """The blocks of a weight [K, N]."""
    reader = Reader()
    try:
        if not reader.is_placed(weight) or fx_utils.value(weight).numel() == 0:
            return Rejection(RejectionCode.NOT_QUANTIZED, "", weight.name)
        if fx_utils.value(weight).numel() > MAX_ELEMENTS:
            raise Unread("the weight is too large", weight)
        with compat.real_tensors(), torch.no_grad():
            return _blocks(reader.numbers(weight).t(), reader, weight)
    except Unread as reason:
        return reason.rejection


class Reader:
    """Runs the ops of a graph: on tables (``values``), and on numbers of elements."""

    def __init__(self, scaled: tuple[fx.Node, fx.Node] | None = None) -> None:
        self.source: fx.Node | None = None
        # the node that multiplies quantized elements, and their scale
        self.scaled = scaled
        self._reads_scale = scaled is not None
        self._numbers: dict[fx.Node, torch.Tensor] = {}
        self._values: dict[fx.Node, torch.Tensor] = {}

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        read = {*self._numbers, *self._values} - {self.source}
        return tuple(sorted(node for node in read if node.op == "call_function"))

    def is_placed(self, weight: fx.Node) -> bool:
        """Whether tables place the elements of the weight. Only such a weight is read."""
        todo, seen = [weight], {weight}
        while todo and len(seen) < _MAX_STEPS:
            node = todo.pop()
            if _tables_of(node):
                return True
            for item in _moved(node):
                if item not in seen:
                    seen.add(item)
                    todo.append(item)
        return False

    # -- elements of the stored tensor ----------------------------------------------------

    def numbers(self, node: fx.Node) -> torch.Tensor:
        """1 + the number of each element's origin in the stored tensor, or 0: int32."""
        if node not in self._numbers:
            try:
                self._numbers[node] = self._number(node)
            except (IndexError, RuntimeError) as error:
                detail = str(error).partition("\n")[0]
                raise Unread(detail, node) from error
        return self._numbers[node]

    def _number(self, node: fx.Node) -> torch.Tensor:
        if (factors := _scaling(node)) is not None:
            stored, scale = factors
            if self.scaled not in (None, (node, scale)):
                raise Unread("a second scale", node)
            self.scaled = node, scale
            read = self.numbers(scale if self._reads_scale else stored)
            return read.expand(_static_shape(node))
        if _casts_codes(node) or (self._reads_scale and _is_exact_cast(node)):
            return self.numbers(_args(node)[0])
        handler = _HANDLERS.get(node.target)
        if handler is not None and (node.target not in _TABLED or _tables_of(node)):
            return handler(self, node)
        if self.source not in (None, node):
            detail = f"elements of {self.source} and {node}"
            raise Unread(detail, node)
        self.source = node
        shape = _static_shape(node)
        if math.prod(shape) >= 2**31 - 1:
            raise Unread("the stored tensor is too large", node)
        return torch.arange(1, math.prod(shape) + 1, dtype=torch.int32).view(shape)

    def scale_of(self, node: fx.Node, places: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The scale of the blocks in ``node``; None if they have none. ``places``: from numbers of
        ``node`` to those of its blocks, [count, BN, BK]."""
        if self.scaled is None:
            return None
        reader = Reader(self.scaled)
        at = places(reader.numbers(node)) - 1
        if reader.source is None or not torch.equal(at, at[:, :, :1].expand_as(at)):
            raise Unread("a block has scales along K", self.scaled[0])
        return BlockScale(reader.source, at[:, :, 0].long(), self.scaled[0])

    def put(self, node: fx.Node, numbers: torch.Tensor) -> None:
        """From here on ``node`` has these numbers."""
        self._numbers[node] = numbers

    # -- tables ---------------------------------------------------------------------------

    def values(self, node: fx.Node) -> torch.Tensor:
        """The values of a table, on the CPU."""
        if node not in self._values:
            self._values[node] = self._value(node)
        return self._values[node]

    def _value(self, node: fx.Node) -> torch.Tensor:
        if node.op == "get_attr" and fx_utils.has_fixed_values(node):
            tensor = fx_utils.attribute(node)
            if tensor is not None:
                return tensor.cpu()
        if node.op != "call_function" or not _computes_table(node):
            detail = (
                f"{node.name} has no values when compiling: of inputs only buffers of modules have"
            )
            detail += ", with read_tables"
            raise Unread(detail, node)
        _static_shape(node)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.values)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("layout", "pin_memory")}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return _target(node)(*args, **kwargs)


def _blocks(numbers: torch.Tensor, reader: Reader, weight: fx.Node) -> Blocks:
    if reader.source is None:
        raise Unread("nothing is stored", weight)
    fitted = (_fit(numbers, size, reader) for size in _candidates(_static_shape(reader.source)))
    found = next((blocks for blocks in fitted if blocks is not None), None)
    if found is None:
        detail = "what is stored does not make whole blocks of 16, 32, 64 or 128"
        raise Unread(detail, weight)
    at = found.row, found.column
    scale = reader.scale_of(weight, lambda read: _tiles(read.t(), found.shape)[at])
    return dataclasses.replace(found, nodes=reader.nodes, scale=scale)


def _fit(numbers: torch.Tensor, size: tuple[int, int], reader: Reader) -> Blocks | None:
    """The blocks of this size; None if the stored elements do not form such blocks."""
    if any(length % part for length, part in zip(numbers.shape, size, strict=True)):
        return None
    tiles = _tiles(numbers, size)
    row, column = tiles[:, :, 0, 0].nonzero(as_tuple=True)
    if len(row) * math.prod(size) != int(numbers.count_nonzero()):
        return None
    blocks = tiles[row, column] - 1
    start, strides = blocks[:, 0, 0], (size[1], 1)
    if len(blocks):
        strides = int(blocks[0, 1, 0] - start[0]), int(blocks[0, 0, 1] - start[0])
    i, j = torch.arange(size[0])[:, None], torch.arange(size[1])
    within = (i * strides[0] + j * strides[1]).int()
    if reader.source is None or not torch.equal(blocks, start[:, None, None] + within):
        return None
    return Blocks(reader.source, size, row, column, start.long(), strides)


def _tiles(numbers: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """[N / BN, K / BK, BN, BK] of [N, K]."""
    n, k = numbers.shape
    return numbers.reshape(n // size[0], size[0], k // size[1], size[1]).permute(0, 2, 1, 3)


def _candidates(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Shapes of blocks in a stored tensor: its last dimensions; in a matrix any, large first."""
    if len(shape) > 2:
        ends = [(shape[-2], shape[-1]), (shape[-1], shape[-2])]
        return [pair for pair in dict.fromkeys(ends) if {*pair} <= {*BLOCK_SIZES}]
    pairs = [(n, k) for n in BLOCK_SIZES for k in BLOCK_SIZES]
    return sorted(pairs, key=math.prod, reverse=True)


# ------------------------------------------------------------------------------------------
# ops

Handler = Callable[[Reader, fx.Node], torch.Tensor]


def _fill(reader: Reader, node: fx.Node) -> torch.Tensor:
    number = _args(node)[1]
    if number != 0:
        raise Unread(f"it fills in {number}", node)
    return torch.zeros(_static_shape(node), dtype=torch.int32)


def _view(reader: Reader, node: fx.Node) -> torch.Tensor:
    _static_shape(node)
    first, *rest = _args(node)
    target = aten.reshape.default if node.target in fx_utils.RESHAPES else _target(node)
    return target(reader.numbers(first), *rest, **node.kwargs)


def _same(reader: Reader, node: fx.Node) -> torch.Tensor:
    return reader.numbers(_args(node)[0])


def _cat(reader: Reader, node: fx.Node) -> torch.Tensor:
    parts, *rest = _args(node)
    return aten.cat.default([reader.numbers(part) for part in parts], *rest, **node.kwargs)


def _index(reader: Reader, node: fx.Node) -> torch.Tensor:
    base, tables = _args(node)
    given = [None if table is None else reader.values(table) for table in tables]
    return aten.index.Tensor(reader.numbers(base), given)


def _index_put(reader: Reader, node: fx.Node) -> torch.Tensor:
    base, tables, source = _args(node)[:3]
    given = [None if table is None else reader.values(table) for table in tables]
    whole = reader.numbers(base)
    sizes = [size for size, table in zip(whole.shape, given, strict=False) if table is not None]
    known = torch.broadcast_tensors(*(table for table in given if table is not None))
    if any(table.dtype == torch.bool for table in known):
        raise Unread("a mask as an index", node)
    place = torch.zeros_like(known[0], dtype=torch.int64)
    for table, size in zip(known, sizes, strict=True):
        place = place * size + table % size
    _check_distinct(place.flatten(), 0, node)
    return aten.index_put.default(whole, given, reader.numbers(source))


def _scatter(reader: Reader, node: fx.Node) -> torch.Tensor:
    base, dim, table, source = _args(node)
    index = reader.values(table)
    _check_distinct(index, dim, node)
    whole, moved = reader.numbers(base), reader.numbers(source)
    return torch.scatter(whole, dim, index, moved)


def _check_distinct(index: torch.Tensor, dim: int, node: fx.Node) -> None:
    """Raises if a position comes twice along ``dim``: which value stays is then not defined."""
    if bool((index.sort(dim).values.diff(dim=dim) == 0).any()):
        raise Unread("it writes to a position twice", node)


def _where(reader: Reader, node: fx.Node) -> torch.Tensor:
    condition, yes, no = _args(node)
    chosen = reader.values(condition)
    return torch.where(chosen, reader.numbers(yes), reader.numbers(no))


def _masked(reader: Reader, node: fx.Node) -> torch.Tensor:
    """``weight * mask``, of zeros and ones."""
    [mask] = _tables_of(node)
    [weight] = [item for item in _args(node) if item is not mask]
    kept = reader.values(mask)
    if bool(((kept != 0) & (kept != 1)).any()):
        raise Unread("it is multiplied by more than 0 and 1", mask)
    return reader.numbers(weight) * (kept != 0)


_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(_FILLS, _fill),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_SAME, _same),
    aten.cat.default: _cat,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.scatter.src: _scatter,
    aten.where.self: _where,
    aten.mul.Tensor: _masked,
}
# These move elements only if tables say where.
_TABLED = (
    *(aten.index.Tensor, aten.index_put.default, aten.scatter.src, aten.where.self),
    aten.mul.Tensor,
)


def _tables_of(node: fx.Node) -> list[fx.Node]:
    """The tables by which ``node`` places elements of another tensor."""
    if node.target not in _TABLED or not fx_utils.is_tensor_node(node):
        return []
    args = _args(node)
    if node.target == aten.mul.Tensor:
        nodes = [item for item in args if isinstance(item, fx.Node)]
        found = [item for item in nodes if _is_table(item) and _is_mask(item)]
        return found if len(nodes) == 2 and len(found) == 1 else []
    given = {aten.scatter.src: 2, aten.where.self: 0}.get(node.target, 1)
    tables = args[given] if isinstance(args[given], (list, tuple)) else [args[given]]
    found = [table for table in tables if table is not None]
    is_index = node.target != aten.where.self
    is_read = all(_is_table(table) or (is_index and _is_one_index(table)) for table in found)
    return found if is_read else []


def _scaling(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(quantized elements, their scale) if ``node`` multiplies these."""
    if node.target != aten.mul.Tensor or not fx_utils.is_tensor_node(node) or _tables_of(node):
        return None
    tensors = [item for item in _args(node) if fx_utils.is_tensor_node(item)]
    coded = [item for item in tensors if _holds_codes(item)]
    if len(tensors) != 2 or len(coded) != 1:
        return None
    [scale] = [item for item in tensors if item is not coded[0]]
    is_float = fx_utils.value(scale).dtype in SCALE_DTYPES
    return (coded[0], scale) if is_float and fx_utils.value(node).is_floating_point() else None


def _holds_codes(node: fx.Node) -> bool:
    """Whether the elements of ``node`` are stored int8 or FP8 elements, at most moved and cast."""
    todo, seen = [node], {node}
    while todo and len(seen) < _MAX_STEPS:
        item = todo.pop()
        if not fx_utils.is_tensor_node(item):
            continue
        if fx_utils.value(item).dtype in QUANTIZED:
            return True
        if item.target == fx_utils.CAST or item.target in _HANDLERS:
            inputs = [source for source in item.all_input_nodes if source not in seen]
            seen.update(inputs)
            todo += inputs
    return False


def _casts_codes(node: fx.Node) -> bool:
    """Whether ``node`` casts quantized elements, scaled or not, to floats; whether the cast rounds
    as the op does is a matter of the exactness class."""
    is_cast = node.target == fx_utils.CAST and fx_utils.value(node).dtype in SCALE_DTYPES
    return is_cast and _holds_codes(_args(node)[0])


def _is_exact_cast(node: fx.Node) -> bool:
    if node.target != fx_utils.CAST:
        return False
    before, after = fx_utils.value(_args(node)[0]).dtype, fx_utils.value(node).dtype
    return before == after or (before in SCALE_DTYPES and after == torch.float32)


def _moved(node: fx.Node) -> list[fx.Node]:
    """The inputs of ``node`` whose elements it moves."""
    if (factors := _scaling(node)) is not None:
        return [factors[0]]
    if fx_utils.is_tensor_node(node) and _casts_codes(node):
        return node.all_input_nodes
    return node.all_input_nodes if node.target in _HANDLERS and node.target not in _TABLED else []


def _is_table(node: fx.Node) -> bool:
    """Whether ``node`` is computed from indices or masks alone."""
    todo, seen = [node], {node}
    is_table = False
    while todo and len(seen) < _MAX_STEPS:
        item = todo.pop()
        if item.op in ("placeholder", "get_attr"):
            if not fx_utils.is_tensor_node(item):
                return False
            is_table = True
            if fx_utils.value(item).dtype not in (torch.bool, torch.int32, torch.int64):
                return False
        elif not _computes_table(item):
            return False
        is_table |= item.target == torch.ops.prims.iota.default
        inputs = [source for source in item.all_input_nodes if source not in seen]
        seen.update(inputs)
        todo += inputs
    return is_table and not todo


def _is_one_index(node: fx.Node) -> bool:
    """Whether ``node`` is one index, or the same several times: Inductor fills such a table."""
    return node.target in _FILLS and fx_utils.value(node).dtype in (torch.int32, torch.int64)


def _is_mask(table: fx.Node) -> bool:
    """Whether ``table`` is a mask: its inputs are bool or constants, not an int32 weight."""
    todo, seen = [table], {table}
    while todo:
        item = todo.pop()
        if item.op == "placeholder" and fx_utils.value(item).dtype != torch.bool:
            return False
        inputs = [source for source in item.all_input_nodes if source not in seen]
        seen.update(inputs)
        todo += inputs
    return True


def _computes_table(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    is_moving = node.target in (*_VIEWS, *_SAME)
    return is_moving or (schema is not None and schema.name.partition("::")[2] in _TABLE_OPS)


def is_move(node: fx.Node) -> bool:
    """Whether ``node`` has the elements of its first argument in another order or shape."""
    return node.target in (*_VIEWS, *_SAME) and fx_utils.is_tensor_node(node)


def moved(moves: Sequence[fx.Node], shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor of ``shape`` after ``moves``, without memory; they must be views."""
    view = torch.empty(shape, device="meta")
    for node in moves:
        _static_shape(node)
        if node.target in _SAME:
            continue
        target = aten.view.default if node.target in fx_utils.RESHAPES else _target(node)
        try:
            view = target(view, *_args(node)[1:], **node.kwargs)
        except RuntimeError as error:
            raise Unread("it is copied in another order", node) from error
    return view


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _target(node: fx.Node) -> Any:
    return node.target


def _static_shape(node: fx.Node) -> tuple[int, ...]:
    shape = tuple(fx_utils.value(node).shape)
    if any(map(fx_utils.is_symbolic, shape)):
        raise Unread("a symbolic size", node)
    return shape
