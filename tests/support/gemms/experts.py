"""Inputs of ``experts`` calls with any routing, and their fp64 reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_quant.ops import experts
from inductor_quant.spec.gate import Gate
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat
from tests.support.gemms import formats, fp4
from tests.support.gemms.formats import Packed, form
from tests.support.gemms.weight_only import laid_out, rounded_weight
from tests.support.producers.experts import E2M1


def _silu(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first * first.sigmoid() * second


def _clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * (1.702 * gate).sigmoid()


def _every_op(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    bounded = torch.maximum(torch.minimum(first, second), second.tanh())
    return 2.0 - bounded.erf() * (-second).exp().clamp(max=2.0) / (1.0 / (second.abs() + 1))


def _steps(*steps: Any) -> tuple[Any, ...]:
    return tuple(steps)


# what is stored of a product's columns, and its formula
GATES: dict[str, tuple[Gate, Callable[..., torch.Tensor]]] = {
    "silu": (
        Gate(
            _steps(("neg", 0), ("exp", 2), ("add", 3, 1.0), ("div", 0, 4), ("mul", 5, 1)),
            is_interleaved=False,
        ),
        _silu,
    ),
    "clamped": (
        Gate(
            _steps(
                *(("maximum", 1, -7.0), ("minimum", 2, 7.0), ("add", 3, 1.0), ("minimum", 0, 7.0)),
                *(("mul", 5, 1.702), ("sigmoid", 6), ("mul", 5, 7), ("mul", 4, 8)),
            ),
            is_interleaved=True,
        ),
        _clamped,
    ),
    "every_op": (
        Gate(
            _steps(
                *(("minimum", 0, 1), ("tanh", 1), ("maximum", 2, 3), ("erf", 4), ("neg", 1)),
                *(("exp", 6), ("minimum", 7, 2.0), ("mul", 5, 8), ("maximum", 1, 6)),
                *(("add", 10, 1.0), ("div", 1.0, 11), ("div", 9, 12), ("sub", 2.0, 13)),
            ),
            is_interleaved=False,
        ),
        _every_op,
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; ``n`` and ``k`` are rounded up to what format ``name`` can have.

    counts     rows of each expert
    left_over  rows without an expert, which come last; of sorted rows only
    is_sorted  whether offsets or ids say which expert a row has; ids are in another order, some
               count from the end
    repeats    how many neighbouring rows share one of x
    has_rows   whether a tensor says which row of x a row has; some have the same, some none, some
               count from the end
    gate       a key of GATES, or "": the columns of the product
    has_bias   whether a row of a matrix is added before the gate, as a tensor says
    """

    name: str
    counts: tuple[int, ...]
    n: int
    k: int
    left_over: int = 0
    is_sorted: bool = True
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    layout: str = "rows"
    repeats: int = 1
    has_rows: bool = False
    gate: str = ""
    has_bias: bool = False

    def __str__(self) -> str:
        parts = [self.name, "_".join(map(str, self.counts)), f"{self.n}x{self.k}", str(self.dtype)]
        parts += [f"left={self.left_over}"] if self.left_over else []
        parts += ["sorted" if self.is_sorted else "ids"]
        parts += [self.layout] if self.layout != "rows" else []
        parts += [f"repeats={self.repeats}"] * (self.repeats > 1) + ["gathered"] * self.has_rows
        parts += [self.gate] * bool(self.gate) + ["bias"] * self.has_bias
        return "-".join(parts).replace("torch.", "")

    @property
    def packed(self) -> Packed:
        return packed_of(self.name, self.k, self.n)

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.left_over

    @property
    def tokens(self) -> int:
        """The rows of x."""
        return tokens_of(self.rows, self.repeats, has_rows=self.has_rows)


