"""The axes along which dequantization programs differ, and a seeded draw of them.

``draw`` gives ``Axes``: every choice that the program's author made, from the element type to the
spelling of a shift. Choices that exclude each other are settled in the order in which they are
drawn here, so that all that comes out is a valid program.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

# element: (bits, is it signed)
INTEGERS = {
    "u2": (2, False),
    "u3": (3, False),
    "u4": (4, False),
    "i4": (4, True),
    "u8": (8, False),
    "i8": (8, True),
}
FLOATS = ("e4m3", "e5m2")
TABLES = {"lut4": 2, "lut16": 4}
ELEMENTS = (*INTEGERS, *FLOATS, *TABLES, "i4 in i8")
WORDS = {"int32": 32, "uint8": 8, "int8": 8, "int16": 16, "int64": 64}

GROUPS = ("32", "64", "128", "channel", "tensor", "block 16", "block 128")
ZEROS = (
    *("none", "constant", "integer", "packed", "packed + 1", "packed + 1 wrapped"),
    *("float", "q*s - t", "q*s + t"),
)
SCALES = ("mul", "div", "reciprocal", "two factors", "exp2")
# int: subtracted as int32 or int16; int8: as int8; promoted: no cast, the scale's dtype wins
CASTS = ("before", "int", "int8", "promoted")
ASSEMBLIES = (
    *("expand", "strided", "index", "index flat", "bytes"),
    *("stack", "cat permute", "slice_scatter", "select_scatter"),
)
PER_SLICE = ("stack", "cat permute", "slice_scatter", "select_scatter")
EXTRACTIONS = (
    "shift, mask",
    "mask, shift",
    "shl, shr",
    "floor-div, remainder",
    "shift, cast, mask",
)
# The extractions whose shifts may be a graph input. With the others, arbitrary amounts would leave
# the format, and a recognizer cannot see the amounts.
EXTRACTIONS_BY_DATA = ("shift, mask", "shift, cast, mask")
ASSEMBLIES_BY_DATA = ("expand", "strided", "index")
SIGNS = ("xor, sub", "where", "int8 shl, shr", "sub twice the sign bit")
NOOPS = ("none", "clone", "mul 1", "slice", "lshift 0", "transposes", "casts")
FLOAT_TYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Axes:
    """The drawn values. ``-``: the choice does not exist in this program."""

    k: int
    n: int
    element: str
    word: str
    pack: str  # the axis that a word is packed along: K, N or -
    order: str
    slots: tuple[int, ...]  # the slot (offset / bits) of each field of a word
    layout: str  # adjacent: index = word * fields + field; split: field * words + word
    stored: str  # of the words: KN, NK, or 3-D with groups of K in front
    compute: str  # KN or NK: in which the weight is unpacked and scaled
    output: str  # of the result
    group: str
    group_axis: str
    zero: str
    scale: str
    scale_dtype: str
    compute_dtype: str
    output_dtype: str
    scale_cast: str  # explicit: to the compute dtype; implicit: by promotion
    cast: str
    act_order: str
    operands: str  # how scales and zeros are broadcast to the weight
    shifts: str  # the source of the shift amounts
    extraction: str
    sign: str
    assembly: str
    noop: str

    @property
    def bits(self) -> int:
        if self.element in TABLES:
            return TABLES[self.element]
        return INTEGERS.get(self.element, (8, True))[0]

    @property
    def is_signed(self) -> bool:
        return INTEGERS.get(self.element, (8, True))[1] if self.element not in TABLES else False

    @property
    def is_folded(self) -> bool:
        """Whether the zero is subtracted after the scale."""
        return self.zero in ("q*s - t", "q*s + t")

    @property
    def fields(self) -> int:
        """How many fields a word has."""
        return len(self.slots)

    @property
    def block(self) -> tuple[int, int]:
        """(rows along K, columns along N) that share a scale."""
        if self.group == "tensor":
            return self.k, self.n
        if self.group.startswith("block"):
            size = int(self.group.split()[1])
            return size, size
        along_k = self.k if self.group == "channel" and self.group_axis == "K" else None
        along_n = self.n if self.group == "channel" and self.group_axis == "N" else None
        if along_k or along_n:
            return along_k or 1, along_n or 1
        return (int(self.group), 1) if self.group_axis == "K" else (1, int(self.group))

    @property
    def groups(self) -> tuple[int, int]:
        """The shape of the scales: groups along K and along N."""
        return self.k // self.block[0], self.n // self.block[1]

    def strides(self, axis: str) -> set[int]:
        """The strides along ``axis`` of the digits that words and groups need."""
        size, block = (self.k, self.block[0]) if axis == "K" else (self.n, self.block[1])
        found = {1, block, size}
        if axis == self.pack:
            words = size // self.fields
            found.add(words if self.layout == "split" else self.fields)
            if self.assembly == "strided":
                found.add(2 if self.layout == "split" else 2 * self.fields)
        if self.zero.startswith("packed") and axis != self.group_axis:
            found.add(self.fields)
            if self.assembly == "strided" and size // self.fields % 2 == 0:
                found.add(2 * self.fields)
        return found

    @property
    def is_mixed_radix(self) -> bool:
        """Whether words, fields and groups are sums over digits of k and n.

        Fields of a weight that lie apart while those of its zero points are neighbours, in an order
        that is no sum either: then no digits serve both.
        """
        is_shuffled = self.layout == "split" and self.order in ("random", "interleaved")
        if self.pack == "N" and is_shuffled and self.zero.startswith("packed"):
            return False
        return all(is_chain(self.strides(axis)) for axis in "KN")

    def __str__(self) -> str:
        items = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return ", ".join(f"{name}={value}" for name, value in items if value != "-")


def is_chain(strides: set[int]) -> bool:
    """Whether each divides the next one."""
    ordered = sorted(strides)
    return all(b % a == 0 for a, b in pairwise(ordered))


HISTOGRAM_AXES = tuple(
    f.name for f in dataclasses.fields(Axes) if f.name not in ("k", "n", "slots")
)


def histogram(drawn: Iterable[Axes]) -> dict[str, Counter[str]]:
    """How often each value of each axis came up."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in HISTOGRAM_AXES}
    for axes in drawn:
        for name, counter in counts.items():
            counter[getattr(axes, name)] += 1
    return counts


