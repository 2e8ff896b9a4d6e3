"""Inputs of W4A8 GEMMs and their fp64 reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from inductor_quant.kernels.problem import Problem, Weight, WeightTensor
from inductor_quant.kernels.w4a8 import rules
from inductor_quant.ops import w4a8
from inductor_quant.simulate import Generated
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec
from inductor_quant.spec.weight_format import DequantOp, WeightFormat
from tests.support.gemms import formats, w8a8
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import laid_out

NAMES = ("gptq", "awq", "nibble_pairs", "int4_words", "shift_table")
OF_CHANNELS = ("int4_words", "shift_table")  # which have no groups


@dataclasses.dataclass(frozen=True)
class Case:
    """One GEMM with the packed layout ``name`` of ``formats``, which may have groups.

    groups   keep the scale of the format's groups
    times    a factor of the integers
    zero     of the activation: "" none, "const", "int" or "float" per token, "tensor" for all
    scales   of activation and weight: "token" or "tensor" or "none"; "channel" likewise
    sums     the sums of the weight are given
    layout   of the packed weight, as in ``weight_only.Case``
    to_int8  "round": of the weight with the scales of its groups, in fp16; "wrap": these are int8
    a_dtype  of the activation
    """

    name: str
    m: int
    n: int
    k: int
    out_dtype: torch.dtype = torch.bfloat16
    groups: bool = True
    times: int = 1
    zero: str = ""
    scales: tuple[str, str] = ("token", "channel")
    bias: bool = True
    sums: bool = False
    layout: str = "rows"
    to_int8: str = ""
    a_dtype: torch.dtype = w4a8.INT8

    def __str__(self) -> str:
        parts = [self.name, f"{self.m}x{self.n}x{self.k}", str(self.out_dtype).split(".")[1]]
        defaults = Case("", 0, 0, 0)
        for name in ("groups", "times", "zero", "scales", "bias", "sums", "layout", "to_int8"):
            if getattr(self, name) != getattr(defaults, name):
                parts.append(f"{name}={getattr(self, name)}")
        parts += ["e4m3"] if self.a_dtype == w4a8.E4M3 else []
        return "-".join(parts)

    @property
    def packed(self) -> formats.Packed:
        found = formats.build(self.name, self.k, self.n)
        if not self.to_int8:
            return found
        *tensors, (_, shape, _) = found.tensors
        scale = (
            ("zero", shape, torch.float16)
            if self.to_int8 == "round"
            else ("bits", shape, torch.int8)
        )
        return dataclasses.replace(found, tensors=(*tensors, scale))

    @property
    def format(self) -> WeightFormat:
        """The format without what the op does not take: scales of columns."""
        format = self.packed.format
        *ops, last = format.dequant_ops
        assert last.kind == "mul"
        if self.times != 1:
            ops.append(DequantOp("mul", float(self.times)))
        is_kept = self.groups and self.name not in OF_CHANNELS
        ops += [last] if is_kept else []
        if self.to_int8:
            ops.append(DequantOp(self.to_int8))  # type: ignore[arg-type]
        return dataclasses.replace(format, dequant_ops=tuple(ops))

    @property
    def tensors(self) -> tuple[Any, ...]:
        count = 1 + max(field.source for field in self.format.fields())
        return self.packed.tensors[:count]


def make_inputs(case: Case, device: str) -> tuple[Any, ...]:
    """a, a_scale, b_scale, bias, a_zero_point, b_sum, weight tensors. No two scales are equal."""
    k, n = case.format.shape
    a = torch.randint(-128, 128, (case.m, k), device=device).to(case.a_dtype)

    def scale(kind: str, size: tuple[int, int]) -> torch.Tensor | None:
        if kind == "none":
            return None
        shape = (1, 1) if kind == "tensor" else size
        return torch.rand(shape, device=device) * 0.02 + 0.001

    zero = None
    if case.zero not in ("", "const"):
        shape = (1, 1) if case.zero == "tensor" else (case.m, 1)
        zero = torch.randint(-90, 90, shape, device=device).to(torch.int8)
        zero = zero + torch.rand(shape, device=device) if case.zero == "float" else zero
    bias = torch.randn(n, device=device) if case.bias else None
    scales = scale(case.scales[0], (case.m, 1)), scale(case.scales[1], (1, n))
    weight = [laid_out(t, case.layout) for t in case.packed.make(device)[: len(case.tensors)]]
    if case.to_int8 == "round":
        weight[-1] *= 2  # up to 24: some are clamped
    return a, *scales, bias, zero, _sums(case, weight) if case.sums else None, *weight


def _sums(case: Case, weight: list[torch.Tensor]) -> torch.Tensor:
    device, is_integer = weight[0].device, case.format == _unscaled(case)
    dtype = torch.int32 if is_integer else torch.float32
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.empty((1, case.format.shape[1]), dtype=dtype, device=device)
    return _products(case, weight).sum(0, keepdim=True).to(dtype).to(device)


A_ZERO = -37  # of "const"


def gemm(case: Case) -> Callable[..., torch.Tensor]:
    """The canonical op on what ``make_inputs`` gives."""
    text, number = case.format.encode(), A_ZERO if case.zero == "const" else 0

    def fn(a, a_scale, b_scale, bias, zero, sums, *weight):  # type: ignore[no-untyped-def]
        return w4a8.op(
            *(a, list(weight), a_scale, b_scale, bias, zero, sums),
            format=text,
            a_zero=number,
            out_dtype=case.out_dtype,
        )

    return fn


def generate_case(case: Case, *configs: object, **simulated: Any) -> Generated:
    """``generated.generate`` of the op."""
    return generate(gemm(case), lambda device: make_inputs(case, device), *configs, **simulated)


def described(case: Case) -> tuple[QuantGemmSpec, Problem]:
    """(spec, problem) of a case whose operands are aligned."""
    dtypes = [dtype for _, _, dtype in case.tensors]
    zero = {"": "", "const": "const", "float": "float"}.get(case.zero, "int")
    spec = w4a8.make_spec(
        case.format,
        dtypes,
        a_scale=ScaleSpec(torch.float32, (1, -1)),
        b_scale=ScaleSpec(torch.float32, (-1, 1)),
        out_dtype=case.out_dtype,
        bias=case.bias,
        a_zero=zero,
        a_dtype=case.a_dtype,
    )
    tensors = tuple(WeightTensor(dtype, shape) for _, shape, dtype in case.tensors)
    k, n = case.format.shape
    weight = Weight(case.format, tensors)
    problem = Problem(
        *(case.m, n, k),
        weight=weight,
        has_aligned_rows=True,
        has_weight_descriptors=True,
        rows_in_16_bits=rules.rows_in_16_bits(case.format, dtypes, case.a_dtype, zero),
    )
    return spec, problem


def integers(case: Case, weight: list[torch.Tensor]) -> torch.Tensor:
    """q [K, N] in fp64, by the producer's plain code."""
    given = list(weight[: len(dataclasses.replace(case, groups=False, to_int8="").tensors)])
    scales = case.packed.tensors[len(given) :]
    ones = [torch.ones(shape, dtype=dtype) for _, shape, dtype in scales]
    return case.packed.dequantized([*given, *ones]) * case.times


def _products(case: Case, weight: list[torch.Tensor]) -> torch.Tensor:
    """q with the scales of its groups, in fp64."""
    if case.format == _unscaled(case):
        return integers(case, weight)
    scaled = case.packed.dequantized(weight) * case.times
    if case.to_int8 == "round":
        return scaled.round().clamp(-128, 127)
    return scaled.to(torch.int64).to(torch.int8).double() if case.to_int8 else scaled


def _unscaled(case: Case) -> WeightFormat:
    return dataclasses.replace(case, groups=False, to_int8="").format


def reference(case: Case, inputs: tuple[Any, ...]) -> torch.Tensor:
    """The op in fp64 on the CPU, by the producer's plain code."""
    given = [None if t is None else t.cpu() for t in inputs]
    a, a_scale, b_scale, bias, zero, _, *weight = given
    number = A_ZERO if case.zero == "const" else 0
    out = (a.double() - (number if zero is None else zero.double())) @ _products(case, weight)
    for scale in (a_scale, b_scale):
        out = out if scale is None else out * scale.double()
    return out if bias is None else out + bias.double()


assert_close = w8a8.assert_close
