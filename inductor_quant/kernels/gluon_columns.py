"""Gluon statements about the columns of a tile at one k: scales and zero points.

As ``weight_code``, with layouts said. What is read and what is made of it are said apart, so that
reading can go ahead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from inductor_quant.kernels.gluon_layout import Layout
from inductor_quant.kernels.weight_code import Hook, Statements, Value, WeightCode
from inductor_quant.weight_format import Field, Form, Step


class ColumnCode(WeightCode):
    """``WeightCode`` of tiles with few rows, ``rows_apart`` from each other along k; one row: what
    differs along k is the same for the whole tile. ``of_columns`` is the layout of the tile. Rows
    may be behind the end of K, if ``is_even`` says so: they have what the last one has."""

    of_columns: Layout
    rows = 1
    rows_apart = 0
    is_even = True

    def _count(self, digits: frozenset[str], axis: str) -> int:
        if axis == "n":
            return super()._count(digits, axis)
        is_used = any(name[0] == "k" and self.format.radix(name) > 1 for name in digits)
        return self.rows if is_used else 1


class GluonCode:
    """The code of one weight in one configuration, for a template in Gluon; as a constant of the
    kernel it reads as that of the weight's columns, ``plain``."""

    plain: ColumnCode

    def __str__(self) -> str:
        return str(self.plain)

    __repr__ = __str__

    @property
    def x_type(self) -> str:
        return self.plain.x_type.replace("tl.", "gl.")


class ColumnStatements(Statements):
    """Statements about the columns of a tile at the k that ``position`` says.

    A value is [1, columns]; its layout is that of all columns, at its resolution. ``tag`` tells
    apart the variables of several such.
    """

    def __init__(
        self, code: ColumnCode, stride: Hook, size: Hook, *, tag: str, position: str
    ) -> None:
        super().__init__(code, stride, size)
        self.code, self.tag, self.position = code, tag, position
        self._columns = 1  # of the value whose positions are being made

    def assign(self, prefix: str, expression: str) -> str:
        return super().assign(prefix + self.tag, expression)

    def pointer(self, field: Field) -> tuple[str, int, int]:
        _, self._columns = self.weight.resolution(*field.index)
        return super().pointer(field)

    def form(self, form: Form, rows: int, columns: int) -> str:
        self._columns = columns
        return super().form(form, rows, columns)

    def digit(self, name: str, count: int, span: int = 1) -> str:
        axis, last = name[0], int(name[1:])
        first = last - span + 1
        radix = math.prod(self.format.radix(f"{axis}{i}") for i in range(first, last + 1))
        divisor = self.format.weight_of(name)
        position = self.position
        if axis == "n":
            divisor //= self.code.block["n"] // count
            # the same in every tile, where it begins anew with each
            is_same = self.code.rows > 1 and count % (divisor * radix) == 0
            position = "0" if is_same else f"pid_n * {count}"
        if count > 1:
            layout = f"gl.SliceLayout({'nk'.index(axis)}, {self.laid_out(self._columns)})"
            apart = f" * {self.code.rows_apart}" if axis == "k" else ""
            position = f"{position} + gl.arange(0, {count}, {layout}){apart}"
            if axis == "k" and not self.code.is_even:
                position = f"gl.minimum({position}, {self.code.k - 1})"
        position = self.assign("p", position)
        if divisor > 1:
            position = f"({position} // {divisor})"
        return self.assign("d", position if first == 0 else f"{position} % {radix}")

    def laid_out(self, columns: int) -> str:
        """The name of the layout in which positions of [1, columns] are made."""
        return columns_layout(columns)

    def table(self, table: Sequence[int], digit: str) -> str:
        low, bits = min(table), max(1, (max(table) - min(table)).bit_length())
        packed = sum(value - low << bits * place for place, value in enumerate(table))
        shifted = f"({packed} >> ({digit}.to(tl.int64) * {bits}))"
        return self.assign("t", f"({shifted} & {(1 << bits) - 1}).to(tl.int32) + {low}")

    def widen(self, value: Value, rows: int, columns: int) -> Value:
        if not 1 < value.columns < columns:
            return value
        times = columns // value.columns
        spread = self.code.of_columns.coarser(columns).split(value.columns)
        shape = f"[{value.rows}, {value.columns}, {times}]"
        narrow = f"{value.code}, gl.SliceLayout(2, {spread}), assert_trivial=True"
        zeros = f"gl.full({shape}, 0, gl.int32, {spread})"
        wide = f"gl.broadcast(gl.expand_dims(gl.convert_layout({narrow}), 2), {zeros})[0]"
        code = f"gl.reshape({wide}, [{value.rows}, {columns}])"
        code = f"gl.convert_layout({code}, {columns_layout(columns)}, assert_trivial=True)"
        return dataclasses.replace(value, code=self.assign("x", code), columns=columns)


