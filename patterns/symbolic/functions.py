"""Functions of one number: what a chain of elementwise ops makes of each code of a bit field.

A field of up to 8 bits, or a number of several fields, has at most 256 values. If all other
operands are constants, the ops of the graph are run on all of them, one by one as the graph does,
and the results are a table (``Lookup``) or, where they are whole numbers in sequence, the number
itself. So the spelling of a decoding does not matter: sign tricks, masked writes, ``where``,
``view(dtype)``, comparisons, powers of two.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat

from .. import fx_utils
from ..fx_utils import aten
from ..match import Constant, Derived
from . import arithmetic
from .bits import Parts, concatenated, dense_parts, sign_extended
from .code_tables import bytes_of, codes_of, sequence_of, without_idle_bits
from .expr import (
    FLOAT8,
    FLOATS,
    INTEGERS,
    Bits,
    Expr,
    Load,
    Lookup,
    Number,
    Op,
    Position,
    constant,
    integer,
    normalized,
    varying,
)
from .index import Unsupported
from .reader import OTHERWISE, At, Reader, broadcast, handles

MAX_WIDTH = 8
_OF_INTEGERS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}
# Ops whose result is the same on every device, by the name of their schema.
_EXACT = frozenset(
    f"aten::{name}"
    for names in (
        "add sub rsub mul div neg abs sign sgn square reciprocal remainder fmod floor_divide",
        "floor ceil round trunc clamp clamp_min clamp_max minimum maximum relu copysign",
        "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift",
        "__and__ __or__ __xor__ __lshift__ __rshift__ logical_and logical_or logical_xor",
        "logical_not eq ne lt le gt ge isnan isinf signbit where masked_fill lift_fresh_copy",
    )
    for name in names.split()
) | {"prims::convert_element_type"}
# The same, where the result is a power of two.
_POWERS = frozenset({"aten::pow", "aten::exp2", "aten::ldexp"})
MAX_CONSTANT = 256  # elements of a table that the field indexes
_OF_CODES = (*INTEGERS, *FLOATS, *FLOAT8, torch.bool)
# What an op made of operands, by all that it depends on: the layers of a model ask for the same.
MAX_KNOWN = 1024
_KNOWN: dict[tuple[Any, ...], tuple[bytes, torch.dtype]] = {}


@handles(OTHERWISE)
def _function(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``node`` where no other handler has a form for it."""
    _check_elementwise(node)
    inputs = [(item, broadcast(item, index)) for item in node.all_input_nodes]
    operands = [reader.read(*item) for item in inputs]
    nodes = [item for item, _ in inputs]
    try:
        with compat.real_tensors():
            return reader.apply(
                lambda *parts: _Codes(reader, parts).of_node(node, nodes, parts), *operands
            )
    except Unsupported:
        place = next(filter(None, map(varying, operands)), None)
        if place is None:
            raise
    # a mask, or a shift, that depends on the position
    return reader.by_cases(place, lambda _, fix: reader.read(node, tuple(map(fix, index))))


