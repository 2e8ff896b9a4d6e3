"""Decodes the expression of a weight W[k, n] into a ``WeightFormat``.

The chain of affine steps is followed inwards to the one stored element of each (k, n): a bit field,
an int8 or FP8 element, or an entry of a lookup table. The other operands (scales, zero points) vary
along fewer digits. Casts between floats are dropped: the canonical op rounds less often. An
expression of any other shape is a Rejection.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import fx

from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.weight_format import (
    NO_TENSOR,
    AffineIndex,
    DequantOp,
    DequantOpKind,
    Field,
    WeightFormat,
)

from .. import fx_utils
from ..symbolic import Reader
from ..symbolic.bits import dense_parts
from ..symbolic.expr import (
    EXACT_IN_FP32,
    FLOAT8,
    FLOATS,
    INTEGERS,
    Bits,
    Choice,
    Expr,
    Load,
    Lookup,
    Number,
    Op,
    constant,
    digits,
    forms,
    integer,
    interval,
    is_gathered,
    is_position,
    is_whole,
    limits,
    normalized_index,
    numbers_of,
    told_apart,
)
from ..symbolic.functions import as_function
from ..symbolic.index import Digit, IndexExpr, SplitConflict, Unsupported
from .lookup_table import (
    Source,
    code_of,
    data_of,
    entries,
    exponents_of,
    is_index,
    known_entries,
    stored_bytes,
    table_of,
)
from .rounding import Rounding, stripped

MAX_BITS = 8
_WRAPPING = (fx_utils.aten.add, fx_utils.aten.sub, fx_utils.aten.mul)
_STEPS: dict[str, DequantOpKind] = {"add": "add", "sub": "sub", "mul": "mul", "div": "div"}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A decoded weight.

    sources       the tensors that ``format`` refers to by position
    same_for      dtypes of x for which the graph's weight, bit for bit, is the format's in fp32
                  rounded once
    is_reordered  whether the format has other factors than the graph
    """

    format: WeightFormat
    sources: tuple[Source, ...]
    same_for: frozenset[torch.dtype]
    is_reordered: bool


def decode(reader: Reader, expr: Expr, node: fx.Node) -> Weight | Rejection:
    """The weight with the element ``expr`` in the axes "k" and "n" of the reader's space, or the
    stack in the axes "e", "k" and "n"."""
    decoder = _Decoder(reader, node)
    try:
        return decoder.weight(reader.normalized(expr))
    except _NoWeight as reason:
        return reason.rejection
    except Unsupported as reason:
        reader.space.is_torn |= isinstance(reason, SplitConflict)
        return Rejection(RejectionCode.WEIGHT_FORM, str(reason), node.name)


class _NoWeight(Exception):
    """Internal to this module."""

    def __init__(self, code: RejectionCode, detail: str, node: fx.Node) -> None:
        super().__init__(detail)
        self.rejection = Rejection(code, detail, node.name)


