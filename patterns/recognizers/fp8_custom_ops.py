"""FP8 products in custom ops, each identified by its whole schema.

An op whose schema has changed is declined, and so is any Triton kernel of a user or producer: its
name and arguments do not say what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import fx

from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..match import Operand, Pattern, RecognizedGemm
from ..matching.operands import Scale, ScaledMatmul, transposed
from . import scaled_mm


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection:
    schema = str(anchor.target._schema)  # type: ignore[union-attr]
    if schema not in _READERS:
        return Rejection(RejectionCode.OPAQUE, schema, anchor.name)
    matmul = _READERS[schema](anchor)
    return matmul if isinstance(matmul, Rejection) else scaled_mm.assemble(matmul)


def _blockwise_fp8_gemm(anchor: fx.Node) -> ScaledMatmul | Rejection:
    """torchao 0.18, ``kernel/blockwise_quantization.py``, after DeepSeek-V3's kernel: a [..., K],
    b [N, K], a_s [..., K / block], b_s [N / block, K / block], rounded up; the result is bf16.

    The op reads a_s as contiguous memory, whatever its shape: torchao's own layer passes
    [M * K / block, 1] for a 3-D activation.
    """
    *operands, block = fx_utils.arguments(anchor, "a", "a_s", "b", "b_s", "block_size")
    block = 128 if block is None else block
    if not all(map(fx_utils.is_tensor_node, operands)) or not isinstance(block, int):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    a, a_scale, b, b_scale = operands
    (*lead, k), (n, depth) = fx_utils.value(a).shape, fx_utils.value(b).shape
    sizes = (k, n, depth)
    if (
        any(map(fx_utils.is_symbolic, sizes))
        or k != depth
        or sum(map(fx_utils.is_symbolic, lead)) > 1
    ):
        return Rejection(RejectionCode.SCALE_DYNAMIC_SHAPE, f"sizes {sizes}", anchor.name)
    k_blocks, n_blocks = -(-k // block), -(-n // block)
    rows = math.prod(lead)
    if not fx_utils.same_size(math.prod(fx_utils.value(a_scale).shape), rows * k_blocks):
        detail = f"a scale of shape {list(fx_utils.value(a_scale).shape)}"
        return Rejection(RejectionCode.SCALE_AXIS, detail, a_scale.name)
    if list(fx_utils.value(b_scale).shape) != [n_blocks, k_blocks]:
        detail = f"a scale of shape {list(fx_utils.value(b_scale).shape)}"
        return Rejection(RejectionCode.SCALE_AXIS, detail, b_scale.name)
    shape = tuple(-1 if fx_utils.is_symbolic(size) else size for size in (*lead, n))
    return ScaledMatmul(
        anchor=anchor,
        end=anchor,
        a=Operand(a, (-1, k)),
        b=transposed(b),
        sizes=(rows, n, k),
        a_scale=Scale(a_scale, (1, block), Operand(a_scale, (-1, k_blocks))),
        b_scale=Scale(b_scale, (block, block), transposed(b_scale)),
        interior=(anchor,),
        shape=None if len(lead) == 1 else shape,
    )


def _blockwise_scaled_mm(anchor: fx.Node) -> ScaledMatmul | Rejection:
    """torchao 0.18, ``prototype/blockwise_fp8_training/kernels.py``: calls ``aten._scaled_mm_v2``
    with one scale each, converted to that op's layout."""
    names = ("a", "b", "a_s", "scale_recipe_a", "b_s", "scale_recipe_b")
    a, b, a_scale, a_recipe, b_scale, b_recipe = fx_utils.arguments(anchor, *names)
    return scaled_mm.by_recipes(
        anchor, (a, b), (a_scale, b_scale), (a_recipe, b_recipe), None, False
    )


_READERS: dict[str, Callable[[fx.Node], ScaledMatmul | Rejection]] = {
    "ao::blockwise_fp8_gemm(Tensor a, Tensor a_s, Tensor b, Tensor b_s, SymInt block_size=128)"
    " -> Tensor": _blockwise_fp8_gemm,
    "torchao::blockwise_scaled_mm(Tensor a, Tensor b, Tensor a_s, SymInt scale_recipe_a, "
    "Tensor b_s, SymInt scale_recipe_b, ScalarType out_dtype) -> Tensor": _blockwise_scaled_mm,
}
ANCHORS = ("ao.blockwise_fp8_gemm.default", "torchao.blockwise_scaled_mm.default")

PATTERN = Pattern(name="fp8_producers", family="fp8", anchors=ANCHORS, recognize=recognize)
