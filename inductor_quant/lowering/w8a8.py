"""Lowering of ``inductor_quant::w8a8``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.errors import SpecError
from inductor_quant.kernels import dispatch
from inductor_quant.lowering.select import Gemm, describe_problem, lower_gemm, lowering_of
from inductor_quant.ops import w8a8 as op
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec

aten, prims = torch.ops.aten, torch.ops.prims


@fallback.lowering(op.op)
def lower(*args: Any, **kwargs: Any) -> Any:
    call = W8A8Call(*args, **kwargs)
    m, n = call.a.get_size()[0], call.b.get_size()[1]
    device = call.a.get_device()
    if compat.known_int(m) == 0 or compat.known_int(n) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=call.out_dtype, device=device)
    layout = compat.FixedLayout(device, call.out_dtype, [m, n])
    call = call.realized()
    spec = call.spec()
    problem = describe_problem(call.a, call.b, call.out_dtype)
    a_sum = None
    if call.b_zero_point is not None:
        a_sum = _row_sums(call.a, call.zero_of_a)

    def attempt(call: W8A8Call, problem: Any) -> Any | None:
        operands = (call.a, call.b, call.a_scale, call.b_scale, call.bias, call.a_zero_point)
        given = (*operands, call.b_sum, call.b_zero_point, a_sum)
        inputs = [compat.realize(t) for t in given if t is not None]
        return lower_gemm("w8a8", spec, problem, inputs, layout, call.constants(spec))

    result = None
    if spec.a.zero and call.b_sum is None:
        if dispatch.has_spare_row(problem):
            result = attempt(call, dataclasses.replace(problem, needs_spare_row=True))
        if result is None:
            b_sum = lowering_of(aten.sum.dim_IntList)(call.b, [0], True, dtype=torch.int32)
            call = dataclasses.replace(call, b_sum=b_sum)
    if result is None:
        result = attempt(call, problem)
    if result is not None:
        return result
    if spec.group_size:
        eager = compat.fallback_handler(op.op, add_to_fallback_set=False)
        operands = (call.a, call.b, call.a_scale, call.b_scale, call.bias)
        return eager(*operands, alpha=call.alpha, out_dtype=call.out_dtype)
    return call.unfused(a_sum)


@dataclasses.dataclass(frozen=True)
class W8A8Call:
    """The arguments of the op, as IR."""

    a: Any
    b: Any
    a_scale: Any
    b_scale: Any
    bias: Any
    a_zero_point: Any = None
    b_zero_point: Any = None
    b_sum: Any = None
    _: dataclasses.KW_ONLY
    alpha: float = 1.0
    a_zero: int = 0
    out_dtype: torch.dtype

    @property
    def zero_of_a(self) -> Any:
        """IR, or an int."""
        return self.a_zero if self.a_zero_point is None else self.a_zero_point

    def realized(self) -> W8A8Call:
        a, b = compat.realize(self.a), compat.realize(self.b)
        return dataclasses.replace(self, a=a, b=b)

    def gemm(self) -> Gemm:
        """The call, which has no zero points, as kernels see it."""
        call = self.realized()
        spec = call.spec()
        shared, own = (
            [compat.realize(t) for t in tensors if t is not None]
            for tensors in ((call.a, call.a_scale), (call.b, call.b_scale, call.bias))
        )
        problem = describe_problem(call.a, call.b, call.out_dtype)
        return Gemm(spec, problem, shared, own, call.constants(spec))

    def spec(self) -> QuantGemmSpec:
        k = compat.known_int(self.b.get_size()[0])
        a_group, b_group = group_of(self.a_scale, 1, k), group_of(self.b_scale, 0, k)
        return op.make_spec(
            a_scale=scale_spec(self.a_scale, (1, a_group), dim=0 if a_group < 0 else 1),
            b_scale=scale_spec(self.b_scale, (b_group, 1), dim=1 if b_group < 0 else 0),
            out_dtype=self.out_dtype,
            bias=self.bias is not None,
            a_zero=op.zero_kind(_dtype(self.a_zero_point), self.a_zero),
            b_zero=op.zero_kind(_dtype(self.b_zero_point)),
        )

    def constants(self, spec: QuantGemmSpec) -> dict[str, Any]:
        return {
            "ALPHA": self.alpha,
            "A_ZERO": self.a_zero,
            "A_ZERO_PER_TOKEN": is_long(self.a_zero_point, 0),
            "B_ZERO_PER_CHANNEL": is_long(self.b_zero_point, 1),
            "EXACT_A_ZERO": spec.a.zero in ("const", "int")
            and (self.b_sum is None or self.b_sum.get_dtype() == torch.int32),
            "EXACT_B_ZERO": spec.b.zero == "int" and spec.a.zero != "float",
            "HAS_B_SUM": self.b_sum is not None,
        }

    def unfused(self, a_sum: Any) -> Any:
        """The matched graph in Inductor's own lowerings: for a device without a kernel."""
        cast = lowering_of(prims.convert_element_type.default)
        multiply, subtract = lowering_of(aten.mul.Tensor), lowering_of(aten.sub.Tensor)
        out = lowering_of(aten._int_mm.default)(self.a, self.b)
        for zero, total in ((self.zero_of_a, self.b_sum), (self.b_zero_point, a_sum)):
            if total is None:
                continue
            zero_dtype = torch.int8 if isinstance(zero, int) else zero.get_dtype()
            dtypes = (out.get_dtype(), total.get_dtype(), zero_dtype)
            is_float = any(dtype.is_floating_point for dtype in dtypes)
            dtype = torch.float32 if is_float else torch.int32
            factor = zero if isinstance(zero, int) else cast(zero, dtype)
            out = subtract(cast(out, dtype), multiply(cast(total, dtype), factor))
        out = cast(out, torch.float32)
        if self.alpha != 1.0:
            out = multiply(out, self.alpha)
        for scale in (self.a_scale, self.b_scale):
            if scale is not None:
                out = multiply(out, cast(scale, torch.float32))
        if self.bias is not None:
            out = lowering_of(aten.add.Tensor)(out, cast(self.bias, torch.float32))
        return cast(out, self.out_dtype)


