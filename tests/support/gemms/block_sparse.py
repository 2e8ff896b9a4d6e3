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
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec
from tests.support.gemms.weight_only import laid_out


@dataclasses.dataclass(frozen=True)
class Case:
    """x [M, K] times a W [N, K] in blocks of ``block``, of which ``zeros`` are not stored.

    stored  dtype of the values, if not ``dtype``
    scale   "rows", "blocks", "rows_of_blocks"
    values  "listed": in the order of their rows; "placed": in another order; "in_place": W is dense
    rows    of blocks that have one list of columns
    layout  of x, as in ``weight_only.laid_out``
    """

    m: int
    n: int
    k: int
    block: tuple[int, int] = (32, 32)
    zeros: float = 0.5
    dtype: torch.dtype = torch.bfloat16
    stored: torch.dtype | None = None
    scale: str = ""
    values: str = "listed"
    rows: int = 1
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
    def numbers(self) -> list[int]:
        """Where each of them is in the stored values."""
        found = list(range(len(self.blocks)))
        return random.Random(1).sample(found, len(found)) if self.values == "placed" else found

    @property
    def counts(self) -> list[int]:
        """Stored blocks of each row."""
        rows = [row for row, _ in self.blocks]
        return [rows.count(row) for row in range(self.n // self.block[0])]


def make_inputs(case: Case, device: str) -> tuple[Any, ...]:
    """The arguments of the op: x, values, crow, col, place, order, scale, bias."""
    (block_n, block_k), blocks, counts = case.block, case.blocks, case.counts

    def drawn(*shape: int, dtype: torch.dtype = case.stored or case.dtype) -> torch.Tensor:
        spread = 40 if dtype == torch.int8 else 1
        return (spread * torch.randn(*shape, device=device)).to(dtype)

    def table(values: Iterable[int]) -> torch.Tensor:
        # Not ``to``: of a single number torch 2.15 converts a fake tensor on a real device.
        found = torch.tensor(list(values), dtype=case.index_dtype)
        return torch.empty(found.shape, dtype=found.dtype, device=device).copy_(found)

    place = order = scale = bias = None
    if case.values == "in_place":
        dense = drawn(case.n, case.k)
        shape = case.n // block_n, block_n, case.k // block_k, block_k
        values = dense.view(shape).permute(0, 2, 1, 3)
    else:
        values = drawn(len(blocks), block_n, block_k)
    columns = [column for _, column in blocks]
    if case.values == "placed":
        place = table(case.numbers)
    if case.rows > 1:
        known = dict(zip(blocks, case.numbers, strict=True))
        groups = sorted({(row // case.rows, column) for row, column in blocks})
        columns = [column for _, column in groups]
        counts = [[g for g, _ in groups].count(i) for i in range(len(counts) // case.rows)]
        listed = [
            known.get((g * case.rows + i, c), -1) for g, c in groups for i in range(case.rows)
        ]
        place = table(listed).view(-1, case.rows)
    if case.order:
        order = table(sorted(range(len(counts)), key=lambda row: -counts[row]))
    if case.scale:
        sizes = (case.n,) if case.scale == "rows" else (len(blocks), block_n)
        scale = torch.rand(sizes, device=device) / 10 + 0.01
        scale = scale[:, :1].contiguous() if case.scale == "blocks" else scale
    if case.bias:
        bias = drawn(case.n, dtype=case.dtype)
    x = laid_out(drawn(case.m, case.k, dtype=case.dtype), case.layout)
    crow, col = table([0, *itertools.accumulate(counts)]), table(columns)
    return x, values, crow, col, place, order, scale, bias


def gemm(case: Case) -> Callable[..., torch.Tensor]:
    """The canonical op on what ``make_inputs`` gives."""

    def fn(*tensors: Any) -> torch.Tensor:
        return block_sparse.op(*tensors, n=case.n)

    return fn


def described(case: Case) -> tuple[QuantGemmSpec, Problem]:
    """(spec, problem) of a case."""
    block_n, block_k = case.block
    shared = {"rows": (-1, 1), "blocks": (block_k, block_n), "rows_of_blocks": (block_k, 1)}
    spec = block_sparse.make_spec(
        case.dtype,
        case.block,
        len(case.blocks),
        bias=case.bias,
        stored=case.stored,
        rows=case.rows,
        scale=ScaleSpec(torch.float32, shared[case.scale]) if case.scale else None,
    )
    return spec, Problem(case.m, case.n, case.k, has_aligned_rows=True, has_weight_descriptors=True)


def dense(case: Case, inputs: tuple[Any, ...], *, rounds: bool = True) -> torch.Tensor:
    """W [N, K] in fp64 on the CPU, block by block; ``rounds``: where the op rounds."""
    x, values, *_, scale, _ = (None if t is None else t.cpu() for t in inputs)
    block_n, block_k = case.block
    if scale is not None and scale.dim() == 2:
        scaled = (values.float() * scale[:, :, None]).to(x.dtype)
        values = scaled if rounds else values.double() * scale[:, :, None].double()
    w = torch.zeros(case.n, case.k, dtype=torch.float64)
    for p, (r, c) in zip(case.numbers, case.blocks, strict=True):
        block = values[r, c] if values.dim() == 4 else values[p]
        w[r * block_n : (r + 1) * block_n, c * block_k : (c + 1) * block_k] = block.double()
    return w if scale is None or scale.dim() == 2 else w * scale.double()[:, None]


def reference(case: Case, inputs: tuple[Any, ...], *, rounds: bool = True) -> torch.Tensor:
    """The product in fp64 on the CPU."""
    out = inputs[0].cpu().double() @ dense(case, inputs, rounds=rounds).t()
    return out if inputs[-1] is None else out + inputs[-1].cpu().double()
