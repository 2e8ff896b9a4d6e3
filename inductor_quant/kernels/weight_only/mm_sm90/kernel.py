"""``weight_only_mm_sm90``: x [M, K] @ W [K, N] for every weight format, in Gluon.

Chosen on sm_90 for 16-bit x whose rows are aligned, when no kernel for one format takes the GEMM.

swap_ab, with wgmma. The loads and the arithmetic follow from the digits of the format: each word is
loaded once, straight to the registers of one thread, dequantized there in fp32 and stored to shared
memory as the first operand. One tile is dequantized while another is multiplied and the words of a
third are loaded.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from inductor_quant.kernels.codegen.byte_layout import byte_layout_of
from inductor_quant.kernels.codegen.packed_layout import BASES, packed_layout_of
from inductor_quant.kernels.codegen.packed_tile import contiguous_axis
from inductor_quant.kernels.codegen.tile_digits import TilePlan, tile_digits, tile_plan
from inductor_quant.kernels.codegen.words import as_words
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, MEDIUM_M, SMALL_M, Device, Problem, Weight
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.mm_sm90.codegen import TABLE, MMSm90Codegen, is_in_place
from inductor_quant.kernels.weight_only.rules import WIDE_N, bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec
from inductor_quant.spec.weight_format import Field, WeightFormat

WARPGROUP = 4
W_TILES = 2
MAX_ACCUMULATORS = 128  # per thread
# By block_m: K is split up to so many CTAs per SM; (block_n, block_k, warps, stages), best first.
_BLOCKS = {
    16: (4, ((64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 4, 4))),
    32: (3, ((64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 4, 4))),
    64: (3, ((128, 128, 4, 3), (128, 64, 4, 4), (64, 64, 4, 4))),
    128: (1, ((128, 128, 8, 3), (128, 64, 8, 4), (64, 64, 4, 4))),
    256: (1, ((128, 64, 8, 4), (64, 64, 4, 4))),
}
MAX_SPLIT, MIN_K_ITERS = 8, 4
# A tile whose CTAs leave more of the SMs idle comes after tiles that make more CTAs.
MIN_FILL = 0.7
# Above this M writing W once is faster; for tables and 8 bits from half of MEDIUM_M on.
MAX_M = 192
# Up to this M kernels for one layout are faster: for packed weights in groups of GROUP and more,
# and for bytes with one scale a column. At large N they are up to SMALL_M.
PACKED_M, BYTES_M, GROUP = DECODE_M, SMALL_M, 64
MIN_WIDTH = 3  # narrower fields are faster there at every M


def _varying(format: WeightFormat) -> list[Field]:
    """The scales and zero points that change with every k, as where groups run along N."""
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    return [field for field in operands if format.block(field)[0] == 1]


def n_order(format: WeightFormat) -> list[str]:
    """The digits of n in the order in which a tile covers them. The last ones choose a value of a
    word; before them come those that scales do not depend on which change with every k."""
    varying, in_word = _varying(format), format.code.offset.digits

    def rank(name: str) -> int:
        is_shared = bool(varying) and all(name not in field.digits for field in varying)
        return 2 if name in in_word else int(is_shared)

    return sorted(format.digits("n"), key=rank)


def plan_of(weight: Weight, config: GemmConfig) -> TilePlan | None:
    """How a tile is assigned to threads; None: the blocks end within a digit, or are too small."""
    weight = as_words(weight).weight
    format = weight.format
    n = tile_digits(format, "n", config.block_n, n_order(format))
    k = tile_digits(format, "k", config.block_k)
    if not n or not k:
        return None
    # These are computed where only the position within the tile is known.
    outer = {digit.name for digit in k if digit.outer > 1}
    for field in format.fields():
        tables = {name for index in field.index for name, _ in index.tables}
        if (field.offset.digits | tables) & outer:
            return None
    is_paired = is_in_place(format.code, 8)
    return tile_plan(weight, format.code, n, k, warps=config.num_warps, is_paired=is_paired)


class WeightOnlyMMSm90(rules.WeightOnlyKernel):
    name = "weight_only_mm_sm90"
    template = "weight_only/mm_sm90/template"
    is_gluon = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if device.arch not in rules.WGMMA_ARCHS:
            return no_kernel(f"written for sm_90, this is sm_{device.arch}")
        refused = rules.rejection(spec, problem, device) or rules.reject_if_unaligned_rows(problem)
        if refused is not None:
            return refused
        if spec.a.dtype not in BASES:
            return no_kernel(f"x of {spec} does not have 16 bits")
        least, most = _rows(spec, problem)
        if not least <= problem.m <= most or _is_packed_medium_m(spec, problem):
            return no_kernel(f"M = {problem.m} is not {least} to {most}, or another is faster")
        return _format_rejection(rules.weight_of(problem))

    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> MMSm90Codegen:
        plan = plan_of(rules.weight_of(problem), config)
        assert plan is not None
        view = as_words(rules.weight_of(problem))
        tile = rules.tile_of(spec, view.weight, config)
        return MMSm90Codegen(tile, view, plan, n_order(view.weight.format))

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if problem.k % (config.split_k * config.block_k):
            return bad_blocks(f"{config} does not divide K={problem.k}")
        refused = split_k.reject_if_unbounded(problem, config)
        if refused is not None:
            return refused
        is_tile = config.num_warps in (WARPGROUP, 2 * WARPGROUP) and config.block_m <= 256
        if not is_tile or config.block_n % (16 * config.num_warps) or config.block_k % 64:
            return bad_blocks(f"{config} is no tile of wgmma")
        if config.num_stages < 3 or plan_of(rules.weight_of(problem), config) is None:
            return bad_blocks(f"{config} does not suit the digits of {problem.weight}")
        shared = config.num_stages * config.block_m + W_TILES * config.block_n
        return rules.reject_if_too_many_accumulators(config, MAX_ACCUMULATORS) or tile_rejection(
            dataclasses.replace(config, block_m=max(16, config.block_m)),  # rows of x are second
            device,
            element_bytes=2,
            shared_bytes=2 * shared * config.block_k,
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        block_m = min(MEDIUM_M, max(8, 1 << (problem.m - 1).bit_length()))
        ctas_per_sm, blocks = _BLOCKS[max(DECODE_M, block_m)]
        found = []
        for block in blocks:
            config = split_k.with_split_k(
                problem,
                GemmConfig(block_m, *block),
                max_ctas=int(ctas_per_sm * device.num_sms),
                max_split=MAX_SPLIT,
                min_k_iters=MIN_K_ITERS,
            )
            if self.config_rejection(spec, problem, config, device) is None:
                found.append(config)
        enough = MIN_FILL * device.num_sms
        found.sort(key=lambda config: -min(enough, _num_ctas(problem, config)))
        return split_k.same_split(found)


def _num_ctas(problem: Problem, config: GemmConfig) -> int:
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    return tiles * config.split_k


def _rows(spec: QuantGemmSpec, problem: Problem) -> tuple[int, int]:
    """(smallest, largest) M for which no other kernel is faster."""
    weight = rules.weight_of(problem)
    format, (loop_ops, _) = weight.format, rules.dequant_ops_of(spec, weight)
    packed, is_byte = packed_layout_of(weight), format.code.width in (0, 8)
    is_wide = problem.n >= WIDE_N
    least, most = 1, MAX_M
    if is_byte or format.element != format.code:
        most = MEDIUM_M // 2
    if is_byte and byte_layout_of(weight) is not None:
        least = 1 + (BYTES_M if not loop_ops else PACKED_M if is_wide else 0)
    if packed is not None and rules.group_size_of(spec, weight) >= GROUP:
        least = 1 + (SMALL_M if is_wide and rules.is_int4_along_k(packed) else PACKED_M)
        most = 0 if packed.width < MIN_WIDTH else MAX_M
    if _varying(format):
        most = SMALL_M  # a scale for each weight of a tile is loaded
    return least, most


def _is_packed_medium_m(spec: QuantGemmSpec, problem: Problem) -> bool:
    """Whether ``weight_only_medium_m`` takes the GEMM and words are contiguous along K: it is as
    fast."""
    weight = rules.weight_of(problem)
    packed = packed_layout_of(weight)
    if packed is None or contiguous_axis(weight, packed) != "k":
        return False
    is_medium = SMALL_M < problem.m <= MEDIUM_M // 2
    return is_medium and rules.group_size_of(spec, weight) >= GROUP


def _format_rejection(weight: Weight) -> Rejection | None:
    format = weight.format
    if set(format.digits("k") + format.digits("n")) - format.code.digits:
        return no_kernel("quantized values are repeated")
    if format.code.minus or format.code.high:
        return no_kernel("a value is a difference of integers, or joined from several fields")
    table = format.element
    if table != format.code:
        sizes = weight.tensors[table.source].shape
        if sizes != (TABLE,) or len(table.index) != 1 or table.width:
            return no_kernel(f"a table of {sizes}, not of {TABLE} values")
    dtype = weight.tensors[format.code.source].dtype
    if dtype not in (torch.int32, torch.int8, torch.uint8) or format.code.float8:
        return no_kernel(f"quantized values in {dtype}")
    if format.code.offset.is_data:
        return no_kernel("the offset of a value in its word is data")
    for field in format.fields():
        if any(index.bounds(format.radix)[0] < 0 for index in field.index):
            return no_kernel("positions are counted from the end")
    last = set(format.digits("k")[-1:])
    for op in format.dequant_ops:
        if not isinstance(op.operand, Field):
            continue
        if op.kind == "div" or op.operand.size:
            return no_kernel("scales divide, or their groups are counted from the end")
        if any(nested.digits & last for nested in op.operand.nested):
            return no_kernel("the group of each k is data")
    return None


WEIGHT_ONLY_MM_SM90 = WeightOnlyMMSm90()
