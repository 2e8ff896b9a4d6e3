"""Kernels of ``w8a8``, ``fp8`` and ``fp8_block`` for decode on Hopper, in Gluon: a GEMV of up to 8
rows.

out = scale * (A @ B) + bias, chosen on sm_90 for static M up to 8, K a multiple of 128, aligned
rows, and weights up to 64 MiB (``fp8``: 32); larger weights stream at the same speed through the
other kernels. ``w8a8_decode_quantize`` and ``fp8_decode_quantize`` also quantize x, for M up to 4
and weights that are small enough.

The time is that of reading the weight, so loads go straight to registers: no shared memory and no
barrier before the final sum. Operands are swapped (swap_ab): a tile is 16 columns of B by 8 rows of
A, the m16n8 of mma.sync. The warps of a CTA split K; each prefetches one step of 128 or 256
elements while it multiplies the one before. Gluon is needed to place each loaded byte in the lane
that multiplies it: both operands are permuted along K in the same way, so nothing is shuffled.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.kernels.codegen.dialect import Dim
from inductor_quant.kernels.codegen.gluon_layout import Layout, layout
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import ScaledMm, alignment_rejection, unlisted_rejection
from inductor_quant.kernels.scaled_mm.fp8 import Fp8Kernel, reject_unless_128
from inductor_quant.kernels.scaled_mm.int8 import Int8Kernel, reject_if_only_mm
from inductor_quant.kernels.shared import horizontal
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

ARCH = 90  # the only one that was measured
BLOCK_M, BLOCK_N = 8, 16  # of mma.sync, with A and B swapped
SLICE = 128  # elements of K that a warp reads at once: a scale block, one cache line per column
MAX_REGISTERS = 128  # a thread, so that 16 warps are resident
MAX_WEIGHT = 2**26  # bytes
# Of FP8 by rows, whose other kernel streams as fast; of several in one launch.
MAX_WEIGHT_FLOAT, MAX_WEIGHT_HORIZONTAL = 2**25, 2**28
MAX_UNROLLED = 4

# With quantization: every CTA quantizes all rows of x, padded to 1, 2 or 4; a warp keeps at most
# MAX_X_SLICES slices of them in registers.
MAX_WEIGHT_QUANTIZED = {1: 2**27, 2: 2**26, 4: 2**24}  # bytes, by padded M
MAX_X_SLICES = 16
# With so few registers a third CTA fits an SM. Of more slices than KEPT_X_SLICES x is read again,
# from the L2 cache, once the scale is known: it would spill.
FEW_REGISTERS = 80
MAX_X_SLICES_FEW_REGISTERS = 8
KEPT_X_SLICES = 4


def _config(warps: int, slices: int) -> GemmConfig:
    return GemmConfig(BLOCK_M, BLOCK_N, SLICE * warps * slices, num_warps=warps, num_stages=1)


# Longest step first. With more slices a warp FP8, which is multiplied as fp16, would spill.
CONFIGS = (_config(16, 2), _config(8, 2), _config(8, 1), _config(4, 1))


class Decode(ScaledMm):
    template = "scaled_mm/decode/template"
    is_gluon = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device):
            return found
        for member in problem.members or (problem,):
            if found := alignment_rejection(member):
                return found
        if device.arch != ARCH:
            detail = f"measured on sm_{ARCH}, this is sm_{device.arch}"
        elif outside := problem.rows_outside(0, BLOCK_M):
            detail = outside
        elif not problem.is_even_k(SLICE):
            detail = f"{SLICE} does not divide K, or K is symbolic"
        elif problem.m * problem.n == 1:
            detail = "Inductor stores a single element without a layout"
        elif problem.n * problem.k > self.max_weight(problem):
            detail = f"M = {problem.m}, N = {problem.n}, K = {problem.k} is large"
        else:
            return None
        return Rejection(RejectionCode.NO_KERNEL, detail)

    def max_weight(self, problem: Problem) -> int:
        """Bytes up to which this kernel is faster than the next."""
        return MAX_WEIGHT

    def max_registers(self, problem: Problem, config: GemmConfig, device: Device) -> int:
        return MAX_REGISTERS

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        return {
            **super().constants(spec, problem, config, device),
            **{name: str(found) for name, found in layouts(config).items()},
            "K_SIZE": problem.k,
            "WARPS": config.num_warps,
            "SLICES": slices(config),
            "UNROLLED": unrolled(problem, config),
            "MAX_REGISTERS": self.max_registers(problem, config, device),
        }

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Best guess first: 16 warps if an SM has one tile at most, else 8; a step below 2 * K."""
        is_one_round = problem.n <= BLOCK_N * device.num_sms
        fitting = (c for c in CONFIGS[not is_one_round :] if c.block_k < 2 * problem.k)
        best = next(fitting, CONFIGS[-1])
        return [best, *(config for config in CONFIGS if config != best)]

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        return unlisted_rejection(config, CONFIGS) or horizontal.config_rejection(problem, config)


class W8A8Decode(Decode, Int8Kernel):
    name = "w8a8_decode"
    is_horizontal = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        return super().rejection(spec, problem, device) or reject_if_only_mm(spec, problem)


class Fp8Decode(Decode, Fp8Kernel):
    name = "fp8_decode"
    is_horizontal = True

    def max_weight(self, problem: Problem) -> int:
        return MAX_WEIGHT_HORIZONTAL if problem.members else MAX_WEIGHT_FLOAT


