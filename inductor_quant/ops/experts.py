"""``torch.ops.inductor_quant.experts``: each row of x times the quantized weight of its expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import weight_only
from inductor_quant.ops.checks import check, differ
from inductor_quant.ops.gate import gated
from inductor_quant.ops.registration import define
from inductor_quant.spec.gate import Gate
from inductor_quant.spec.gemm import QuantGemmSpec
from inductor_quant.spec.weight_format import Field, WeightFormat

__all__ = ["MAX_MEAN_ROWS", "fake", "max_mean_rows", "op", "reference", "spec_of"]

SCHEMA = (
    "experts(Tensor x, Tensor[] weight, Tensor? offsets, Tensor? ids, Tensor? rows=None, "
    "Tensor? bias=None, Tensor? bias_rows=None, *, int repeats=1, str gate='', str format, "
    "ScalarType out_dtype) -> Tensor"
)
INDEX_DTYPES = (torch.int32, torch.int64)
# Rows an expert, in the mean, above which dequantizing the stack and one ``_grouped_mm`` may be
# faster: kernels dequantize a weight for each tile of its rows. On sm_90 for weights that tiles of
# 256 rows are read from.
MAX_MEAN_ROWS, MAX_MEAN_ROWS_SM90 = 64, 2048
_PACKED, _TILE_K = (torch.int8, torch.uint8, torch.int32), 64


def max_mean_rows(
    format: WeightFormat, dtypes: Sequence[torch.dtype], x_dtype: torch.dtype, *, is_sm90: bool
) -> int:
    """The most rows an expert, in the mean, up to which the op is faster than the stack in
    ``x_dtype`` and ``_grouped_mm``. ``dtypes``: of the tensors of ``format``."""
    code, (k, _) = format.code, format.shape
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    is_whole = not (code.wrap or code.size or code.minus or code.high or code.offset.is_data)
    is_packed = is_whole and code.width <= 8 and dtypes[code.source] in _PACKED
    is_grouped = all(format.block(field)[0] != 1 for field in operands)
    of_sums = len(format.column_ops) if x_dtype == torch.bfloat16 else 0
    loop_ops = format.dequant_ops[: len(format.dequant_ops) - of_sums]
    is_grouped &= all(op.kind != "div" for op in loop_ops)
    in_word = [name for name in format.digits("k") if name in code.offset.digits]
    is_grouped &= format.digits("k")[len(format.digits("k")) - len(in_word) :] == in_word
    has_tiles = k % _TILE_K == 0 and not any(index.is_data or index.tables for index in code.index)
    if is_sm90 and x_dtype.itemsize == 2 and is_packed and is_grouped and has_tiles:
        return MAX_MEAN_ROWS_SM90
    return MAX_MEAN_ROWS


def reference(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    offsets: torch.Tensor | None,
    ids: torch.Tensor | None,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_rows: torch.Tensor | None = None,
    *,
    repeats: int = 1,
    gate: str = "",
    format: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``out[s, n] = sum over k of x[r(s), k] * W[e(s), k, n]``, where e(s) is the expert of row s,
    and r(s) the row of x, ``rows[s] // repeats``, or ``s // repeats`` without ``rows``.

    Exactly one of ``offsets`` and ``ids`` says which:
        offsets  rows are sorted by expert: e has rows ``offsets[e - 1]`` (0 for the first) up to
                 ``offsets[e]``; rows from ``offsets[E - 1]`` on have none, and give 0
        ids      ``e(s) = ids[s]``, in any order; below 0 it counts from the end

    Shapes and dtypes:
        x        [T, K]      bf16, fp16 or fp32; S = T * repeats without ``rows``
        weight   any shapes  the tensors that the format's fields index
        offsets  [E]         int32 or int64; rising, from 0 to S
        ids      [S]         int32 or int64; -E to E - 1
        rows     [S]         int32 or int64; -T * repeats to T * repeats - 1, in any order
        bias     [B, N]      float; row ``bias_rows[s]`` is added to the product's row s
        bias_rows [S]        int32 or int64; -B to B - 1
        format   ``WeightFormat.encode()`` of a stack [E, K, N]
        gate     ``Gate.encode()``, or "": of the columns of the product, with the bias, in fp32
    Returns [S, N] in ``out_dtype`` (bf16, fp16 or fp32), contiguous; with a gate [S, N / 2].
    Rounding as of ``weight_only``. A bias comes with a gate.

    Raises SpecError for other shapes or dtypes, or if ``format`` does not fit the tensors. Offsets,
    ids and rows beyond their range are not checked: they select some expert, or row.
    """
    parsed = weight_only.decode(format)
    spec_of(x, weight, offsets, ids, parsed, out_dtype, rows, repeats)
    found = gate_of(gate, parsed, bias, bias_rows, count_of(x, rows, repeats))
    x = gathered(x, rows, repeats)
    out = torch.zeros(x.shape[0], parsed.shape[1], dtype=torch.float32, device=x.device)
    for expert, its in enumerate(rows_of_each(parsed.experts, offsets, ids)):
        if len(its):
            out[its] = weight_only.product(x[its], parsed, weight, expert)
    if bias is not None:
        out += bias[bias_rows]
    if found is not None:
        return gated(out, found, out_dtype, lambda op, *args: op(*args)).contiguous()
    return out.to(out_dtype)


