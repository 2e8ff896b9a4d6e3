"""Weights whose numbers lie several to a word: how they lie, and how a warp unpacks them.

``words_of`` reads that from a ``WeightFormat``; None: the format is not of this kind. ``unpack``
gives PTX that turns words into numbers of 16 bits, about one instruction each:

A field under the exponent of ``base`` is the number ``base + field``, so a mask and an exponent,
one ``lop3``, make a float of an integer. Two fields that lie 16 bits apart are made together: here
they are the same field of two words that ``prmt`` puts side by side. Which two does not matter,
so for Triton this is a function of one element, right in any layout.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
import triton

from inductor_quant.kernels.config import Weight
from inductor_quant.weight_format import Form, WeightFormat

# Neighbours along k that a thread holds of the first operand of ``tl.dot`` (``kWidth`` in TTGIR):
# read off the code that Triton 3.7 makes of this kernel, and that 3.8 and 3.9 make.
NEIGHBOURS = 4 if [int(part) for part in triton.__version__.split(".")[:2]] < [3, 8] else 2
# Word types, of 32 and 8 bits.
WORD_BITS = {torch.int32: 32, torch.uint8: 8}


@dataclasses.dataclass(frozen=True)
class Base:
    """A float whose last bits count in ones: ``bits`` with an integer below ``2**width`` in its
    place is ``value`` plus the integer."""

    value: int
    bits: int
    width: int


BASES = {
    torch.bfloat16: Base(128, 0x4300, 7),
    torch.float16: Base(1024, 0x6400, 10),
}


FMA_TYPES = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}
_ONES = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}


@dataclasses.dataclass(frozen=True)
class Words:
    """``W[k, n]`` is field ``k % count`` (or ``n % count``) of the word at ``k // count``, ``n``.

    axis     along which the numbers of one word lie
    bits     of a word
    offsets  of its numbers, in their order along the axis
    width    of a number, ``signed`` if it is one; ``add`` is added to it
    steps    (k, n, constant) for each dimension of the tensor: where one step of the word's row
             and of its column leads
    """

    axis: Literal["k", "n"]
    bits: int
    offsets: tuple[int, ...]
    width: int
    signed: bool
    add: int
    steps: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        return len(self.offsets)

    def bias(self, base: Base | None = None) -> int:
        """What an unpacked number has too much; what a field has, without ``base``."""
        above = base.value if base else 0
        return above + (1 << self.width - 1 if self.signed else 0) - self.add


def words_of(weight: Weight) -> Words | None:
    """How the numbers of ``weight`` lie in words, if each word is read at one place that is linear
    in k and n, and its numbers are neighbours along one axis."""
    format, element = weight.format, weight.format.element
    bits = WORD_BITS.get(weight.tensors[element.source].dtype)
    forms = (*element.index, element.offset)
    has_tables = any(form.tables for form in element.index)
    if bits is None or element != format.code or any(form.is_data for form in forms) or has_tables:
        return None
    if not 0 < element.width <= min(BASES[t].width for t in BASES) or element.float8:
        return None
    if element.wrap or element.size:
        return None
    chosen = {name for name in element.offset.digits if format.radix(name) > 1}
    axis = format.pack_axis
    if axis is None or not chosen or chosen != _last(format, axis, len(chosen)):
        return None
    names = sorted(chosen, key=lambda name: int(name[1:]))
    cases = itertools.product(*(range(format.radix(name)) for name in names))
    offsets = tuple(
        element.offset.value(
            dict.fromkeys(element.offset.digits, 0) | dict(zip(names, c, strict=True))
        )
        for c in cases
    )
    if len(offsets) & len(offsets) - 1 or not all(_fits(o, element.width, bits) for o in offsets):
        return None
    steps = [_steps(format, form, axis, chosen, len(offsets)) for form in element.index]
    if any(step is None for step in steps):
        return None
    return Words(
        axis,
        bits,
        offsets,
        element.width,
        element.signed,
        element.add,
        tuple(step for step in steps if step is not None),
    )


def _last(format: WeightFormat, axis: str, count: int) -> set[str]:
    """The last ``count`` digits of an axis, but for those of one value."""
    radices = format.k if axis == "k" else format.n
    names = [f"{axis}{i}" for i, radix in enumerate(radices) if radix > 1]
    return set(names[-count:])


def _fits(offset: int, width: int, bits: int) -> bool:
    """Whether a field lies within one half of a word, as ``unpack`` needs it."""
    return offset % 16 + width <= min(16, bits)


def _steps(
    format: WeightFormat, form: Form, axis: str, chosen: set[str], count: int
) -> tuple[int, int, int] | None:
    coefs = dict(form.linear)
    if form.const < 0 or chosen & coefs.keys():
        return None
    found = []
    for name, radices in (("k", format.k), ("n", format.n)):
        ratios = set()
        for i, radix in enumerate(radices):
            digit = f"{name}{i}"
            if radix > 1 and digit not in chosen:
                unit = format.weight_of(digit) // (count if name == axis else 1)
                coef = coefs.get(digit, 0)
                ratios.add(coef // unit if coef % unit == 0 else -1)
        if len(ratios) > 1 or min(ratios, default=0) < 0:
            return None
        found.append(ratios.pop() if ratios else 0)
    return found[0], found[1], form.const


# ------------------------------------------------------------------------------------------
# assembly


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Arguments of ``tl.inline_asm_elementwise``: one word in, ``count`` numbers out."""

    text: str
    constraints: str
    pack: int
    count: int

    def call(self, targets: Sequence[str], arguments: Sequence[str], x_type: str) -> list[str]:
        """Statements that assign what it makes of ``arguments``."""
        return [
            f"{', '.join(targets)} = tl.inline_asm_elementwise(",
            f'    """{self.text}""",',
            f'    "{self.constraints}",',
            f"    [{', '.join(arguments)}],",
            f"    dtype={f'({x_type},) * {self.count}' if self.count > 1 else x_type},",
            "    is_pure=True,",
            f"    pack={self.pack},",
            ")",
        ]


