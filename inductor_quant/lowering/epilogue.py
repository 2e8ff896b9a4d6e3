"""What becomes of a GEMM's result before it is stored: a look at the nodes behind it."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten
_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def is_narrowed(node: fx.Node | None) -> bool:
    """Whether all that is computed from ``node`` element by element, which the scheduler fuses into
    its kernel, ends in a narrower type: then an fp32 result is not stored as such.

    ``gelu(linear(x))`` in bf16 is an example: the recogniser sees no cast between the two.
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


def _is_elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.target in _VIEWS or torch.Tag.pointwise in tags or _is_cast(node)


def _is_cast(node: fx.Node) -> bool:
    return node.target is torch.ops.prims.convert_element_type.default
