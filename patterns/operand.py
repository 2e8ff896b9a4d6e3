"""Decodes a weight: which stored numbers W[k, n] is made of, as a ``WeightFormat``.

From the expression of an element, the chain of affine steps is followed inwards to the one stored
number that every k and n has of its own: a field of bits, an int8 or fp8 element, or an entry of a
look-up table. What else takes part (scales, zero points) varies along fewer digits. Casts between
floats on the way are dropped: the canonical op rounds less often. Nothing is guessed: an expression
of another shape is a Rejection.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.patterns import graph
from inductor_quant.patterns.digits import Digit, Index, Torn, Unsupported
from inductor_quant.patterns.expression import (
    EXACT_IN_FP32,
    FLOAT8,
    FLOATS,
    INTEGERS,
    Bits,
    Expr,
    Load,
    Number,
    Op,
    constant,
    digits,
    forms,
    integer,
    interval,
    is_whole,
    limits,
    normalized,
)
from inductor_quant.patterns.symbolic import Reader
from inductor_quant.weight_format import Field, Form, Step, StepKind, WeightFormat

MAX_BITS = 8
_STEPS: dict[str, StepKind] = {"add": "add", "sub": "sub", "mul": "mul", "div": "div"}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A decoded weight. ``sources`` are the nodes of the tensors that ``format`` names by
    position."""

    format: WeightFormat
    sources: tuple[fx.Node, ...]


def read_weight(node: fx.Node, *, transposed: bool = False) -> Weight | Rejection:
    """How the operand ``node`` [K, N] ([N, K] if ``transposed``) is made from stored numbers."""
    k, n = graph.value(node).shape
    if transposed:
        k, n = n, k
    if graph.is_symbolic(k) or graph.is_symbolic(n):
        return Rejection(RejectionCode.WEIGHT_FORM, "its shape is symbolic", node.name)

    def read(reader: Reader) -> Weight | Rejection:
        row, column = reader.space.variable("k", k), reader.space.variable("n", n)
        index = (column, row) if transposed else (row, column)
        return decode(reader, reader.read(node, index), node)

    return attempt(read, lambda found: isinstance(found, Weight))


# How many fields a word of 8 to 64 bits may have.
_FIELDS = (2, 4, 5, 8, 10, 16, 21, 32)
Found = TypeVar("Found")


def attempt(read: Callable[[Reader], Found], is_good: Callable[[Found], bool]) -> Found:
    """What ``read`` finds; where a digit was torn, what it finds with that digit kept whole."""
    reader = Reader()
    first = read(reader)
    if is_good(first) or not reader.space.is_torn:
        return first
    for whole in itertools.product("kn", _FIELDS):
        try:
            found = read(Reader(whole))
        except Unsupported:
            continue
        if is_good(found):
            return found
    return first


def decode(reader: Reader, expr: Expr, node: fx.Node) -> Weight | Rejection:
    """The weight whose element is ``expr``, in the axes "k" and "n" of the reader's space."""
    decoder = _Decoder(reader, node)
    try:
        return decoder.weight(normalized(expr, reader.space))
    except _NoWeight as reason:
        return reason.rejection
    except Unsupported as reason:
        reader.space.is_torn |= isinstance(reason, Torn)
        return Rejection(RejectionCode.WEIGHT_FORM, str(reason), node.name)


class _NoWeight(Exception):
    """Never leaves this module."""

    def __init__(self, code: RejectionCode, detail: str, node: fx.Node) -> None:
        super().__init__(detail)
        self.rejection = Rejection(code, detail, node.name)


