"""``torch.ops.inductor_quant.w4a8``: an int8 or e4m3 activation times a packed int4 weight, as one
op."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import w8a8
from inductor_quant.ops.checks import check, differ
from inductor_quant.ops.dequantize import Evaluator, is_float
from inductor_quant.ops.registration import define
from inductor_quant.ops.weight_only import check_format
from inductor_quant.spec.gemm import OperandSpec, QuantGemmSpec, ScaleSpec
from inductor_quant.spec.weight_format import TO_INT8, DequantOp, Field, WeightFormat

SCHEMA = (
    "w4a8(Tensor a, Tensor[] weight, Tensor? a_scale, Tensor? b_scale, Tensor? bias, "
    "Tensor? a_zero_point=None, Tensor? b_sum=None, *, str format, float alpha=1.0, "
    "int a_zero=0, ScalarType out_dtype) -> Tensor"
)
BITS, INT8, E4M3 = 4, torch.int8, torch.float8_e4m3fn
SUM_DTYPES = w8a8.SUM_DTYPES


def reference(
    a: torch.Tensor,
    weight: Sequence[torch.Tensor],
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_zero_point: torch.Tensor | None = None,
    b_sum: torch.Tensor | None = None,
    *,
    format: str,
    alpha: float = 1.0,
    a_zero: int = 0,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``out[m, n] = alpha * a_scale[m] * b_scale[n] * (sum over groups g of group_scale[g, n] *
    (sum over k of g of (a[m, k] - a_zero_point[m]) * q[k, n])) + bias[n]``.

    Shapes and dtypes:
        a             [M, K]            int8, or float8_e4m3fn: then without zero points
        weight        any shapes        the tensors that the format's fields index
        a_scale       [M, 1] or [1, 1]  fp32, bf16 or fp16; per token or per tensor; None: 1
        b_scale       [1, N] or [1, 1]  fp32, bf16 or fp16; per channel or per tensor; None: 1
        bias          [N]               fp32, bf16 or fp16; None: 0
        a_zero_point  [M, 1] or [1, 1]  int8, fp32, bf16 or fp16; None: ``a_zero``, in int8's range
        b_sum         [1, N]            int32, fp32, bf16 or fp16; multiplies the zero point of a.
                                        None: the sum over k of group_scale * q
        format        ``WeightFormat.encode()``: a bit field of 4 bits; ops on integers (``split``)
                      that make it q, an int8; then one ``mul`` at most, the scale of a group of K.
                      Or any ops, in fp32, whose result is rounded and clamped to q, or, of
                      integers, wraps around to it. With e4m3 q has a form in it
    Returns [M, N] in ``out_dtype`` (bf16, fp16 or fp32), contiguous.

    The sum over each group is an exact integer. Without groups the op is ``w8a8`` of q, bit for
    bit. With groups the sums are scaled and added in fp32 (this reference: in fp64); all else is as
    in ``w8a8``. Of e4m3 the sums of 128 products at most are those of the matrix unit (``fp8``).

    Raises SpecError for other shapes or dtypes, a format that does not fit the tensors or is not of
    this form, or if K (of one group) exceeds ``w8a8.max_k``.
    """
    parsed = decode(format)
    spec_of(
        *(a, weight, a_scale, b_scale, bias, a_zero_point, b_sum),
        format=parsed,
        a_zero=a_zero,
        out_dtype=out_dtype,
    )
    q, group_scale = unpacked(Evaluator(parsed, weight, a.device))
    if group_scale is None and a.dtype == INT8:
        return w8a8.op(
            *(a, q, a_scale, b_scale, bias, a_zero_point, None, b_sum),
            alpha=alpha,
            a_zero=a_zero,
            out_dtype=out_dtype,
        )
    scaled = q.double() if group_scale is None else q.double() * group_scale.double()
    out = a.double() @ scaled
    if a_zero_point is not None or a_zero:
        zero = a_zero if a_zero_point is None else a_zero_point.double()
        total = scaled.sum(0, keepdim=True) if b_sum is None else b_sum.double()
        out = out - zero * total
    return w8a8.scaled(out.float() * alpha, a_scale, b_scale, bias, out_dtype)


def fake(
    a: torch.Tensor,
    weight: Sequence[torch.Tensor],
    *operands: Any,
    format: str,
    alpha: float = 1.0,
    **options: Any,
) -> torch.Tensor:
    parsed = decode(format)
    spec_of(a, weight, *operands, format=parsed, **options)
    return torch.empty((a.shape[0], parsed.shape[1]), dtype=options["out_dtype"], device=a.device)


