"""Times of single GEMMs on this GPU, and their roofline. For reports only.

``python -m examples.benchmarks.gemm`` is the careful benchmark, a process for each system; this
answers "how fast is this one kernel here" within a report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from inductor_quant.ops.dequantize import Evaluator
from inductor_quant.report.events import PackedWeight
from inductor_quant.spec.gemm import GATHERED, OperandSpec, QuantGemmSpec
from inductor_quant.spec.weight_format import WeightFormat

TIMED_FAMILIES = ("w8a8", "w4a8", "weight_only", "fp8", "fp8_block", "block_sparse")
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
ROUNDS = 9
MAX_COPIES = 32
# Dense int8 TOPS by the vendor's datasheets: A100 SXM, L40S, H100/H200 SXM, B200; FP8 has the same
# rate from sm_89 on. No matrix product that we could time instead reaches the units' rate.
INT8_TOPS = {80: 624.0, 89: 733.0, 90: 1979.0, 100: 4500.0}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of our kernel and of stock Inductor (None: it fails) for a GEMM; ``share`` is
    the roofline's time over ours."""

    us: float
    stock_us: float | None
    share: float


def gemm_bytes(spec: QuantGemmSpec, m: int, n: int, k: int, *, weights: float = 1) -> int:
    """Least bytes to move: operands and scales read once, the result written once.

    Leaves out zero points, bias, scales of act-order groups and the places of blocks. ``weights``:
    how many are read, of ``k x n`` each.
    """
    weight = round(weights * _operand_bytes(spec.b, (k, n), _stored(spec, n, k)))
    return _operand_bytes(spec.a, (m, k), m * k) + weight + m * n * spec.out_dtype.itemsize


def hit_experts(experts: int, rows: int) -> float:
    """How many of ``experts`` have one of ``rows`` that choose at random, in the mean."""
    return experts * (1 - (1 - 1 / experts) ** rows)


