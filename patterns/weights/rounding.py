"""Whether a weight that is dequantized in fp32 and rounded once is the graph's, bit for bit.

``Rounding`` follows the graph's steps from the stored element outwards. As long as the value is the
format's, it is held in some dtype; a whole number is exact in each dtype that is wide enough for
it. One rounding to x's dtype may follow, after which nothing may change the value.
"""

from __future__ import annotations

import math

import torch

from ..symbolic.expr import (
    E8M0,
    FLOATS,
    INTEGERS,
    Bits,
    Expr,
    Load,
    Number,
    Op,
    constant,
    interval,
    rounded,
)

X_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Integers up to this magnitude are exact.
EXACT = {torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    **dict.fromkeys(FLOAT8, FLOATS),
    E8M0: (torch.bfloat16, torch.float32, torch.float64),
}


def is_exact_cast(expr: Expr, dtype: torch.dtype) -> bool:
    """Whether ``expr`` cast to the float ``dtype`` has the same value."""
    if expr.dtype in INTEGERS:
        return magnitude(expr) <= EXACT[dtype]
    return dtype in (expr.dtype, *WIDER.get(expr.dtype, ()))


def magnitude(expr: Expr) -> float:
    """The largest absolute value of an integer, held in any dtype; infinite for other floats."""
    while isinstance(expr, Op) and expr.name == "cast" and is_exact_cast(expr.args[0], expr.dtype):
        (expr,) = expr.args
    if isinstance(expr, Number):
        return abs(expr.value) if expr.value.is_integer() else math.inf
    return max(map(abs, interval(expr))) if expr.dtype in INTEGERS else math.inf


class Rounding:
    def __init__(self, element: Expr) -> None:
        self._held = element.dtype
        self._most = magnitude(element)
        if isinstance(element, Op) and element.name == "difference":
            self._held, self._most = torch.float32, math.inf  # to which every cast rounds first
        self._rounded_to: torch.dtype | None = None
        self._is_same = True

    def cast(self, dtype: torch.dtype) -> None:
        """The value is cast to a float dtype, perhaps implicitly."""
        is_whole = self._most <= EXACT[dtype]
        if not is_whole and dtype not in (self._held, *WIDER.get(self._held, ())):
            # widened after its rounding, and narrowed again
            self._is_same &= self._rounded_to in (None, dtype)
            self._rounded_to = dtype
        self._held = dtype

    def step(self, op: Op, operand: Expr) -> None:
        """``op`` combines the value with ``operand``."""
        if op.dtype in INTEGERS:
            self._held, self._most = op.dtype, magnitude(op)
            number = constant(operand)
            # 0 times a negative integer is 0, and -0.0 in the kernel
            self._is_same &= op.name != "mul" or number is None or number > 0
            return
        self.cast(op.dtype)
        self._is_same &= self._rounded_to is None and _is_read_alike(op, operand)
        most = magnitude(operand)
        self._most = self._most * most if op.name == "mul" else self._most + most
        if op.name == "div" or self._most > EXACT[op.dtype]:
            self._most = math.inf
            # in fp32, as the kernel computes, and then to op's dtype
            self._is_same &= op.dtype != torch.float64
            self._rounded_to = None if op.dtype == torch.float32 else op.dtype

    def same_for(self) -> frozenset[torch.dtype]:
        """The dtypes of x for which the weights are equal."""
        if not self._is_same:
            return frozenset()
        if self._rounded_to is not None:
            return frozenset({self._rounded_to} & {*X_DTYPES})
        is_here = (
            self._most <= EXACT[x] or x in (self._held, *WIDER.get(self._held, ()))
            for x in X_DTYPES
        )
        return frozenset(x for x, here in zip(X_DTYPES, is_here, strict=True) if here)


def _is_read_alike(op: Op, operand: Expr) -> bool:
    """Whether the kernel, which reads ``operand`` without its casts, gets the graph's value."""
    if isinstance(operand, Number):
        # A GPU divides by a number as by its reciprocal; a CPU rounds a number to a narrow dtype.
        is_exact = rounded(operand.value, op.dtype) == operand.value
        is_alike = op.dtype == torch.float32 or is_exact
        return is_alike and (op.name != "div" or abs(math.frexp(operand.value)[0]) == 0.5)
    if operand.dtype in INTEGERS and constant(operand) is None and op.dtype == torch.float32:
        return True  # converted as in the kernel
    if not is_exact_cast(operand, op.dtype):
        return False
    while isinstance(operand, Op) and operand.name == "cast":
        (inner,) = operand.args
        is_same = is_exact_cast(inner, operand.dtype)
        if inner.dtype in INTEGERS and not is_same:
            # the kernel converts integers to fp32
            return operand.dtype == torch.float32 or not isinstance(inner, (Bits, Load))
        if not is_same:
            return True  # read as the graph rounds it
        operand = inner
    return True


def stripped(expr: Expr) -> Expr:
    """``expr`` without casts that change no value: the kernel computes in fp32."""
    while isinstance(expr, Op) and expr.name == "cast":
        (inner,) = expr.args
        if inner.dtype in INTEGERS:
            low, high = interval(inner)  # the kernel converts it to fp32 too
            if max(-low, high) > EXACT[torch.float32] and expr.dtype != torch.float32:
                break
        elif expr.dtype not in WIDER.get(inner.dtype, ()):
            break
        expr = inner
    return expr
