"""Layouts of Gluon as text: which element of a tensor lies in which register, lane and warp.

A tensor's axes are lists of dimensions, powers of two from slow to fast (``words.Dim``). Some of
them are handed to lanes and warps by name, the rest are a thread's own. Layouts that differ by the
order of a thread's registers alone are the same to the hardware.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from inductor_quant.kernels.words import Dim

Basis = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where one step of each bit of a register's, lane's and warp's number leads in the tensor."""

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
        """With ``size`` elements along the last axis, each for as many neighbours."""
        times = self.shape[-1] // size
        return self._mapped(
            lambda basis: (*basis[:-1], basis[-1] // times), (*self.shape[:-1], size)
        )

    def split(self, size: int) -> Layout:
        """With the last axis as two, the first of them of ``size``."""
        times = self.shape[-1] // size
        return self._mapped(
            lambda basis: (*basis[:-1], basis[-1] // times, basis[-1] % times),
            (*self.shape[:-1], size, times),
        )

    def _mapped(self, change: Callable[[Basis], Basis], shape: tuple[int, ...]) -> Layout:
        registers, lanes, warps = (tuple(map(change, part)) for part in self._parts)
        # a register that repeats another is none
        return Layout(tuple(basis for basis in registers if any(basis)), lanes, warps, shape)


def layout(
    axes: Sequence[Sequence[Dim]],
    *,
    lanes: Sequence[Dim],
    warps: Sequence[Dim],
) -> Layout:
    """The layout of a tensor with these ``axes``.

    lanes, warps  whose bits they count, the lowest first; what the tensor lacks is repeated

    A thread's first registers are neighbours along the last axis.
    """
    bases: dict[str, list[Basis]] = {}
    for axis, dims in enumerate(axes):
        step = 1
        for name, size in reversed(dims):
            bits = range(size.bit_length() - 1)
            bases[name] = [
                tuple(step << bit if a == axis else 0 for a in range(len(axes))) for bit in bits
            ]
            step *= size
    none: Basis = (0,) * len(axes)

    def placed(dims: Sequence[Dim]) -> tuple[Basis, ...]:
        return tuple(
            basis
            for name, size in dims
            for basis in bases.get(name, [none] * (size.bit_length() - 1))
        )

    elsewhere = {name for name, _ in (*lanes, *warps)}
    own = [basis for name, found in bases.items() if name not in elsewhere for basis in found]
    own.sort(key=lambda basis: basis[::-1] if basis[-1] else (math.inf, *basis))
    shape = tuple(math.prod(size for _, size in dims) for dims in axes)
    return Layout(tuple(own), placed(lanes), placed(warps), shape)


def positions(of: str, rank: int, axis: int, size: int) -> str:
    """0 to ``size`` along one axis of a tensor whose layout is called ``of``, with all its axes."""
    others = [other for other in range(rank) if other != axis]
    sliced = of
    for other in reversed(others):
        sliced = f"gl.SliceLayout({other}, {sliced})"
    text = f"gl.arange(0, {size}, {sliced})"
    for other in others:
        text = f"gl.expand_dims({text}, {other})"
    return text
