"""Reads what a node computes, element by element, as an expression of the position.

``Reader.read(node, index)`` is the value of ``node`` at a symbolic position. Views change the
position on the way to their source; cat and slice_scatter choose a source by the digits of the
position; pointwise ops build expressions. An unknown op, or a position that has no form, makes the
node a leaf, a tensor in memory. So reading never fails, and it does not matter how a producer
writes its unpacking.

    index        positions: sums over digits            expr         expressions of a position
    bits         fields of words, and several as one    join         one form for all of a digit
    reader       the recursion, and its limits          arithmetic   integer and float ops on them
    divided      parts that divide no axis              code_tables  functions of all codes
    views, concat, pointwise, custom_ops, functions     handlers of ops, registered on import
"""

from __future__ import annotations

from . import concat, custom_ops, functions, pointwise, views  # they register handlers
from .reader import At, Reader, attempt

__all__ = ["At", "Reader", "attempt", "concat", "custom_ops", "functions", "pointwise", "views"]
