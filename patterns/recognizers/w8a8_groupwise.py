"""W8A8 with scales for groups along K, of the weight, the activation or both.

Three spellings: operands dequantized in views or with repeated scales before a float product; the
same as a batched product that is summed; and a sum of products over slices of K, each scaled by its
group. ``fp8_dequantized`` reads all of them; here the elements are symmetric int8.
"""

from __future__ import annotations

import torch
from torch import fx

from inductor_quant.ops import w8a8 as op
from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..match import Pattern, RecognizedGemm
from ..matching.operands import ScaledMatmul, source_of
from ..products.sum_of_products import PRODUCTS
from . import scaled_mm, w8a8
from .fp8_dequantized import read_dequantized


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """None: no scale varies along K, so that another pattern may recognize the product."""
    matmul = read_dequantized(anchor, frozenset([torch.int8]))
    if isinstance(matmul, Rejection) or not any(size > 0 for size in _group_sizes(matmul)):
        return None
    return _reject(matmul) or w8a8.assemble(matmul, row_scale=matmul.row_scale)


def _group_sizes(matmul: ScaledMatmul) -> list[int]:
    """How many neighbours along K share each of the scales; -1: all."""
    scales = ((matmul.a_scale, 1), (matmul.b_scale, 0))
    return [scale.block[side] for scale, side in scales if scale is not None]


def _reject(matmul: ScaledMatmul) -> Rejection | None:
    weight, k = source_of(matmul.b), matmul.sizes[2]
    if not fx_utils.is_stored(weight):
        return Rejection(RejectionCode.COMPUTED_WEIGHT, f"{weight.name} is computed", weight.name)
    scale = matmul.b_scale
    if scale is not None and scale.block[0] > 0 and scale.block[1] != 1:
        detail = f"a scale of blocks of {scale.block[0]} x {scale.block[1]}"
        return Rejection(RejectionCode.SCALE_AXIS, detail, scale.node.name)
    if any(size > 0 and k % size for size in _group_sizes(matmul)):
        detail = f"K={k} in groups of {_group_sizes(matmul)}, the last of them shorter"
        return Rejection(RejectionCode.BLOCK_SHAPE, detail, matmul.anchor.name)
    return w8a8.reject_long_k(matmul.anchor, k) or scaled_mm.reject_dtypes(matmul, op.SCALE_DTYPES)


PATTERN = Pattern(
    name="int8_groups", family=w8a8.FAMILY, anchors=tuple(PRODUCTS), recognize=recognize
)