def tokens_of(rows: int, repeats: int, *, has_rows: bool) -> int:
    assert has_rows or rows % repeats == 0
    return max(1, rows // 2) if has_rows else rows // repeats


def chosen_rows(rows: int, tokens: int, device: str) -> torch.Tensor:
    """For each of ``rows``, one of ``tokens``."""
    if device == "cuda":  # fake tensors
        return torch.empty(rows, dtype=torch.int64, device=device)
    return torch.randint(-tokens, tokens, (rows,))


def of_rows(x: torch.Tensor, rows: torch.Tensor | None, repeats: int) -> torch.Tensor:
    x = torch.stack([x] * repeats, 1).flatten(0, 1)
    return x if rows is None else x[rows % len(x)]


def packed_of(name: str, k: int, n: int) -> Packed:
    """The weight of an expert; "mxfp4": in groups of 32."""
    if name == "looked_up":
        return looked_up(k, n)
    return fp4.mxfp4(k, n, 32) if name == "mxfp4" else formats.build(name, k, n)


def looked_up(k: int, n: int) -> Packed:
    """Groups of 16 bytes with 32 floats of 4 bits, neighbours along K in a byte; codes of scales,
    which are in a table."""
    code = Field(0, (form(("n0", 1)), form(("k0", 1)), form(("k1", 1))), form(("k2", 4)), 4)
    exponent = Field(2, (form(("n0", 1)), form(("k0", 1))))
    format = WeightFormat(
        (k // 32, 16, 2),
        (n,),
        Field(1, (form(data=code),)),
        (DequantOp("mul", Field(3, (form(data=exponent),))),),
    )

    def read(q, lut, s, powers):  # type: ignore[no-untyped-def]
        values = torch.stack((lut[(q & 15).int()], lut[(q >> 4).int()]), -1).flatten(-2).double()
        return (values * powers[s.int()].double().unsqueeze(-1)).flatten(-2).t()

    tensors = (
        ("bits", (n, k // 32, 16), torch.uint8),
        ("e2m1", (16,), torch.bfloat16),
        ("exponent", (n, k // 32), torch.uint8),
        ("powers", (256,), torch.bfloat16),
    )
    return Packed("looked_up", format, tensors, read)


SHARED = ("table", "shifts", "e2m1", "powers")  # kinds of tensors that all experts read


def stacked(packed: Packed, count: int) -> WeightFormat:
    """The format of a stack of weights: tensors, but for tables, have a dimension in front."""
    format = packed.format
    lead = (AffineIndex(linear=(("e0", 1),)),)

    def index(old: AffineIndex) -> AffineIndex:
        return dataclasses.replace(old, fields=tuple((field(f), c) for f, c in old.fields))

    def field(old: Field) -> Field:
        if old.is_position:
            return old
        return dataclasses.replace(
            old,
            index=(
                *(() if packed.tensors[old.source][0] in SHARED else lead),
                *map(index, old.index),
            ),
            offset=index(old.offset),
            minus=old.minus and field(old.minus),
            high=old.high and field(old.high),
        )

    def step(op: DequantOp) -> DequantOp:
        return DequantOp(
            op.kind, field(op.operand) if isinstance(op.operand, Field) else op.operand
        )

    steps = tuple(map(step, format.dequant_ops))
    return dataclasses.replace(format, element=field(format.element), dequant_ops=steps, e=(count,))


def make_inputs(case: Case, device: str) -> tuple[Any, ...]:
    """x, offsets or ids, rows if it has any, weight tensors. ``device``: "cpu", or "cuda" for fake
    tensors."""
    count, packed = len(case.counts), case.packed
    x = torch.randn(case.tokens, packed.format.shape[0], device=device).to(case.dtype)
    if device == "cuda":  # of fake tensors
        size = count if case.is_sorted else case.rows
        dtype = torch.int32 if case.is_sorted else torch.int64
        route = torch.empty(size, dtype=dtype, device=device)
    elif case.is_sorted:
        route = torch.tensor(case.counts).cumsum(0).to(torch.int32)
    else:
        ids = torch.arange(count).repeat_interleave(torch.tensor(case.counts))
        last = torch.arange(case.rows) % 3 == 1
        route = ids[torch.randperm(case.rows)] - count * last
    experts = [_tensors(case, device) for _ in range(count)]
    weight = [
        laid_out(each[0] if kind in SHARED else torch.stack(each), case.layout)
        for (kind, _, _), each in zip(packed.tensors, zip(*experts, strict=True), strict=True)
    ]
    rows = [chosen_rows(case.rows, case.tokens * case.repeats, device)] if case.has_rows else []
    inputs = laid_out(x, case.layout), route, *rows, *weight
    if not case.has_bias:
        return inputs
    bias = torch.randn(count + 1, packed.format.shape[1], device=device).to(torch.bfloat16)
    return *inputs, bias, chosen_rows(case.rows, count + 1, device)


def _tensors(case: Case, device: str) -> list[torch.Tensor]:
    """Random tensors of one weight."""
    if case.name != "looked_up":
        return case.packed.make(device)
    if device == "cuda":
        return [torch.empty(s, dtype=dtype, device=device) for _, s, dtype in case.packed.tensors]
    codes, _, exponents, _ = (shape for _, shape, _ in case.packed.tensors)
    powers = torch.exp2(torch.arange(256) - 127.0)
    return [
        torch.randint(0, 256, codes).to(torch.uint8),
        torch.tensor(E2M1, dtype=torch.bfloat16),
        torch.randint(118, 124, exponents).to(torch.uint8),
        powers.to(torch.bfloat16),
    ]


def gemm(case: Case) -> Callable[..., torch.Tensor]:
    """The canonical op on what ``make_inputs`` gives."""
    text = stacked(case.packed, len(case.counts)).encode()
    out_dtype = case.out_dtype or case.dtype
    gate = GATES[case.gate][0].encode() if case.gate else ""

    def fn(x, route, *others):  # type: ignore[no-untyped-def]
        offsets, ids = (route, None) if case.is_sorted else (None, route)
        rows, weight = (others[0], others[1:]) if case.has_rows else (None, others)
        options: dict[str, Any] = {"repeats": case.repeats, "format": text, "out_dtype": out_dtype}
        if case.has_bias:
            *weight, options["bias"], options["bias_rows"] = weight
        if case.gate:
            options["gate"] = gate
        return experts.op(x, list(weight), offsets, ids, rows, **options)

    return fn


def reference(case: Case, inputs: tuple[Any, ...]) -> torch.Tensor:
    """The op in fp64 on the CPU: W as rounded for the matrix unit, nothing else is."""
    x, route, *weight = (t.cpu() for t in inputs)
    x = of_rows(x, weight.pop(0) if case.has_rows else None, case.repeats)
    bias, bias_rows = (weight.pop(-2), weight.pop()) if case.has_bias else (None, None)
    count = len(case.counts)
    if case.is_sorted:
        counts = torch.tensor((*case.counts, case.left_over))
        chosen = torch.arange(count + 1).repeat_interleave(counts)
    else:
        chosen = route % count
    out = torch.zeros(case.rows, case.packed.format.shape[1], dtype=torch.float64)
    for expert in range(count):
        rows = chosen == expert
        w = rounded_weight(case, tuple(of_expert(case, weight, expert)))
        out[rows] = x[rows].double() @ w
    if bias is not None:
        out += bias.double()[bias_rows]
    if not case.gate:
        return out
    gate, formula = GATES[case.gate]
    half = out.shape[1] // 2
    columns = (out[:, ::2], out[:, 1::2]) if gate.is_interleaved else out.split(half, 1)
    return formula(*columns)


def of_expert(case: Case, weight: Sequence[torch.Tensor], expert: int) -> list[torch.Tensor]:
    """The tensors of one weight of the stack."""
    kinds = [kind for kind, _, _ in case.packed.tensors]
    return [t if kind in SHARED else t[expert] for kind, t in zip(kinds, weight, strict=True)]
