"""What the kernels of the ``weight_only`` family share: limits, checks, and their base class.

The family computes ``x [M, K] @ W [K, N]`` for a float x and a packed W. Several kernels serve the
layouts and M that matter most; the general one, ``weight_only_mm``, takes every format.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar

import torch

from inductor_quant.kernels.codegen.base import WeightTile
from inductor_quant.kernels.codegen.dialect import TRITON_TYPES
from inductor_quant.kernels.codegen.digits.tile import word_strides
from inductor_quant.kernels.codegen.gluon_columns import supports_ops
from inductor_quant.kernels.codegen.packed_layout import BASES, PackedLayout, packed_layout_of
from inductor_quant.kernels.codegen.packed_tile import contiguous_axis
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.problem import INTERPRETER_ARCH, Device, Problem, Weight
from inductor_quant.kernels.shared import horizontal, split_k
from inductor_quant.kernels.weight_only.medium_m.codegen import supports_ops as arithmetic_supports
from inductor_quant.ops.weight_only import split_dequant_ops
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec, dtype_name
from inductor_quant.spec.weight_format import DequantOp, Field

# Triton has no bf16 matrix instruction below the first, and does not convert e4m3 below the second.
MIN_ARCH = 80
MIN_ARCH_E4M3 = 89
WGMMA_ARCHS = (INTERPRETER_ARCH, 90)
# From this N on there are enough tiles for every SM without splitting K.
WIDE_N = 16384
ALIGNMENT = 16  # bytes, of the rows of a matrix that a TMA descriptor describes
# Bit offsets of eight int4 values packed in order into an int32: two of one byte are neighbours.
INT4_OFFSETS = tuple(range(0, 32, 4))


class WeightOnlyKernel(Kernel):
    """A kernel of the family; a subclass writes ``codegen`` and says when it applies."""

    family = "weight_only"
    inputs_of_x: ClassVar[tuple[str, ...]] = ("X",)  # those that GEMMs of one launch share
    grid = staticmethod(split_k.grid)

    @abstractmethod
    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> Any:
        """The template constant ``CODEGEN``: writes the statements that depend on the weight."""

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        return {
            "CODEGEN": self.codegen(spec, problem, config),
            "HAS_BIAS": spec.bias,
            "SPLIT_K": config.split_k,
            "STAGES": config.num_stages,
            "ACC_TYPE": "tl.float32",
            **horizontal.constants(problem, config, shared=self.inputs_of_x),
            **self.own_constants(problem, config, device),
        }

    def own_constants(self, problem: Problem, config: GemmConfig, device: Device) -> dict[str, Any]:
        """What this template needs beside the constants of all."""
        return {}


def no_kernel(detail: str) -> Rejection:
    return Rejection(RejectionCode.NO_KERNEL, detail)


def bad_blocks(detail: str) -> Rejection:
    return Rejection(RejectionCode.BLOCK_SHAPE, detail)


def weight_of(problem: Problem) -> Weight:
    assert problem.weight is not None
    return problem.weight


def is_written_along_k(weight: Weight) -> bool:
    """Whether a dequantized W has neighbours along K in memory, as the packed one has."""
    code = weight.format.code
    apart = {name: step for name, step in word_strides(weight, code).items() if step}
    return bool(apart) and min(apart, key=apart.__getitem__)[0] == "k"


def packed_weight_of(problem: Problem) -> tuple[Weight, PackedLayout]:
    """The weight of a problem that ``packed_rejection`` accepts, and its layout."""
    weight = weight_of(problem)
    layout = packed_layout_of(weight)
    assert layout is not None
    return weight, layout


def dequant_ops_of(
    spec: QuantGemmSpec, weight: Weight
) -> tuple[tuple[DequantOp, ...], tuple[DequantOp, ...]]:
    """(ops applied to W in the loop, ops applied to the sum), see ``split_dequant_ops``."""
    element = weight.tensors[weight.format.element.source]
    return split_dequant_ops(weight.format, spec.a.dtype, element.dtype)


def tile_of(spec: QuantGemmSpec, weight: Weight, config: GemmConfig) -> WeightTile:
    return WeightTile(weight, config, spec.a.dtype, *dequant_ops_of(spec, weight))


def group_size_of(spec: QuantGemmSpec, weight: Weight, *, least: int = 1) -> int:
    """How many neighbours along K share the operands of all loop ops, as a power of two; operands
    that change more often than every ``least`` do not count."""
    group = 1 << 30
    loop_ops, _ = dequant_ops_of(spec, weight)
    for op in loop_ops:
        length = weight.format.block(op.operand)[0] if isinstance(op.operand, Field) else -1
        if length >= least:
            group = min(group, length & -length)
    return group


def rejection(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    """What no kernel of the family takes."""
    if 0 < device.arch < MIN_ARCH:
        return Rejection(
            RejectionCode.DEVICE, f"sm_{device.arch} has no matrix unit that Triton uses"
        )
    if problem.weight is None or spec.a.dtype not in TRITON_TYPES:
        return no_kernel(f"{spec} is no weight_only GEMM")
    uses_e4m3 = any(
        tensor.dtype == torch.float8_e4m3fn for tensor in problem.weight.tensors
    ) or any(field.float8 == "e4m3" for field in problem.weight.format.fields())
    if 0 < device.arch < MIN_ARCH_E4M3 and uses_e4m3:
        return Rejection(RejectionCode.DEVICE, f"sm_{device.arch} does not convert e4m3")
    if spec.out_dtype not in TRITON_TYPES:
        return no_kernel(f"no output in {dtype_name(spec.out_dtype)}")
    return None


def packed_rejection(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    """Rejects all but 16-bit x and packed weights, of one layout in a horizontal launch."""
    general = rejection(spec, problem, device)
    if general is not None:
        return general
    if spec.a.dtype not in BASES:
        return no_kernel(f"x of {spec} does not have 16 bits")
    if packed_layout_of(weight_of(problem)) is None:
        return no_kernel("quantized values are not packed side by side in 32 or 8 bits")
    return _reject_if_layouts_differ(problem) if problem.members else None


def _reject_if_layouts_differ(problem: Problem) -> Rejection | None:
    """One kernel text, made for the widest weight, reads all weights of a horizontal launch: they
    may differ in N alone, and the text may not depend on the size of a tensor."""
    layouts = set()
    _, layout = packed_weight_of(problem)
    for member in problem.members:
        weight = weight_of(member)
        format = weight.format
        indices = [index for field in format.fields() for index in field.index]
        if any(index.is_data or index.bounds(format.radix)[0] < 0 for index in indices):
            return no_kernel("positions in a weight are data")
        # N is the product of the digits' radices; the first one is the size that may differ.
        any_n = dataclasses.replace(format, n=(1, *format.n[1:]))
        dtypes = tuple(tensor.dtype for tensor in weight.tensors)
        layouts.add((any_n, dtypes, contiguous_axis(weight, layout)))
    if len(layouts) == 1:
        return None
    return no_kernel("the weights of one launch differ in layout")


def arithmetic_rejection(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    """Rejects packed weights that 16-bit arithmetic does not dequantize as fp32 would."""
    refused = packed_rejection(spec, problem, device)
    if refused is not None:
        return refused
    weight, layout = packed_weight_of(problem)
    loop_ops, _ = dequant_ops_of(spec, weight)
    if arithmetic_supports(loop_ops, weight, layout, spec.a.dtype):
        return None
    return no_kernel("needs a small integer as zero point and a scale of x's dtype")


def is_int4_along_k(layout: PackedLayout) -> bool:
    """Whether an int32 holds eight int4 values in order along K."""
    return layout.axis == "k" and layout.width == 4 and layout.offsets == INT4_OFFSETS


def grouped_int4_rejection(spec: QuantGemmSpec, problem: Problem) -> Rejection | None:
    """Rejects all but int4 along K whose scales and zero points are stored per group, so that a
    lane can take whole packed words and apply the same operands to a slice of K."""
    weight, layout = packed_weight_of(problem)
    if not is_int4_along_k(layout):
        return no_kernel("an int32 does not hold eight values of 4 bits in order along K")
    loop_ops, column_ops = dequant_ops_of(spec, weight)
    if column_ops or not supports_ops(loop_ops):
        return no_kernel("scales or zero points are not plain fields")
    for op in loop_ops:
        if isinstance(op.operand, Field) and weight.format.block(op.operand)[0] == -1:
            return no_kernel("scales or zero points of whole columns")
    return None


def reject_if_unaligned_rows(problem: Problem) -> Rejection | None:
    if problem.has_aligned_rows:
        return None
    return no_kernel(
        "x is not contiguous along K, or its rows do not begin at multiples of 16 bytes"
    )


def block_rejection(
    spec: QuantGemmSpec, weight: Weight, problem: Problem, config: GemmConfig, *, unrolled: int = 1
) -> Rejection | None:
    """Rejects a config unless its blocks divide N and each K split, in loops of ``unrolled``
    iterations, and stay inside one quantization group."""
    if problem.n % config.block_n or problem.k % (unrolled * config.split_k * config.block_k):
        return bad_blocks(f"{config} does not divide N={problem.n}, K={problem.k}")
    group = group_size_of(spec, weight)
    if group % config.block_k:
        return bad_blocks(f"{config}: a block of K exceeds the quantization group of {group}")
    return split_k.reject_if_unbounded(problem, config)


def horizontal_rejection(problem: Problem, config: GemmConfig) -> Rejection | None:
    """Rejects configs that a horizontal launch cannot use, or that gain nothing in one."""
    no_gain = horizontal.reject_if_no_gain(problem) if config.split_k == 1 else None
    return no_gain or horizontal.config_rejection(problem, config)


def reject_if_too_many_accumulators(config: GemmConfig, most: int) -> Rejection | None:
    count = config.block_m * config.block_n // (32 * config.num_warps)
    if count <= most:
        return None
    detail = f"{config} has {count} accumulators per thread; {most} is the most"
    return Rejection(RejectionCode.REGISTERS, detail)


def reject_if_too_many_unpacked(config: GemmConfig, most: int) -> Rejection | None:
    """Limits the dequantized elements of W that a thread holds at once."""
    count = config.block_n * config.block_k // (32 * config.num_warps)
    if count <= most:
        return None
    detail = f"{config} dequantizes {count} elements per thread; {most} is the most"
    return Rejection(RejectionCode.REGISTERS, detail)


def stage_bytes(config: GemmConfig, layout: PackedLayout) -> int:
    """Shared memory of one pipeline stage: 16-bit x and packed weights."""
    packed = config.block_n * config.block_k * layout.bits // layout.count // 8
    return config.block_m * config.block_k * 2 + packed
