"""``torch.ops.inductor_quant.w8a8``: an int8 GEMM with scales, as one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.spec import OperandSpec, QuantGemmSpec, ScaleSpec

SCHEMA = (
    "w8a8(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, *, "
    "float alpha=1.0, ScalarType out_dtype) -> Tensor"
)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# |a * b| <= 2**14 for int8, so the sum of K products stays within int32 up to this K.
MAX_K = (2**31 - 1) // 2**14


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``out[m, n] = alpha * a_scale[m] * b_scale[n] * (sum over k of a[m, k] * b[k, n]) +
    bias[n]``.

    Shapes and dtypes:
        a        [M, K]            int8
        b        [K, N]            int8
        a_scale  [M, 1] or [1, 1]  fp32, bf16 or fp16; per token or per tensor; None: 1
        b_scale  [1, N] or [1, 1]  fp32, bf16 or fp16; per channel or per tensor; None: 1
        bias     [N]               fp32, bf16 or fp16; None: 0
    Returns [M, N] in ``out_dtype`` (bf16, fp16 or fp32), contiguous.

    The sum over K is exact; everything after it is fp32, in the order of the formula, rounded once.
    Raises SpecError where shapes or dtypes are others, or K exceeds MAX_K = 131071, beyond which
    full-range operands overflow int32.
    """
    spec_of(a, b, a_scale, b_scale, bias, out_dtype)
    # Integers in fp64 are exact up to 2**53, and every device has a fast fp64 matmul for any shape.
    out = (a.double() @ b.double()).float()
    if alpha != 1.0:
        out = out * alpha
    for scale in (a_scale, b_scale):
        if scale is not None:
            out = out * scale.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def fake(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    allowed = (
        ("b", b.shape[:1], ((k,),)),
        ("a_scale", a_scale, ((m, 1), (1, 1))),
        ("b_scale", b_scale, ((1, n), (1, 1))),
        ("bias", bias, ((n,),)),
    )
    for name, given, shapes in allowed:
        shape = given.shape if isinstance(given, torch.Tensor) else given
        if shape is not None and all(_differ(shape, wanted) for wanted in shapes):
            raise SpecError(f"w8a8: {name} is {list(shape)}, it must be one of {shapes}")
    return torch.empty((m, n), dtype=out_dtype, device=a.device)


def _differ(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether two shapes certainly differ; symbolic sizes are not judged: that adds a guard."""
    return len(shape) != len(wanted) or any(
        isinstance(x, int) and isinstance(y, int) and x != y
        for x, y in zip(shape, wanted, strict=True)
    )


def spec_of(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> QuantGemmSpec:
    """The spec that the op's arguments encode. Raises SpecError where they form no such GEMM."""
    if a.dtype != torch.int8 or b.dtype != torch.int8:
        raise SpecError(f"w8a8 takes int8 operands; a is {a.dtype}, b is {b.dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise SpecError(f"w8a8 takes a [M, K] and b [K, N]; a is {_size(a)}, b is {_size(b)}")
    (m, k), n = a.shape, b.shape[1]
    if k > MAX_K:
        raise SpecError(
            f"w8a8: K={k} may overflow int32, the most is {MAX_K}; split the sum over K in two"
        )
    for name, scale, full in (("a_scale", a_scale, (m, 1)), ("b_scale", b_scale, (1, n))):
        if scale is None:
            continue
        if tuple(scale.shape) not in (full, (1, 1)):
            raise SpecError(f"w8a8: {name} is {_size(scale)}, it must be {list(full)} or [1, 1]")
        if scale.dtype not in SCALE_DTYPES:
            raise SpecError(f"w8a8: {name} is {scale.dtype}, it must be one of {SCALE_DTYPES}")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.dtype not in SCALE_DTYPES):
        raise SpecError(
            f"w8a8: bias is {bias.dtype} {_size(bias)}, it must be [{n}] of one of {SCALE_DTYPES}"
        )
    return make_spec(
        a_scale=scale_spec(a_scale, (1, -1), is_full=a_scale is not None and a_scale.shape[0] != 1),
        b_scale=scale_spec(b_scale, (-1, 1), is_full=b_scale is not None and b_scale.shape[1] != 1),
        out_dtype=out_dtype,
        bias=bias is not None,
    )


def scale_spec(
    scale: torch.Tensor | None, full: tuple[int, int], *, is_full: bool
) -> ScaleSpec | None:
    """The ScaleSpec of ``scale``: of granularity ``full``, or per tensor."""
    if scale is None:
        return None
    return ScaleSpec(scale.dtype, full if is_full else (-1, -1))


def make_spec(
    *,
    a_scale: ScaleSpec | None,
    b_scale: ScaleSpec | None,
    out_dtype: torch.dtype,
    bias: bool,
) -> QuantGemmSpec:
    """The spec of a w8a8 GEMM with these scales."""
    return QuantGemmSpec(
        a=OperandSpec(torch.int8, a_scale),
        b=OperandSpec(torch.int8, b_scale),
        out_dtype=out_dtype,
        acc_dtype=torch.int32,
        bias=bias,
    )


def _size(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


_library = torch.library.Library("inductor_quant", "FRAGMENT")
_library.define(SCHEMA, tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag))
_library.impl("w8a8", reference, "CompositeExplicitAutograd")
torch.library.register_fake("inductor_quant::w8a8", fake, lib=_library)
op = torch.ops.inductor_quant.w8a8.default
