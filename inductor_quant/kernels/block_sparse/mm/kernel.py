"""``block_sparse_mm`` and ``block_sparse_mm_tma``: x [M, K] times a block-sparse W, in Triton.

Blocks of 16, 32, 64 and 128, square or not, fp16 and bf16, every M, from sm_80 on. A CTA reads the
blocks of its row of blocks and the columns of x that they multiply; for a block that is not stored
nothing is read or multiplied. Triton pipelines the gathered loads: the columns of a later step are
loaded while the loads of x and W of an earlier one are in flight.

``block_sparse_mm`` reads x by pointers, in steps of several narrow blocks or a part of a wide one.
``block_sparse_mm_tma`` is for many rows on sm_90: TMA brings the columns of x of one block, or of a
part of it. It is bound by the rate at which L2 delivers x, of which small blocks reuse little.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from inductor_quant.kernels.config import (
    RESERVED_SHARED_MEMORY,
    GemmConfig,
    shared_memory,
    tile_rejection,
)
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.problem import DECODE_M, INTERPRETER_ARCH, MEDIUM_M, Device, Problem
from inductor_quant.kernels.shared import split_k
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import BlockSpec, QuantGemmSpec

MIN_ARCH = 80  # bf16, cp.async
FP8_ARCH = 89  # below, e4m3 is decoded by integer arithmetic
DTYPES = (torch.bfloat16, torch.float16, torch.int8)
TMA_ARCHS = (INTERPRETER_ARCH, 90)
# TMA: the smallest block, the smallest M, and by the rows of a block the fewest tiles per SM.
# Making its descriptor takes a CTA as long as several steps.
MIN_TMA_BLOCK = 32
MIN_TMA_M = 257
MIN_TMA_TILES = {32: 2, 64: 4}
MAX_TMA_K = 64  # 128 bytes, the longest row of a box
GROUP_BYTES = 2**23  # of x: the tiles of it that are walked together stay in L2
MAX_M_OF_64 = 64  # up to so many rows a tile has 64
# CTAs share a row of blocks with at least LONG columns and UNEVEN times the mean.
LONG, UNEVEN = 2048, 3
MAX_WARPS = 16  # of an SM at once, by their registers


class BlockSparseMM(Kernel):
    name = "block_sparse_mm"
    family = "block_sparse"
    template = "block_sparse/mm/template"
    x_by_tma: ClassVar[bool] = False

    grid = staticmethod(split_k.grid)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if 0 < device.arch < MIN_ARCH:
            return Rejection(RejectionCode.DEVICE, f"sm_{device.arch} has no bf16 and cp.async")
        if spec.a.dtype not in DTYPES:
            return Rejection(RejectionCode.NO_KERNEL, f"{spec}: no blocks of fp16, bf16 or int8")
        return None

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        block, scale = blocks_of(spec), spec.b.scale
        is_decoded = spec.b.dtype == torch.float8_e4m3fn and 0 < device.arch < FP8_ARCH
        scaled = scale.block if scale is not None else (0, 0)
        return {
            "N": problem.n,
            "BN": block.n,
            "BK": block.k,
            "ROWS": block.rows,
            "SPLIT_K": config.split_k,
            "TAKES_TURNS": takes_turns(problem, config, device, _shared_bytes(config)),
            "STAGES": config.num_stages,
            "X_BY_TMA": self.x_by_tma,
            "SWAP_AB": device.arch in TMA_ARCHS and swaps(config),
            "MASK_M": problem.has_masked_rows(config.block_m),
            "SCALED_ROWS": scaled == (-1, 1),
            "SCALED_BLOCKS": scaled[0] > 0,
            "ROWS_OF_BLOCKS": scaled == (block.k, 1),
            "DECODE": is_decoded and "tl.float8e4nv",
            "IS_CAST": spec.b.dtype != spec.a.dtype,
            "HAS_BIAS": spec.bias,
            # of the value that the template stores
            "ACC_TYPE": "tl.int32" if spec.a.dtype == torch.int8 else "tl.float32",
        }

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        block = blocks_of(spec)
        detail = ""
        if block.height % config.block_n:
            detail = f"{config}: BLOCK_N must divide the {block.height} rows of a list of blocks"
        elif block.rows > 1 and config.block_k > block.k:
            detail = f"{config}: rows of blocks are together, so a step is within one block"
        if detail:
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
        if config.split_k > 1 and spec.a.dtype == torch.int8:
            return Rejection(RejectionCode.BLOCK_SHAPE, f"{config}: partials of int8 are not exact")
        one_more = dataclasses.replace(config, num_stages=config.num_stages + 2)
        return split_k.reject_if_unbounded(problem, config) or tile_rejection(
            config,
            device,
            element_bytes=spec.a.dtype.itemsize,
            shared_bytes=_shared_bytes(one_more),
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Best guess first. A CTA that has an SM for itself has more warps."""
        block = blocks_of(spec)
        narrow, wide = min(block.n, 32), min(block.n, 64)
        ctas = problem.n // narrow * -(-problem.m // 64)
        if problem.m <= DECODE_M:
            listed = [
                GemmConfig(16, narrow, 128, 4, 7),
                GemmConfig(16, narrow, 128, 2, 7),
                GemmConfig(16, narrow, 64, 2, 9),
            ]
            is_few = ctas <= 2 * device.num_sms
            if narrow == 16:
                first = 1 if is_few else 2
            else:
                first = 0 if is_few and 2 * ctas > device.num_sms else 2
            listed.insert(0, listed.pop(first))
            if not is_few and (block.n, block.k) == (32, 32) and spec.b.dtype == spec.a.dtype:
                listed.insert(0, GemmConfig(16, 32, 32, 1, 9))
            if is_few and _is_uneven(block, problem):
                listed = [GemmConfig(16, narrow, 256, 4, 7, split_k=4), *listed]
        elif problem.m <= MAX_M_OF_64:
            listed = [
                GemmConfig(64, narrow, 128, 4, 5),
                GemmConfig(64, narrow, 64, 4, 7),
                GemmConfig(64, wide, 64, 4, 7),
            ]
            listed = listed[::-1] if block.n == 64 else listed
        elif narrow == block.n == 32:
            listed = [GemmConfig(64, 32, 32, 2, 8), GemmConfig(64, 32, 128, 4, 5)]
            tall = GemmConfig(128, 32, 32, 2, 8)
            if problem.m <= MEDIUM_M:
                listed = listed[::-1] if ctas <= device.num_sms else listed
            elif tiles(problem, tall) >= 4 * device.num_sms:
                listed.insert(0, tall)
        else:
            listed = [GemmConfig(128, wide, 64, 4, 7), GemmConfig(64, wide, 64, 4, 7)]
            is_few = tiles(problem, listed[0]) < 2 * device.num_sms
            listed = [*(listed[::-1] if is_few else listed), GemmConfig(256, wide, 64, 8, 5)]
        listed.append(GemmConfig(16, 16, 64, 4, 3))
        if block.rows > 1:
            listed.insert(0, GemmConfig(128, min(block.height, 128), 64, 4, 5))
            listed = [dataclasses.replace(c, block_k=min(c.block_k, block.k)) for c in listed]
        listed = list(dict.fromkeys(listed))
        fit = [c for c in listed if not self.config_rejection(spec, problem, c, device)]
        return split_k.same_split(fit) if fit else []