def draw(rng: random.Random, *, is_mixed_radix: bool = True) -> Axes:
    """The axes of one program: of one whose words and groups nest, as those of all quantizers that
    we know do, or of one whose words straddle groups."""
    while True:
        axes = _drawn(rng)
        if axes.is_mixed_radix == is_mixed_radix:
            return axes


def _drawn(rng: random.Random) -> Axes:
    element = rng.choice((*ELEMENTS, "u4", "u4", "i4", "u3", "i8"))
    is_packed = element in INTEGERS or element in TABLES
    bits = INTEGERS.get(element, (TABLES.get(element, 8),))[0]
    word = _word(rng, element, bits)
    pack = rng.choice("KN") if is_packed and WORDS.get(word, 0) > bits else "-"
    fields = WORDS[word] // bits if pack != "-" else 1
    order, slots = draw_order(rng, fields)
    layout = rng.choice(("adjacent", "split")) if pack != "-" else "-"

    group = rng.choice((*GROUPS, "32", "64"))
    group_axis = rng.choice("KKN") if group in ("32", "64", "128", "channel") else "-"
    has_groups = group in ("32", "64", "128")
    compute = rng.choice(("KN", "NK"))
    zero = _zero(rng, element, group, group_axis, bits)
    cast = _cast(rng, element, zero, bits)
    scale = rng.choice(SCALES)
    act_order = "g_idx" if has_groups and group_axis == "K" and rng.random() < 0.5 else "-"
    k, n = _sizes(rng, group, group_axis, pack, fields, zero, bits)
    assembly, extraction, shifts = draw_unpacking(
        rng, element, word, pack, fields, order, compute, bits
    )
    if assembly == "strided" and (k if pack == "K" else n) // fields % 2:
        assembly = "expand"
    sign = "-"
    signed = INTEGERS.get(element, (0, False))[1]
    if signed and pack != "-" and extraction != "shl, shr":
        sign = rng.choice(("cast", "cast", "cast", *SIGNS)) if bits == 8 else rng.choice(SIGNS)

    scale_dtype = rng.choice(FLOAT_TYPES)
    # bf16 would round q*s -+ t of 8 bits
    exact_types = FLOAT_TYPES[:2] if bits == 8 and zero.startswith("q") else FLOAT_TYPES
    if scale_dtype not in exact_types:
        scale_dtype = "float32"
    compute_dtype = scale_dtype if cast == "promoted" else rng.choice(exact_types)
    is_flat = group in ("channel", "tensor")
    last = "K" if compute == "NK" else "N"
    ways = ["view", "repeat", "index"] + ["rows"] * (has_groups and group_axis == last)
    return Axes(
        k,
        n,
        element,
        word,
        pack,
        order,
        slots,
        layout,
        rng.choice(("KN", "NK", "3-D")),
        compute,
        rng.choice(("KN", "KN", "NK")),
        group,
        group_axis,
        zero,
        scale,
        scale_dtype,
        compute_dtype,
        rng.choice(exact_types),
        rng.choice(("explicit", "implicit")),
        cast,
        act_order,
        "index" if act_order != "-" else "broadcast" if is_flat else rng.choice(ways),
        shifts,
        extraction,
        sign,
        assembly,
        rng.choice(("none", *NOOPS)),
    )


