"""Codegens of Gluon templates: statements about the columns of a tile, its scales and zero points.

Gluon names the layout of every tensor. Loading and use are written apart (``Loads``, ``Copies``;
``Uses``), so that a template can prefetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inductor_quant.kernels.codegen.base import Codegen, Hook
from inductor_quant.kernels.codegen.dialect import Dialect, Dim, packed_table
from inductor_quant.kernels.codegen.gluon_layout import Layout, expand_dims, slice_layout
from inductor_quant.kernels.codegen.statements import Statements, Value
from inductor_quant.spec.weight_format import DequantOp, Field


class Gluon(Dialect):
    """``columns`` is the layout of the values for a tile's columns; that of fewer values, each for
    several columns, follows from it and is called ``COLUMNS_<count>``."""

    lang = "gl"

    def __init__(self, columns: Layout) -> None:
        self.columns = columns

    def arange(self, count: int, axis: str, layout: str) -> str:
        return f"gl.arange(0, {count}, gl.SliceLayout({'nk'.index(axis)}, {layout}))"

    def repeat(self, code: str, shape: tuple[int, int], axis: int, count: int) -> str:
        assert axis == 1
        rows, columns = shape
        split = self.columns.coarser(count).split(columns)
        narrow = f"{code}, gl.SliceLayout(2, {split}), assert_trivial=True"
        whole = f"gl.full([{rows}, {columns}, {count // columns}], 0, gl.int32, {split})"
        wide = f"gl.broadcast(gl.expand_dims(gl.convert_layout({narrow}), 2), {whole})[0]"
        code = f"gl.reshape({wide}, [{rows}, {count}])"
        return f"gl.convert_layout({code}, {columns_layout(count)}, assert_trivial=True)"

    def lookup(self, table: Sequence[int], index: str) -> str:
        low, bits = min(table), _table_bits(table)
        count = 63 // bits  # entries of one integer
        starts = range(0, len(table), count)
        place = f"({index} % {count})" if len(starts) > 1 else index
        *first, code = [
            f"({packed_table(table[start : start + count], low, bits)}"
            f" >> ({place}.to(gl.int64) * {bits}))"
            for start in starts
        ]
        for start, part in reversed([*zip(starts, first, strict=False)]):
            code = f"gl.where({index} < {start + count}, {part}, {code})"
        return f"({code} & {(1 << bits) - 1}).to(gl.int32) + {low}"


class GluonCodegen(Codegen):
    """``column_dims`` are the dimensions of a tile's columns as they are stored, ``mma_dims`` as
    the MMA has them. ``layouts`` are the names of layouts that the template uses, and their text.

    Operands are read for one k per tile; with ``k_slices`` for as many, ``SLICE`` apart, one per
    warp (``slice_dims``). Slices beyond K read the operands of the last k.
    """

    dialect: Gluon
    column_dims: tuple[Dim, ...]
    mma_dims: tuple[Dim, ...]
    layouts: dict[str, Layout | str]
    k_slices = 1
    slice_k = 0
    slice_dims: tuple[Dim, ...] = ()
    is_even = True

    def _count(self, digits: frozenset[str], axis: str) -> int:
        if axis == "n":
            return super()._count(digits, axis)
        return 1 if digits.isdisjoint(self.format.digits("k")) else self.k_slices

    def unit(self, axis: str, count: int) -> int:
        return 1 if axis == "k" else super().unit(axis, count)

    def is_within(self, axis: str) -> bool:
        return True

    def constants(self) -> str:
        """Statements that name the layouts."""
        layouts = dict(self.layouts)
        for bit in range(self.block_n.bit_length()):
            layouts[columns_layout(1 << bit)] = self.dialect.columns.coarser(1 << bit)
        return "\n".join(f"{name}: gl.constexpr = {text}" for name, text in layouts.items())

    def mma_columns(self, code: str, layout: str, axes: Sequence[int], **options: Any) -> str:
        """``code``, a value per column, in the order of the MMA and with size 1 along ``axes`` of a
        tensor with ``layout``."""
        sizes = [*(size for _, size in self.slice_dims), self.block_n]
        dims, target = self.slice_dims + self.column_dims, self.slice_dims + self.mma_dims
        code = self.dialect.reordered(f"({code})", dims, target, str(sizes))
        return converted(code, layout, axes, **options)

    def in_order(self, value: str) -> str:
        """``value`` [N of the tile, BLOCK_M], its columns as the MMA has them, as [BLOCK_M, N]."""
        m: Dim = ("m", self.block_m)
        dims, target = (*self.mma_dims, m), (m, *self.column_dims)
        return self.dialect.reordered(value, dims, target, f"[BLOCK_M, {self.block_n}]")


class ColumnStatements(Statements):
    """Statements about the columns of a tile at the k that ``position_k`` gives. A value is
    [codegen.k_slices or 1, columns]."""

    codegen: GluonCodegen

    def __init__(
        self, codegen: GluonCodegen, stride: Hook, size: Hook, *, tag: str, position_k: str
    ) -> None:
        super().__init__(codegen, stride, size, tag=tag)
        self.position_k = position_k

    def position(self, axis: str, count: int, period: int, layout: str) -> str:
        codegen, position = self.codegen, self.position_k
        if axis == "n":
            # The same in every tile where the tiles begin with the period.
            is_same = codegen.k_slices > 1 and count % period == 0
            position = "0" if is_same else f"pid_n * {count}"
        if count > 1:
            apart = f" * {codegen.slice_k}" if axis == "k" else ""
            position = f"{position} + {self.dialect.arange(count, axis, layout)}{apart}"
            if axis == "k" and not codegen.is_even:
                position = f"gl.minimum({position}, {codegen.k - 1})"
        return self.assign("p", position)

    def layout(self, columns: int) -> str:
        return columns_layout(columns)


class Loads(ColumnStatements):
    """Loads, under ``mask``, what operands are computed from; ``loaded`` are the variables."""

    def __init__(self, *args: Any, mask: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mask = f", mask={mask}" if mask else ""
        self.loaded: list[str] = []

    def read(self, field: Field) -> tuple[str, int, int]:
        pointer, rows, columns = self.pointer(field)
        word = self.assign("w", f"gl.load({pointer}{self.mask})")
        self.loaded.append(word)
        return word, rows, columns

    def load(self, ops: Sequence[DequantOp]) -> None:
        """Load the operands of ``ops``."""
        for op in ops:
            if isinstance(op.operand, Field):
                self.field(op.operand)

    def keep(self, slot: int) -> list[str]:
        """Statements that leave what was loaded to the ``Uses`` of ``slot``."""
        return [f"{kept(slot, i)} = {word}" for i, word in enumerate(self.loaded)]


class Copies(ColumnStatements):
    """Copies what operands are computed from to shared memory."""

    def copy(self, field: Field, buffer: str, mask: str = "") -> None:
        _, columns = self.codegen.resolution(*field.index)
        layout = copied_layout(columns, self.codegen.dtypes[field.source].itemsize)
        pointer, _, _ = self.pointer(field, layout)
        how = f", mask={mask}" if mask else ""
        self.lines.append(f"copy_async({buffer}, {pointer}{how})")


class Uses(ColumnStatements):
    """Computes operands from what ``Loads`` has loaded into ``slot``, in the same order."""

    def __init__(self, *args: Any, slot: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slot, self.used = slot, 0

    def read(self, field: Field) -> tuple[str, int, int]:
        rows, columns = self.codegen.resolution(*field.index)
        self.used += 1
        return kept(self.slot, self.used - 1), rows, columns

    def broadcast(self, value: Value, code: str) -> str:
        """``code``, made of ``value``, for each column."""
        if value.columns > 1:
            return code
        count = self.codegen.block_n
        return f"(gl.full([1, {count}], 0.0, gl.float32, {columns_layout(count)}) + {code})"


def supports_ops(ops: Sequence[DequantOp]) -> bool:
    """Whether operands are stored at known positions: no act-order, no large tables, no ``div``."""
    operands = [op.operand for op in ops if isinstance(op.operand, Field)]
    indices = [index for field in operands for index in (*field.index, field.offset)]
    return (
        all(op.kind != "div" for op in ops)
        and not any(index.is_data for index in indices)
        and not any(field.float8 or field.size or field.wrap for field in operands)
        and all(
            _table_bits(table) * len(table) <= 63 for index in indices for _, table in index.tables
        )
    )


def _table_bits(table: Sequence[int]) -> int:
    return max(1, (max(table) - min(table)).bit_length())


def columns_layout(count: int) -> str:
    """The name of the layout of [1, count] values for the tile's columns."""
    return f"COLUMNS_{count}"


def copied_layout(count: int, itemsize: int) -> str:
    """The name of the layout in which [1, count] values are copied to shared memory."""
    return f"COPIED_{count}_OF_{itemsize}"


def copy_layout(columns: int, vector: int, warps: int) -> str:
    """The layout in which rows of ``columns`` are copied, ``vector`` neighbours at once."""
    lanes = min(32, columns // vector)
    return f"gl.BlockedLayout([1, {vector}], [{32 // lanes}, {lanes}], [{warps}, 1], [1, 0])"


def converted(code: str, layout: str, axes: Sequence[int], *, is_trivial: bool = True) -> str:
    """``code`` with size 1 along ``axes`` of a tensor with ``layout``."""
    how = ", assert_trivial=True" if is_trivial else ""
    return expand_dims(f"gl.convert_layout({code}, {slice_layout(layout, axes)}{how})", axes)


def kept(slot: int, i: int) -> str:
    """The variable that holds what was loaded for operand ``i``."""
    return f"kept{slot}_{i}"
