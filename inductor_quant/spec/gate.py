"""``Gate``: what is computed from two columns of a product, as an expression.

The activation of a gated layer, ``silu(gate) * up`` say, takes one column of each half of the
product, or two neighbours. The pass reads it from the graph: no activation has a name here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

# How many operands each op has.
ARITY = {
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum"), 2),
    **dict.fromkeys(("neg", "exp", "sigmoid", "tanh", "erf"), 1),
}
SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
# (op, operands): an int is the number of a value, 0 and 1 the two columns, 2 the first step's; a
# float is a constant.
Step = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Gate:
    """``out[s, j] = f(y[s, a], y[s, b])`` in fp32, where y has twice as many columns as out.

    steps           f, one op after the other; the last one's value is the result
    is_interleaved  a and b are ``2 * j`` and ``2 * j + 1``; else j and j plus half of the columns
    """

    steps: tuple[Step, ...]
    is_interleaved: bool

    def __post_init__(self) -> None:
        for count, (op, *operands) in enumerate(self.steps, 2):
            numbers = [operand for operand in operands if isinstance(operand, int)]
            is_known = ARITY.get(op) == len(operands)
            if not is_known or not all(0 <= number < count for number in numbers):
                raise ValueError(f"{op} of {operands} is no step of a gate")
        if not self.steps:
            raise ValueError("a gate has steps")

    def evaluate(self, first: Any, second: Any, apply: Callable[..., Any]) -> Any:
        """f of two columns; ``apply(op, *operands)`` computes a step of it."""
        values = [first, second]
        for op, *operands in self.steps:
            values.append(apply(op, *(values[o] if isinstance(o, int) else o for o in operands)))
        return values[-1]

    def encode(self) -> str:
        """A compact text, read back by ``decode``."""
        return json.dumps([self.is_interleaved, self.steps], separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Gate:
        """The inverse of ``encode``. Raises ValueError for other text."""
        try:
            is_interleaved, steps = json.loads(text)
            return cls(tuple(map(tuple, steps)), is_interleaved)
        except (TypeError, KeyError) as error:
            raise ValueError(f"{text!r} is no gate: {error!r}") from error

    def __str__(self) -> str:
        """``(a / (exp(-a) + 1)) * b``."""

        def written(op: str, *operands: Any) -> str:
            texts = [o if isinstance(o, str) else f"{o:g}" for o in operands]
            if op in SYMBOLS:
                return f"({texts[0]} {SYMBOLS[op]} {texts[1]})"
            name = {"maximum": "max", "minimum": "min"}.get(op, op)
            return f"-{texts[0]}" if op == "neg" else f"{name}({', '.join(map(_bare, texts))})"

        return _bare(str(self.evaluate("a", "b", written)))


def _bare(text: str) -> str:
    """Without the parentheses around all of it, which a sum or a product has."""
    return text[1:-1] if text.startswith("(") else text
