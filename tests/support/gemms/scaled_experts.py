"""Inputs of ``scaled_experts`` calls with any routing, and their fp64 reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from inductor_quant.ops import scaled_experts
from tests.support.gemms.experts import chosen_rows, of_rows, tokens_of

e4m3, i8 = torch.float8_e4m3fn, torch.int8


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    counts     rows of each expert
    block      (block_k, block_n); None: a scale for each row, and for each column of an expert
    left_over  rows without an expert, which come last; of sorted rows only
    is_sorted  whether offsets or ids say which expert a row has; ids are in another order, some
               count from the end
    k_major    whether a weight is contiguous along K, as TMA reads it
    repeats, has_rows  as of ``experts``
    """

    counts: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype = e4m3
    block: tuple[int, int] | None = None
    left_over: int = 0
    is_sorted: bool = True
    k_major: bool = True
    scale_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.bfloat16
    has_scales: bool = True
    fast_accum: bool = False
    repeats: int = 1
    has_rows: bool = False

    def __str__(self) -> str:
        text = f"{'_'.join(map(str, self.counts))}-{self.n}x{self.k}"
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                text += f"-{field.name}={value}".replace("torch.", "").replace(" ", "")
        return text

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.left_over

    @property
    def tokens(self) -> int:
        """The rows of a."""
        return tokens_of(self.rows, self.repeats, has_rows=self.has_rows)

    @property
    def kwargs(self) -> dict[str, Any]:
        block_k, block_n = self.block or (0, 1)
        fast = {"fast_accum": True} if self.fast_accum else {}
        repeats = {"repeats": self.repeats} if self.repeats > 1 else {}
        own = {"block_k": block_k, "block_n": block_n, "out_dtype": self.out_dtype}
        return own | fast | repeats


def make_inputs(case: Case, device: str) -> tuple[Any, ...]:
    """a, b, offsets or ids, rows if it has any, and unless it has none a_scale and b_scale; all
    scales differ, and those of rows without an expert are NaN.
    ``device``: "cpu", or "cuda" for fake tensors."""
    count, (block_k, block_n) = len(case.counts), case.block or (case.k, 1)
    k_blocks = -(-case.k // block_k)
    b_shape = (count, case.n, case.k) if case.k_major else (count, case.k, case.n)
    a, b = (_elements(shape, case.dtype, device) for shape in ((case.tokens, case.k), b_shape))
    scales = (
        _scales((case.tokens, k_blocks), case.scale_dtype, device),
        _scales((count, k_blocks, -(-case.n // block_n)), case.scale_dtype, device),
    )
    if device != "cuda" and not case.has_rows:
        scales[0][-(-sum(case.counts) // case.repeats) :] = math.nan
    rows = [chosen_rows(case.rows, case.tokens * case.repeats, device)] if case.has_rows else []
    inputs = (a, b.transpose(1, 2) if case.k_major else b, _route(case, device), *rows)
    return (*inputs, *scales) if case.has_scales else inputs


def _elements(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if device == "cuda":  # fake tensors
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype == i8:
        return torch.randint(-128, 128, shape).to(i8)
    return torch.randn(shape).to(dtype)


def _scales(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if device == "cuda":  # fake tensors
        return torch.empty(shape, dtype=dtype, device=device)
    return (torch.rand(shape) + 0.5).to(dtype)


def _route(case: Case, device: str) -> torch.Tensor:
    count = len(case.counts)
    if device == "cuda":  # fake tensors
        size, dtype = (count, torch.int32) if case.is_sorted else (case.rows, torch.int64)
        return torch.empty(size, dtype=dtype, device=device)
    if case.is_sorted:
        return torch.tensor(case.counts).cumsum(0).to(torch.int32)
    ids = torch.arange(count).repeat_interleave(torch.tensor(case.counts))
    last = torch.arange(case.rows) % 3 == 1
    return ids[torch.randperm(case.rows)] - count * last


def gemm(case: Case) -> Callable[..., torch.Tensor]:
    """The canonical op on what ``make_inputs`` gives."""

    def fn(a, b, route, *others):  # type: ignore[no-untyped-def]
        routes = (route, None) if case.is_sorted else (None, route)
        rows, scales = (others[0], others[1:]) if case.has_rows else (None, others)
        return scaled_experts.op(a, b, *(scales or (None, None)), *routes, rows, **case.kwargs)

    return fn


def reference(case: Case, inputs: tuple[Any, ...]) -> torch.Tensor:
    """The op in fp64 on the CPU."""
    a, b, route, *scales = (t.cpu() for t in inputs)
    rows = scales.pop(0) if case.has_rows else None
    count, (block_k, block_n) = len(case.counts), case.block or (case.k, 1)
    left, right = a.double(), b.double()
    if scales:
        left = left * scales[0].double().repeat_interleave(block_k, 1)[:, : case.k]
        wide = scales[1].double().repeat_interleave(block_k, 1)[:, : case.k]
        right = right * wide.repeat_interleave(block_n, 2)[:, :, : case.n]
    left = of_rows(left, rows, case.repeats)
    if case.is_sorted:
        counts = torch.tensor((*case.counts, case.left_over))
        chosen = torch.arange(count + 1).repeat_interleave(counts)
    else:
        chosen = route % count
    out = torch.zeros(case.rows, case.n, dtype=torch.float64)
    for expert in range(count):
        out[chosen == expert] = left[chosen == expert] @ right[expert]
    return out
