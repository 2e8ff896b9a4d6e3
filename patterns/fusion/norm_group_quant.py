"""Move a group quantization (1 x 128) into the kernel of the norm before it.

    x = reshape(y), [M, G, L]            y, [..., K], a norm's result
    amax(abs(x), -1), [M, G]             group_reduce(y)
    scale = f(amax), [M, G]        ->    f(group_reduce(y))
    cast(x / scale[..., None])           cast(y / f(group_reduce(y)))
    scale, for the GEMM                  group_value(f(group_reduce(y))), [M, G]

The norm reduces rows, the quantization groups of them; Inductor fuses reductions only if they run
over the same rows. So a value per group becomes a value per element, and every node gets the shape
that the norm reduces. Each value is computed from the same arguments as before. A node that is not
understood reads its old input, reshaped. Applies after a norm only: without one, a kernel of the
groups alone is faster.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import group_reduce as compat
from inductor_quant._compat import inductor
from inductor_quant.ops import fp8_block
from inductor_quant.ops.fusion import group_reduce, quantize

from .. import fx_utils
from ..fx_utils import aten
from ..rewrite import add_node, erase_if_dead
from .row_quant import FLOATS, REDUCTIONS, reduced_rows

CAST = torch.ops.prims.convert_element_type.default
_ROW_REDUCTIONS = (
    *(aten.mean.dim, aten.sum.dim_IntList, aten.var_mean.correction, aten.var.correction),
    *(aten.amax.default, aten.amin.default),
)
_VIEWS = (*fx_utils.RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
_SAME_ELEMENTS = (*fx_utils.RESHAPES, aten.clone.default)
# Nodes from a group's reduction up to its row's, or down to a cast: a layer norm has about 15.
_SEARCH_LIMIT = 60


@dataclasses.dataclass
class Groups:
    """The reductions over the groups of one tensor, and the nodes computed from them.

    source        the tensor, [..., G, L]
    rows          the shape that the norm reduces, [..., G * L]
    per_group     nodes [..., G] or [..., G, 1]: the reductions, f of them
    per_element   nodes that are computed from those element by element: the quotient, a cast
    """

    source: fx.Node
    rows: torch.Size
    per_group: dict[fx.Node, None]
    per_element: dict[fx.Node, None] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        return int(fx_utils.value(self.source).shape[-1])

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.per_group or node in self.per_element

    def other_users(self, node: fx.Node) -> list[fx.Node]:
        """The users that stay as they are."""
        return [user for user in node.users if user not in self]


def fuse_norm_and_group_quant(owner: fx.Graph) -> int:
    """Returns how many tensors the kernel of their norm quantizes now."""
    found: dict[fx.Node, Groups] = {}
    for target in REDUCTIONS:
        for node in owner.find_nodes(op="call_function", target=target):
            item = _read(node)
            if item is not None:
                found.setdefault(item.source, item).per_group.update(item.per_group)
    quantized = [item for item in found.values() if _follow(item)]
    for item in quantized:
        _Writer(item).write()
    return len(quantized)


# ------------------------------------------------------------------------------------------
# reading


def _read(node: fx.Node) -> Groups | None:
    """The groups that ``node`` reduces; None if it reduces none, if they cannot be lowered, or if
    no norm comes before it."""
    reduced = reduced_rows(node)
    if reduced is None:
        return None
    x: Any = reduced.args[0] if reduced.target == aten.abs.default else reduced
    shape = fx_utils.value(x).shape
    if len(shape) < 3 or fx_utils.value(x).dtype not in FLOATS:
        return None
    if fx_utils.is_symbolic(shape[-1]) or fx_utils.is_symbolic(shape[-2]) or shape[-2] < 2:
        return None
    is_lowered = compat.takes(shape[-2] * shape[-1], shape[-1])
    if not is_lowered or not inductor.runs_triton(fx_utils.value(x).device):
        return None
    rows = _norm_shape(x)
    if rows is None or sum(map(fx_utils.is_symbolic, rows)) > 1 or fx_utils.is_mutated(x):
        return None
    return Groups(x, rows, {node: None})


def _norm_shape(x: fx.Node) -> torch.Size | None:
    """The shape [..., G * L] in which a norm reduces the rows that become ``x``, [..., G, L], by
    elementwise ops and views."""
    *before, count, size = fx_utils.value(x).shape
    todo, seen = [x], {x}
    while todo and len(seen) < _SEARCH_LIMIT:
        node = todo.pop(0)
        if node.target in _ROW_REDUCTIONS:
            y = reduced_rows(node)
            shape = None if y is None else fx_utils.value(y).shape
            if (
                shape is not None
                and fx_utils.same_size(shape[-1], count * size)
                and fx_utils.same_size(math.prod(shape[:-1]), math.prod(before))
            ):
                return shape
            continue
        is_getitem = getattr(node.target, "__name__", "") == "getitem"
        if _is_elementwise(node) or node.target in _VIEWS or is_getitem:
            todo += [parent for parent in node.all_input_nodes if parent not in seen]
            seen.update(node.all_input_nodes)
    return None


def _follow(found: Groups) -> bool:
    """Find the nodes computed from the reductions. Returns whether they are a quantization."""
    todo = list(found.per_group)
    while todo:
        node = todo.pop(0)
        for user in node.users:
            if user not in found.per_group and _is_per_group(user, found):
                found.per_group[user] = None
                todo.append(user)
    todo = [user for node in found.per_group for user in node.users if user not in found.per_group]
    while todo:
        node = todo.pop(0)
        if node not in found.per_element and _is_per_element(node, found):
            found.per_element[node] = None
            todo += node.users
    read = [node for node in found.per_group if found.other_users(node)]
    return (
        any(fx_utils.value(node).dtype.itemsize == 1 for node in found.per_element)
        and all(fx_utils.value(node).dtype in FLOATS for node in read)
        and len(found.per_group) + len(found.per_element) < _SEARCH_LIMIT
    )


def _is_per_group(node: fx.Node, found: Groups) -> bool:
    """Whether it is computed group by group from ``per_group`` nodes and scalars."""
    value, shape = node.meta.get("val"), fx_utils.value(found.source).shape[:-1]
    if not isinstance(value, torch.Tensor) or value.dtype not in (*FLOATS, torch.bool):
        return False
    if not _is_shape(value, shape) and not _is_shape(value, (*shape, 1)):
        return False
    if node.target in _VIEWS:
        return node.args[0] in found.per_group
    return _is_elementwise(node) and all(
        arg in found.per_group if _is_shape(fx_utils.value(arg), value.shape) else _is_scalar(arg)
        for arg in node.all_input_nodes
    )


def _is_per_element(node: fx.Node, found: Groups) -> bool:
    """Whether it is computed element by element, also from values of the element's group."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    shape = fx_utils.value(found.source).shape
    if not fx_utils.same_size(math.prod(value.shape), math.prod(shape)):
        return False  # one value for each group, such as an exponent as an integer
    if node.target == aten.expand.default:
        is_whole = _is_shape(value, shape)
        return is_whole and node.args[0] in found.per_group and _is_column(node.args[0], found)
    if node.target in _SAME_ELEMENTS:
        is_own = node.target == aten.clone.default and fx_utils.is_returned(node)
        return node.args[0] in found.per_element and not is_own
    return _is_elementwise(node) and all(
        _is_shape(fx_utils.value(arg), value.shape)
        or (arg in found.per_group and _is_column(arg, found) and _is_shape(value, shape))
        or _is_scalar(arg)
        for arg in node.all_input_nodes
    )


