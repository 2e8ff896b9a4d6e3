"""A quantization in groups (1 x 128) moves into the kernel of the norm before it.

The norm reduces rows, the quantization groups of them; Inductor makes one kernel of reductions only
where they run over the same rows. So what a group has in common (its maximum, its scale) becomes
what each of its elements has, and everything is written in the shape of the rows that the norm
reduces:

    x = reshape(y), [M, G, L]            y, [..., K]
    amax(abs(x), -1), [M, G]             group_reduce(y)
    scale = f(amax), [M, G]        ->    f(group_reduce(y))
    cast(x / scale[..., None])           cast(y / f(group_reduce(y)))
    scale, for the GEMM                  group_value(f(group_reduce(y))), [M, G]

The numbers are the same: each is computed of the same arguments, element by element. What is not
understood reads what it read before, reshaped. Without a norm a kernel of the groups alone is the
better one, and stays.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from inductor_quant import _group_reduce_compat, _torch_compat
from inductor_quant.ops import fp8_block, group_reduce, quantize
from inductor_quant.patterns import graph
from inductor_quant.patterns.canonicalize import add_node, erase_if_dead
from inductor_quant.patterns.graph import aten

CAST = torch.ops.prims.convert_element_type.default
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = {aten.amax.default: "amax", aten.amin.default: "amin"}
_ROW_REDUCTIONS = (
    *(aten.mean.dim, aten.sum.dim_IntList, aten.var_mean.correction, aten.var.correction),
    *(aten.amax.default, aten.amin.default),
)
_VIEWS = (*graph.RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
_SAME_ELEMENTS = (*graph.RESHAPES, aten.clone.default)
# From a group's reduction up to that of its row, or down to a cast: a layer norm has about 15.
_SEARCH_LIMIT = 60


@dataclasses.dataclass
class Groups:
    """The reductions over the groups of one tensor, and what becomes of them.

    source    the tensor, [..., G, L]
    rows      the shape of what the norm reduces, [..., G * L]
    common    nodes with a value for each group, [..., G] or [..., G, 1]: the reductions, f of them
    spread    nodes with a value for each element that are computed from those: the quotient, a cast
    """

    source: fx.Node
    rows: torch.Size
    common: dict[fx.Node, None]
    spread: dict[fx.Node, None] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        return int(graph.value(self.source).shape[-1])


def join_groups_to_rows(owner: fx.Graph) -> int:
    """Returns how many tensors are quantized in the kernel that normalizes them."""
    found: dict[fx.Node, Groups] = {}
    for target in _KINDS:
        for node in owner.find_nodes(op="call_function", target=target):
            item = _read(node)
            if item is not None:
                found.setdefault(item.source, item).common.update(item.common)
    quantized = [item for item in found.values() if _follow(item)]
    for item in quantized:
        _Writer(item).write()
    return len(quantized)


# ------------------------------------------------------------------------------------------
# reading


def _read(node: fx.Node) -> Groups | None:
    """The groups that ``node`` reduces; None where it does not, where that cannot be lowered, or is
    not computed from a reduction of the rows."""
    x, dims = graph.arguments(node, "self", "dim")
    if not graph.is_tensor_node(x) or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    x = x.args[0] if x.target == aten.abs.default else x
    shape = graph.value(x).shape
    if len(shape) < 3 or dims[0] not in (-1, len(shape) - 1) or graph.value(x).dtype not in FLOATS:
        return None
    if graph.is_symbolic(shape[-1]) or graph.is_symbolic(shape[-2]) or shape[-2] < 2:
        return None
    is_lowered = _group_reduce_compat.takes(shape[-2] * shape[-1], shape[-1])
    if not is_lowered or not _torch_compat.runs_triton(graph.value(x).device):
        return None
    rows = _reduced_rows(x)
    if rows is None or sum(map(graph.is_symbolic, rows)) > 1 or graph.is_mutated(x):
        return None
    return Groups(x, rows, {node: None})


def _reduced_rows(x: fx.Node) -> torch.Size | None:
    """The shape [..., G * L] of a tensor whose rows are reduced, where elementwise operations make
    [..., G, L] of it and of what it is reduced to, as a norm does."""
    *before, count, size = graph.value(x).shape
    todo, seen = [x], {x}
    while todo and len(seen) < _SEARCH_LIMIT:
        node = todo.pop(0)
        if node.target in _ROW_REDUCTIONS:
            y, dims = graph.arguments(node, "self", "dim")
            shape = graph.value(y).shape
            is_row = isinstance(dims, (list, tuple)) and list(dims) in ([-1], [len(shape) - 1])
            if (
                is_row
                and graph.same_size(shape[-1], count * size)
                and graph.same_size(math.prod(shape[:-1]), math.prod(before))
            ):
                return shape
            continue
        is_getitem = getattr(node.target, "__name__", "") == "getitem"
        if _is_elementwise(node) or node.target in _VIEWS or is_getitem:
            todo += [parent for parent in node.all_input_nodes if parent not in seen]
            seen.update(node.all_input_nodes)
    return None


def _follow(found: Groups) -> bool:
    """Find what is computed of the reductions; whether that is a quantization."""
    todo = list(found.common)
    while todo:
        node = todo.pop(0)
        for user in node.users:
            if user not in found.common and _is_common(user, found):
                found.common[user] = None
                todo.append(user)
    todo = [user for node in found.common for user in node.users if user not in found.common]
    while todo:
        node = todo.pop(0)
        if node not in found.spread and _is_spread(node, found):
            found.spread[node] = None
            todo += node.users
    read = [node for node in found.common if _readers(node, found)]
    return (
        any(graph.value(node).dtype.itemsize == 1 for node in found.spread)
        and all(graph.value(node).dtype in FLOATS for node in read)
        and len(found.common) + len(found.spread) < _SEARCH_LIMIT
    )


def _readers(node: fx.Node, found: Groups) -> list[fx.Node]:
    """Those who are not part of what is found."""
    return [user for user in node.users if user not in found.common and user not in found.spread]


def _is_common(node: fx.Node, found: Groups) -> bool:
    """Whether it is computed group by group from what is known to be common, and numbers."""
    value, shape = node.meta.get("val"), graph.value(found.source).shape[:-1]
    if not isinstance(value, torch.Tensor) or value.dtype not in (*FLOATS, torch.bool):
        return False
    if not _is_shape(value, shape) and not _is_shape(value, (*shape, 1)):
        return False
    if node.target in _VIEWS:
        return node.args[0] in found.common
    return _is_elementwise(node) and all(
        arg in found.common if _is_shape(graph.value(arg), value.shape) else _is_number(arg)
        for arg in node.all_input_nodes
    )


def _is_spread(node: fx.Node, found: Groups) -> bool:
    """Whether it has a value for each element, computed from those of the element and its group."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    shape = graph.value(found.source).shape
    if node.target == aten.expand.default:
        is_whole = _is_shape(value, shape)
        return is_whole and node.args[0] in found.common and _is_column(node.args[0], found)
    if node.target in _SAME_ELEMENTS:
        is_own = node.target == aten.clone.default and graph.is_returned(node)
        return node.args[0] in found.spread and not is_own
    return _is_elementwise(node) and all(
        _is_shape(graph.value(arg), value.shape)
        or (arg in found.common and _is_column(arg, found) and _is_shape(value, shape))
        or _is_number(arg)
        for arg in node.all_input_nodes
    )


