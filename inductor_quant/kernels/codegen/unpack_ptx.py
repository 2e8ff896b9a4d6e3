"""PTX that turns packed weights into 16-bit floats, about one instruction per pair of values.

A field masked into the mantissa of ``Base`` is the float ``base + field``: one ``lop3`` makes a
float of an integer. Two fields that are 16 bits apart are unpacked together. ``unpack`` takes the
same field of two words, which ``prmt`` puts side by side; which two words does not matter, so for
Triton it is a function of one element and correct in every layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from inductor_quant.kernels.codegen.byte_layout import ByteLayout
from inductor_quant.kernels.codegen.packed_layout import BASES, Base, PackedLayout

FMA_TYPES = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}
# ``lop3`` tables: (a & b) | c, and (a & b) ^ c.
_OR, _XOR = "0xea", "0x6a"


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Arguments of ``tl.inline_asm_elementwise``: ``count`` outputs per element, ``pack`` elements
    at a time. ``is_pure``: it may be moved, and left out if no output is used."""

    text: str
    constraints: str
    pack: int
    count: int = 1
    is_pure: bool = True


# In 64 bits, one instruction with a sum. LLVM would shift by a power of two, which takes two.
MULTIPLY_WIDE = Assembly("mul.wide.u32 $0, $1, $2;", "=l,r,r", pack=1)
# (a & b) ^ c: without it ptxas makes two instructions of two constants.
MASK_AND_FLIP = Assembly(f"lop3.b32 $0, $1, $2, $3, {_XOR};", "=r,r,r,r", pack=1)


def assembly(
    lines: Sequence[str],
    registers: str,
    inputs: int,
    *,
    bits: int = 16,
    is_early: bool = False,
    is_pure: bool = True,
    **sizes: int,
) -> Assembly:
    """Of ``lines`` in a scope that declares ``registers``, each output (of values of ``bits``) and
    input one register. ``is_early``: outputs are written before all inputs are read."""
    text = "\n".join(["{", f".reg .b32 {registers};", *lines, "}"])
    outputs = sizes["pack"] * sizes.get("count", 1) * bits // 32
    output = "=&r" if is_early else "=r"
    clobbered = [] if is_pure else ["~{memory}"]
    constraints = ",".join([output] * outputs + ["r"] * inputs + clobbered)
    return Assembly(text, constraints, is_pure=is_pure, **sizes)


def hidden_zero() -> Assembly:
    """Zero that ptxas cannot fold. It makes a constant again for each instruction that takes it,
    unless it does not know it: then that stays in a register."""
    lines = ["mov.u32 a, %lanemask_lt;", "mov.u32 $0, %lanemask_eq;", "and.b32 $0, $0, a;"]
    return assembly(lines, "a", 0, bits=32, pack=1)


def product(dtype: torch.dtype) -> Assembly:
    """Of two values of ``dtype``, two at a time."""
    lines = ["mov.b32 none, 0x80008000;", f"fma.rn.{FMA_TYPES[dtype]} $0, $1, $2, none;"]
    return assembly(lines, "none", 2, pack=2)