def gate_of(
    gate: str,
    format: WeightFormat,
    bias: torch.Tensor | None,
    bias_rows: torch.Tensor | None,
    count: int,
) -> Gate | None:
    """The gate of a call. Raises SpecError for one that does not suit the weight."""
    n = format.shape[1]
    if (bias is None) != (bias_rows is None) or (bias is not None and not gate):
        raise SpecError("a bias of experts comes with its rows, and with a gate")
    if bias is not None and (bias.dim() != 2 or differ(bias.shape[1:], (n,))):
        raise SpecError(f"the bias of experts is {list(bias.shape)}, it must be [B, {n}]")
    check("experts", {"bias_rows": (bias_rows, ((count,),), INDEX_DTYPES)})
    if gate and n % 2:
        raise SpecError(f"a gate of {n} columns")
    try:
        return Gate.decode(gate) if gate else None
    except ValueError as error:
        raise SpecError(str(error)) from error


def gathered(x: torch.Tensor, rows: torch.Tensor | None, repeats: int) -> torch.Tensor:
    """The row of x of each row of the product."""
    x = x.repeat_interleave(repeats, 0) if repeats > 1 else x
    return x if rows is None else x[rows]


def count_of(x: torch.Tensor, rows: torch.Tensor | None, repeats: int) -> int:
    """The number of rows of the product."""
    return x.shape[0] * repeats if rows is None else rows.shape[0]


def rows_of_each(
    experts: int, offsets: torch.Tensor | None, ids: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """The rows of each expert."""
    start = 0
    for expert in range(experts):
        if offsets is not None:
            end = int(offsets[expert])
            yield torch.arange(start, max(start, end), device=offsets.device)
            start = end
        else:
            assert ids is not None
            yield (ids.remainder(experts) == expert).nonzero().flatten()


def fake(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    offsets: torch.Tensor | None,
    ids: torch.Tensor | None,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_rows: torch.Tensor | None = None,
    *,
    repeats: int = 1,
    gate: str = "",
    format: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    parsed = weight_only.decode(format)
    spec_of(x, weight, offsets, ids, parsed, out_dtype, rows, repeats)
    count = count_of(x, rows, repeats)
    found = gate_of(gate, parsed, bias, bias_rows, count)
    shape = (count, parsed.shape[1] // (1 if found is None else 2))
    return torch.empty(shape, dtype=out_dtype, device=x.device)


def spec_of(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    offsets: torch.Tensor | None,
    ids: torch.Tensor | None,
    format: WeightFormat,
    out_dtype: torch.dtype,
    rows: torch.Tensor | None = None,
    repeats: int = 1,
) -> QuantGemmSpec:
    """The spec of a call. Raises SpecError for arguments that form no such product.

    Symbolic sizes are not checked: that would add a guard.
    """
    k, _ = weight_only.check_format(format, tuple((t.dtype, tuple(t.shape)) for t in weight))
    if not format.e:
        raise SpecError(f"experts: {format} is no stack of weights")
    if x.dtype not in weight_only.X_DTYPES or x.dim() != 2 or differ(x.shape[1:], (k,)):
        raise SpecError(
            f"experts: x is {x.dtype} {list(x.shape)}, it must be [T, {k}] of one of "
            f"{weight_only.X_DTYPES}"
        )
    if (offsets is None) == (ids is None):
        raise SpecError("experts takes either offsets or ids")
    check("experts", routes(x, offsets, ids, rows, repeats, format.experts))
    if out_dtype not in weight_only.SCALE_DTYPES:
        raise SpecError(f"experts returns one of {weight_only.SCALE_DTYPES}, not {out_dtype}")
    return weight_only.make_spec(
        format,
        [t.dtype for t in weight],
        x_dtype=x.dtype,
        column_scale=None,
        out_dtype=out_dtype,
        bias=False,
    )


def routes(
    x: torch.Tensor,
    offsets: torch.Tensor | None,
    ids: torch.Tensor | None,
    rows: torch.Tensor | None,
    repeats: int,
    experts: int,
) -> dict[str, Any]:
    """What ``check`` asks of the tensors that say which row of x and which expert a row has.

    Raises SpecError for no number of repeats."""
    if repeats < 1:
        raise SpecError(f"repeats is {repeats}, it must be positive")
    count = (count_of(x, rows, repeats),)
    return {
        "offsets": (offsets, ((experts,),), INDEX_DTYPES),
        "ids": (ids, (count,), INDEX_DTYPES),
        "rows": (rows, (count,), INDEX_DTYPES),
    }


op = define(SCHEMA, reference, fake, flexible_layout=True)