def _is_column(node: Any, found: Groups) -> bool:
    """[..., G, 1], which is broadcast over a group."""
    return _is_shape(graph.value(node), (*graph.value(found.source).shape[:-1], 1))


def _is_number(node: fx.Node) -> bool:
    return graph.is_tensor_node(node) and graph.value(node).dim() == 0


def _is_elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    is_random = torch.Tag.nondeterministic_seeded in tags
    is_known = node.target == CAST or node.target == quantize.op
    is_pointwise = is_known or (torch.Tag.pointwise in tags and not is_random)
    return is_pointwise and all(map(graph.is_tensor_node, node.all_input_nodes))


def _is_shape(value: torch.Tensor, shape: Any) -> bool:
    return value.dim() == len(shape) and all(map(graph.same_size, value.shape, shape))


# ------------------------------------------------------------------------------------------
# writing


class _Writer:
    """Writes what was found in the shape of the rows."""

    def __init__(self, found: Groups) -> None:
        self.found = found
        self.flat: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        found = self.found
        for node in sorted(found.common):
            readers = _readers(node, found)
            if readers:
                self.hand_out(node, readers)
        for node in sorted(found.spread):
            readers = _readers(node, found)
            if readers:
                whole = self.in_shape_of(node)
                for user in readers:
                    user.replace_input_with(node, whole)
        made = [node for node in self.flat.values() if node.op == "call_function"]
        for node in (*sorted((*found.common, *found.spread), reverse=True), *made):
            erase_if_dead(node)

    def flattened(self, node: fx.Node) -> fx.Node:
        """``node`` in the shape of the rows."""
        if node not in self.flat:
            self.flat[node] = self._flattened(node)
        return self.flat[node]

    def _flattened(self, node: fx.Node) -> fx.Node:
        found = self.found
        is_found = node in found.common or node in found.spread
        if not is_found and _is_shape(graph.value(node), found.rows):
            return node
        if node in found.common and node.target in _KINDS:
            return self.reduced(node)
        is_copy = node.target in (*_SAME_ELEMENTS, aten.expand.default)
        if node.target in graph.RESHAPES or (is_found and (node.target in _VIEWS or is_copy)):
            assert isinstance(node.args[0], fx.Node)
            return self.flattened(node.args[0])
        if is_found or self.is_of_same_shape(node):
            numbers = {arg: arg for arg in node.all_input_nodes if _is_number(arg)}
            inputs = {n: numbers.get(n) or self.flattened(n) for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
            with node.graph.inserting_before(node):
                return add_node(node, node.target, args, kwargs)
        return self.reshaped(node, node, found.rows)

    def is_of_same_shape(self, node: fx.Node) -> bool:
        """Whether ``node`` is computed element by element from tensors of its shape."""
        return _is_elementwise(node) and all(
            _is_shape(graph.value(arg), graph.value(node).shape) or _is_number(arg)
            for arg in node.all_input_nodes
        )

    def reduced(self, node: fx.Node) -> fx.Node:
        x, kind = node.args[0], _KINDS[node.target]  # type: ignore[index]
        assert isinstance(x, fx.Node)
        if kind == "amax" and x.target == aten.abs.default:
            [x], kind = x.all_input_nodes, "absmax"
        rows = self.flattened(x)
        with node.graph.inserting_before(node):
            return add_node(node, group_reduce.reduce_op, (rows, kind, self.found.size), {})

    def reshaped(self, node: fx.Node, like: fx.Node, shape: Any) -> fx.Node:
        """A view of ``node``, which stands where ``like`` does or before."""
        if _is_shape(graph.value(node), shape):
            return node
        sizes = [-1 if graph.is_symbolic(size) else size for size in shape]
        with node.graph.inserting_after(like):
            return add_node(like, aten.reshape.default, (node, sizes), {})

    def in_shape_of(self, node: fx.Node) -> fx.Node:
        return self.reshaped(self.flattened(node), node, graph.value(node).shape)

    def hand_out(self, node: fx.Node, readers: list[fx.Node]) -> None:
        """Let ``readers`` read ``node``'s values, once stored, in the layout that they want.

        A GEMM of ours reads the scales of a column of blocks for many rows at a time, and cuBLASLt
        takes no others: along the rows.
        """
        copies = [copy for user in readers for copy in _transposed_copies(user)]
        along_rows = bool(copies) or all(_is_scale_of_gemm(user, node) for user in readers)
        flat = self.flattened(node)
        with node.graph.inserting_after(node):
            value = add_node(node, group_reduce.value_op, (flat, self.found.size, along_rows), {})
        whole = self.reshaped(value, value, graph.value(node).shape)
        for copy in copies:
            with copy.graph.inserting_before(copy):
                view = add_node(copy, aten.permute.default, (whole, [1, 0]), {})
            copy.replace_all_uses_with(view)
            copy.graph.erase_node(copy)
        for user in readers:
            user.replace_input_with(node, whole)
            if user.target == aten.permute.default:
                erase_if_dead(user)


def _transposed_copies(user: fx.Node) -> list[fx.Node]:
    """The copies of [M, G], transposed by ``user``, to contiguous memory."""
    if user.target != aten.permute.default or user.args[1] != [1, 0]:
        return []
    return [
        copy
        for copy in user.users
        if copy.target == aten.clone.default
        and copy.kwargs.get("memory_format") == torch.contiguous_format
        and not graph.is_returned(copy)
        and not graph.is_mutated(copy)
    ]


def _is_scale_of_gemm(user: fx.Node, node: fx.Node) -> bool:
    return user.target == fp8_block.op and user.args[2] is node and user.args[3] is not node
