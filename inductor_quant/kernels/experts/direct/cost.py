"""The time of a configuration of ``experts_direct``, if each row has a tile of its own."""

from __future__ import annotations

import math

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.direct.codegen import MAX_WARPS
from inductor_quant.kernels.weight_only.direct.cost import is_computed

# In cycles, of which 1755 are a microsecond: the launch; the bytes of W that the GPU reads in one.
# Of an iteration, what the SM does for each value of W, and for 64 rows of it; its wait, and for
# each value of a thread. A warp, and each 1024 sums of it.
LAUNCH, BYTES_PER_CYCLE = 2380, 2660
VALUE, PRODUCT, WAIT, WAIT_VALUE = 0.0078, 0.075, 272, 6.4
WARP, SUMS = 53, 250
# Times as many cycles for W: for values above 4 bits, from a table, from one whose entries are
# computed.
WIDE, LOOKED_UP, COMPUTED = 1.25, 2.3, 1.5


def cycles(problem: Problem, config: GemmConfig, device: Device) -> float:
    """Of one row and of the weights of all beside each other."""
    weight = rules.weight_of(problem)
    format = weight.format
    width = format.code.total_width or 8
    slice_k = config.block_k // config.num_warps
    iterations = math.ceil(math.ceil(problem.k / slice_k) / config.num_warps)
    of_one_sm = math.ceil(math.ceil(problem.n / config.block_n) / device.num_sms)
    waves = math.ceil(of_one_sm / (MAX_WARPS // config.num_warps))
    warps, values = of_one_sm * config.num_warps, config.block_n * slice_k
    factor = WIDE if width > 4 else 1.0
    if format.element != format.code:
        factor *= COMPUTED if is_computed(weight) else LOOKED_UP
    busy = values * (VALUE * factor + PRODUCT * config.block_m / 64)
    loop = iterations * (warps * busy + waves * (WAIT + WAIT_VALUE * values / 32 * factor))
    reading = problem.n * problem.k * width / 8 / BYTES_PER_CYCLE
    sums = SUMS * warps * config.block_m * config.block_n / 1024
    return LAUNCH + math.hypot(loop, reading) + sums + WARP * config.num_warps * waves