class BlockSparseMMTma(BlockSparseMM):
    name = "block_sparse_mm_tma"
    x_by_tma = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device):
            return found
        block, detail = blocks_of(spec), ""
        if device.arch not in TMA_ARCHS:
            detail = f"its tiles are those of sm_90, this is sm_{device.arch}"
        elif min(block.n, block.k) < MIN_TMA_BLOCK:
            detail = f"blocks of {block.n} x {block.k} are too narrow for TMA"
        elif problem.m < MIN_TMA_M:
            detail = f"M = {problem.m}: {MIN_TMA_M} is the least where TMA is faster"
        elif not problem.has_aligned_rows:
            detail = "TMA cannot read x: its rows are not contiguous or aligned"
        least = MIN_TMA_TILES.get(block.n, 0) * device.num_sms
        if not detail and tiles(problem, _tall(block)) < least:
            detail = f"fewer than {least} tiles"
        return Rejection(RejectionCode.NO_KERNEL, detail) if detail else None

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if config.block_k > min(blocks_of(spec).k, MAX_TMA_K):
            detail = f"{config}: a step is within one block, and {MAX_TMA_K} columns at most"
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
        return super().config_rejection(spec, problem, config, device)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        block = blocks_of(spec)
        tall = _tall(block)
        step = min(block.k, MAX_TMA_K)
        listed = [tall, GemmConfig(128, min(block.n, 64), step, 4, 5)]
        listed.append(dataclasses.replace(listed[1], block_m=64, num_stages=7))
        listed = [
            dataclasses.replace(c, group_m=_group(spec, problem, c)) for c in dict.fromkeys(listed)
        ]
        return [c for c in listed if not self.config_rejection(spec, problem, c, device)]


def _group(spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> int:
    """How many tiles of x are walked together: those of GROUP_BYTES."""
    return max(1, GROUP_BYTES // (config.block_m * problem.k * spec.a.dtype.itemsize))


def _shared_bytes(config: GemmConfig) -> int:
    """Of 16-bit tiles. Triton gives half of the stages to loads of columns, which come first."""
    buffers = dataclasses.replace(config, num_stages=(config.num_stages + 1) // 2)
    return shared_memory(buffers, 2)


def takes_turns(problem: Problem, config: GemmConfig, device: Device, shared_bytes: int) -> bool:
    """Whether some CTAs begin when others end, so that the longest rows should come first."""
    at_once = min(
        MAX_WARPS // config.num_warps,
        device.shared_memory // (shared_bytes + RESERVED_SHARED_MEMORY),
    )
    ctas = tiles(problem, config) * config.split_k
    return not problem.m_is_bounded or ctas > at_once * device.num_sms


def _tall(block: BlockSpec) -> GemmConfig:
    """The tile for many rows."""
    height, step = min(block.height, 128), min(block.k, MAX_TMA_K)
    if height == 64:
        return GemmConfig(256, 64, min(step, 32), 4, 7 if block.rows == 1 else 5)
    return GemmConfig(256 if height == 32 else 128, height, step, 4, 5)


def _is_uneven(block: BlockSpec, problem: Problem) -> bool:
    """Whether one row of blocks takes much longer than the others."""
    mean = block.count / max(1, problem.n // block.n)
    return block.longest * block.k >= LONG and block.longest >= UNEVEN * mean


def swaps(config: GemmConfig) -> bool:
    """Whether rows of W are those of the matrix instruction: wgmma then reads 64 of them for up to
    256 rows of x. With 2 warps there is no wgmma, and x has the longer side."""
    is_tall = config.block_m > config.block_n
    return is_tall and (config.block_n >= 64 or config.num_warps == 2)


def tiles(problem: Problem, config: GemmConfig) -> int:
    return -(-problem.m // config.block_m) * (problem.n // config.block_n)


def blocks_of(spec: QuantGemmSpec) -> BlockSpec:
    assert spec.b.blocks is not None
    return spec.b.blocks


BLOCK_SPARSE_MM_TMA = BlockSparseMMTma()
BLOCK_SPARSE_MM = BlockSparseMM()
