"""Programs whose numbers consist of several fields, and whose scales are packed themselves.

``W = (code - zero) * scale - minimum``. Each part is written to the graph and, apart from that,
read from the stored tensors by a formula over positions, so that the two check each other.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from tests.support.programs import data
from tests.support.programs.axes import Axes, draw, draw_order, draw_unpacking
from tests.support.programs.builder import Builder, aten
from tests.support.programs.data import Data
from tests.support.programs.dequantization import Program
from tests.support.programs.unpacking import Packing, Unpacker

f32, i32, i64, u8 = torch.float32, torch.int32, torch.int64, torch.uint8
# of the fields of a number, lowest first
WIDTHS = ((4, 1), (4, 2), (2, 1), (2, 2), (4, 4), (1, 2), (4, 2, 1), (1, 1, 1), (2, 4, 2))
PLACES = ("tensors", "tensors", "word", "block")
CROSSING = ((3, 8), (3, 32), (5, 8), (5, 16), (6, 8), (6, 32), (7, 8), (3, 16))  # bits, of a word
SCALES = ("plain", "packed", "joined", "crossing", "nested", "exponent", "e4m3", "double")
ZEROS = ("none", "none", "constant", "plain", "packed", "minimum", "packed minimum")
WORD_TYPES = {8: (u8,), 16: (torch.int16,), 32: (i32,)}


@dataclasses.dataclass(frozen=True)
class Fields:
    """What was drawn. ``k``, ``n``: of W; ``output``: the order of the dimensions of the result."""

    k: int
    n: int
    output: str
    group: int
    place: str
    widths: tuple[int, ...]
    scale: str
    zero: str
    result: str

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))


# The value at each position, int64 or fp64, from the stored tensors.
Formula = Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclasses.dataclass
class Part:
    """A node, and the formula of its value."""

    node: fx.Node
    formula: Formula

    def then(self, node: fx.Node, formula: Callable[[Any], Any]) -> Part:
        return Part(node, lambda stored: formula(self.formula(stored)))


def draw_fields(rng: random.Random) -> Fields:
    place = rng.choice((*PLACES, "crossing", "crossing", "crossing"))
    widths = rng.choice(WIDTHS)
    if place == "crossing":
        widths = (rng.choice(CROSSING)[0],)
    return Fields(
        k=rng.choice((128, 256)),
        n=rng.choice((32, 64)),
        output=rng.choice(("KN", "NK")),
        group=rng.choice((16, 32, 64)),
        place=place,
        widths=widths,
        scale=rng.choice(SCALES),
        zero=rng.choice(ZEROS),
        result=rng.choice(("float32", "bfloat16", "float16")),
    )


class FieldWriter:
    """Writes one program, in the order of dimensions of its result."""

    def __init__(self, drawn: Fields, rng: random.Random) -> None:
        self.drawn, self.rng, self.b = drawn, rng, Builder(rng)
        self.numbers = np.random.default_rng(rng.getrandbits(32))
        self.data = Data()
        self.k_dim = drawn.output.index("K")
        self.has_order = [False, False]  # along each dimension, of something that is no sum

    def write(self) -> Part:
        """W."""
        return self.scaled(self.codes(), sum(self.drawn.widths))

    def shape(self, group: int = 1) -> list[int]:
        k, n = self.drawn.k // group, self.drawn.n
        return [k, n] if self.k_dim == 0 else [n, k]

    def input(self, fill: data.Fill) -> tuple[str, fx.Node]:
        name = f"stored{len(self.data.values)}"
        return name, self.b.input(name, self.data.add(self.numbers, name, fill))

    def stored(self, fill: data.Fill) -> Part:
        name, node = self.input(fill)
        return Part(node, lambda stored: stored[name])

    # ---- integers

    def codes(self) -> Part:
        """The numbers [K, N] or [N, K]."""
        drawn = self.drawn
        if drawn.place == "crossing":
            return self.crossing(self.shape(), drawn.widths[0])
        return self.joined(self.fields(self.shape(), drawn.widths, drawn.place), drawn.widths)

    def fields(self, shape: list[int], widths: tuple[int, ...], place: str) -> list[Part]:
        """A field of each number for each of ``widths``."""
        dim = self.rng.randrange(2)
        if place == "word":
            return self.of_one_word(shape, dim, widths)
        if place == "block":
            return self.of_one_block(shape, widths)
        return [self.shard(shape, self.rng.randrange(2), width) for width in widths]

    def shard(self, shape: list[int], dim: int, width: int) -> Part:
        """Fields of a tensor of their own."""
        bits = self.rng.choice((8, 8, 16, 32))
        count = 1 << (min(bits // width, shape[dim]).bit_length() - 1)
        words = list(shape)
        words[dim] //= count
        stored = self.stored(data.words(tuple(words), self.rng.choice(WORD_TYPES[bits])))
        order, slots = draw_order(self.rng, count)
        if order in ("interleaved", "random"):
            has_room = count < shape[dim] and not self.has_order[dim]
            slots = slots if has_room else tuple(range(count))
            self.has_order[dim] = True
        return self.unpacked(stored, dim, Packing(width, bits, slots, self.is_split(), dim, False))

    def is_split(self) -> bool:
        return self.rng.random() < 0.5

    def of_one_word(self, shape: list[int], dim: int, widths: tuple[int, ...]) -> list[Part]:
        """All fields of a number in one word, those of one width together."""
        bits, count = 32, 4
        while 2 * count * sum(widths) <= bits:
            count *= 2
        dim = 1 - dim if shape[dim] % count else dim
        words = list(shape)
        words[dim] //= count
        stored = self.stored(data.words(tuple(words), i32))
        parts, used, is_split = [], 0, self.is_split()
        for width in widths:
            first = -(-used // width)
            slots = tuple(range(first, first + count))
            used = width * (first + count)
            if used > bits:  # no place for all of them: from a tensor of their own
                parts.append(self.shard(shape, dim, width))
                continue
            parts.append(
                self.unpacked(stored, dim, Packing(width, bits, slots, is_split, dim, False))
            )
        return parts

    def of_one_block(self, shape: list[int], widths: tuple[int, ...]) -> list[Part]:
        """Blocks of bytes that hold the fields of one width after those of another."""
        size = min(shape[1], self.rng.choice((32, 64)))
        counts = [size * width // 8 for width in widths]
        rows, length = shape
        blocks = self.stored(data.words((rows, length // size, sum(counts)), u8))
        parts, first, b = [], 0, self.b
        for width, count in zip(widths, counts, strict=True):
            last = first + count
            node = b.reshape(b.slice(blocks.node, 2, first, last), [rows, length * width // 8])
            words = blocks.then(
                node, lambda x, first=first, last=last: x[:, :, first:last].flatten(1)
            )
            slots = tuple(range(8 // width))
            parts.append(self.unpacked(words, 1, Packing(width, 8, slots, False, 1, False)))
            first = last
        return parts

    def unpacked(self, words: Part, dim: int, packing: Packing) -> Part:
        """The fields of ``words``."""
        b, bits, count = self.b, packing.bits, packing.fields
        dtype = b.dtype(words.node)
        impossible = {"none"}
        if sorted(packing.slots) != list(range(count)):
            impossible |= {"index", "index flat", "bytes"}
        if count * bits != packing.word_bits:
            impossible |= {"bytes"}
        if b.shape(words.node)[dim] % 2:
            impossible |= {"strided"}
        assembly = extraction = "none"
        while assembly in impossible or (bits == 1 and extraction.startswith("floor-div")):
            assembly, extraction, shifts = draw_unpacking(
                *(self.rng, "u4", str(dtype)[6:], "KN"[dim], count, "random", "KN", bits)
            )
        axes: Axes = dataclasses.replace(
            draw(self.rng),
            assembly=assembly,
            extraction=extraction,
            shifts=shifts,
            cast="int",
            sign="-",
        )

        def table(name: str, value: torch.Tensor) -> fx.Node:
            return self.b.constant(value)

        node = Unpacker(b, axes, packing, table).unpack(words.node)
        size = b.shape(node)[dim]
        at = torch.arange(size)
        word, slot = at // count, at % count
        if packing.is_split:
            word, slot = at % (size // count), at // (size // count)
        offset = (torch.tensor(packing.slots) * bits)[slot]
        offset = offset[:, None] if dim == 0 else offset

        def formula(x: torch.Tensor) -> torch.Tensor:
            return x.long().index_select(dim, word) >> offset & (1 << bits) - 1

        return words.then(node, formula)

    def joined(self, parts: list[Part], widths: tuple[int, ...]) -> Part:
        """The number of these fields, the lowest first."""
        b, rng = self.b, self.rng
        is_narrow = sum(widths) == 8 or rng.random() < 0.4
        dtype = u8 if is_narrow else rng.choice((i32, i64, torch.int16))
        has_multiplications, has_sums = rng.random() < 0.3, rng.random() < 0.4
        nodes, place = [], 0
        for part, width in zip(parts, widths, strict=True):
            node = b.cast(part.node, dtype)
            if place:
                node = b.mul(node, 1 << place) if has_multiplications else b.shl(node, place)
            nodes.append(node)
            place += width
        rng.shuffle(nodes)
        found = nodes[0]
        for node in nodes[1:]:
            found = b.add(found, node) if has_sums else b.call(aten.bitwise_or.Tensor, found, node)

        def formula(stored: dict[str, torch.Tensor]) -> torch.Tensor:
            total, place = torch.zeros((), dtype=i64), 0
            for part, width in zip(parts, widths, strict=True):
                total = total + part.formula(stored) * 2**place
                place += width
            return total

        return Part(found, formula)

    def crossing(self, shape: list[int], bits: int) -> Part:
        """Numbers that follow each other without a gap, over the ends of words."""
        b, rng = self.b, self.rng
        size = rng.choice([word for width, word in CROSSING if width == bits])
        dim = rng.randrange(2)
        numbers = int(np.lcm(bits, size)) // bits
        if shape[dim] % numbers or shape[dim] == numbers:
            dim = 1 - dim
        self.has_order[dim] = True
        count = numbers * bits // size
        words = list(shape)
        words[dim : dim + 1] = [shape[dim] // numbers, count]
        is_apart = rng.random() < 0.4  # the words of a period apart
        if is_apart:
            words[dim : dim + 2] = words[dim : dim + 2][::-1]
        flat = list(words)
        flat[dim : dim + 2] = [words[dim] * words[dim + 1]]
        stored = self.stored(data.words(tuple(flat), rng.choice(WORD_TYPES[size])))
        split = b.reshape(stored.node, words)
        word_dim = dim if is_apart else dim + 1
        each = [b.call(aten.select.int, split, word_dim, i) for i in range(count)]
        if rng.random() < 0.5 or size == 16:
            each = [b.cast(node, i32) for node in each]
        masks_last = rng.random() < 0.5 and b.dtype(each[0]) == u8
        fields = [self.crossed(each, i * bits, bits, size, masks_last) for i in range(numbers)]
        node = b.reshape(b.stack(fields, dim + 1), shape)

        def formula(x: torch.Tensor) -> torch.Tensor:
            x = x.long().reshape(words).movedim(word_dim, -1) & (1 << size) - 1
            bit = torch.arange(size)
            every = (x[..., None] >> bit & 1).flatten(-2).unflatten(-1, (numbers, bits))
            found = (every << torch.arange(bits)).sum(-1)
            return found.movedim(-1, dim + 1).reshape(shape)

        return stored.then(node, formula)

    def crossed(
        self, words: list[fx.Node], at: int, bits: int, size: int, masks_last: bool
    ) -> fx.Node:
        """``bits`` bits from bit ``at`` of a sequence of words."""
        b, mask = self.b, (1 << bits) - 1
        word, offset = divmod(at, size)
        low = b.shr(words[word], offset) if offset else words[word]
        inside = size - offset
        if inside >= bits:
            return b.mask(low, mask)
        if masks_last:
            high = b.shl(words[word + 1], inside)
            return b.mask(b.call(aten.bitwise_or.Tensor, low, high), mask)
        low = b.mask(low, (1 << inside) - 1)
        high = b.shl(b.mask(words[word + 1], mask >> inside), inside)
        if self.rng.random() < 0.4:
            return b.add(low, high)
        return b.call(aten.bitwise_or.Tensor, low, high)

    # ---- scales and zero points

    def scaled(self, codes: Part, bits: int) -> Part:
        b, zero, rng = self.b, self.drawn.zero, self.rng
        x = codes
        if zero == "constant":
            number = 1 << (bits - 1)
            dtype = rng.choice((f32, i32, torch.int16))
            cast = b.cast(x.node, dtype)
            x = x.then(b.sub(cast, number), lambda v: v - number)
        x = x.then(b.cast(x.node, f32), lambda v: v.double())
        if zero in ("plain", "packed"):
            x = self.combined(x, self.spread(self.zeros(bits)), b.sub, torch.sub)
        scale = self.spread(self.scales(self.drawn.scale))
        x = self.combined(x, scale, b.mul, torch.mul)
        if zero.endswith("minimum"):
            least = self.scales("packed" if zero.startswith("packed") else "plain")
            x = self.combined(x, self.spread(least), b.sub, torch.sub)
        dtype = getattr(torch, self.drawn.result)
        return x.then(b.cast(x.node, dtype), lambda v: v.to(dtype))

    def combined(self, x: Part, y: Part, write: Any, compute: Any) -> Part:
        node = write(x.node, self.b.cast(y.node, f32))
        return Part(node, lambda stored: compute(x.formula(stored), y.formula(stored).double()))

    def zeros(self, bits: int) -> Part:
        shape = self.shape(self.drawn.group)
        if self.drawn.zero == "plain":
            return self.stored(data.floats(tuple(shape), f32, 0, (1 << bits) - 1, 1.0))
        return self.small_integers(shape, self.rng.choice(("packed", "joined", "crossing")))

    def small_integers(self, shape: list[int], kind: str) -> Part:
        """One for each group, of 4 to 6 bits."""
        if kind == "packed":
            return self.shard(shape, self.rng.randrange(2), 4)
        if kind == "joined":
            place = self.rng.choice(("tensors", "word"))
            return self.joined(self.fields(shape, (4, 2), place), (4, 2))
        return self.crossing(shape, 6)

    def scales(self, kind: str) -> Part:
        """[groups of K, N], or transposed."""
        b, rng = self.b, self.rng
        shape = self.shape(self.drawn.group)
        whole = tuple(shape)
        if kind == "plain":
            return self.power(whole, rng.choice((f32, torch.float16, torch.bfloat16)))
        if kind == "exponent":
            return self.exponents(whole)
        if kind == "e4m3":
            stored = self.stored(data.floats8(whole, torch.float8_e4m3fn, torch.float8_e4m3fn))
            x = stored.then(b.cast(stored.node, f32), lambda v: v.double())
            return self.times(x, self.power((), f32))
        if kind in ("nested", "double"):
            dtype = rng.choice((torch.int8, u8))
            x = self.stored(data.words(whole, dtype))
        else:
            x = self.small_integers(shape, kind)
        x = x.then(b.cast(x.node, f32), lambda v: v.double())
        along_n = [1, 1]
        along_n[1 - self.k_dim] = self.drawn.n
        found = self.times(x, self.power(tuple(rng.choice((along_n, [1, 1], shape))), f32))
        if kind == "double":
            found = found.then(b.add(found.node, 0.5), lambda v: v + 0.5)
        return found

    def power(self, shape: tuple[int, ...], dtype: torch.dtype) -> Part:
        return self.stored(data.scales(shape, dtype, (-3, 0), True))

    def times(self, x: Part, y: Part) -> Part:
        return self.combined(x, y, self.b.mul, torch.mul)

    def exponents(self, shape: tuple[int, ...]) -> Part:
        """e8m0: a power of two for each group."""
        b, way = self.b, self.rng.choice(("exp2", "ldexp", "bits", "pow"))
        stored = self.stored(data.integers(shape, u8, 120, 130))
        if way == "bits":
            bits = b.shl(b.cast(stored.node, i32), 23)
            node = b.call(aten.view.dtype, bits, f32)
        elif way == "ldexp":
            exponents = b.sub(b.cast(stored.node, i32), 127)
            node = b.call(aten.ldexp.Tensor, b.full(shape, 1.0, f32), exponents)
        else:
            exponents = b.sub(b.cast(stored.node, f32), 127.0)
            powers = (aten.exp2.default, exponents), (aten.pow.Scalar, 2.0, exponents)
            node = b.call(*powers[way == "pow"])
        return stored.then(node, lambda v: 2.0 ** (v.double() - 127))

    def spread(self, x: Part) -> Part:
        """A value for each group, as one for each number."""
        b, dim, times = self.b, self.k_dim, self.drawn.group
        shape = b.shape(x.node)
        wide = b.unsqueeze(x.node, dim + 1)
        wide = b.expand(wide, [*shape[: dim + 1], times, *shape[dim + 1 :]])
        shape[dim] *= times
        node = b.reshape(b.contiguous(wide) if self.rng.random() < 0.5 else wide, shape)
        return x.then(node, lambda v: v.repeat_interleave(times, dim))


def program_of(writer: FieldWriter, result: Part, mutation: str = "") -> tuple[Program, Formula]:
    module = writer.b.finish(result.node)
    made = Program(writer.drawn, module, writer.data, {}, {}, writer.b.values, mutation)  # type: ignore[arg-type]
    return made, result.formula


def draw_field_program(seed: object) -> tuple[Program, Formula]:
    """The program of a seed, and the formula of its W in the order of its result."""
    rng = random.Random(f"fields/{seed}")
    writer = FieldWriter(draw_fields(rng), rng)
    return program_of(writer, writer.write())
