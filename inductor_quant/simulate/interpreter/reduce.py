"""A fast ``tl.reduce`` for combine functions.

Upstream calls the combine function once per element. Every maximum, softmax and layer norm of
Inductor is such a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import ReduceOps

from .floats import Array


class HalvingReduceOps(ReduceOps):
    """Combines the first half of the axis with the second, until one element is left.

    A combine function is associative and commutative, so any order is right. A block of 64x256
    takes 8 calls instead of 16384.
    """

    def generic_reduce(self, input: Any) -> list[Any]:
        blocks, axis = self.unravel(input, self.axis)
        dtypes = [block.dtype for block in blocks]
        arrays = [block.handle.data for block in blocks]
        rank = input[0].handle.data.ndim
        while arrays[0].shape[axis] > 1:
            half = arrays[0].shape[axis] // 2
            first = [_take(array, axis, 0, half) for array in arrays]
            second = [_take(array, axis, half, 2 * half) for array in arrays]
            rest = [_take(array, axis, 2 * half, None) for array in arrays]
            combined = self._combine(first, second, dtypes)
            arrays = [np.concatenate(pair, axis) for pair in zip(combined, rest, strict=True)]
        return [
            self.to_tensor(self._reduced(array, axis, rank), dtype)
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]

    def sum(self, input: Any) -> Any:
        # Upstream adds bit patterns.
        return self.generic_reduce((input,))[0] if _is_bf16(input) else super().sum(input)

    def _combine(
        self, first: Sequence[Array], second: Sequence[Array], dtypes: Sequence[Any]
    ) -> list[Array]:
        arrays = (*first, *second)
        tensors = [
            self.to_tensor(array, dtype)
            for array, dtype in zip(arrays, (*dtypes, *dtypes), strict=True)
        ]
        result = self.combine_fn.fn(*tensors)
        results = result if isinstance(result, (tuple, list, tl.tuple)) else (result,)
        return [tensor.handle.data for tensor in results]

    def _reduced(self, array: Array, axis: int, rank: int) -> Any:
        """``array``, of length one along ``axis``, in the shape that ``tl.reduce`` promises."""
        if self.axis is None:
            return array.reshape([1] * rank) if self.keep_dims else array.item()
        return array if self.keep_dims else np.squeeze(array, axis)


def _is_bf16(tensor: Any) -> bool:
    return bool(tensor.dtype.scalar == tl.bfloat16)


def _take(array: Array, axis: int, start: int, stop: int | None) -> Array:
    index: list[Any] = [slice(None)] * array.ndim
    index[axis] = slice(start, stop)
    return np.ascontiguousarray(array[tuple(index)])
