"""Gluon for Triton's interpreter: Triton's own language, without layouts.

An interpreter has no threads that hold elements, so layouts mean nothing. Copies and products are
done where they are started. Of warp-specialized partitions the last one, the producer, runs first:
what TMA loads into a buffer is kept for each phase of its barrier, and a consumer reads the phase
that it waited for last. Races are not seen.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from . import signals

# Tiles that threads copied since the last barrier or group, and where to.
_copied: list[tuple[_Buffer, Any]] = []
_LAYOUTS = (
    *("BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout"),
    *("SliceLayout", "SwizzledSharedLayout"),
)


def names() -> dict[str, Any]:
    """The names that a Gluon kernel uses."""
    gl = _Language(
        **dict.fromkeys(_LAYOUTS, lambda *args: None),
        NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda *args: None),
        allocate_shared_memory=lambda dtype, shape, layout: _Buffers(_integer(shape[0])),
        arange=lambda start, end, layout=None: tl.arange(_constant(start), _constant(end)),
        convert_layout=lambda value, layout, assert_trivial=False: value,
        num_warps=lambda: 4,
        full=lambda shape, value, dtype, layout=None: tl.full(_shape(shape), value, dtype),
        warp_specialize=_run_partitions,
        zeros=lambda shape, dtype, layout=None: tl.zeros(_shape(shape), dtype),
    )
    return {
        "gl": gl,
        "gluon": types.SimpleNamespace(jit=triton.jit),
        "async_copy": types.SimpleNamespace(
            commit_group=_copied.clear, wait_group=_nothing, mbarrier_arrive=_receive_copies
        ),
        "copy_async": lambda *args, **how: _copy(*args, **how),  # tests look at what is copied
        "cta_barrier": _nothing,
        "fence_async_shared": _nothing,
        "limit_registers": _nothing,
        "parts_of_tiles": lambda buffers, across, down: _PartsOfTiles(
            buffers, _integer(across), _integer(down)
        ),
        "sums_of_tiles": lambda buffers, count: buffers.sums(_integer(count)),
        "mma_v2": lambda a, b, acc: tl.dot(a, b, acc, out_dtype=acc.dtype),
        "mbarrier": types.SimpleNamespace(
            **dict.fromkeys(("MBarrierLayout", "init", "arrive"), _nothing),
            expect=_expect,
            wait=_wait,
        ),
        "tma": types.SimpleNamespace(make_tensor_descriptor=_Tiles),
        "tma_load": _load_tile,
        "warps": types.SimpleNamespace(
            **dict.fromkeys(("init", "meet", "arrive"), _nothing),
            send_signals=signals.send,
            await_signals=signals.wait,
            prefetch=lambda pointers: _prefetch(pointers),
            barriers=_WarpBarriers,
            wait=lambda base, index, phase: base.wait(index, phase),
            forward_barrier=lambda barrier, phase, base, index, fence=False: base.forward(
                barrier, index
            ),
            store_early=lambda buffer, value, barrier: buffer.keep(value, barrier),
        ),
        "tile_exp": lambda value: tl.exp(value),  # looked up late: the interpreter replaces it
        "tile_over": lambda value, divisor: value / divisor,
        "tile_round": lambda value, dtype: value.to(dtype),
        "tile_load": lambda layout, *args, **how: tl.load(*args, **how),
        "tile_store": lambda *args, **how: tl.store(*args, **how),
        "warpgroup_mma": _multiply,
        "warpgroup_mma_init": lambda acc: acc,
        "warpgroup_mma_wait": lambda outstanding, deps: deps if len(deps) > 1 else deps[0],
    }


class _Language(types.SimpleNamespace):
    """Everything else is Triton's, as the interpreter has it at the time of the call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


