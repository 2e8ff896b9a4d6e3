"""Lowering of ``inductor_quant::fp8`` and ``inductor_quant::fp8_block``."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant import _group_reduce_compat as groups
from inductor_quant import _torch_compat as compat
from inductor_quant.kernels.fp8 import decodes
from inductor_quant.lowering.common import (
    describe_device,
    describe_problem,
    lower_gemm,
    lowering_of,
)
from inductor_quant.lowering.parts import sum_of_parts
from inductor_quant.lowering.w8a8 import scale_spec
from inductor_quant.ops import fp8, fp8_block
from inductor_quant.spec import QuantGemmSpec, ScaleSpec

aten, prims = torch.ops.aten, torch.ops.prims


@compat.register_lowering(fp8.op, type_promotion_kind=None)
def lower(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    *,
    fast_accum: bool = False,
    out_dtype: torch.dtype,
) -> Any:
    spec = fp8.make_spec(
        a_dtype=a.get_dtype(),
        b_dtype=b.get_dtype(),
        a_scale=scale_spec(a_scale, (1, -1), dim=0),
        b_scale=scale_spec(b_scale, (-1, 1), dim=1),
        out_dtype=out_dtype,
        bias=bias is not None,
        fast_accum=fast_accum,
    )
    result = _lower("fp8", spec, a, b, a_scale, b_scale, bias)
    if result is not None:
        return result
    out = _product(_real(a), _real(b))
    for scale in (a_scale, b_scale):
        if scale is not None:
            out = lowering_of(aten.mul.Tensor)(out, _real(scale))
    return _finished(out, bias, out_dtype)


@compat.register_lowering(fp8_block.op, type_promotion_kind=None)
def lower_block(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    *,
    block_k: int,
    block_n: int,
    out_dtype: torch.dtype,
) -> Any:
    spec = fp8.make_spec(
        a_dtype=a.get_dtype(),
        b_dtype=b.get_dtype(),
        a_scale=ScaleSpec(a_scale.get_dtype(), (1, block_k)),
        b_scale=ScaleSpec(b_scale.get_dtype(), (block_k, block_n)),
        out_dtype=out_dtype,
        bias=bias is not None,
    )
    result = _lower("fp8_block", spec, a, b, a_scale, b_scale, bias)
    if result is not None:
        return result
    if a.get_device().type == "cpu":
        # The C++ backend makes wrong code of what is below where a block is not full (torch 2.13:
        # ``x * s.unsqueeze(2).expand(33, 3, 32).reshape(33, 96)[:, :70]``).
        sizes = {"block_k": block_k, "block_n": block_n}
        eager = compat.fallback_handler(fp8_block.op, add_to_fallback_set=False)
        return eager(a, b, a_scale, b_scale, bias, **sizes, out_dtype=out_dtype)
    multiply = lowering_of(aten.mul.Tensor)
    k, n = b.get_size()
    rows = _repeated(_real(a_scale), 1, block_k, k)
    blocks = _repeated(_repeated(_real(b_scale), 0, block_k, k), 1, block_n, n)
    out = _product(multiply(_real(a), rows), multiply(_real(b), blocks))
    return _finished(out, bias, out_dtype)


def _lower(
    family: str, spec: QuantGemmSpec, a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any
) -> Any | None:
    """The output of one of our kernels; None where there is none for it."""
    m, n = a.get_size()[0], b.get_size()[1]
    device = a.get_device()
    if compat.known_int(m) == 0 or compat.known_int(n) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=spec.out_dtype, device=device)
    inputs = [compat.realize(t) for t in (a, b, a_scale, b_scale, bias) if t is not None]
    is_seen = compat.runs_triton(device) and not compat.uses_cpp_wrapper()  # to run so
    if family == "fp8_block" and spec.a.scale is not None and is_seen:
        groups.quantize_in_tiles(inputs[0], spec.a.scale.block[1])
    result = lower_gemm(
        family,
        spec,
        describe_problem(inputs[0], inputs[1], spec.out_dtype),
        inputs,
        compat.FixedLayout(device, spec.out_dtype, [m, n]),
        {"triton_meta": compat.BytePointers()} if _decodes(device) else {},
    )
    if result is not None and len(result.get_size()) == 3:
        return sum_of_parts(result, lambda out: _finished(out, bias, spec.out_dtype))
    return result


def _decodes(device: torch.device) -> bool:
    return compat.runs_triton(device) and decodes(describe_device(device))


# ------------------------------------------------------------------------------------------
# without a kernel: dequantize and multiply in fp32


def _real(tensor: Any) -> Any:
    return lowering_of(prims.convert_element_type.default)(tensor, torch.float32)


def _product(a: Any, b: Any) -> Any:
    return lowering_of(aten.mm.default)(a, b)


def _repeated(scale: Any, dim: int, count: int, size: Any) -> Any:
    """Each entry ``count`` times along ``dim``, the first ``size`` of them."""
    shape = list(scale.get_size())
    wide = lowering_of(aten.unsqueeze.default)(scale, dim + 1)
    wide = lowering_of(aten.expand.default)(wide, [*shape[: dim + 1], count, *shape[dim + 1 :]])
    shape[dim] *= count
    wide = lowering_of(aten.reshape.default)(wide, shape)
    return lowering_of(aten.slice.Tensor)(wide, dim, 0, size)


def _finished(out: Any, bias: Any, out_dtype: torch.dtype) -> Any:
    if bias is not None:
        out = lowering_of(aten.add.Tensor)(out, _real(bias))
    return lowering_of(prims.convert_element_type.default)(out, out_dtype)
