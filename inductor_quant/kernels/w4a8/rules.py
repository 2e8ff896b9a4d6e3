"""What the kernels of the ``w4a8`` family share: checks, and their base class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import WeightTile
from inductor_quant.kernels.codegen.dialect import TRITON_TYPES
from inductor_quant.kernels.codegen.digits.narrow import is_in_place
from inductor_quant.kernels.codegen.digits.tile import TilePlan, word_strides
from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import DECODE_M, Device, Problem, Weight
from inductor_quant.kernels.scaled_mm.group_large_m_sm90.kernel import (
    FP8_GROUP_LARGE_M_SM90,
    W8A8_GROUP_LARGE_M_SM90,
)
from inductor_quant.kernels.w4a8.quads import (
    MAX_MAGIC_K,
    QUAD,
    SIGN,
    is_quad,
    is_scaled_quad,
    zero_of,
)
from inductor_quant.kernels.weight_only.digit_tiles import format_rejection, n_order, plan_of
from inductor_quant.kernels.weight_only.rules import (
    WeightOnlyKernel,
    no_kernel,
    reject_if_unaligned_rows,
)
from inductor_quant.ops import fp8, w4a8, w8a8
from inductor_quant.ops.weight_only import preferred_rows
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec, dtype_name
from inductor_quant.spec.weight_format import Field, WeightFormat

MIN_ARCH = 80
MIN_GROUP = 128  # elements along K; smaller ones have not been timed
EXACT_IN_FP32 = 1 << 24
# A zero point needs the sums of W's columns, unless it is subtracted from x. Up to this M a kernel
# of weight_only then takes less time than writing the 8-bit weight, as it does for e4m3.
MAX_M_IN_16_BITS = 128
# Of groups: beyond these M, from this K on, ``is_written_in_groups``. The first is of what
# ``w4a8_mm_sm90`` takes at any M, the second of what a kernel of weight_only would take: e4m3, and
# zero points of groups.
MAX_M_UNPACKED, MAX_M_AS_FLOATS, MIN_K_WRITTEN = 1536, 1024, 4096


class W4A8Kernel(WeightOnlyKernel):
    """A kernel of the family; a subclass writes ``codegen`` and says when it applies."""

    family = "w4a8"
    inputs_of_x = ("A", "A_SCALE")

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        """Those that depend on what the op is given are ``W4A8Call.gemm``'s."""
        return super().constants(spec, problem, config, device) | {
            "IS_INTEGER": True,
            "BLOCK_SCALED": False,
            "SUM_B": False,
            "A_SCALE_GROUPED": False,
            "B_SCALE_GROUPED": False,
            "HAS_B_ZERO_POINT": False,
            "EXACT_B_ZERO": False,
        }


def weight_of(problem: Problem) -> Weight:
    assert problem.weight is not None
    return problem.weight


def tile_of(spec: QuantGemmSpec, weight: Weight, config: GemmConfig) -> WeightTile:
    """The ops that the loop applies; the last may be the scale of a group."""
    return WeightTile(weight, config, spec.a.dtype, weight.format.dequant_ops)


def quad_plan(weight: Weight, config: GemmConfig, *, own: bool = False) -> TilePlan | None:
    """How a tile is assigned to threads that unpack four values of a register at once; None: it
    suits no such plan, or scales or zero points change within it."""
    format = as_words(weight).weight.format
    tile_k = config.block_k // (config.num_warps if own else 1)
    if w4a8.split(format)[1] is not None and tile_k > MAX_MAGIC_K:
        return None
    fields = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    if any(rows > 0 and rows % tile_k for rows, _ in map(format.block, fields)):
        return None
    plan = plan_of(as_words(weight), config, own=own, low=QUAD)
    return plan if plan is not None and is_quad(format, plan.low) else None


