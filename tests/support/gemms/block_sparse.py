"""Inputs of block-sparse products in awkward layouts, and their fp64 reference."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch

from inductor_quant.kernels.problem import Problem
from inductor_quant.ops import block_sparse
from inductor_quant.spec.gemm import QuantGemmSpec
from tests.support.gemms.weight_only import laid_out


@dataclasses.dataclass(frozen=True)
class Case:
    """x [M, K] times a W [N, K] in blocks of ``block``, of which ``zeros`` are not stored.

    values  "listed": in the order of their rows; "placed": in another order; "in_place": W is dense
    layout  of x, as in ``weight_only.laid_out``
    """

    m: int
    n: int
    k: int
    block: tuple[int, int] = (32, 32)
    zeros: float = 0.5
    dtype: torch.dtype = torch.bfloat16
    values: str = "listed"
    order: bool = False
    bias: bool = False
    index_dtype: torch.dtype = torch.int32
    layout: str = "rows"

    def __str__(self) -> str:
        text = f"{self.m}x{self.n}x{self.k}"
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                text += f"-{field.name}={value}".replace("torch.", "").replace(" ", "")
        return text

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """(row, column) of each stored block, in order. Row 1 has none, row 2 all."""
        rows, columns = self.n // self.block[0], self.k // self.block[1]
        draw = random.Random(0)
        share = [1 - self.zeros] * rows
        if 0 < self.zeros < 1 and rows > 2:
            share[1:3] = 0, 1
        places = itertools.product(range(rows), range(columns))
        return [place for place in places if draw.random() < share[place[0]]]

    @property
    def counts(self) -> list[int]:
        """Stored blocks of each row."""
        rows = [row for row, _ in self.blocks]
        return [rows.count(row) for row in range(self.n // self.block[0])]


def make_inputs(case: Case, device: str) -> tuple[Any, ...]:
    """The arguments of the op: x, values, crow, col, place, order, bias."""
    (block_n, block_k), blocks, counts = case.block, case.blocks, case.counts

    def table(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=case.index_dtype).to(device)

    place = order = bias = None
    if case.values == "in_place":
        dense = torch.randn(case.n, case.k, device=device).to(case.dtype)
        shape = case.n // block_n, block_n, case.k // block_k, block_k
        values = dense.view(shape).permute(0, 2, 1, 3)
    else:
        values = torch.randn(len(blocks), block_n, block_k, device=device).to(case.dtype)
    if case.values == "placed":
        place = table(random.Random(1).sample(range(len(blocks)), len(blocks)))
    if case.order:
        order = table(sorted(range(len(counts)), key=lambda row: -counts[row]))
    if case.bias:
        bias = torch.randn(case.n, device=device).to(case.dtype)
    x = laid_out(torch.randn(case.m, case.k, device=device).to(case.dtype), case.layout)
    crow, col = table([0, *itertools.accumulate(counts)]), table(column for _, column in blocks)
    return x, values, crow, col, place, order, bias


def gemm(case: Case) -> Callable[..., torch.Tensor]:
    """The canonical op on what ``make_inputs`` gives."""

    def fn(*tensors: Any) -> torch.Tensor:
        return block_sparse.op(*tensors, n=case.n)

    return fn


def described(case: Case) -> tuple[QuantGemmSpec, Problem]:
    """(spec, problem) of a case."""
    spec = block_sparse.make_spec(case.dtype, case.block, len(case.blocks), bias=case.bias)
    return spec, Problem(case.m, case.n, case.k, has_aligned_rows=True)


def dense(case: Case, inputs: tuple[Any, ...]) -> torch.Tensor:
    """W [N, K] in fp64 on the CPU, block by block."""
    _, values, _, _, place, *_ = (None if t is None else t.cpu() for t in inputs)
    block_n, block_k = case.block
    w = torch.zeros(case.n, case.k, dtype=torch.float64)
    for p, (r, c) in enumerate(case.blocks):
        block = values[r, c] if values.dim() == 4 else values[p if place is None else place[p]]
        w[r * block_n : (r + 1) * block_n, c * block_k : (c + 1) * block_k] = block
    return w


def reference(case: Case, inputs: tuple[Any, ...]) -> torch.Tensor:
    """The product in fp64 on the CPU."""
    out = inputs[0].cpu().double() @ dense(case, inputs).t()
    return out if inputs[-1] is None else out + inputs[-1].cpu().double()