class _Buffer:
    """A tile in shared memory: the value last copied there, or one for each phase of a barrier. Or
    that barrier."""

    def __init__(self) -> None:
        self.value: Any = None
        self.barrier: _Buffer | None = None
        self.phases: list[list[Any]] = []  # of each phase its tiles, to be concatenated
        # Of a barrier: phases that this partition expected and waited for; whether any did.
        self.expected = self.waited = 0
        self.is_expected = False
        self.across, self.rows = 1, 0  # tiles of a phase beside each other; all rows (0: as given)

    def load(self, layout: Any) -> Any:
        if self.barrier is None:
            return self.value
        tiles = self.phases[self.barrier.waited - 1]
        if len(tiles) == 1 and not self.rows:
            return tiles[0]
        data = [tile.handle.data for tile in tiles]
        down = len(data) // self.across
        columns = [np.concatenate(data[i : i + down]) for i in range(0, len(data), down)]
        whole = _of_rows(np.concatenate(columns, axis=1), self.rows)
        return _tensor(whole, tiles[0].dtype)

    def store(self, value: Any) -> None:
        self.value = value

    def receive(self, tile: Any, barrier: _Buffer) -> None:
        self.barrier = barrier
        self.phases += [[] for _ in range(barrier.expected - len(self.phases))]
        self.phases[-1].append(tile)

    def keep(self, value: Any, barrier: _Buffer) -> None:
        """For the next phase of ``barrier``."""
        self.barrier = barrier
        self.phases.append([value])

    def permute(self, order: Any) -> Any:
        return tl.permute(self.load(None), order)

    def slice(self, first: Any, size: Any, dim: Any = 0) -> _Slice:
        return _Slice(self, _integer(first), _integer(size), _integer(dim))


@dataclasses.dataclass
class _Slice:
    """Rows of a buffer, or columns. Slices arrive in their order."""

    buffer: _Buffer
    first: int
    size: int
    dim: int = 0

    def receive(self, tile: Any, barrier: _Buffer) -> None:
        self.buffer.receive(tile, barrier)

    def load(self, layout: Any) -> Any:
        tile = self.buffer.load(layout)
        part = [slice(None), slice(None)]
        part[self.dim] = slice(self.first, self.first + self.size)
        return _tensor(tile.handle.data[tuple(part)], tile.dtype)

    def permute(self, order: Any) -> Any:
        return tl.permute(self.load(None), order)


def _of_rows(data: Any, count: int) -> Any:
    """With rows up to ``count`` whose bits are ones (of floats NaN): what was in shared memory."""
    missing = max(0, count - data.shape[0])
    garbage = np.full((missing, *data.shape[1:]), -1, np.dtype(f"i{data.dtype.itemsize}"))
    return np.concatenate([data, garbage.view(data.dtype)])


def _tensor(data: Any, scalar: Any) -> Any:
    return tl.tensor(TensorHandle(data, scalar), tl.block_type(scalar, list(data.shape)))


class _Buffers:
    """A ring of tiles, or of barriers."""

    def __init__(self, count: int) -> None:
        self._buffers = [_Buffer() for _ in range(count)]
        self._sums: _Buffers | None = None

    def index(self, index: Any) -> _Buffer:
        return self._buffers[_integer(index)]

    def sums(self, count: int) -> _Buffers:
        """The same memory as so many arrays, in which partitions leave their sums."""
        self._sums = self._sums or _Buffers(count)
        return self._sums

    def begin(self) -> None:
        """A partition starts: it has waited for no barrier yet."""
        for buffer in self._buffers:
            buffer.expected = buffer.waited = 0


