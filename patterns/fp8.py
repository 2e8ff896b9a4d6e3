"""FP8: ``aten._scaled_mm`` and ``aten._scaled_mm_v2``, with every kind of scale that they take.

What is behind the product (a bias, an activation function) is left to the scheduler, which fuses it
into the kernel. Products of operands that are dequantized in the graph are read by
``fp8_dequantized``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from inductor_quant import _torch_compat as compat
from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.ops import fp8, fp8_block
from inductor_quant.patterns import graph
from inductor_quant.patterns.epilogue import FLOATS
from inductor_quant.patterns.graph import aten
from inductor_quant.patterns.pattern import Derived, Operand, Pattern, RecognizedGemm
from inductor_quant.spec import ScaleSpec

# With more rows cuBLASLt, which the graph calls, is faster than our kernels in plain Triton: two
# accumulators an element, in blocks or where sums are moved to fp32 on the way (no fast
# accumulation), halve the tile. The kernel in Gluon is as fast or faster, and open for an epilogue,
# where it has many rows and one of its tiles fills the chip. By trials on an H200 it is ahead of
# cuBLASLt in blocks at 1024 x 2112 x 7168, where two thirds of the chip are filled, and by rows
# with sums moved, within a few percent in blocks at fuller sizes, behind at 128 x 24576 x 1536.
# Up to 256 rows, where tiles leave half of the chip idle, our kernel for few rows splits K.
MAX_BLOCK_ROWS = 64
MAX_SPLIT_ROWS = 256
MAX_PRECISE_ROWS = 512
HOPPER_SMS = 132
GLUON_TILES = ((128, 256), (128, 192))
MIN_GLUON_ROWS = 256
MIN_FILLED = 0.65
# torch.nn.functional.ScalingType
TENSOR, ROW, BLOCK_1X128, BLOCK_128X128 = 0, 1, 4, 5
BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Scale:
    """A scale as the canonical ops take it: ``block`` as in ``ScaleSpec``, ``argument`` as an
    argument of the rewritten call; ``node`` is where it comes from."""

    node: fx.Node
    block: tuple[int, int]
    argument: Any


@dataclasses.dataclass(frozen=True)
class Fp8Product:
    """``dequantize(a) @ dequantize(b) + bias``, in place of ``end``; None: no scale.

    ``a`` and ``b`` are nodes, or what the rewrite makes of them.
    """

    anchor: fx.Node
    end: fx.Node
    a: Any
    b: Any
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    sizes: tuple[Any, Any, Any]
    a_scale: Scale | None
    b_scale: Scale | None
    bias: fx.Node | None = None
    fast_accum: bool = False
    interior: tuple[fx.Node, ...] = ()
    shape: tuple[Any, ...] | None = None


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection:
    """``anchor``: an ``aten._scaled_mm`` or ``aten._scaled_mm_v2``."""
    read = _version_1 if anchor.target == aten._scaled_mm.default else _version_2
    product = read(anchor)
    return product if isinstance(product, Rejection) else assemble(product)


def _version_1(anchor: fx.Node) -> Fp8Product | Rejection:
    names = ("self", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype")
    *operands, bias, result_scale, _, fast = graph.arguments(anchor, *names, "use_fast_accum")
    if result_scale is not None:
        return Rejection(RejectionCode.SCALE_DTYPE, "the result is scaled as well", anchor.name)
    if not all(map(graph.is_tensor_node, operands)):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    a, b, a_scale, b_scale = operands
    (m, k), n = graph.value(a).shape, graph.value(b).shape[1]
    found_a, found_b = _by_shape_a(a_scale, m, k), _by_shape_b(b_scale, k, n)
    if found_a is None or found_b is None:
        wrong = a_scale if found_a is None else b_scale
        shape = list(graph.value(wrong).shape)
        return Rejection(RejectionCode.SCALE_AXIS, f"a scale of shape {shape}", wrong.name)
    return _product(anchor, a, b, found_a, found_b, bias, fast)


def _version_2(anchor: fx.Node) -> Fp8Product | Rejection:
    names = ("self", "mat2", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b")
    a, b, *scales = graph.arguments(anchor, *names)
    given = graph.arguments(anchor, *names, "bias", "out_dtype", "contraction_dim")
    fast = graph.arguments(anchor, *names, "bias", "out_dtype", "contraction_dim", "use_fast_accum")
    bias, contraction = given[8], given[10]
    (scale_a, recipe_a, swizzle_a), (scale_b, recipe_b, swizzle_b) = scales[:3], scales[3:]
    is_plain = not contraction and not any(swizzle_a or ()) and not any(swizzle_b or ())
    if not is_plain or len(scale_a) != 1 or len(scale_b) != 1:
        recipes = f"recipes {recipe_a} and {recipe_b}, swizzled {swizzle_a} and {swizzle_b}"
        return Rejection(RejectionCode.SCALE_AXIS, recipes, anchor.name)
    pairs = (scale_a[0], scale_b[0]), (recipe_a[0], recipe_b[0])
    return by_recipes(anchor, (a, b), *pairs, bias, fast[-1])


def by_recipes(
    anchor: fx.Node,
    operands: tuple[Any, Any],
    scales: tuple[Any, Any],
    recipes: tuple[int, int],
    bias: Any,
    fast: Any,
) -> Fp8Product | Rejection:
    """The product of ``operands`` with one scale each, of these kinds of ScalingType."""
    if not all(map(graph.is_tensor_node, (*operands, *scales))):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    (a, b), (a_scale, b_scale), (a_recipe, b_recipe) = operands, scales, recipes
    if graph.value(a).dim() != 2:
        return Rejection(RejectionCode.WEIGHT_FORM, "a batch of matrices", a.name)
    (m, k), n = graph.value(a).shape, graph.value(b).shape[1]
    found_a, found_b = _by_recipe_a(a_scale, a_recipe, m, k), _by_recipe_b(b_scale, b_recipe, k, n)
    if found_a is None or found_b is None:
        wrong = a_scale if found_a is None else b_scale
        recipe = a_recipe if found_a is None else b_recipe
        detail = f"a scale of shape {list(graph.value(wrong).shape)}, recipe {recipe}"
        return Rejection(RejectionCode.SCALE_AXIS, detail, wrong.name)
    return _product(anchor, a, b, found_a, found_b, bias, fast)


# ------------------------------------------------------------------------------------------
# scales


def _blocks(size: Any) -> Any:
    return (size + BLOCK - 1) // BLOCK


def _is_shape(node: fx.Node, *shape: Any) -> bool:
    found = graph.value(node).shape
    return len(found) == len(shape) and all(map(graph.same_size, found, shape))


def _is_one_number(node: fx.Node) -> bool:
    return all(map(graph.is_one, graph.value(node).shape))


def _tensor(node: fx.Node) -> Scale:
    return Scale(node, (-1, -1), Operand(node, (1, 1)))


def _by_shape_a(node: fx.Node, m: Any, k: Any) -> Scale | None:
    """``_scaled_mm`` knows a scale's meaning by its shape: one number, [M, 1], [M, K / 128],
    [M / 128, K / 128].

    ([M, 1] with one block of K is both: the same.)
    """
    if _is_one_number(node):
        return _tensor(node)
    if _is_shape(node, m, 1):
        return Scale(node, (1, -1), node)
    if _is_shape(node, m, _blocks(k)):
        return Scale(node, (1, BLOCK), node)
    return _rows_of_blocks(node, m, k)


def _rows_of_blocks(node: fx.Node, m: Any, k: Any, *, padded: bool = False) -> Scale | None:
    """The scale of 128 x 128 blocks of the activation [M / 128, K / 128] as one of each row; with
    ``padded`` it is [round_up(K / 128, 4), M / 128]."""
    if graph.is_symbolic(m) or graph.is_symbolic(k):
        return None
    rows, blocks = _blocks(m), _blocks(k)
    scale: Any = node
    if padded:
        if not _is_shape(node, (blocks + 3) // 4 * 4, rows):
            return None
        scale = Derived(aten.permute.default, (_first(node, blocks), [1, 0]))
    elif not _is_shape(node, rows, blocks):
        return None
    each = Derived(aten.expand.default, (Operand(scale, (rows, 1, blocks)), [rows, BLOCK, blocks]))
    return Scale(node, (1, BLOCK), _first(Operand(each, (rows * BLOCK, blocks)), m))


def _first(item: Any, count: int) -> Derived:
    return Derived(aten.slice.Tensor, (item, 0, 0, count))


def _by_shape_b(node: fx.Node, k: Any, n: Any) -> Scale | None:
    """One number, [1, N], [K / 128, N / 128] or [K / 128, N]."""
    if _is_one_number(node):
        return _tensor(node)
    if _is_shape(node, 1, n):
        return Scale(node, (-1, 1), node)
    if _is_shape(node, _blocks(k), _blocks(n)):
        return Scale(node, (BLOCK, BLOCK), node)
    return Scale(node, (BLOCK, 1), node) if _is_shape(node, _blocks(k), n) else None


def _by_recipe_a(node: fx.Node, recipe: int, m: Any, k: Any) -> Scale | None:
    if recipe == TENSOR:
        return _tensor(node) if _is_one_number(node) else None
    if recipe == ROW:
        row = _tensor(node) if _is_one_number(node) else Scale(node, (1, -1), node)
        return row if _is_shape(node, m, 1) else None
    if recipe == BLOCK_128X128:
        return _rows_of_blocks(node, m, k, padded=True)
    is_block = recipe == BLOCK_1X128 and _is_shape(node, m, _blocks(k))
    return Scale(node, (1, BLOCK), node) if is_block else None


def _by_recipe_b(node: fx.Node, recipe: int, k: Any, n: Any) -> Scale | None:
    """Here the scales of 1x128 blocks are [N, K / 128], and those of 128x128 blocks are padded:
    [round_up(K / 128, 4), N / 128] (``_check_scaled_mm_sizes_v2`` of torch 2.13)."""
    if recipe == TENSOR:
        return _tensor(node) if _is_one_number(node) else None
    if recipe == ROW:
        is_row = any(_is_shape(node, *shape) for shape in ((1, n), (n, 1), (n,)))
        return Scale(node, (-1, 1), Operand(node, (1, -1))) if is_row else None
    if recipe == BLOCK_1X128 and _is_shape(node, n, _blocks(k)):
        return Scale(node, (BLOCK, 1), Derived(aten.permute.default, (node, [1, 0])))
    if recipe == BLOCK_128X128 and not graph.is_symbolic(k):
        blocks = _blocks(k)
        if _is_shape(node, blocks, _blocks(n)):
            return Scale(node, (BLOCK, BLOCK), node)
        if _is_shape(node, (blocks + 3) // 4 * 4, _blocks(n)):
            return Scale(node, (BLOCK, BLOCK), _first(node, blocks))
    return None


# ------------------------------------------------------------------------------------------
# the canonical op


def _product(
    anchor: fx.Node, a: fx.Node, b: fx.Node, a_scale: Scale, b_scale: Scale, bias: Any, fast: Any
) -> Fp8Product | Rejection:
    (m, k), n = graph.value(a).shape, graph.value(b).shape[1]
    is_a, is_b = (scale.block not in _WHOLE for scale in (a_scale, b_scale))
    if is_b and not is_a and graph.same_size(_blocks(k), 1) and _is_shape(a_scale.node, m, 1):
        # one block of K: the scale of a row is that of its block
        a_scale, is_a = Scale(a_scale.node, (1, BLOCK), a_scale.node), True
    if is_a != is_b:
        which = "a" if is_a else "b"
        return Rejection(RejectionCode.SCALE_AXIS, f"blocks of {which} alone", anchor.name)
    return Fp8Product(
        anchor=anchor,
        end=anchor,
        a=a,
        b=b,
        a_dtype=graph.value(a).dtype,
        b_dtype=graph.value(b).dtype,
        sizes=(m, n, k),
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        fast_accum=bool(fast),
        interior=(anchor,),
    )


_WHOLE = ((-1, -1), (1, -1), (-1, 1))


def assemble(product: Fp8Product) -> RecognizedGemm | Rejection:
    """The canonical op of a product, once everything that it reads is fit to be read."""
    dtypes = [product.a_dtype, product.b_dtype]
    if any(dtype not in fp8.ELEMENT_DTYPES for dtype in dtypes):
        return Rejection(RejectionCode.DTYPE, f"operands are {dtypes}", product.anchor.name)
    is_block = product.b_scale is not None and product.b_scale.block not in _WHOLE
    refused = unfit(product, fp8_block.SCALE_DTYPES if is_block else FLOATS)
    return refused or _assemble(product, graph.value(product.end).dtype, is_block=is_block)


def unfit(product: Fp8Product, scale_dtypes: tuple[torch.dtype, ...]) -> Rejection | None:
    """Why something that the canonical op would read or return is not fit for that."""
    scales = [scale for scale in (product.a_scale, product.b_scale) if scale is not None]
    for scale in scales:
        dtype = graph.value(scale.node).dtype
        if dtype not in scale_dtypes:
            return Rejection(RejectionCode.SCALE_DTYPE, f"the scale is {dtype}", scale.node.name)
    out_dtype = graph.value(product.end).dtype
    if out_dtype not in FLOATS:
        return Rejection(RejectionCode.DTYPE, f"the result is {out_dtype}", product.end.name)
    read = [source_of(product.a), source_of(product.b), *(scale.node for scale in scales)]
    read += [product.bias] if product.bias is not None else []
    for node in read:
        if graph.is_mutated(node):
            return Rejection(RejectionCode.MUTATED_OPERAND, f"{node.name} is written to", node.name)
        if graph.value(node).device != graph.value(product.anchor).device:
            device = graph.value(node).device
            return Rejection(RejectionCode.DEVICE, f"{node.name} is on {device}", node.name)
    return None


def source_of(operand: Any) -> fx.Node:
    """The node that an argument of the rewritten call is made from."""
    while not isinstance(operand, fx.Node):
        operand = operand.node if isinstance(operand, Operand) else operand.args[0]
    return operand


def _assemble(product: Fp8Product, out_dtype: torch.dtype, *, is_block: bool) -> RecognizedGemm:
    m, n, k = product.sizes
    spec = fp8.make_spec(
        a_dtype=product.a_dtype,
        b_dtype=product.b_dtype,
        a_scale=_scale_spec(product.a_scale),
        b_scale=_scale_spec(product.b_scale),
        out_dtype=out_dtype,
        bias=product.bias is not None,
        fast_accum=product.fast_accum and not is_block,
    )
    kwargs: dict[str, Any] = {"out_dtype": out_dtype}
    if is_block:
        assert product.b_scale is not None
        kwargs["block_k"], kwargs["block_n"] = product.b_scale.block
    else:
        kwargs["fast_accum"] = product.fast_accum
    per_token = product.a_scale is not None and product.a_scale.block == (1, -1)
    return RecognizedGemm(
        family="fp8_block" if is_block else "fp8",
        spec=spec,
        anchor=product.anchor,
        end=product.end,
        interior=product.interior,
        op=fp8_block.op if is_block else fp8.op,
        args=(
            product.a,
            product.b,
            product.a_scale and product.a_scale.argument,
            product.b_scale and product.b_scale.argument,
            product.bias and Operand(product.bias, (-1,)),
        ),
        kwargs=kwargs,
        m=graph.size_name(m),
        n=graph.size_name(n),
        k=graph.size_name(k),
        row_scale=product.a_scale.node if per_token and product.a_scale else None,
        shape=product.shape,
        too_many_rows=_has_too_many_rows(product, is_block=is_block),
    )


def _has_too_many_rows(product: Fp8Product, *, is_block: bool) -> bool:
    rows = graph.size_hint(product.sizes[0])
    anchor = product.anchor.target
    if rows is None or not (anchor in _ANCHORS or str(anchor) in _CALLS_SCALED_MM):
        return False  # what the graph does else is slower with any number of rows
    columns = graph.size_hint(product.sizes[1]) or 0
    if not is_block:
        is_many = not product.fast_accum and rows > MAX_PRECISE_ROWS
    else:
        is_static = not graph.is_symbolic(product.sizes[0])
        halves = 2 * math.ceil(rows / 128) * math.ceil(columns / 128)
        is_split = is_static and rows <= MAX_SPLIT_ROWS and halves <= HOPPER_SMS
        is_many = rows > MAX_BLOCK_ROWS and not is_split
    is_narrow = graph.value(product.end).dtype.itemsize <= 2
    has_gluon = rows >= MIN_GLUON_ROWS and is_narrow and not compat.uses_cpp_wrapper()
    return is_many and not (has_gluon and _fills_the_chip(rows, columns))


def _fills_the_chip(rows: int, columns: int) -> bool:
    """Whether a tile of the kernel in Gluon uses so much of it, in as many rounds as it takes."""

    def computed(tile: tuple[int, int]) -> int:
        tiles = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
        return math.ceil(tiles / HOPPER_SMS) * HOPPER_SMS * tile[0] * tile[1]

    return rows * columns >= MIN_FILLED * min(map(computed, GLUON_TILES))


def _scale_spec(scale: Scale | None) -> ScaleSpec | None:
    return None if scale is None else ScaleSpec(graph.value(scale.node).dtype, scale.block)


_ANCHORS = [aten._scaled_mm.default]
if hasattr(aten, "_scaled_mm_v2"):
    _ANCHORS.append(aten._scaled_mm_v2.default)
# Ops of producers that call it.
_CALLS_SCALED_MM = ("torchao.blockwise_scaled_mm.default",)

PATTERN = Pattern(name="scaled_mm", family="fp8", anchors=tuple(_ANCHORS), recognize=recognize)
