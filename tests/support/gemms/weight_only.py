"""Inputs of weight_only GEMMs in awkward layouts, and their fp64 reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from inductor_quant.kernels.problem import Problem, Weight, WeightTensor
from inductor_quant.ops import weight_only
from inductor_quant.simulate import CompiledKernel, Generated, compile_kernel, interpret
from inductor_quant.spec.gemm import QuantGemmSpec
from tests.support.gemms import formats
from tests.support.gemms.formats import Packed
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import MAX_ERROR, RMS_ERROR


@dataclasses.dataclass(frozen=True)
class Case:
    """One GEMM; ``n`` and ``k`` are rounded up to what format ``name`` can have.

    column_scale  "none", "channel" or "tensor"
    layout        "rows": as the producer stores it; "columns": every matrix of it transposed in
                  memory; "every_second": every second element of something larger
    """

    name: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    column_scale: str = "none"
    bias: bool = False
    layout: str = "rows"

    def __str__(self) -> str:
        parts = [self.name, f"{self.m}x{self.n}x{self.k}", str(self.dtype)]
        parts += [str(self.out_dtype)] if self.out_dtype else []
        parts += [f"scale={self.column_scale}"] if self.column_scale != "none" else []
        parts += ["bias"] if self.bias else []
        parts += [self.layout] if self.layout != "rows" else []
        return "-".join(parts).replace("torch.", "")

    @property
    def packed(self) -> Packed:
        return formats.build(self.name, self.k, self.n)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in other places of memory."""
    if layout == "rows" or tensor.dim() == 0:
        return tensor
    if layout == "columns":
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    spread = torch.zeros([2 * size for size in tensor.shape], dtype=tensor.dtype).to(tensor.device)
    view = spread[(slice(None, None, 2),) * tensor.dim()]
    return view.copy_(tensor) if tensor.device.type != "meta" else view


def make_inputs(case: Case, device: str) -> tuple[Any, ...]:
    """x, column_scale, bias, weight tensors. No two scales are equal."""
    packed = case.packed
    k, n = packed.format.shape
    x = laid_out(torch.randn(case.m, k, device=device).to(case.dtype), case.layout)
    shape = {"none": None, "channel": (1, n), "tensor": (1, 1)}[case.column_scale]
    scale = None if shape is None else torch.rand(shape, device=device) + 0.5
    bias = torch.randn(n, device=device).to(case.dtype) if case.bias else None
    scale, bias = (None if t is None else laid_out(t, case.layout) for t in (scale, bias))
    return x, scale, bias, *[laid_out(t, case.layout) for t in packed.make(device)]


def gemm(case: Case) -> Callable[..., torch.Tensor]:
    """The canonical op on what ``make_inputs`` gives."""
    text = case.packed.format.encode()
    out_dtype = case.out_dtype or case.dtype

    def fn(x, scale, bias, *weight):  # type: ignore[no-untyped-def]
        return weight_only.op(x, list(weight), scale, bias, format=text, out_dtype=out_dtype)

    return fn


def generate_case(case: Case, *configs: object, **simulated: Any) -> Generated:
    """``generated.generate`` of the op."""
    return generate(gemm(case), lambda device: make_inputs(case, device), *configs, **simulated)


def compiled_in_direct(case: Case, config: object) -> CompiledKernel:
    """The kernel of ``weight_only_direct`` in a tile."""
    generated = generate_case(case, f"weight_only_direct {config}")
    return compile_kernel(
        *next(item for item in generated.kernels.items() if "partials" in item[1])
    )


