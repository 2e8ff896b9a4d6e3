"""Lowering of ``inductor_quant::weight_only``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels import dispatch
from inductor_quant.kernels.problem import Problem, Weight, WeightTensor
from inductor_quant.kernels.weight_only import rules
from inductor_quant.lowering.select import Gemm, lower_gemm, lowering_of, report_choice, run_first
from inductor_quant.lowering.split_k_sum import sum_partials
from inductor_quant.ops import weight_only as op
from inductor_quant.ops.dequantize import Evaluator
from inductor_quant.spec.gemm import ScaleSpec
from inductor_quant.spec.weight_format import DequantOp, WeightFormat

aten, prims = torch.ops.aten, torch.ops.prims


@fallback.lowering(op.op)
def lower(*args: Any, **kwargs: Any) -> Any:
    call = WeightOnlyCall(*args, **kwargs)
    m, (k, n) = call.x.get_size()[0], call.parsed.shape
    device = call.x.get_device()
    if compat.known_int(m) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=call.out_dtype, device=device)
    gemm = call.gemm()
    spec, problem, inputs = gemm.spec, gemm.problem, [*gemm.shared, *gemm.own]
    layout = compat.FixedLayout(device, call.out_dtype, [m, n])
    result = lower_gemm("weight_only", spec, problem, inputs, layout, gemm.constants)
    if result is not None:
        return call.finished(result)
    if compat.runs_triton(device):
        report_choice("weight_only", spec, problem, (dispatch.DEQUANTIZE_THEN_MM,))
    strides = [1, k] if rules.is_written_along_k(rules.weight_of(problem)) else [n, 1]
    layout = compat.FixedLayout(device, call.x.get_dtype(), [k, n], strides)
    weight = inputs[1 : 1 + len(call.weight)]
    return call.unfused(run_first(dispatch.DEQUANTIZE, spec, problem, weight, layout))


@dataclasses.dataclass(frozen=True)
class WeightOnlyCall:
    """The arguments of the op, as IR."""

    x: Any
    weight: list[Any]
    column_scale: Any
    bias: Any
    _: dataclasses.KW_ONLY
    format: str
    out_dtype: torch.dtype

    @functools.cached_property
    def parsed(self) -> WeightFormat:
        return WeightFormat.decode(self.format)

    def gemm(self) -> Gemm:
        """The call as kernels see it."""
        parsed = self.parsed
        scale = None
        if self.column_scale is not None:
            is_one = compat.known_int(self.column_scale.get_size()[1]) == 1
            scale = ScaleSpec(self.column_scale.get_dtype(), (-1, -1 if is_one else 1))
        spec = op.make_spec(
            parsed,
            [t.get_dtype() for t in self.weight],
            x_dtype=self.x.get_dtype(),
            column_scale=scale,
            out_dtype=self.out_dtype,
            bias=self.bias is not None,
        )
        given = (self.x, *self.weight, self.column_scale, self.bias)
        inputs = [compat.realize(t) for t in given if t is not None]
        problem = describe_packed(inputs[0], parsed, inputs[1 : 1 + len(self.weight)])
        constants = {
            "HAS_COLUMN_SCALE": scale is not None,
            "COLUMN_SCALE_PER_CHANNEL": scale is not None and scale.block == (-1, 1),
        }
        return Gemm(spec, problem, shared=inputs[:1], own=inputs[1:], constants=constants)

    def finished(self, result: Any) -> Any:
        """The op's value from a kernel's output: that, or the sum of its partials, scaled."""
        if len(result.get_size()) == 2:
            return result
        element = self.weight[self.parsed.element.source]
        _, column_ops = op.split_dequant_ops(self.parsed, self.x.get_dtype(), element.get_dtype())
        return sum_partials(result, lambda out: self._epilogue(out, column_ops))

    def unfused(self, dense: Any) -> Any:
        """Dequantize, then multiply, as the matched graph did: for large M, or without a kernel.

        ``dense`` is W [K, N], if a kernel has written it.
        """
        x, bias, evaluator = self.x, self.bias, self._evaluator
        if dense is None:
            dense = evaluator.convert(evaluator.weight(torch.float32), x.get_dtype())
        if self.column_scale is None and self.out_dtype == x.get_dtype():
            # the library does all of it
            if bias is None:
                return lowering_of(aten.mm.default)(x, dense)
            if bias.get_dtype() == self.out_dtype:
                return lowering_of(aten.addmm.default)(bias, x, dense)
        if self.column_scale is None or x.get_dtype() != torch.float16:
            out = lowering_of(aten.mm.default)(x, dense)
        # fp16 may overflow before the column scale: 127 * x, summed over k.
        elif compat.runs_triton(x.get_device()):
            out = lowering_of(aten.mm.dtype)(x, dense, torch.float32)
        else:
            operands = (evaluator.convert(item, torch.float32) for item in (x, dense))
            out = lowering_of(aten.mm.default)(*operands)
        return self._epilogue(evaluator.convert(out, torch.float32), ())

    @functools.cached_property
    def _evaluator(self) -> LoweredEvaluator:
        return LoweredEvaluator(self.parsed, self.weight, self.x.get_device())

    def _epilogue(self, out: Any, column_ops: Sequence[DequantOp]) -> Any:
        """The kernels' epilogue, of the fp32 sum over k."""
        evaluator = self._evaluator
        out = evaluator.apply(out, column_ops, torch.float32)
        for op_, operand in ((aten.mul.Tensor, self.column_scale), (aten.add.Tensor, self.bias)):
            if operand is not None:
                out = lowering_of(op_)(out, evaluator.convert(operand, torch.float32))
        return evaluator.convert(out, self.out_dtype)


def describe_packed(
    x: Any, format: WeightFormat, weight: Sequence[Any], m: Any | None = None
) -> Problem:
    """The problem of ``x [M, K]`` times a packed weight, from buffers; ``m``: another M."""
    m, (k, n) = x.get_size()[0] if m is None else m, format.shape
    [hint_m] = compat.size_hints((m,))
    tensors = tuple(
        WeightTensor(
            t.get_dtype(),
            tuple(map(compat.known_int, t.get_size())),
            tuple(map(compat.known_int, t.get_stride())),
            is_aligned=compat.is_aligned(t),
        )
        for t in weight
    )
    return Problem(
        hint_m,
        n,
        k,
        m_is_static=compat.known_int(m) is not None,
        m_is_bounded=compat.limit(m) is not None,
        weight=Weight(format, tensors),
        has_aligned_rows=compat.has_aligned_rows(x, 0),
        has_weight_descriptors=compat.may_make_descriptors()
        and compat.has_aligned_rows(x, 0)
        and tensors[format.code.source].is_aligned,
    )


class LoweredEvaluator(Evaluator):
    """The reference's arithmetic in Inductor's lowerings."""

    def __init__(self, format: WeightFormat, weight: Sequence[Any], device: torch.device) -> None:
        super().__init__(format, weight, device, lambda op, *a, **k: lowering_of(op)(*a, **k))

    def table(self, table: tuple[int, ...], digit: Any) -> Any:
        # IR has no constant tensors: a sum in which one term is not 0.
        call = self.call
        value = self._full(0)
        for position, entry in enumerate(table):
            is_here = self.convert(call(aten.eq.Scalar, digit, position), torch.int64)
            value = call(aten.add.Tensor, value, call(aten.mul.Tensor, is_here, entry))
        return value
