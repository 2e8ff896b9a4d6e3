"""Lowering of ``inductor_quant::experts``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant._compat import not_stored
from inductor_quant.kernels import Kernel
from inductor_quant.kernels.codegen.digits.order import Order, paired
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Groups, Problem
from inductor_quant.lowering import expert_order, expert_rows
from inductor_quant.lowering.select import lower_gemm, lowering_of
from inductor_quant.lowering.weight_only import LoweredEvaluator, describe_packed
from inductor_quant.ops import experts as op
from inductor_quant.ops import weight_only
from inductor_quant.ops.gate import gated
from inductor_quant.spec.gate import Gate
from inductor_quant.spec.gemm import QuantGemmSpec
from inductor_quant.spec.weight_format import WeightFormat

aten, prims = torch.ops.aten, torch.ops.prims
_NEIGHBOURS: dict[str, Any] = {"repeats": 1, "has_rows": False}  # rows of x that are not gathered


@fallback.lowering(op.op)
def lower(
    x: Any,
    weight: list[Any],
    offsets: Any,
    ids: Any,
    rows: Any = None,
    bias: Any = None,
    bias_rows: Any = None,
    *,
    repeats: int = 1,
    gate: str = "",
    format: str,
    out_dtype: torch.dtype,
) -> Any:
    call = _Call(x, weight, offsets, ids, rows, repeats, WeightFormat.decode(format), out_dtype)
    if not gate:
        return call.with_x_in_order().product()
    joined = Gate.decode(gate)
    result = call.gated_in_order(joined) if bias is None else None
    if result is None:
        result = call.gated(joined, bias, bias_rows)
    if result is not None:
        return result
    y = call.product()
    if bias is not None:
        y = lowering_of(aten.add.Tensor)(y, lowering_of(aten.index.Tensor)(bias, [bias_rows]))
    return gated(y, joined, out_dtype, lambda op, *args: lowering_of(op)(*args))


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of the op, as IR, without what is computed from its columns."""

    x: Any
    weight: list[Any]
    offsets: Any
    ids: Any
    rows: Any
    repeats: int
    format: WeightFormat
    out_dtype: torch.dtype

    @functools.cached_property
    def count(self) -> Any:
        return expert_rows.count_of(self.x, self.rows, self.repeats)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.x.get_device()
        return device

    @property
    def groups(self) -> Groups:
        is_sorted, has_rows = self.ids is None, self.rows is not None
        return Groups(self.format.experts, is_sorted, self.repeats, has_rows)

    def with_x_in_order(self) -> _Call:
        """With K of x in the order in which the kernel is faster, if a kernel computes x for this
        call alone."""
        is_written = self.groups == Groups(self.format.experts, is_sorted=True)
        node = compat.current_node()
        rows = node.args[0] if node is not None else None
        if not isinstance(rows, fx.Node) or not expert_order.is_read_once(rows):
            return self
        x = not_stored.computed(self.x) if is_written else None
        if x is None:
            return self
        stored = not_stored.buffer(self.device, self.x.get_dtype(), self.x.get_size())
        order = dataclasses.replace(self, x=stored)._k_order(self.groups, self.format)
        if order is None:
            return self
        x = expert_order.in_order(x, order)
        return dataclasses.replace(self, x=x, format=order.counted("k"))

    def gated_in_order(self, gate: Gate) -> Any | None:
        """``gated``, with the columns in the order in which the product that reads them is faster;
        None: there is none, or another kernel would be the best."""
        node = compat.current_node()
        reader = expert_order.reader_of(node)
        if node is None or reader is None:
            return None
        after = self._of(reader)
        order = after._k_order(after.groups, after.format) if after is not None else None
        pairs = paired(self.format, is_interleaved=gate.is_interleaved)
        if order is None or pairs is None:
            return None
        pairs = expert_order.columns_in_order(pairs, order)
        result = self.gated(gate, None, None, pairs) if pairs is not None else None
        if pairs is None or result is None:
            return None
        # Not before: if the product fails, its rows are in the order of memory.
        node.update_kwarg("format", expert_order.as_columns(pairs, gate).encode())
        reader.update_kwarg("format", order.counted("k").encode())
        return result

    def _of(self, reader: fx.Node) -> _Call | None:
        """The call ``reader`` of what this one stores; None: its weight is not known yet."""
        nodes: Any = reader.args[1]
        options: dict[str, Any] = dict(reader.kwargs)
        weight = [not_stored.lowered(each) for each in nodes]
        if any(each is None for each in weight) or compat.known_int(self.count) == 0:
            return None
        format = WeightFormat.decode(options["format"])
        x = not_stored.buffer(self.device, self.out_dtype, [self.count, format.shape[0]])
        given = x, weight, self.offsets, None, None, 1, format, options["out_dtype"]
        return _Call(*given)

    def product(self) -> Any:
        """[S, N]."""
        n = self.format.shape[1]
        if compat.known_int(self.count) == 0:
            return self._nothing(n)
        result = self._fused(self.groups, self.format, n)
        if result is not None:
            return result
        x = self.x
        if self.groups.has_rows or self.groups.repeats > 1:
            x = expert_rows.gathered(x, self.rows, self.repeats)
        return _unfused(x, self.weight, self.offsets, self.ids, self.format, self.out_dtype)

    def gated(
        self, gate: Gate, bias: Any, bias_rows: Any, pairs: WeightFormat | None = None
    ) -> Any | None:
        """[S, N / 2]; None: the kernel that is best for the product does not compute it in the same
        tiles. ``pairs``: the format, ``paired``, with these in another order."""
        n = self.format.shape[1]
        if compat.known_int(self.count) == 0:
            return self._nothing(n // 2)
        format = pairs or paired(self.format, is_interleaved=gate.is_interleaved)
        if format is None or not compat.runs_triton(self.device):
            return None
        groups = dataclasses.replace(self.groups, gate=gate, has_bias=bias is not None)
        alone, with_gate = (
            self._best(dataclasses.replace(of, **_NEIGHBOURS), by)
            for of, by in ((self.groups, self.format), (groups, format))
        )
        if alone is None or alone != with_gate:
            return None
        given = [] if bias is None else [bias, bias_rows]
        return self._fused(groups, format, n // 2, given)

    def _nothing(self, columns: int) -> Any:
        full = lowering_of(aten.full.default)
        return full([self.count, columns], 0, dtype=self.out_dtype, device=self.device)

    def _described(
        self, groups: Groups, format: WeightFormat, x: Any = None
    ) -> tuple[QuantGemmSpec, Problem]:
        spec = weight_only.make_spec(
            format,
            [t.get_dtype() for t in self.weight],
            x_dtype=self.x.get_dtype(),
            column_scale=None,
            out_dtype=self.out_dtype,
            bias=False,
        )
        stored = [compat.realize(t) for t in self.weight]
        x = compat.realize(self.x if x is None else x)
        problem = describe_packed(x, format, stored, self.count)
        return spec, dataclasses.replace(problem, groups=groups)

    def _k_order(self, groups: Groups, format: WeightFormat) -> Order | None:
        """The order of K in which the kernel that is best is faster; None: it is none, or another
        would be the best then."""
        found = self._best(groups, format)
        if found is None:
            return None
        kernel, config = found
        order = kernel.k_order(*self._described(groups, format), config)
        if order is None or self._best(groups, order.counted("k")) != found:
            return None
        return order

    def _best(self, groups: Groups, format: WeightFormat) -> tuple[Kernel, GemmConfig] | None:
        return expert_rows.best("experts", *self._described(groups, format), self.device)

    def _fused(
        self, groups: Groups, format: WeightFormat, columns: int, given: Sequence[Any] = ()
    ) -> Any | None:
        x, rows = self.x, self.rows
        route = compat.realize(self.ids if self.offsets is None else self.offsets)
        spec, problem = self._described(groups, format)
        if problem.is_gathered and expert_rows.is_gathered_before(
            "experts", spec, problem, self.device
        ):
            x, rows = expert_rows.gathered(x, rows, self.repeats), None
            groups = dataclasses.replace(groups, **_NEIGHBOURS)
            order = self._k_order(groups, format)
            if order is not None:
                x, format = expert_order.in_order(x, order), order.counted("k")
            _, problem = self._described(groups, format, x)
        tensors = [x, *self.weight, *given, *([] if rows is None else [rows])]
        inputs = [*map(compat.realize, tensors), route]
        layout = compat.FixedLayout(self.device, self.out_dtype, [self.count, columns])
        return lower_gemm("experts", spec, problem, inputs, layout, {})


def _unfused(
    x: Any, weight: list[Any], offsets: Any, ids: Any, format: WeightFormat, out_dtype: torch.dtype
) -> Any:
    """Dequantize the stack, then multiply, as the matched graph did."""
    if ids is None and x.get_dtype() != torch.bfloat16:  # ``_grouped_mm`` takes nothing else
        eager = compat.fallback_handler(op.op, add_to_fallback_set=False)
        return eager(x, weight, offsets, ids, format=format.encode(), out_dtype=out_dtype)
    evaluator = LoweredEvaluator(format, weight, x.get_device())
    dense = evaluator.convert(evaluator.weight(torch.float32), x.get_dtype())
    if ids is None:
        offsets = evaluator.convert(offsets, torch.int32)
        out = lowering_of(aten._grouped_mm.default)(x, dense, offsets)
        out = _zero_without_expert(out, offsets)
    else:
        chosen = lowering_of(aten.index.Tensor)(dense, [ids])
        row = lowering_of(aten.unsqueeze.default)(x, 1)
        out = lowering_of(aten.squeeze.dim)(lowering_of(aten.bmm.default)(row, chosen), 1)
    return evaluator.convert(out, out_dtype)


def _zero_without_expert(out: Any, offsets: Any) -> Any:
    """``out`` with 0 in the rows after the last offset, which ``_grouped_mm`` does not write."""
    count, device = out.get_size()[0], out.get_device()
    place = lowering_of(prims.iota.default)(
        count, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
    )
    end = lowering_of(aten.select.int)(offsets, 0, -1)
    has_expert = lowering_of(aten.lt.Tensor)(place, end)
    has_expert = lowering_of(aten.unsqueeze.default)(has_expert, 1)
    return lowering_of(aten.where.ScalarOther)(has_expert, out, 0.0)
