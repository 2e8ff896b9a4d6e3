"""Lowering of ``inductor_quant::w4a8``: a kernel of the family, else another family's.

Which kernels are chosen when, ``kernels/w4a8`` says. Without one groups, which only a product of
floats has, run as ``weight_only``, with the 8-bit activation in bf16, unless the kernel of
``w8a8`` or ``fp8`` for groups is faster; so do few rows, where bf16 loses nothing. Else the 8-bit
weight is written once, as the graph of an ``aten._int_mm`` does, and ``w8a8`` or ``fp8``
multiplies. So it is with a zero point whose sums of the weight are not given.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels import dispatch
from inductor_quant.kernels.problem import Problem
from inductor_quant.kernels.scaled_mm.fp8 import decodes
from inductor_quant.kernels.w4a8 import rules
from inductor_quant.lowering import fp8, w8a8, weight_only
from inductor_quant.lowering.select import (
    Gemm,
    describe_device,
    lower_gemm,
    lowering_of,
    report_choice,
    run_first,
)
from inductor_quant.lowering.split_k_sum import sum_partials
from inductor_quant.lowering.weight_only import LoweredEvaluator, describe_packed
from inductor_quant.ops import w4a8 as op
from inductor_quant.ops import w8a8 as integers
from inductor_quant.ops import weight_only as packed
from inductor_quant.options import Options
from inductor_quant.spec.weight_format import WeightFormat

aten, prims = torch.ops.aten, torch.ops.prims


@fallback.lowering(op.op)
def lower(*args: Any, **kwargs: Any) -> Any:
    call = W4A8Call(*args, **kwargs)
    m, (_, n) = call.a.get_size()[0], call.parsed.shape
    device = call.a.get_device()
    if compat.known_int(m) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=call.out_dtype, device=device)
    gemm = call.gemm()
    if not call.has_zero or call.b_sum is not None:
        layout = compat.FixedLayout(device, call.out_dtype, [m, n])
        result = lower_gemm(
            "w4a8", gemm.spec, gemm.problem, call.inputs(gemm), layout, gemm.constants
        )
        if result is not None:
            return call.finished(result)
    in_16_bits = call.is_in_16_bits(gemm)
    choice = dispatch.AS_WEIGHT_ONLY if in_16_bits else dispatch.UNPACK_THEN_MULTIPLY
    report_choice("w4a8", gemm.spec, gemm.problem, (choice,))
    return call.in_16_bits() if in_16_bits else call.unpacked()


@dataclasses.dataclass(frozen=True)
class W4A8Call:
    """The arguments of the op, as IR."""

    a: Any
    weight: list[Any]
    a_scale: Any
    b_scale: Any
    bias: Any
    a_zero_point: Any = None
    b_sum: Any = None
    _: dataclasses.KW_ONLY
    format: str
    alpha: float = 1.0
    a_zero: int = 0
    out_dtype: torch.dtype

    @functools.cached_property
    def parsed(self) -> WeightFormat:
        return op.decode(self.format)

    @functools.cached_property
    def _evaluator(self) -> LoweredEvaluator:
        return LoweredEvaluator(self.parsed, self.weight, self.a.get_device())

    @property
    def is_int8(self) -> bool:
        return bool(self.a.get_dtype() == op.INT8)

    @property
    def _decodes(self) -> bool:
        """Whether Triton has no e4m3 on the device."""
        device = self.a.get_device()
        return bool(compat.runs_triton(device) and decodes(describe_device(device)))

    @property
    def _zero(self) -> str:
        """The kind of the activation's zero point, as in a spec."""
        zero = self.a_zero_point
        return integers.zero_kind(None if zero is None else zero.get_dtype(), self.a_zero)

    @property
    def has_zero(self) -> bool:
        return self.a_zero_point is not None or self.a_zero != 0

    def gemm(self) -> Gemm:
        """The call as kernels see it."""
        dtypes = [t.get_dtype() for t in self.weight]
        spec = op.make_spec(
            self.parsed,
            dtypes,
            a_scale=w8a8.scale_spec(self.a_scale, (1, -1), dim=0),
            b_scale=w8a8.scale_spec(self.b_scale, (-1, 1), dim=1),
            out_dtype=self.out_dtype,
            bias=self.bias is not None,
            a_zero=self._zero,
            a_dtype=self.a.get_dtype(),
        )
        [a, *weight] = map(compat.realize, (self.a, *self.weight))
        shared = [] if self.a_scale is None else [compat.realize(self.a_scale)]
        operands = (self.b_scale, self.bias, self.a_zero_point, self.b_sum)
        own = [compat.realize(t) for t in operands if t is not None]
        is_exact = spec.a.zero in ("const", "int") and not spec.group_size
        constants = {
            "ALPHA": self.alpha,
            "A_ZERO": self.a_zero,
            "HAS_A_ZERO_POINT": self.a_zero_point is not None,
            "A_ZERO_PER_TOKEN": w8a8.is_long(self.a_zero_point, 0),
            "EXACT_A_ZERO": is_exact
            and self.b_sum is not None
            and self.b_sum.get_dtype() == torch.int32,
            "HAS_B_SUM": self.b_sum is not None,
            "HAS_A_SCALE": self.a_scale is not None,
            "A_SCALE_PER_TOKEN": w8a8.is_long(self.a_scale, 0),
            "HAS_B_SCALE": self.b_scale is not None,
            "B_SCALE_PER_CHANNEL": w8a8.is_long(self.b_scale, 1),
        }
        if not self.is_int8 and self._decodes:
            constants["triton_meta"] = compat.BytePointers()
        problem = describe_packed(a, self.parsed, weight)
        if self._may_run_in_16_bits(problem):
            rows = rules.rows_in_16_bits(self.parsed, dtypes, self.a.get_dtype(), self._zero)
            problem = dataclasses.replace(problem, rows_in_16_bits=rows)
        return Gemm(spec, problem, shared=[a, *shared], own=[*weight, *own], constants=constants)

    def inputs(self, gemm: Gemm) -> list[Any]:
        """What a kernel of this GEMM alone takes, in its order."""
        (a, *scale), count = gemm.shared, len(self.weight)
        return [a, *gemm.own[:count], *scale, *gemm.own[count:]]

    def finished(self, result: Any) -> Any:
        """The op's value from a kernel's output: that output, or the sum of its split-K partials,
        scaled."""
        return result if len(result.get_size()) == 2 else sum_partials(result, self._epilogue)

    @property
    def is_grouped(self) -> bool:
        return self._group_scale is not None

    @property
    def _group_scale(self) -> Any:
        return op.split(self.parsed)[1]

    def is_in_16_bits(self, gemm: Gemm) -> bool:
        """Whether the GEMM, which no kernel of the family takes, runs as ``weight_only``."""
        problem, device = gemm.problem, describe_device(self.a.get_device())
        if self.is_grouped:
            return not rules.is_written_in_groups(gemm.spec, problem, device)
        if not self._may_run_in_16_bits(problem):
            return False
        dtypes = [t.get_dtype() for t in self.weight]
        args = self.parsed, dtypes, self.a.get_dtype(), self._zero
        return problem.m <= rules.exact_rows_in_16_bits(*args)

    def _may_run_in_16_bits(self, problem: Problem) -> bool:
        is_strict = (fallback.active_options() or Options()).numerics == "strict"
        return self.is_grouped or (problem.m_is_bounded and not is_strict)

    def in_16_bits(self) -> Any:
        """A kernel of ``weight_only``, which reads the packed weight too."""
        args, options = self.of_weight_only()
        return self.scaled_in_16_bits(weight_only.lower(*args, **options))

    def of_weight_only(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of ``weight_only`` for the sums. The zero point is subtracted from ``a``
        first, so no sums of the weight are needed."""
        convert, zero = self._evaluator.convert, self.a_zero_point
        x = convert(self.a, torch.float32)
        if self.has_zero:
            zero = self.a_zero if zero is None else convert(zero, torch.float32)
            x = lowering_of(aten.sub.Tensor)(x, zero)
        x = convert(x, torch.bfloat16)
        options = {"format": self.format, "out_dtype": torch.float32}
        return (x, self.weight, None, None), options

    def scaled_in_16_bits(self, sums: Any) -> Any:
        """The op's value from those sums."""
        plain = dataclasses.replace(self, a_zero_point=None, a_zero=0, b_sum=None)
        return plain._epilogue(sums)

    def unpacked(self) -> Any:
        """The weight written once in the activation's type, and ``w8a8`` or ``fp8``."""
        q, group_scale = op.unpacked(self._evaluator)
        weight = self._written()
        if weight is None:
            if not self.is_int8:
                convert = self._evaluator.convert
                q = convert(convert(q, torch.float32), op.E4M3)
            weight = _transposed(_stored(_transposed(q)))
        b_scale = self.b_scale if group_scale is None else self._of_groups(group_scale)
        if self.is_int8:
            options = {"alpha": self.alpha, "a_zero": self.a_zero, "out_dtype": self.out_dtype}
            operands = (self.a_scale, b_scale, self.bias, self.a_zero_point, None, self.b_sum)
            return w8a8.lower(self.a, weight, *operands, **options)
        if self.alpha != 1.0 and not self.is_grouped:
            none = (None, None, None)
            return self._epilogue(fp8.lower(self.a, weight, *none, out_dtype=torch.float32))
        if self.alpha != 1.0:
            b_scale = self._evaluator.convert(b_scale, torch.float32)
            b_scale = lowering_of(aten.mul.Tensor)(b_scale, self.alpha)
        scales = self.a_scale, b_scale
        return fp8.lower(self.a, weight, *scales, self.bias, out_dtype=self.out_dtype)

    def _written(self) -> Any | None:
        """The weight [K, N] in the activation's type, contiguous along K, as the matrix units read
        it, by ``weight_only_dequantize``; None: it has no such kernel."""
        if self.parsed.to_int8:
            return None
        format = dataclasses.replace(self.parsed, dequant_ops=op.split(self.parsed)[0])
        weight = list(map(compat.realize, self.weight))
        spec = packed.make_spec(
            format,
            [t.get_dtype() for t in weight],
            x_dtype=torch.int8 if self.is_int8 else torch.float16,  # which holds the integers
            column_scale=None,
            out_dtype=torch.float16,
            bias=False,
        )
        k, n = format.shape
        layout = compat.FixedLayout(self.a.get_device(), self.a.get_dtype(), [k, n], [1, k])
        problem = describe_packed(compat.realize(self.a), format, weight)
        return run_first(dispatch.DEQUANTIZE, spec, problem, weight, layout)

    def _of_groups(self, scale: Any) -> Any:
        """``scale`` of each group, and of columns if there is one, as [K / group, N]."""
        k, n = self.parsed.shape
        group = self.parsed.block(self._group_scale)[0]
        scale = lowering_of(aten.expand.default)(scale, [k, n])
        scale = lowering_of(aten.slice.Tensor)(scale, 0, 0, k, group)
        if self.b_scale is None:
            return lowering_of(aten.clone.default)(scale)  # realizing the slice would write all
        convert, multiply = self._evaluator.convert, lowering_of(aten.mul.Tensor)
        return multiply(*(convert(each, torch.float32) for each in (scale, self.b_scale)))

    def _epilogue(self, out: Any) -> Any:
        """What the kernels do to the sum over k, which is in fp32."""
        convert = self._evaluator.convert
        subtract, multiply = lowering_of(aten.sub.Tensor), lowering_of(aten.mul.Tensor)
        if self.has_zero:
            zero = self.a_zero if self.a_zero_point is None else self.a_zero_point
            zero = zero if isinstance(zero, int) else convert(zero, torch.float32)
            out = subtract(out, multiply(convert(self.b_sum, torch.float32), zero))
        if self.alpha != 1.0:
            out = multiply(out, self.alpha)
        for scale in (self.a_scale, self.b_scale):
            if scale is not None:
                out = multiply(out, convert(scale, torch.float32))
        if self.bias is not None:
            out = lowering_of(aten.add.Tensor)(out, convert(self.bias, torch.float32))
        return convert(out, self.out_dtype)


def _stored(rows: Any) -> Any:
    """``rows`` of bytes in memory, contiguous; computed and stored four at a time, which share the
    arithmetic of their position."""
    dtype, size = rows.get_dtype(), rows.get_size()[1]
    if compat.known_int(size) is None or size % 4:
        found = lowering_of(aten.clone.default)(rows)
        compat.realize(found)
        return found
    words = None
    for i in range(4):
        byte = lowering_of(aten.slice.Tensor)(rows, 1, i, size, 4)
        byte = lowering_of(aten.view.dtype)(byte, torch.uint8)
        word = lowering_of(prims.convert_element_type.default)(byte, torch.int32)
        word = lowering_of(aten.bitwise_left_shift.Tensor)(word, 8 * i) if i else word
        words = word if words is None else lowering_of(aten.bitwise_or.Tensor)(words, word)
    words = lowering_of(aten.clone.default)(words)
    compat.realize(words)
    return lowering_of(aten.view.dtype)(words, dtype)


def _transposed(matrix: Any) -> Any:
    return lowering_of(aten.permute.default)(matrix, [1, 0])
