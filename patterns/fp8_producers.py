"""FP8 products that a producer hides in an op of its own, each known by its whole schema.

A schema of another version is left alone, and so is a Triton kernel of a user or producer: its name
and arguments do not say what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.patterns import fp8, graph
from inductor_quant.patterns.fp8 import Fp8Product, Scale
from inductor_quant.patterns.graph import aten
from inductor_quant.patterns.pattern import Derived, Operand, Pattern, RecognizedGemm


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection:
    schema = str(anchor.target._schema)  # type: ignore[union-attr]
    if schema not in _READERS:
        return Rejection(RejectionCode.OPAQUE, schema, anchor.name)
    product = _READERS[schema](anchor)
    return product if isinstance(product, Rejection) else fp8.assemble(product)


def _blockwise_fp8_gemm(anchor: fx.Node) -> Fp8Product | Rejection:
    """torchao 0.18, ``kernel/blockwise_quantization.py``, after DeepSeek-V3's kernel: a [..., K],
    b [N, K], a_s [..., K / block], b_s [N / block, K / block], rounded up; the result is bf16.

    The op wants a_s contiguous and reads it as such, whatever its shape: torchao's own layer hands
    over [M * K / block, 1] where the activation has three dimensions.
    """
    *operands, block = graph.arguments(anchor, "a", "a_s", "b", "b_s", "block_size")
    block = 128 if block is None else block
    if not all(map(graph.is_tensor_node, operands)) or not isinstance(block, int):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    a, a_scale, b, b_scale = operands
    (*lead, k), (n, depth) = graph.value(a).shape, graph.value(b).shape
    sizes = (k, n, depth)
    if any(map(graph.is_symbolic, sizes)) or k != depth or sum(map(graph.is_symbolic, lead)) > 1:
        return Rejection(RejectionCode.SCALE_DYNAMIC_SHAPE, f"sizes {sizes}", anchor.name)
    k_blocks, n_blocks = -(-k // block), -(-n // block)
    rows = _product(lead)
    if not graph.same_size(_product(graph.value(a_scale).shape), rows * k_blocks):
        detail = f"a scale of shape {list(graph.value(a_scale).shape)}"
        return Rejection(RejectionCode.SCALE_AXIS, detail, a_scale.name)
    if list(graph.value(b_scale).shape) != [n_blocks, k_blocks]:
        detail = f"a scale of shape {list(graph.value(b_scale).shape)}"
        return Rejection(RejectionCode.SCALE_AXIS, detail, b_scale.name)
    shape = tuple(-1 if graph.is_symbolic(size) else size for size in (*lead, n))
    return Fp8Product(
        anchor=anchor,
        end=anchor,
        a=Operand(a, (-1, k)),
        b=_transposed(b),
        a_dtype=graph.value(a).dtype,
        b_dtype=graph.value(b).dtype,
        sizes=(rows, n, k),
        a_scale=Scale(a_scale, (1, block), Operand(a_scale, (-1, k_blocks))),
        b_scale=Scale(b_scale, (block, block), _transposed(b_scale)),
        interior=(anchor,),
        shape=None if len(lead) == 1 else shape,
    )


def _product(sizes: Iterable[Any]) -> Any:
    found: Any = 1
    for size in sizes:
        found = found * size
    return found


def _transposed(node: fx.Node) -> Derived:
    return Derived(aten.permute.default, (node, [1, 0]))


def _blockwise_scaled_mm(anchor: fx.Node) -> Fp8Product | Rejection:
    """torchao 0.18, ``prototype/blockwise_fp8_training/kernels.py``: ``aten._scaled_mm_v2`` of one
    scale each, which the op brings into that one's layout."""
    names = ("a", "b", "a_s", "scale_recipe_a", "b_s", "scale_recipe_b")
    a, b, a_scale, a_recipe, b_scale, b_recipe = graph.arguments(anchor, *names)
    return fp8.by_recipes(anchor, (a, b), (a_scale, b_scale), (a_recipe, b_recipe), None, False)


_READERS: dict[str, Callable[[fx.Node], Fp8Product | Rejection]] = {
    "ao::blockwise_fp8_gemm(Tensor a, Tensor a_s, Tensor b, Tensor b_s, SymInt block_size=128)"
    " -> Tensor": _blockwise_fp8_gemm,
    "torchao::blockwise_scaled_mm(Tensor a, Tensor b, Tensor a_s, SymInt scale_recipe_a, "
    "Tensor b_s, SymInt scale_recipe_b, ScalarType out_dtype) -> Tensor": _blockwise_scaled_mm,
}
ANCHORS = ("ao.blockwise_fp8_gemm.default", "torchao.blockwise_scaled_mm.default")

PATTERN = Pattern(name="fp8_producers", family="fp8", anchors=ANCHORS, recognize=recognize)
