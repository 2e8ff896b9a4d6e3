"""Every matrix product of a graph, recognized or not, for the report. Decides nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.ops import experts, scaled_experts
from inductor_quant.spec.decisions import Rejection, RejectionCode, Site
from inductor_quant.spec.gemm import dtype_name
from inductor_quant.spec.weight_format import WeightFormat

from .. import fx_utils
from ..fx_utils import aten
from ..match import Derived, Operand, RecognizedGemm

# op, or its name -> positions of the two factors
_PRODUCTS: dict[object, tuple[int, int]] = {
    **dict.fromkeys(("quanto.qbytes_mm.default", aten.mm.default, aten.bmm.default), (0, 1)),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), (1, 2)),
    **dict.fromkeys((aten.mv.default, aten.linear.default, aten._int_mm.default), (0, 1)),
    **dict.fromkeys((aten._weight_int8pack_mm.default, aten._weight_int4pack_mm.default), (0, 1)),
    aten._scaled_mm.default: (0, 1),
}
if hasattr(aten, "_scaled_mm_v2"):
    _PRODUCTS[aten._scaled_mm_v2.default] = (0, 1)
# Those whose second factor is a stack of weights, one for each expert.
_GROUPED = (
    *("aten._grouped_mm.default", "aten._scaled_grouped_mm.default"),
    *("aten._scaled_grouped_mm_v2.default", "transformers.grouped_mm_fallback.default"),
)
_PRODUCTS.update(dict.fromkeys(_GROUPED, (0, 1)))

_FLOAT8 = (*(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),)
_QUANTIZED = (torch.int8, torch.uint8, torch.int32, *_FLOAT8)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Namespaces whose products are all listed above; an op of another package may multiply.
_OWN_NAMESPACES = ("aten", "prims", "prim", "inductor", "inductor_quant", "quantized_decomposed")
# Its weight layout is private to the kernel and differs between devices and versions.
_REPACKED = (aten._weight_int4pack_mm.default,)
_TRITON_KERNELS = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")
# Nodes from a factor up to its quantized data: known producers dequantize in about 40 nodes.
_SEARCH_LIMIT = 200


def is_matrix_product(node: fx.Node) -> bool:
    return _positions(node) is not None or is_opaque(node)


def is_opaque(node: fx.Node) -> bool:
    """Whether an op of another package may multiply by a quantized weight: it takes one, and a
    float matrix (``bitsandbytes.gemm_4bit``, a Triton kernel of the user)."""
    if node.op != "call_function" or _positions(node) is not None:
        return False
    name = getattr(node.target, "name", None)
    namespace = getattr(node.target, "namespace", "")
    is_kernel = callable(name) and name() in _TRITON_KERNELS
    is_foreign = isinstance(node.target, torch._ops.OpOverload) and namespace not in _OWN_NAMESPACES
    return (is_kernel or is_foreign) and None not in _opaque_factors(node)


def _opaque_factors(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The first float and the first quantized matrix among the inputs, or two of int8 or fp8, whose
    scales are the floats. An fp8 weight is not packed, so one of its sizes must be K."""
    outputs = _written(node)
    tensors = [n for n in node.all_input_nodes if fx_utils.is_tensor_node(n) and n not in outputs]
    matrices = [n for n in tensors if fx_utils.value(n).dim() >= 2]
    fp8 = [n for n in matrices if fx_utils.value(n).dtype in _FLOAT8]
    int8 = [n for n in matrices if fx_utils.value(n).dtype == torch.int8]
    for pair in (fp8, int8):
        if len(pair) >= 2:
            return pair[0], pair[1]
    x = next((n for n in matrices if fx_utils.value(n).dtype in _FLOATS), None)
    w = next((n for n in matrices if fx_utils.value(n).dtype in _QUANTIZED), None)
    if x is not None and w in fp8:
        k = fx_utils.value(x).shape[-1]
        if not any(fx_utils.same_size(k, size) for size in fx_utils.value(w).shape):
            return None, w
    return x, w


def _written(node: fx.Node) -> list[fx.Node]:
    """The outputs of a Triton kernel of the graph. Where torch cannot parse the kernel it lists
    all tensors, which tells nothing: []."""
    given, names = node.kwargs.get("kwargs"), node.kwargs.get("tensors_to_clone")
    if not isinstance(given, dict) or not isinstance(names, (list, tuple)):
        return []
    filled = [given[name] for name in names if isinstance(given.get(name), fx.Node)]
    return [] if {*filled} == {*filter(fx_utils.is_tensor_node, node.all_input_nodes)} else filled


def _positions(node: fx.Node) -> tuple[int, int] | None:
    return _PRODUCTS.get(node.target) or _PRODUCTS.get(str(node.target))


