"""``PackedTile`` loads and unpacks packed weights; ``TileOrder`` orders it for the MMA."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.codegen.dialect import TRITON, TRITON_VERSION, Dim, bits
from inductor_quant.kernels.codegen.packed_layout import BASES, PackedLayout
from inductor_quant.kernels.codegen.statements import Statements
from inductor_quant.kernels.codegen.unpack_ptx import unpack
from inductor_quant.kernels.problem import Weight

# Neighbours along K that a thread holds of the first operand of ``tl.dot`` (``kWidth`` in TTGIR),
# as seen in the TTGIR of this kernel: Triton 3.7, and 3.8 to 3.9.
NEIGHBOURS = 4 if TRITON_VERSION < (3, 8) else 2


class PackedTile:
    """The packed words of BLOCK_K x BLOCK_N values: ``packed_k`` by ``packed_n`` words, the
    contiguous axis last."""

    def __init__(self, weight: Weight, layout: PackedLayout, block_k: int, block_n: int) -> None:
        self.layout, self.source = layout, f"W{weight.format.element.source}"
        self.contiguous = contiguous_axis(weight, layout)
        along_k = layout.axis == "k"
        self.packed_k = block_k // (layout.count if along_k else 1)
        self.packed_n = block_n // (1 if along_k else layout.count)

    @property
    def shape(self) -> tuple[int, int]:
        shape = (self.packed_k, self.packed_n)
        return shape if self.contiguous == "n" else shape[::-1]

    def strides(self, stride: Hook) -> list[str]:
        """Statements before the loop: the strides of the words along k and n, in memory."""
        along_k, along_n, _ = self._along(stride)
        return [f"stride_wk = {along_k}", f"stride_wn = {along_n}"]

    def base(self, stride: Hook) -> str:
        """The address of the tile's first word at k = 0."""
        *_, const = self._along(stride)
        return f"{self.source} + (pid_n * {self.packed_n}).to(INDEX_DTYPE) * stride_wn + {const}"

    def _along(self, stride: Hook) -> tuple[str, ...]:
        """The strides along k and n, and the constant offset."""
        return tuple(
            _sum(f"{c} * {stride(self.source, dim)}" for dim, c in enumerate(coefs) if c)
            for coefs in zip(*self.layout.strides, strict=True)
        )

    def offsets(self, stride: Hook) -> str:
        """Statements before the loop: ``w_base``, and the offset of each word from it."""
        along = {
            "k": f"tl.arange(0, {self.packed_k}) * stride_wk",
            "n": f"tl.arange(0, {self.packed_n}) * stride_wn",
        }
        rows, columns = ("k", "n") if self.contiguous == "n" else ("n", "k")
        return "\n".join(
            [
                *self.strides(stride),
                f"w_offsets = ({along[rows]})[:, None] + ({along[columns]})[None, :]",
                f"w_base = {self.base(stride)}",
            ]
        )

    def unpacked(self, x_dtype: torch.dtype) -> tuple[list[str], list[str]]:
        """Statements in the loop that load the words at k, and the variables that they set: the
        first value of each word plus its base, the second, ..."""
        count = self.layout.count if self.layout.axis == "k" else 1
        values = [f"u{i}" for i in range(self.layout.count)]
        assembly = unpack(self.layout, BASES[x_dtype])
        lines = [
            f"q = tl.load(w_base + (k // {count}).to(INDEX_DTYPE) * stride_wk + w_offsets)",
            *TRITON.inline_asm(assembly, values, ["q"], x_dtype),
        ]
        return lines, values


def join(values: Sequence[str]) -> tuple[list[str], str]:
    """Statements that join equal tiles, and the result. It has a last dimension of two for each bit
    of a tile's index, the lowest bit first."""
    lines, values = [], list(values)
    while len(values) > 1:
        joined = []
        for low, high in zip(values[::2], values[1::2], strict=True):
            joined.append(f"{low}_")
            lines.append(f"{joined[-1]} = tl.join({low}, {high})")
        values = joined
    return lines, values[0]


