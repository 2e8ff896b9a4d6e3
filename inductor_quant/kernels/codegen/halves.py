"""Nibbles that are the halves of bytes: which digit chooses the half, and where the bytes are.

All packed int4 layouts that we know are of this kind: GPTQ's, AWQ's and Marlin's words of eight,
pairs in a byte. Both halves of a byte are unpacked at once, and what a thread loads in one piece it
also unpacks, in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from inductor_quant.kernels.codegen.base import Codegen, WeightTile
from inductor_quant.kernels.codegen.dialect import Dim
from inductor_quant.kernels.codegen.statements import Statements, Value
from inductor_quant.kernels.codegen.unpack_ptx import unpack_halves
from inductor_quant.kernels.problem import Weight
from inductor_quant.spec.weight_format import AffineIndex, Field, WeightFormat

NIBBLE = 4
_BYTES = {torch.uint8: 1, torch.int8: 1, torch.int32: 4}  # of a word


@dataclasses.dataclass(frozen=True)
class Halves:
    """``W[k, n]`` is a half of the byte that ``format`` has at k and n without the digit that
    chooses the half, 1 the upper one.

    format  of the bytes: K or N is half that of W. ``dim`` more than their tensor has: where a word
            has several, the last index is the byte's in it
    axis    that of the digit
    below   the place value of the digit
    """

    format: WeightFormat
    axis: str
    below: int
    bytes_of_word: int


class HalvesCodegen(Codegen):
    """Loads the bytes of a tile, and unpacks both halves of each."""

    def __init__(self, tile: WeightTile, halves: Halves) -> None:
        super().__init__(tile)
        self.code, self.halves, self.format = tile.weight.format.code, halves, halves.format
        self.k, self.n = self.format.shape
        self.sources = [f"bytes{i}" for i in range(len(self.dtypes))]
        self.whole = self.block_k, self.block_n
        if halves.axis == "k":
            self.block_k //= 2
        else:
            self.block_n //= 2

    @classmethod
    def of(cls, tile: WeightTile) -> HalvesCodegen | None:
        """None: the weight has another layout, or a tile less than both halves of a byte."""
        halves = halves_of(tile.weight)
        if halves is None:
            return None
        block = tile.config.block_k if halves.axis == "k" else tile.config.block_n
        return None if block % (2 * halves.below) else cls(tile, halves)

    def origin(self, axis: str) -> str:
        if axis == "n":
            return f"(pid_n * {self.block_n}).to(tl.int32)"
        return "k // 2" if self.halves.axis == "k" else "k"

    def nibbles(self, of: Statements, bias: int = 0) -> str:
        """The variable with the nibbles of the tile [BLOCK_K, BLOCK_N], their sign bits flipped if
        they have one, plus ``bias``: int8. The statements are added to ``of``."""
        axis, below, count = self.halves.axis, self.halves.below, self.halves.bytes_of_word
        field, word = self.format.element, f"W{self.code.source}"

        def stride(_: str, dim: int) -> str:
            if count == 1:
                return of.stride(word, dim)
            return "1" if dim == len(field.index) - 1 else f"{of.stride(word, dim)} * {count}"

        out = Statements(self, stride, of.size, tag="h")
        pointer, rows, columns = out.pointer(field)
        k, n = self.block_k, self.block_n
        byte = out.widen(Value(out.assign("w", f"tl.load({pointer})"), rows, columns), k, n).code
        if (rows, columns) != (k, n):
            byte = out.assign("w", f"tl.broadcast_to({byte}, [{k}, {n}])")
        assembly = unpack_halves(is_flipped=self.code.signed, bias=bias)
        out.lines += self.dialect.inline_asm(assembly, ["low", "high"], [byte], torch.int8)
        half: Dim = ("half", 2)
        dims: dict[str, list[Dim]] = {"k": [("k", k)], "n": [("n", n)]}
        dims[axis] = [(axis, self.block(axis) // below), ("below", below)]
        before = [*dims["k"], *dims["n"], half]
        dims[axis].insert(1, half)
        after = [*dims["k"], *dims["n"]]
        tile = self.dialect.reordered("tl.join(low, high)", before, after, str([*self.whole]))
        of.lines += [
            f"bytes{self.code.source} = {word}.to(tl.pointer_type(tl.uint8), bitcast=True)",
            *out.lines,
            f"nibbles = {tile}",
        ]
        return "nibbles"


@dataclasses.dataclass(frozen=True)
class _Bit:
    """A digit, or one bit of it: ``digit // unit % radix``."""

    digit: str
    unit: int
    radix: int


