"""How a tile covers the digits of a weight's format, and which thread holds which part of it.

A tile of W is a tensor with one dimension for each digit of n and k that varies in it. What depends
on some digits only, such as a packed word or the scale of a group, has size 1 along the others, and
broadcasting does the rest. So statements follow from the format alone, whatever is packed along
which axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from inductor_quant.kernels.codegen.gluon_layout import Basis, Layout
from inductor_quant.kernels.problem import Weight
from inductor_quant.spec.weight_format import Field, WeightFormat

VECTORS = (16, 8, 4, 2, 1)  # bytes that a thread loads at once, best first
LINE = 128  # bytes that lanes load side by side
OF_LANES = 1, 2  # bits of k of the lanes that share a row, with pairs of values in registers


@dataclasses.dataclass(frozen=True)
class TileDigit:
    """Digit ``name`` takes ``inner`` values in a tile; ``outer`` tiles share its values.

    Of a dimension of the tile: it counts in steps of ``place`` through the format's digit ``of``.
    """

    name: str
    inner: int
    outer: int
    of: str = ""
    place: int = 1

    @property
    def digit(self) -> str:
        return self.of or self.name


def tile_digits(
    format: WeightFormat,
    axis: str,
    block: int,
    order: Sequence[str] = (),
    *,
    ends_beyond: bool = False,
) -> tuple[TileDigit, ...] | None:
    """The digits of an axis, most significant first, in a tile of ``block``; None if the block ends
    within a digit. ``order``: the digits in another order of significance; ``ends_beyond``: the
    last tile may end beyond the axis, as it may beyond N."""
    found: list[TileDigit] = []
    left = block
    names = list(order) or format.digits(axis)
    for name in reversed(names):
        radix = format.radix(name)
        inner = math.gcd(left, radix)
        # It may end within a block: the store masks it, or x is 0 there.
        may_end = axis == "n" or (ends_beyond and left <= radix)
        is_last = name == names[0] and may_end
        if inner != min(left, radix) and not is_last:
            return None
        inner = left if is_last else inner
        found.insert(0, TileDigit(name, inner, -(-radix // inner)))
        left //= inner
    return tuple(found) if left == 1 and not block & (block - 1) else None


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Who holds which part of a tile with dimensions ``digits``: those of n, those of k, and those
    of the values that are dequantized together (``low``), if words hold integers.

    loaded  the layout in which words are loaded: neighbours in memory are neighbours in registers
    layout  the same, but with the values along ``low`` next to each other
    rows    the bits of n, by significance, in the order of the bits of a row of the MMA
    depth   the bits of k likewise
    order   the bits of k, by significance, in the order of ``digits``, the slowest first
    pair    the dimension that tells apart two words which a thread reads both, and lanes share
    """

    digits: tuple[TileDigit, ...]
    low: tuple[TileDigit, ...]
    loaded: Layout
    layout: Layout
    rows: tuple[int, ...]
    depth: tuple[int, ...]
    order: tuple[int, ...]
    pair: int | None = None

    @property
    def rank(self) -> int:
        return len(self.digits)

    def along_n(self) -> Layout:
        """``loaded`` with neighbours along n next to each other in registers."""
        of_n = [digit.digit[0] == "n" for digit in self.digits]

        def is_k(basis: Basis) -> bool:
            return not any(step and is_n for step, is_n in zip(basis, of_n, strict=True))

        registers = tuple(sorted(self.loaded.registers, key=is_k))
        return dataclasses.replace(self.loaded, registers=registers)

    def of_k(self) -> Layout:
        """``layout`` of a tensor that has one value for each k of the tile, in order."""
        apart: dict[int, int] = {}
        size = 1
        for axis, digit in reversed([*enumerate(self.digits)]):
            if digit.digit[0] == "k":
                apart[axis] = size
                size *= digit.inner

        def along_k(bases: Sequence[Basis]) -> tuple[Basis, ...]:
            return tuple(
                (sum(step * apart.get(axis, 0) for axis, step in enumerate(basis)),)
                for basis in bases
            )

        registers = tuple(basis for basis in along_k(self.layout.registers) if any(basis))
        return Layout(registers, along_k(self.layout.lanes), along_k(self.layout.warps), (size,))

    def of_a_tile(self) -> TilePlan:
        """The plan without how many tiles there are: equal for weights that a tile's statements
        read in the same way."""
        digits, low = (
            tuple(dataclasses.replace(digit, outer=0) for digit in part)
            for part in (self.digits, self.low)
        )
        return dataclasses.replace(self, digits=digits, low=low)


WARP = "warp"


