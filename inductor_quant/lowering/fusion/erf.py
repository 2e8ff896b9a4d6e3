"""Lowering of ``inductor_quant::erf``.

libdevice's bounds the time of a GELU that is quantized: for 16 values a thread has 696 instructions
with it and 456 with this one (rows of 4096, Triton 3.7, sm_90; times: the encoders in
examples/benchmarks/RESULTS.md).
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.ops.fusion import erf

# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: with t = 1 / (1 + p |x|)
#
#     erf(|x|) = 1 - (a1 t + a2 t^2 + a3 t^3 + a4 t^4 + a5 t^5) exp(-x^2)    to 1.5e-7
#
# and 5e-7 with the roundings to fp32. The constants are, in this order, p, 1; a5, a4, a3, a2, a1;
# -log2(e), since ex2 is 2^x; -1. Infinities and NaN need no care.
ERF = " ".join(  # Inductor writes it as a literal of one line
    (
        "{ .reg .f32 t, sum, e;",
        "abs.f32 t, $1;",
        "fma.rn.f32 t, t, 0f3EA7BA05, 0f3F800000;",
        "rcp.approx.ftz.f32 t, t;",
        "fma.rn.f32 sum, t, 0f3F87DC22, 0fBFBA00E3;",
        "fma.rn.f32 sum, sum, t, 0f3FB5F0E3;",
        "fma.rn.f32 sum, sum, t, 0fBE91A98E;",
        "fma.rn.f32 sum, sum, t, 0f3E827906;",
        "mul.rn.f32 sum, sum, t;",
        "mul.rn.f32 e, $1, 0fBFB8AA3B;",
        "mul.rn.f32 e, e, $1;",
        "ex2.approx.ftz.f32 e, e;",
        "fma.rn.f32 sum, sum, e, 0fBF800000;",
        "neg.f32 sum, sum;",
        "copysign.f32 $0, $1, sum;",
        "}",
    )
)


@fallback.lowering(erf.op)
def lower_erf(x: Any) -> Any:
    return compat.make_pointwise(_erf, override_return_dtype=torch.float32)(x)


def _erf(x: Any) -> Any:
    return compat.ops().inline_asm_elementwise(
        x, asm=ERF, constraints="=f,f", dtype=torch.float32, is_pure=True, pack=1
    )
