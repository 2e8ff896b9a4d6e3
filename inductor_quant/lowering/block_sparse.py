"""Lowering of ``inductor_quant::block_sparse``."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.problem import Problem
from inductor_quant.kernels.scaled_mm.fp8 import decodes
from inductor_quant.lowering.select import describe_device, lower_gemm, lowering_of
from inductor_quant.lowering.split_k_sum import sum_partials
from inductor_quant.ops import block_sparse
from inductor_quant.spec.gemm import ScaleSpec

aten, prims = torch.ops.aten, torch.ops.prims


@fallback.lowering(block_sparse.op)
def lower(
    x: Any,
    values: Any,
    crow: Any,
    col: Any,
    place: Any,
    order: Any,
    scale: Any,
    bias: Any,
    *,
    n: int,
    longest: int = 0,
) -> Any:
    (m, k), device, dtype = x.get_size(), x.get_device(), x.get_dtype()
    out_dtype = torch.int32 if dtype == torch.int8 else dtype
    if compat.known_int(m) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=out_dtype, device=device)

    def finished(out: Any) -> Any:
        """The op's value from the sums over k."""
        if out_dtype == torch.int32:
            return lowering_of(prims.convert_element_type.default)(out, out_dtype)
        if scale is not None and len(scale.get_size()) == 1:
            factor = lowering_of(prims.convert_element_type.default)(scale, torch.float32)
            out = lowering_of(aten.mul.Tensor)(out, factor)
        if bias is not None:
            addend = lowering_of(prims.convert_element_type.default)(bias, torch.float32)
            out = lowering_of(aten.add.Tensor)(out, addend)
        return lowering_of(prims.convert_element_type.default)(out, dtype)

    count = compat.known_int(col.get_size()[0])
    if count == 0 or compat.known_int(k) == 0:
        zeros = lowering_of(aten.full.default)([m, n], 0, dtype=torch.float32, device=device)
        return finished(zeros)
    given = [
        compat.realize(t)
        for t in (x, values, crow, col, place, order, scale, bias)
        if t is not None
    ]
    block_n, block_k = map(compat.known_int, values.get_size()[-2:])
    result = None
    if count is not None and block_n is not None and block_k is not None:
        scales = None
        if scale is not None:
            shape = tuple(map(compat.known_int, scale.get_size()))
            scales = ScaleSpec(scale.get_dtype(), block_sparse.scale_block(shape, block_n, block_k))
        listed = [] if place is None else place.get_size()
        together = compat.known_int(listed[1]) or 1 if len(listed) == 2 else 1
        stored = tuple(map(compat.known_int, values.get_size()))
        spec = block_sparse.make_spec(
            dtype,
            (block_n, block_k),
            block_sparse.stored_count(stored, count, together),
            bias=bias is not None,
            stored=values.get_dtype(),
            scale=scales,
            rows=together,
            longest=longest,
        )
        hint_m, hint_k = compat.size_hints((m, k))
        *outer, column = map(compat.known_int, given[1].get_stride())
        has_lines = column == 1 and compat.is_aligned(given[1])
        for stride in outer:
            has_lines &= stride is not None and stride * values.get_dtype().itemsize % 16 == 0
        has_rows = compat.has_aligned_rows(given[0], 0)
        problem = Problem(
            hint_m,
            n,
            hint_k,
            m_is_static=compat.known_int(m) is not None,
            m_is_bounded=compat.limit(m) is not None,
            has_aligned_rows=compat.may_make_descriptors() and has_rows,
            has_weight_descriptors=has_rows and has_lines,
        )
        constants: dict[str, Any] = {
            "HAS_PLACE": place is not None,
            "HAS_ORDER": order is not None,
            "IN_PLACE": len(outer) == 3,
            "ROW": len(outer) - 1,
            "IS_WIDE": column == 1 and all(s is not None and s % 8 == 0 for s in outer),
        }
        if values.get_dtype() == torch.float8_e4m3fn and compat.runs_triton(device):
            is_decoded = decodes(describe_device(device))
            constants |= {"triton_meta": compat.BytePointers()} if is_decoded else {}
        layout = compat.FixedLayout(device, out_dtype, [m, n])
        result = lower_gemm("block_sparse", spec, problem, given, layout, constants)
    if result is None:
        eager = compat.fallback_handler(block_sparse.op, add_to_fallback_set=False)
        return eager(x, values, crow, col, place, order, scale, bias, n=n, longest=longest)
    return result if len(result.get_size()) == 2 else sum_partials(result, finished)