def tile_plan(
    weight: Weight,
    code: Field,
    n: Sequence[TileDigit],
    k: Sequence[TileDigit],
    *,
    warps: int,
    low: tuple[int, ...] = (),
    own: bool = False,
    vectors: Sequence[int] = VECTORS,
    in_pairs: bool = False,
) -> TilePlan | None:
    """Assigns a tile to ``warps`` warps; None: it is too small for them.

    A thread holds what it multiplies: W is the first operand of the MMA, 16 rows of n by 32 bytes
    of k. Four lanes take different k, eight different n. A thread holds the values of 32 bits,
    whose bits of k are ``low``, those 16 bytes further along K, and those 8 rows apart. Further
    bits are those of further MMAs. Without ``low`` a pair of values is not dequantized together.

    in_pairs: the four lanes share two words that are neighbours, bytes of K: None if they do not.
    own: each warp has such a tile (WARP), and k is in an order in which a thread holds all values
    of the words that it loads. Else warps have other rows, as in wgmma; k is in the order of
    memory, and lanes share words.
    """
    if not [digit for digit in k if digit.inner > 1]:
        return None
    others = [digit for digit in n if digit.inner > 1]
    of_warps = [TileDigit(WARP, warps, 1)] if own else []
    parts, lowest, places = _split(k, low, OF_LANES[1] if in_pairs else None)
    if len(lowest) < len(low):
        return None
    dims = (*of_warps, *others, *parts, *lowest)
    strides = word_strides(weight, code)
    itemsize = weight.tensors[code.source].dtype.itemsize
    bits: list[_Bit] = []
    for dim, digit in reversed(list(enumerate(dims))):
        for bit in range(digit.inner.bit_length() - 1):
            basis = tuple(1 << bit if axis == dim else 0 for axis in range(len(dims)))
            apart = strides.get(digit.digit, math.inf) * itemsize * (digit.place << bit)
            position = sum(other.axis == digit.name[0] for other in bits)
            if digit.digit[0] == "k":
                position = places[digit.name] + bit
            bits.append(_Bit(digit.digit[0], position, basis, apart))
    bits.sort(key=lambda bit: bit.position if bit.axis == "k" else math.inf)
    # The column beside another, of a pair, may be far from it, and is in the same thread.
    is_pair = bool(others) and others[-1].inner == 2 and len(others) > 1 and not own
    shape = tuple(digit.inner for digit in dims)
    pair = None
    if in_pairs:
        of_k = {bit.position: bit.apart for bit in bits if bit.axis == "k"}
        are_shared = low == (0,) and [of_k.get(bit) for bit in (0, *OF_LANES)] == [0, 0, itemsize]
        pair = next((i for i, d in enumerate(dims) if places.get(d.name) == OF_LANES[1]), None)
        if code.total_width != 8 or not are_shared or pair is None or dims[pair].inner != 2:
            return None
    for vector in vectors:
        found = _assigned(bits, shape, itemsize, vector, 1 if own else warps, low or (0,), is_pair)
        if found is not None:
            loaded, rows, depth = found
            of_low = [_unit(len(dims), -1 - i) for i in range(len(low))]
            others_of_thread = [basis for basis in loaded.registers if basis not in of_low]
            layout = dataclasses.replace(loaded, registers=(*of_low, *others_of_thread))
            order = tuple(
                places[digit.name] + bit
                for digit in (*parts, *lowest)
                for bit in reversed(range(digit.inner.bit_length() - 1))
            )
            return TilePlan(dims, tuple(lowest), loaded, layout, rows, depth, order, pair)
    return None


def _unit(rank: int, axis: int) -> Basis:
    return tuple(int(other == axis % rank) for other in range(rank))


def _split(
    k: Sequence[TileDigit], low: Sequence[int], alone: int | None = None
) -> tuple[list[TileDigit], list[TileDigit], dict[str, int]]:
    """(dimensions of a tile's digits of K without the bits ``low``, one dimension for each of
    these, slowest first; the significance in k of each one's lowest bit). The bit ``alone`` is a
    dimension, too."""
    parts: list[TileDigit] = []
    lowest: dict[int, TileDigit] = {}
    places: dict[str, int] = {}
    first = 0
    for digit in reversed(k):
        count = digit.inner.bit_length() - 1
        runs: list[list[int]] = []
        for bit in range(count):
            if first + bit in low:
                name = f"low{low.index(first + bit)}"
                lowest[first + bit] = TileDigit(name, 2, 1, digit.name, 1 << bit)
                places[name] = first + bit
            elif runs and runs[-1][-1] == bit - 1 and alone not in (first + bit, first + bit - 1):
                runs[-1].append(bit)
            else:
                runs.append([bit])
        for run in runs:
            name = digit.name if run is runs[-1] else f"{digit.name}_{run[0]}"
            outer = digit.outer if run is runs[-1] else 1
            parts.insert(0, TileDigit(name, 1 << len(run), outer, digit.name, 1 << run[0]))
            places[name] = first + run[0]
        first += count
    return parts, [lowest[bit] for bit in reversed(low) if bit in lowest], places


