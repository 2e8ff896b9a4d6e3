"""Every matrix product of a graph, recognised or not: what a report lists. Decides nothing."""

from __future__ import annotations

import torch
from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode, Site
from inductor_quant.patterns import graph
from inductor_quant.patterns.graph import aten
from inductor_quant.spec import dtype_name

# op -> positions of the two factors among its arguments
_PRODUCTS: dict[object, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.mv.default: (0, 1),
    aten.linear.default: (0, 1),
    aten._int_mm.default: (0, 1),
    aten._scaled_mm.default: (0, 1),
    aten._weight_int8pack_mm.default: (0, 1),
    aten._weight_int4pack_mm.default: (0, 1),
}
if hasattr(aten, "_scaled_mm_v2"):
    _PRODUCTS[aten._scaled_mm_v2.default] = (0, 1)

_QUANTIZED = (
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
# How far to look for the data behind an operand: the longest dequantization of a known producer
# takes about 40 nodes, and other products end the search.
_SEARCH_LIMIT = 200


def is_matrix_product(node: fx.Node) -> bool:
    return node.target in _PRODUCTS


def describe(node: fx.Node) -> Site | None:
    """The site of a matrix product; None where its factors are no tensors that we can see."""
    positions = _PRODUCTS.get(node.target)
    factors = [node.args[i] for i in positions] if positions and len(node.args) > 1 else []
    if len(factors) != 2 or not all(graph.is_tensor_node(factor) for factor in factors):
        return None
    a, b = (graph.value(factor) for factor in factors)  # type: ignore[arg-type]
    out = graph.value(node)
    source = _quantized_source([f for f in factors if isinstance(f, fx.Node)])
    return Site(
        node=node.name,
        op=str(node.target).removesuffix(".default"),
        batch=graph.size_name(out.shape[0]) if out.dim() == 3 else 1,
        m=graph.size_name(out.shape[-2]) if out.dim() > 1 else 1,
        n=graph.size_name(out.shape[-1]),
        k=graph.size_name(a.shape[-1]),
        a_dtype=dtype_name(a.dtype),
        b_dtype=dtype_name(b.dtype),
        device=str(out.device),
        module=graph.module_path(node),
        source=dtype_name(source) if source is not None else "",
    )


def decline(node: fx.Node, site: Site | None) -> Rejection:
    """The rejection of a matrix product that no pattern is anchored at."""
    code = RejectionCode.NO_PATTERN if site and site.source else RejectionCode.NOT_QUANTIZED
    detail = f"{node.target} with operands from {site.source} data" if site and site.source else ""
    return Rejection(code, detail, node.name, graph.module_path(node), site)


def _quantized_source(factors: list[fx.Node]) -> torch.dtype | None:
    """The first quantized type met on the way up from the factors. Other products are not crossed,
    nor are canonical ops that stand for some: their result is not quantized any more.

    A vector or scalar of integers is an index or a size, no data.
    """
    todo, seen = list(factors), set(factors)
    while todo and len(seen) < _SEARCH_LIMIT:
        node = todo.pop(0)
        if is_matrix_product(node) or str(node.target).startswith("inductor_quant."):
            continue
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.dtype in _QUANTIZED and val.dim() >= 2:
            return val.dtype
        for parent in node.all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return None
