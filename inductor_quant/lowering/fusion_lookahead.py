"""What the scheduler will fuse after a GEMM: a look at the users of its node."""

from __future__ import annotations

import torch
from torch import fx

from inductor_quant.ops.fusion import quantized_linear, row_reduce

aten = torch.ops.aten
_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
# The same elements in another order.
_MOVES = (*_VIEWS, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dims)
_REDUCTIONS = (aten.amax.default, aten.amin.default, row_reduce.op)


def is_narrowed(node: fx.Node | None) -> bool:
    """Whether the elementwise users of ``node``, which the scheduler fuses into its kernel, all end
    in a type narrower than fp32: then the fp32 result is never stored.

    ``gelu(linear(x))`` in bf16 is an example: the graph has no cast between the two.
    """
    if node is None or not node.users:
        return False
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            value = user.meta.get("val")
            if user in seen:
                continue
            if user.op == "output" or not isinstance(value, torch.Tensor):
                return False
            if not _is_elementwise(user):
                return False
            if value.dtype.itemsize >= torch.float32.itemsize:
                seen.add(user)
                todo.append(user)
    return True


def lost_fusions(node: fx.Node) -> int:
    """How many more kernels the epilogues take if ``node``, a horizontal launch, computes its GEMMs
    as one matrix: elementwise users are fused into the kernel of a GEMM, not into that of a slice.

    silu(gate) * up counts as one. Rotary embedding does not count, since it also reads other
    positions of a result; nor does the input of a row reduction, such as per-token quantization,
    whose kernel computes it in any case.
    """
    fused: list[set[fx.Node]] = []
    for result in node.users:
        if found := _readers(result):
            met = [other for other in fused if other & found]
            fused = [other for other in fused if not other & found] + [found.union(*met)]
    return sum(not any(map(_is_reduced, nodes)) for nodes in fused)


def _readers(result: fx.Node) -> set[fx.Node]:
    """The nodes computed elementwise from ``result``; none if other nodes read it too."""
    as_it_is, found = {result}, set[fx.Node]()
    todo = [result]
    while todo:
        node = todo.pop()
        for user in node.users:
            is_move = user.target in _MOVES or _is_cast(user)
            if node in as_it_is and is_move:
                as_it_is.add(user)
            elif not _is_elementwise(user) and not is_move:
                if node in as_it_is:
                    return set()
                continue
            elif user in found:
                continue
            else:
                found.add(user)
            todo.append(user)
    return found


def _is_reduced(node: fx.Node) -> bool:
    return any(
        user.target in _REDUCTIONS or (user.target is quantized_linear.op and user.args[2] is None)
        for user in node.users
    )


def _is_elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.target in _VIEWS or torch.Tag.pointwise in tags or _is_cast(node)


def _is_cast(node: fx.Node) -> bool:
    return node.target is torch.ops.prims.convert_element_type.default
