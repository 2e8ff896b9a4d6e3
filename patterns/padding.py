"""Products of padded matrices: what Inductor's ``pad_mm`` makes of sizes that are not aligned.

Before our slot it may write ``mm(a, b)`` as ``mm(pad(a), pad(b))[:M, :N]``, where a benchmark says
that the library is faster with it. Our kernels need no padding, and behind it neither a packed
weight nor a quantized activation is to be seen: so the product is recognised as it was before.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from inductor_quant.patterns import graph
from inductor_quant.patterns.canonicalize import add_node, erase_if_dead
from inductor_quant.patterns.graph import aten

# op -> the positions of its two matrices, that of its bias
_PRODUCTS: dict[Any, tuple[int, int, int | None]] = {
    aten.mm.default: (0, 1, None),
    aten.bmm.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
}


def unpadded(node: fx.Node) -> Unpadded | None:
    """The product ``node`` without its padding, written into the graph; None where it has none."""
    places = _PRODUCTS.get(node.target)
    if places is None or len(node.args) <= max(places[:2]):
        return None
    left, right, bias = places
    args: list[Any] = list(node.args)
    args[left], args[right] = map(_unpadded, (node.args[left], node.args[right]))
    if args == list(node.args):
        return None
    *batch, m, k = graph.value(args[left]).shape
    *_, inner, n = graph.value(args[right]).shape
    if not graph.same_size(k, inner):
        return None
    if bias is not None:
        args[bias] = _first_part(node.args[bias])
        *lead, length = graph.value(args[bias]).shape or [0]
        if not all(map(graph.is_one, lead)) or not graph.same_size(length, n):
            return None
    end = _end(node, (*batch, m, n))
    if end is None or graph.are_strides_read(end):  # the product without padding has others
        return None
    return Unpadded(node, end, tuple(args))


class Unpadded:
    """The product of ``args`` in the place of ``end``, until ``undo`` or ``finish``."""

    def __init__(self, padded: fx.Node, end: fx.Node, args: tuple[Any, ...]) -> None:
        self._end = end
        with end.graph.inserting_before(end):
            self.node = add_node(padded, padded.target, args, dict(padded.kwargs))
        end.replace_all_uses_with(self.node)

    def undo(self) -> None:
        self.node.replace_all_uses_with(self._end)
        self.node.graph.erase_node(self.node)

    def finish(self) -> None:
        """Erase what only the padded product used."""
        erase_if_dead(self._end)


def _unpadded(item: Any) -> Any:
    """The source of a matrix to which rows and columns of zeros were added at the end."""
    if not graph.is_tensor_node(item) or item.target != aten.constant_pad_nd.default:
        return item
    source, widths, value = graph.arguments(item, "self", "pad", "value")
    # from the last dimension on, before and after each
    matrix, batch = list(widths[:4]), widths[4:]
    is_behind = all(isinstance(width, int) and width >= 0 for width in matrix)
    return source if is_behind and not any((*matrix[::2], *batch, value or 0)) else item


def _first_part(item: Any) -> Any:
    """A bias, of the columns alone, without the zeros behind it."""
    while graph.is_tensor_node(item) and item.target == aten.cat.default:
        if graph.value(item).dim() != 1:  # what is behind may be the bias of other rows
            break
        parts, *_ = item.args
        if len(parts) != 2 or parts[1].target != aten.full.default:
            break
        item = parts[0]
    return item


def _end(node: fx.Node, shape: tuple[Any, ...]) -> fx.Node | None:
    """The slice that gives the product its ``shape`` again: it, and those before it, begin at 0."""
    found = node
    while not all(map(graph.same_size, graph.value(found).shape, shape)):
        user = graph.single_user(found)
        if user is None or user.target != aten.slice.Tensor:
            return None
        start, _, step = graph.arguments(user, "self", "dim", "start", "end", "step")[2:]
        if start not in (None, 0) or step not in (None, 1):
            return None
        found = user
    return found
