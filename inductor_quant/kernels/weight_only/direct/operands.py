"""Where ``weight_only_direct`` applies scales and zero points: to W, to the sums of a warp's tile,
or to x; and how it looks up tables."""

from __future__ import annotations

import torch

from inductor_quant.kernels.codegen.digits import pair_lookup
from inductor_quant.kernels.codegen.digits.narrow import is_in_place
from inductor_quant.kernels.codegen.digits.tile import is_listed, tile_digits
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import DECODE_M, Problem, Weight
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.digit_tiles import (
    n_order,
    plan_of,
    relayed,
    words_in_order,
)
from inductor_quant.kernels.weight_only.direct.codegen import WARP_SIZE
from inductor_quant.kernels.weight_only.direct.scaled_x import along_k
from inductor_quant.ops.dequantize import EXPONENTS
from inductor_quant.spec.gemm import QuantGemmSpec
from inductor_quant.spec.weight_format import DequantOp, Field

ROWS = (8, 16)  # of a tile
# Of W that a thread dequantizes at once; with many float zero points, up to 16 rows, or scaled sums
# of 16. More would spill.
MAX_VALUES, MAX_VALUES_ZEROS = 128, 64
# If scales are applied to the sums of a warp's tile: bits of a value; sums of a thread, with more
# tiles were slower; k, with less columns are scaled too often.
MAX_WIDTH, MAX_SUMS, LEAST_K = 4, 16, 64
# A table is looked up in pairs by CTAs of so many warps; bytes of shared memory that a kernel may
# declare.
LEAST_WARPS_PAIRS, MAX_SHARED = 8, 48 << 10


def scales_sums(spec: QuantGemmSpec, weight: Weight, config: GemmConfig) -> bool:
    """Whether the scales and zero points of groups are applied to the sums of a warp's tile instead
    of W, for which they would take fp32, as zero points that are no integers do.

    (An infinite x gives NaN; a code equal to its zero point adds what fp32 rounds, not 0.)"""
    ops = _ops_of_a_group(spec, weight, config)
    if [op.kind for op in ops] != ["sub", "mul"]:
        return False
    zero, scale = (op.operand for op in ops)
    is_field = isinstance(zero, Field) and isinstance(scale, Field)
    return is_field and _is_float(weight, zero)


def scales_sums_alone(spec: QuantGemmSpec, weight: Weight, config: GemmConfig) -> bool:
    """The same of scales, if zero points are integers, or W floats of 8 bits in blocks: up to 8
    rows, with more it is slower.

    (A sum of integers and x may be infinite where that of W is not, if x is near the largest float;
    scales that may be, times the divisor of W, stay in the loop.)"""
    ops = _ops_of_a_group(spec, weight, config)
    if [op.kind for op in ops] not in (["mul"], ["sub", "mul"]) or config.block_m > ROWS[0]:
        return False
    *zeros, scale = (op.operand for op in ops)
    if not isinstance(scale, Field) or scale.float8 in EXPONENTS:
        return False
    if words_in_order(weight)[0].weight.format.code.float8:  # of a block, which a tile is within
        return weight.format.block(scale)[1] % config.block_n == 0
    is_wide = weight.tensors[scale.source].dtype.itemsize > 2
    return not is_wide and not any(_is_float(weight, zero) for zero in zeros)


def scales_x(spec: QuantGemmSpec, weight: Weight, config: GemmConfig) -> bool:
    """Whether x is scaled instead of W: up to 16 rows in bf16, where scales and zero points change
    with every k, and a tile's columns share them.

    (In fp16 a small scale would leave x few bits. An infinite scale or zero point gives NaN.)"""
    view = words_in_order(weight)[0]
    format, code = view.weight.format, view.weight.format.code
    if spec.a.dtype != torch.bfloat16 or config.block_m > DECODE_M or view.parts:
        return False
    ops, _ = rules.dequant_ops_of(spec, view.weight)
    if [op.kind for op in ops] not in (["mul"], ["sub", "mul"]) or format.element != code:
        return False
    n_digits = tile_digits(format, "n", config.block_n, n_order(format)) or ()
    shared = relayed(format, n_digits)
    fields = [op.operand for op in ops if op.operand in shared]
    is_same = {weight.tensors[field.source].dtype for field in fields} == {spec.a.dtype}
    is_in_order = all(along_k(format, field) for field in fields)
    return len(fields) == len(ops) and is_same and is_in_order and is_in_place(code, 8)


def looks_up_pairs(problem: Problem, config: GemmConfig) -> bool:
    """Whether each CTA writes a table of pairs of values and looks them up there: of a layer, up to
    8 rows, with more it was slower, if the table is not computed."""
    weight = rules.weight_of(problem)
    has_few = config.block_m == ROWS[0] and config.num_warps >= LEAST_WARPS_PAIRS
    if not has_few or problem.groups is not None or weight.format.element.entries:
        return False
    sums = 4 * config.num_warps * config.block_m * config.block_n
    view = words_in_order(weight)[0]
    plan = plan_of(view, config, own=True)
    if plan is None or sums + pair_lookup.MEMORY > MAX_SHARED:
        return False
    return pair_lookup.places_of(view.weight, plan) is not None


def _is_float(weight: Weight, operand: object) -> bool:
    """Whether it is a field of floats."""
    if not isinstance(operand, Field) or operand.width:
        return False
    return weight.tensors[operand.source].dtype.is_floating_point


def _ops_of_a_group(
    spec: QuantGemmSpec, weight: Weight, config: GemmConfig
) -> tuple[DequantOp, ...]:
    """The ops of the loop, if fields have up to 4 bits, or are floats of 8, and a warp's tile is
    within a group along K and leaves room for its sums; else none."""
    view = words_in_order(weight)[0]
    format, slice_k = view.weight.format, config.block_k // config.num_warps
    code = format.code
    is_small = 0 < code.width <= MAX_WIDTH and not view.parts and is_in_place(code, 8)
    is_small = is_small or bool(code.float8)
    if not is_small or format.element != code or config.block_m > DECODE_M:
        return ()
    most = MAX_VALUES if config.block_m == ROWS[0] else MAX_VALUES_ZEROS
    has_room = (
        config.block_m * config.block_n <= MAX_SUMS * WARP_SIZE
        and config.block_n * slice_k <= most * WARP_SIZE
    )
    if slice_k < LEAST_K or not has_room:
        return ()
    ops, _ = rules.dequant_ops_of(spec, view.weight)
    fields = [op.operand for op in ops if isinstance(op.operand, Field)]
    if any(each.high or is_listed(format, each) for each in fields):
        return ()
    groups = [format.block(field)[0] for field in fields]
    return () if any(group > 0 and group % slice_k for group in groups) else tuple(ops)
