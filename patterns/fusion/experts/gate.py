"""The activation of gated experts moves into their first product: two columns of it give one.

    y = experts(x, ...)                                     [S, 2 J]
    gate, up = y.chunk(2, -1), or y[:, ::2], y[:, 1::2]
    silu(gate) * up                                     ->  experts(x, ..., gate=...)  [S, J]

What is computed from the two is read as an expression (``spec/gate.py``): pointwise ops that a gate
has, up to the last value that all of them go through. The graph rounds the product, and some steps;
the kernel rounds once, as Inductor's own epilogues do.

A bias of each expert in between, ``y + bias[ids]``, goes along if the rows are not sorted: with
sorted rows it was slower (kernels/experts/README.md). ``where(mask, 0, y)`` goes if the
product behind has rows of its own replaced too, as ``transformers`` does with rows that have no
expert. Nothing changes if anything else reads the product or its halves.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from inductor_quant.ops import experts
from inductor_quant.spec.gate import Gate

from ... import fx_utils
from ...fx_utils import CAST, aten
from ...matching.gathered_rows import replaces_rows
from ...rewrite import add_node, erase_if_dead
from .rows import is_gathering

_VIEWS = (*fx_utils.RESHAPES, *fx_utils.SQUEEZES)
_OPS = {
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
    aten.neg.default: "neg",
    aten.exp.default: "exp",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.erf.default: "erf",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.clamp_min.default: "maximum",
    aten.clamp_max.default: "minimum",
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass
class _Product:
    """What follows a call up to its halves: ``wide`` [..., 2 J], and what was met on the way.
    ``bias``: a matrix, and which of its rows is added to each row."""

    wide: fx.Node
    mask: fx.Node | None = None
    bias: tuple[fx.Node, fx.Node] | None = None


def gate_in_experts(owner: fx.Graph) -> int:
    """Returns how many calls compute an activation now."""
    done = 0
    for call in owner.find_nodes(op="call_function", target=experts.op):
        done += not call.kwargs.get("gate") and _gate_in(call)
    return done


def _gate_in(call: fx.Node) -> bool:
    product = _product_of(call)
    parts = _halves(product.wide)
    found = _expression(parts[0], fx_utils.value(call).dtype) if parts is not None else None
    if parts is None or found is None:
        return False
    end, steps, inside = found
    shape = [size if isinstance(size, int) else -1 for size in fx_utils.value(end).shape]
    if shape.count(-1) > 1:
        return False
    if product.mask is not None and not all(_is_replaced(u, product.mask) for u in end.users):
        return False
    bias: dict[str, Any] = {}
    read = [*inside, *_between(call, product.wide), end]
    if product.bias is not None:
        bias = dict(zip(("bias", "bias_rows"), product.bias, strict=True))
        read += [*product.bias, *call.all_input_nodes]
        *_, offsets = fx_utils.arguments(call, "x", "weight", "offsets")
        if offsets is not None:
            return False
    if fx_utils.mutated(read) is not None:
        return False
    call.kwargs = call.kwargs | bias | {"gate": Gate(tuple(steps), parts[1]).encode()}
    if bias:
        end.prepend(call)  # behind what the bias is made of
    rows, width = fx_utils.value(call).shape
    call.meta["val"] = fx_utils.value(call).new_empty((rows, width // 2))
    result = call
    if not fx_utils.same_shape(*(fx_utils.value(node).shape for node in (call, end))):
        with call.graph.inserting_before(end):
            result = add_node(call, aten.reshape.default, (call, shape), {})
    end.replace_all_uses_with(result)
    erase_if_dead(end)
    return True


def _product_of(call: fx.Node) -> _Product:
    found = _Product(call)
    width = fx_utils.value(call).shape[-1]
    while (user := fx_utils.single_user(found.wide)) is not None:
        if user.target in _VIEWS and fx_utils.is_tensor_node(user):
            # [S, N, 1] of a product with vectors: the next view undoes it
            if not _ends_in(user, width) and not _ends_in(user, 1):
                break
        elif user.target == aten.where.self and found.mask is None:
            mask: Any = user.args[0]
            _, other, kept = user.args
            if kept is not found.wide or not _is_of_rows(mask, user) or other is found.wide:
                break
            found.mask = mask
        elif user.target == aten.add.Tensor and found.bias is None and found.mask is None:
            found.bias = _bias(user, found.wide)
            if found.bias is None:
                break
        else:
            break
        found.wide = user
    return found


def _ends_in(node: fx.Node, size: Any) -> bool:
    shape = fx_utils.value(node).shape
    return bool(shape) and fx_utils.same_size(shape[-1], size)


def _is_of_rows(mask: Any, like: fx.Node) -> bool:
    """Whether ``mask`` has a value for each row."""
    wanted = (*fx_utils.value(like).shape[:-1], 1)
    return fx_utils.is_tensor_node(mask) and fx_utils.same_shape(fx_utils.value(mask).shape, wanted)


def _bias(add: fx.Node, product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The matrix and the rows of what is added to the product."""
    others = [item for item in add.args if item is not product]
    if len(others) != 1 or add.kwargs or not fx_utils.is_tensor_node(others[0]):
        return None
    node: Any = others[0]
    if fx_utils.value(node).dtype not in _FLOATS:
        return None
    if not fx_utils.same_shape(fx_utils.value(node).shape, fx_utils.value(product).shape):
        return None
    while node.target in _VIEWS or node.target == CAST:
        node = node.args[0]
    if node.target != aten.index.Tensor:
        return None
    matrix, indices = fx_utils.arguments(node, "self", "indices")
    if len(indices) != 1 or fx_utils.value(matrix).dim() != 2:
        return None
    [rows] = indices
    width = fx_utils.value(product).shape[-1]
    is_vector = fx_utils.is_tensor_node(rows) and fx_utils.value(rows).dim() == 1
    is_whole = fx_utils.same_size(fx_utils.value(matrix).shape[1], width)
    is_integer = is_vector and fx_utils.value(rows).dtype in experts.INDEX_DTYPES
    return (matrix, rows) if is_integer and is_whole else None


