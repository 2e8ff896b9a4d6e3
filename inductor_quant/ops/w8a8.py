"""``torch.ops.inductor_quant.w8a8``: an int8 GEMM with scales, as one op."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops.checks import check, check_matrices
from inductor_quant.ops.registration import define
from inductor_quant.spec.gemm import OperandSpec, QuantGemmSpec, ScaleSpec

SCHEMA = (
    "w8a8(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, "
    "Tensor? a_zero_point=None, Tensor? b_zero_point=None, Tensor? b_sum=None, *, "
    "float alpha=1.0, int a_zero=0, ScalarType out_dtype) -> Tensor"
)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ZERO_DTYPES = (torch.int8, *SCALE_DTYPES)
SUM_DTYPES = (torch.int32, *SCALE_DTYPES)


def max_k(a_zero: str, b_zero: str) -> int:
    """The longest K whose sums fit in int32; ``a_zero`` and ``b_zero`` as in OperandSpec.zero.

    |a * b| <= 2**14 for int8. With an integer zero point |a - zero| reaches 255. (Intermediate sums
    may wrap around.)
    """
    a, b = (255 if zero in ("const", "int") else 128 for zero in (a_zero, b_zero))
    return (2**31 - 1) // (a * b)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_zero_point: torch.Tensor | None = None,
    b_zero_point: torch.Tensor | None = None,
    b_sum: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    a_zero: int = 0,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``out[m, n] = alpha * a_scale[m] * b_scale[n] * (sum over k of
    (a[m, k] - a_zero_point[m]) * (b[k, n] - b_zero_point[n])) + bias[n]``.

    Shapes and dtypes:
        a             [M, K]            int8
        b             [K, N]            int8
        a_scale       [M, 1] or [1, 1]  fp32, bf16 or fp16; per token or per tensor; None: 1
                      [M, G]            likewise, one for each of G groups of K
        b_scale       [1, N] or [1, 1]  fp32, bf16 or fp16; per channel or per tensor; None: 1
                      [G, N]            likewise, one for each of G groups of K
        bias          [N]               fp32, bf16 or fp16; None: 0
        a_zero_point  [M, 1] or [1, 1]  int8, fp32, bf16 or fp16; None: ``a_zero``, in int8's range
        b_zero_point  [1, N] or [1, 1]  int8, fp32, bf16 or fp16; None: 0
        b_sum         [1, N]            int32, fp32, bf16 or fp16; multiplies the zero point of a.
                                        None: the sum over k of b[k, n]. Not with b_zero_point
    Returns [M, N] in ``out_dtype`` (bf16, fp16 or fp32), contiguous.

    Computed as the product of the stored integers and two rank-1 terms:
    ``sum of a * b - a_zero_point * b_sum - b_zero_point * (sum of a - K * a_zero_point)``.
    All integer terms are exact (in int32, where intermediate sums may wrap around); the rest is
    fp32, in the order of the formula, rounded once.

    G > 1 groups divide K into groups of K / G: the sum over each group, an exact integer, is
    multiplied by the group's scales and accumulated in fp32 (a kernel may scale a group in parts;
    the reference adds in fp64). No zero points with groups; a_scale and b_scale in groups have the
    same G.

    Raises SpecError for other shapes or dtypes, or if K (of one group) exceeds ``max_k`` (131071;
    65793 and 33025 with integer zero points of one or both), beyond which full-range operands
    overflow int32.
    """
    zeros = (a_zero_point, b_zero_point, b_sum)
    spec_of(a, b, a_scale, b_scale, bias, *zeros, a_zero=a_zero, out_dtype=out_dtype)
    if (groups := groups_of(a_scale, b_scale)) > 1:
        out = alpha * _sum_of_groups(a, b, a_scale, b_scale, groups)
        return scaled(out.float(), None, None, bias, out_dtype)
    # fp64 holds integers up to 2**53 exactly, and every device multiplies fp64 of any shape.
    out = a.double() @ b.double()
    zero = a_zero if a_zero_point is None else a_zero_point.double()
    if a_zero_point is not None or a_zero:
        out = out - zero * (b.double().sum(0, keepdim=True) if b_sum is None else b_sum.double())
        is_float = a_zero_point is not None and a_zero_point.is_floating_point()
        if b_sum is not None and not is_float and not b_sum.is_floating_point():
            # a given b_sum may have any value: wrap modulo 2**32, like the kernel
            out = out.to(torch.int64).to(torch.int32).double()
    if b_zero_point is not None:
        out = out - b_zero_point.double() * (a.double() - zero).sum(1, keepdim=True)
    out = out.float()
    if alpha != 1.0:
        out = out * alpha
    return scaled(out, a_scale, b_scale, bias, out_dtype)