def unpacked(evaluator: Evaluator) -> tuple[Any, Any | None]:
    """(q [K, N] as int8, the scale of each group [K or 1, N or 1] as stored; None: there is none),
    tensors or IR, as the evaluator's ``call`` makes them."""
    format = evaluator.format
    integers, scale = split(format)
    dtype = torch.float32 if format.to_int8 else torch.int32
    if not format.to_int8:
        integers = tuple(
            each if isinstance(each.operand, Field) else DequantOp(each.kind, int(each.operand))
            for each in integers
        )
    q = evaluator.apply(evaluator.convert(evaluator.field(format.element), dtype), integers, dtype)
    q = evaluator.convert(q, torch.int8)
    q = evaluator.call(torch.ops.aten.expand.default, q, list(format.shape))
    return q, None if scale is None else evaluator.field(scale)


def split(format: WeightFormat) -> tuple[tuple[DequantOp, ...], Field | None]:
    """(the ops on integers, the scale of a group) of a format that ``problem_of`` accepts; of one
    that is rounded or wrapped to int8 all ops, and no scale."""
    *ops, last = format.dequant_ops or (DequantOp("mul", 1.0),)
    if last.kind == "mul" and isinstance(last.operand, Field):
        return tuple(ops), last.operand
    return format.dequant_ops, None


def problem_of(
    format: WeightFormat, dtypes: Sequence[torch.dtype], a_dtype: torch.dtype = INT8
) -> str:
    """Why a format is not of the form that the op takes; "": it is."""
    code, (_, scale) = format.element, split(format)
    if code != format.code or code.width != BITS or code.high or code.minus or code.float8:
        return f"the element is no bit field of {BITS} bits"
    kinds = [step.kind for step in format.dequant_ops]
    if sum(kind in TO_INT8 for kind in kinds) > (format.to_int8 != ""):
        return "an operation after an int8"
    if format.to_int8 == "wrap" and not _is_exact(format.dequant_ops[:-1], dtypes):
        return "an operation that is not on integers of few bits"
    found = bounds(format, dtypes)
    if found is None:
        return "an operation that is not on integers of few bits"
    low, high = found
    if low < -128 or high > 127:
        return f"values of {low} to {high} are no int8"
    if a_dtype == E4M3 and (format.to_int8 or not _is_e4m3(format, dtypes)):
        return f"values of {low} to {high} have no form in e4m3"
    if scale is None:
        return ""
    if dtypes[scale.source] not in w8a8.SCALE_DTYPES:
        return f"a scale in {dtypes[scale.source]}"
    if format.block(scale)[0] < 2 or any(index.is_data for index in scale.index):
        return "the last scale is not that of groups along K"
    return ""


def bounds(format: WeightFormat, dtypes: Sequence[torch.dtype]) -> tuple[int, int] | None:
    """The smallest and largest q that the bits of the operands allow; None: not known."""
    if format.to_int8:
        return -128, 127
    code, (integers, _) = format.element, split(format)
    low, high = ends_of(code, dtypes) or (0, 0)
    for step in integers:
        ends = ends_of(step.operand, dtypes)
        if ends is None:
            return None
        if step.kind == "mul" and not isinstance(step.operand, Field):
            low, high = sorted((low * ends[0], high * ends[0]))
        elif step.kind in ("add", "sub"):
            ends = ends if step.kind == "add" else (-ends[1], -ends[0])
            low, high = low + ends[0], high + ends[1]
        else:
            return None
    return low, high


