"""What a tensor lists for each k, in shared memory: scales and zero points of a tile's columns.

If a tensor lists the group of each k (GPTQ's act-order), each k of a tile may have another row of
scales and of zero points. From memory a load of four k is four lines for a few bytes each. So the
consumers copy the tile's columns of all rows to shared memory before its first product, as they are
stored, and read them there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.codegen.dialect import Dim
from inductor_quant.kernels.codegen.digits import narrow, pair_lookup
from inductor_quant.kernels.codegen.digits.statements import DigitStatements, Listed
from inductor_quant.kernels.codegen.digits.tile import TileDigit, TilePlan, is_listed, word_strides
from inductor_quant.kernels.codegen.unpack_ptx import Assembly, assembly
from inductor_quant.kernels.problem import Weight
from inductor_quant.kernels.weight_only.rules import ALIGNMENT
from inductor_quant.spec.weight_format import AffineIndex, Field

LANES = 32
WORD = 4  # bytes that a register has
VECTOR, COPIES = 4, 8  # words that a thread copies with one instruction; of these at a time
# Bytes: of the 48 KB that a kernel may declare, and so many that Triton's shared memory starts at a
# multiple of 1024, as tiles with a swizzle need.
MOST, MULTIPLE = 46 << 10, 1024
APART = 32  # bytes between rows: lanes that read several, of the same columns, use other banks


@dataclasses.dataclass(frozen=True)
class Rows:
    """Of one field.

    dim      that of its tensor which is listed
    first    byte of the first row
    size     bytes of a row
    pitch    bytes from row to row
    copies   by each thread of ``VECTOR`` words
    columns  neighbours along n, of those with words of their own, that a thread reads at once
    places   bytes from neighbour to neighbour of each digit of n
    """

    field: Field
    dim: int
    first: int
    size: int
    pitch: int
    copies: int
    columns: int
    places: tuple[tuple[str, int], ...]

    @property
    def last(self) -> str:
        """The digit of which neighbours are neighbours in memory."""
        return min(self.places, key=lambda item: item[1])[0]


@dataclasses.dataclass(frozen=True)
class ListedRows:
    """``count`` rows of each field; ``memory``: bytes, beside those that Triton counts."""

    count: int
    fields: tuple[Rows, ...]
    memory: int


def listed_rows(
    weight: Weight, plan: TilePlan, n_digits: Sequence[TileDigit], warps: int
) -> ListedRows | None:
    """None: no field is listed, fields have lists of their own, columns are no neighbours in
    memory, tiles end beyond N, or there are too many rows."""
    format = weight.format
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    listed = dict.fromkeys(each for each in operands if is_listed(format, each))
    if not listed or any(format.radix(each.name) % each.inner for each in n_digits):
        return None
    found, lists, first = list[Rows](), set[tuple[AffineIndex, int]](), 0
    at_once = warps * LANES * VECTOR * WORD
    for field in listed:
        dims = [dim for dim, index in enumerate(field.index) if index.is_data]
        tensor = weight.tensors[field.source]
        count, apart = tensor.shape[dims[0]], tensor.strides[dims[0]]
        itemsize, places = tensor.dtype.itemsize, _places(weight, field, n_digits)
        if len(dims) > 1 or count is None or apart is None or not places:
            return None
        if not _is_aligned(weight, field, n_digits):
            return None
        columns = _neighbours(plan, min(places, key=places.__getitem__))
        if itemsize > WORD or columns * itemsize not in (WORD, 2 * WORD, 4 * WORD):
            return None
        size = itemsize * math.prod(d.inner for d in n_digits if d.name in places)
        if size % ALIGNMENT or apart * itemsize % ALIGNMENT:
            return None
        pitch = size + APART
        copies = math.ceil(count * size / at_once)
        of_bytes = tuple((name, place * itemsize) for name, place in places.items())
        found.append(Rows(field, dims[0], first, size, pitch, copies, columns, of_bytes))
        lists.add((field.index[dims[0]], count))
        first += (copies * at_once // size + 1) * pitch
    (_, count), *others = lists
    memory = -(-first // MULTIPLE) * MULTIPLE
    most = MOST - (pair_lookup.MEMORY if pair_lookup.places_of(weight, plan) else 0)
    return None if others or memory > most else ListedRows(count, tuple(found), memory)


def _places(weight: Weight, field: Field, n_digits: Sequence[TileDigit]) -> dict[str, int] | None:
    """Words from neighbour to neighbour of each digit, if those of a tile's columns are neighbours
    in memory."""
    strides, place, found = word_strides(weight, field), 1, dict[str, int]()
    own = [digit for digit in n_digits if digit.inner > 1 and strides.get(digit.name)]
    for digit in sorted(own, key=lambda digit: strides[digit.name]):
        if strides[digit.name] != place:
            return None
        found[digit.name] = place
        place *= digit.inner
    return found


def _is_aligned(weight: Weight, field: Field, n_digits: Sequence[TileDigit]) -> bool:
    """Whether the first word of every tile is at a multiple of 16 bytes of a row."""
    tensor, strides = weight.tensors[field.source], word_strides(weight, field)
    apart = [strides.get(digit.name, 0) * digit.inner for digit in n_digits if digit.outer > 1]
    is_shifted = any(index.const for index in field.index if not index.is_data)
    is_even = all(step * tensor.dtype.itemsize % ALIGNMENT == 0 for step in apart)
    return tensor.is_aligned and is_even and not is_shifted


def _neighbours(plan: TilePlan, last: str) -> int:
    """How many neighbours along a digit of n a thread has in its first registers, in order."""
    [axis] = [axis for axis, digit in enumerate(plan.digits) if digit.name == last]
    count = 1
    for basis in plan.along_n().registers:
        if basis != tuple(count if other == axis else 0 for other in range(plan.rank)):
            break
        count *= 2
    return count


class RowStatements:
    """Gluon statements of the consumers, for a ``codegen``."""

    def __init__(self, codegen: Any, rows: ListedRows) -> None:
        self.codegen, self.rows, self.dialect = codegen, rows, codegen.dialect
        self.at_once = VECTOR * LANES * codegen.warps  # words that all threads copy
        self.layout = f"gl.BlockedLayout([{VECTOR}], [{LANES}], [{codegen.warps}], [0])"

    def allocated(self) -> list[str]:
        """Statements before the first tile."""
        return self._inline_asm(_allocate(self.rows.memory), "listed_rows", [], torch.int32)

    def start(self, stride: Hook, size: Hook) -> list[str]:
        """Statements that load the first rows of a tile and leave in ``listed<i>`` where in a row
        each thread reads the ``i``-th field."""
        lines = self._loaded(0, stride, size)
        for i, rows in enumerate(self.rows.fields):
            terms = [f"listed_rows + {rows.first}"]
            for name, place in rows.places:
                low = f" & -{rows.columns}" if name == rows.last and rows.columns > 1 else ""
                terms.append(f"(g_{name}{low}) * {place}")
            lines.append(f"listed{i} = {' + '.join(terms)}")
        return lines

    def stored(self, stride: Hook, size: Hook) -> list[str]:
        """Statements that store what ``start`` loaded, and then the other rows."""
        lines = ["cta_barrier()  # no warp reads those of the tile before"]
        for part in itertools.count():
            if not (copies := self._copies(part)):
                return [*lines, "cta_barrier()"]
            lines += self._loaded(part, stride, size) if part else []
            for i, (each, rows) in copies:
                of_row = rows.size // WORD
                place = f"of_rows // {of_row} * {rows.pitch} + of_rows % {of_row} * {WORD}"
                arguments = [f"listed_rows + {rows.first} + {place}", f"copied{i}"]
                lines.append(self._words(each))
                lines += self._inline_asm(_store(), "stored", arguments, torch.int32)
        raise AssertionError

    def read(self, out: Listed, field: Field, position: str) -> str:
        """``field`` of the columns of each k, whose row is at ``position``; ``out`` gets the
        statements."""
        [(number, rows)] = [each for each in enumerate(self.rows.fields) if each[1].field == field]
        dtype, name = self.codegen.dtypes[field.source], f"loaded{number}"
        # The columns that are read at once, which a thread has side by side, are last.
        dims, last = list[Dim](), ("last", rows.columns)
        sizes = {
            digit.name: digit.inner
            for digit in self.codegen.plan.digits
            if digit.digit[0] == "k" or digit.name in dict(rows.places)
        }
        for digit in self.codegen.plan.digits:
            at_once = rows.columns if digit.name == rows.last else 1
            dims.append((digit.name, sizes.get(digit.name, 1) // at_once))
            dims += [last] if at_once > 1 else []
        target = [*(dim for dim in dims if dim != last), *([last] if last in dims else [])]
        shape = [count for _, count in target]
        address = f"listed{number} + {position} * {rows.pitch}"
        address = out.assign("a", self.dialect.reordered(address, dims, target, str(shape)))
        out.lines += self._inline_asm(_load(rows.columns, dtype), name, [address], dtype)
        shape = [sizes.get(digit.name, 1) for digit in self.codegen.plan.digits]
        return str(self.dialect.reordered(name, target, dims, str(shape)))

    def _loaded(self, part: int, stride: Hook, size: Hook) -> list[str]:
        """Statements that load as much as a thread holds."""
        codegen, lines = self.codegen, []
        out = DigitStatements(codegen, stride, size, "y", codegen.digits("", "n"))
        for i, (each, rows) in self._copies(part):
            field, of_row = rows.field, rows.size // WORD
            own = (AffineIndex() if index.is_data else index for index in field.index)
            words = f"({out.pointer(Field(field.source, tuple(own)))[0]})"
            source, itemsize = codegen.sources[field.source], codegen.dtypes[field.source].itemsize
            apart = f"({stride(source, rows.dim)} * {itemsize} // {WORD})"
            lines += [
                *out.lines,
                self._words(each),
                f"at = {words}.to(gl.pointer_type(gl.int32), bitcast=True)"
                f" + of_rows // {of_row} * {apart} + of_rows % {of_row}",
                f"copied{i} = gl.load(at, mask=of_rows < {self.rows.count * of_row}, other=0)",
            ]
            if field in codegen.raised:
                lines.append(f"copied{i} = {narrow.raised(f'copied{i}', field)}")
            out.lines.clear()
        return lines

    def _words(self, number: int) -> str:
        first = number * self.at_once
        return f"of_rows = {first} + gl.arange(0, {self.at_once}, COPIED_ROWS)"

    def _copies(self, part: int) -> list[tuple[int, tuple[int, Rows]]]:
        """(number of the variable, (number of the copy, the rows)) of as many as a thread holds."""
        copies = [(each, rows) for rows in self.rows.fields for each in range(rows.copies)]
        return [*enumerate(copies[part * COPIES : (part + 1) * COPIES])]

    def _inline_asm(
        self, assembly: Assembly, name: str, arguments: list[str], dtype: torch.dtype
    ) -> list[str]:
        return list(self.dialect.inline_asm(assembly, [name], arguments, dtype))


def _allocate(memory: int) -> Assembly:
    """The address."""
    lines = [f".shared .align {ALIGNMENT} .b8 listed[{memory}];", "mov.u32 $0, listed;"]
    return assembly(lines, "none", 0, bits=32, is_pure=False, pack=1)


def _store() -> Assembly:
    """Of four words, from the address of the first."""
    lines = ["st.shared.v4.b32 [$4], {$8, $9, $10, $11};"]
    lines += [f"mov.u32 ${i}, 0;" for i in range(VECTOR)]
    return assembly(lines, "none", 2 * VECTOR, bits=32, is_pure=False, pack=VECTOR)


def _load(columns: int, dtype: torch.dtype) -> Assembly:
    """Of neighbouring columns of a k, from the address of the first."""
    count = columns * dtype.itemsize // WORD
    targets = ", ".join(f"${i}" for i in range(count))
    kind, target = (f"v{count}.b32", f"{{{targets}}}") if count > 1 else ("b32", targets)
    line = f"ld.shared.{kind} {target}, [${count}];"
    return assembly([line], "none", columns, bits=8 * dtype.itemsize, pack=columns)