def scale_spec(scale: Any, full: tuple[int, int], *, dim: int) -> ScaleSpec | None:
    if scale is None:
        return None
    return ScaleSpec(scale.get_dtype(), full if is_long(scale, dim) else (-1, -1))


def group_of(scale: Any, dim: int, k: int | None) -> int:
    """The group size along K of ``scale``, whose groups are along ``dim``; -1: one group. Raises
    SpecError if it is not known."""
    groups = 1 if scale is None else compat.known_int(scale.get_size()[dim])
    if groups == 1:
        return -1
    if k is None or groups is None:
        count = "a symbolic number of" if groups is None else groups
        raise SpecError(f"scales of {count} groups along K: both must be static, mark them so")
    return k // groups


def _dtype(tensor: Any) -> torch.dtype | None:
    return None if tensor is None else tensor.get_dtype()


def is_long(tensor: Any, dim: int) -> bool:
    return tensor is not None and compat.known_int(tensor.get_size()[dim]) != 1


def _row_sums(a: Any, zero: Any) -> Any:
    """The sum over k of a[m, k] - zero[m], as IR [M, 1]: int32, or fp32 for a float zero point."""
    total = lowering_of(aten.sum.dim_IntList)(a, [1], True, dtype=torch.int32)
    k = a.get_size()[1]
    if isinstance(zero, int):
        return lowering_of(aten.sub.Tensor)(total, k * zero) if zero else total
    dtype = torch.float32 if zero.get_dtype().is_floating_point else torch.int32
    cast, multiply = lowering_of(prims.convert_element_type.default), lowering_of(aten.mul.Tensor)
    return lowering_of(aten.sub.Tensor)(cast(total, dtype), multiply(cast(zero, dtype), k))