@handles(aten.ldexp.Tensor)
def _ldexp(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``x * 2**e``, with the power as a function of a field."""
    dtype = fx_utils.value(node).dtype

    def scaled(x: Expr, e: Expr) -> Expr:
        codes = _Codes(reader, (e,))
        exponents = codes.values(e)
        if isinstance(exponents, Derived) or exponents.dtype not in INTEGERS:
            raise Unsupported("exponents that are no integers, or from a table of the model")
        # 2**128 is an invalid e8m0, at which versions of torch differ
        is_in_range = exponents.min() >= -127 and exponents.max() <= 128
        if dtype not in (torch.bfloat16, torch.float32) or not is_in_range:
            raise Unsupported("a power of two beyond fp32")
        powers = codes.simplified(exponents.float().exp2())
        return arithmetic.multiply(x, powers, dtype)

    with compat.real_tensors():
        return reader.apply(scaled, *(reader.operand(item, node, index) for item in node.args[:2]))


def as_function(reader: Reader, expr: Expr) -> Expr:
    """``expr`` as a function of one field. Raises Unsupported if it is none."""
    codes = _Codes(reader, (expr,))
    with compat.real_tensors():
        return codes.simplified(codes.values(expr))


def _check_elementwise(node: fx.Node) -> None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.all_input_nodes:
        raise Unsupported("no op on tensors")
    if any(not fx_utils.is_tensor_node(item) for item in node.all_input_nodes):
        raise Unsupported("an argument that is no tensor")
    is_elementwise = target._schema.name in _EXACT | _POWERS
    if target == aten.view.dtype:
        (source,) = fx_utils.arguments(node, "self")
        is_elementwise = _itemsize(source) == _itemsize(node)
    elif target == aten.index_put.default:
        is_elementwise = _is_masked_fill(node)
    if not is_elementwise:
        raise Unsupported(f"{target} has no function of one element")


def _itemsize(node: fx.Node) -> int:
    return fx_utils.value(node).dtype.itemsize


def _is_masked_fill(node: fx.Node) -> bool:
    """Whether an index_put writes one number where a mask is true."""
    place, masks, number, accumulate = fx_utils.arguments(
        node, "self", "indices", "values", "accumulate"
    )
    if len(masks) != 1 or accumulate or not fx_utils.is_single(number):
        return False
    mask = fx_utils.value(masks[0])
    return mask.dtype == torch.bool and fx_utils.same_shape(mask.shape, fx_utils.value(place).shape)


# A tensor; or, if a table that the model stores takes part, what computes it.
Values = torch.Tensor | Derived


class _Codes:
    """The values of expressions at every code of the field that they depend on, or of the number of
    several fields. ``parts``: these with their places in the number, the lowest first."""

    def __init__(self, reader: Reader, exprs: tuple[Expr, ...]) -> None:
        self.reader = reader
        self.parts = self._parts_of(exprs)
        self.width = sum(part.width for _, part in self.parts)
        self.count = 1 << self.width
        self._memo: dict[tuple[fx.Node, At], Values] = {}
        if self.width > MAX_WIDTH:
            raise Unsupported(f"a function of {self.width} bits")
        if len(self.parts) > 1 and any(part.offset.data for _, part in self.parts):
            raise Unsupported("functions of several fields")

    # the fields

    def _parts_of(self, exprs: tuple[Expr, ...]) -> Parts:
        found: list[Bits] = []
        for bits in self._fields(exprs):
            bits = self._normalized(bits)
            for number, part in enumerate(found):
                place = _distance(bits, part)
                if place is not None:
                    low, high = min(0, place), max(part.width, place + bits.width)
                    found[number] = dataclasses.replace(
                        part, offset=part.offset + low, width=high - low
                    )
                    break
            else:
                found.append(dataclasses.replace(bits, signed=False, dtype=torch.uint8))
        places = itertools.accumulate((part.width for part in found), initial=0)
        return tuple(zip(places, found, strict=False))

    def _normalized(self, bits: Bits) -> Bits:
        found = normalized(bits, self.reader.space)
        assert isinstance(found, Bits)
        return found

    def _fields(self, exprs: Iterable[Expr]) -> Iterator[Bits]:
        """The fields that ``values`` reads."""
        for expr in exprs:
            if isinstance(expr, Bits):
                yield expr
            elif isinstance(expr, Lookup):
                yield from self._fields((expr.code,))
            elif isinstance(expr, Op) and expr.name == "or" and (parts := dense_parts(expr)):
                yield from parts  # in the order of the number
            elif isinstance(expr, Load) and _is_short(expr):
                data = (datum.expr for index in expr.index for datum, _ in index.data)
                yield from self._fields(data)
            elif isinstance(expr, Op) and expr.name in _OF_INTEGERS and expr.dtype in INTEGERS:
                yield from self._fields(expr.args)
            elif isinstance(expr, Op) and expr.at is not None:
                node, index = expr.at
                yield from self._fields(self._operands(node, index))

    def _operands(self, node: fx.Node, index: At) -> tuple[Expr, ...]:
        return tuple(self.reader.read(i, broadcast(i, index)) for i in node.all_input_nodes)

    def _codes(self, bits: Bits) -> torch.Tensor:
        """The values of a part of the number, int64."""
        return codes_of(self.count, self._place(bits), bits.width, bits.signed)

    def _place(self, bits: Bits) -> int:
        """Where in the number a part of it begins."""
        bits = self._normalized(bits)
        for place, part in self.parts:
            inside = _distance(bits, part)
            if inside is not None:
                return place + inside
        raise Unsupported("a field that was not seen")

    # values

    def of_node(self, node: fx.Node, inputs: list[fx.Node], operands: tuple[Expr, ...]) -> Expr:
        key = self._key(node, inputs, operands)
        if key is None:
            return self.simplified(self._run(node, inputs, operands))
        found = _KNOWN.get(key)
        if found is None:
            values = self._run(node, inputs, operands)
            if isinstance(values, Derived) or values.dtype not in _OF_CODES:
                return self.simplified(values)
            if len(_KNOWN) == MAX_KNOWN:
                _KNOWN.clear()
            found = _KNOWN[key] = bytes_of(values.contiguous()), values.dtype
        return self._of_memory(*found)

    def _key(
        self, node: fx.Node, inputs: list[fx.Node], operands: tuple[Expr, ...]
    ) -> tuple[Any, ...] | None:
        """All that ``_run`` depends on; None: more than functions of single fields."""
        known = [self._described(operand) for operand in operands]
        if None in known:
            return None
        names = {item: f"#{number}" for number, item in enumerate(inputs)}
        args = repr(fx.map_arg((node.args, node.kwargs), names.__getitem__))
        values = [fx_utils.value(item) for item in (node, *inputs)]
        kinds = tuple((value.dtype, value.dim() > 0) for value in values)
        return (node.target, args, kinds, self.count, *known)

    def _described(self, expr: Expr) -> Any:
        """What says which values ``expr`` has, whatever the fields; None if nothing short does."""
        if isinstance(expr, Bits):
            return self._place(expr), expr.width, expr.signed, expr.dtype
        if isinstance(expr, Lookup) and isinstance(expr.values, bytes):
            code = self._described(expr.code) if isinstance(expr.code, Bits) else None
            return None if code is None else (code, expr.values, expr.dtype)
        if isinstance(expr, Number):
            return expr
        return (constant(expr), expr.dtype) if constant(expr) is not None else None

    def _run(self, node: fx.Node, inputs: list[fx.Node], operands: tuple[Expr, ...]) -> Values:
        """What the op of ``node`` makes of its operands, op by op as the graph does."""
        known = {
            item: self._cast(self.values(expr), fx_utils.value(item).dtype)
            for item, expr in zip(inputs, operands, strict=True)
        }
        if any(isinstance(values, Derived) for values in known.values()):
            return self._derived(node, known)
        for item in inputs:  # a tensor of no dimensions has less weight in the promotion of dtypes
            if not fx_utils.value(item).dim():
                known[item] = self._single(known[item])
        is_view = node.target == aten.view.dtype
        if is_view and any(torch.as_tensor(item).isnan().any() for item in known.values()):
            raise Unsupported("the bits of a NaN")
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)  # type: ignore[arg-type]
        try:
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        except RuntimeError as error:
            raise Unsupported(f"{node.target} fails on constants: {error}") from error
        if found.dtype != fx_utils.value(node).dtype:
            raise Unsupported(f"{node.target} gives {found.dtype} of constants")
        schema: Any = getattr(node.target, "_schema", None)
        if schema.name in _POWERS and not _are_powers(node, known, found):
            raise Unsupported(f"{node.target} gives numbers that may be rounded")
        return found.expand(self.count)

    def _derived(self, node: fx.Node, known: dict[fx.Node, Values]) -> Derived:
        dtype = fx_utils.value(node).dtype
        kinds = {fx_utils.value(item).dtype for item in known}
        is_cast = node.target == torch.ops.prims.convert_element_type.default
        if not is_cast and kinds - {torch.bool} != {dtype}:
            raise Unsupported("a table of the model among operands of several dtypes")

        def argument(item: fx.Node) -> Any:
            values = known[item]
            if isinstance(values, Derived):
                return values
            return Constant(bytes_of(values), values.dtype)

        args = fx.map_arg(tuple(node.args), lambda item: item)
        args = tuple(argument(item) if isinstance(item, fx.Node) else item for item in args)
        if node.kwargs or any(isinstance(item, (list, tuple)) for item in args):
            raise Unsupported("a table of the model among nested arguments")
        return Derived(node.target, args, dtype=dtype, shape=(self.count,))

    def _cast(self, values: Values, dtype: torch.dtype) -> Values:
        if isinstance(values, torch.Tensor):
            return values.to(dtype)
        if values.dtype != dtype:
            raise Unsupported("a table of the model in another dtype")
        return values

    def _single(self, values: Values) -> torch.Tensor:
        assert isinstance(values, torch.Tensor)
        first = values[:1].expand_as(values)
        if bytes_of(values.contiguous()) != bytes_of(first.contiguous()):  # NaN is the same too
            raise Unsupported("a number that varies")
        return values[0]

    def values(self, expr: Expr) -> Values:
        """[count], in the dtype of ``expr``."""
        if isinstance(expr, Bits):
            return self._codes(expr).to(expr.dtype)
        if isinstance(expr, Number):
            return torch.full([self.count], expr.value, dtype=expr.dtype)
        if isinstance(expr, Position) and expr.index.is_const:
            return torch.full([self.count], expr.index.const).to(expr.dtype)
        if isinstance(expr, Lookup):
            table, codes = expr.tensor(), self.values(expr.code)
            if isinstance(codes, Derived):
                raise Unsupported("an index from a table of the model")
            codes = codes.to(torch.int64)
            return self._entries(expr.values, codes, expr.dtype) if table is None else table[codes]
        if isinstance(expr, Load):
            return self._loaded(expr)
        if isinstance(expr, Op) and expr.name in _OF_INTEGERS and expr.dtype in INTEGERS:
            return self._integer(expr).to(expr.dtype)
        if isinstance(expr, Op) and expr.at is not None:
            return self._cast(self._at(*expr.at), expr.dtype)
        raise Unsupported("no function of a field")

    def _integer(self, expr: Op) -> torch.Tensor:
        """The exact value, as ``Op`` defines it, int64."""
        parts = []
        for arg in expr.args:
            values = self.values(arg)
            if isinstance(values, Derived):
                raise Unsupported("integers of a table of the model")
            parts.append(values.to(torch.int64))
        return _OF_INTEGERS[expr.name](*parts)

    def _at(self, node: fx.Node, index: At) -> Values:
        if (node, index) not in self._memo:
            _check_elementwise(node)
            operands = self._operands(node, index)
            self._memo[node, index] = self._run(node, node.all_input_nodes, operands)
        return self._memo[node, index]

    def _loaded(self, expr: Load) -> Values:
        """An element of a short table, at an index that is the field."""
        if not _is_short(expr):
            raise Unsupported("a tensor that is no short table")
        (index,) = expr.index
        if index.terms:
            raise Unsupported("an element by position")
        at = torch.full([self.count], index.const)
        for datum, factor in index.data:
            place = self.values(datum.expr)
            if isinstance(place, Derived):
                raise Unsupported("an index from a table of the model")
            at = at + place.to(torch.int64) * factor
        if at.min() < 0 or at.max() >= fx_utils.value(expr.node).numel():
            raise Unsupported("an index beyond the end of a table")
        tensor = _literal(expr)
        if tensor is not None:
            return tensor[at]
        return self._entries(expr.node, at, expr.dtype)

    def _entries(self, table: Any, places: torch.Tensor, dtype: torch.dtype) -> Derived:
        """The entries at ``places`` of a table whose values are not known here."""
        args = (table, (Constant(bytes_of(places), places.dtype),))
        return Derived(aten.index.Tensor, args, dtype=dtype, shape=(self.count,))

    # the simplest form

    def simplified(self, values: Values) -> Expr:
        """The field if ``values`` are its codes plus a number, else a ``Lookup`` in the bits that
        matter."""
        dtype, parts = values.dtype, self.parts
        if isinstance(values, Derived):
            if not parts:
                raise Unsupported("an entry of a table at one place")
            return Lookup(_number(parts), values, dtype)
        if dtype not in _OF_CODES:
            raise Unsupported(f"values of {dtype}")
        return self._of_memory(bytes_of(values.contiguous()), dtype)

    def _of_memory(self, memory: bytes, dtype: torch.dtype) -> Expr:
        parts = self.parts
        is_fixed = not any(part.offset.data for _, part in parts)  # else see ``further``
        memory, low = without_idle_bits(memory, dtype.itemsize, is_fixed)
        width = (len(memory) // dtype.itemsize).bit_length() - 1
        if not width:
            value = torch.frombuffer(bytearray(memory), dtype=dtype)[0].item()
            if dtype == torch.bool:
                raise Unsupported("a constant condition")
            return integer(int(value), dtype) if dtype in INTEGERS else Number(value, dtype)
        number = _number(_cut(parts, low, width))
        return _sequence(number, memory, dtype) or Lookup(number, memory, dtype)


def _distance(bits: Bits, other: Bits) -> int | None:
    """By how many bits it is above another field of the same word; None: of another word."""
    place = bits.offset - other.offset
    is_same = (bits.node, bits.index) == (other.node, other.index)
    return place.const if is_same and place.is_const else None


def _cut(parts: Parts, low: int, width: int) -> Parts:
    """Bits ``low ... low + width - 1`` of a number."""
    found = []
    for place, part in parts:
        first, end = max(place, low), min(place + part.width, low + width)
        if first < end:
            offset = part.offset + (first - place)
            part = dataclasses.replace(part, offset=offset, width=end - first)
            found.append((first - low, part))
    return tuple(found)


def _number(parts: Parts) -> Any:
    """A field, or a number of several."""
    return concatenated(parts, torch.uint8)


def _is_short(expr: Load) -> bool:
    """Whether the tensor is a stored vector of few elements."""
    shape = fx_utils.value(expr.node).shape
    is_few = len(shape) == 1 and not fx_utils.is_symbolic(shape[0]) and shape[0] <= MAX_CONSTANT
    return is_few and fx_utils.is_stored(expr.node)


def _literal(expr: Load) -> torch.Tensor | None:
    """The values of a tensor that is a literal of the code."""
    if expr.node.op != "get_attr" or not fx_utils.has_fixed_values(expr.node):
        return None
    tensor = fx_utils.attribute(expr.node)
    return None if tensor is None else tensor.cpu()


def _are_powers(node: fx.Node, known: dict[fx.Node, Any], values: torch.Tensor) -> bool:
    """Whether the results are powers of two, or numbers scaled by them without a rounding."""
    if not values.is_floating_point():
        return True
    if node.target == aten.ldexp.Tensor:
        x, exponents = (known[item].double() for item in node.args)  # type: ignore[index]
        is_normal = ((exponents >= -126) & (exponents <= 127)).all()
        return bool(is_normal) and torch.equal(values.double(), x * exponents.exp2())
    mantissa = torch.frexp(values.double()).mantissa
    return bool(((mantissa.abs() == 0.5) | (values == 0) | ~values.isfinite()).all())


def _sequence(code: Expr, memory: bytes, dtype: torch.dtype) -> Expr | None:
    """The number, signed or not, plus an integer; None if that is not what the entries are."""
    found = sequence_of(memory, dtype) if dtype in (*INTEGERS, *FLOATS) else None
    if found is None or (found[0] and not isinstance(code, Bits)):
        return None
    is_signed, number = found
    held = dtype if dtype in INTEGERS else torch.int32
    expr: Expr = dataclasses.replace(code, dtype=held)
    if is_signed:
        expr = sign_extended(expr)
    if number:
        expr = Op("add", (expr, integer(number, held)), held)
    return expr if held == dtype else Op("cast", (expr,), dtype)