@dataclasses.dataclass(frozen=True)
class _Bit:
    """A bit of a position in the tile: its axis, significance, basis vector, and bytes from the
    neighbour's word (0: they share it)."""

    axis: str
    position: int
    basis: Basis
    apart: float


def _assigned(
    bits: list[_Bit],
    shape: tuple[int, ...],
    itemsize: int,
    vector: int,
    warps_of_n: int,
    low: tuple[int, ...],
    is_pair: bool,
) -> tuple[Layout, tuple[int, ...], tuple[int, ...]] | None:
    """(layout, rows, depth) of a ``TilePlan``."""
    axes = {axis: [bit for bit in bits if bit.axis == axis] for axis in ("k", "n", WARP[0])}
    warp_bits = axes[WARP[0]]
    count = warps_of_n.bit_length() - 1
    most = {"k": 2, "n": 3}
    room = {"k": len(axes["k"]) - most["k"], "n": len(axes["n"]) - most["n"] - count}
    if room["k"] < len(low) + 1 or room["n"] < 1:
        return None
    firsts = [bit for bit in axes["k"] if bit.position in low]
    of_lanes = [bit.position for bit in axes["k"] if bit not in firsts][:2]
    rest = [bit for bit in bits if bit not in warp_bits]
    lanes: dict[str, list[_Bit]] = {"k": [], "n": []}
    registers: list[_Bit] = []

    def take(bit: _Bit, *, to_lane: bool) -> bool:
        """Whether there was room for the bit."""
        if to_lane:
            if len(lanes[bit.axis]) == most[bit.axis]:
                return False
            lanes[bit.axis].append(bit)
        else:
            if not room[bit.axis]:
                return False
            room[bit.axis] -= 1
            registers.append(bit)
        rest.remove(bit)
        return True

    if not warp_bits:
        for k_bit in axes["k"]:
            take(k_bit, to_lane=k_bit.position in of_lanes)
    if is_pair and any(bit.apart < LINE for bit in axes["n"]) and axes["n"][0].apart >= LINE:
        take(axes["n"][0], to_lane=False)
    for bit in [bit for bit in rest if bit.apart == 0]:
        take(bit, to_lane=False)
    reach = itemsize
    while reach < LINE and (near := next((bit for bit in rest if bit.apart == reach), None)):
        if not take(near, to_lane=reach >= vector and near not in firsts):
            break
        reach *= 2
    for first in firsts:
        if first in rest and not take(first, to_lane=False):
            return None
    if not warp_bits and axes["n"][0] in rest:  # neighbours along n are stored together
        take(axes["n"][0], to_lane=False)
    # Lanes with different words come before those that would share one.
    for bit in sorted(rest, key=lambda bit: bit.apart == 0):
        take(bit, to_lane=True)
    for bit in list(rest):
        take(bit, to_lane=False)
    others = [bit for bit in registers if bit.axis == "k" and bit not in firsts]
    half, *blocks = [bit for bit in registers if bit.axis == "n"]
    rows = [*lanes["n"], half, *rest, *blocks]
    depth = [*sorted(firsts, key=lambda bit: low.index(bit.position)), *lanes["k"], *others]
    bases = lambda part: tuple(bit.basis for bit in part)  # noqa: E731
    in_lanes = [*lanes["k"], *lanes["n"]]
    layout = Layout(bases(registers), bases(in_lanes), bases([*warp_bits, *rest]), shape)
    return layout, tuple(bit.position for bit in rows), tuple(bit.position for bit in depth)


def word_strides(weight: Weight, field: Field) -> dict[str, float]:
    """Elements between the words of neighbours, by digit; 0 if they share one."""
    found: dict[str, float] = dict.fromkeys(field.offset.digits, 0)
    for index, stride in zip(field.index, weight.tensors[field.source].strides, strict=True):
        for name, coef in index.linear:
            found[name] = found.get(name, 0) + (math.inf if stride is None else coef * stride)
        for name, _ in index.tables:
            found[name] = math.inf
    return found


def is_listed(format: WeightFormat, field: Field) -> bool:
    """Whether a tensor lists where each k has its value of the field."""
    last = set(format.digits("k")[-1:])
    return any(each.digits & last for index in field.index for each, _ in index.fields)


def pair_bit(format: WeightFormat, n_digits: Sequence[TileDigit]) -> int | None:
    """The bit of a position in a tile's columns that is the last digit of n; None: a tile has one
    column of each pair."""
    names, last = [digit.name for digit in n_digits], format.digits("n")[-1]
    place = names.index(last)
    if not format.radix(last) == n_digits[place].inner == 2:
        return None
    return sum(digit.inner.bit_length() - 1 for digit in n_digits[place + 1 :])