def quad_rejection(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    """Rejects what the kernels that unpack four values at once do not take."""
    refused = (
        rejection(spec, problem, device)
        or reject_if_unaligned_rows(problem)
        or format_rejection(weight_of(problem), weight_of(problem).format.dequant_ops)
    )
    if refused is not None:
        return refused
    if spec.a.dtype == w4a8.E4M3 and zero_of(weight_of(problem).format) != SIGN:
        return no_kernel("another zero point than 8, of e4m3")
    if not is_in_place(as_words(weight_of(problem)).weight.format.code, 4):
        return no_kernel("a value is not one half of a byte")
    format, dtypes = weight_of(problem).format, [t.dtype for t in weight_of(problem).tensors]
    if format.to_int8 and not is_scaled_quad(format, dtypes):
        return no_kernel("a scale in another dtype than fp16 is rounded, or other operations are")
    refused = _group_rejection(spec, weight_of(problem)) if spec.group_size else None
    return refused or (_reject_if_layouts_differ(problem) if problem.members else None)


def _reject_if_layouts_differ(problem: Problem) -> Rejection | None:
    """One kernel text, made for the widest weight, reads all weights of a horizontal launch. Where
    their N differ, that is the radix of the digit whose tiles come in turn."""
    layouts = set()
    for view in map(as_words, map(weight_of, problem.members)):
        format, name = view.weight.format, n_order(view.weight.format)[0]
        if any(index.is_data for field in format.fields() for index in field.index):
            return no_kernel("positions in a weight are data")
        is_first = name == format.digits("n")[0]
        dtypes = tuple(tensor.dtype for tensor in view.weight.tensors)
        any_n = dataclasses.replace(format, n=(1, *format.n[1:])) if is_first else format
        layouts.add((any_n, dtypes, view.dim))
    return None if len(layouts) == 1 else no_kernel("the weights of one launch differ in layout")


def _group_rejection(spec: QuantGemmSpec, weight: Weight) -> Rejection | None:
    """Rejects groups for which kernels of weight_only may be faster."""
    view = as_words(weight).weight
    if spec.group_size % MIN_GROUP:
        return no_kernel(f"groups are no multiples of {MIN_GROUP} along K")
    if zero_of(view.format) is None:
        return no_kernel("a zero point of each group")
    strides = word_strides(view, view.format.code)
    if min((s for name, s in strides.items() if name[0] == "n"), default=0) == 1:
        return no_kernel("groups of words that are neighbours along N")
    return None


def exact_rows_in_16_bits(
    format: WeightFormat, dtypes: Sequence[torch.dtype], a_dtype: torch.dtype, zero: str = ""
) -> int:
    """Up to this M a GEMM without groups, which no kernel of the family takes, runs as
    ``weight_only``: if that takes the weight, and fp32 sums of bf16 operands are those of the
    integers. ``zero``: the kind of the activation's zero point, as in a spec."""
    if format.to_int8 or zero == "float":
        return 0
    if a_dtype != w4a8.INT8:
        return MAX_M_IN_16_BITS  # the matrix unit for e4m3 adds in fewer bits
    low, high = w4a8.bounds(format, dtypes) or (0, 0)
    most = max(-low, high) * (255 if zero else 128)
    if format.shape[0] * most > EXACT_IN_FP32:
        return 0
    return MAX_M_IN_16_BITS if zero else DECODE_M


def rows_in_16_bits(
    format: WeightFormat, dtypes: Sequence[torch.dtype], a_dtype: torch.dtype, zero: str = ""
) -> int:
    """``Problem.rows_in_16_bits``: up to this M it runs as ``weight_only``, whose kernels read the
    packed weight."""
    most = preferred_rows(format, torch.bfloat16, dtypes)
    if w4a8.split(format)[1] is not None:
        return most
    return min(most, exact_rows_in_16_bits(format, dtypes, a_dtype, zero))


def is_written_in_groups(spec: QuantGemmSpec, problem: Problem, device: Device) -> bool:
    """Whether a weight that is written once in the type of x, and multiplied in groups, is faster
    than one that is unpacked for each tile of rows."""
    if not spec.group_size or spec.a.zero or problem.members or problem.k < MIN_K_WRITTEN:
        return False
    is_int8 = spec.a.dtype == w4a8.INT8
    is_taken = is_int8 and _group_rejection(spec, weight_of(problem)) is None
    most = MAX_M_UNPACKED if is_taken else MAX_M_AS_FLOATS
    if problem.rows_outside(most + 1, problem.m):
        return False
    kernel = W8A8_GROUP_LARGE_M_SM90 if is_int8 else FP8_GROUP_LARGE_M_SM90
    in_groups = (w8a8 if is_int8 else fp8).make_spec(
        a_scale=spec.a.scale,
        b_scale=ScaleSpec(torch.float32, (spec.group_size, 1)),
        out_dtype=spec.out_dtype,
        bias=spec.bias,
    )
    narrow = spec.out_dtype.itemsize <= 2
    written = dataclasses.replace(problem, weight=None, is_stored_narrow=narrow)
    return kernel.rejection(in_groups, written, device) is None


def is_promoted(spec: QuantGemmSpec) -> bool:
    """Whether the sums of a tile's products are added in fp32: those of groups, and of e4m3."""
    return spec.group_size > 0 or spec.a.dtype == w4a8.E4M3


def has_inexact_partials(spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> bool:
    """Whether the sum of integer partials may exceed what fp32 holds exactly."""
    if config.split_k == 1 or is_promoted(spec):
        return False
    weight = weight_of(problem)
    ends = w4a8.bounds(weight.format, [tensor.dtype for tensor in weight.tensors])
    return ends is None or problem.k * max(map(abs, ends)) * 128 > EXACT_IN_FP32


def rejection(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    """What no kernel of the family takes."""
    if 0 < device.arch < MIN_ARCH:
        detail = f"sm_{device.arch} has no int8 matrix unit that Triton uses"
        return Rejection(RejectionCode.DEVICE, detail)
    if problem.weight is None or spec.out_dtype not in TRITON_TYPES:
        detail = f"no packed weight, or an output in {dtype_name(spec.out_dtype)}"
        return Rejection(RejectionCode.NO_KERNEL, detail)
    if is_written_in_groups(spec, problem, device):
        return no_kernel("a weight of 8 bits written once, multiplied in groups, is faster")
    return None
