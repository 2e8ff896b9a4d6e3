"""Common quantized GEMMs by name, as kernels see them: what ``which`` asks about.

All tensors are contiguous, a weight of 8 bits as [N, K]. ``which --list`` prints the line of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from inductor_quant import options
from inductor_quant.errors import SpecError
from inductor_quant.kernels.problem import Groups, Problem, Weight, WeightTensor
from inductor_quant.kernels.w4a8 import rules
from inductor_quant.ops import block_sparse, fp8, scaled_experts, w4a8, w8a8, weight_only
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec, dtype_name
from inductor_quant.spec.weight_format import (
    AffineIndex,
    DequantOp,
    DequantOpKind,
    Field,
    WeightFormat,
)

F32 = torch.float32
TENSOR, TOKEN, CHANNEL = (-1, -1), (1, -1), (-1, 1)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """What is asked about: sizes, dtype of x (or of the result) and whether there is a bias.

    experts    how many weights there are, of which each row has one; 0: one weight
    is_sorted  whether rows are sorted by expert
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    experts: int = 0
    is_sorted: bool = True

    def problem(self, element_bytes: int) -> Problem:
        """Its sizes and alignment; ``element_bytes``: of the operand with the smallest elements."""
        is_aligned = self.k * element_bytes % 16 == 0
        groups = Groups(self.experts, self.is_sorted) if self.experts else None
        return Problem(self.m, self.n, self.k, has_aligned_rows=is_aligned, groups=groups)


