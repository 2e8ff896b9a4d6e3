"""``torch.ops.inductor_quant.quantized_linear``: a ``w8a8`` or ``fp8`` that quantizes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import fp8, w8a8
from inductor_quant.ops.checks import check
from inductor_quant.ops.fusion import quantize, row_reduce
from inductor_quant.ops.registration import define
from inductor_quant.spec import row_scale
from inductor_quant.spec.gemm import dtype_name

SCHEMA = (
    "quantized_linear(Tensor x, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, *, "
    "ScalarType dtype, str[] scale_ops, int low=-128, int high=127, float alpha=1.0, "
    "bool fast_accum=False, ScalarType out_dtype) -> Tensor"
)
# No kernel takes more: every CTA quantizes all rows.
MAX_ROWS = 4
aten, prims = torch.ops.aten, torch.ops.prims
_STEPS = {
    "add": aten.add.Tensor,
    "clamp_min": aten.clamp_min.default,
    "div": aten.div.Tensor,
    "mul": aten.mul.Tensor,
}
# The GEMM of quantized values of a dtype.
FAMILIES = {torch.int8: "w8a8", torch.float8_e4m3fn: "fp8"}


def quantized(
    x: Any,
    a_scale: Any,
    scale_ops: Sequence[str],
    low: int,
    high: int,
    dtype: torch.dtype,
    *,
    call: Callable[..., Any] = lambda op, *args, **kwargs: op(*args, **kwargs),
) -> tuple[Any, Any]:
    """(a, its scale), see ``reference``. ``call(op, *args, **kwargs)`` computes an op: of tensors,
    or of a compiler's IR."""
    if a_scale is None:
        a_scale = call(row_reduce.op, x, "absmax", True)
        for step in map(row_scale.parse, scale_ops):
            if step.kind == "to":
                a_scale = call(prims.convert_element_type.default, a_scale, step.dtype)
            elif step.kind == "if_zero":
                is_zero = call(aten.eq.Scalar, a_scale, 0)
                a_scale = call(aten.where.ScalarSelf, is_zero, step.number, a_scale)
            else:
                a_scale = call(_STEPS[step.kind], a_scale, step.number)
    return call(quantize.op, x, a_scale, low, high, dtype=dtype), a_scale


def reference(
    x: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    scale_ops: Sequence[str],
    low: int = -128,
    high: int = 127,
    alpha: float = 1.0,
    fast_accum: bool = False,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``w8a8(a, b, a_scale, b_scale, bias)``, or ``fp8`` of these, of
    ``a = quantize(x, a_scale, low, high, dtype=dtype)``.

    x [M, K]: bf16, fp16 or fp32. dtype: int8 or float8_e4m3fn. a_scale: [M, 1] or [1, 1]; None:
    computed from each row's absmax by the steps of ``scale_ops`` (``spec/row_scale.py``). It is
    fp32, or beside e4m3 any float. b_scale: [1, N] or [1, 1]. ``low``, ``high`` and ``alpha`` are
    for int8 alone, ``fast_accum`` for e4m3. The rest is as for ``w8a8`` and ``fp8``. Raises
    SpecError as they do, and for a malformed step.
    """
    _check(x, a_scale, b_scale, scale_ops, dtype)
    a, scale = quantized(x, a_scale, scale_ops, low, high, dtype)
    if dtype == torch.int8:
        return w8a8.op(a, b, scale, b_scale, bias, alpha=alpha, out_dtype=out_dtype)
    return fp8.op(a, b, scale, b_scale, bias, fast_accum=fast_accum, out_dtype=out_dtype)


def _check(
    x: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    scale_ops: Sequence[str],
    dtype: torch.dtype,
) -> None:
    if dtype not in FAMILIES:
        raise SpecError(f"quantized_linear: no values in {dtype}; one of {tuple(FAMILIES)}")
    if x.dim() != 2 or x.dtype not in row_scale.FLOATS:
        raise SpecError(
            f"quantized_linear: x is {x.dtype} {list(x.shape)}, it must be [M, K] of one of "
            f"{row_scale.FLOATS}"
        )
    columns = () if b_scale is None else ((1, b_scale.shape[-1]),)
    check(
        "quantized_linear",
        {
            "a_scale": (a_scale, ((x.shape[0], 1), (1, 1)), ()),
            "b_scale": (b_scale, columns, ()),  # no groups of K
        },
    )
    steps = [row_scale.parse(text) for text in scale_ops]
    casts = [x.dtype, *(step.dtype for step in steps if step.kind == "to")]
    given = casts[-1] if a_scale is None else a_scale.dtype
    is_float = given == torch.float32 or (dtype != torch.int8 and given in row_scale.FLOATS)
    if not is_float or (steps and a_scale is not None):
        raise SpecError(
            f"quantized_linear: a scale in {dtype_name(given)}, {len(steps)} steps in scale_ops; "
            "pass either a_scale or steps; beside int8 the scale is f32"
        )


op = define(SCHEMA, reference, flexible_layout=True)
