"""Reads what a node computes, element by element: an expression of the position.

``Reader.read(node, index)`` is the value of ``node`` at a symbolic position. Views only change the
position on the way to their source; what joins tensors (cat, slice_scatter) decides by the digits
of the position which of them is read; pointwise ops build expressions. An op that is not known, or
a position that has no form, makes the node a leaf: a tensor that lies in memory as far as we know.
So reading never fails, and how a producer spells its unpacking does not matter.
"""

from __future__ import annotations

from inductor_quant.patterns import joins, producers, values, views  # they register handlers
from inductor_quant.patterns.reader import At, Reader

__all__ = ["At", "Reader", "joins", "producers", "values", "views"]