def split(out: Statements, code: str, count: int, size: int) -> list[str]:
    """``code`` [1, size * count] as ``count`` variables [size]: the elements i % count."""
    index_bits = count.bit_length() - 1
    names = [out.assign("c", f"tl.reshape({code}, {[size, *[2] * index_bits]})")]
    for _ in range(index_bits):  # the lowest bit first
        out.lines += [f"{name}l, {name}h = tl.split({name})" for name in names]
        names = [f"{name}{half}" for half in "lh" for name in names]
    return names


def contiguous_axis(weight: Weight, layout: PackedLayout) -> str:
    """The axis of W along which packed words are contiguous in memory; n if unknown, which costs
    only speed."""
    strides = weight.tensors[weight.format.element.source].strides
    pairs = zip(layout.strides, strides, strict=True)
    return "k" if sum(k * s for (k, _, _), s in pairs if s is not None) == 1 else "n"


def _sum(terms: Iterable[str]) -> str:
    return " + ".join(terms) or "0"


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Orders of a tile's values as lists of dimensions, slowest first.

    ``mma.sync`` with W as its first operand (16 n by 16 k, two of them in a row) gives each thread
    certain k and n. Which k is free, as long as x has the same order; so is which n. So we assign
    packed words to threads, and k and n follow: a thread unpacks whole words and loads 16
    contiguous bytes. The order affects only speed: where the compiler lays out an operand
    differently, the values pass through shared memory.

    k, n           in natural order, each value of a word a dimension
    rows, columns  of the tile of words, the contiguous axis last
    k_mma, n_mma   in the order of the operand
    fields         the values of one word
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
        """The dimensions of the words, then those of their values as ``join`` leaves them."""
        return (*self.rows, *self.columns, *reversed(self.fields))


def tile_order(
    layout: PackedLayout, *, block_k: int, block_n: int, warps: int, contiguous: str
) -> TileOrder | None:
    """The order of a tile whose words are contiguous along ``contiguous``; None: there is none for
    this size."""
    along_k = layout.axis == "k"
    r = block_k // (layout.count if along_k else 1)
    c = block_n // (1 if along_k else layout.count)
    fields = bits("f", layout.count)
    vector = 16 * 8 // layout.bits  # words in 16 bytes
    if contiguous == "n":
        vector = min(vector, c // (8 * warps))
        # The k that a thread unpacks together: a pair, and four if the word packs none along k.
        low = bits("p", 2 if along_k else 4)
        high: tuple[Dim, ...] = () if along_k else (("h", 2),)
        packed_k = (("r", r // _size((*low, *high, ("t", 4)))), *high, ("t", 4), *low)
        packed_n = (*bits("c", c // max(1, 8 * warps * vector)), ("w", warps), ("g", 8))
        packed_n = (*packed_n, *bits("v", vector))
    else:
        vector = min(vector, r // 4)
        low = bits("p", vector)
        packed_k = (("r", r // max(1, 4 * vector)), ("t", 4), *low)
        packed_n = (*bits("c", c // (8 * warps)), ("w", warps), ("g", 8))
    k = (*packed_k, *fields) if along_k else packed_k
    n = packed_n if along_k else (*packed_n, *fields)
    # The MMA also wants two dimensions of k beside the pair, and one of n for the halves of its 16.
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
        *((packed_k, packed_n) if contiguous == "n" else (packed_n, packed_k)),
        k_mma=(*(dim for dim in free_k if dim not in twos), twos[0], *neighbours, ("p0", 2)),
        n_mma=(*(dim for dim in free_n if dim not in halves), ("w", warps), halves[0], ("g", 8)),
        fields=fields,
    )


def _size(dims: Sequence[Dim]) -> int:
    return math.prod(size for _, size in dims)