# ------------------------------------------------------------------------------------------
# 8-bit operands


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Blocks of the scales of a and b, their dtype, and other arguments of ``make_spec``."""

    line: str
    a: tuple[int, int] = TOKEN
    b: tuple[int, int] = CHANNEL
    dtype: torch.dtype = F32
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FAST = {"fast_accum": True}
SCALED = {
    "w8a8": {
        "per_token": Scaled("int8, scales per token and per channel"),
        "per_tensor": Scaled("int8, scales per tensor and per channel", a=TENSOR),
        "asymmetric": Scaled(
            "int8, per token with a zero point, and per channel", options={"a_zero": "int"}
        ),
        "group": Scaled("int8, scales per group of 128 along K", (1, 128), (128, 1)),
    },
    "fp8": {
        "rowwise": Scaled("e4m3, scales per token and per channel"),
        "tensorwise": Scaled("e4m3, one scale per operand", TENSOR, TENSOR),
        "rowwise_fast": Scaled("rowwise with use_fast_accum=True", options=FAST),
        "tensorwise_fast": Scaled(
            "tensorwise with use_fast_accum=True", TENSOR, TENSOR, options=FAST
        ),
    },
    "fp8_block": {
        "block_128": Scaled(
            "e4m3, blocks of 1x128 and 128x128 (DeepSeek-V3)", (1, 128), (128, 128)
        ),
        "group_128": Scaled("e4m3, groups of 128 along K of both operands", (1, 128), (128, 1)),
        "mxfp8": Scaled(
            "e4m3, e8m0 scales per 32 along K of both operands",
            *((1, 32), (32, 1), torch.float8_e8m0fnu),
        ),
    },
}


def scaled(family: str, name: str, gemm: Gemm) -> tuple[QuantGemmSpec, Problem]:
    """The GEMM of a format of SCALED."""
    format = SCALED[family][name]
    if family == "w8a8" and gemm.k % max(1, format.b[0]):
        raise SpecError(f"{name}: K={gemm.k} is no multiple of {format.b[0]}")
    make: Any = w8a8.make_spec if family == "w8a8" else fp8.make_spec
    spec = make(
        # one row: a scale per token is one per tensor
        a_scale=ScaleSpec(format.dtype, TENSOR if gemm.m == 1 and format.a == TOKEN else format.a),
        b_scale=ScaleSpec(format.dtype, format.b),
        out_dtype=gemm.dtype,
        bias=gemm.bias,
        **format.options,
    )
    return spec, gemm.problem(element_bytes=1)


# ------------------------------------------------------------------------------------------
# packed weights: (K, N, dtype of scales) -> the format and the dtypes and shapes of its tensors

T = TypeVar("T")
Tensors = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def at(const: int = 0, /, **digits: int) -> AffineIndex:
    """``const`` plus the digits times their factors: ``at(k0=16, k1=1)``."""
    return AffineIndex(const, tuple(digits.items()))


@dataclasses.dataclass(frozen=True)
class AlongK:
    """Words of ``count`` elements along K, whose scales are those of groups or of channels.

    ``n_first``: the tensors are [N, K / count], else [K / count, N]. ``group`` 0: one scale per
    channel. ``bits`` 0: whole elements. ``zeros``: the dtype of a tensor of zero points.
    """

    line: str
    word: torch.dtype
    bits: int = 0
    count: int = 1
    group: int = 128
    n_first: bool = True
    add: int = 0
    signed: bool = False
    zeros: torch.dtype | None = None

    def __call__(self, k: int, n: int, dtype: torch.dtype) -> tuple[WeightFormat, Tensors]:
        words = max(self.group // self.count, 1)
        radices: tuple[int, ...] = (k // self.group, words) if self.group else (k // self.count,)
        row = at(k0=words, k1=1) if self.group else at(k0=1)
        offset = at(**{f"k{len(radices)}": self.bits}) if self.bits else at()
        if self.bits:
            radices = (*radices, self.count)
        n0 = at(n0=1)
        element = Field(0, self._pair(row, n0), offset, self.bits, self.signed, self.add)
        of_group = self._pair(at(k0=1) if self.group else at(), n0)
        shape = self._pair(k // self.group if self.group else 1, n)
        tensors = [(self.word, self._pair(k // self.count, n))]
        ops = []
        if self.zeros is not None:
            ops.append(DequantOp("sub", Field(1, of_group)))
            tensors.append((self.zeros, shape))
        ops.append(DequantOp("mul", Field(len(tensors), of_group)))
        tensors.append((dtype, shape))
        return WeightFormat(radices, (n,), element, tuple(ops)), tuple(tensors)

    def _pair(self, of_k: T, of_n: T) -> tuple[T, T]:
        return (of_n, of_k) if self.n_first else (of_k, of_n)


def gptq(k: int, n: int, dtype: torch.dtype) -> tuple[WeightFormat, Tensors]:
    """uint4, 8 along K in an int32 [K/8, N], packed zero points, groups of 128"""
    column = at(n0=8, n1=1)
    zero = Field(1, (at(k0=1), at(n0=1)), at(n1=4), 4, add=1)
    ops = (DequantOp("sub", zero), DequantOp("mul", Field(2, (at(k0=1), column))))
    element = Field(0, (at(k0=16, k1=1), column), at(k2=4), 4)
    return WeightFormat((k // 128, 16, 8), (n // 8, 8), element, ops), _with_zeros(
        k // 8, n, k, dtype
    )


def gptq_act_order(k: int, n: int, dtype: torch.dtype) -> tuple[WeightFormat, Tensors]:
    """gptq with desc_act: the tensor g_idx [K] lists the group of each k"""
    column, group = at(n0=8, n1=1), AffineIndex(fields=((Field(3, (at(k0=8, k1=1),)), 1),))
    zero = Field(1, (group, at(n0=1)), at(n1=4), 4, add=1)
    ops = (DequantOp("sub", zero), DequantOp("mul", Field(2, (group, column))))
    format = WeightFormat((k // 8, 8), (n // 8, 8), Field(0, (at(k0=1), column), at(k1=4), 4), ops)
    return format, (*_with_zeros(k // 8, n, k, dtype), (torch.int32, (k,)))


def awq(k: int, n: int, dtype: torch.dtype) -> tuple[WeightFormat, Tensors]:
    """uint4, 8 along N in an int32 [K, N/8] in AWQ's order, packed zero points, groups of 128"""
    shift = AffineIndex(tables=(("n1", AWQ_SHIFTS),))
    zero = Field(1, (at(k0=1), at(n0=1)), shift, 4)
    ops = (DequantOp("sub", zero), DequantOp("mul", Field(2, (at(k0=1), at(n0=8, n1=1)))))
    element = Field(0, (at(k0=128, k1=1), at(n0=1)), shift, 4)
    return WeightFormat((k // 128, 128), (n // 8, 8), element, ops), _with_zeros(
        k, n // 8, k, dtype
    )


def _with_zeros(rows: int, columns: int, k: int, dtype: torch.dtype) -> Tensors:
    """Packed weights, packed zero points [K / 128, N / 8], scales [K / 128, N]."""
    n = 8 * columns if rows == k else columns
    words = ((torch.int32, (rows, columns)), (torch.int32, (k // 128, n // 8)))
    return (*words, (dtype, (k // 128, n)))


def hqq(k: int, n: int, dtype: torch.dtype) -> tuple[WeightFormat, Tensors]:
    """uint4, rows n and n + N/2 in a byte [N/2, K], float zero points, groups of 64"""
    group, shape = (at(n0=n // 2, n1=1), at(k0=1)), (n, k // 64)
    ops = (DequantOp("sub", Field(1, group)), DequantOp("mul", Field(2, group)))
    element = Field(0, (at(n1=1), at(k0=64, k1=1)), at(4, n0=-4), 4)
    format = WeightFormat((k // 64, 64), (2, n // 2), element, ops)
    return format, ((torch.uint8, (n // 2, k)), (dtype, shape), (dtype, shape))


def fp8_block(k: int, n: int, dtype: torch.dtype) -> tuple[WeightFormat, Tensors]:
    """e4m3 [N, K], one fp32 scale per 128x128 block"""
    element = Field(0, (at(n0=128, n1=1), at(k0=128, k1=1)))
    scale = DequantOp("mul", Field(1, (at(n0=1), at(k0=1))))
    format = WeightFormat((k // 128, 128), (n // 128, 128), element, (scale,))
    return format, ((torch.float8_e4m3fn, (n, k)), (F32, (n // 128, k // 128)))


@dataclasses.dataclass(frozen=True)
class Table:
    """Codes of 4 bits, two a byte [N, K / 2], the first one high: positions in a table."""

    line: str
    group: int

    def __call__(self, k: int, n: int, dtype: torch.dtype) -> tuple[WeightFormat, Tensors]:
        half = self.group // 2
        code = Field(0, (at(n0=1), at(k0=half, k1=1)), at(4, k2=-4), 4)
        element = Field(1, (AffineIndex(fields=((code, 1),)),))
        scale = DequantOp("mul", Field(2, (at(n0=1), at(k0=1))))
        format = WeightFormat((k // self.group, half, 2), (n,), element, (scale,))
        return format, ((torch.uint8, (n, k // 2)), (F32, (16,)), (F32, (n, k // self.group)))


_I32, _I8, _E4M3 = torch.int32, torch.int8, torch.float8_e4m3fn
_GPTQ: dict[str, Any] = {"bits": 4, "count": 8, "n_first": False}
WEIGHT_ONLY: dict[str, Callable[[int, int, torch.dtype], tuple[WeightFormat, Tensors]]] = {
    "gptq": gptq,
    "gptq_symmetric": AlongK("gptq with the constant zero point 8", _I32, **_GPTQ, add=-8),
    "gptq_int8_zeros": AlongK("gptq with zero points in int8 [K/128, N]", _I32, **_GPTQ, zeros=_I8),
    "gptq_act_order": gptq_act_order,
    "awq": awq,
    "hqq": hqq,
    "compressed_tensors": AlongK(
        "int4, 8 along K in an int32 [N, K/8], zero point 8, groups of 128", _I32, 4, 8, add=-8
    ),
    "int4_bytes": AlongK(
        "int4, 2 along K in a byte [N, K/2], low half first, zero point 8, groups of 128",
        *(torch.uint8, 4, 2),
        add=-8,
    ),
    "int4_channel": AlongK(
        "signed int4, 8 along K in an int32 [K/8, N], one scale per channel",
        *(_I32, 4, 8, 0, False),
        signed=True,
    ),
    "int8": AlongK("int8 [N, K], one scale per channel", _I8, group=0),
    "int8_group": AlongK("int8 [N, K], groups of 128", _I8),
    "fp8": AlongK("e4m3 [N, K], one scale per channel", _E4M3, group=0),
    "fp8_block": fp8_block,
    "nf4": Table("NF4: table of 16 values, two codes a byte, one fp32 scale per 64 along K", 64),
    "mxfp4": Table("FP4 e2m1 by a table, two codes a byte, one fp32 scale per 32 along K", 32),
}


def packed(name: str, gemm: Gemm) -> tuple[QuantGemmSpec, Problem]:
    """The GEMM of a format of WEIGHT_ONLY."""
    format, tensors = WEIGHT_ONLY[name](gemm.k, gemm.n, gemm.dtype)
    if format.shape != (gemm.k, gemm.n):
        raise SpecError(f"{name}: K or N is no multiple of what its groups and words need")
    weight_only.check_format(format, tensors)
    spec = weight_only.make_spec(
        format,
        [dtype for dtype, _ in tensors],
        x_dtype=gemm.dtype,
        column_scale=None,
        out_dtype=gemm.dtype,
        bias=gemm.bias,
    )
    problem = gemm.problem(gemm.dtype.itemsize)
    return spec, dataclasses.replace(
        problem,
        weight=Weight(format, tuple(WeightTensor(*tensor) for tensor in tensors)),
        has_weight_descriptors=problem.has_aligned_rows,
    )


W4A8 = ("int4_bytes", "compressed_tensors", "gptq", "gptq_symmetric", "awq", "int4_channel")
# int4_bytes whose scale of a group, in a dtype, makes an int8 as a kind of ``DequantOp`` does.
TO_INT8: dict[str, tuple[DequantOpKind, torch.dtype]] = {
    "qqq_group": ("round", torch.float16),
    "qserve": ("wrap", torch.int8),
}
TO_INT8_LINES = {
    "qqq_group": "int4_bytes, rounded to int8 by an fp16 scale of each group, scales of channels",
    "qserve": "int4_bytes, times an int8 scale of each group in int8, scales of channels",
}


def packed_int8(name: str, gemm: Gemm) -> tuple[QuantGemmSpec, Problem]:
    """The GEMM of a format of W4A8 with int8 x, scaled per token; a scale of channels is apart."""
    _, problem = packed("int4_bytes" if name in TO_INT8 else name, gemm)
    assert problem.weight is not None
    format, tensors = problem.weight.format, problem.weight.tensors
    if name in TO_INT8:
        kind, dtype = TO_INT8[name]
        format = dataclasses.replace(format, dequant_ops=(*format.dequant_ops, DequantOp(kind)))
        tensors = (*tensors[:-1], dataclasses.replace(tensors[-1], dtype=dtype))
    elif format.column_ops:
        format, tensors = dataclasses.replace(format, dequant_ops=()), tensors[:1]
    spec = w4a8.make_spec(
        format,
        [tensor.dtype for tensor in tensors],
        a_scale=ScaleSpec(F32, TENSOR if gemm.m == 1 else TOKEN),
        b_scale=ScaleSpec(F32, CHANNEL),
        out_dtype=gemm.dtype,
        bias=gemm.bias,
    )
    problem = dataclasses.replace(gemm.problem(1), weight=Weight(format, tensors))
    rows = rules.rows_in_16_bits(format, [tensor.dtype for tensor in tensors], w4a8.INT8)
    return spec, dataclasses.replace(
        problem, has_weight_descriptors=problem.has_aligned_rows, rows_in_16_bits=rows
    )


# Shapes of blocks (n, k), of which SHARE are stored.
SHARE = 0.2
BLOCKS = {f"block_{size}": (size, size) for size in (32, 16, 64, 128)}
# With a scale for each block.
QUANTIZED_BLOCKS = {"int8_block_32": torch.int8, "fp8_block_32": torch.float8_e4m3fn}


def sparse(name: str, gemm: Gemm) -> tuple[QuantGemmSpec, Problem]:
    """The GEMM of a format of BLOCKS or QUANTIZED_BLOCKS."""
    stored = QUANTIZED_BLOCKS.get(name)
    block = BLOCKS["block_32" if stored else name]
    if gemm.n % block[0] or gemm.k % block[1]:
        raise SpecError(f"{name}: K or N is no multiple of {block[0]}")
    count = round(SHARE * (gemm.n // block[0]) * (gemm.k // block[1]))
    scale = ScaleSpec(F32, (block[1], block[0])) if stored else None
    spec = block_sparse.make_spec(
        gemm.dtype, block, count, bias=gemm.bias, stored=stored, scale=scale
    )
    problem = gemm.problem(gemm.dtype.itemsize)
    return spec, dataclasses.replace(problem, has_weight_descriptors=True)


# Whose kernel follows from the sizes of one GEMM.
FAMILIES = tuple(family for family in options.FAMILIES if not family.endswith("experts"))


TABLE = (16,)  # the shape of what all experts read


def stacked(name: str, gemm: Gemm) -> tuple[QuantGemmSpec, Problem]:
    """The product of rows with a weight each, of a format of WEIGHT_ONLY."""
    spec, problem = packed(name, gemm)
    assert problem.weight is not None
    format, tensors = problem.weight.format, problem.weight.tensors

    def index(old: AffineIndex) -> AffineIndex:
        return dataclasses.replace(old, fields=tuple((field(f), c) for f, c in old.fields))

    def field(old: Field) -> Field:
        lead = () if tensors[old.source].shape == TABLE else (at(e0=1),)
        return dataclasses.replace(old, index=(*lead, *map(index, old.index)))

    def step(op: DequantOp) -> DequantOp:
        return dataclasses.replace(
            op, operand=field(op.operand) if isinstance(op.operand, Field) else op.operand
        )

    format = dataclasses.replace(
        format,
        element=field(format.element),
        dequant_ops=tuple(map(step, format.dequant_ops)),
        e=(gemm.experts,),
    )
    shapes = [t.shape if t.shape == TABLE else (gemm.experts, *t.shape) for t in tensors]
    stack = tuple(WeightTensor(t.dtype, s) for t, s in zip(tensors, shapes, strict=True))
    return spec, dataclasses.replace(problem, weight=Weight(format, stack))


# Blocks (k, n) of e4m3; of int8 and of 0 a scale for each row and column.
EXPERTS = {
    "fp8_block": (torch.float8_e4m3fn, (128, 128), "e4m3, blocks of 1x128 and 128x128"),
    "fp8": (torch.float8_e4m3fn, (0, 1), "e4m3, scales per token and per channel"),
    "int8": (torch.int8, (0, 1), "int8, scales per token and per channel"),
}


def scaled_stack(name: str, gemm: Gemm) -> tuple[QuantGemmSpec, Problem]:
    """The product of 8-bit rows with an 8-bit weight each, of a format of EXPERTS."""
    dtype, block, _ = EXPERTS[name]
    spec = scaled_experts.make_spec(
        a_dtype=dtype, b_dtype=dtype, scales=(F32, F32), block=block, out_dtype=gemm.dtype
    )
    return spec, gemm.problem(element_bytes=1)


def build(family: str, name: str, gemm: Gemm) -> tuple[QuantGemmSpec, Problem]:
    """The GEMM of a format of any family."""
    if family.endswith("experts"):
        if not gemm.experts:
            raise SpecError(f"{family}: how many experts?")
        return stacked(name, gemm) if family == "experts" else scaled_stack(name, gemm)
    if family in ("weight_only", "w4a8"):
        return packed(name, gemm) if family == "weight_only" else packed_int8(name, gemm)
    return sparse(name, gemm) if family == "block_sparse" else scaled(family, name, gemm)


def names(family: str) -> dict[str, str]:
    """Format -> its line, the default first."""
    if family == "block_sparse":
        zero = f"{1 - SHARE:.0%} of the blocks"
        plain = {
            name: f"fp16 or bf16, {zero} of {n}x{k} are zero" for name, (n, k) in BLOCKS.items()
        }
        scaled_blocks = {
            name: f"{dtype_name(dtype)} with a scale for each block, {zero} of 32x32 are zero"
            for name, dtype in QUANTIZED_BLOCKS.items()
        }
        return plain | scaled_blocks
    if family == "scaled_experts":
        return {name: line for name, (_, _, line) in EXPERTS.items()}
    if family in ("weight_only", "w4a8", "experts"):
        lines = {n: getattr(build, "line", build.__doc__ or "") for n, build in WEIGHT_ONLY.items()}
        if family == "w4a8":
            return {name: lines[name] for name in W4A8} | TO_INT8_LINES
        return lines
    return {name: format.line for name, format in SCALED[family].items()}