class Loads(ColumnStatements):
    """What the operands are made of is read, where ``mask`` says so; ``words`` are the variables
    that hold it."""

    def __init__(self, *args: Any, mask: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mask = f", mask={mask}" if mask else ""
        self.words: list[str] = []

    def read(self, field: Field) -> tuple[str, int, int]:
        pointer, rows, columns = self.pointer(field)
        word = self.assign("w", f"tl.load({pointer}{self.mask})")
        self.words.append(word)
        return word, rows, columns

    def keep(self, slot: int) -> list[str]:
        """Statements that leave what was read to the ``Uses`` of ``slot``."""
        return [f"{kept(slot, number)} = {word}" for number, word in enumerate(self.words)]


class Copies(ColumnStatements):
    """What the operands are made of is copied to shared memory, in layouts of its own
    (``copied_layout``)."""

    def laid_out(self, columns: int) -> str:
        return copied_layout(columns, self._itemsize)

    def copy(self, field: Field, buffer: str, mask: str = "") -> None:
        """Copy what the tile has of ``field`` to ``buffer``, where ``mask`` says so."""
        self._itemsize = self.code.dtypes[field.source].itemsize
        pointer, _, _ = self.pointer(field)
        how = f", mask={mask}" if mask else ""
        self.lines.append(f"copy_async({buffer}, {pointer}{how})")


class Uses(ColumnStatements):
    """Operands are made of what ``Loads`` has read into ``slot``, in the same order."""

    def __init__(self, *args: Any, slot: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slot, self.used = slot, 0

    def read(self, field: Field) -> tuple[str, int, int]:
        rows, columns = self.weight.resolution(*field.index)
        self.used += 1
        return kept(self.slot, self.used - 1), rows, columns


def supports_steps(steps: Sequence[Step]) -> bool:
    """Whether operands are numbers at known places: no tables to look up, no division."""
    operands = [step.operand for step in steps if isinstance(step.operand, Field)]
    forms = [form for field in operands for form in (*field.index, field.offset)]
    return (
        all(step.kind != "div" for step in steps)
        and not any(form.is_data for form in forms)
        and not any(field.float8 or field.size or field.wrap for field in operands)
        and all(_is_small_table(table) for form in forms for _, table in form.tables)
    )


def _is_small_table(table: Sequence[int]) -> bool:
    """Whether a number of 63 bits holds it."""
    return max(1, (max(table) - min(table)).bit_length()) * len(table) <= 63


def columns_layout(count: int) -> str:
    """The name of the layout of [1, count] values for the tile's columns."""
    return f"COLUMNS_{count}"


def copied_layout(count: int, itemsize: int) -> str:
    """The name of the layout in which [1, count] values are copied to shared memory."""
    return f"COPIED_{count}_OF_{itemsize}"


def kept(slot: int, number: int) -> str:
    """The variable that holds what was read for an operand."""
    return f"kept{slot}_{number}"


def gluon(lines: Sequence[str]) -> str:
    """Statements of Triton whose functions Gluon has too."""
    return "\n".join(lines).replace("tl.", "gl.")