def _is_e4m3(format: WeightFormat, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether e4m3, with four bits of precision, has every q."""
    low, high = bounds(format, dtypes) or (0, 0)
    factors = [step.operand for step in split(format)[0] if step.kind == "mul"]
    step = math.gcd(*(int(each) for each in factors if not isinstance(each, Field))) or 1
    numbers = {abs(q) for q in range(low, high + 1, step)} - {0}
    return all(q <= 448 and q // (q & -q) < 16 for q in numbers)


def _is_exact(ops: Sequence[DequantOp], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether fp32 has the results of ``ops`` on a nibble exactly."""
    most = 1 << BITS
    for step in ops:
        ends = ends_of(step.operand, dtypes)
        if ends is None or step.kind == "div":
            return False
        size = max(map(abs, ends))
        most = most * size if step.kind == "mul" else most + size
    return most <= 1 << 24


def ends_of(operand: Field | float, dtypes: Sequence[torch.dtype]) -> tuple[int, int] | None:
    """The smallest and largest value of an integer operand; None: it is none, or not known."""
    if not isinstance(operand, Field):
        return (int(operand), int(operand)) if float(operand).is_integer() else None
    is_field = operand.width <= 8 and not (operand.high or operand.float8 or operand.size)
    dtype = dtypes[operand.source]
    if is_float(dtype) or not is_field or not (operand.width or dtype.itemsize == 1):
        return None
    if not operand.width:
        info = torch.iinfo(dtype)
        return info.min + operand.add, info.max + operand.add
    if operand.wrap:
        return 0, (1 << operand.width) - 1
    least = operand.add - (1 << operand.width - 1 if operand.signed else 0)
    return least, least + (1 << operand.width) - 1


def spec_of(
    a: torch.Tensor,
    weight: Sequence[torch.Tensor],
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_zero_point: torch.Tensor | None = None,
    b_sum: torch.Tensor | None = None,
    *,
    format: WeightFormat,
    a_zero: int = 0,
    out_dtype: torch.dtype,
) -> QuantGemmSpec:
    """The spec of a call. Raises SpecError for arguments that form no such GEMM.

    Symbolic sizes are not checked: that would add a guard.
    """
    k, n = check_format(format, tuple((t.dtype, tuple(t.shape)) for t in weight))
    dtypes = [t.dtype for t in weight]
    if a.dtype not in (INT8, E4M3) or a.dim() != 2 or differ(a.shape[1:], (k,)):
        raise SpecError(f"w4a8: a is {a.dtype} {list(a.shape)}, it must be int8 or e4m3 [M, {k}]")
    if detail := problem_of(format, dtypes, a.dtype):
        raise SpecError(f"w4a8: {format}: {detail}")
    if a.dtype == E4M3 and (a_zero_point is not None or a_zero):
        raise SpecError("w4a8: a zero point of e4m3")
    rows, columns = ((a.shape[0], 1), (1, 1)), ((1, n), (1, 1))
    check(
        "w4a8",
        {
            "a_scale": (a_scale, rows, w8a8.SCALE_DTYPES),
            "b_scale": (b_scale, columns, w8a8.SCALE_DTYPES),
            "bias": (bias, ((n,),), w8a8.SCALE_DTYPES),
            "a_zero_point": (a_zero_point, rows, w8a8.ZERO_DTYPES),
            "b_sum": (b_sum, columns[:1], SUM_DTYPES),
        },
    )
    if out_dtype not in w8a8.SCALE_DTYPES:
        raise SpecError(f"w4a8 returns one of {w8a8.SCALE_DTYPES}, not {out_dtype}")
    if not -128 <= a_zero <= 127 or (a_zero and a_zero_point is not None):
        raise SpecError(f"w4a8: a_zero={a_zero}; it must be in -128 ... 127, or a_zero_point given")
    if b_sum is not None and a_zero_point is None and not a_zero:
        raise SpecError("w4a8: b_sum goes with a zero point of a")
    zero = w8a8.zero_kind(None if a_zero_point is None else a_zero_point.dtype, a_zero)
    longest, summed = w8a8.max_k(zero, ""), summed_k(format)
    if summed > longest and a.dtype == INT8:
        raise SpecError(f"w4a8: sums over {summed} may overflow int32, the most is {longest}")
    return make_spec(
        format,
        dtypes,
        a_scale=w8a8.scale_spec(a_scale, (1, -1), dim=0),
        b_scale=w8a8.scale_spec(b_scale, (-1, 1), dim=1),
        out_dtype=out_dtype,
        bias=bias is not None,
        a_zero=zero,
        a_dtype=a.dtype,
    )


def summed_k(format: WeightFormat) -> int:
    """Elements along K of one sum of integers: a group, or all of K."""
    _, scale = split(format)
    return format.shape[0] if scale is None else format.block(scale)[0]


def make_spec(
    format: WeightFormat,
    dtypes: Sequence[torch.dtype],
    *,
    a_scale: ScaleSpec | None,
    b_scale: ScaleSpec | None,
    out_dtype: torch.dtype,
    bias: bool,
    a_zero: str = "",
    a_dtype: torch.dtype = INT8,
) -> QuantGemmSpec:
    """The spec of a GEMM with these scales; that of b is the scale of its groups, if it has any."""
    integers, scale = split(format)
    if scale is not None:
        rows, columns = format.block(scale)
        b_scale = ScaleSpec(dtypes[scale.source], (rows, columns))
    zeros = [step.operand for step in integers if step.kind in ("add", "sub")]
    has_field = any(isinstance(operand, Field) for operand in zeros)
    zero = "packed" if has_field else "const" if zeros or format.element.add else ""
    b = OperandSpec(
        torch.int8 if format.element.signed else torch.uint8, b_scale, bits=BITS, zero=zero
    )
    return QuantGemmSpec(OperandSpec(a_dtype, a_scale, zero=a_zero), b, out_dtype, bias)


@functools.lru_cache(maxsize=1024)
def decode(text: str) -> WeightFormat:
    """The format. Raises SpecError for text that is none."""
    try:
        return WeightFormat.decode(text)
    except ValueError as error:
        raise SpecError(f"w4a8: format={text!r}: {error}") from error


op = define(SCHEMA, reference, fake, flexible_layout=True)