def _halves(wide: fx.Node) -> tuple[dict[fx.Node, int], bool] | None:
    """The nodes that are the two halves of the columns, 0 or 1, which are all that is read, and
    whether they alternate."""
    shape = fx_utils.value(wide).shape
    last, width = len(shape) - 1, shape[-1]
    if not isinstance(width, int) or width % 2:
        return None
    half = width // 2
    places: dict[fx.Node, tuple[int, int]] = {}  # first column and step
    for user in fx_utils.users(wide):
        if user.target == aten.split.Tensor:
            _, size, dim = fx_utils.arguments(user, "self", "split_size", "dim")
            if size != half or (dim or 0) % len(shape) != last:
                return None
            for part in fx_utils.users(user):
                number: Any = part.args[1]
                if part.target is not operator.getitem:
                    return None
                places[part] = (number * half, 1)
        elif user.target == aten.slice.Tensor:
            _, dim, start, _, step = fx_utils.arguments(user, "self", "dim", "start", "end", "step")
            start, step = start or 0, 1 if step is None else step
            is_half = (dim or 0) % len(shape) == last and fx_utils.value(user).shape[-1] == half
            if not is_half or not isinstance(start, int) or not isinstance(step, int):
                return None
            places[user] = (start % width, step)
        else:
            return None
    for is_interleaved, order in ((False, [(0, 1), (half, 1)]), (True, [(0, 2), (1, 2)])):
        if {*places.values()} == {*order}:
            return {node: order.index(place) for node, place in places.items()}, is_interleaved
    return None


def _expression(
    halves: dict[fx.Node, int], dtype: torch.dtype
) -> tuple[fx.Node, list[Any], set[fx.Node]] | None:
    """The last node that all of what is computed from both goes through, its steps, the nodes."""
    values = dict(halves)
    like = min(halves)
    steps: list[Any] = []
    best: tuple[fx.Node, list[Any], set[fx.Node]] | None = None
    for node in _later(like):
        if node in values or values.keys().isdisjoint(node.all_input_nodes):
            continue
        step = _step(node, like, values)
        if step is None:
            continue
        steps += step
        values[node] = len(steps) + 1 if step else values[node.all_input_nodes[0]]
        inside = {*values} - {node}
        is_end = all(user in values for each in inside for user in fx_utils.users(each))
        is_last = bool(steps) and values[node] == len(steps) + 1
        if is_end and is_last and _reads_both(steps) and fx_utils.value(node).dtype == dtype:
            best = node, list(steps), inside
    return best


def _later(node: fx.Node) -> Iterator[fx.Node]:
    """The calls after ``node``, in order."""
    node = node.next
    while node.op != "output":
        if node.op == "call_function":
            yield node
        node = node.next


def _reads_both(steps: list[Any]) -> bool:
    numbers = {item for step in steps for item in step[1:] if isinstance(item, int)}
    return {0, 1} <= numbers


def _step(node: fx.Node, like: fx.Node, values: dict[fx.Node, int]) -> list[Any] | None:
    """The steps that compute ``node``, none of a cast; None: a gate has no such op."""
    if not fx_utils.is_tensor_node(node) or fx_utils.value(node).dtype not in _FLOATS:
        return None
    if not fx_utils.same_shape(fx_utils.value(node).shape, fx_utils.value(like).shape):
        return None
    if node.target == CAST:
        return []
    operands: list[Any] = []

    def operand(item: Any) -> bool:
        if isinstance(item, fx.Node):
            if item not in values:
                return False
            operands.append(values[item])
            return True
        if isinstance(item, bool) or not isinstance(item, (int, float)) or math.isnan(item):
            return False
        operands.append(float(item))
        return True

    if node.target == aten.clamp.default:
        value, low, high = fx_utils.arguments(node, "self", "min", "max")
        if not operand(value) or not all(operand(b) for b in (low, high) if b is not None):
            return None
        number, *bounds = operands
        ops = [op for op, b in (("maximum", low), ("minimum", high)) if b is not None]
        found: list[Any] = []
        for op, bound in zip(ops, bounds, strict=True):
            found.append((op, number, bound))
            number = max(values.values()) + len(found)
        return found
    if node.target == aten.pow.Tensor_Scalar:
        value, power = node.args
        if power not in (2, 3) or not operand(value):
            return None
        [number] = operands
        square, cube = ("mul", number, number), ("mul", max(values.values()) + 1, number)
        return [square, cube] if power == 3 else [square]
    if node.target == aten.relu.default and operand(node.args[0]):
        return [("maximum", *operands, 0.0)]
    target: Any = node.target
    name = _OPS.get(target)
    if name is None or node.kwargs or not all(map(operand, node.args)):
        return None
    return [(name, *operands)]


def _between(call: fx.Node, wide: fx.Node) -> list[fx.Node]:
    found, node = [call], call
    while node is not wide:
        node = fx_utils.users(node)[0]
        found.append(node)
    return found


def _is_replaced(user: fx.Node, mask: fx.Node) -> bool:
    """Whether ``user``, a product with rows of its own, has the rows in ``mask`` replaced."""
    while user.target in _VIEWS and len(user.users) == 1:
        [user] = user.users
    is_product = user.target == experts.op and not is_gathering(user)
    return is_product and replaces_rows(user, mask)