def unpack(layout: PackedLayout | ByteLayout, base: Base) -> Assembly:
    """``base + field`` for each field, in the order of ``layout.offsets``; for a signed field
    ``base + field + 2**(width - 1)``."""
    is_byte = layout.bits == 8
    # The first two and the last two of four bytes; the low halves of two words and their high ones.
    pairs, selectors = (2, ("0x4140", "0x4342")) if is_byte else (1, ("0x5410", "0x7632"))
    first = layout.count * pairs
    second = "0" if is_byte else f"${first + 1}"
    lines = [
        f"prmt.b32 {half}, ${first}, {second}, {selector};"
        for half, selector in zip("lh", selectors, strict=True)
    ]
    for i, offset in enumerate(layout.offsets):
        for pair in range(pairs):
            half = "lh"[pair if is_byte else offset // 16]
            lines += _field(layout, base, f"${i * pairs + pair}", half, offset % 16)
    inputs = 1 if is_byte else 2
    return assembly(lines, "l, h, t", inputs, pack=2 * pairs, count=layout.count)


def unpack_pair(layout: PackedLayout, base: Base, pair: int) -> Assembly:
    """``base + field`` for the fields ``pair`` and ``pair + 4``, which are 16 bits apart, of an
    int32 with eight: two neighbouring outputs of a word that is given twice."""
    return assembly(_field(layout, base, "$0", "$1", layout.offsets[pair]), "t", 2, pack=2)


def _field(
    layout: PackedLayout | ByteLayout, base: Base, to: str, half: str, shift: int
) -> list[str]:
    """``base + field`` in both halves of ``to``, of the fields ``shift`` bits up in ``half``. The
    sign bit of a signed field is flipped."""
    lines = [f"shr.u32 t, {half}, {shift};"] if shift else []
    sign = 1 << layout.width - 1 if layout.signed else 0
    mask, exponent = _twice((1 << layout.width) - 1), _twice(base.bits ^ sign)
    table = _XOR if layout.signed else _OR
    source = "t" if shift else half
    return [*lines, f"lop3.b32 {to}, {source}, {mask:#010x}, {exponent:#010x}, {table};"]


@dataclasses.dataclass(frozen=True)
class Subnormal:
    """A field in bits 0-3 or 4-7 of 16 zero bits is a subnormal float. (Bit 7 of a bf16 belongs to
    the exponent, but counts like the bits below it.) Multiplied by the float ``factors``, as bits,
    for the two places, it is ``field / divisor``."""

    factors: tuple[int, int]
    divisor: int


SUBNORMALS = {
    torch.bfloat16: Subnormal((0x7F00, 0x7D00), 64),
    torch.float16: Subnormal((0x7800, 0x6800), 512),
}


def unpack_pair_shifted(layout: PackedLayout, dtype: torch.dtype, pair: int) -> Assembly:
    """As ``unpack_pair``, but ``field / divisor + b`` with ``SUBNORMALS[dtype].divisor``.

    Arguments: the word, twice, and b. The multiplication replaces the shift for two of the four
    pairs: on Hopper shifts and ``lop3`` run at half the rate of ``fma``.
    """
    assert layout.width == 4
    byte, place = divmod(layout.offsets[pair], 8)
    place //= 4
    mask, factor = _twice(0xF << 4 * place), _twice(SUBNORMALS[dtype].factors[place])
    lines = [f"shr.u32 t, $1, {8 * byte};"] if byte else []
    source = "t" if byte else "$1"
    if layout.signed:
        sign = _twice(0x8 << 4 * place)
        lines.append(f"lop3.b32 t, {source}, {mask:#010x}, {sign:#010x}, {_XOR};")
    else:
        lines.append(f"and.b32 t, {source}, {mask:#010x};")
    lines += [f"mov.b32 times, {factor:#010x};", f"fma.rn.{FMA_TYPES[dtype]} $0, t, times, $3;"]
    return assembly(lines, "t, times", 3, pack=2)


def add_and_scale(dtype: torch.dtype) -> Assembly:
    """``(a + b) * c`` of 16-bit floats, rounded after each operation. It uses ``fma`` throughout:
    below sm_90 there is no other bf16 arithmetic."""
    kind, one = FMA_TYPES[dtype], {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}[dtype]
    lines = [
        f"mov.b32 one, {_twice(one):#010x};",
        "mov.b32 none, 0x80008000;",
        f"fma.rn.{kind} t, $1, one, $2;",
        f"fma.rn.{kind} $0, t, $3, none;",
    ]
    return assembly(lines, "t, one, none", 3, pack=2)


@dataclasses.dataclass(frozen=True)
class Nibble:
    """A field in its place in 16 bits, below those of ``exponent``: multiplied by the float
    ``factor``, as bits too, it is ``base + field / divisor``."""

    exponent: int
    factor: int
    base: int
    divisor: int


# For the fields in bits 0-3 and 4-7. Bit 7 of a bf16 belongs to the exponent, but with all other
# exponent bits zero it counts like the bits below it (2**-129 a unit); 2**127 times that is 1/4.
NIBBLES = {
    torch.bfloat16: (Nibble(0x4300, 0x3F80, 128, 1), Nibble(0, 0x7F00, 0, 4)),
    torch.float16: (Nibble(0x6400, 0x3C00, 1024, 1), Nibble(0x6400, 0x2C00, 64, 1)),
}


def dequantize_byte(layout: PackedLayout, dtype: torch.dtype) -> Assembly:
    """``(base + field / divisor + b) * c`` for the two fields in one byte of a word, each with its
    own ``NIBBLES[dtype]``.

    Arguments: the word and, for each of the two outputs, the selector of the byte (for ``prmt``:
    0x4040 plus the byte's index twice), b and c. The caller's layout must keep two neighbours along
    K together, the even one first.

    c is ``divisor`` times the scale: in bf16 it overflows for scales of 2**126 and more, whose
    products with 4 and more overflow anyway.
    """
    assert layout.width == 4
    low, high = NIBBLES[dtype]
    kind = FMA_TYPES[dtype]
    sign, table = (0x80 << 16 | 0x8, _XOR) if layout.signed else (0, _OR)
    exponent = (high.exponent << 16 | low.exponent) ^ sign
    lines = [
        f"mov.b32 times, {high.factor << 16 | low.factor:#010x};",
        "mov.b32 none, 0x80008000;",
        "prmt.b32 t, $1, 0, $3;",
        f"lop3.b32 t, t, 0x00f0000f, {exponent:#010x}, {table};",
        f"fma.rn.{kind} t, t, times, $5;",
        f"fma.rn.{kind} $0, t, $6, none;",
    ]
    return assembly(lines, "t, times, none", 6, pack=2)


@dataclasses.dataclass(frozen=True)
class Place:
    """A field of a byte, ``at`` bits up in 16 bits, under ``exponent``: a float that is ``2**at``
    times the field, above ``base``. Times ``2**(power - at)``, with the exponent field ``power``
    above ``mantissa`` bits, it is ``field / divisor``, plus ``base / 2**at``."""

    exponent: int
    base: float
    power: int
    mantissa: int
    divisor: int


# bf16 has 7 bits of mantissa, so the field is a subnormal (see SUBNORMALS): 2**127 at most.
PLACES = {
    torch.bfloat16: Place(0, 0.0, 254, 7, 64),
    torch.float16: Place(0x6400, 1024.0, 15, 10, 1),
}


def dequantize_pair(
    dtype: torch.dtype,
    *,
    is_scaled: bool,
    is_added_to: bool = False,
    is_in_parts: bool = False,
    is_rescaled: bool = False,
    has_zeros: bool = False,
    in_halves: bool = False,
) -> Assembly:
    """``(field / divisor + b) * c`` for two fields that lie within a byte each, of one word or two;
    without c unless ``is_scaled``; ``+ d``, rounded once, if ``is_added_to`` (and scaled); times
    ``c + d`` if ``is_in_parts``, rounded once where the product with d is exact.

    Arguments: the words; then, the same for both values: the selector of the bytes (for ``prmt``),
    the mask and the exponents (with the flipped sign) and the powers of two of ``PLACES``, each for
    both halves; then b, c and d.

    c is ``divisor`` times the scale, so scales of 2**122 and more overflow in bf16. It is the scale
    if the values are ``is_rescaled``, before the product with it.

    With ``has_zeros`` b is of both values, plus a field for each: last are five arguments for it
    like the first five, with the powers of two negative.

    ``in_halves``: the values are at the same place of both halves of the word; instead of selectors
    the arguments are by how much it is shifted, so that two pairs share a shift.
    """
    kind, last = FMA_TYPES[dtype], "$13" if is_added_to else "none"
    inputs = 11 + is_scaled + (is_added_to or is_in_parts)
    moved = "shr.u32 t, $1, $3;" if in_halves else "prmt.b32 t, $1, $2, $3;"
    lines, added = [moved, f"lop3.b32 t, t, $5, $7, {_XOR};"], "$11"
    if has_zeros:
        word, other, selector, _, mask, _, exponent, _, power, _ = (
            f"${inputs + 1 + i}" for i in range(10)
        )
        lines += [
            f"prmt.b32 z, {word}, {other}, {selector};",
            f"lop3.b32 z, z, {mask}, {exponent}, {_XOR};",
            f"fma.rn.{kind} z, z, {power}, $11;",
        ]
        inputs, added = inputs + 10, "z"
    declared = "t, z" if has_zeros else "t"
    if not is_scaled:
        return assembly([*lines, f"fma.rn.{kind} $0, t, $9, {added};"], declared, inputs, pack=2)
    lines += ["mov.b32 none, 0x80008000;", f"fma.rn.{kind} t, t, $9, {added};"]
    if is_rescaled:
        times = _bits(float(PLACES[dtype].divisor), dtype)
        lines += [f"mov.b32 u, {times:#010x};", f"fma.rn.{kind} t, t, u, none;"]
    if is_in_parts:
        lines.append(f"fma.rn.{kind} u, t, $13, none;")
        last = "u"
    lines.append(f"fma.rn.{kind} $0, t, $12, {last};")
    declared += ", u, none" if is_in_parts or is_rescaled else ", none"
    return assembly(lines, declared, inputs, pack=2)


def multiply_pair(dtype: torch.dtype, *, in_halves: bool = False) -> Assembly:
    """``t * c + b`` for two fields t that lie within a byte each, of one word or two, and are
    subnormal floats of ``dtype`` there. Arguments: as of ``dequantize_pair`` the words, what moves
    them, masks and flipped signs; then c and b."""
    moved = "shr.u32 t, $1, $3;" if in_halves else "prmt.b32 t, $1, $2, $3;"
    lines = [moved, f"lop3.b32 t, t, $5, $7, {_XOR};", f"fma.rn.{FMA_TYPES[dtype]} $0, t, $9, $10;"]
    return assembly(lines, "t", 10, pack=2)


def float8_pair(kind: str) -> tuple[Assembly, int]:
    """fp16 of two floats in bytes of one word or two, exactly ("e4m3", "e5m2").

    Arguments: the words, and the selector of the bytes for ``prmt``, twice. The second result is
    the selector's digit for the first byte: 1 for e5m2, which is the upper byte of an fp16 (the
    other byte has digit 3), 0 for e4m3, of which an instruction converts two neighbouring bytes
    from sm_89 on.
    """
    lines = ["prmt.b32 t, $1, $2, $3;"]
    if kind == "e5m2":
        return assembly([*lines, "and.b32 $0, t, 0xff00ff00;"], "t", 4, pack=2), 1
    lines += [".reg .b16 h;", "cvt.u16.u32 h, t;", "cvt.rn.f16x2.e4m3x2 $0, h;"]
    return assembly(lines, "t", 4, pack=2), 0


@dataclasses.dataclass(frozen=True)
class ByteConversion:
    """Converts four uint8 at a time; each output is ``(value + bias) / factor``."""

    assembly: Assembly
    factor: int = 1
    bias: int = 0


def convert_bytes(layout: ByteLayout, x_dtype: torch.dtype) -> ByteConversion:
    """Integer bytes, or each field of them, as 16-bit floats; exact.

    fp16: a byte under the exponent of 1024 is ``1024 + byte``. The 7-bit mantissa of bf16 is too
    short for that, but the bits of a byte alone are ``byte * 2**-133``, also where the eighth bit
    reaches the exponent, since exponents 0 and 1 have the same scale. One multiply-add by a power
    of two yields the value: two instructions per pair. Narrower fields go through ``unpack``.
    """
    if layout.width < 8:
        base = BASES[x_dtype]
        return ByteConversion(unpack(layout, base), bias=base.value - layout.add)
    if x_dtype == torch.bfloat16:
        # 0x00bb times the second largest power of two is b / 128.
        high, factor, times = "0", 128, 2.0**126
        add = layout.add / factor
    else:
        high, factor, times = "0x64646464", 1, 1.0
        add = float(layout.add - 1024)
    source = "u" if layout.signed else "$2"
    kind = FMA_TYPES[x_dtype]
    lines = [
        f"mov.b32 m, {_bits(times, x_dtype):#010x};",
        f"mov.b32 c, {_bits(add or -0.0, x_dtype):#010x};",
        *(["xor.b32 u, $2, 0x80808080;"] if layout.signed else []),
        f"prmt.b32 l, {source}, {high}, 0x4140;",
        f"prmt.b32 h, {source}, {high}, 0x4342;",
        f"fma.rn.{kind} $0, l, m, c;",
        f"fma.rn.{kind} $1, h, m, c;",
    ]
    return ByteConversion(assembly(lines, "u, l, h, m, c", 1, pack=4), factor)


def _twice(half: int) -> int:
    return half << 16 | half


def _bits(value: float, dtype: torch.dtype) -> int:
    """The bits of a 16-bit float, in both halves."""
    return _twice(int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF)


def unpack_halves(*, is_flipped: bool, bias: int = 0) -> Assembly:
    """The lower and the upper halves of bytes plus ``bias``, which must fit in an int8, as bytes;
    first the highest bit of each is flipped if ``is_flipped``."""
    # with the sign bits set no byte borrows from the next one
    flips = (0x08 if is_flipped else 0) | (0x80 if bias < 0 else 0)
    lines = ["shr.b32 $1, $2, 4;"]
    for half, source in (("$0", "$2"), ("$1", "$1")):
        lines.append(f"lop3.b32 {half}, {source}, 0x0f0f0f0f, {_EACH * flips:#010x}, {_XOR};")
        if bias:
            lines.append(f"sub.u32 {half}, {half}, {-bias * _EACH & 0xFFFFFFFF:#010x};")
        if bias < 0:
            lines.append(f"xor.b32 {half}, {half}, 0x80808080;")
    return assembly(lines, "t", 1, bits=8, is_early=True, pack=4, count=2)


def subtract_bytes() -> Assembly:
    """Bytes up to 127 less bytes up to 128."""
    lines = ["lop3.b32 t, $1, 0xffffffff, 0x80808080, 0xea;", "sub.u32 t, t, $2;"]
    return assembly([*lines, "xor.b32 $0, t, 0x80808080;"], "t", 2, bits=8, pack=4)


def round_bytes() -> Assembly:
    """``(nibble - zero) * scale`` rounded and clamped to int8, for nibbles in bytes, 1024 + zero in
    fp16, and scales in fp16."""
    names = {"zero": "$2", "zero_u": "$3", "scale": "$4", "scale_u": "$5"}
    lines = _SCALED["round"].format(**names).split("\n")
    return assembly(["mov.b32 t, $1;", *lines], "t, u, c", 5, bits=8, pack=4)


def wrap_bytes() -> Assembly:
    """``nibble * scale + summand`` modulo 256, for nibbles in bytes and words of the others."""
    lines = [f"shr.u32 t{i}, $1, {8 * i};" for i in (1, 2, 3)]
    lines += [f"mad.lo.u32 t{i}, {f't{i}' if i else '$1'}, ${2 + i}, ${6 + i};" for i in range(4)]
    lines += [
        "prmt.b32 t0, t0, t1, 0x0040;",
        "prmt.b32 t2, t2, t3, 0x0040;",
        "prmt.b32 $0, t0, t2, 0x5410;",
    ]
    return assembly(lines, "t0, t1, t2, t3", 9, bits=8, pack=4)


_EACH = 0x01010101  # byte

# The four bytes of a word that is given four times.
WORD_AS_BYTES = Assembly("mov.b32 $0, $1;", "=r,r,r,r,r", pack=4)


@dataclasses.dataclass(frozen=True)
class Quad:
    """How four nibbles become four int8, or four e4m3.

    is_high     16 times the value, in the high half of each byte; else the value
    is_flipped  the sign bit of each nibble is
    subtracts   a number is subtracted from each; not with ``is_high``
    from_words  the four are the same nibble of four words; else all are in one word
    becomes     "round", "wrap": how the value, less a zero point and scaled, becomes an int8;
                "e4m3": the value less 8, times 2**-9
    """

    is_high: bool
    is_flipped: bool
    subtracts: bool = False
    from_words: bool = False
    becomes: str = ""


def unpack_quad(kind: Quad) -> Assembly:
    """Four int8, or four e4m3, in a register.

    Arguments: the words; the selectors, for ``prmt``, of their bytes: of one word those of the word
    with low nibbles moved into place, and of the word; of four words that of the first and that of
    the second. Then, of four words, by how much bytes are shifted; and what is subtracted, in each
    byte; or, if the values are scaled, the zero point and the scale.
    """
    shift = "shl" if kind.is_high else "shr"
    mask, sign = ("0xf0f0f0f0", 0x80) if kind.is_high else ("0x0f0f0f0f", 0x08)
    if kind.from_words:
        lines = [
            "prmt.b32 t, $1, $2, $5;",
            "prmt.b32 u, $3, $4, $5;",
            "prmt.b32 t, t, u, 0x5410;",
            f"{shift}.b32 t, t, $9;",
        ]
    else:
        order = "u, $1" if kind.is_high else "$1, u"
        lines = [f"{shift}.b32 u, $1, 4;", f"prmt.b32 t, {order}, $5;"]
    flips = (sign if kind.is_flipped else 0) | (0x80 if kind.subtracts else 0)
    target = "t" if kind.subtracts or kind.becomes else "$0"
    lines.append(f"lop3.b32 {target}, t, {mask}, {flips * 0x01010101:#010x}, {_XOR};")
    count = 12 if kind.from_words else 8
    if kind.subtracts:  # with the sign bits set no byte borrows from the next one
        lines += [f"sub.u32 t, t, ${count + 1};", "xor.b32 $0, t, 0x80808080;"]
        count += 4
    if kind.becomes:
        zero, scale = f"${count + 1}", f"${count + 5}"
        names = {"zero": zero, "zero_u": zero, "scale": scale, "scale_u": scale}
        lines += _SCALED[kind.becomes].format(**names).split("\n")
        count += 0 if kind.becomes == "e4m3" else 8
    return assembly(lines, "t, u, c", count, pack=4, bits=8)


# The bytes of t, nibbles, less ``zero`` and times ``scale``, as int8, or less 8, as e4m3. In fp16
# 1024 and a nibble is the nibble under an exponent, and fma with 1152 rounds to an integer, once:
# 1024 and the int8 plus 128, clamped.
_SCALED = {
    "round": """\
prmt.b32 u, t, 0x64646464, 0x4342;
prmt.b32 t, t, 0x64646464, 0x4140;
sub.rn.f16x2 t, t, {zero};
sub.rn.f16x2 u, u, {zero_u};
mov.b32 c, 0x64806480;
fma.rn.f16x2 t, t, {scale}, c;
fma.rn.f16x2 u, u, {scale_u}, c;
mov.b32 c, 0x64006400;
max.f16x2 t, t, c;
max.f16x2 u, u, c;
mov.b32 c, 0x64ff64ff;
min.f16x2 t, t, c;
min.f16x2 u, u, c;
prmt.b32 t, t, u, 0x6420;
xor.b32 $0, t, 0x80808080;""",
    # products of a nibble and a byte, in halves of a word
    "wrap": """\
shr.u32 u, t, 8;
and.b32 t, t, 0x000f000f;
and.b32 u, u, 0x000f000f;
mad.lo.u32 t, t, {scale}, {zero};
mad.lo.u32 u, u, {scale}, {zero};
prmt.b32 $0, t, u, 0x6240;""",
    # The low three bits; where bit 3 is not set, as u says, 8 less them, which is their complement
    # plus 1, and a sign.
    "e4m3": """\
shr.u32 u, t, 3;
lop3.b32 u, u, 0x01010101, 0, 0x0c;
mul.lo.u32 c, u, 7;
lop3.b32 t, t, 0x07070707, c, 0x6a;
mad.lo.u32 $0, u, 0x81, t;""",
}
