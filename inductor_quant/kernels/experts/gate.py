"""``GateCode``: the statements of a gate in an epilogue."""

from __future__ import annotations

import dataclasses
from typing import Any

from inductor_quant.spec.gate import SYMBOLS, Gate

BOUNDS = {"maximum": "<", "minimum": ">"}


@dataclasses.dataclass(frozen=True)
class GateCode:
    """The template constant ``GATE``. ``size``: the columns that are stored.

    ``str`` is its text: that is what kernels and cache keys contain."""

    gate: Gate
    size: int

    def __str__(self) -> str:
        return repr(self.gate.encode())

    __repr__ = __str__

    def column(self, position: str) -> str:
        """The column of the product that is at ``position`` of those in pairs."""
        if self.gate.is_interleaved:
            return position
        return f"{position} % 2 * {self.size} + {position} // 2"

    def statements(self, lang: str) -> str:
        """Statements that leave in ``out`` what ``first`` and ``second`` give."""
        lines: list[str] = []

        def assigned(op: str, *operands: Any) -> str:
            lines.append(f"gate{len(lines)} = {_step(lang, op, *map(_text, operands))}")
            return f"gate{len(lines) - 1}"

        result = self.gate.evaluate("first", "second", assigned)
        return "\n".join([*lines, f"out = {result}"])


def _text(operand: Any) -> str:
    if isinstance(operand, str):
        return operand
    return repr(operand) if abs(operand) < float("inf") else f'float("{operand}")'


def _step(lang: str, op: str, a: str, b: str = "") -> str:
    if op in SYMBOLS:
        return f"{a} {SYMBOLS[op]} {b}"
    if op in BOUNDS:  # NaN stays NaN
        return f"{lang}.where(({b} {BOUNDS[op]} {a}) | ({a} != {a}), {a}, {b})"
    if op == "sigmoid":
        return f"1.0 / (1.0 + {lang}.exp(-{a}))"
    name = {"neg": "-", "tanh": "libdevice.tanh"}.get(op, f"{lang}.{op}")
    return f"{name}({a})"
