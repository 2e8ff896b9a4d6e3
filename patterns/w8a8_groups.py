"""W8A8 with scales of groups along K, of the weight, the activation or both.

Operands that are dequantized in views or repeated and meet in a float product; the same as one
batched product, added up; and a sum over slices of K of integer or float products, each scaled by
its group (``_int_mm`` slice by slice). What reads them is ``fp8_dequantized``'s, by the positions
that are read; here the elements are int8, symmetric, and the weight is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.ops import w8a8 as op
from inductor_quant.patterns import fp8, graph
from inductor_quant.patterns.fp8 import Fp8Product, Scale
from inductor_quant.patterns.fp8_dequantized import read_product
from inductor_quant.patterns.pattern import Operand, Pattern, RecognizedGemm
from inductor_quant.patterns.terms import PRODUCTS
from inductor_quant.spec import ScaleSpec

FAMILY = "w8a8"


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """None: no scale varies along K, and another pattern may know the product."""
    product = read_product(anchor, frozenset([torch.int8]))
    if isinstance(product, Rejection):
        return None
    if not any(size > 0 for size in _groups(product)):
        return None
    return _check(product) or _assemble(product)


def _groups(product: Fp8Product) -> list[int]:
    """How many neighbours along K share each of the scales; -1: all."""
    scales = ((product.a_scale, 1), (product.b_scale, 0))
    return [scale.block[side] for scale, side in scales if scale is not None]


def _check(product: Fp8Product) -> Rejection | None:
    weight, k = fp8.source_of(product.b), product.sizes[2]
    if not graph.is_stored(weight):
        return Rejection(RejectionCode.COMPUTED_WEIGHT, f"{weight.name} is computed", weight.name)
    scale = product.b_scale
    if scale is not None and scale.block[0] > 0 and scale.block[1] != 1:
        detail = f"a scale of blocks of {scale.block[0]} x {scale.block[1]}"
        return Rejection(RejectionCode.SCALE_AXIS, detail, scale.node.name)
    if any(size > 0 and k % size for size in _groups(product)):
        detail = f"K={k} in groups of {_groups(product)}, the last of them shorter"
        return Rejection(RejectionCode.BLOCK_SHAPE, detail, product.anchor.name)
    if k > op.MAX_K:
        detail = f"K={k}, the most is {op.MAX_K}"
        return Rejection(RejectionCode.K_TOO_LONG, detail, product.anchor.name)
    return fp8.unfit(product, op.SCALE_DTYPES)


def _assemble(product: Fp8Product) -> RecognizedGemm:
    m, n, k = product.sizes
    out_dtype = graph.value(product.end).dtype
    a_scale, b_scale, bias = product.a_scale, product.b_scale, product.bias
    per_token = a_scale is not None and a_scale.block == (1, -1)
    return RecognizedGemm(
        family=FAMILY,
        spec=op.make_spec(
            a_scale=_spec(a_scale),
            b_scale=_spec(b_scale),
            out_dtype=out_dtype,
            bias=bias is not None,
        ),
        anchor=product.anchor,
        end=product.end,
        interior=product.interior,
        op=op.op,
        args=(
            product.a,
            product.b,
            a_scale and a_scale.argument,
            b_scale and b_scale.argument,
            bias and Operand(bias, (-1,)),
        ),
        kwargs={"alpha": 1.0, "out_dtype": out_dtype},
        m=graph.size_name(m),
        n=graph.size_name(n),
        k=graph.size_name(k),
        row_scale=a_scale.node if per_token and a_scale else None,
    )


def _spec(scale: Scale | None) -> ScaleSpec | None:
    dtype: Any = None if scale is None else graph.value(scale.node).dtype
    return None if scale is None else ScaleSpec(dtype, scale.block)


PATTERN = Pattern(name="int8_groups", family=FAMILY, anchors=tuple(PRODUCTS), recognize=recognize)