class _Decoder:
    def __init__(self, reader: Reader, node: fx.Node) -> None:
        self.space = reader.space
        self.node = node  # named where no other is to blame
        self.sources: list[fx.Node] = []
        self.names: dict[Digit, str] = {}

    def weight(self, expr: Expr) -> Weight:
        element, steps = self._unwind(expr)
        self._check_element(element)
        # Names are given once no digit is split any more: everything was normalized before.
        radices = self._name_digits([element, *(operand for _, operand in steps)])
        field = self._field(element)
        built = tuple(Step(kind, self._operand(operand)) for kind, operand in steps)
        found = WeightFormat(radices["k"], radices["n"], field, built)
        return Weight(found, tuple(self.sources))

    # -- the chain of steps

    def _unwind(self, expr: Expr) -> tuple[Expr, list[tuple[StepKind, Expr]]]:
        """The element and the steps that lead from it to ``expr``, first one first."""
        steps: list[tuple[StepKind, Expr]] = []
        while isinstance(expr, Op):
            if expr.name == "cast":
                self._check_cast(expr)
                (expr,) = expr.args
                continue
            if expr.name == "shl":
                expr = self._as_product(expr)
            if expr.name == "float8":
                break
            if expr.name not in _STEPS:
                raise self._blame(expr, f"{expr.name} is no affine step")
            left, right = expr.args
            is_left, is_right = self._sides(expr)
            if is_left == is_right:
                raise self._blame(expr, "no operand, or both, vary with every k and n")
            inner, outer = (left, right) if is_left else (right, left)
            if inner.dtype in INTEGERS and expr.dtype in FLOATS:
                self._check_exact(inner)  # converted without a cast of its own
            if is_left or expr.name in ("add", "mul"):
                steps += self._factors(_STEPS[expr.name], outer)
            elif expr.name == "sub":  # z - q = -q + z
                steps += [("add", outer), ("mul", Number(-1.0, torch.float32))]
            else:
                raise self._blame(expr, "the quantized number is a divisor")
            expr = inner
        return expr, _simplified(steps[::-1])

    def _factors(self, kind: StepKind, operand: Expr) -> list[tuple[StepKind, Expr]]:
        """A scale as the product or quotient of what it is made of, the last step first.

        Where the graph computes it in fp32, or for every k and n (an outer product). Otherwise it
        is taken as the graph computes it, rounded as there.
        """
        inner = _stripped(operand)
        if kind in ("add", "sub") or not isinstance(inner, Op) or inner.name not in ("mul", "div"):
            return [(kind, operand)]
        every = {d for axis in ("k", "n") for d in self.space.axes[axis] if d.radix > 1}
        is_outer = every <= digits(inner, self.space)
        if not (is_outer or inner.at is None or inner.dtype == torch.float32):
            return [(kind, operand)]
        left, right = inner.args
        opposite: StepKind = "div" if kind == "mul" else "mul"
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
            self._check_exact(cast.args[0])

    def _check_exact(self, expr: Expr) -> None:
        low, high = interval(expr)
        if max(-low, high) > EXACT_IN_FP32:
            raise self._blame(expr, f"{low} ... {high} is not exact in fp32")

    def _is_element(self, expr: Expr, *, by_data: bool = False) -> bool:
        """Whether every k and n has a number of its own in ``expr``; ``by_data``: also where a
        number in a tensor says which one."""
        if isinstance(expr, Op):
            return any(self._is_element(arg, by_data=by_data) for arg in expr.args)
        every = {d for axis in ("k", "n") for d in self.space.axes[axis] if d.radix > 1}
        if every <= digits(expr, self.space, through_data=by_data):
            return True
        data = (d.expr for form in forms(expr, through_data=False) for d, _ in form.data)
        return any(self._is_element(d, by_data=by_data) for d in data)

    def _sides(self, expr: Op) -> tuple[bool, bool]:
        """Which of the two arguments holds the element."""
        left, right = expr.args
        sides = self._is_element(left), self._is_element(right)
        if not any(sides):  # the rows of the weight itself are permuted by a tensor
            sides = self._is_element(left, by_data=True), self._is_element(right, by_data=True)
        return sides

    def _check_element(self, element: Expr) -> None:
        stored = element
        if isinstance(stored, Op) and stored.name == "float8":
            (stored,) = stored.args
        if not isinstance(stored, (Bits, Load)):
            raise self._blame(element, "no stored number at its end")
        if not self._is_element(stored, by_data=True):
            raise self._blame(element, "no number of its own for every k and n")
        # an entry of a table: the number is the one that chooses it
        while codes := self._codes(stored):
            stored = _code(codes[0])
        if isinstance(stored, Load):
            if stored.dtype not in FLOAT8:
                code = RejectionCode.NOT_QUANTIZED
                if not graph.is_stored(stored.node):
                    code = RejectionCode.WEIGHT_FORM
                raise _NoWeight(code, f"{stored.node.target} gives {stored.dtype}", stored.node)
        elif stored.width > MAX_BITS:
            raise _NoWeight(
                RejectionCode.WEIGHT_FORM, f"a number of {stored.width} bits", stored.node
            )
        if not graph.is_stored(stored.node):
            raise _NoWeight(
                RejectionCode.COMPUTED_WEIGHT, f"{stored.node.target} computes it", stored.node
            )

    def _codes(self, stored: Bits | Load) -> list[Expr]:
        """The numbers of their own for every k and n by which ``stored`` is chosen."""
        data = [datum.expr for index in stored.index for datum, _ in index.data]
        return [expr for expr in data if self._is_element(expr)]

    # -- fields

    def _operand(self, expr: Expr) -> Field | float:
        """A scale or zero point: a number, a stored field, or a small tensor that the graph
        computes."""
        if isinstance(expr, Number):
            return expr.value
        value = constant(expr)
        if value is not None:
            return float(value)
        try:
            return self._field(_stripped(expr))
        except _NoWeight:
            if not isinstance(expr, Op) or expr.at is None:
                raise
        node, index = expr.at
        return self._loaded(node, tuple(map(self.space.leaves, index)), Field(0, ()))

    def _field(self, expr: Expr) -> Field:
        if isinstance(expr, Load):
            if expr.dtype not in (*FLOATS, *FLOAT8):
                raise self._blame(expr, f"a number of {expr.dtype}")
            return self._loaded(expr.node, expr.index, Field(0, ()))
        if isinstance(expr, Bits):
            field = Field(0, ())
            if not is_whole(expr):
                offset = self._form(expr.offset)
                field = Field(0, (), offset, expr.width, expr.signed)
            return self._loaded(expr.node, expr.index, field)
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
            if not (inner.add or inner.wrap):
                kind = "e4m3" if expr.dtype == torch.float8_e4m3fn else "e5m2"
                signed = False  # the bits themselves
                return dataclasses.replace(inner, width=8, signed=signed, float8=kind)
        if isinstance(expr, Op) and expr.name == "wrap":
            inner = self._field(expr.args[0])
            if not inner.wrap and inner.width == constant(expr.args[1]):
                return dataclasses.replace(inner, wrap=True)
        raise self._blame(expr, "a scale or zero point that is neither stored nor computed apart")

    def _loaded(self, node: fx.Node, index: tuple[Index, ...], field: Field) -> Field:
        if node not in self.sources:
            self.sources.append(node)
        source = self.sources.index(node)
        return dataclasses.replace(field, source=source, index=tuple(map(self._form, index)))

    # -- digits

    def _name_digits(self, parts: list[Expr]) -> dict[str, tuple[int, ...]]:
        """Names for as few digits as the expressions need; the radices of each axis."""
        indices = [index for part in parts for index in forms(part)]
        for part in parts:  # a computed scale is read where the graph computes it
            if isinstance(part, Op) and part.at is not None:
                indices += map(self.space.leaves, part.at[1])
        terms = [dict(self.space.leaves(index).terms) for index in indices]
        radices: dict[str, tuple[int, ...]] = {}
        for axis in ("k", "n"):
            groups: list[list[Digit]] = []
            for digit in self.space.axes[axis]:
                if groups and all(_continues(groups[-1][-1], digit, term) for term in terms):
                    groups[-1].append(digit)
                else:
                    groups.append([digit])
            radices[axis] = tuple(math.prod(d.radix for d in group) for group in groups)
            for number, group in enumerate(groups):
                # the last digit of a group carries its coefficient
                self.names.update(dict.fromkeys(group[:-1], ""))
                self.names[group[-1]] = f"{axis}{number}"
        return radices

    def _form(self, index: Index) -> Form:
        index = self.space.leaves(index)
        linear, tables = [], []
        for digit, term in index.terms:
            name = self.names.get(digit)
            if not name:
                continue  # part of a coarser digit, or of a batch that has all in common
            if isinstance(term, tuple):
                tables.append((name, term))
            else:
                linear.append((name, term))
        fields = tuple((self._field(datum.expr), coef) for datum, coef in index.data)
        return Form(index.const, tuple(sorted(linear)), tuple(sorted(tables)), fields)

    def _blame(self, expr: Expr, reason: str) -> _NoWeight:
        node = self.node
        if isinstance(expr, (Load, Bits)):
            node = expr.node
        elif isinstance(expr, Op) and expr.at is not None:
            node = expr.at[0]
        return _NoWeight(RejectionCode.WEIGHT_FORM, reason, node)


