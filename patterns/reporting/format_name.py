"""The common name of a packed format, for reports: "nvfp4", "mxfp4", "q6_k", "e2m1".

A name comes from what is read: the values of a table that are known, the group and the kind of the
scales, the bytes of a block. (A table that the model stores has no values here.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.spec.weight_format import E2M1, Field, WeightFormat

from .. import fx_utils
from ..match import Constant, Derived, RecognizedGemm
from ..matching.operands import source_of

# (elements of a block, its bytes, bits of an element, "least": a minimum is stored, "table": codes
# index one): the layouts of ggml-common.h
_GGML = {
    (32, 18, 4, ""): "q4_0",
    (32, 20, 4, "least"): "q4_1",
    (32, 22, 5, ""): "q5_0",
    (32, 24, 5, "least"): "q5_1",
    (32, 34, 8, ""): "q8_0",
    (32, 18, 4, "table"): "iq4_nl",
    (256, 136, 4, "table"): "iq4_xs",
    (256, 66, 2, ""): "tq2_0",
    (256, 84, 2, "least"): "q2_k",
    (256, 110, 3, ""): "q3_k",
    (256, 144, 4, "least"): "q4_k",
    (256, 176, 5, "least"): "q5_k",
    (256, 210, 6, ""): "q6_k",
}


def format_name(found: RecognizedGemm) -> str:
    """The name of the weight's format; "" if it has none."""
    blocks = found.spec.b.blocks
    if blocks is not None and isinstance(found.n, int) and isinstance(found.k, int):
        zeros = 1 - blocks.stored_share(found.n, found.k)
        return f"bsr {blocks.n}x{blocks.k}, {zeros:.0%} zero"
    text = found.kwargs.get("format")
    if not isinstance(text, str):
        scale = found.spec.b.scale
        is_mx = scale is not None and scale.block == (32, 1) and found.args[3] is not None
        return "mxfp8" if is_mx and _is_of_exponents(source_of(found.args[3])) else ""
    format, sources = WeightFormat.decode(text), found.args[1]
    return _ggml(format, sources) or _small_float(format, sources) or _ternary(format)


def _ternary(format: WeightFormat) -> str:
    """BitNet's -1, 0 and 1: two bits less 1, with one scale, applied after the product."""
    code, steps = format.element, format.dequant_ops
    is_less_one = [(step.kind, step.operand) for step in steps] == [("sub", 1.0)]
    return "bitnet" if (code.total_width, code.signed) == (2, False) and is_less_one else ""


def _ggml(format: WeightFormat, sources: Sequence[Any]) -> str:
    stored = sources[format.code.source]
    if not isinstance(stored, fx.Node):
        return ""
    blocks = fx_utils.base(stored)
    tensor = fx_utils.value(blocks)
    k, n = format.shape
    if tensor.dtype not in (torch.uint8, torch.int8) or tensor.numel() % n:
        return ""
    scales = [step.operand for step in format.scales if isinstance(step.operand, Field)]
    origins = [origin for scale in scales for origin in _origins(sources[scale.source])]
    if any(origin is not blocks for origin in origins if origin.op == "placeholder"):
        return ""
    row, zero = tensor.numel() // n, format.zero
    kind = "least" if zero is not None and isinstance(zero.operand, Field) else ""
    own = format.code.total_width or 8, "table" if format.element != format.code else kind
    names = (
        name
        for (size, block, *kinds), name in _GGML.items()
        if k % size == 0 and row == k // size * block and own == tuple(kinds)
    )
    return next(names, "")


def _small_float(format: WeightFormat, sources: Sequence[Any]) -> str:
    scales = [step.operand for step in format.scales if isinstance(step.operand, Field)]
    groups = {format.block(scale)[0] for scale in scales}
    element = format.element.float8 or _element_of(sources[format.element.source])
    is_table = format.element != format.code and format.code.width == 4
    dtypes = {fx_utils.described(sources[scale.source]).dtype for scale in scales}
    if is_table and 16 in groups and (element or torch.float8_e4m3fn in dtypes):
        return "nvfp4"
    if (
        (element or is_table)
        and 32 in groups
        and any(_is_of_exponents(sources[s.source]) for s in scales)
    ):
        return "mxfp4" if is_table else "mxfp8"
    return element if element == "e2m1" else ""


def _element_of(source: Any) -> str:
    """What a table or a tensor holds: "e2m1", "e4m3", "e5m2", or ""."""
    if isinstance(source, fx.Node):
        names = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
        dtype = fx_utils.value(source).dtype
        tensor = fx_utils.attribute(source) if source.op == "get_attr" else None
        if dtype in names or tensor is None or tensor.numel() != 16:
            return names.get(dtype, "")
    with compat.real_tensors():
        if isinstance(source, fx.Node):
            assert tensor is not None
            values = tensor.float().flatten().tolist()
        elif isinstance(source, Constant):
            values = source.tensor().float().tolist()
        else:
            return ""
    return "e2m1" if tuple(values) == E2M1 else ""


def _is_of_exponents(source: Any) -> bool:
    """Whether a scale is computed from exponents alone."""
    if isinstance(source, Derived):
        return True
    if isinstance(source, Constant):  # of each exponent
        with compat.real_tensors():
            values = source.tensor().float()
            return bool((torch.frexp(values).mantissa == 0.5).logical_or(~values.isfinite()).all())
    for node in _origins(source):
        dtype = fx_utils.value(node).dtype
        is_exponent = str(dtype).endswith("e8m0fnu") or dtype in (torch.uint8, torch.int8)
        if fx_utils.value(node).dim() and not is_exponent:
            return False
    return True


def _origins(source: Any) -> list[fx.Node]:
    """The tensors in memory that a scale is computed from."""
    todo, seen = [source], set[fx.Node]()
    while todo:
        item = todo.pop()
        if isinstance(item, fx.Node) and item not in seen:
            seen.add(item)
            todo += item.all_input_nodes
        elif isinstance(item, (Derived, tuple)):
            todo += item.args if isinstance(item, Derived) else item
    return [node for node in seen if node.op in ("placeholder", "get_attr")]
