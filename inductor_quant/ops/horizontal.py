"""``torch.ops.inductor_quant.w8a8_horizontal`` and ``weight_only_horizontal``: several GEMMs of one
activation, such as q, k and v, as one op that a kernel may compute in one launch.

Each result equals that of the family's op and is a contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import w8a8, weight_only

W8A8_SCHEMA = (
    "w8a8_horizontal(Tensor a, Tensor[] b, Tensor? a_scale, Tensor?[] b_scale, Tensor?[] bias, *, "
    "float alpha=1.0, ScalarType out_dtype) -> Tensor[]"
)
WEIGHT_ONLY_SCHEMA = (
    "weight_only_horizontal(Tensor x, Tensor[] weight, Tensor?[] column_scale, Tensor?[] bias, *, "
    "str[] format, ScalarType out_dtype) -> Tensor[]"
)
# Largest M for which one launch is preferred, by family (lowering/README.md). Beyond 32 the kernels
# of packed weights have no horizontal launch.
MAX_ROWS = {"w8a8": 128, "weight_only": 32}


def w8a8_reference(
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    a_scale: torch.Tensor | None,
    b_scale: Sequence[torch.Tensor | None],
    bias: Sequence[torch.Tensor | None],
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype,
) -> list[torch.Tensor]:
    """``w8a8(a, b[i], a_scale, b_scale[i], bias[i], alpha=alpha, out_dtype=out_dtype)`` for each i.

    Raises SpecError if one of them does, or for lists of different lengths.
    """
    return _each(w8a8.reference, w8a8_members, a, b, a_scale, b_scale, bias, alpha, out_dtype)


def w8a8_members(
    a: Any,
    b: Sequence[Any],
    a_scale: Any,
    b_scale: Sequence[Any],
    bias: Sequence[Any],
    alpha: float,
    out_dtype: torch.dtype,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of ``w8a8`` for each GEMM."""
    _check_lengths("w8a8_horizontal", b=b, b_scale=b_scale, bias=bias)
    for weight, scale, addend in zip(b, b_scale, bias, strict=True):
        yield (a, weight, a_scale, scale, addend), {"alpha": alpha, "out_dtype": out_dtype}


def weight_only_reference(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    column_scale: Sequence[torch.Tensor | None],
    bias: Sequence[torch.Tensor | None],
    *,
    format: Sequence[str],
    out_dtype: torch.dtype,
) -> list[torch.Tensor]:
    """``weight_only(x, weight of i, column_scale[i], bias[i], format=format[i],
    out_dtype=out_dtype)`` for each i.

    ``weight`` lists the tensors of the first GEMM, then those of the second, ...: as many for each.
    Raises SpecError if one of them does, or for lists of inconsistent lengths.
    """
    given = (x, weight, column_scale, bias, format, out_dtype)
    return _each(weight_only.reference, weight_only_members, *given)


def weight_only_members(
    x: Any,
    weight: Sequence[Any],
    column_scale: Sequence[Any],
    bias: Sequence[Any],
    format: Sequence[str],
    out_dtype: torch.dtype,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of ``weight_only`` for each GEMM."""
    _check_lengths("weight_only_horizontal", format=format, column_scale=column_scale, bias=bias)
    count, rest = divmod(len(weight), len(format))
    if rest:
        raise SpecError(
            f"weight_only_horizontal: {len(weight)} tensors for {len(format)} weights; each needs "
            "the same number"
        )
    for i, (text, scale, addend) in enumerate(zip(format, column_scale, bias, strict=True)):
        tensors = list(weight[i * count : (i + 1) * count])
        yield (x, tensors, scale, addend), {"format": text, "out_dtype": out_dtype}


def _check_lengths(name: str, **lists: Sequence[Any]) -> None:
    lengths = {key: len(values) for key, values in lists.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise SpecError(f"{name}: {lengths}; every list needs one entry per GEMM, and at least one")


def _each(op: Callable[..., Any], members: Callable[..., Any], *given: Any) -> list[torch.Tensor]:
    return [op(*args, **kwargs) for args, kwargs in members(*given)]


def _w8a8_fake(
    a: torch.Tensor, b: Any, a_scale: Any, b_scale: Any, bias: Any, *, alpha: float = 1.0, **kw: Any
) -> list[torch.Tensor]:
    given = (a, b, a_scale, b_scale, bias, alpha, kw["out_dtype"])
    return _each(w8a8.fake, w8a8_members, *given)


def _weight_only_fake(
    x: torch.Tensor, weight: Any, column_scale: Any, bias: Any, **kw: Any
) -> list[torch.Tensor]:
    given = (x, weight, column_scale, bias, kw["format"], kw["out_dtype"])
    return _each(weight_only.fake, weight_only_members, *given)


_library = torch.library.Library("inductor_quant", "FRAGMENT")
for _schema, _reference, _fake in (
    (W8A8_SCHEMA, w8a8_reference, _w8a8_fake),
    (WEIGHT_ONLY_SCHEMA, weight_only_reference, _weight_only_fake),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag))
    _library.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"inductor_quant::{_name}", _fake, lib=_library)
w8a8_op = torch.ops.inductor_quant.w8a8_horizontal.default
weight_only_op = torch.ops.inductor_quant.weight_only_horizontal.default