def _word(rng: random.Random, element: str, bits: int) -> str:
    if element == "u3":
        return rng.choice(("int32", "int32", "int16", "uint8"))  # 10, 5 and 2 to a word
    if element in ("u8", "i8"):
        return rng.choice((BYTES[element], *_WIDE))
    if element in FLOATS:
        return rng.choice(("own", "uint8"))
    if element == "i4 in i8":
        return "int8"
    if element in TABLES and rng.random() < 0.2:
        return "uint8 each"  # one index a byte
    return rng.choice(("int32", *WORDS))


BYTES = {"u8": "uint8", "i8": "int8"}
_WIDE = ("int32", "int16", "int64")


def draw_order(rng: random.Random, fields: int) -> tuple[str, tuple[int, ...]]:
    if fields == 1:
        return "-", (0,)
    slots = list(range(fields))
    order = rng.choice(("sequential", "sequential", "reversed", "interleaved", "random"))
    if fields < 4 and order in ("interleaved", "random"):
        order = "reversed"
    if order == "reversed":
        slots.reverse()
    elif order == "interleaved":
        half = (fields + 1) // 2
        slots = slots[::2] + slots[1::2]
        if rng.random() < 0.5:  # the inverse: 0 4 1 5 2 6 3 7
            slots = sorted(range(fields), key=lambda j: (j % half, j // half))
    elif order == "random":
        rng.shuffle(slots)
    return order, tuple(slots)


def _zero(rng: random.Random, element: str, group: str, group_axis: str, bits: int) -> str:
    if element in FLOATS or element in TABLES:
        return "none"
    options = [zero for zero in ZEROS if not zero.startswith("packed")]
    if element in ("u2", "u3", "u4", "u8") and group_axis != "-":
        options += [zero for zero in ZEROS if zero.startswith("packed")] * 2
    return rng.choice(options)


def _cast(rng: random.Random, element: str, zero: str, bits: int) -> str:
    """Where integers become floats. No integer subtraction may wrap."""
    if element in FLOATS:
        return "before"
    if element in TABLES:
        return "-"
    if zero in ("none", "q*s - t", "q*s + t"):
        return rng.choice(("before", "promoted"))
    if zero == "float":
        return "before"
    # an int8 tensor may hold -128, and nothing says that an unpacked int4 is in range
    if bits < 8 and zero != "integer":
        return rng.choice((*CASTS, "int8"))
    return rng.choice(("before", "int", "promoted"))


def _sizes(
    rng: random.Random,
    group: str,
    group_axis: str,
    pack: str,
    fields: int,
    zero: str,
    bits: int,
) -> tuple[int, int]:
    """K and N: multiples of the fields of a word and of the groups."""
    step = {"K": 1, "N": 1}
    if pack != "-":
        step[pack] = fields
    if group.startswith("block"):
        size = int(group.split()[1])
        step = {axis: math.lcm(value, size) for axis, value in step.items()}
    elif group_axis != "-":
        if group != "channel":
            step[group_axis] = math.lcm(step[group_axis], int(group))
        if zero.startswith("packed"):  # the zeros are packed along the other axis
            other = "N" if group_axis == "K" else "K"
            step[other] = math.lcm(step[other], fields)
    sizes = {}
    for axis, (low, high) in {"K": (32, 256), "N": (16, 128)}.items():
        least = max(1, -(-low // step[axis]))
        most = max(least, high // step[axis])
        if step[axis] == 128 and axis == "N":
            least, most = 1, 2
        sizes[axis] = step[axis] * rng.randint(least, most)
    return sizes["K"], sizes["N"]


def draw_unpacking(
    rng: random.Random,
    element: str,
    word: str,
    pack: str,
    fields: int,
    order: str,
    compute: str,
    bits: int,
) -> tuple[str, str, str]:
    """(assembly, extraction, shifts)."""
    if pack == "-":
        return "-", "-", "-"
    signed = INTEGERS.get(element, (0, False))[1]
    has_bytes = bits in (2, 4, 8) and pack == compute[1] and word not in ("uint8", "int8")
    options = [way for way in ASSEMBLIES if way != "bytes" or has_bytes]
    if fields > 16:
        options = [way for way in options if way not in PER_SLICE]
    options += ["bytes"] * (2 * has_bytes)
    assembly = rng.choice(options)
    extractions = [way for way in EXTRACTIONS if way != "shl, shr"]
    if signed != (word == "uint8"):  # the last shift is arithmetic in the signed types
        extractions += ["shl, shr"] * (2 if signed else 1)
    if assembly == "bytes":
        extractions = ["shift, mask", "mask, shift", "floor-div, remainder"] if bits < 8 else ["-"]
    extraction = rng.choice(extractions)
    shifts = ["literal", "iota", "constant"]
    if extraction in EXTRACTIONS_BY_DATA and assembly in ASSEMBLIES_BY_DATA:
        shifts += ["input"] * 4
    if assembly == "bytes" and bits == 8:
        shifts = ["constant"] if order != "sequential" else ["-"]
    return assembly, extraction, rng.choice(shifts)
