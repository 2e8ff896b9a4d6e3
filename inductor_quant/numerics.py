"""How near a rewritten GEMM is to the graph that it stands for: one class for each match.

What is compared is the canonical op's result with that of the nodes that it replaced, run one by
one as eager mode does, on the same operands: quantized activations and weights, scales, bias.
Quantizing an activation is no part of it.

Why the classes are these. The sum over K of integers is exact (K is bounded so that int32 cannot
overflow), so with scales in fp32, applied in the graph's order, nothing is left to differ. A sum of
floats has no order of its own: cuBLAS takes another for another shape, and so do we; what can be
the same are the numbers that are summed. Producers round to bf16 or fp16 after each operation; a
kernel that keeps fp32 and rounds once leaves roundings out, which changes a quarter to two thirds
of the results by about one unit in the last place, toward the exact value in all producers that we
measured. And a scale that is the same for all k may be applied to the sum instead of to each
weight: exact arithmetic would not know the difference, rounding does. What may only shrink in that
is the error; fp16 results that overflowed before their last scale become finite.
"""

from __future__ import annotations

import enum


class Exactness(enum.StrEnum):
    """From the strongest to the weakest; a class includes all that the stronger ones promise not.

    BIT_EXACT             every element is the graph's, bit for bit
    SAME_WEIGHT_ROUNDING  the numbers that are multiplied are the graph's bit for bit, sums are fp32
                          in an order of the kernel's own, and the result is rounded as in the graph
    FEWER_ROUNDINGS       the graph's operations in its order, without some of its roundings to a
                          narrower type (or with a multiply-add in one rounding)
    REASSOCIATED          scales in another order, or applied to the sum instead of to its terms
    """

    BIT_EXACT = "bit_exact"
    SAME_WEIGHT_ROUNDING = "same_weight_rounding"
    FEWER_ROUNDINGS = "fewer_roundings"
    REASSOCIATED = "reassociated"
