"""Lowering of ``inductor_quant::weight_only``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant import _torch_compat as compat
from inductor_quant import report
from inductor_quant.kernels.config import Problem, Weight, WeightTensor
from inductor_quant.lowering.common import Gemm, lower_gemm, lowering_of, packed_weight, run_first
from inductor_quant.lowering.parts import sum_of_parts
from inductor_quant.ops import weight_only as op
from inductor_quant.ops.dequantize import Evaluator
from inductor_quant.spec import ScaleSpec
from inductor_quant.weight_format import Step, WeightFormat

aten, prims = torch.ops.aten, torch.ops.prims
# What a report shows where no kernel of ours is taken: many rows, or a format without a kernel.
UNFUSED = "dequantize once, then aten.mm"


@compat.register_lowering(op.op, type_promotion_kind=None)
def lower(
    x: Any,
    weight: list[Any],
    column_scale: Any,
    bias: Any,
    *,
    format: str,
    out_dtype: torch.dtype,
) -> Any:
    parsed = WeightFormat.decode(format)
    m, (k, n) = x.get_size()[0], parsed.shape
    device = x.get_device()
    if compat.known_int(m) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=out_dtype, device=device)
    gemm = described(x, weight, column_scale, bias, format=format, out_dtype=out_dtype)
    spec, problem, inputs = gemm.spec, gemm.problem, [*gemm.shared, *gemm.own]
    layout = compat.FixedLayout(device, out_dtype, [m, n])
    result = lower_gemm("weight_only", spec, problem, inputs, layout, gemm.constants)
    if result is not None:
        return finished(result, x, weight, column_scale, bias, format=format, out_dtype=out_dtype)
    if compat.runs_triton(device):
        node = compat.current_node()
        name = node.name if node is not None else ""
        choice = report.KernelChoice(
            "weight_only",
            str(spec),
            (UNFUSED,),
            node=name,
            sizes=(problem.m, n, k),
            weight=packed_weight(problem),
        )
        report.add(choice)
    value = run_first(
        "weight_only_dequantize",
        spec,
        problem,
        inputs[1 : 1 + len(weight)],
        compat.FixedLayout(device, x.get_dtype(), [k, n]),
    )
    return _unfused(x, value, weight, column_scale, bias, parsed, out_dtype)


def described(
    x: Any,
    weight: list[Any],
    column_scale: Any,
    bias: Any,
    *,
    format: str,
    out_dtype: torch.dtype,
) -> Gemm:
    """A call of the op as kernels see it."""
    parsed = WeightFormat.decode(format)
    m, (k, n) = x.get_size()[0], parsed.shape
    scale = None
    if column_scale is not None:
        is_one = compat.known_int(column_scale.get_size()[1]) == 1
        scale = ScaleSpec(column_scale.get_dtype(), (-1, -1 if is_one else 1))
    spec = op.make_spec(
        parsed,
        [t.get_dtype() for t in weight],
        x_dtype=x.get_dtype(),
        column_scale=scale,
        out_dtype=out_dtype,
        bias=bias is not None,
    )
    inputs = [compat.realize(t) for t in (x, *weight, column_scale, bias) if t is not None]
    [hint_m] = compat.size_hints((m,))
    tensors = tuple(
        WeightTensor(
            t.get_dtype(),
            tuple(map(compat.known_int, t.get_size())),
            tuple(map(compat.known_int, t.get_stride())),
            is_aligned=compat.is_aligned(t),
        )
        for t in inputs[1 : 1 + len(weight)]
    )
    is_static = compat.known_int(m) is not None
    problem = Problem(
        hint_m,
        n,
        k,
        m_is_static=is_static,
        weight=Weight(parsed, tensors),
        has_aligned_rows=compat.has_aligned_rows(inputs[0], 0),
        has_described_words=compat.may_make_descriptors()
        and all(_is_described(t) for t in (inputs[0], inputs[1 + parsed.element.source])),
    )
    constants = {
        "HAS_COLUMN_SCALE": scale is not None,
        "COLUMN_SCALE_PER_CHANNEL": scale is not None and scale.block == (-1, 1),
    }
    return Gemm(spec, problem, shared=inputs[:1], own=inputs[1:], constants=constants)


def _is_described(tensor: Any) -> bool:
    """Whether it is a matrix of which a tensor descriptor can be made."""
    return len(tensor.get_size()) == 2 and compat.has_aligned_rows(tensor, 0)


def finished(
    result: Any,
    x: Any,
    weight: list[Any],
    column_scale: Any,
    bias: Any,
    *,
    format: str,
    out_dtype: torch.dtype,
) -> Any:
    """What a kernel gave for a call of the op: its value, or sums of parts of K, which still have
    to be added up and scaled."""
    if len(result.get_size()) == 2:
        return result
    parsed = WeightFormat.decode(format)
    _, columns = op.split_steps(parsed, x.get_dtype(), weight[parsed.element.source].get_dtype())
    evaluator = _evaluator(parsed, weight, x.get_device())
    return sum_of_parts(
        result, lambda out: _epilogue(evaluator, out, columns, column_scale, bias, out_dtype)
    )


class _Lowered(Evaluator):
    """The reference's arithmetic in Inductor's lowerings."""

    def table(self, table: tuple[int, ...], digit: Any) -> Any:
        # IR has no constant tensors: a sum in which one term is not 0.
        call = self.call
        value = self._full(0)
        for position, entry in enumerate(table):
            is_here = self.convert(call(aten.eq.Scalar, digit, position), torch.int64)
            value = call(aten.add.Tensor, value, call(aten.mul.Tensor, is_here, entry))
        return value


def _unfused(
    x: Any,
    value: Any,
    weight: list[Any],
    column_scale: Any,
    bias: Any,
    format: WeightFormat,
    out_dtype: torch.dtype,
) -> Any:
    """Dequantize, then multiply, as what was matched did: for many rows, or without a kernel.

    ``value`` is W [K, N], if a kernel has written it.
    """
    evaluator = _evaluator(format, weight, x.get_device())
    if value is None:
        value = evaluator.convert(evaluator.weight(torch.float32), x.get_dtype())
    if column_scale is None and out_dtype == x.get_dtype():
        # nothing that the library does not do
        if bias is None:
            return lowering_of(aten.mm.default)(x, value)
        if bias.get_dtype() == out_dtype:
            return lowering_of(aten.addmm.default)(bias, x, value)
    # What the scale makes small may be beyond fp16 before: 127 * x, summed over k.
    is_wide = column_scale is not None and x.get_dtype() == torch.float16
    out = _sums(evaluator, x, value) if is_wide else lowering_of(aten.mm.default)(x, value)
    out = evaluator.convert(out, torch.float32)
    return _epilogue(evaluator, out, (), column_scale, bias, out_dtype)


def _sums(evaluator: _Lowered, x: Any, value: Any) -> Any:
    """``x @ value``, not rounded to the type of ``x``."""
    if compat.runs_triton(x.get_device()):
        return lowering_of(aten.mm.dtype)(x, value, torch.float32)
    return lowering_of(aten.mm.default)(
        *(evaluator.convert(item, torch.float32) for item in (x, value))
    )


def _evaluator(format: WeightFormat, weight: list[Any], device: torch.device) -> _Lowered:
    return _Lowered(format, weight, device, lambda op, *a, **k: lowering_of(op)(*a, **k))


def _epilogue(
    evaluator: _Lowered,
    out: Any,
    columns: Sequence[Step],
    column_scale: Any,
    bias: Any,
    out_dtype: torch.dtype,
) -> Any:
    """What the kernels do behind the sum over k, for sums in fp32."""
    out = evaluator.apply(out, columns, torch.float32)
    if column_scale is not None:
        out = lowering_of(aten.mul.Tensor)(out, evaluator.convert(column_scale, torch.float32))
    if bias is not None:
        out = lowering_of(aten.add.Tensor)(out, evaluator.convert(bias, torch.float32))
    return evaluator.convert(out, out_dtype)