def one_hot_rows(
    case: Case, generated_by: Callable[..., Generated], every: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(a kernel's result, the reference's) where each row of x reads one k alone: W, rounded once.

    M rows at a time, each ``every``-th part of K; ``generated_by(fn, make_inputs)``.
    """
    torch.manual_seed(0)
    _, *rest = make_inputs(case, "cpu")
    generated = generated_by(gemm(case), lambda device: make_inputs(case, device))
    for rows in torch.eye(case.packed.format.shape[0]).to(case.dtype).split(case.m)[::every]:
        yield interpret(generated, (rows, *rest)), gemm(case)(rows, *rest)


def described(case: Case) -> tuple[QuantGemmSpec, Problem]:
    """(spec, problem) of a case."""
    packed = case.packed
    spec = weight_only.make_spec(
        packed.format,
        [dtype for _, _, dtype in packed.tensors],
        x_dtype=case.dtype,
        column_scale=None,
        out_dtype=case.dtype,
        bias=False,
    )
    tensors = tuple(WeightTensor(dtype, shape) for _, shape, dtype in packed.tensors)
    k, n = packed.format.shape
    return spec, Problem(case.m, n, k, weight=Weight(packed.format, tensors))


def aligned(case: Case) -> tuple[QuantGemmSpec, Problem]:
    """``described``, with rows of x as the kernels for few rows take them."""
    spec, problem = described(case)
    return spec, dataclasses.replace(problem, has_aligned_rows=True)


def rounded_weight(case: Case, weight: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """W [K, N] in fp64, rounded where the op says that it is: before the scales of columns."""
    format = case.packed.format
    element = weight[format.element.source].dtype
    steps, columns = weight_only.split_dequant_ops(format, case.dtype, element)
    kept = dataclasses.replace(format, dequant_ops=steps)
    used = [weight[i] for i in range(1 + max(field.source for field in kept.fields()))]
    value = weight_only.dequantize(kept, used).to(case.dtype).double()
    one = dataclasses.replace(format, dequant_ops=())
    ones = weight_only.dequantize(one, list(weight)).new_ones(()).double()
    for step in columns:
        operand = step.operand
        if not isinstance(operand, float):
            alone = dataclasses.replace(format, element=operand, dequant_ops=())
            operand = weight_only.dequantize(alone, list(weight), torch.float64)
        value = value * (ones * operand) if step.kind == "mul" else value / operand
    return value


def reference(case: Case, inputs: tuple[Any, ...]) -> torch.Tensor:
    """The op in fp64 on the CPU: W as rounded for the matrix unit, nothing else is."""
    weight = tuple(t.cpu() for t in inputs[3:])
    return _product(rounded_weight(case, weight), inputs)


def exact(case: Case, inputs: tuple[Any, ...]) -> torch.Tensor:
    """The op in fp64 on the CPU, W not rounded: as a kernel has it that scales sums."""
    return _product(case.packed.dequantized(inputs[3:]), inputs)


def _product(w: torch.Tensor, inputs: tuple[Any, ...]) -> torch.Tensor:
    x, scale, bias = [None if t is None else t.cpu() for t in inputs[:3]]
    assert x is not None
    out = x.double() @ w
    if scale is not None:
        out = out * scale.double()
    return out if bias is None else out + bias.double()


def assert_close(got: torch.Tensor, want: torch.Tensor, slack: float = 1.0) -> None:
    """Max and RMS error, relative to max(rms(want), |want|)."""
    assert got.shape == want.shape
    got, dtype = got.cpu(), got.dtype
    size = want.abs().clamp_min(want.square().mean().sqrt())
    error = (got.double() - want).abs() / size
    assert error.max().item() <= slack * MAX_ERROR[dtype], f"max error {error.max().item():.2e}"
    rms = error.square().mean().sqrt().item()
    assert rms <= slack * RMS_ERROR[dtype], f"rms error {rms:.2e}"


def assert_right(
    got: torch.Tensor, case: Case, inputs: tuple[Any, ...], slack: float = 1.0
) -> None:
    """``assert_close`` to the op with W rounded, or with W as it is: kernels do either.

    The latter hold base and field together in fp32 sums, 128 or 1024 beside a few bits.
    """
    wide = 128 if got.dtype == torch.float32 else 1
    try:
        assert_close(got, exact(case, inputs), slack * wide)
    except AssertionError:
        assert_close(got, reference(case, inputs), slack)


def loadable(case: Case) -> tuple[QuantGemmSpec, Problem]:
    """``described``, of operands that TMA can load."""
    spec, problem = described(case)
    return spec, dataclasses.replace(problem, has_aligned_rows=True, has_weight_descriptors=True)
