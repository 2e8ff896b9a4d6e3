"""``torch.ops.inductor_quant.group_reduce`` and ``group_value``: groups within rows, at full size.

A quantization in groups reduces [M, G, L] to [M, G], computes scales, and broadcasts them over
[M, G, L] again. The ops say the same without a small tensor in between, in the shape of the rows:
every element has what its group has. See ``lowering/group_reduce.py``.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten
KINDS = {"amax": aten.amax.default, "amin": aten.amin.default}
REDUCE_SCHEMA = "group_reduce(Tensor x, str kind, int size) -> Tensor"
VALUE_SCHEMA = "group_value(Tensor x, int size, bool along_rows=False) -> Tensor"


def reduce_reference(x: torch.Tensor, kind: str, size: int) -> torch.Tensor:
    """Of each element the largest ("amax"), smallest ("amin") or largest absolute value ("absmax")
    of its group, NaN if there is one.

    x: [..., K], any float; a group is ``size`` neighbours along K, a multiple of ``size``. Returns
    the shape and dtype of x, contiguous.
    """
    groups = x.unflatten(-1, (x.shape[-1] // size, size))
    if kind == "absmax":
        groups, kind = groups.abs(), "amax"
    most = KINDS[kind](groups, [-1], True).expand(groups.shape)
    return most.clone(memory_format=torch.contiguous_format).reshape(x.shape)


def value_reference(x: torch.Tensor, size: int, along_rows: bool = False) -> torch.Tensor:
    """One element of each group, of rows in one dimension: [M, K / size].

    x: [..., K], any float, M rows; the same number throughout a group: which element is taken is
    not said. Contiguous, or with ``along_rows`` so that the values of the same group of all rows
    are neighbours: the strides are (1, M).
    """
    value = x.reshape(-1, x.shape[-1])[:, ::size]
    value = value.t() if along_rows else value
    value = value.clone(memory_format=torch.contiguous_format)
    return value.t() if along_rows else value


_library = torch.library.Library("inductor_quant", "FRAGMENT")
for _schema, _reference in ((REDUCE_SCHEMA, reduce_reference), (VALUE_SCHEMA, value_reference)):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"inductor_quant::{_name}", _reference, lib=_library)
reduce_op = torch.ops.inductor_quant.group_reduce.default
value_op = torch.ops.inductor_quant.group_value.default