def scaled(
    out: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Scales and bias of an fp32 sum, in fp32, rounded once."""
    for scale in (a_scale, b_scale):
        if scale is not None:
            out = out * scale.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def groups_of(a_scale: torch.Tensor | None, b_scale: torch.Tensor | None) -> int:
    """The number of groups of K; 1: no groups."""
    given = [(a_scale, 1), (b_scale, 0)]
    sizes = [s.shape[dim] for s, dim in given if s is not None and s.dim() == 2]
    return max([1, *(size for size in sizes if isinstance(size, int))])


def _sum_of_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    groups: int,
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    left = a.double().reshape(m, groups, k // groups).transpose(0, 1)
    partials = left @ b.double().reshape(groups, k // groups, n)
    if a_scale is not None:
        partials = partials * a_scale.double().t()[:, :, None]
    if b_scale is not None:
        partials = partials * b_scale.double()[:, None, :]
    return partials.sum(0)


def fake(
    a: torch.Tensor, b: torch.Tensor, *scales: Any, out_dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    options.pop("alpha", None)
    spec_of(a, b, *scales, out_dtype=out_dtype, **options)
    return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)


def spec_of(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_zero_point: torch.Tensor | None = None,
    b_zero_point: torch.Tensor | None = None,
    b_sum: torch.Tensor | None = None,
    *,
    a_zero: int = 0,
    out_dtype: torch.dtype,
) -> QuantGemmSpec:
    """The spec of a call. Raises SpecError for arguments that form no such GEMM.

    Symbolic sizes are not checked: that would add a guard.
    """
    check_matrices("w8a8", a, b, (torch.int8,))
    (m, k), n = a.shape, b.shape[1]
    groups = groups_of(a_scale, b_scale)
    if groups > 1 and isinstance(k, int) and k % groups:
        given = ", ".join(
            f"{name} is {list(scale.shape)}, must be {per_vector} or [1, 1]"
            for name, scale, per_vector in (
                ("a_scale", a_scale, [m, 1]),
                ("b_scale", b_scale, [1, n]),
            )
            if scale is not None
        )
        raise SpecError(f"w8a8: {given}; or scales of groups, but K={k} is no multiple of {groups}")
    rows, columns = ((m, 1), (1, 1)), ((1, n), (1, 1))
    check(
        "w8a8",
        {
            "a_scale": (a_scale, (*rows, (m, groups)), SCALE_DTYPES),
            "b_scale": (b_scale, (*columns, (groups, n)), SCALE_DTYPES),
            "bias": (bias, ((n,),), SCALE_DTYPES),
            "a_zero_point": (a_zero_point, rows, ZERO_DTYPES),
            "b_zero_point": (b_zero_point, columns, ZERO_DTYPES),
            "b_sum": (b_sum, columns[:1], SUM_DTYPES),
        },
    )
    if not -128 <= a_zero <= 127 or (a_zero and a_zero_point is not None):
        raise SpecError(f"w8a8: a_zero={a_zero}; it must be in -128 ... 127, or a_zero_point given")
    has_zero = a_zero_point is not None or a_zero != 0
    if b_sum is not None and (b_zero_point is not None or not has_zero):
        raise SpecError("w8a8: b_sum goes with a zero point of a, and with none of b")
    zeros = (
        zero_kind(None if a_zero_point is None else a_zero_point.dtype, a_zero),
        zero_kind(None if b_zero_point is None else b_zero_point.dtype),
    )
    if groups > 1 and any(zeros):
        raise SpecError("w8a8: zero points do not go with scales of groups along K")
    if isinstance(k, int) and k // groups > max_k(*zeros):
        raise SpecError(
            f"w8a8: K={k} may overflow int32, the most is {max_k(*zeros)}; split the sum over K"
        )
    a_group, b_group = (
        k // groups if scale is not None and groups > 1 and scale.shape[dim] != 1 else -1
        for scale, dim in ((a_scale, 1), (b_scale, 0))
    )
    return make_spec(
        a_scale=scale_spec(a_scale, (1, a_group), dim=0 if a_group < 0 else 1),
        b_scale=scale_spec(b_scale, (b_group, 1), dim=1 if b_group < 0 else 0),
        out_dtype=out_dtype,
        bias=bias is not None,
        a_zero=zeros[0],
        b_zero=zeros[1],
    )


def zero_kind(dtype: torch.dtype | None, number: int = 0) -> str:
    """OperandSpec.zero of a zero point: a tensor of ``dtype``, or without one ``number``."""
    if dtype is None:
        return "const" if number else ""
    return "float" if dtype.is_floating_point else "int"


def scale_spec(scale: torch.Tensor | None, full: tuple[int, int], *, dim: int) -> ScaleSpec | None:
    """The ScaleSpec of ``scale``: per tensor if its size along ``dim`` is 1, else ``full``."""
    if scale is None:
        return None
    size = scale.shape[dim]
    return ScaleSpec(scale.dtype, (-1, -1) if isinstance(size, int) and size == 1 else full)


def make_spec(
    *,
    a_scale: ScaleSpec | None,
    b_scale: ScaleSpec | None,
    out_dtype: torch.dtype,
    bias: bool,
    a_zero: str = "",
    b_zero: str = "",
) -> QuantGemmSpec:
    """The spec of a w8a8 GEMM with these scales and kinds of zero points."""
    a = OperandSpec(torch.int8, a_scale, zero=a_zero)
    b = OperandSpec(torch.int8, b_scale, zero=b_zero)
    return QuantGemmSpec(a, b, out_dtype, bias)


op = define(SCHEMA, reference, fake, flexible_layout=True)
