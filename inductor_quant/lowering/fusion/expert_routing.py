"""Lowering of ``inductor_quant::expert_places``, ``expert_order``, ``expert_keys`` and
``expert_sum``.

Ids are few, so each is compared with all: one kernel, where a sort, a histogram and its cumulative
sum take four or more. The k values of a sum are added in the thread that stores it: Inductor
unrolls reductions of fewer than eight, and gives longer ones lanes that read at a distance of N.
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.lowering.select import lowering_of
from inductor_quant.ops.fusion import expert_routing

aten = torch.ops.aten
i32 = torch.int32


@fallback.lowering(expert_routing.places_op)
def lower_places(ids: Any, experts: int) -> Any:
    compat.realize(ids)
    [count] = ids.get_size()
    shape = [count + experts, count]

    def spread(x: Any, dim: int) -> Any:
        return lowering_of(aten.expand.default)(lowering_of(aten.unsqueeze.default)(x, dim), shape)

    def is_counted(at: Any, own: Any, other_at: Any, other: Any) -> Any:
        ops = compat.ops()
        expert = ops.sub(at, ops.index_expr(count, i32))
        is_first = ops.and_(ops.eq(other, own), ops.lt(other_at, at))
        is_before = ops.or_(ops.lt(other, own), is_first)
        zero = ops.constant(0, ids.get_dtype())
        is_within = ops.and_(ops.ge(other, zero), ops.le(other, expert))
        is_id = ops.lt(expert, ops.constant(0, i32))
        return ops.to_dtype(ops.where(is_id, is_before, is_within), i32, src_dtype=torch.bool)

    def within(at: Any) -> Any:
        ops = compat.ops()
        return ops.minimum(at, ops.index_expr(count - 1, i32))

    every = numbers(ids, shape[0], i32)
    own = compat.make_pointwise(within)(every)
    rows = every, lowering_of(aten._unsafe_index.Tensor)(ids, [own])
    columns = numbers(ids, shape[1], i32), ids
    operands = [spread(x, dim) for dim, each in ((1, rows), (0, columns)) for x in each]
    counted = compat.make_pointwise(is_counted, override_return_dtype=i32)(*operands)
    with compat.inductor_config().patch(split_reductions=False):
        return lowering_of(aten.sum.dim_IntList)(counted, [1], dtype=i32)


def numbers(like: Any, count: Any, dtype: torch.dtype) -> Any:
    return lowering_of(torch.ops.prims.iota.default)(
        count, start=0, step=1, dtype=dtype, device=like.get_device(), requires_grad=False
    )


@fallback.lowering(expert_routing.order_op)
def lower_order(place: Any) -> Any:
    [count] = place.get_size()
    order = numbers(place, count, torch.int64)
    into = lowering_of(aten.empty_like.default)(order)
    return lowering_of(aten.index_put_.default)(into, [place], order)


@fallback.lowering(expert_routing.keys_op)
def lower_keys(ids: Any, experts: int) -> Any:
    dtype, source = expert_routing.key_dtype(experts), ids.get_dtype()
    least, most = expert_routing.key_range(experts)

    def key(value: Any) -> Any:
        ops = compat.ops()
        value = ops.minimum(value, ops.constant(most, source))
        value = ops.maximum(value, ops.constant(least, source))
        return ops.to_dtype(value, dtype, src_dtype=source)

    return compat.make_pointwise(key, override_return_dtype=dtype)(ids)


@fallback.lowering(expert_routing.sum_op)
def lower_sum(x: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    with compat.inductor_config().patch(unroll_reductions_threshold=expert_routing.MAX_SUMMED + 1):
        return lowering_of(aten.sum.dim_IntList)(x, [1], keepdim, dtype=dtype)
