"""The arithmetic of a ``Gate`` on tensors, or, in a lowering, on what Inductor makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inductor_quant.spec.gate import Gate

aten, prims = torch.ops.aten, torch.ops.prims
_TENSORS = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
    "neg": aten.neg.default,
    "exp": aten.exp.default,
    "sigmoid": aten.sigmoid.default,
    "tanh": aten.tanh.default,
    "erf": aten.erf.default,
    "maximum": aten.maximum.default,
    "minimum": aten.minimum.default,
}
_SCALARS = {"maximum": aten.clamp_min.default, "minimum": aten.clamp_max.default}


def gated(y: Any, gate: Gate, dtype: torch.dtype, call: Callable[..., Any]) -> Any:
    """``gate`` of y [S, 2 J] as [S, J] in ``dtype``. ``call``: (op, *args) -> the op's result."""
    y = call(prims.convert_element_type.default, y, torch.float32)
    wide = (y.shape if isinstance(y, torch.Tensor) else y.get_size())[1]
    if gate.is_interleaved:
        first, second = (call(aten.slice.Tensor, y, 1, start, wide, 2) for start in (0, 1))
    else:
        bounds = ((0, wide // 2), (wide // 2, wide))
        first, second = (call(aten.slice.Tensor, y, 1, *each) for each in bounds)

    def apply(op: str, *operands: Any) -> Any:
        a, *others = operands
        if isinstance(a, float):  # a constant comes first where it cannot be second
            # As a tensor, NaN where the other is: by ops that have lowerings.
            a = call(aten.clamp_min.default, call(aten.clamp_max.default, others[0], a), a)
        is_bound = others and isinstance(others[0], float)
        return call(_SCALARS.get(op, _TENSORS[op]) if is_bound else _TENSORS[op], a, *others)

    return call(prims.convert_element_type.default, gate.evaluate(first, second, apply), dtype)