def describe(node: fx.Node) -> Site | None:
    """The site of a matrix product; None if its factors are not tensor nodes."""
    factors: list[Any]
    if (positions := _positions(node)) is not None:
        factors = [node.args[i] for i in positions] if len(node.args) > 1 else []
    else:
        factors = list(_opaque_factors(node))
    if len(factors) != 2 or not all(map(fx_utils.is_tensor_node, factors)):
        return None
    a, b = map(fx_utils.value, factors)
    out = node.meta.get("val")
    if isinstance(out, (list, tuple)) and out:  # of several results the first
        out = out[0]
    if not isinstance(out, torch.Tensor):  # a kernel that writes into its arguments
        written = [fx_utils.value(n) for n in _written(node) if fx_utils.is_tensor_node(n)]
        out = next(iter(written), a.new_empty((*a.shape[:-1], b.shape[0])))
    source = _quantized_source(factors)
    return Site(
        node=node.name,
        op=str(node.target).removesuffix(".default"),
        batch=fx_utils.size_name(out.shape[0]) if out.dim() == 3 else 1,
        m=fx_utils.size_name(out.shape[-2]) if out.dim() > 1 else 1,
        n=fx_utils.size_name(out.shape[-1]),
        k=fx_utils.size_name(a.shape[-1]),
        a_dtype=dtype_name(a.dtype),
        b_dtype=dtype_name(b.dtype),
        device=str(out.device),
        module=fx_utils.module_path(node),
        source=dtype_name(source) if source is not None else "",
        experts=_experts(b) if str(node.target) in _GROUPED else 0,
    )


def _experts(stack: torch.Tensor) -> int:
    size = stack.shape[0]
    return size if stack.dim() == 3 and isinstance(size, int) else 0


def describe_found(found: RecognizedGemm) -> Site:
    """The site of a product that is written as another op, such as a sum of products."""
    anchor, count = found.anchor, _experts_of(found)
    is_of_all = any(isinstance(route, Derived) for route in found.args[2:4])
    return Site(
        node=anchor.name,
        op=str(anchor.target).removesuffix(".default"),
        batch=count if count and found.op is experts.op and is_of_all else 1,
        m=found.m,
        n=found.n,
        k=found.k,
        a_dtype=dtype_name(found.spec.a.dtype),
        b_dtype=dtype_name(found.spec.a.dtype),
        device=str(fx_utils.value(anchor).device),
        module=fx_utils.module_path(anchor),
        source=dtype_name(found.spec.b.dtype),
        experts=count,
    )


def _experts_of(found: RecognizedGemm) -> int:
    if found.op is scaled_experts.op:
        *_, offsets, _ = found.args
        stack = found.args[1] if offsets is None else offsets
        while isinstance(stack, Derived):
            [stack, *_] = stack.args
        shape = stack.shape if isinstance(stack, Operand) else fx_utils.value(stack).shape
        return int(shape[0])
    is_stack = found.op is experts.op
    return WeightFormat.decode(str(found.kwargs["format"])).experts if is_stack else 0


def decline(node: fx.Node, site: Site | None) -> Rejection:
    """The rejection of a matrix product that no pattern is anchored at."""
    if is_opaque(node) or node.target in _REPACKED:
        kernel = node.kwargs.get("kernel_idx")
        name = compat.triton_kernel_name(kernel) if isinstance(kernel, int) else ""
        detail = f"the Triton kernel {name}" if name else f"{node.target}, {_owner(node)}"
        return Rejection(RejectionCode.OPAQUE, detail, node.name, fx_utils.module_path(node), site)
    source = site.source if site else ""
    code = RejectionCode.NO_PATTERN if source else RejectionCode.NOT_QUANTIZED
    detail = f"{node.target} with operands from {source} data" if source else ""
    second = _second_factor(node)
    if source and second is not None and _quantized_source([second]) is None:
        if _is_owned(_origin(second)):  # x is from quantized data, an embedding for example
            code, detail = RejectionCode.NOT_QUANTIZED, ""
        else:
            detail = f"only the first operand is from {source} data"
            detail += "; a weight is recognized as the second, as in x @ w.t()"
    if code is RejectionCode.NOT_QUANTIZED and (outside := _from_outside(node)):
        detail = f"{outside.name} is no parameter: was it dequantized before a graph break?"
        detail += " TORCH_LOGS=graph_breaks lists them"
    return Rejection(code, detail, node.name, fx_utils.module_path(node), site)


def _owner(node: fx.Node) -> str:
    namespace = getattr(node.target, "namespace", "")
    return "in a layout of its kernel" if namespace == "aten" else f"an op of {namespace}"


def _from_outside(node: fx.Node) -> Any:
    """The input that is the product's second factor, if it belongs to no module."""
    factor = _second_factor(node)
    if factor is None or fx_utils.value(factor).dim() != 2:
        return None
    origin = _origin(factor)
    return origin if origin.op == "placeholder" and not _is_owned(origin) else None


def _second_factor(node: fx.Node) -> fx.Node | None:
    positions = _positions(node)
    factor: Any = node.args[positions[1]] if positions is not None and len(node.args) > 1 else None
    return factor if fx_utils.is_tensor_node(factor) else None


def _origin(factor: fx.Node) -> fx.Node:
    """What the factor is a view or a cast of."""
    while factor.op == "call_function" and len(factor.all_input_nodes) == 1:
        (factor,) = factor.all_input_nodes
    return factor


def _is_owned(node: fx.Node) -> bool:
    """Whether it is a tensor of a module, or a constant."""
    return node.op == "get_attr" or (node.op == "placeholder" and compat.is_parameter(node))


def _quantized_source(factors: list[fx.Node]) -> torch.dtype | None:
    """The first quantized dtype above the factors. The search ends at other products and canonical
    ops, whose results are floats. A vector or scalar of integers is an index or a size, not data.
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
