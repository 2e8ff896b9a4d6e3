"""Corrects the operations that Triton's interpreter gets wrong, and adds those that it lacks.

Upstream computes bfloat16 on its bit pattern, truncates where hardware rounds, does not handle
NaN, overflow and carries in 8-bit floats, and has neither libdevice nor inline assembly
(triton-lang/triton issues 10945, 11584, 11585). ``install`` makes ``Builder`` the class of the
interpreter's builder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

from . import libdevice, ptx
from .floats import Array, decode, encode, is_known, is_stored_as_bits

AsmEmulation = Callable[..., Array | tuple[Array, ...]]

# text of the assembly, stripped -> what it computes
asm_emulations: dict[str, AsmEmulation] = {}

# All integers up to here are exact in float32.
_FLOAT32_EXACT = 1 << 24


class _AsmResults:
    """What ``create_inline_asm`` returns; ``tl.inline_asm_elementwise`` takes results by index."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def get_result(self, index: int) -> Any:
        return self._handles[index]


def _is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _widen(handle: Any) -> Any:
    """A bfloat16 handle as float32; any other as it is."""
    if not _is_bf16(handle):
        return handle
    return TensorHandle(decode(handle.data, tl.bfloat16), tl.float32)


def _round_to_bf16(handle: Any) -> Any:
    return TensorHandle(encode(handle.data, tl.bfloat16), tl.bfloat16)


class Builder(InterpreterBuilder):
    """``InterpreterBuilder`` with the arithmetic of the hardware."""

    # casts

    def get_bf16(self, value: float) -> Any:
        """The constant ``value``; upstream lacks it up to Triton 3.7."""
        return self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if is_stored_as_bits(source) or is_stored_as_bits(target):
            return TensorHandle(encode(decode(src.data, source), target), target)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        towards_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
        if towards_zero or not is_known(source) or not is_known(target):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return TensorHandle(encode(decode(src.data, source), target), target)

    # arithmetic

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        both_bf16 = _is_bf16(lhs) and _is_bf16(rhs)
        if both_bf16:
            lhs, rhs = _widen(lhs), _widen(rhs)
        result = super().binary_op(lhs, rhs, op)
        if result.data.dtype == np.bool_:
            # Upstream gives a comparison the type of its operands; its splat is then no mask.
            return TensorHandle(result.data, tl.int1)
        return _round_to_bf16(result) if both_bf16 else result

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
        result = super().unary_op(_widen(arg), op)
        return _round_to_bf16(result) if _is_bf16(arg) else result

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        """The product of two fp32 is exact in fp64; upstream rounds it to fp32."""
        factors = (_widen(x), _widen(y))
        if all(factor.data.dtype == np.float32 for factor in factors):
            exact = factors[0].data.astype(np.float64) * factors[1].data + _widen(z).data
            result = TensorHandle(exact.astype(np.float32), tl.float32)
        else:
            result = super().create_fma(*factors, _widen(z))
        return _round_to_bf16(result) if _is_bf16(z) else result

    def create_dot(
        self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        """As the matrix units: int32 wraps around, floats accumulate in float32. The order of a
        sum, tf32, and imprecise accumulation of 8-bit floats are not modelled."""
        lhs, rhs = decode(a.data, a.dtype.scalar), decode(b.data, b.dtype.scalar)
        if np.issubdtype(lhs.dtype, np.integer):
            product = _integer_matmul(lhs, rhs)
        else:
            compute = np.result_type(lhs.dtype, np.float32)
            product = np.matmul(lhs.astype(compute), rhs.astype(compute))
        accumulated = product.astype(d.data.dtype) + d.data
        return TensorHandle(accumulated, d.dtype.scalar)

    # not in upstream

    def create_extern_elementwise(
        self,
        libName: str,
        libPath: str,
        symbol: str,
        argList: Sequence[Any],
        retType: Any,
        isPure: bool,
    ) -> Any:
        element_type = retType.scalar
        result = libdevice.call(symbol, [arg.data for arg in argList])
        return TensorHandle(encode(result, element_type), element_type)

    def create_inline_asm(
        self,
        inlineAsm: str,
        constraints: str,
        values: Sequence[Any],
        type: Any,
        isPure: bool,
        pack: int,
    ) -> Any:
        types = type if isinstance(type, (list, tuple)) else [type]
        emulation = asm_emulations.get(inlineAsm.strip())
        operands = [value.data for value in values]
        if emulation is None:
            arrays = _run_ptx(inlineAsm, operands, types, pack)
        else:
            results = emulation(*operands)
            arrays = results if isinstance(results, tuple) else (results,)
        return _AsmResults(
            [
                TensorHandle(np.asarray(array), element.scalar)
                for array, element in zip(arrays, types, strict=True)
            ]
        )


def _run_ptx(asm: str, operands: Sequence[Any], types: Sequence[Any], pack: int) -> Sequence[Any]:
    """Results as the interpreter stores them: bits, or numpy's floats."""
    scalars = [element.scalar for element in types]
    try:
        results = ptx.run(asm, operands, [_get_np_dtype(scalar) for scalar in scalars], pack)
        return [
            bits.view(_get_np_dtype(scalar)) for bits, scalar in zip(results, scalars, strict=True)
        ]
    except NotImplementedError as error:
        raise NotImplementedError(
            f"no emulation of this assembly ({error}); see register_asm_emulation:\n{asm}"
        ) from error


def _integer_matmul(lhs: Array, rhs: Array) -> Array:
    """Exact ``lhs @ rhs`` through float BLAS; numpy has none for integers."""
    largest = np.iinfo(lhs.dtype).max + 1
    sums_to = largest * largest * lhs.shape[-1]
    compute = np.float32 if sums_to <= _FLOAT32_EXACT else np.float64
    product: Array = np.matmul(lhs.astype(compute), rhs.astype(compute))
    return product.astype(np.int64)
