"""Lowering of ``inductor_quant::fp8`` and ``inductor_quant::fp8_block``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import group_reduce as groups
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.scaled_mm.fp8 import decodes
from inductor_quant.lowering.select import (
    Gemm,
    describe_device,
    describe_problem,
    lower_gemm,
    lowering_of,
)
from inductor_quant.lowering.split_k_sum import sum_partials
from inductor_quant.lowering.w8a8 import group_of, scale_spec
from inductor_quant.ops import fp8, fp8_block
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec

aten, prims = torch.ops.aten, torch.ops.prims


@fallback.lowering(fp8.op)
def lower(*args: Any, **kwargs: Any) -> Any:
    call = Fp8Call(*args, **kwargs)
    a, b, a_scale, b_scale, bias = call.operands
    spec = call.spec()
    result = _from_kernel("fp8", spec, *call.operands)
    if result is not None:
        return result
    if spec.group_size:
        a_scale = _of_blocks(a_scale, a, b_scale.get_size()[0])
        sizes = {"block_k": spec.group_size, "block_n": 1}
        return lower_block(a, b, a_scale, b_scale, bias, **sizes, out_dtype=call.out_dtype)
    out = lowering_of(aten.mm.default)(_real(a), _real(b))
    for scale in (a_scale, b_scale):
        if scale is not None:
            out = lowering_of(aten.mul.Tensor)(out, _real(scale))
    return _finished(out, bias, call.out_dtype)


@dataclasses.dataclass(frozen=True)
class Fp8Call:
    """The arguments of the op, as IR."""

    a: Any
    b: Any
    a_scale: Any
    b_scale: Any
    bias: Any
    _: dataclasses.KW_ONLY
    fast_accum: bool = False
    out_dtype: torch.dtype

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.a, self.b, self.a_scale, self.b_scale, self.bias

    def gemm(self) -> Gemm:
        """The call as kernels see it."""
        a, b, a_scale, b_scale, bias = (
            t if t is None else compat.realize(t) for t in self.operands
        )
        shared, own = (
            [t for t in tensors if t is not None] for tensors in ((a, a_scale), (b, b_scale, bias))
        )
        problem = describe_problem(a, b, self.out_dtype)
        return Gemm(self.spec(), problem, shared, own, _constants(self.a.get_device()))

    def spec(self) -> QuantGemmSpec:
        group = group_of(self.b_scale, 0, compat.known_int(self.b.get_size()[0]))
        return fp8.make_spec(
            a_dtype=self.a.get_dtype(),
            b_dtype=self.b.get_dtype(),
            a_scale=scale_spec(self.a_scale, (1, -1), dim=0),
            b_scale=scale_spec(self.b_scale, (group, 1), dim=1 if group < 0 else 0),
            out_dtype=self.out_dtype,
            bias=self.bias is not None,
            fast_accum=self.fast_accum,
        )


def _constants(device: torch.device) -> dict[str, Any]:
    has_no_fp8 = compat.runs_triton(device) and decodes(describe_device(device))
    return {"triton_meta": compat.BytePointers()} if has_no_fp8 else {}


@fallback.lowering(fp8_block.op)
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
    result = _from_kernel("fp8_block", spec, a, b, a_scale, b_scale, bias)
    if result is not None:
        return result
    if a.get_device().type == "cpu":
        # Inductor's C++ backend miscompiles the graph below if a block is partial (torch 2.13:
        # ``x * s.unsqueeze(2).expand(33, 3, 32).reshape(33, 96)[:, :70]``).
        sizes = {"block_k": block_k, "block_n": block_n}
        eager = compat.fallback_handler(fp8_block.op, add_to_fallback_set=False)
        return eager(a, b, a_scale, b_scale, bias, **sizes, out_dtype=out_dtype)
    multiply = lowering_of(aten.mul.Tensor)
    k, n = b.get_size()
    of_a = _repeated(_real(a_scale), 1, block_k, k)
    of_b = _repeated(_repeated(_real(b_scale), 0, block_k, k), 1, block_n, n)
    out = lowering_of(aten.mm.default)(multiply(_real(a), of_a), multiply(_real(b), of_b))
    return _finished(out, bias, out_dtype)


def _from_kernel(
    family: str, spec: QuantGemmSpec, a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any
) -> Any | None:
    """The output of one of our kernels; None if none applies."""
    m, n = a.get_size()[0], b.get_size()[1]
    device = a.get_device()
    if compat.known_int(m) == 0 or compat.known_int(n) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=spec.out_dtype, device=device)
    inputs = [compat.realize(t) for t in (a, b, a_scale, b_scale, bias) if t is not None]
    if family == "fp8_block" and compat.runs_triton(device) and not compat.uses_cpp_wrapper():
        assert spec.a.scale is not None
        groups.quantize_in_tiles(inputs[0], spec.a.scale.block[1])
    result = lower_gemm(
        family,
        spec,
        describe_problem(inputs[0], inputs[1], spec.out_dtype),
        inputs,
        compat.FixedLayout(device, spec.out_dtype, [m, n]),
        _constants(device),
    )
    if result is not None and len(result.get_size()) == 3:
        return sum_partials(result, lambda out: _finished(out, bias, spec.out_dtype))
    return result


# ------------------------------------------------------------------------------------------
# without a kernel: dequantize and multiply in fp32


def _real(tensor: Any) -> Any:
    return lowering_of(prims.convert_element_type.default)(tensor, torch.float32)


def _of_blocks(scale: Any, a: Any, groups: Any) -> Any:
    """The scale of rows of ``a``, or of all, for each group of K: [M, groups]."""
    size = [a.get_size()[0], groups]
    if scale is None:
        one = {"dtype": torch.float32, "device": a.get_device()}
        return lowering_of(aten.full.default)(size, 1, **one)
    return lowering_of(aten.clone.default)(lowering_of(aten.expand.default)(scale, size))


def _repeated(scale: Any, dim: int, count: int, size: Any) -> Any:
    """``scale.repeat_interleave(count, dim)``, cut to ``size``."""
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
