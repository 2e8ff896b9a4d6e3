"""Undoes Inductor's ``pad_mm``: ``mm(pad(a), pad(b))[:M, :N]`` becomes ``mm(a, b)`` again.

Inductor pads unaligned sizes before our slot if a benchmark says that the library is faster with
it. Our kernels need no padding, and it hides packed weights and quantized activations.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from .. import fx_utils
from ..fx_utils import aten
from ..rewrite import add_node, erase_if_dead

# op -> the argument positions of its two matrices and its bias
_PRODUCTS: dict[Any, tuple[int, int, int | None]] = {
    aten.mm.default: (0, 1, None),
    aten.bmm.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
}


def unpadded(node: fx.Node) -> Unpadded | None:
    """Insert the product ``node`` without its padding; None if it has none."""
    places = _PRODUCTS.get(node.target)
    if places is None or len(node.args) <= max(places[:2]):
        return None
    left, right, bias = places
    args: list[Any] = list(node.args)
    args[left], args[right] = map(_unpadded, (node.args[left], node.args[right]))
    if args == list(node.args):
        return None
    *batch, m, k = fx_utils.value(args[left]).shape
    *_, inner, n = fx_utils.value(args[right]).shape
    if not fx_utils.same_size(k, inner):
        return None
    if bias is not None:
        args[bias] = _first_part(node.args[bias])
        *lead, length = fx_utils.value(args[bias]).shape or [0]
        if not all(map(fx_utils.is_one, lead)) or not fx_utils.same_size(length, n):
            return None
    end = _end(node, (*batch, m, n))
    if end is None or fx_utils.are_strides_read(end):  # the unpadded product has others
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
    """The matrix before zero rows and columns were appended."""
    if not fx_utils.is_tensor_node(item) or item.target != aten.constant_pad_nd.default:
        return item
    source, widths, value = fx_utils.arguments(item, "self", "pad", "value")
    # from the last dimension on, before and after each
    matrix, batch = list(widths[:4]), widths[4:]
    is_appended = all(isinstance(width, int) and width >= 0 for width in matrix)
    return source if is_appended and not any((*matrix[::2], *batch, value or 0)) else item


def _first_part(item: Any) -> Any:
    """A bias [N] before zeros were appended."""
    while fx_utils.is_tensor_node(item) and item.target == aten.cat.default:
        if fx_utils.value(item).dim() != 1:  # may append the bias of other rows
            break
        parts, *_ = item.args
        if len(parts) != 2 or parts[1].target != aten.full.default:
            break
        item = parts[0]
    return item


def _end(node: fx.Node, shape: tuple[Any, ...]) -> fx.Node | None:
    """The last of the slices, all from 0, that cut the product to ``shape``; None if none does."""
    found = node
    while not fx_utils.same_shape(fx_utils.value(found).shape, shape):
        user = fx_utils.single_user(found)
        if user is None or user.target != aten.slice.Tensor:
            return None
        start, _, step = fx_utils.arguments(user, "self", "dim", "start", "end", "step")[2:]
        if start not in (None, 0) or step not in (None, 1):
            return None
        found = user
    return found
