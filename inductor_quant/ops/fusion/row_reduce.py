"""``torch.ops.inductor_quant.row_reduce``: the amax, amin or absmax of each row."""

from __future__ import annotations

import torch

from inductor_quant.ops.registration import define

SCHEMA = "row_reduce(Tensor x, str kind, bool keepdim) -> Tensor"
aten = torch.ops.aten
KINDS = {"amax": aten.amax.default, "amin": aten.amin.default}


def reference(x: torch.Tensor, kind: str, keepdim: bool) -> torch.Tensor:
    """``aten.amax`` (kind "amax") or ``aten.amin`` ("amin") over the last dimension of ``x``, or
    the amax of ``|x|`` ("absmax").

    A separate op tells the lowering that the reduced rows are quantized next, see
    ``lowering/fusion/row_quant.py``.
    """
    if kind == "absmax":
        return aten.amax.default(x.abs(), [-1], keepdim)
    return KINDS[kind](x, [-1], keepdim)


op = define(SCHEMA, reference)