def _is_column(node: Any, found: Groups) -> bool:
    """[..., G, 1], which broadcasts over a group."""
    return _is_shape(fx_utils.value(node), (*fx_utils.value(found.source).shape[:-1], 1))


def _is_scalar(node: fx.Node) -> bool:
    return fx_utils.is_tensor_node(node) and fx_utils.value(node).dim() == 0


def _is_elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    is_random = torch.Tag.nondeterministic_seeded in tags
    is_known = node.target == CAST or node.target == quantize.op
    is_pointwise = is_known or (torch.Tag.pointwise in tags and not is_random)
    return is_pointwise and all(map(fx_utils.is_tensor_node, node.all_input_nodes))


def _is_shape(value: torch.Tensor, shape: Any) -> bool:
    return value.dim() == len(shape) and all(map(fx_utils.same_size, value.shape, shape))


# ------------------------------------------------------------------------------------------
# writing


class _Writer:
    """Rewrites the nodes that were found to the shape of the rows."""

    def __init__(self, found: Groups) -> None:
        self.found = found
        self.flat: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        found = self.found
        for node in sorted(found.per_group):
            if users := found.other_users(node):
                self.store(node, users)
        for node in sorted(found.per_element):
            if users := found.other_users(node):
                whole = self.reshaped(self.flattened(node), node, fx_utils.value(node).shape)
                for user in users:
                    user.replace_input_with(node, whole)
        made = [node for node in self.flat.values() if node.op == "call_function"]
        for node in (*sorted((*found.per_group, *found.per_element), reverse=True), *made):
            erase_if_dead(node)

    def flattened(self, node: fx.Node) -> fx.Node:
        """``node`` in the shape of the rows."""
        if node not in self.flat:
            self.flat[node] = self._flattened(node)
        return self.flat[node]

    def _flattened(self, node: fx.Node) -> fx.Node:
        found = self.found
        is_found = node in found
        if not is_found and _is_shape(fx_utils.value(node), found.rows):
            return node
        if node in found.per_group and node.target in REDUCTIONS:
            return self.reduced(node)
        is_copy = node.target in (*_SAME_ELEMENTS, aten.expand.default)
        if node.target in fx_utils.RESHAPES or (is_found and (node.target in _VIEWS or is_copy)):
            assert isinstance(node.args[0], fx.Node)
            return self.flattened(node.args[0])
        if is_found or self.is_of_same_shape(node):
            inputs = {n: n if _is_scalar(n) else self.flattened(n) for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
            with node.graph.inserting_before(node):
                return add_node(node, node.target, args, kwargs)
        return self.reshaped(node, node, found.rows)

    def is_of_same_shape(self, node: fx.Node) -> bool:
        """Whether ``node`` is computed element by element from tensors of its shape."""
        return _is_elementwise(node) and all(
            _is_shape(fx_utils.value(arg), fx_utils.value(node).shape) or _is_scalar(arg)
            for arg in node.all_input_nodes
        )

    def reduced(self, node: fx.Node) -> fx.Node:
        x, kind = node.args[0], REDUCTIONS[node.target]  # type: ignore[index]
        assert isinstance(x, fx.Node)
        if kind == "amax" and x.target == aten.abs.default:
            [x], kind = x.all_input_nodes, "absmax"
        rows = self.flattened(x)
        with node.graph.inserting_before(node):
            return add_node(node, group_reduce.reduce_op, (rows, kind, self.found.size), {})

    def reshaped(self, node: fx.Node, like: fx.Node, shape: Any) -> fx.Node:
        """A view of ``node``, inserted after ``like``."""
        if _is_shape(fx_utils.value(node), shape):
            return node
        sizes = [-1 if fx_utils.is_symbolic(size) else size for size in shape]
        with node.graph.inserting_after(like):
            return add_node(like, aten.reshape.default, (node, sizes), {})

    def store(self, node: fx.Node, users: list[fx.Node]) -> None:
        """Let ``users`` read the stored values of ``node`` in the layout that they need.

        Our GEMMs read the scales of one group for many rows at a time, and cuBLASLt requires that
        layout: contiguous along M.
        """
        copies = [copy for user in users for copy in _transposed_copies(user)]
        along_rows = bool(copies) or all(_is_scale_of_gemm(user, node) for user in users)
        flat = self.flattened(node)
        with node.graph.inserting_after(node):
            value = add_node(node, group_reduce.value_op, (flat, self.found.size, along_rows), {})
        whole = self.reshaped(value, value, fx_utils.value(node).shape)
        for copy in copies:
            with copy.graph.inserting_before(copy):
                view = add_node(copy, aten.permute.default, (whole, [1, 0]), {})
            copy.replace_all_uses_with(view)
            copy.graph.erase_node(copy)
        for user in users:
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
        and not fx_utils.is_returned(copy)
        and not fx_utils.is_mutated(copy)
    ]


def _is_scale_of_gemm(user: fx.Node, node: fx.Node) -> bool:
    return user.target == fp8_block.op and user.args[2] is node and user.args[3] is not node
