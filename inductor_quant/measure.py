"""Times of single GEMMs on the GPU at hand, and what its roofline allows. For reports only.

``python examples/bench_gemm.py`` is the careful benchmark (a process for each system); this answers
"how fast is this one kernel here" within a report.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from inductor_quant import measure_fp8
from inductor_quant.ops.dequantize import Evaluator
from inductor_quant.report import PackedWeight
from inductor_quant.spec import GATHERED, OperandSpec, QuantGemmSpec
from inductor_quant.weight_format import WeightFormat

TIMED_FAMILIES = ("w8a8", "weight_only", "fp8", "fp8_block")
ROUNDS = 9
MAX_COPIES = 32
# Dense int8 operations a second (1e12) from the vendor's datasheets: A100 SXM, L40S, H100/H200 SXM,
# B200; FP8 has the same rate from sm_89 on. A measured matrix product cannot serve: nothing that we
# could call reaches the units' rate.
INT8_TOPS = {80: 624.0, 89: 733.0, 90: 1979.0, 100: 4500.0}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of our kernel and of what stock Inductor makes of the same GEMM (None: it
    fails), and the time that the roofline allows over ours."""

    us: float
    stock_us: float | None
    share: float


def gemm_bytes(spec: QuantGemmSpec, m: int, n: int, k: int) -> int:
    """Bytes that must move at least: operands and scales read once, the result written once.

    Zero points, bias and the scales of groups that a tensor lists are left out.
    """
    total = (m * k * spec.a.element_bits + k * n * spec.b.element_bits + 7) // 8
    total += m * n * spec.out_dtype.itemsize
    for operand, shape in ((spec.a, (m, k)), (spec.b, (k, n))):
        if operand.scale is not None and GATHERED not in operand.scale.block:
            sizes = zip(shape, operand.scale.block, strict=True)
            count = math.prod(1 if block == -1 else -(-size // block) for size, block in sizes)
            total += count * operand.scale.dtype.itemsize
    return total


def gemm_operations(m: int, n: int, k: int) -> int:
    """Multiplications and additions."""
    return 2 * m * n * k


def floor_us(spec: QuantGemmSpec, m: int, n: int, k: int, device: torch.device) -> float:
    """The time below which no kernel can be, by measured bandwidth and datasheet rate."""
    memory = gemm_bytes(spec, m, n, k) / read_bandwidth(device.index or 0) * 1e6
    major, minor = torch.cuda.get_device_capability(device)
    rate = INT8_TOPS.get(10 * major + minor)
    if rate and spec.a.dtype.itemsize > 1:
        rate /= spec.a.dtype.itemsize  # of 16 bits the units multiply half as many
    compute = gemm_operations(m, n, k) / rate / 1e6 if rate else 0.0
    return max(memory, compute)


@functools.cache
def read_bandwidth(index: int) -> float:
    """Bytes a second of one pass over 1 GiB."""
    data = torch.randint(0, 2**30, (2**28,), dtype=torch.int32, device=f"cuda:{index}")
    return data.nbytes / (_median_us([lambda: data.max()])[0] / 1e6)


def time_gemm(
    spec: QuantGemmSpec,
    m: int,
    n: int,
    k: int,
    device: torch.device,
    mode: str | None,
    *,
    weight: PackedWeight | None = None,
) -> Timing | None:
    """Times of a GEMM alone, on random operands; None where there is nothing to compute, or where
    ``weight``, of a weight_only GEMM, is not known."""
    is_packed = spec.a.dtype.is_floating_point and not measure_fp8.is_fp8(spec)
    if m * n * k == 0 or (is_packed and weight is None):
        return None
    if weight is not None:
        inputs = _packed_inputs(spec, weight, m, device)
        canonical, plain = _weight_only(spec, weight[0]), _dequantized(spec, weight[0])
    else:
        inputs = _inputs(spec, m, n, k, device)
        canonical, plain = _canonical(spec), _plain(spec)
    ours = _captured(canonical, inputs, mode)
    stock: Callable[[], Any] | None = None
    try:
        stock = _captured(plain, inputs, mode)
    except Exception:  # stock cuBLASLt int8 refuses M <= 16, for one
        stock = None
    times = _median_us([ours] if stock is None else [ours, stock])
    calls = len(inputs)
    floor = floor_us(spec, m, n, k, device)
    return Timing(
        us=times[0] / calls,
        stock_us=None if stock is None else times[1] / calls,
        share=floor / (times[0] / calls),
    )


def _inputs(
    spec: QuantGemmSpec, m: int, n: int, k: int, device: torch.device
) -> list[tuple[torch.Tensor | None, ...]]:
    """Arguments of the GEMM, as often as it takes for the weights to exceed the L2 cache."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, min(MAX_COPIES, -(-4 * l2 // (n * k))))
    if measure_fp8.is_fp8(spec):
        return measure_fp8.inputs(spec, m, n, k, device, copies)

    def integers(rows: int, cols: int) -> torch.Tensor:
        return torch.randint(-128, 128, (rows, cols), dtype=torch.int8, device=device)

    def scale(operand: OperandSpec, shape: tuple[int, int]) -> torch.Tensor | None:
        if operand.scale is None:
            return None
        pairs = zip(shape, operand.scale.block, strict=True)
        size = [1 if block == -1 else -(-length // block) for length, block in pairs]
        return torch.rand(size, device=device).to(operand.scale.dtype)

    a = integers(m, k)

    def zero(operand: OperandSpec, shape: tuple[int, int]) -> torch.Tensor | None:
        if not operand.zero:
            return None
        point = integers(*(shape if operand.zero != "const" else (1, 1)))
        return point.float() if operand.zero == "float" else point

    a_scale, b_scale = scale(spec.a, (m, k)), scale(spec.b, (k, n))
    bias = torch.randn(n, device=device).to(spec.out_dtype) if spec.bias else None
    more = (a_scale, b_scale, bias, zero(spec.a, (m, 1)), zero(spec.b, (1, n)))
    return [(a, integers(n, k).t(), *more) for _ in range(copies)]


def packed_operands(weight: PackedWeight, device: torch.device) -> list[torch.Tensor]:
    """Random tensors of a packed weight; numbers that are positions lie within what they count."""
    format, tensors = weight
    sizes: dict[int, int] = {}
    for field in format.fields():
        for dim, form in enumerate(field.index):
            for part, _ in form.fields:
                if not part.width:
                    size = tensors[field.source][1][dim]
                    sizes[part.source] = min(size, sizes.get(part.source, size))

    def make(source: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype.is_floating_point:
            return (torch.rand(shape, device=device) * 0.02).to(dtype)
        info = torch.iinfo(dtype)
        low, high = (0, sizes[source]) if source in sizes else (info.min, info.max)
        return torch.randint(low, high, shape, dtype=torch.int64, device=device).to(dtype)

    return [make(source, *tensor) for source, tensor in enumerate(tensors)]


def _packed_inputs(
    spec: QuantGemmSpec, weight: PackedWeight, m: int, device: torch.device
) -> list[tuple[torch.Tensor | None, ...]]:
    """x, column_scale, bias and the weight's tensors, as often as it takes."""
    format, _ = weight
    k, n = format.shape
    first = packed_operands(weight, device)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, min(MAX_COPIES, -(-4 * l2 // sum(t.nbytes for t in first))))
    x = torch.randn(m, k, device=device).to(spec.a.dtype)
    bias = torch.randn(n, device=device).to(spec.out_dtype) if spec.bias else None
    scale = None
    if spec.b.scale is not None and not format.scales:
        size = (1, 1 if spec.b.scale.block == (-1, -1) else n)
        scale = torch.rand(size, device=device).to(spec.b.scale.dtype)
    sets = [first, *([t.clone() for t in first] for _ in range(copies - 1))]
    return [(x, scale, bias, *tensors) for tensors in sets]


def _weight_only(spec: QuantGemmSpec, format: WeightFormat) -> Callable[..., torch.Tensor]:
    text = format.encode()

    def run(x: Any, scale: Any, bias: Any, *weight: Any) -> torch.Tensor:
        return torch.ops.inductor_quant.weight_only(
            x, list(weight), scale, bias, format=text, out_dtype=spec.out_dtype
        )

    return run


def _dequantized(spec: QuantGemmSpec, format: WeightFormat) -> Callable[..., torch.Tensor]:
    def run(x: Any, scale: Any, bias: Any, *weight: Any) -> torch.Tensor:
        value = Evaluator(format, weight, x.device).weight(torch.float32)
        out = (x @ value.to(x.dtype)).float()
        out = out if scale is None else out * scale
        return (out if bias is None else out + bias).to(spec.out_dtype)

    return run


def _canonical(spec: QuantGemmSpec) -> Callable[..., torch.Tensor]:
    if measure_fp8.is_fp8(spec):
        return measure_fp8.canonical(spec)

    def run(*arguments: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.inductor_quant.w8a8(*arguments, out_dtype=spec.out_dtype)

    return run


def _plain(spec: QuantGemmSpec) -> Callable[..., torch.Tensor]:
    if measure_fp8.is_fp8(spec):
        return measure_fp8.plain(spec)

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        a_zero: torch.Tensor | None,
        b_zero: torch.Tensor | None,
    ) -> torch.Tensor:
        if spec.group_size:  # torch has no such product: dequantize
            return _grouped(spec, a, b, a_scale, b_scale, bias)
        out = torch._int_mm(a, b).float()
        if a_zero is not None:
            out = out - a_zero.float() * b.sum(0, keepdim=True)
        if b_zero is not None:
            total = a.sum(1, keepdim=True) - (0 if a_zero is None else a.shape[1] * a_zero.float())
            out = out - total * b_zero.float()
        for factor in (a_scale, b_scale):
            out = out if factor is None else out * factor
        return (out if bias is None else out + bias).to(spec.out_dtype)

    return run


def _grouped(
    spec: QuantGemmSpec, a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any
) -> torch.Tensor:
    def real(q: torch.Tensor, scale: torch.Tensor | None, dim: int) -> torch.Tensor:
        if scale is not None:
            q = q * scale.repeat_interleave(q.shape[dim] // scale.shape[dim], dim)
        return q.to(torch.bfloat16)

    out = real(a, a_scale, 1) @ real(b, b_scale, 0)
    return (out if bias is None else out + bias).to(spec.out_dtype)


def _captured(
    fn: Callable[..., torch.Tensor],
    inputs: list[tuple[torch.Tensor | None, ...]],
    mode: str | None,
) -> Callable[[], Any]:
    """A CUDA graph of one call for each tuple of inputs, of the compiled function.

    Compiled by plain Inductor: the canonical op needs no recognition, and the other is not to be
    recognised. CUDA graphs of the mode itself are left out, this is one.
    """
    if mode in ("max-autotune", "reduce-overhead"):
        mode = "max-autotune-no-cudagraphs" if mode == "max-autotune" else None
    compiled = torch.compile(fn, mode=mode, dynamic=False)
    with torch.no_grad():
        compiled(*inputs[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [compiled(*arguments) for arguments in inputs]

    def replay(_: Any = kept) -> None:
        graph.replay()

    return replay


def _median_us(candidates: list[Callable[[], Any]]) -> list[float]:
    """Median time of each, interleaved."""
    for run in candidates:
        run()
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(ROUNDS):
        for run, collected in zip(candidates, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            collected.append(1000 * start.elapsed_time(end))
    return [statistics.median(collected) for collected in times]