class Fp8BlockDecode(Decode, Fp8Kernel):
    name = "fp8_block_decode"
    family = "fp8_block"

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        return super().rejection(spec, problem, device) or reject_unless_128(spec)


class DecodeQuantize(Decode):
    is_horizontal = False
    quantizes = True

    def max_weight(self, problem: Problem) -> int:
        return MAX_WEIGHT_QUANTIZED.get(padded_m(problem), 0)

    def max_registers(self, problem: Problem, config: GemmConfig, device: Device) -> int:
        """Few if three CTAs an SM take fewer rounds of tiles than two."""
        if x_slices(problem, config) > MAX_X_SLICES_FEW_REGISTERS:
            return MAX_REGISTERS
        tiles_per_sm = problem.n / (BLOCK_N * device.num_sms)
        is_faster = math.ceil(tiles_per_sm / 3) < math.ceil(tiles_per_sm / 2)
        return FEW_REGISTERS if is_faster else MAX_REGISTERS

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        found = super().constants(spec, problem, config, device)
        has_room = found["MAX_REGISTERS"] > FEW_REGISTERS
        return found | {
            **{name: str(each) for name, each in x_layouts(problem, config).items()},
            "ROWS": padded_m(problem),
            "KEEPS_X": has_room or x_slices(problem, config) <= KEPT_X_SLICES,
        }

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if found := super().config_rejection(spec, problem, config, device):
            return found
        if x_slices(problem, config) > MAX_X_SLICES:
            detail = f"{config} has more than {MAX_X_SLICES} slices of x a warp"
            return Rejection(RejectionCode.REGISTERS, detail)
        return None


class W8A8DecodeQuantize(DecodeQuantize, W8A8Decode):
    name = "w8a8_decode_quantize"


class Fp8DecodeQuantize(DecodeQuantize, Fp8Decode):
    name = "fp8_decode_quantize"


def padded_m(problem: Problem) -> int:
    """M, rounded up to a power of two."""
    return 1 << (problem.m - 1).bit_length()


def x_slices(problem: Problem, config: GemmConfig) -> int:
    """Slices of x, of all rows, that a warp quantizes; one of fp32 counts twice."""
    rows = padded_m(problem) * math.ceil(problem.k / (SLICE * config.num_warps))
    return rows * problem.quantized_bytes // 2


def slices(config: GemmConfig) -> int:
    """Slices of K that a warp has in a step."""
    return config.block_k // (SLICE * config.num_warps)


def unrolled(problem: Problem, config: GemmConfig) -> int:
    """Steps that are unrolled: all, if they are few and only the last one is masked. Without a mask
    unrolling is slower."""
    steps = math.ceil(problem.k / config.block_k)
    return 1 if problem.is_even_k(config.block_k) or steps > MAX_UNROLLED else steps


def layouts(config: GemmConfig) -> dict[str, Layout]:
    """Which lane reads which part of A and B, as packed int32 words and as their bytes; and which
    lane adds the partials of all warps: neighbouring lanes store neighbouring columns."""
    warp: Dim = ("warp", config.num_warps)
    eight, four, half, word, byte = ("eight", 8), ("four", 4), ("half", 2), ("word", 4), ("byte", 4)
    found = {}
    for name, rows in (("B", BLOCK_N), ("A", BLOCK_M)):
        axes = ((warp,), (("more", rows // 8), eight), (half, four, word))
        read: Any = {"lanes": (four, eight), "warps": (warp,)}
        found[f"{name}_WORDS"] = layout(axes, **read)
        found[f"{name}_BYTES"] = layout((*axes, (byte,)), **read)
    column_bits, row_bits = _bits("column", BLOCK_N), _bits("row", BLOCK_M)
    lowest = [*reversed(column_bits), *reversed(row_bits)]
    count = config.num_warps.bit_length() - 1
    adding = [*lowest[5 : 5 + count], *[("none", 2)] * count][:count]
    stored: Any = {"lanes": lowest[:5], "warps": adding}
    found["SUMS"] = layout(((warp,), column_bits, row_bits), **stored)
    found["EPILOGUE"] = layout((row_bits, column_bits), **stored)
    return found


def x_layouts(problem: Problem, config: GemmConfig) -> dict[str, Layout]:
    """Which lane quantizes which part of the rows of x, and which one reads which part of the
    result: as of A, with the rows repeated up to BLOCK_M."""
    rows = ("row", padded_m(problem))
    again = ("again", BLOCK_M // rows[1])
    warp: Dim = ("warp", config.num_warps)
    words, byte, half, four, word = (
        *(("words", 32), ("byte", 4)),
        *(("half", 2), ("four", 4), ("word", 4)),
    )
    integers = ((again,), (rows,), (warp, half, four, word, byte))
    return {
        "X": layout(((rows,), (warp, words, byte)), lanes=(words,), warps=(warp,)),
        "A_ROWS": layout(integers, lanes=(four, rows, again), warps=(warp,)),
    }


def _bits(name: str, size: int) -> tuple[Dim, ...]:
    """A dimension as one of size 2 per bit, from high to low."""
    return tuple((f"{name}{bit}", 2) for bit in reversed(range(size.bit_length() - 1)))


W8A8_DECODE = W8A8Decode()
FP8_DECODE = Fp8Decode()
FP8_BLOCK_DECODE = Fp8BlockDecode()
W8A8_DECODE_QUANTIZE = W8A8DecodeQuantize()
FP8_DECODE_QUANTIZE = Fp8DecodeQuantize()