def unpack(words: Words, base: Base) -> Assembly:
    """``base + field`` of each field, in the order of ``words.offsets``; of a signed field
    ``base + field + 2**(width - 1)``."""
    pairs = 32 // words.bits // 2 or 1  # of words that come in one register; a register of 32: 2
    pack = 2 * pairs
    inputs = [f"${words.count * pairs + i}" for i in range(2 if words.bits == 32 else 1)]
    halves, lines = _halves(words.bits, inputs)
    mask = _twice((1 << words.width) - 1)
    exponent, table = _exponent(words, base)
    for number, offset in enumerate(words.offsets):
        for pair in range(pairs):
            source = halves[pair] if words.bits == 8 else halves[offset // 16]
            if offset % 16:
                lines.append(f"shr.u32 t, {source}, {offset % 16};")
                source = "t"
            target = f"${number * pairs + pair}"
            lines.append(f"lop3.b32 {target}, {source}, {mask:#010x}, {exponent:#010x}, {table};")
    text = "\n".join(["{", ".reg .b32 l, h, t;", *lines, "}"])
    outputs = ["=r"] * (words.count * pairs)
    return Assembly(text, ",".join([*outputs, *("r" for _ in inputs)]), pack, words.count)


def unpack_pair(words: Words, base: Base, pair: int) -> Assembly:
    """``base + field`` of the fields ``pair`` and ``pair + 4``, which lie 16 bits apart, of words
    of 32 bits with eight: two numbers, side by side, of a word that comes twice."""
    exponent, table = _exponent(words, base)
    offset, mask = words.offsets[pair], _twice((1 << words.width) - 1)
    lines = [f"shr.u32 t, $1, {offset};"] if offset else []
    source = "t" if offset else "$1"
    lines.append(f"lop3.b32 $0, {source}, {mask:#010x}, {exponent:#010x}, {table};")
    return Assembly("\n".join(["{", ".reg .b32 t;", *lines, "}"]), "=r,r,r", 2, 1)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A field in bits 0 to 3 or 4 to 7 of 16, and nothing beside it, is a float below the normal
    ones (bit 7 of a bf16 belongs to its exponent, but counts like those below): times the float
    ``times``, as bits, of the two places it is ``field / parts``."""

    times: tuple[int, int]
    parts: int


TINY = {
    torch.bfloat16: Tiny((0x7F00, 0x7D00), 64),
    torch.float16: Tiny((0x7800, 0x6800), 512),
}


def unpack_pair_shifted(words: Words, dtype: torch.dtype, pair: int) -> Assembly:
    """As ``unpack_pair``, but ``field / parts + b`` with ``TINY[dtype].parts``, of the word, twice,
    and b. The product takes the place of a shift: of four pairs two need one, and it is the same.

    On Hopper shifts and ``lop3`` run at half the rate of ``fma``, so they are what to save.
    """
    assert words.width == 4
    offset, place = divmod(words.offsets[pair], 8)
    place //= 4
    mask, times = _twice(0xF << 4 * place), _twice(TINY[dtype].times[place])
    lines = [f"shr.u32 t, $1, {8 * offset};"] if offset else []
    source = "t" if offset else "$1"
    if words.signed:
        turned = _twice(0x8 << 4 * place)
        lines.append(f"lop3.b32 t, {source}, {mask:#010x}, {turned:#010x}, 0x6a;")
    else:
        lines.append(f"and.b32 t, {source}, {mask:#010x};")
    lines += [f"mov.b32 times, {times:#010x};", f"fma.rn.{FMA_TYPES[dtype]} $0, t, times, $3;"]
    return Assembly("\n".join(["{", ".reg .b32 t, times;", *lines, "}"]), "=r,r,r,r", 2, 1)


def scale_and_shift(dtype: torch.dtype) -> Assembly:
    """``(a + b) * c`` of 16-bit floats, each operation rounded."""
    declared, operations = _scale_and_shift(dtype, "$1", "$2", "$3")
    text = "\n".join(["{", ".reg .b32 t, one, none;", *declared, *operations, "}"])
    return Assembly(text, "=r,r,r,r", 2, 1)


@dataclasses.dataclass(frozen=True)
class Half:
    """A field in its place in 16 bits, below those of ``exponent``: times the float ``times``, as
    bits too, it is ``base + field / parts``."""

    exponent: int
    times: int
    base: int
    parts: int


# Of the fields in bits 0 to 3 and 4 to 7. Bit 7 of a bf16 belongs to its exponent, but without any
# other bit there (2**-129 a one) it counts like those below; 2**127 times that is a quarter.
NIBBLES = {
    torch.bfloat16: (Half(0x4300, 0x3F80, 128, 1), Half(0, 0x7F00, 0, 4)),
    torch.float16: (Half(0x6400, 0x3C00, 1024, 1), Half(0x6400, 0x2C00, 64, 1)),
}


def dequantize_byte(words: Words, dtype: torch.dtype) -> Assembly:
    """``(base + field / parts + b) * c`` of the two neighbouring fields in one byte of a word, each
    with ``NIBBLES[dtype]`` of its own.

    Arguments: the word and, for each of the two numbers, what picks the byte (a selector of
    ``prmt``: 0x4040, and the byte's number twice), b and c. Two numbers that are neighbours along k
    must come together, the even one first: the caller's layout sees to that.

    c is ``parts`` times the scale: one of 2**126 and more, whose products with 4 and more are
    infinite in bf16 anyway, is infinite itself.
    """
    assert words.width == 4
    low, high = NIBBLES[dtype]
    kind = FMA_TYPES[dtype]
    turned, table = (0x80 << 16 | 0x8, "0x6a") if words.signed else (0, "0xea")
    exponent = (high.exponent << 16 | low.exponent) ^ turned
    lines = [
        *("{", ".reg .b32 t, times, none;"),
        f"mov.b32 times, {high.times << 16 | low.times:#010x};",
        "mov.b32 none, 0x80008000;",
        "prmt.b32 t, $1, 0, $3;",
        f"lop3.b32 t, t, 0x00f0000f, {exponent:#010x}, {table};",
        f"fma.rn.{kind} t, t, times, $5;",
        f"fma.rn.{kind} $0, t, $6, none;",
        "}",
    ]
    return Assembly("\n".join(lines), "=r,r,r,r,r,r,r", 2, 1)


def _scale_and_shift(dtype: torch.dtype, a: str, b: str, c: str) -> tuple[list[str], list[str]]:
    """Constants, and the operations that leave ``(a + b) * c`` in ``$0``."""
    kind, one = FMA_TYPES[dtype], _ONES[dtype]
    # by way of fma: before sm_90 there is no other arithmetic on bf16
    return (
        [f"mov.b32 one, {_twice(one):#010x};", "mov.b32 none, 0x80008000;"],
        [f"fma.rn.{kind} t, {a}, one, {b};", f"fma.rn.{kind} $0, t, {c}, none;"],
    )


def _exponent(words: Words, base: Base) -> tuple[int, str]:
    """What ``lop3`` puts over a masked field, and how: (a & b) | c, or with the sign bit turned
    over (a & b) ^ c."""
    exponent = _twice(base.bits)
    if not words.signed:
        return exponent, "0xea"
    return exponent ^ _twice(1 << words.width - 1), "0x6a"


def _halves(bits: int, inputs: list[str]) -> tuple[list[str], list[str]]:
    """Registers that hold 16 bits of two words each, and how they come about."""
    if bits == 32:  # the low halves of two words, the high halves
        first, second = inputs
        return ["l", "h"], [
            f"prmt.b32 l, {first}, {second}, 0x5410;",
            f"prmt.b32 h, {first}, {second}, 0x7632;",
        ]
    [word] = inputs  # four bytes, the first two and the last two
    return ["l", "h"], [f"prmt.b32 l, {word}, 0, 0x4140;", f"prmt.b32 h, {word}, 0, 0x4342;"]


def _twice(half: int) -> int:
    return half << 16 | half


# ------------------------------------------------------------------------------------------
# the order of a tile


Dim = tuple[str, int]  # a name and how many


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Orders of one tile's numbers, as lists of dimensions from slow to fast.

    The matrix instruction (``mma.sync`` with the weight as its first operand: 16 columns of W by 16
    of k, two of them in a row) hands each thread the numbers of certain k and n. Which k these are
    is free, as long as x has the same order; so is which n. So words are handed out first, and k
    and n follow: a thread unpacks whole words, and reads neighbours in 16 bytes at once. Only
    speed depends on what the compiler makes of it: where an operand is laid out in another order,
    the numbers pass through shared memory.

    k, n          as they count; every number of a word is a dimension
    rows, columns  of the tile of words, the contiguous one last
    k_mma, n_mma  as the operand has them
    fields        the numbers of one word
    """

    k: tuple[Dim, ...]
    n: tuple[Dim, ...]
    rows: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    k_mma: tuple[Dim, ...]
    n_mma: tuple[Dim, ...]
    fields: tuple[Dim, ...]

    @property
    def unpacked(self) -> tuple[Dim, ...]:
        """The words' dimensions, then those of their numbers as they are joined: lowest first."""
        return (*self.rows, *self.columns, *reversed(self.fields))


def tile_order(
    words: Words, *, block_k: int, block_n: int, warps: int, contiguous: str
) -> TileOrder | None:
    """The order of a tile whose words are contiguous in memory along ``contiguous``; None: there is
    none for this size."""
    along_k = words.axis == "k"
    r = block_k // (words.count if along_k else 1)
    c = block_n // (1 if along_k else words.count)
    fields = bits("f", words.count)
    vector = 16 * 8 // words.bits  # words in 16 bytes
    if contiguous == "n":
        vector = min(vector, c // (8 * warps))
        # Of what a thread unpacks together, a pair along k, and where the word has none four.
        low = bits("p", 2 if along_k else 4)
        high: tuple[Dim, ...] = () if along_k else (("h", 2),)
        of_k = (("r", r // _size((*low, *high, ("t", 4)))), *high, ("t", 4), *low)
        of_n = (*bits("c", c // max(1, 8 * warps * vector)), ("w", warps), ("g", 8))
        of_n = (*of_n, *bits("v", vector))
    else:
        vector = min(vector, r // 4)
        low = bits("p", vector)
        of_k = (("r", r // max(1, 4 * vector)), ("t", 4), *low)
        of_n = (*bits("c", c // (8 * warps)), ("w", warps), ("g", 8))
    k = (*of_k, *fields) if along_k else of_k
    n = of_n if along_k else (*of_n, *fields)
    # Two of k beside the pair, one of n that tells apart the halves of the instruction's 16.
    free_k = [dim for dim in k if dim not in (("p0", 2), ("t", 4))]
    free_n = [dim for dim in n if dim[0] not in ("w", "g")]
    twos = [dim for dim in free_k if dim[1] == 2][-2:]
    halves = [dim for dim in free_n if dim[1] == 2][-1:]
    if (_size(k), _size(n)) != (block_k, block_n) or ("p0", 2) not in k:
        return None
    if len(twos) < 2 or not halves:
        return None
    neighbours = (("t", 4), twos[1]) if NEIGHBOURS == 4 else (twos[1], ("t", 4))
    return TileOrder(
        k,
        n,
        *((of_k, of_n) if contiguous == "n" else (of_n, of_k)),
        k_mma=(*_without(free_k, twos), twos[0], *neighbours, ("p0", 2)),
        n_mma=(*_without(free_n, halves), ("w", warps), halves[0], ("g", 8)),
        fields=fields,
    )


def _without(dims: list[Dim], others: list[Dim]) -> tuple[Dim, ...]:
    return tuple(dim for dim in dims if dim not in others)


def bits(name: str, count: int) -> tuple[Dim, ...]:
    """Dimensions of two for a power of two, the highest first."""
    return tuple((f"{name}{i}", 2) for i in reversed(range(count.bit_length() - 1)))


def _size(dims: tuple[Dim, ...]) -> int:
    return math.prod(size for _, size in dims)
