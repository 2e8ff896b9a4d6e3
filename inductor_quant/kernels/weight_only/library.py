"""What the alternative to every kernel costs: W written once, and a product of the library.

In cycles of sm_90, of which 1755 are a microsecond; README.md says what was measured."""

from __future__ import annotations

import math

from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.weight_only import rules

# Cycles of both launches; bytes that the GPU reads and writes in a cycle while W stays in the L2
# cache; if it does not, in a cycle beyond the first FROM_L2; bytes that a product reads in one, and
# multiply-adds; cycles of each round of the library's tiles, and of 64 of K in it.
LIBRARY_CYCLES, L2_BYTES_PER_CYCLE, BYTES_PER_CYCLE, FROM_L2 = 7500, 2500, 1550, 8000
READ_PER_CYCLE, MADS_PER_CYCLE, LIBRARY_TILE, ROUND_CYCLES, K_CYCLES = 2670, 246_000, 128, 600, 61


def cycles(problem: Problem, device: Device) -> float:
    size = problem.n * problem.k
    packed = (rules.weight_of(problem).format.code.total_width or 8) / 8
    reads, products = 2 * size / READ_PER_CYCLE, size * problem.m / MADS_PER_CYCLE
    tiles = math.ceil(problem.m / LIBRARY_TILE) * math.ceil(problem.n / LIBRARY_TILE)
    of_round = ROUND_CYCLES + problem.k / 64 * K_CYCLES
    product = math.hypot(reads**2, products**2) ** 0.5
    product += math.ceil(tiles / device.num_sms) * of_round
    written = size * (packed + 2)
    written = max(written / L2_BYTES_PER_CYCLE, written / BYTES_PER_CYCLE - FROM_L2)
    return LIBRARY_CYCLES + written + product