def _operand_bytes(operand: OperandSpec, shape: tuple[int, int], stored: int) -> int:
    total = (stored * operand.element_bits + 7) // 8
    if operand.scale is not None and GATHERED not in operand.scale.block:
        sizes = zip(shape, operand.scale.block, strict=True)
        count = math.prod(1 if block == -1 else -(-size // block) for size, block in sizes)
        if operand.blocks is not None and operand.scale.block[0] != -1:
            count = count * stored // math.prod(shape)  # those of stored blocks
        total += count * operand.scale.dtype.itemsize
    return total


def gemm_operations(spec: QuantGemmSpec, m: int, n: int, k: int) -> int:
    """Multiplications and additions."""
    return 2 * m * _stored(spec, n, k)


def _stored(spec: QuantGemmSpec, n: int, k: int) -> int:
    """The elements of b that are in memory."""
    blocks = spec.b.blocks
    return n * k if blocks is None else blocks.count * blocks.n * blocks.k


def floor_us(spec: QuantGemmSpec, m: int, n: int, k: int, device: torch.device) -> float:
    """The roofline: the least time by measured bandwidth and by the datasheet's rate."""
    memory = gemm_bytes(spec, m, n, k) / read_bandwidth(device.index or 0) * 1e6
    major, minor = torch.cuda.get_device_capability(device)
    rate = INT8_TOPS.get(10 * major + minor)
    if rate and spec.a.dtype.itemsize > 1:
        rate /= spec.a.dtype.itemsize  # half the rate for 16 bits
    compute = gemm_operations(spec, m, n, k) / rate / 1e6 if rate else 0.0
    return max(memory, compute)


def roofs(device: torch.device) -> dict[str, tuple[float, float]]:
    """By size of the operands: measured TB/s and TOP/s of the datasheet, as ``floor_us`` has them;
    empty where there is no figure for the card."""
    major, minor = torch.cuda.get_device_capability(device)
    rate = INT8_TOPS.get(10 * major + minor)
    if rate is None:
        return {}
    speed = read_bandwidth(device.index or 0) / 1e12
    return {"8 bits": (speed, rate), "16 bits": (speed, rate / 2)}


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
    """Times of a GEMM alone, on random operands; None if it is empty, or a weight_only GEMM whose
    ``weight`` is unknown."""
    is_sparse = spec.b.blocks is not None
    is_float = spec.a.dtype.is_floating_point and not _is_fp8(spec) and not is_sparse
    is_packed = spec.b.bits is not None or is_float
    if m * n * k == 0 or (is_packed and weight is None):
        return None
    if weight is not None:
        inputs = _packed_inputs(spec, weight, m, device)
        fns = _weight_only(spec, weight[0]), _dequantized(spec, weight[0])
    elif is_sparse:
        inputs = _sparse_inputs(spec, m, n, k, device)
        fns = _block_sparse, _dense
    else:
        inputs = operands(spec, m, n, k, device)
        fns = canonical(spec), plain(spec)
    runs = [_captured(fns[0], inputs, mode)]
    with contextlib.suppress(Exception):  # cuBLASLt int8 refuses M <= 16, for one
        runs.append(_captured(fns[1], inputs, mode))
    us, *stock_us = (time / len(inputs) for time in _median_us(runs))
    return Timing(us, stock_us[0] if stock_us else None, floor_us(spec, m, n, k, device) / us)


Inputs = list[tuple[torch.Tensor | None, ...]]
Run = Callable[..., torch.Tensor]


def _is_fp8(spec: QuantGemmSpec) -> bool:
    return spec.a.dtype in FP8_DTYPES and spec.b.dtype in FP8_DTYPES


def is_block(spec: QuantGemmSpec) -> bool:
    """Whether scales of both operands vary along K."""
    a, b = spec.a.scale, spec.b.scale
    return a is not None and b is not None and -1 not in (a.block[1], b.block[0])


def _copies(device: torch.device, nbytes: int) -> int:
    """How many copies of a weight together exceed the L2 cache."""
    if device.type != "cuda":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MAX_COPIES, -(-4 * l2 // nbytes)))


def operands(spec: QuantGemmSpec, m: int, n: int, k: int, device: torch.device) -> Inputs:
    """Random arguments of the op of 8-bit operands, with as many weights as exceed the L2 cache."""

    def elements(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(rows, columns, device=device).to(dtype)
        return torch.randint(-128, 128, (rows, columns), dtype=dtype, device=device)

    def scale(operand: OperandSpec, shape: tuple[int, int]) -> torch.Tensor | None:
        if operand.scale is None:
            return None
        pairs = zip(shape, operand.scale.block, strict=True)
        size = [1 if block == -1 else -(-length // block) for length, block in pairs]
        found = torch.rand(size, device=device).to(operand.scale.dtype)
        # cuBLASLt takes block scales that are contiguous along M
        return found.t().contiguous().t() if _is_fp8(spec) and is_block(spec) else found

    def zero(operand: OperandSpec, shape: tuple[int, int]) -> torch.Tensor | None:
        if not operand.zero:
            return None
        point = elements(torch.int8, *(shape if operand.zero != "const" else (1, 1)))
        return point.float() if operand.zero == "float" else point

    a = elements(spec.a.dtype, m, k)
    bias = torch.randn(n, device=device).to(spec.out_dtype) if spec.bias else None
    more = [scale(spec.a, (m, k)), scale(spec.b, (k, n)), bias]
    if not _is_fp8(spec):
        more += [zero(spec.a, (m, 1)), zero(spec.b, (1, n))]
    copies = _copies(device, n * k)
    return [(a, elements(spec.b.dtype, n, k).t(), *more) for _ in range(copies)]


def packed_operands(weight: PackedWeight, device: torch.device) -> list[torch.Tensor]:
    """Random tensors of a packed weight; indices are within the dimension that they index."""
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


def _packed_inputs(spec: QuantGemmSpec, weight: PackedWeight, m: int, device: Any) -> Inputs:
    """x, column_scale, bias and the weight's tensors, with copies as for ``operands``."""
    format, _ = weight
    k, n = format.shape
    first = packed_operands(weight, device)
    copies = _copies(device, sum(t.nbytes for t in first))
    x = (torch.randn(m, k, device=device) * (1 if spec.a.dtype.is_floating_point else 30)).to(
        spec.a.dtype
    )
    bias = torch.randn(n, device=device).to(spec.out_dtype) if spec.bias else None
    scale = None
    if spec.b.scale is not None and not format.scales:
        size = (1, 1 if spec.b.scale.block == (-1, -1) else n)
        scale = torch.rand(size, device=device).to(spec.b.scale.dtype)
    sets = [first, *([t.clone() for t in first] for _ in range(copies - 1))]
    return [(x, scale, bias, *tensors) for tensors in sets]


def _weight_only(spec: QuantGemmSpec, format: WeightFormat) -> Run:
    text = format.encode()

    def run(x: Any, scale: Any, bias: Any, *weight: Any) -> torch.Tensor:
        options = {"format": text, "out_dtype": spec.out_dtype}
        if spec.a.dtype == torch.int8:
            options |= {"a_zero": 3} if spec.a.zero else {}
            return torch.ops.inductor_quant.w4a8(x, list(weight), None, scale, bias, **options)
        return torch.ops.inductor_quant.weight_only(x, list(weight), scale, bias, **options)

    return run


def _dequantized(spec: QuantGemmSpec, format: WeightFormat) -> Run:
    def run(x: Any, scale: Any, bias: Any, *weight: Any) -> torch.Tensor:
        value = Evaluator(format, weight, x.device).weight(torch.float32)
        if x.dtype != torch.int8:
            out = (x @ value.to(x.dtype)).float()
        elif spec.group_size:
            out = (x.bfloat16() @ value.bfloat16()).float()
        else:
            out = torch._int_mm(x, value.to(torch.int8)).float()
        out = out if scale is None else out * scale
        return _finished(out, bias, spec)

    return run


def _sparse_inputs(spec: QuantGemmSpec, m: int, n: int, k: int, device: torch.device) -> Inputs:
    """The arguments of ``block_sparse`` for blocks at random places, and the dense W [N, K]."""
    blocks = spec.b.blocks
    assert blocks is not None
    grid = n // blocks.n, k // blocks.k
    place = torch.randperm(grid[0] * grid[1], device=device)[: blocks.count].sort().values
    counts = torch.bincount(place // grid[1], minlength=grid[0])
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    tables = crow, (place % grid[1]).int(), None, counts.argsort(descending=True).int()
    dense_dtype = spec.a.dtype if spec.a.dtype.is_floating_point else torch.bfloat16
    x = torch.randn(m, k, device=device).to(spec.a.dtype)
    bias = torch.randn(n, device=device).to(spec.a.dtype) if spec.bias else None
    shape = blocks.count, blocks.n, blocks.k
    sets: Inputs = []
    for _ in range(_copies(device, max(1, math.prod(shape)) * spec.b.dtype.itemsize)):
        values, scale = torch.randn(shape, device=device).to(spec.b.dtype), None
        if spec.b.scale is not None:
            _, of = spec.b.scale.block
            sizes = (n,) if spec.b.scale.block[0] == -1 else (blocks.count, blocks.n // of)
            scale = torch.rand(sizes, device=device).to(spec.b.scale.dtype)
        dense = torch.randn(n, k, device=device).to(dense_dtype)
        sets.append((x, values, *tables, scale, bias, dense))
    return sets


def _block_sparse(*arguments: Any) -> torch.Tensor:
    *given, dense = arguments
    return torch.ops.inductor_quant.block_sparse(*given, n=len(dense))


def _dense(*arguments: Any) -> torch.Tensor:
    x, *_, bias, dense = arguments
    return torch.nn.functional.linear(x.to(dense.dtype), dense, bias)


def canonical(spec: QuantGemmSpec) -> Run:
    """The canonical op of 8-bit operands, on what ``operands`` gives."""
    op: Any = torch.ops.inductor_quant.w8a8
    options: dict[str, Any] = {"out_dtype": spec.out_dtype}
    if _is_fp8(spec) and is_block(spec):
        assert spec.b.scale is not None
        op = torch.ops.inductor_quant.fp8_block
        options |= dict(zip(("block_k", "block_n"), spec.b.scale.block, strict=True))
    elif _is_fp8(spec):
        op, options["fast_accum"] = torch.ops.inductor_quant.fp8, spec.fast_accum

    def run(*arguments: torch.Tensor | None) -> torch.Tensor:
        return op(*arguments, **options)

    return run


def plain(spec: QuantGemmSpec) -> Run:
    """The same GEMM in stock torch; fp8: ``torch._scaled_mm``, which raises for scales other than
    pairs of one kind in fp32."""

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        a_zero: torch.Tensor | None = None,
        b_zero: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if _is_fp8(spec):
            one = torch.ones((), device=a.device)
            out = torch._scaled_mm(
                *(a, b, one if a_scale is None else a_scale, one if b_scale is None else b_scale),
                out_dtype=spec.out_dtype,
                use_fast_accum=spec.fast_accum,
            )
            return out if bias is None else out + bias
        if spec.group_size:  # torch has no such product: dequantize
            left, right = _real(a, a_scale, 1), _real(b, b_scale, 0)
            return _finished(left @ right, bias, spec)
        out = torch._int_mm(a, b).float()
        if a_zero is not None:
            out = out - a_zero.float() * b.sum(0, keepdim=True)
        if b_zero is not None:
            total = a.sum(1, keepdim=True) - (0 if a_zero is None else a.shape[1] * a_zero.float())
            out = out - total * b_zero.float()
        for factor in (a_scale, b_scale):
            out = out if factor is None else out * factor
        return _finished(out, bias, spec)

    return run


def _real(q: torch.Tensor, scale: torch.Tensor | None, dim: int) -> torch.Tensor:
    if scale is not None:
        q = q * scale.repeat_interleave(q.shape[dim] // scale.shape[dim], dim)
    return q.to(torch.bfloat16)


def _finished(out: torch.Tensor, bias: torch.Tensor | None, spec: QuantGemmSpec) -> torch.Tensor:
    return (out if bias is None else out + bias).to(spec.out_dtype)


def _captured(
    fn: Run,
    inputs: Inputs,
    mode: str | None,
) -> Callable[[], Any]:
    """A CUDA graph of the compiled function, called once for each tuple of inputs.

    Compiled by plain Inductor: the canonical op needs no recognition, and stock must not get it.
    The mode's own CUDA graphs are left out.
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
    """Median time of each, interleaved, in microseconds."""
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
