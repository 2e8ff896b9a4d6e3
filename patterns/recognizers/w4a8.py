"""W4A8: an int8 or e4m3 activation times an int4 weight that the graph unpacks.

``aten._int_mm`` of a weight that is made int8 before it, and a product of floats whose operands are
both quantized and dequantized: as ``w8a8`` and ``qdq``, with a weight that ``weights.decode`` finds
in bit fields of 4 bits. Its integers may be functions of the nibble that are linear (shifted into
the high half of a byte, sign-extended, less a zero point); groups along K may have a float scale.
Integers of ``_int_mm`` may also be rounded and clamped, or wrap around (``int8_of``).

``aten._scaled_mm`` of a weight that is cast to e4m3 before it, and a product of floats whose
activation was quantized to e4m3, likewise; all of the integers must have a form in it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.errors import SpecError
from inductor_quant.ops import fp8
from inductor_quant.ops import w4a8 as op
from inductor_quant.ops.w8a8 import SCALE_DTYPES, max_k
from inductor_quant.ops.weight_only import check_format
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.weight_format import (
    AffineIndex,
    DequantOp,
    DequantOpKind,
    Field,
    WeightFormat,
)

from .. import fx_utils
from ..fx_utils import CAST, aten
from ..match import Constant, Pattern, RecognizedGemm
from ..matching.epilogue import Epilogue
from ..matching.fake_quantized import FakeQuantized, Vector
from ..matching.operands import reject_mutated, reject_operands, source_of
from ..products.matmul_ops import Matmul
from ..symbolic import Reader, arithmetic, attempt
from ..symbolic.expr import INTEGERS, Bits, Expr, Load, Op, is_whole
from ..symbolic.index import ZERO, Unsupported
from ..symbolic.reader import broadcast
from ..weights.decode import Weight, decode
from ..weights.lookup_table import Source
from . import qdq, scaled_mm, w8a8

FAMILY = "w4a8"
CODES = 1 << op.BITS
# Up to this M the packed weight is read faster than a weight of 8 bits is written.
LIBRARY_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Int4Weight:
    """``q * group_scale * scale[n] * alpha``: ``format`` has q and the scale of the groups, as the
    op takes it."""

    format: WeightFormat
    sources: tuple[Source, ...]
    scale: Vector | None = None  # its axis is "column" or "tensor"
    alpha: float = 1.0

    @property
    def nodes(self) -> list[fx.Node]:
        return [source for source in self.sources if isinstance(source, fx.Node)]

    def matrix(self) -> Source:
        return self.sources[self.format.code.source]

    def zero_point(self) -> tuple[None, str]:
        return None, ""

    def sums(self) -> None:
        return None

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [fx_utils.described(source).dtype for source in self.sources]


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """None: the weight is no such one, and another pattern may recognize the product."""
    if anchor.target == aten._int_mm.default:
        return _of_integers(anchor)
    if anchor.target in scaled_mm.PATTERN.anchors:
        return _of_e4m3(anchor)
    found = qdq.recognize_as(anchor, read_int4, _assemble, int8_of)
    if found is not None:
        return found

    def read(weight: Weight) -> Int4Weight | None:
        return read_int4(weight, op.E4M3)

    return qdq.recognize_as(anchor, read, _assemble, element=op.E4M3)


def read_int4(weight: Weight, a_dtype: torch.dtype = op.INT8) -> Int4Weight | None:
    """The weight as the op takes it, for ``a_dtype``; None: it has another form."""
    linear = _linear(weight)
    if linear is None:
        return None
    format, found = linear, Int4Weight(linear, weight.sources)
    integers: list[DequantOp] = []
    group: DequantOp | None = None
    for step in format.dequant_ops:
        operand = step.operand
        if not isinstance(operand, Field):
            is_integer = group is None and found.scale is None and found.alpha == 1
            if is_integer and float(operand).is_integer() and step.kind in ("add", "sub"):
                integers.append(step)
            elif step.kind == "mul":
                found = dataclasses.replace(found, alpha=found.alpha * operand)
            elif step.kind == "div" and operand:
                found = dataclasses.replace(found, alpha=found.alpha / operand)
            elif step.kind == "div" or operand != 0:
                return None
        elif step.kind == "mul" and format.block(operand)[0] == -1:
            vector = qdq.vector_of(operand, weight)
            is_float = vector and fx_utils.value(vector.node).dtype in SCALE_DTYPES
            if vector is None or not is_float or found.scale is not None:
                return None
            found = dataclasses.replace(found, scale=vector)
        elif step.kind == "mul" and group is None:
            group = step
        elif step.kind in ("add", "sub") and not (group or found.scale) and found.alpha == 1:
            integers.append(step)
        else:
            return None
    ops = (*integers, *([group] if group else []))
    found = dataclasses.replace(found, format=dataclasses.replace(format, dequant_ops=ops))
    return _pruned(found, a_dtype)


def _linear(weight: Weight) -> WeightFormat | None:
    """The format with the nibble as its element, if a table of its codes is linear."""
    format = weight.format
    if format.element == format.code:
        return format
    table, at = weight.sources[format.element.source], AffineIndex(fields=((format.code, 1),))
    if not isinstance(table, Constant) or format.element != Field(format.element.source, (at,)):
        return None
    if format.code.width != op.BITS or format.code.signed or format.code.add:
        return None
    with compat.real_tensors():
        values = table.tensor().double().tolist()
    if len(values) != CODES:
        return None
    for signed in (False, True):
        half = CODES // 2
        number = [code - CODES if signed and code >= half else code for code in range(CODES)]
        step, first = values[1] - values[0], values[0]
        if not step or [step * each + first for each in number] != values:
            continue
        zero = -first / step
        if step.is_integer() and zero.is_integer():
            ops = [DequantOp("sub", zero)] if zero else []
            ops += [DequantOp("mul", step)] if step != 1 else []
            code = dataclasses.replace(format.code, signed=signed)
            return dataclasses.replace(
                format, element=code, dequant_ops=(*ops, *format.dequant_ops)
            )
    return None


def _pruned(found: Int4Weight, a_dtype: torch.dtype = op.INT8) -> Int4Weight | None:
    """``found`` without the tensors that its format no longer reads; None: the op does not take
    it."""
    used = sorted({field.source for field in found.format.fields()})

    def moved(item: Any) -> Any:
        if isinstance(item, Field):
            item = dataclasses.replace(item, source=used.index(item.source))
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            parts = {
                part.name: moved(getattr(item, part.name))
                for part in dataclasses.fields(item)
                if part.name not in ("source", "size")
            }
            return dataclasses.replace(item, **parts)
        return tuple(map(moved, item)) if isinstance(item, tuple) else item

    sources = tuple(found.sources[i] for i in used)
    found = dataclasses.replace(found, format=moved(found.format), sources=sources)
    if any(not isinstance(source, (fx.Node, Constant)) for source in sources):
        return None
    types = tuple(
        (dtype, tuple(fx_utils.described(source).shape))
        for dtype, source in zip(found.dtypes, sources, strict=True)
    )
    try:
        check_format(found.format, types)
    except SpecError:
        return None
    is_finite = math.isfinite(found.alpha) and found.alpha
    problem = op.problem_of(found.format, found.dtypes, a_dtype)
    return None if problem or not is_finite else found


# ------------------------------------------------------------------------------------------
# a product of integers


def _of_integers(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    found = _read_unpacked(anchor, op.INT8)
    return None if found is None else _with_weight(w8a8.recognize(anchor), *found)


def _of_e4m3(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    found = _read_unpacked(anchor, op.E4M3)
    if found is None:
        return None
    product = scaled_mm.recognize(anchor)
    if isinstance(product, Rejection):
        return product
    if product.op is not fp8.op or product.spec.a.dtype != op.E4M3:
        return None
    rows = fx_utils.size_hint(fx_utils.value(anchor).shape[0])
    is_large = rows is None or rows > LIBRARY_ROWS
    product = dataclasses.replace(
        product,
        too_many_rows=product.too_many_rows and is_large,
        kwargs={"out_dtype": product.kwargs["out_dtype"]},
    )
    return _with_weight(product, *found)


def _with_weight(
    product: RecognizedGemm | Rejection, weight: Int4Weight, nodes: list[fx.Node]
) -> RecognizedGemm | Rejection:
    """``product`` with ``weight``, which ``nodes`` unpack."""
    if isinstance(product, Rejection):
        return product
    rejection = reject_operands(weight.nodes, product.anchor) or reject_mutated(nodes)
    return rejection or _replaced(product, weight)


def _read_unpacked(
    anchor: fx.Node, a_dtype: torch.dtype
) -> tuple[Int4Weight, list[fx.Node]] | None:
    """The weight that the second operand is, if the graph computes it, and the nodes that do."""
    _, b = fx_utils.arguments(anchor, "self", "mat2")
    if not fx_utils.is_tensor_node(b) or fx_utils.is_stored(b):
        return None
    try:
        return attempt(lambda reader: _read(b, reader, a_dtype), lambda found: found is not None)
    except RecursionError:
        return None


def _read(
    b: fx.Node, reader: Reader, a_dtype: torch.dtype
) -> tuple[Int4Weight, list[fx.Node]] | None:
    """The weight that ``b`` [K, N] holds, and the nodes that compute it."""
    shape = fx_utils.value(b).shape
    if any(map(fx_utils.is_symbolic, shape)):
        return None
    k, n = shape
    try:
        place = (reader.space.variable("k", k), reader.space.variable("n", n))
        expr = arithmetic.cast(reader.read(b, place), torch.float32)
    except Unsupported:
        return None
    weight = decode(reader, expr, b)
    if isinstance(weight, Rejection):
        made = int8_of(reader, expr) if a_dtype == op.INT8 else None
        return None if made is None else (made, _computed(reader))
    found = read_int4(weight, a_dtype)
    if found is None or found.scale is not None or op.split(found.format)[1] is not None:
        return None
    if found.alpha != 1:
        # a factor of the integers: their range is checked again
        times = DequantOp("mul", found.alpha)
        format = dataclasses.replace(found.format, dequant_ops=(*found.format.dequant_ops, times))
        found = dataclasses.replace(found, format=format, alpha=1.0)
        if op.problem_of(format, found.dtypes, a_dtype):
            return None
    return found, _computed(reader)


def _computed(reader: Reader) -> list[fx.Node]:
    return [node for node in reader.nodes() if node.op == "call_function"]


# ------------------------------------------------------------------------------------------
# what is made int8

_CLAMPS = {
    aten.clamp_min.default: ("self", "min"),
    aten.clamp_max.default: ("self", "max"),
    aten.clamp.default: ("self", "min", "max"),
}
_WRAPS = {
    overload: name
    for name in ("add", "sub", "mul")
    for overload in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
}


def int8_of(reader: Reader, element: Expr) -> Int4Weight | None:
    """The weight whose ``element`` ops round and clamp to int8 (QQQ), or compute in integers of
    which int8 is the low byte (QServe, where it wraps around); None: it is none."""
    while isinstance(element, Op) and element.name == "cast":
        (element,) = element.args
    if not isinstance(element, (Bits, Load)) or fx_utils.is_stored(element.node):
        return None
    if isinstance(element, Bits) and not _is_low_byte(element):
        return None
    node, index = element.node, element.index
    kind: DequantOpKind = "wrap" if node.target in _WRAPS else "round"
    try:
        if kind == "wrap" and isinstance(element, Bits):
            expr = _unwrapped(reader, node, index)
        else:
            source = _rounded(node)
            if source is None:
                return None
            expr = reader.read(source, index)
        expr = arithmetic.cast(expr, torch.float32)
    except Unsupported:
        return None
    weight = decode(reader, expr, node)
    if isinstance(weight, Rejection) or (kind == "round" and torch.float32 not in weight.same_for):
        return None
    format = _linear(weight)
    if format is None:
        return None
    ops = (*format.dequant_ops, DequantOp(kind))
    return _pruned(Int4Weight(dataclasses.replace(format, dequant_ops=ops), weight.sources))


def _is_low_byte(element: Bits) -> bool:
    """Whether it is an int8 element, or what a cast to int8 keeps of another integer."""
    is_integer = fx_utils.value(element.node).dtype in INTEGERS
    return is_integer and (element.offset, element.width, element.signed) == (ZERO, 8, True)


def _rounded(node: fx.Node) -> fx.Node | None:
    """The fp32 value that ``node`` rounds to integers and clamps to int8."""
    is_cast = node.target == CAST and fx_utils.value(node).dtype == torch.int8
    value = node.args[0] if is_cast else node
    bounds, rounds = {"min": -math.inf, "max": math.inf}, 0
    while isinstance(value, fx.Node) and fx_utils.value(value).dtype == torch.float32:
        if value.target == aten.round.default:
            rounds += 1
            value = value.args[0]
        elif value.target in _CLAMPS:
            names = _CLAMPS[value.target][1:]
            value, *ends = fx_utils.arguments(value, *_CLAMPS[value.target])
            for name, end in zip(names, ends, strict=True):
                if not isinstance(end, (int, float)):
                    return None
                choose = max if name == "min" else min
                bounds[name] = choose(bounds[name], end)
        else:
            break
    is_int8 = rounds == 1 and bounds == {"min": -128, "max": 127}
    return value if is_int8 and isinstance(value, fx.Node) else None


def _unwrapped(reader: Reader, node: fx.Node, index: Any) -> Expr:
    """The element of ``node``, sums and products of integers, as if they were exact: the low byte
    is the same."""
    found = reader.read(node, index)
    if not isinstance(found, Bits) or found.node.target not in _WRAPS:
        return arithmetic.cast(found, torch.int32)
    if not is_whole(found):
        raise Unsupported("a part of a sum or a product of integers")
    node, index = found.node, found.index
    if len(node.args) > 2 or node.kwargs:
        raise Unsupported("a multiple of the second term")
    left, right = (
        _unwrapped(reader, item, broadcast(item, index))
        if isinstance(item, fx.Node)
        else arithmetic.cast(reader.operand(item, node, index), torch.int32)
        for item in node.args
    )
    return Op(_WRAPS[node.target], (left, right), torch.int32)


def _replaced(product: RecognizedGemm, weight: Int4Weight) -> RecognizedGemm | Rejection:
    """``product``, a call of ``w8a8`` without a zero point of its weight, or of ``fp8``, with this
    one."""
    a, _, a_scale, b_scale, bias, *zeros = product.args
    a_dtype = fx_utils.value(source_of(a)).dtype
    a_dtype = a_dtype if a_dtype == op.E4M3 else op.INT8
    a_zero, _, b_sum = (*zeros, None, None, None)[:3]
    spec = op.make_spec(
        weight.format,
        weight.dtypes,
        a_scale=product.spec.a.scale,
        b_scale=product.spec.b.scale,
        out_dtype=product.spec.out_dtype,
        bias=product.spec.bias,
        a_zero=product.spec.a.zero,
        a_dtype=a_dtype,
    )
    longest = max_k(product.spec.a.zero, "")
    if op.summed_k(weight.format) > longest and a_dtype == op.INT8:
        return Rejection(RejectionCode.K_TOO_LONG, f"the most is {longest}", product.anchor.name)
    args = (a, list(weight.sources), a_scale, b_scale, bias)
    return dataclasses.replace(
        product,
        family=FAMILY,
        spec=spec,
        op=op.op,
        args=args if a_zero is None and b_sum is None else (*args, a_zero, b_sum),
        kwargs=product.kwargs | {"format": weight.format.encode()},
    )


# ------------------------------------------------------------------------------------------
# a product of floats


def _assemble(
    product: Matmul, x: FakeQuantized, weight: Int4Weight, found: Epilogue
) -> RecognizedGemm | Rejection:
    gemm = qdq.assemble(product, x, weight, found)
    return gemm if isinstance(gemm, Rejection) else _replaced(gemm, weight)


PATTERN = Pattern(
    name="int4_int8",
    family=FAMILY,
    anchors=(aten._int_mm.default, *scaled_mm.PATTERN.anchors, *qdq.ANCHORS),
    recognize=recognize,
)