class _Decoder:
    def __init__(self, reader: Reader, node: fx.Node) -> None:
        self.reader = reader
        self.space = reader.space
        self.node = node  # for messages, if no other node is to blame
        self.sources: list[Source] = []
        self.names: dict[Digit, str] = {}
        # steps and casts with operands, outermost first
        self.path: list[tuple[Op, Expr | None]] = []
        self.is_reordered = False

    def weight(self, expr: Expr) -> Weight:
        element, steps = self._unwind(expr)
        self._check_element(element)
        # Name digits only now: everything is normalized, so none will be split again.
        radices = self._name_digits([element, *(operand for _, operand in steps)])
        field = known_entries(self._field(element), self.sources)
        built = tuple(DequantOp(kind, self._operand(operand)) for kind, operand in steps)
        found = WeightFormat(radices["k"], radices["n"], field, built, radices["e"])
        return Weight(found, tuple(self.sources), self._same_for(element), self.is_reordered)

    def _same_for(self, element: Expr) -> frozenset[torch.dtype]:
        rounding = Rounding(element)
        for op, operand in reversed(self.path):
            if operand is not None:
                rounding.step(op, operand)
            else:
                rounding.cast(op.dtype)
        return rounding.same_for() if not self.is_reordered else frozenset()

    # -- the chain of steps

    def _unwind(self, expr: Expr) -> tuple[Expr, list[tuple[DequantOpKind, Expr]]]:
        """The stored element, and the steps from it to ``expr`` in order."""
        steps: list[tuple[DequantOpKind, Expr]] = []
        while isinstance(expr, Op):
            if expr.name == "cast":
                self._check_cast(expr)
                self.path.append((expr, None))
                (expr,) = expr.args
                continue
            if expr.name == "shl":
                expr = self._as_product(expr)
            if expr.name in ("float8", "difference"):
                break
            if expr.name not in _STEPS:
                found = self._function(expr, f"{expr.name} is no affine step")
                if found is expr:
                    break
                expr = found
                continue
            left, right = expr.args
            is_left, is_right = self._sides(expr)
            if is_left == is_right:
                expr = self._function(expr, "no operand, or both, vary with every k and n")
                continue
            inner, outer = (left, right) if is_left else (right, left)
            if inner.dtype in INTEGERS and expr.dtype in FLOATS:
                self._check_exact(inner, expr.dtype)  # an implicit cast
            self.path.append((expr, outer))
            self.is_reordered |= expr.dtype == torch.float64
            if is_left or expr.name in ("add", "mul"):
                steps += self._factors(_STEPS[expr.name], outer)
            elif expr.name == "sub":  # z - q = -q + z
                steps += [("add", outer), ("mul", Number(-1.0, torch.float32))]
            else:
                raise self._blame(expr, "the quantized value is a divisor")
            expr = inner
        if isinstance(expr, Load) and not all(map(is_index, data_of(expr))):
            expr = self._function(expr, "an index that is computed")
        return expr, _simplified(steps[::-1])

    def _function(self, expr: Op | Load, reason: str) -> Expr:
        """A step that is not affine, as a function of one field; ``expr`` itself if it is a number
        of several fields."""
        if not self._is_element(expr, by_data=True):
            raise self._blame(expr, reason)
        if isinstance(expr, Op) and expr.name == "or" and dense_parts(expr):
            return expr
        try:
            return as_function(self.reader, expr)
        except Unsupported:
            raise self._blame(expr, reason) from None

    def _factors(self, kind: DequantOpKind, operand: Expr) -> list[tuple[DequantOpKind, Expr]]:
        """Split a scale into its factors, the last step first.

        Only if the graph computes it in fp32, or for every (k, n) as an outer product. Otherwise
        the kernel reads the scale as the graph computes and rounds it.
        """
        inner = stripped(operand)
        while isinstance(inner, Op) and inner.name == "cast" and inner.at is None:
            (inner,) = inner.args  # no node holds the rounded scale
        if kind in ("add", "sub") or not isinstance(inner, Op) or inner.name not in ("mul", "div"):
            return [(kind, operand)]
        every = {d for axis in ("k", "n") for d in self.space.axes[axis] if d.radix > 1}
        is_outer = every <= digits(inner, self.space)
        if not (is_outer or inner.at is None or inner.dtype == torch.float32):
            return [(kind, operand)]
        self.is_reordered = True
        left, right = inner.args
        opposite: DequantOpKind = "div" if kind == "mul" else "mul"
        first = [] if isinstance(left, Number) and left.value == 1 else self._factors(kind, left)
        second = self._factors(kind if inner.name == "mul" else opposite, right)
        return [*second, *first]

    def _as_product(self, shift: Op) -> Op:
        value, amount = shift.args
        low, high = interval(value)
        least, most = limits(shift.dtype)
        by = constant(amount)
        if by is None or low << by < least or high << by > most:
            raise self._blame(shift, "a shift to the left that may overflow")
        return dataclasses.replace(shift, name="mul", args=(value, integer(1 << by, shift.dtype)))

    def _check_cast(self, cast: Op) -> None:
        before, after = cast.args[0].dtype, cast.dtype
        if after not in FLOATS or before not in (*FLOATS, *FLOAT8, *INTEGERS):
            raise self._blame(cast, f"a cast from {before} to {after}")
        if before in INTEGERS:
            self._check_exact(cast.args[0], after)

    def _check_exact(self, expr: Expr, dtype: torch.dtype) -> None:
        """That ``expr``, an integer, is the same in ``dtype`` and in fp32."""
        if isinstance(expr, Op) and expr.name == "difference" and dtype != torch.float64:
            return  # rounded to fp32 first, by torch too
        low, high = interval(expr)
        if max(-low, high) > EXACT_IN_FP32:
            zeros = fx_utils.spread_integers(self._node(expr))
            detail = "".join(f"; the zero point {zero.name} has no known range" for zero in zeros)
            raise self._blame(expr, f"{low} ... {high} is not exact in fp32{detail}")

    def _is_element(self, expr: Expr, *, by_data: bool = False) -> bool:
        """Whether ``expr`` has an element of its own for every (k, n); ``by_data``: also one that a
        tensor of indices selects."""
        if isinstance(expr, Op):
            return any(self._is_element(arg, by_data=by_data) for arg in expr.args)
        every = {d for axis in ("k", "n") for d in self.space.axes[axis] if d.radix > 1}
        if every <= told_apart(expr, self.space, through_data=by_data):
            return True
        data = (d.expr for form in forms(expr, through_data=False) for d, _ in form.data)
        return any(self._is_element(d, by_data=by_data) for d in data)

    def _sides(self, expr: Op) -> tuple[bool, bool]:
        """Which of the two arguments holds the element."""
        left, right = expr.args
        sides = self._is_element(left), self._is_element(right)
        if not any(sides):  # a tensor permutes K of the weight itself
            sides = self._is_element(left, by_data=True), self._is_element(right, by_data=True)
        return sides

    def _check_element(self, element: Expr) -> None:
        stored = element
        if isinstance(stored, Op) and stored.name in ("float8", "difference"):
            stored, *minus = stored.args
            if any(self._is_element(each, by_data=True) for each in minus):
                raise self._blame(element, "a zero point for every k and n")
        if isinstance(stored, Lookup):
            stored = stored.code
        if isinstance(stored, Op) and (parts := dense_parts(stored)):
            if sum(part.width for part in parts) > MAX_BITS:
                raise self._blame(element, "a number of more than 8 bits")
            for part in parts:
                self._check_stored(part, part)
            return
        self._check_stored(stored, element)

    def _check_stored(self, stored: Expr, element: Expr) -> None:
        if not isinstance(stored, (Bits, Load)):
            what = "several stored elements" if isinstance(stored, Choice) else "no stored element"
            raise self._blame(element, f"{what} at its end")
        if not self._is_element(stored, by_data=True):
            raise self._blame(element, "no element of its own for every k and n")
        # of a lookup table: the stored element is the index into it
        while codes := self._codes(stored):
            stored = code_of(codes[0])
        if isinstance(stored, Load):
            axes = [{d.axis for d in digits(data, self.space)} for data in data_of(stored)]
            if {"k", "n"} in axes:
                raise self._blame(element, "a table of vectors: a code for several elements")
            if stored.dtype not in FLOAT8:
                code = RejectionCode.NOT_QUANTIZED
                if not fx_utils.is_stored(stored.node):
                    is_rounded = fx_utils.is_of_wide_floats(stored.node)  # as before a conversion
                    code = RejectionCode["COMPUTED_WEIGHT" if is_rounded else "WEIGHT_FORM"]
                raise _NoWeight(code, f"{stored.node.target} gives {stored.dtype}", stored.node)
        elif stored.width > MAX_BITS:
            raise self._blame(stored, f"an element of {stored.width} bits")
        if not fx_utils.is_stored(stored.node):
            dtype = str(fx_utils.value(stored.node).dtype).removeprefix("torch.")
            detail = f"{stored.node.target} computes it in {dtype}"
            packet = getattr(stored.node.target, "overloadpacket", None)
            if packet in _WRAPPING and dtype in ("int8", "uint8"):
                detail += ", where it may wrap around: compute it in int32"
            raise _NoWeight(RejectionCode.COMPUTED_WEIGHT, detail, stored.node)

    def _codes(self, stored: Bits | Load) -> list[Expr]:
        """The elements, one for every (k, n), that index into ``stored``."""
        return [expr for expr in data_of(stored) if self._is_element(expr)]

    # -- fields

    def _operand(self, expr: Expr) -> Field | float:
        """A scale or zero point: a constant, a stored field, or a small computed tensor."""
        if isinstance(expr, Number):
            return expr.value
        value = constant(expr)
        if value is not None:
            return float(value)
        if found := exponents_of(self.reader, expr):
            code, kind = found
            return dataclasses.replace(self._field(code), width=8, signed=False, float8=kind)
        if isinstance(expr, Lookup):
            return self._function_of_stored(expr)
        known = len(self.sources)
        try:
            return self._field(stripped(expr))
        except _NoWeight:
            del self.sources[known:]
            if not isinstance(expr, (Op, Choice)) or expr.at is None:
                raise
            if isinstance(expr, Op) and expr.name == "cast" and is_gathered(expr.at[1], self.space):
                self.is_reordered = True  # of all experts, not rounded
                return self._operand(expr.args[0])
        return self._computed(*expr.at)

    def _function_of_stored(self, expr: Lookup) -> Field:
        """A scale that is a function of stored codes: as the graph computes it, or of all codes
        before the product; the kernel looks up what is not stored in whole elements, and scales of
        experts, most of which have no rows."""
        if self.space.axes.get("e"):
            return self._looked_up(expr)
        if expr.at and self._is_small(expr, expr.at[0]):
            return self._computed(*expr.at)
        table = table_of(expr, fx_utils.value(self.node).dtype)
        if not isinstance(expr.code, Bits):
            return self._looked_up(expr)
        stored = fx_utils.value(expr.code.node).dtype
        is_byte = stored in (torch.uint8, torch.int8) and expr.code.width == 8
        if isinstance(table, str) or not is_byte:
            return self._looked_up(expr)
        scale = entries(table, expr.code.node)
        return Field(self._source(scale), tuple(map(self._form, expr.code.index)))

    def _computed(self, node: fx.Node, index: tuple[IndexExpr, ...]) -> Field:
        if is_gathered(index, self.space):
            raise _NoWeight(RejectionCode.BATCHED_WEIGHT, "a scale of each row", node)
        return self._loaded(node, normalized_index(index, self.space), Field(0, ()))

    def _field(self, expr: Expr) -> Field:
        if isinstance(expr, Load):
            if expr.dtype not in (*FLOATS, *FLOAT8):
                raise self._blame(expr, f"an element of {expr.dtype}")
            return self._loaded(expr.node, expr.index, Field(0, ()))
        if isinstance(expr, Bits):
            field = Field(0, ())
            if not is_whole(expr):
                offset = self._form(expr.offset)
                field = Field(0, (), offset, expr.width, expr.signed)
            return self._loaded(expr.node, expr.index, field)
        if isinstance(expr, Lookup) and is_position(expr) and isinstance(expr.values, bytes):
            table = tuple(numbers_of(expr.values, expr.dtype))
            return dataclasses.replace(self._field(expr.code), table=table)
        if isinstance(expr, Lookup):
            return self._looked_up(expr)
        if isinstance(expr, Op) and expr.name == "or" and (parts := dense_parts(expr)):
            found: Field | None = None
            for part in reversed(parts):
                found = dataclasses.replace(self._field(part), width=part.width, high=found)
            assert found is not None
            return found
        if isinstance(expr, Op) and expr.name == "digit":
            place, *numbers = expr.args
            divisor, modulus = (each.index.const for each in numbers)
            form = self._form(place.index)
            return Field(NO_TENSOR, (form,), divisor=divisor, modulus=modulus)
        if isinstance(expr, Op) and expr.name == "difference":
            inner, minus = map(self._field, expr.args)
            return dataclasses.replace(inner, minus=minus, bits=torch.iinfo(expr.dtype).bits)
        if isinstance(expr, Op) and expr.name in ("add", "sub"):
            value = constant(expr.args[1])
            inner = self._field(expr.args[0])
            if value is not None and not inner.wrap:
                add = inner.add + (value if expr.name == "add" else -value)
                return dataclasses.replace(inner, add=add)
        if isinstance(expr, Op) and expr.name == "from_end":
            inner = self._field(expr.args[0])
            if not inner.size:
                return dataclasses.replace(inner, size=expr.args[1].index.const)
        if isinstance(expr, Op) and expr.name == "float8":
            inner = self._field(expr.args[0])
            if not (inner.add or inner.wrap or inner.high):
                kind = "e4m3" if expr.dtype == torch.float8_e4m3fn else "e5m2"
                return dataclasses.replace(inner, width=8, signed=False, float8=kind)
        if isinstance(expr, Op) and expr.name == "wrap":
            inner = self._field(expr.args[0])
            if not (inner.wrap or inner.high) and inner.width == constant(expr.args[1]):
                return dataclasses.replace(inner, wrap=True)
        raise self._blame(expr, "a scale or zero point that is neither stored nor computed apart")

    def _looked_up(self, expr: Lookup) -> Field:
        """A float of 8 bits, or an entry of a table."""
        code, table = self._field(expr.code), table_of(expr, fx_utils.value(self.node).dtype)
        if isinstance(table, str):
            if code.high:
                raise self._blame(expr, "a float of 8 bits that is joined from several fields")
            return dataclasses.replace(code, width=8, signed=False, float8=table)
        at = AffineIndex(fields=((code, 1),))
        return Field(self._source(table), (at,))

    def _source(self, item: Source) -> int:
        if item not in self.sources:
            self.sources.append(item)
        return self.sources.index(item)

    def _is_small(self, expr: Expr, node: fx.Node) -> bool:
        """Whether ``node`` holds ``expr`` without repetitions."""
        count = math.prod(digit.radix for digit in digits(expr, self.space))
        return fx_utils.value(node).numel() <= count

    def _loaded(self, node: fx.Node, index: tuple[IndexExpr, ...], field: Field) -> Field:
        source = self._source(stored_bytes(node))
        return dataclasses.replace(field, source=source, index=tuple(map(self._form, index)))

    # -- digits

    def _name_digits(self, parts: list[Expr]) -> dict[str, tuple[int, ...]]:
        """Name as few digits as the expressions need; returns the radices of each axis."""
        indices = [index for part in parts for index in forms(part)]
        for part in parts:  # a computed scale is read from the graph
            if isinstance(part, (Op, Lookup, Choice)) and part.at is not None:
                placed = normalized_index(part.at[1], self.space)
                data = (datum.expr for index in placed for datum, _ in index.data)
                indices += [*placed, *(index for inner in data for index in forms(inner))]
        terms = [dict(self.space.leaves(index).terms) for index in indices]
        radices: dict[str, tuple[int, ...]] = {}
        for axis in ("k", "n", "e"):
            groups: list[list[Digit]] = []
            for digit in self.space.axes.get(axis, ()):
                if groups and all(_continues(groups[-1][-1], digit, term) for term in terms):
                    groups[-1].append(digit)
                else:
                    groups.append([digit])
            radices[axis] = tuple(math.prod(d.radix for d in group) for group in groups)
            for number, group in enumerate(groups):
                # the last digit of a group has its coefficient
                self.names.update(dict.fromkeys(group[:-1], ""))
                self.names[group[-1]] = f"{axis}{number}"
        return radices

    def _form(self, index: IndexExpr) -> AffineIndex:
        index = self.space.leaves(index)
        linear, tables = [], []
        for digit, term in index.terms:
            name = self.names.get(digit)
            if not name:
                continue  # part of a coarser digit, or a batch axis
            if isinstance(term, tuple):
                tables.append((name, term))
            else:
                linear.append((name, term))
        fields = tuple((self._field(datum.expr), coef) for datum, coef in index.data)
        return AffineIndex(index.const, tuple(sorted(linear)), tuple(sorted(tables)), fields)

    def _blame(self, expr: Expr, reason: str) -> _NoWeight:
        return _NoWeight(RejectionCode.WEIGHT_FORM, reason, self._node(expr))

    def _node(self, expr: Expr) -> fx.Node:
        if isinstance(expr, (Load, Bits)):
            return expr.node
        at = expr.at if isinstance(expr, (Op, Lookup, Choice)) else None
        return self.node if at is None else at[0]


def _simplified(steps: list[tuple[DequantOpKind, Expr]]) -> list[tuple[DequantOpKind, Expr]]:
    """Merge leading integer additions: (q + 8) - 8 is no step at all."""
    total, rest = 0, list(steps)
    while rest and rest[0][0] in ("add", "sub") and (value := constant(rest[0][1])) is not None:
        total += value if rest.pop(0)[0] == "add" else -value
    if total:
        rest.insert(0, ("sub" if total < 0 else "add", integer(abs(total), torch.int64)))
    return rest


def _continues(high: Digit, low: Digit, terms: Mapping[Digit, object]) -> bool:
    """Whether both digits appear as one in an index: ``coef * (low.radix * high + low)``."""
    above, below = terms.get(high, 0), terms.get(low, 0)
    return isinstance(above, int) and isinstance(below, int) and above == below * low.radix
