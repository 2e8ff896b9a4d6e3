"""The packed words of a tile as a box of a matrix, for a TMA descriptor.

Whatever the shape of the packed tensor, its words are a matrix of ``pitch`` columns if the strides
of the tile's digits are 1, 2, 4, ... words and then ``pitch`` times 1, 2, 4, ... A tile of columns
of both halves of W is two boxes, of the same threads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from inductor_quant.kernels.codegen.dialect import Dim
from inductor_quant.kernels.codegen.digits.tile import TileDigit, TilePlan, word_strides
from inductor_quant.kernels.codegen.gluon_layout import Basis, Layout
from inductor_quant.kernels.problem import Weight
from inductor_quant.kernels.weight_only.rules import ALIGNMENT
from inductor_quant.spec.weight_format import WeightFormat

MOST = 256  # rows or columns of a box
RUN = 32  # columns of a box that is contiguous


@dataclasses.dataclass(frozen=True)
class WordBox:
    """
    height, width  of the matrix, in words; what lies beyond reads as 0
    pitch          words from row to row
    rows, columns  of the box
    strides        words between the neighbours of each digit
    bits           (axis of the plan's digits, bit) of each bit of a row and of a column, low first
    apart, other   words to a second box, 0: there is none; the bit that chooses it
    """

    height: int
    width: int
    pitch: int
    rows: int
    columns: int
    strides: dict[str, int]
    bits: tuple[tuple[int, int], ...]
    layout: Layout
    apart: int = 0
    other: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        """The boxes of a tile."""
        return 2 if self.apart else 1

    def is_followed(self, format: WeightFormat, block_k: int, count: int) -> bool:
        """Whether the rows of ``count`` neighbouring K iterations follow each other in memory: TMA
        takes as long for 32 bytes of a row as for 128."""
        are_neighbours = all(
            self.strides[name] * block_k == self.columns * format.weight_of(name)
            for name in format.digits("k")
            if self.strides[name] and format.weight_of(name) * format.radix(name) > block_k
        )
        return are_neighbours and math.prod(format.k) % (count * block_k) == 0

    def first(self, digits: Sequence[TileDigit]) -> str:
        """The first word of a tile, from the first values of its digits."""
        terms = [
            f"first_{digit.name} * {self.strides[digit.name]}"
            for digit in digits
            if digit.outer > 1 and self.strides[digit.name]
        ]
        return " + ".join(terms) or "0"


def read_order(plan: TilePlan, box: WordBox) -> tuple[list[Dim], list[Dim], str]:
    """The bits of the words that a thread reads of a box, as they are there and as a tile has them;
    the tile's shape."""
    named: dict[tuple[int, int], Dim] = {bit: (f"{bit}", 2) for bit in box.bits}
    count = box.rows.bit_length() - 1
    dims = [named[bit] for bit in (*box.bits[:count][::-1], *box.bits[count:][::-1])]
    if box.other is not None:
        dims.append(named.setdefault(box.other, ("other", 2)))
    counts = [range(digit.inner.bit_length() - 1) for digit in plan.digits]
    own = [[(axis, bit) for bit in bits[::-1]] for axis, bits in enumerate(counts)]
    # Both words of a pair are given to the two values that are next to each other.
    if plan.pair is not None:
        own[-1], own[plan.pair] = own[plan.pair], []
    target = [named[bit] for bits in own for bit in bits if bit in named]
    return dims, target, str([1 << sum(bit in named for bit in bits) for bits in own])


def word_box(weight: Weight, plan: TilePlan) -> WordBox | None:
    """The box of a tile; None if its words are neither a box nor two."""
    found, half = _word_box(weight, plan, None), _bit_of_halves(plan)
    return found or (_word_box(weight, plan, half) if half is not None else None)


def _bit_of_halves(plan: TilePlan) -> tuple[int, int] | None:
    """That which chooses one of two columns of the same thread."""
    axis, digit = [(i, digit) for i, digit in enumerate(plan.digits) if digit.name[0] == "n"][-1]
    own = tuple(int(each == axis) for each in range(plan.rank))
    return (axis, 0) if digit.inner == 2 and own in plan.layout.registers else None


def _word_box(weight: Weight, plan: TilePlan, other: tuple[int, int] | None) -> WordBox | None:
    """``other``: the bit that chooses the box."""
    code = weight.format.code
    tensor = weight.tensors[code.source]
    found = word_strides(weight, code)
    if any(math.isinf(stride) for stride in found.values()) or None in tensor.shape:
        return None
    if any(index.const or index.is_data for index in code.index) or not tensor.is_aligned:
        return None
    strides = {name: int(stride) for name, stride in found.items()}
    apart: dict[tuple[int, int], int] = {}
    for axis, digit in enumerate(plan.digits):
        for bit in range(digit.inner.bit_length() - 1):
            apart[axis, bit] = strides.get(digit.digit, 0) * digit.place << bit
    to_other = 0 if other is None else apart.pop(other)
    if other is not None and not to_other:
        return None
    bits = sorted((stride, bit) for bit, stride in apart.items() if stride)
    columns = 1
    while bits[columns.bit_length() - 1 :] and bits[columns.bit_length() - 1][0] == columns:
        columns *= 2
    if columns == 1 << len(bits):  # the tile is one run of words
        columns = min(columns, RUN)
    of_rows = bits[columns.bit_length() - 1 :]
    itemsize = tensor.dtype.itemsize
    radix = weight.format.radix
    last_word = sum((radix(name) - 1) * stride for name, stride in strides.items())
    pitch = of_rows[0][0] if of_rows else last_word + 1
    if [stride for stride, _ in of_rows] != [pitch << i for i in range(len(of_rows))]:
        return None
    if any(stride > pitch and stride % pitch for stride in strides.values()):
        return None
    width = 1 + sum((radix(name) - 1) * step for name, step in strides.items() if step < pitch)
    if width > pitch:  # rows follow one another
        width = pitch
        if (last_word + 1) % pitch:
            return None
    rows = 1 << len(of_rows)
    if pitch * itemsize % ALIGNMENT or columns * itemsize % ALIGNMENT or max(rows, columns) > MOST:
        return None

    def basis(vector: Basis) -> Basis:
        axis = next((axis for axis, step in enumerate(vector) if step), 0)
        bit = axis, vector[axis].bit_length() - 1
        stride = apart.get(bit, 0) if any(vector) else 0
        return (stride // pitch, 0) if stride >= pitch else (0, stride)

    registers, lanes, warps = (
        tuple(map(basis, part))
        for part in (plan.layout.registers, plan.layout.lanes, plan.layout.warps)
    )
    if plan.pair is not None:  # a thread has both words
        own = tuple(int(axis == plan.pair) for axis in range(plan.rank))
        lanes = tuple(
            (0, 0) if b == own else of for b, of in zip(plan.layout.lanes, lanes, strict=True)
        )
        registers = (basis(own), *registers)
    layout = Layout(tuple(b for b in registers if any(b)), lanes, warps, (rows, columns))
    order = tuple(bit for _, bit in bits)
    order = (*order[columns.bit_length() - 1 :], *order[: columns.bit_length() - 1])
    height = last_word // pitch + 1
    return WordBox(
        *(height, width, pitch, rows, columns, strides, order, layout), apart=to_other, other=other
    )