@dataclasses.dataclass
class _PartsOfTiles:
    """Parts of each tile of a ring: ``across`` columns of ``down`` parts, which arrive in their
    order; the last ones of each column may be missing."""

    tiles: _Buffers
    across: int
    down: int

    def index(self, index: Any) -> _Part:
        tile = self.tiles.index(_integer(index) // (self.across * self.down))
        tile.across = self.across
        return _Part(tile, self.down)


@dataclasses.dataclass
class _Part:
    buffer: _Buffer
    down: int

    def receive(self, tile: Any, barrier: _Buffer) -> None:
        self.buffer.rows = tile.shape[0] * self.down
        self.buffer.receive(tile, barrier)


class _WarpBarriers:
    """Barriers of single warps: only which of Gluon's are forwarded to them counts."""

    def __init__(self) -> None:
        self._forwarded: dict[int, list[_Buffer]] = {}

    def forward(self, barrier: _Buffer, index: Any) -> None:
        barriers = self._forwarded.setdefault(_integer(index), [])
        if barrier not in barriers:
            barriers.append(barrier)

    def wait(self, index: Any, phase: Any) -> None:
        for barrier in self._forwarded.get(_integer(index), ()):
            _wait(barrier, phase)


def _expect(barrier: _Buffer, size: Any, pred: Any = True) -> None:
    barrier.expected += _integer(pred) != 0
    barrier.is_expected = True


def _wait(barrier: _Buffer, phase: Any, pred: Any = True) -> None:
    if not _integer(pred):
        return
    if barrier.is_expected and _integer(phase) != barrier.waited % 2:
        raise AssertionError(f"waits for phase {_integer(phase)} after {barrier.waited} others")
    barrier.waited += 1


def _multiply(a: Any, b: Any, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
    first = a if isinstance(a, tl.tensor) else a.load(None)
    return tl.dot(first, b, acc if _integer(use_acc) else None, out_dtype=acc.dtype)


def _copy(buffer: _Buffer | _Part | _Slice, pointer: Any, mask: Any = None) -> None:
    zero = 0.0 if pointer.dtype.element_ty.is_floating() else 0
    tile = tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=zero)
    whole = buffer if isinstance(buffer, _Buffer) else buffer.buffer
    if isinstance(buffer, _Slice) and buffer.dim:
        whole.across = max(whole.across, buffer.first // buffer.size + 1)
    whole.value = tile
    _copied.append((whole, tile))


def _receive_copies(barrier: _Buffer) -> None:
    """What was copied is that of the first phase: the producers ran before, but come later."""
    barrier.is_expected = True
    tiles: dict[_Buffer, list[Any]] = {}
    for buffer, tile in _copied:
        tiles.setdefault(buffer, []).append(tile)
    for buffer, found in tiles.items():
        buffer.barrier = barrier
        buffer.phases.insert(0, found)
    _copied.clear()


@dataclasses.dataclass
class _Tiles:
    """A tensor descriptor."""

    base: Any
    shape: Sequence[Any]
    strides: Sequence[Any]
    block: Sequence[Any]
    layout: Any


def _load_tile(
    tiles: _Tiles,
    first: Sequence[Any],
    barrier: _Buffer,
    buffer: _Buffer | _Slice | _Part,
    pred: Any = True,
) -> None:
    """A tile of two axes, zeros out of bounds."""
    if not _integer(pred):
        return
    rows, columns = (
        begin + tl.arange(0, _constant(size))
        for begin, size in zip(first, tiles.block, strict=True)
    )
    rows, columns = rows[:, None], columns[None, :]
    pointer = tiles.base + rows.to(tl.int64) * tiles.strides[0] + columns * tiles.strides[1]
    is_there = (rows < tiles.shape[0]) & (columns < tiles.shape[1])
    zero = 0.0 if pointer.dtype.element_ty.is_floating() else 0
    buffer.receive(tl.load(pointer, mask=is_there, other=zero), barrier)


def _run_partitions(partitions: Sequence[Any], warps: Any, registers: Any) -> None:
    for partition, arguments in reversed(partitions):
        for argument in arguments:
            if isinstance(argument, _Buffers):
                argument.begin()
        partition(*arguments)


def _prefetch(pointers: Any) -> None:
    """Nothing; tests look at the addresses."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _integer(value: Any) -> int:
    if hasattr(value, "handle"):
        return int(np.asarray(value.handle.data).item())
    return int(getattr(value, "value", value))


def _constant(value: Any) -> Any:
    return tl.constexpr(_integer(value))


def _shape(shape: Any) -> list[Any]:
    return [_constant(size) for size in shape]
