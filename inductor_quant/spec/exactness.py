"""How close a rewritten GEMM is to the graph that it replaces: one class for each match.

Compared are the canonical op and the nodes it replaced, run one by one as in eager mode on the same
operands: quantized activation and weight, scales, bias. Quantizing the activation is not part of
it.

Integer sums over K are exact (K is bounded so that int32 cannot overflow), so fp32 scales applied
in the graph's order leave no difference. Float sums have no fixed order: cuBLAS changes it with the
shape, and so do we; only the summed products can be the same. Producers round to bf16 or fp16 after
each operation; a kernel that keeps fp32 and rounds once skips those roundings, which moves a
quarter to two thirds of the results by about one ulp, toward the exact value for every producer we
measured. And a scale that is constant along K may be applied to the sum instead of to each weight:
equal in exact arithmetic, not in rounded. That error only shrinks; fp16 results that overflowed
before their last scale become finite.
"""

from __future__ import annotations

import enum


class Exactness(enum.StrEnum):
    """Ordered from the strongest guarantee to the weakest.

    BIT_EXACT             every element equals the graph's, bit for bit
    SAME_WEIGHT_ROUNDING  the multiplied values of the op's reference equal the graph's bit for bit;
                          sums are fp32 in the kernel's order, and the result is rounded as in the
                          graph
    FEWER_ROUNDINGS       the graph's operations in its order, without some of its roundings to a
                          narrower type (or with a fused multiply-add)
    REASSOCIATED          scales in another order or by other factors (W in fp64 is one), or applied
                          to the sum instead of to its terms
    """

    BIT_EXACT = "bit_exact"
    SAME_WEIGHT_ROUNDING = "same_weight_rounding"
    FEWER_ROUNDINGS = "fewer_roundings"
    REASSOCIATED = "reassociated"
