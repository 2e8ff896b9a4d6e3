"""``torch.ops.inductor_quant.group_reduce`` and ``group_value``: group reductions at full size.

Group quantization reduces [M, G, L] to [M, G], computes scales, and broadcasts them to [M, G, L].
These ops do it without the small tensor: every element holds its group's value. See
``lowering/fusion/group_reduce.py``.
"""

from __future__ import annotations

import torch

from inductor_quant.ops.registration import define

aten = torch.ops.aten
KINDS = {"amax": aten.amax.default, "amin": aten.amin.default}
REDUCE_SCHEMA = "group_reduce(Tensor x, str kind, int size) -> Tensor"
VALUE_SCHEMA = "group_value(Tensor x, int size, bool along_rows=False) -> Tensor"


def reduce_reference(x: torch.Tensor, kind: str, size: int) -> torch.Tensor:
    """For each element the amax, amin or absmax (``kind``) of its group; NaN propagates.

    x: [..., K], any float; groups of ``size``, which divides K. Returns the shape and dtype of x,
    contiguous.
    """
    groups = x.unflatten(-1, (x.shape[-1] // size, size))
    if kind == "absmax":
        groups, kind = groups.abs(), "amax"
    most = KINDS[kind](groups, [-1], True).expand(groups.shape)
    return most.clone(memory_format=torch.contiguous_format).reshape(x.shape)


def value_reference(x: torch.Tensor, size: int, along_rows: bool = False) -> torch.Tensor:
    """One element of each group: [M, K / size], contiguous; with ``along_rows``: strides (1, M).

    x: [..., K], any float, M rows, constant within each group.
    """
    value = x.reshape(-1, x.shape[-1])[:, ::size]
    value = value.t() if along_rows else value
    value = value.clone(memory_format=torch.contiguous_format)
    return value.t() if along_rows else value


reduce_op = define(REDUCE_SCHEMA, reduce_reference)
value_op = define(VALUE_SCHEMA, value_reference)
