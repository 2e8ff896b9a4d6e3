"""FP8: ``aten._scaled_mm`` and ``aten._scaled_mm_v2``, with every kind of scale that they take.

The scheduler fuses whatever follows the product. ``fp8_dequantized`` reads products of operands
that the graph dequantizes, and calls ``assemble`` here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant._compat import variants
from inductor_quant.ops import fp8, fp8_block
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

from .. import fx_utils
from ..fx_utils import aten
from ..match import Derived, Operand, Pattern, RecognizedGemm
from ..matching.epilogue import FLOATS
from ..matching.operands import (
    Scale,
    ScaledMatmul,
    per_channel,
    per_tensor,
    per_token,
    reject_operands,
    source_of,
    transposed,
)
from ..products import stock

# torch.nn.functional.ScalingType
TENSOR, ROW, BLOCK_1X128, BLOCK_128X128 = 0, 1, 4, 5
BLOCK = 128


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection:
    """``anchor``: an ``aten._scaled_mm`` or ``aten._scaled_mm_v2``."""
    read = _version_1 if anchor.target == aten._scaled_mm.default else _version_2
    matmul = read(anchor)
    return matmul if isinstance(matmul, Rejection) else assemble(matmul)


def _version_1(anchor: fx.Node) -> ScaledMatmul | Rejection:
    names = ("self", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype")
    *operands, bias, result_scale, _, fast = fx_utils.arguments(anchor, *names, "use_fast_accum")
    if result_scale is not None:
        return Rejection(RejectionCode.SCALE_DTYPE, "the result is scaled as well", anchor.name)
    if not all(map(fx_utils.is_tensor_node, operands)):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    a, b, a_scale, b_scale = operands
    (m, k), n = fx_utils.value(a).shape, fx_utils.value(b).shape[1]
    found = _by_shape_a(a_scale, m, k), _by_shape_b(b_scale, k, n)
    return _matmul(anchor, (a, b), (a_scale, b_scale), found, bias, fast)


def _version_2(anchor: fx.Node) -> ScaledMatmul | Rejection:
    names = ("self", "mat2", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b")
    more = ("bias", "out_dtype", "contraction_dim", "use_fast_accum")
    a, b, *scales, bias, _, contraction, fast = fx_utils.arguments(anchor, *names, *more)
    (scale_a, recipe_a, swizzle_a), (scale_b, recipe_b, swizzle_b) = scales[:3], scales[3:]
    is_plain = contracts_k(contraction) and not any(swizzle_a or ()) and not any(swizzle_b or ())
    if not is_plain or len(scale_a) != 1 or len(scale_b) != 1:
        recipes = f"recipes {recipe_a} and {recipe_b}, swizzled {swizzle_a} and {swizzle_b}"
        recipes += f", dimensions {contraction}"
        return Rejection(RejectionCode.SCALE_AXIS, recipes, anchor.name)
    pairs = (scale_a[0], scale_b[0]), (recipe_a[0], recipe_b[0])
    return by_recipes(anchor, (a, b), *pairs, bias, fast)


def contracts_k(dimensions: Any) -> bool:
    """Whether ``contraction_dim`` says what holds without it: the last one of a, the last but one
    of b."""
    return list(dimensions or ()) in ([], [-1, -2])


def by_recipes(
    anchor: fx.Node,
    operands: tuple[Any, Any],
    scales: tuple[Any, Any],
    recipes: tuple[int, int],
    bias: Any,
    fast: Any,
) -> ScaledMatmul | Rejection:
    """The product of ``operands`` with one scale each; ``recipes``: their ScalingType."""
    if not all(map(fx_utils.is_tensor_node, (*operands, *scales))):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    a, b = operands
    if fx_utils.value(a).dim() != 2:
        return Rejection(RejectionCode.WEIGHT_FORM, "a batch of matrices", a.name)
    (m, k), n = fx_utils.value(a).shape, fx_utils.value(b).shape[1]
    found = _by_recipe_a(scales[0], recipes[0], m, k), _by_recipe_b(scales[1], recipes[1], k, n)
    return _matmul(anchor, operands, scales, found, bias, fast, f", recipes {recipes}")


# ------------------------------------------------------------------------------------------
# scales


def _blocks(size: Any) -> Any:
    return (size + BLOCK - 1) // BLOCK


def _is_shape(node: fx.Node, *shape: Any) -> bool:
    return fx_utils.same_shape(fx_utils.value(node).shape, shape)


def _by_shape_a(node: fx.Node, m: Any, k: Any) -> Scale | None:
    """``_scaled_mm`` derives a scale's meaning from its shape: one element, [M, 1], [M, K / 128] or
    [M / 128, K / 128]. With one block of K, [M, 1] means both.
    """
    if fx_utils.is_single(node) or _is_shape(node, m, 1):
        return per_token(node)
    if _is_shape(node, m, _blocks(k)):
        return Scale(node, (1, BLOCK), node)
    return _rows_of_blocks(node, m, k)


def _rows_of_blocks(node: fx.Node, m: Any, k: Any, *, padded: bool = False) -> Scale | None:
    """The scale [M / 128, K / 128] of 128 x 128 blocks of the activation, expanded to rows; with
    ``padded`` it is [round_up(K / 128, 4), M / 128]."""
    if fx_utils.is_symbolic(m) or fx_utils.is_symbolic(k):
        return None
    rows, blocks = _blocks(m), _blocks(k)
    scale: Any = node
    if padded:
        if not _is_shape(node, (blocks + 3) // 4 * 4, rows):
            return None
        scale = transposed(_first(node, blocks))
    elif not _is_shape(node, rows, blocks):
        return None
    each = Derived(aten.expand.default, (Operand(scale, (rows, 1, blocks)), [rows, BLOCK, blocks]))
    return Scale(node, (1, BLOCK), _first(Operand(each, (rows * BLOCK, blocks)), m))


def _first(item: Any, count: int) -> Derived:
    return Derived(aten.slice.Tensor, (item, 0, 0, count))


def _by_shape_b(node: fx.Node, k: Any, n: Any) -> Scale | None:
    """One element, [1, N], [K / 128, N / 128] or [K / 128, N]."""
    if fx_utils.is_single(node) or _is_shape(node, 1, n):
        return per_channel(node)
    if _is_shape(node, _blocks(k), _blocks(n)):
        return Scale(node, (BLOCK, BLOCK), node)
    return Scale(node, (BLOCK, 1), node) if _is_shape(node, _blocks(k), n) else None


def _by_recipe_a(node: fx.Node, recipe: int, m: Any, k: Any) -> Scale | None:
    if recipe == TENSOR:
        return per_tensor(node) if fx_utils.is_single(node) else None
    if recipe == ROW:
        return per_token(node) if _is_shape(node, m, 1) else None
    if recipe == BLOCK_128X128:
        return _rows_of_blocks(node, m, k, padded=True)
    is_block = recipe == BLOCK_1X128 and _is_shape(node, m, _blocks(k))
    return Scale(node, (1, BLOCK), node) if is_block else None


def _by_recipe_b(node: fx.Node, recipe: int, k: Any, n: Any) -> Scale | None:
    """Scales of 1x128 blocks are [N, K / 128] here, those of 128x128 blocks may be padded to
    [round_up(K / 128, 4), N / 128] (``_check_scaled_mm_sizes_v2`` of torch 2.13)."""
    if recipe == TENSOR:
        return per_tensor(node) if fx_utils.is_single(node) else None
    if recipe == ROW:
        is_row = any(_is_shape(node, *shape) for shape in ((1, n), (n, 1), (n,)))
        return Scale(node, (-1, 1), Operand(node, (1, -1))) if is_row else None
    if recipe == BLOCK_1X128 and _is_shape(node, n, _blocks(k)):
        return Scale(node, (BLOCK, 1), transposed(node))
    if recipe == BLOCK_128X128 and not fx_utils.is_symbolic(k):
        blocks = _blocks(k)
        if _is_shape(node, blocks, _blocks(n)):
            return Scale(node, (BLOCK, BLOCK), node)
        if _is_shape(node, (blocks + 3) // 4 * 4, _blocks(n)):
            return Scale(node, (BLOCK, BLOCK), _first(node, blocks))
    return None


# ------------------------------------------------------------------------------------------
# the canonical op


def _matmul(
    anchor: fx.Node,
    operands: tuple[Any, Any],
    scales: tuple[Any, Any],
    found: tuple[Scale | None, Scale | None],
    bias: Any,
    fast: Any,
    recipes: str = "",
) -> ScaledMatmul | Rejection:
    """``found``: the scales as they were read; None where that failed."""
    a, b = operands
    a_scale, b_scale = found
    if a_scale is None or b_scale is None:
        wrong = scales[0] if a_scale is None else scales[1]
        detail = f"a scale of shape {list(fx_utils.value(wrong).shape)}{recipes}"
        return Rejection(RejectionCode.SCALE_AXIS, detail, wrong.name)
    (m, k), n = fx_utils.value(a).shape, fx_utils.value(b).shape[1]
    is_a, is_b = (scale.block not in _WHOLE for scale in (a_scale, b_scale))
    if is_b and not is_a and fx_utils.same_size(_blocks(k), 1) and _is_shape(a_scale.node, m, 1):
        # K is one block: the scale of a row is that of its block
        a_scale, is_a = Scale(a_scale.node, (1, BLOCK), a_scale.node), True
    if is_a != is_b:
        which = "a" if is_a else "b"
        return Rejection(RejectionCode.SCALE_AXIS, f"blocks of {which} alone", anchor.name)
    return ScaledMatmul(
        anchor=anchor,
        end=anchor,
        a=a,
        b=b,
        sizes=(m, n, k),
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        fast_accum=bool(fast),
        interior=(anchor,),
    )


_WHOLE = ((-1, -1), (1, -1), (-1, 1))


def assemble(matmul: ScaledMatmul) -> RecognizedGemm | Rejection:
    """The call of ``inductor_quant::fp8``, or of ``fp8_block`` where b has scales of blocks."""
    if any(dtype not in fp8.ELEMENT_DTYPES for dtype in matmul.dtypes):
        detail = f"operands are {list(matmul.dtypes)}"
        return Rejection(RejectionCode.DTYPE, detail, matmul.anchor.name)
    is_block = matmul.b_scale is not None and matmul.b_scale.block not in _WHOLE
    rejection = reject_dtypes(matmul, fp8_block.SCALE_DTYPES if is_block else FLOATS)
    return rejection or _assemble(matmul, is_block=is_block)


def reject_dtypes(matmul: ScaledMatmul, scale_dtypes: tuple[torch.dtype, ...]) -> Rejection | None:
    """Rejects dtypes of scales and result that the op does not take, and unreadable operands."""
    scales = [scale for scale in (matmul.a_scale, matmul.b_scale) if scale is not None]
    for scale in scales:
        dtype = scale.spec.dtype
        if dtype not in scale_dtypes:
            return Rejection(RejectionCode.SCALE_DTYPE, f"the scale is {dtype}", scale.node.name)
    if matmul.out_dtype not in FLOATS:
        return Rejection(RejectionCode.DTYPE, f"the result is {matmul.out_dtype}", matmul.end.name)
    read = [source_of(matmul.a), source_of(matmul.b), *(scale.node for scale in scales)]
    return reject_operands((*read, matmul.bias), matmul.anchor)


def _assemble(matmul: ScaledMatmul, *, is_block: bool) -> RecognizedGemm:
    (a_dtype, b_dtype), (a_scale, b_scale) = matmul.dtypes, matmul.scale_specs
    spec = fp8.make_spec(
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        a_scale=a_scale,
        b_scale=b_scale,
        out_dtype=matmul.out_dtype,
        bias=matmul.bias is not None,
        fast_accum=matmul.fast_accum and not is_block,
    )
    kwargs: dict[str, Any] = {"out_dtype": matmul.out_dtype}
    if is_block:
        assert b_scale is not None
        kwargs["block_k"], kwargs["block_n"] = b_scale.block
    else:
        kwargs["fast_accum"] = matmul.fast_accum
    family, op = ("fp8_block", fp8_block.op) if is_block else ("fp8", fp8.op)
    too_many_rows = _has_too_many_rows(matmul, spec)
    return matmul.gemm(family, spec, op, kwargs, too_many_rows=too_many_rows)


def _has_too_many_rows(matmul: ScaledMatmul, spec: QuantGemmSpec) -> bool:
    """Whether the graph is faster unchanged: only if it calls _scaled_mm."""
    m, n, k = matmul.sizes
    rows, anchor = fx_utils.size_hint(m), matmul.anchor.target
    if rows is None or not (anchor in _ANCHORS or str(anchor) in _CALLS_SCALED_MM):
        return False
    if (
        spec.b.scale is not None
        and spec.b.scale.block[0] > 1
        and not stock.takes_blocks(matmul.anchor)
    ):
        return False
    return fp8.prefers_library(
        spec,
        rows,
        fx_utils.size_hint(n) or 0,
        fx_utils.size_hint(k) or 0,
        divisor=fp8.LIBRARY_ROWS if variants.is_multiple(m, fp8.LIBRARY_ROWS) else 1,
        m_is_bounded=fx_utils.limit(m) is not None,
        has_gluon=not compat.uses_cpp_wrapper(),
        has_epilogue=fx_utils.has_epilogue(matmul.anchor),
    )


_ANCHORS = [aten._scaled_mm.default]
if hasattr(aten, "_scaled_mm_v2"):
    _ANCHORS.append(aten._scaled_mm_v2.default)
# Custom ops that call it.
_CALLS_SCALED_MM = ("torchao.blockwise_scaled_mm.default",)

PATTERN = Pattern(name="scaled_mm", family="fp8", anchors=tuple(_ANCHORS), recognize=recognize)
