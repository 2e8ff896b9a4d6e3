"""Gluon layouts as text: which register, lane and warp holds which element of a tensor.

Each axis of a tensor is a list of dimensions (``dialect.Dim``), powers of two, slowest first. Some
are assigned to lanes and warps by name, the others to registers. Layouts that differ only in the
order of a thread's registers are the same to the hardware.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from inductor_quant.kernels.codegen.dialect import Dim, bits

Basis = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The basis vector in the tensor of each bit of a register's, lane's and warp's index."""

    registers: tuple[Basis, ...]
    lanes: tuple[Basis, ...]
    warps: tuple[Basis, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        bases = (str([list(basis) for basis in part]) for part in self._parts)
        return f"gl.DistributedLinearLayout({', '.join(bases)}, [], {list(self.shape)})"

    @property
    def _parts(self) -> tuple[tuple[Basis, ...], ...]:
        return self.registers, self.lanes, self.warps

    def coarser(self, size: int) -> Layout:
        """With ``size`` elements along the last axis, each for equally many neighbours."""
        times, shape = self.shape[-1] // size, (*self.shape[:-1], size)
        return self._mapped(lambda basis: (*basis[:-1], basis[-1] // times), shape)

    def split(self, size: int) -> Layout:
        """With the last axis split into two, the first of ``size``."""
        times = self.shape[-1] // size
        return self._mapped(
            lambda basis: (*basis[:-1], basis[-1] // times, basis[-1] % times),
            (*self.shape[:-1], size, times),
        )

    def _mapped(self, change: Callable[[Basis], Basis], shape: tuple[int, ...]) -> Layout:
        registers, lanes, warps = (tuple(map(change, part)) for part in self._parts)
        # A register that repeats another is dropped.
        return Layout(tuple(basis for basis in registers if any(basis)), lanes, warps, shape)


def layout(axes: Sequence[Sequence[Dim]], *, lanes: Sequence[Dim], warps: Sequence[Dim]) -> Layout:
    """The layout of a tensor with these ``axes``; the first registers of a thread are neighbours
    along the last one.

    lanes, warps  the dimensions that their bits count, the lowest first; elements repeat along
                  dimensions that the tensor lacks
    """
    bases: dict[str, list[Basis]] = {}
    for axis, dims in enumerate(axes):
        step = 1
        for name, size in reversed(dims):
            bases[name] = [
                tuple(step << bit if a == axis else 0 for a in range(len(axes)))
                for bit in range(size.bit_length() - 1)
            ]
            step *= size
    none: Basis = (0,) * len(axes)

    def placed(dims: Sequence[Dim]) -> tuple[Basis, ...]:
        return tuple(
            basis
            for name, size in dims
            for basis in bases.get(name, [none] * (size.bit_length() - 1))
        )

    assigned = {name for name, _ in (*lanes, *warps)}
    registers = [basis for name, found in bases.items() if name not in assigned for basis in found]
    registers.sort(key=lambda basis: basis[::-1] if basis[-1] else (math.inf, *basis))
    shape = tuple(math.prod(size for _, size in dims) for dims in axes)
    return Layout(tuple(registers), placed(lanes), placed(warps), shape)


def summed_outputs(
    warps: int,
    block_m: int,
    column_dims: Sequence[Dim],
    mma_dims: Sequence[Dim],
    pair: Dim | None = None,
) -> tuple[Layout, Layout, Layout]:
    """The layouts in which a thread reads the partials of all warps, [warps, N of the tile,
    block_m], for its outputs, and in which outputs are stored: neighbouring lanes have neighbouring
    columns. Those along ``pair`` are in one thread; the last layout is that without ``pair``."""
    rows, columns, mma = (
        [bit for name, size in dims for bit in bits(name, size)]
        for dims in ((("m", block_m),), column_dims, mma_dims)
    )
    pairs = bits(*pair) if pair else ()
    stored = [bit for bit in columns if bit not in pairs]
    lowest = [*reversed(stored), *reversed(rows)]
    count = warps.bit_length() - 1
    lanes, of_warps = lowest[:5], lowest[5 : 5 + count]
    of_warps += [("none", 2)] * (count - len(of_warps))
    placed: Any = {"lanes": lanes, "warps": of_warps}
    partials = layout(((("w", warps),), mma, rows), **placed)
    return partials, layout((rows, columns), **placed), layout((rows, stored), **placed)


def positions(of: str, rank: int, axis: int, size: int) -> str:
    """0 to ``size`` along one axis of a tensor whose layout is called ``of``, with size 1 along the
    other axes."""
    others = [other for other in range(rank) if other != axis]
    return expand_dims(f"gl.arange(0, {size}, {slice_layout(of, others)})", others)


def slice_layout(layout: str, axes: Sequence[int]) -> str:
    """That of a tensor without ``axes``, which ``expand_dims`` gives ``layout``."""
    for axis in reversed(axes):
        layout = f"gl.SliceLayout({axis}, {layout})"
    return layout


def expand_dims(code: str, axes: Sequence[int]) -> str:
    for axis in axes:
        code = f"gl.expand_dims({code}, {axis})"
    return code