def _simplified(steps: list[tuple[StepKind, Expr]]) -> list[tuple[StepKind, Expr]]:
    """Integers that are added before anything else, in one step or none: (q + 8) - 8."""
    total, rest = 0, list(steps)
    while rest and rest[0][0] in ("add", "sub") and (value := constant(rest[0][1])) is not None:
        total += value if rest.pop(0)[0] == "add" else -value
    if total:
        rest.insert(0, ("sub" if total < 0 else "add", integer(abs(total), torch.int64)))
    return rest


def _code(expr: Expr) -> Bits | Load:
    """The number in a tensor that an index is computed from."""
    while isinstance(expr, Op):
        expr = expr.args[0]
    if not isinstance(expr, (Bits, Load)):
        raise Unsupported("an index that is not stored")
    return expr


def _stripped(expr: Expr) -> Expr:
    """Without casts that change no value: the kernel computes in fp32."""
    while isinstance(expr, Op) and expr.name == "cast":
        (inner,) = expr.args
        if inner.dtype in INTEGERS:
            low, high = interval(inner)  # the kernel converts to fp32 as well
            if max(-low, high) > EXACT_IN_FP32 and expr.dtype != torch.float32:
                break
        elif inner.dtype not in (*FLOATS, *FLOAT8) or expr.dtype not in _WIDER.get(inner.dtype, ()):
            break
        expr = inner
    return expr


_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    torch.float8_e4m3fn: FLOATS,
    torch.float8_e5m2: FLOATS,
}


def _continues(high: Digit, low: Digit, terms: Mapping[Digit, object]) -> bool:
    """Whether the two digits appear in a form as one: ``coef * (low.radix * high + low)``."""
    above, below = terms.get(high, 0), terms.get(low, 0)
    return isinstance(above, int) and isinstance(below, int) and above == below * low.radix
