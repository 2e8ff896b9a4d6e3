"""Products of a stack that say so themselves: both versions of ``_scaled_grouped_mm`` take
quantized operands and their scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..match import Operand
from .scaled_mm import ROW, contracts_k

VERSION_1 = "aten._scaled_grouped_mm.default"
VERSIONS = (VERSION_1, "aten._scaled_grouped_mm_v2.default")
# Of a, b, their scales, the offsets and the result: what the library multiplies.
_DTYPES = [torch.float8_e4m3fn] * 2 + [torch.float32] * 2 + [torch.int32, torch.bfloat16]


@dataclasses.dataclass(frozen=True)
class Product:
    """What the op is called with; ``scales`` of a and b as arguments, None: 1."""

    a: Any
    b: Any
    sizes: tuple[int, int, int]  # E, N, K
    scales: tuple[Any, Any] = (None, None)
    block: tuple[int, int] = (0, 1)
    offsets: fx.Node | None = None
    ids: fx.Node | None = None
    stored: tuple[fx.Node, ...] = ()  # what is read of the graph
    interior: frozenset[fx.Node] = frozenset()
    fast_accum: bool = False


def read(anchor: fx.Node) -> Product | Rejection:
    """``_scaled_grouped_mm(a [S, K], b [E, K, N], a_scale [S], b_scale [E, N], offs [E])``, of
    either version. The second one is traced whatever its operands are, and fails when it runs."""
    if str(anchor.target) == VERSION_1:
        a, b, *scales, offsets, bias, result, _, fast = fx_utils.arguments(
            anchor,
            *("self", "mat2", "scale_a", "scale_b", "offs", "bias"),
            *("scale_result", "out_dtype", "use_fast_accum"),
        )
    else:
        a, b, *by_recipe, offsets, bias, _, contraction, fast = fx_utils.arguments(
            anchor,
            *("self", "mat2", "scale_a", "recipe_a", "swizzle_a"),
            *("scale_b", "recipe_b", "swizzle_b", "offs", "bias"),
            *("out_dtype", "contraction_dim", "use_fast_accum"),
        )
        of_a, of_b = by_recipe[:3], by_recipe[3:]
        if not (_are_of_rows(*of_a) and _are_of_rows(*of_b) and contracts_k(contraction)):
            detail = f"recipes and swizzles {of_a[1:]} and {of_b[1:]}, dimensions {contraction}"
            return Rejection(RejectionCode.SCALE_AXIS, detail, anchor.name)
        scales, result = [of_a[0][0], of_b[0][0]], None
    nodes = (a, b, *scales, offsets)
    if not all(map(fx_utils.is_tensor_node, nodes)):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    if bias is not None or result is not None:
        return Rejection(RejectionCode.BIAS, "a bias, or a scale of the result", anchor.name)
    values = [fx_utils.value(node) for node in (*nodes, anchor)]
    if [value.dim() for value in values] != [2, 3, 1, 2, 1, 2]:
        return Rejection(RejectionCode.SCALE_AXIS, "it is no stack with scales", anchor.name)
    dtypes = [value.dtype for value in values]
    if dtypes != _DTYPES:
        return Rejection(RejectionCode.DTYPE, ", ".join(map(str, dtypes)), anchor.name)
    count, k, n = values[1].shape
    if any(map(fx_utils.is_symbolic, (count, k, n))):
        return Rejection(RejectionCode.WEIGHT_FORM, "a symbolic shape", b.name)
    rows = values[0].shape[0]
    shapes = [(rows, k), (count, k, n), (rows,), (count, n), (count,), (rows, n)]
    found = [value.shape for value in values]
    if not all(map(fx_utils.same_shape, found, shapes)):
        detail = f"shapes {[list(shape) for shape in found]}"
        return Rejection(RejectionCode.SCALE_AXIS, detail, anchor.name)
    return Product(
        a,
        b,
        (count, n, k),
        (Operand(scales[0], (-1, 1)), Operand(scales[1], (count, 1, n))),
        offsets=offsets,
        stored=nodes,
        interior=frozenset((anchor,)),
        fast_accum=bool(fast),
    )


def _are_of_rows(scales: Any, recipes: Any, swizzles: Any) -> bool:
    """Whether an operand of the second version has a scale for each row (column), in order."""
    return len(scales) == 1 and list(recipes) == [ROW] and not any(swizzles or ())
