"""The kernels of ``w8a8`` and ``fp8_block`` for up to 8 rows: the weight straight into registers.

One template, in Gluon, where a tensor's place in registers can be said: what a lane reads is what
it multiplies.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import fp8, fp8_gluon, group, w8a8
from inductor_quant.kernels.config import Device, GemmConfig, Problem, refuse_split
from inductor_quant.kernels.gluon_layout import Layout, layout
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.words import Dim
from inductor_quant.spec import QuantGemmSpec

ROWS = 8  # of a: as many as mma.sync has columns
COLUMNS = 16  # of b, for a program: as many as mma.sync has rows
SLICE = 128  # of K, for a warp: a block of scales, a line of the cache of each column
ARCH = 90  # the one that it was measured on
# Warps that share out K, and slices that each has in a step; the longest step first. More slices
# spill in FP8, which is multiplied as fp16.
STEPS = ((16, 2), (8, 2), (8, 1), (4, 1))
MAX_REGISTERS = 128  # of a thread, so that 16 warps run at once
# In bytes. By trials on an H200 (no command here prints them), 1 and 8 rows, time in that of
# w8a8_mm or fp8_block_few, N x K: 1024x4096 0.53 and 0.60, 4096x1024 0.70 and 0.74, 4096x4096
# 0.80 and 0.78, 6144x4096 0.92 and 0.97, 4096x11008 0.83 and 0.84, 14336x4096 0.93, 4096x14336
# 0.95, 8192x8192 0.99 and 0.96; FP8 576x7168 0.80 and 0.82, 2112x7168 0.83, 32768x512 0.86,
# 7168x2048 0.88 and 0.89, 4096x7168 0.90, 24576x1536 0.96 and 0.97, 4096x4096 0.76 and 0.80. A
# larger weight takes its time anyhow: 28672x4096 1.00 and 0.99, FP8 7168x16384 1.00 and 0.98,
# 57344x8192 1.03 and 1.01, 8192x28672 1.05.
MAX_WEIGHT = 2**26
MAX_UNROLLED = 4
# Where the kernel quantizes x. Each program does so for all rows, rounded up to 1, 2 or 4, so that
# a warp has at most MAX_SLICES_OF_X times SLICE of K.
# H200, by trials (no command here prints them), 1, 2 and 4 rows, time in that of the quantization's
# kernel and w8a8_few_gluon, N x K: 1024x4096 0.73, 0.80, 0.87, 4096x1024 0.73, 0.74, 0.76,
# 2048x2048 0.71, 0.74, 0.74, 4096x4096 0.82, 0.85, 0.85, 6144x4096 0.87, 0.90, 1.00, 4096x11008
# 0.87, 0.93, 1.4, 4096x14336 0.89, 0.96, 1.5 (with two rows and more x does not stay in registers),
# 8192x8192 0.92, 0.94, 1.04, 14336x4096 0.96, 1.00, 1.04; 8 rows of 4096x4096 1.00.
MAX_QUANTIZED_ROWS = 4
MAX_WEIGHT_OF_ONE_ROW = 2**27  # 28672x4096 31.3 us, not 31.7
MAX_WEIGHT_OF_FOUR_ROWS = 2**24
MAX_SLICES_OF_X = 16
# With so many registers a third program runs on a multiprocessor (6144x4096 8.8 us, not 9.5). More
# slices than four are read again, from the cache, when the scale is known: they would spill.
FEW_REGISTERS = 80
MAX_SLICES_IN_FEW_REGISTERS = 8
KEPT_IN_FEW_REGISTERS = 4


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    refused = _refuse_spec(spec, problem, device)
    if refused is not None:
        return refused
    if device.arch != ARCH:
        return Rejection(RejectionCode.NO_KERNEL, f"measured on sm_{ARCH}, this is {device}")
    if problem.m > ROWS or not problem.m_is_static:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows, or any number, not {ROWS}")
    is_aligned = all(each.has_aligned_rows for each in problem.members or (problem,))
    if not (is_aligned and problem.k_is_static and problem.k % SLICE == 0):
        return Rejection(
            RejectionCode.NO_KERNEL,
            "an operand is not contiguous along K, its rows do not begin at 16-byte multiples, or "
            f"{SLICE} does not divide K",
        )
    if problem.m * problem.n == 1:
        return Rejection(RejectionCode.NO_KERNEL, "Inductor stores one element without a layout")
    is_one_row = problem.m == 1 and problem.quantized_bytes
    if problem.n * problem.k > (MAX_WEIGHT_OF_ONE_ROW if is_one_row else MAX_WEIGHT):
        return Rejection(RejectionCode.NO_KERNEL, f"N={problem.n}, K={problem.k} are large")
    return None


def _refuse_spec(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    if not is_int8(spec):
        return fp8.supports(spec, problem, device) or fp8_gluon.refuse_blocks(spec)
    refused = w8a8.supports(spec, problem, device)
    if refused is None and spec.group_size:
        refused = Rejection(RejectionCode.NO_KERNEL, "scales of groups along K")
    if refused is None and problem.needs_spare_row:
        refused = Rejection(RejectionCode.NO_KERNEL, "rows beyond the last one are read as it")
    return refused


def quantizing_supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = supports(spec, problem, device)
    if general is not None:
        return general
    rows = rows_of_x(problem)
    if rows > MAX_QUANTIZED_ROWS or (
        rows == MAX_QUANTIZED_ROWS and problem.n * problem.k > MAX_WEIGHT_OF_FOUR_ROWS
    ):
        return Rejection(
            RejectionCode.NO_KERNEL, f"{problem.m} rows, N={problem.n}, K={problem.k}: no gain"
        )
    return None


def rows_of_x(problem: Problem) -> int:
    """A power of two."""
    return 1 << (problem.m - 1).bit_length()


def slices_of_x(problem: Problem, config: GemmConfig) -> int:
    """How many slices of all rows a warp quantizes; one of fp32 counts for two."""
    slices = rows_of_x(problem) * math.ceil(problem.k / (SLICE * config.num_warps))
    return slices * problem.quantized_bytes // 2


def is_int8(spec: QuantGemmSpec) -> bool:
    return spec.a.dtype == torch.int8


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    if is_int8(spec):
        found = w8a8.constants(spec, problem, config, device) | {"BLOCK_SCALED": False}
    else:
        found = fp8.constants(spec, problem, config, device)
    found |= {name: str(each) for name, each in layouts(config).items()}
    if problem.quantized_bytes:
        found |= {name: str(each) for name, each in layouts_of_x(problem, config).items()}
        found["ROWS"] = rows_of_x(problem)
        has_many = registers(problem, config, device) > FEW_REGISTERS
        found["KEEPS_X"] = has_many or slices_of_x(problem, config) <= KEPT_IN_FEW_REGISTERS
    return found | {
        "K_SIZE": problem.k,
        "WARPS": config.num_warps,
        "SLICES": slices(config),
        "UNROLLED": unrolled(problem, config),
        "MAX_REGISTERS": registers(problem, config, device),
    }


def registers(problem: Problem, config: GemmConfig, device: Device) -> int:
    """The most of a thread: few where three programs at once have fewer rounds than two."""
    if not 0 < slices_of_x(problem, config) <= MAX_SLICES_IN_FEW_REGISTERS:
        return MAX_REGISTERS
    per_sm = problem.n / (COLUMNS * device.num_sms)
    return FEW_REGISTERS if math.ceil(per_sm / 3) < math.ceil(per_sm / 2) else MAX_REGISTERS


def slices(config: GemmConfig) -> int:
    """How many times a warp has ``SLICE`` of K in a step."""
    return config.block_k // (SLICE * config.num_warps)


def unrolled(problem: Problem, config: GemmConfig) -> int:
    """How many steps are written one after the other: all, if they are few and only the last one
    has a mask (by trials, FP8 4096x7168 10.1 us instead of 10.4, 8 rows 10.4 and 10.9); where none
    has one that is slower (6144x4096 9.2 us, not 8.5)."""
    steps = math.ceil(problem.k / config.block_k)
    return 1 if problem.is_even_k(config) or steps > MAX_UNROLLED else steps


def layouts(config: GemmConfig) -> dict[str, Layout]:
    """Which lane reads what of A and B, in words of four neighbours of K and in their bytes; and of
    the sums: a lane adds up those of all warps, neighbouring lanes store neighbouring columns."""
    warp: Dim = ("warp", config.num_warps)
    eight, four, half, word, byte = ("eight", 8), ("four", 4), ("half", 2), ("word", 4), ("byte", 4)
    found = {}
    for name, rows in (("B", COLUMNS), ("A", ROWS)):
        axes = ((warp,), (("more", rows // 8), eight), (half, four, word))
        read: Any = {"lanes": (four, eight), "warps": (warp,)}
        found[f"{name}_WORDS"] = layout(axes, **read)
        found[f"{name}_BYTES"] = layout((*axes, (byte,)), **read)
    columns, rows_of_a = _bits("column", COLUMNS), _bits("row", ROWS)
    lowest = [*reversed(columns), *reversed(rows_of_a)]
    count = config.num_warps.bit_length() - 1
    adding = [*lowest[5 : 5 + count], *[("none", 2)] * count][:count]
    stored: Any = {"lanes": lowest[:5], "warps": adding}
    found["SUMS"] = layout(((warp,), columns, rows_of_a), **stored)
    found["EPILOGUE"] = layout((rows_of_a, columns), **stored)
    return found


def layouts_of_x(problem: Problem, config: GemmConfig) -> dict[str, Layout]:
    """Which lane quantizes what of rows of x, ``STEP`` of K at a time, and which one reads what of
    the integers: as of A, the rows as often as there are places for them."""
    rows = ("row", rows_of_x(problem))
    again = ("again", ROWS // rows[1])
    warp: Dim = ("warp", config.num_warps)
    words, byte, half, four, word = (
        ("words", 32),
        ("byte", 4),
        ("half", 2),
        ("four", 4),
        ("word", 4),
    )
    return {
        "X": layout(((rows,), (warp, words, byte)), lanes=(words,), warps=(warp,)),
        "A_ROWS": layout(
            ((again,), (rows,), (warp, half, four, word, byte)),
            lanes=(four, rows, again),
            warps=(warp,),
        ),
    }


def _bits(name: str, size: int) -> tuple[Dim, ...]:
    """A dimension as one of 2 for each bit, from high to low."""
    return tuple((f"{name}{bit}", 2) for bit in reversed(range(size.bit_length() - 1)))


def _config(warps: int, count: int) -> GemmConfig:
    return GemmConfig(ROWS, COLUMNS, SLICE * warps * count, num_warps=warps, num_stages=1)


CONFIGS = tuple(_config(*step) for step in STEPS)


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Best guess first: 16 warps where a multiprocessor has one tile at most, else twice 8; a step
    is not twice as long as K."""
    has_one = problem.n <= COLUMNS * device.num_sms
    best = next(
        (config for config in CONFIGS[not has_one :] if config.block_k < 2 * problem.k),
        CONFIGS[-1],
    )
    return [best, *(config for config in CONFIGS if config != best)]


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    if config in CONFIGS:
        if problem.quantized_bytes and slices_of_x(problem, config) > MAX_SLICES_OF_X:
            detail = f"{config} has more than {MAX_SLICES_OF_X} slices of x for a warp"
            return Rejection(RejectionCode.REGISTERS, detail)
        return group.misfit(problem, config)
    offered = ", ".join(map(str, CONFIGS))
    return refuse_split(config) or Rejection(
        RejectionCode.BLOCK_SHAPE, f"{config} is none of {offered}"
    )


def _kernel(family: str, *, quantizes: bool = False) -> Kernel:
    return Kernel(
        name=f"{family}_few_quantizing" if quantizes else f"{family}_few_gluon",
        family=family,
        grid=w8a8.grid,
        supports=quantizing_supports if quantizes else supports,
        constants=constants,
        configs=configs,
        legal=is_legal,
        template="few_bytes",
        is_gluon=True,
        is_grouped=family == "w8a8" and not quantizes,
        quantizes=quantizes,
    )


W8A8_FEW_GLUON, FP8_BLOCK_FEW_GLUON = _kernel("w8a8"), _kernel("fp8_block")
W8A8_FEW_QUANTIZING = _kernel("w8a8", quantizes=True)