def halves_of(weight: Weight) -> Halves | None:
    """How the nibbles of ``weight`` are the halves of bytes; None: they are not."""
    format, code = weight.format, weight.format.code
    count = _BYTES.get(weight.tensors[code.source].dtype)
    is_plain = not (code.wrap or code.size or code.minus or code.high or code.float8)
    if count is None or code.width != NIBBLE or not is_plain or format.e:
        return None
    if any(index.is_data for index in (*code.index, code.offset)):
        return None
    bits = {axis: list(_bits(format, axis, code.offset.digits)) for axis in "kn"}
    every = [*bits["k"], *bits["n"]]
    offset = _linear(code.offset, every, format)
    indices = [_linear(index, every, format) for index in code.index]
    if offset is None or None in indices:
        return None
    first, steps = offset
    chosen = [bit for bit, step in steps.items() if step % 8]
    if len(chosen) != 1 or steps[chosen[0]] != NIBBLE or first % 8 or chosen[0].radix != 2:
        return None
    [half] = chosen
    of_word = {bit: step // 8 for bit, step in steps.items() if bit != half}
    if count == 1 and (first or any(of_word.values())):
        return None
    if any(found is not None and found[1].get(half) for found in indices):
        return None
    indices += [(first // 8, of_word)] if count > 1 else []
    axis = half.digit[0]
    at = bits[axis].index(half)
    below = 1
    for bit in bits[axis][at + 1 :]:
        below *= bit.radix
    bits[axis].remove(half)
    names = {bit: f"{a}{i}" for a in "kn" for i, bit in enumerate(bits[a])}
    index = tuple(
        AffineIndex(start, tuple((names[bit], step) for bit, step in terms.items() if step))
        for start, terms in filter(None, indices)
    )
    radices = {a: tuple(bit.radix for bit in bits[a]) or (1,) for a in "kn"}
    bytes_ = WeightFormat(radices["k"], radices["n"], Field(code.source, index))
    return Halves(bytes_, axis, below, count)


def _bits(format: WeightFormat, axis: str, split: frozenset[str]) -> Iterator[_Bit]:
    """The digits of an axis, most significant first, those of ``split`` as bits."""
    for i, radix in enumerate(format.radices(axis)):
        name = f"{axis}{i}"
        if name not in split or radix & (radix - 1):
            yield _Bit(name, 1, radix)
            continue
        for place in reversed(range(radix.bit_length() - 1)):
            yield _Bit(name, 1 << place, 2)


def _linear(
    index: AffineIndex, bits: list[_Bit], format: WeightFormat
) -> tuple[int, dict[_Bit, int]] | None:
    """(constant, coefficient of each bit) of an index; None: it is not linear in them."""
    steps = dict.fromkeys(bits, 0)
    start = index.const
    for name, coef in index.linear:
        for bit in bits:
            if bit.digit == name:
                steps[bit] += coef * bit.unit
    for name, table in index.tables:
        own = [bit for bit in bits if bit.digit == name]
        start += table[0]
        found = {bit: table[bit.unit] - table[0] if bit.radix > 1 else 0 for bit in own}
        for value in range(format.radix(name)):
            total = sum(step * (value // bit.unit % bit.radix) for bit, step in found.items())
            if total != table[value] - table[0]:
                return None
        for bit, step in found.items():
            steps[bit] += step
    return start, steps
