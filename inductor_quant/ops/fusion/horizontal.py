"""``torch.ops.inductor_quant.w8a8_horizontal`` and its siblings for ``fp8``, ``w4a8`` and
``weight_only``: several GEMMs of one activation, such as q, k and v, as one op that a kernel may
compute in one launch.

Each result equals that of the family's op and is a contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import fp8, w4a8, w8a8, weight_only
from inductor_quant.ops.registration import define

W8A8_SCHEMA = (
    "w8a8_horizontal(Tensor a, Tensor[] b, Tensor? a_scale, Tensor?[] b_scale, Tensor?[] bias, *, "
    "float alpha=1.0, ScalarType out_dtype) -> Tensor[]"
)
FP8_SCHEMA = (
    "fp8_horizontal(Tensor a, Tensor[] b, Tensor? a_scale, Tensor?[] b_scale, Tensor?[] bias, *, "
    "bool fast_accum=False, ScalarType out_dtype) -> Tensor[]"
)
W4A8_SCHEMA = (
    "w4a8_horizontal(Tensor a, Tensor[] weight, Tensor? a_scale, Tensor?[] b_scale, "
    "Tensor?[] bias, *, str[] format, float alpha=1.0, ScalarType out_dtype) -> Tensor[]"
)
WEIGHT_ONLY_SCHEMA = (
    "weight_only_horizontal(Tensor x, Tensor[] weight, Tensor?[] column_scale, Tensor?[] bias, *, "
    "str[] format, ScalarType out_dtype) -> Tensor[]"
)
# Largest M for which one launch is preferred, by family (lowering/README.md). Beyond these
# the kernels of packed weights and of FP8 have no horizontal launch, and w8a8 asks ``may_pay``.
MAX_ROWS = {"w8a8": 128, "fp8": 8, "w4a8": 16, "weight_only": 32}
# Of w8a8 with more rows: multiply-adds of one GEMM. One that has as many computes for 100 us and
# takes four rounds of tiles on each SM; of that its launch, and the last round, are a few percent.
MAX_PRODUCTS = 4096**3
TILE_N = 128  # columns of the tiles that are fastest there; none may belong to two GEMMs


def may_pay(m: int, n: int, k: int, out_dtype: torch.dtype) -> bool:
    """Whether a ``w8a8`` GEMM of more rows than ``MAX_ROWS`` gains by a launch with others.

    It is short enough for its launch and its last round of tiles to count, and whole tiles of the
    fast kernels are its own. Results of 32 bits have no such kernels, and what is fused into a
    single GEMM decides their type.
    """
    return m * n * k <= MAX_PRODUCTS and n % TILE_N == 0 and out_dtype.itemsize <= 2


Calls = Iterator[tuple[tuple[Any, ...], dict[str, Any]]]


def members_of_8_bits(
    a: Any,
    b: Sequence[Any],
    a_scale: Any,
    b_scale: Sequence[Any],
    bias: Sequence[Any],
    **options: Any,
) -> Calls:
    """Arguments of ``w8a8`` or ``fp8`` for each GEMM of ``w8a8_horizontal`` or ``fp8_horizontal``,
    whose results are ``op(a, b[i], a_scale, b_scale[i], bias[i], **options)`` for each i.

    Raises SpecError for lists of different lengths; the op also if one of the GEMMs does.
    """
    _check_lengths("a horizontal launch", b=b, b_scale=b_scale, bias=bias)
    for weight, scale, addend in zip(b, b_scale, bias, strict=True):
        yield (a, weight, a_scale, scale, addend), options


def weight_only_members(
    x: Any,
    weight: Sequence[Any],
    column_scale: Sequence[Any],
    bias: Sequence[Any],
    *,
    format: Sequence[str],
    out_dtype: torch.dtype,
) -> Calls:
    """Arguments of ``weight_only`` for each GEMM of ``weight_only_horizontal``, whose results are
    ``weight_only(x, weight of i, column_scale[i], bias[i], format=format[i], out_dtype=out_dtype)``
    for each i.

    ``weight`` lists the tensors of the first GEMM, then those of the second, ...: as many for each.
    Raises SpecError for lists of inconsistent lengths; the op also if one of the GEMMs does.
    """
    _check_lengths("weight_only_horizontal", format=format, column_scale=column_scale, bias=bias)
    each = _divided("weight_only_horizontal", weight, len(format))
    for text, tensors, scale, addend in zip(format, each, column_scale, bias, strict=True):
        yield (x, tensors, scale, addend), {"format": text, "out_dtype": out_dtype}


def w4a8_members(
    a: Any,
    weight: Sequence[Any],
    a_scale: Any,
    b_scale: Sequence[Any],
    bias: Sequence[Any],
    *,
    format: Sequence[str],
    **options: Any,
) -> Calls:
    """Arguments of ``w4a8`` for each GEMM of ``w4a8_horizontal``: as ``members_of_8_bits``, with
    weights as in ``weight_only_members``."""
    _check_lengths("w4a8_horizontal", format=format, b_scale=b_scale, bias=bias)
    each = _divided("w4a8_horizontal", weight, len(format))
    for text, tensors, scale, addend in zip(format, each, b_scale, bias, strict=True):
        yield (a, tensors, a_scale, scale, addend), {"format": text, **options}


def _divided(name: str, tensors: Sequence[Any], weights: int) -> list[list[Any]]:
    """The tensors of each weight."""
    count, rest = divmod(len(tensors), weights)
    if rest:
        raise SpecError(
            f"{name}: {len(tensors)} tensors for {weights} weights; each needs the same number"
        )
    return [list(tensors[i * count : (i + 1) * count]) for i in range(weights)]


def _check_lengths(name: str, **lists: Sequence[Any]) -> None:
    lengths = {key: len(values) for key, values in lists.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise SpecError(f"{name}: {lengths}; every list needs one entry per GEMM, and at least one")


def _each(op: Callable[..., Any], members: Callable[..., Calls]) -> Callable[..., Any]:
    """A function that calls ``op`` for each GEMM."""
    return lambda *args, **kwargs: [op(*a, **k) for a, k in members(*args, **kwargs)]


w8a8_op, fp8_op, w4a8_op, weight_only_op = (
    define(
        schema,
        _each(family.reference, members),
        _each(family.fake, members),
        flexible_layout=True,
    )
    for schema, family, members in (
        (W8A8_SCHEMA, w8a8, members_of_8_bits),
        (FP8_SCHEMA, fp8, members_of_8_bits),
        (W4A8_SCHEMA, w4a8, w4a8_members),
        (WEIGHT_ONLY_SCHEMA, weight_only, weight_only_members),
    )
)
