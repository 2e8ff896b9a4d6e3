"""``Dialect``: how statements read in Triton and in Gluon.

Most functions have one name in both. Gluon differs where a tensor is created, because it names the
layout: ``gluon_columns.Gluon`` overrides that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton

from inductor_quant.kernels.codegen.unpack_ptx import Assembly
from inductor_quant.spec.weight_format import DequantOp, Field

# For what its compiler makes of the same code.
TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# From 3.9 on LLVM and ptxas move more out of loops than registers hold, where older versions, which
# tiles were timed with, leave it.
HOISTS_MORE = TRITON_VERSION >= (3, 9)
# (name, size): tensors are reordered and laid out as lists of dimensions, slowest first.
Dim = tuple[str, int]
# No grid of these kernels has a third axis, but no compiler knows.
UNKNOWN_ZERO = "(gl.num_programs(2) - 1)"

# Float types of x and of the output.
TRITON_TYPES = {
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.float32: "tl.float32",
}
_FLOAT8 = {torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}


class Dialect:
    """The language whose functions are ``<lang>.<name>``, by default Triton."""

    lang = "tl"

    def type(self, dtype: torch.dtype) -> str:
        name = _FLOAT8.get(dtype, str(dtype).removeprefix("torch."))
        return f"{self.lang}.{name}"

    def arange(self, count: int, axis: str, layout: str) -> str:
        """0 to ``count`` along one axis of a tensor [k, n] with ``layout``."""
        return f"tl.arange(0, {count})"

    def repeat(self, code: str, shape: tuple[int, int], axis: int, count: int) -> str:
        """``code`` of ``shape`` with each element repeated along ``axis``, to ``count`` of them."""
        sizes, index = list(shape), [":", ":"]
        sizes.insert(axis + 1, count // shape[axis])
        index.insert(axis + 1, "None")
        wide = f"tl.broadcast_to({code}[{', '.join(index)}], {sizes})"
        return f"tl.reshape({wide}, {[count, shape[1]] if axis == 0 else [shape[0], count]})"

    def lookup(self, table: Sequence[int], index: str) -> str:
        """``table[index]``, int32."""
        low, high = min(table), max(table)
        bits = max(1, (high - low).bit_length())
        if bits * len(table) <= 63:
            packed = f"tl.full([], {packed_table(table, low, bits)}, tl.int64)"
            return f"((({packed} >> ({index} * {bits})) & {(1 << bits) - 1}).to(tl.int32) + {low})"
        code = str(table[-1])
        for position in range(len(table) - 2, -1, -1):
            if table[position] != table[position + 1]:
                code = f"tl.where({index} <= {position}, {table[position]}, {code})"
        return f"({code} + {index} * 0)"

    def apply(self, op: DequantOp, value: str, operand: str) -> str:
        if op.kind != "div":
            return f"{value} {'+-*'[('add', 'sub', 'mul').index(op.kind)]} {operand}"
        if isinstance(op.operand, Field):
            return f"{self.lang}.div_rn({value}, {operand})"
        if abs(math.frexp(op.operand)[0]) == 0.5:
            return f"{value} * {1 / op.operand!r}"  # a power of two: exact
        lang = self.lang
        return f"{lang}.div_rn({value}, {lang}.full([], {operand}, {lang}.float32))"

    def reordered(self, value: str, dims: Sequence[Dim], target: Sequence[Dim], shape: str) -> str:
        """``value``, whose elements count through ``dims``, as they count through ``target``."""
        dims = [dim for dim in dims if dim[1] > 1]
        target = [dim for dim in target if dim[1] > 1]
        if dims != target:
            sizes, order = [size for _, size in dims], [dims.index(dim) for dim in target]
            value = f"{self.lang}.permute({self.lang}.reshape({value}, {sizes}), {order})"
        return f"{self.lang}.reshape({value}, {shape})"

    def inline_asm(
        self,
        assembly: Assembly,
        targets: Sequence[str],
        arguments: Sequence[str],
        dtype: torch.dtype,
    ) -> list[str]:
        """Statements that assign to ``targets`` the outputs, of ``dtype``, for ``arguments``."""
        out = self.type(dtype)
        return [
            f"{', '.join(targets)} = {self.lang}.inline_asm_elementwise(",
            f'    """{assembly.text}""",',
            f'    "{assembly.constraints}",',
            f"    [{', '.join(arguments)}],",
            f"    dtype={f'({out},) * {assembly.count}' if assembly.count > 1 else out},",
            f"    is_pure={assembly.is_pure},",
            f"    pack={assembly.pack},",
            ")",
        ]


TRITON = Dialect()


def packed_table(table: Sequence[int], low: int, bits: int) -> int:
    """``table - low`` in one integer, ``bits`` for each entry."""
    return sum(value - low << bits * index for index, value in enumerate(table))


def bits(name: str, count: int) -> tuple[Dim, ...]:
    """Dimensions of two for a power of two, the highest first."""
    return tuple((f"{name}{i}", 2) for i in reversed(range(count.bit_length() - 1)))
