"""``block_sparse_direct``: x [M, K] times a block-sparse W for few rows, in Gluon.

Chosen for M <= 16, and M <= 64 while each tile of 16 rows has an SM for itself; for blocks of 32 to
128 columns whose rows are aligned, on sm_80, 86, 89 and 90.

A row of blocks has few of them, so the time is that of one chain of loads: where the row begins,
its columns, x. All blocks of a row are in flight at once: the warps of a CTA share them, and each
lane loads what it multiplies, straight to registers. Two int8 are converted there by two
instructions and a half. The scale of a block multiplies its sums.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant.kernels.block_sparse.direct.codegen import UNIT, BlockSparseDirectCodegen
from inductor_quant.kernels.block_sparse.mm.kernel import FP8_ARCH, blocks_of, takes_turns, tiles
from inductor_quant.kernels.config import GemmConfig, reject_if_split, tile_rejection
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.problem import DECODE_M, INTERPRETER_ARCH, Device, Problem
from inductor_quant.kernels.shared import split_k
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import BlockSpec, QuantGemmSpec

ARCHS = (INTERPRETER_ARCH, 80, 86, 89, 90)
DTYPES = (torch.bfloat16, torch.float16)
MAX_M = 64  # beyond DECODE_M for one tile an SM
ROWS = (8, 16, 32)
FEW_ROWS = 8  # the N of one mma.sync
MAX_HEIGHT = 32  # of a tile
FEWEST_WARPS, MOST_WARPS = 4, 16
# Of W that a thread holds at once; half, where 16 warps hold two tiles of sums.
MAX_VALUES = 128
LONGEST = 1.5  # the longest row of blocks, of the mean, at random places
MAX_CONFIGS = 6


class BlockSparseDirect(Kernel):
    name = "block_sparse_direct"
    family = "block_sparse"
    template = "block_sparse/direct/template"
    is_gluon = True

    grid = staticmethod(split_k.grid)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        block, detail = blocks_of(spec), problem.rows_outside(0, MAX_M)
        if device.arch not in ARCHS:
            detail = f"never run on sm_{device.arch}"
        elif spec.a.dtype not in DTYPES:
            detail = "integer sums"
        elif spec.b.dtype == torch.float8_e4m3fn and 0 < device.arch < FP8_ARCH:
            detail = f"sm_{device.arch} does not convert e4m3"
        elif block.rows > 1 or block.k < UNIT:
            detail = f"blocks of {block.k} columns, {block.rows} rows of them together"
        elif problem.m > DECODE_M and _tiles_an_sm(block, problem, DECODE_M, device) > 1:
            detail = f"M = {problem.m}: more than one tile of {DECODE_M} rows an SM"
        elif not problem.has_weight_descriptors:
            detail = "rows of x or of blocks are not contiguous or aligned"
        return Rejection(RejectionCode.NO_KERNEL, detail) if detail else None

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        block, scale = blocks_of(spec), spec.b.scale
        scaled = scale.block if scale is not None else (0, 0)
        return {
            "CODEGEN": BlockSparseDirectCodegen(config, spec.a.dtype, spec.b.dtype),
            "N": problem.n,
            "BN": block.n,
            "BK": block.k,
            "UNIT": UNIT,
            "TAKES_TURNS": takes_turns(problem, config, device, _shared_bytes(config)),
            "SCALED_ROWS": scaled == (-1, 1),
            "SCALED_BLOCKS": scaled[0] > 0,
            "ROWS_OF_BLOCKS": scaled == (block.k, 1),
            "HAS_BIAS": spec.bias,
            "ACC_TYPE": "tl.float32",
        }

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        block, warps, detail = blocks_of(spec), config.num_warps, ""
        most = MAX_VALUES // 2 if warps > 8 and config.block_m > FEW_ROWS else MAX_VALUES
        if config.block_m not in ROWS:
            detail = f"{config}: BLOCK_M is none of {ROWS}"
        elif config.block_n < 16 or block.n % config.block_n:
            detail = f"{config}: BLOCK_N must divide the {block.n} rows of a block"
        elif config.block_k % (UNIT * warps) or config.num_stages > 1:
            detail = f"{config}: one stage, and for each warp a multiple of {UNIT} columns"
        elif config.block_n * config.block_k > most * 32 * warps:
            detail = f"{config}: a thread holds {most} values at most"
        if detail:
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
        return reject_if_split(config) or tile_rejection(
            GemmConfig(16, config.block_n, UNIT, warps, 1),
            device,
            element_bytes=2,
            shared_bytes=_shared_bytes(config),
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Best guess first. A step should have all units of a row, two or four a warp; where CTAs
        share an SM, or a row takes several steps, fewer warps wait for each other less."""
        block = blocks_of(spec)
        block_m, most_units = (FEW_ROWS, 4) if problem.m <= FEW_ROWS else (DECODE_M, 2)
        mean = block.count / max(1, problem.n // block.n)
        units = (block.longest or math.ceil(LONGEST * mean)) * block.k // UNIT
        share = _tiles_an_sm(block, problem, block_m, device)
        most = MOST_WARPS if share <= 1 else MOST_WARPS // 2 if share <= 2 else FEWEST_WARPS
        if block_m > FEW_ROWS and units > MOST_WARPS * most_units:
            most = min(most, MOST_WARPS // 2)
        each = min(most_units, _power_of_two(units / FEWEST_WARPS))
        warps = min(most, max(FEWEST_WARPS, _power_of_two(units / each)))
        listed = [
            GemmConfig(block_m, height, UNIT * w * u, w, 1)
            for height in dict.fromkeys((min(block.n, MAX_HEIGHT), 16))
            for w, u in ((warps, each), (warps // 2, 2 * each), (2 * warps, each), (warps, 1))
            if w <= MOST_WARPS
        ]
        listed = list(dict.fromkeys(listed))
        fit = [c for c in listed if not self.config_rejection(spec, problem, c, device)]
        return fit[:MAX_CONFIGS]


def _tiles_an_sm(block: BlockSpec, problem: Problem, block_m: int, device: Device) -> float:
    tile = GemmConfig(block_m, min(block.n, MAX_HEIGHT), UNIT, 1, 1)
    return tiles(problem, tile) / device.num_sms


def _shared_bytes(config: GemmConfig) -> int:
    """The sums of each warp, and x."""
    return config.block_m * (4 * config.num_warps * config.block_n + 2 * config.block_k)


def _power_of_two(least: float) -> int:
    return 1 << (math.ceil(least) - 1).bit_length() if least > 1 else 1


BLOCK_SPARSE_DIRECT = BlockSparseDirect()
