"""Gluon for Triton's interpreter: the language of Triton, in which layouts are not said.

What a layout decides, who holds what, an interpreter does not have. A copy is done when it is
begun, and so is a product. Of specialised warps the last partition runs first, the one that loads:
what the tensor memory accelerator brings to a buffer queues there until it is read, once. So
barriers mean nothing, and nothing is said of races.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl

_LAYOUTS = (
    *("BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout"),
    *("SliceLayout", "SwizzledSharedLayout"),
)


def names() -> dict[str, Any]:
    """What a Gluon kernel's names stand for."""
    gl = _Language(
        **dict.fromkeys(_LAYOUTS, lambda *args: None),
        NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda *args: None),
        allocate_shared_memory=lambda dtype, shape, layout: _Buffers(_integer(shape[0])),
        arange=lambda start, end, layout=None: tl.arange(_constant(start), _constant(end)),
        convert_layout=lambda value, layout, assert_trivial=False: value,
        full=lambda shape, value, dtype, layout=None: tl.full(_shape(shape), value, dtype),
        warp_specialize=_run_partitions,
        zeros=lambda shape, dtype, layout=None: tl.zeros(_shape(shape), dtype),
    )
    return {
        "gl": gl,
        "gluon": types.SimpleNamespace(jit=triton.jit),
        "async_copy": types.SimpleNamespace(commit_group=_nothing, wait_group=_nothing),
        "copy_async": _copy,
        "cta_barrier": _nothing,
        "fence_async_shared": _nothing,
        "limit_registers": _nothing,
        "mma_v2": lambda a, b, acc: tl.dot(a, b, acc),
        "mbarrier": types.SimpleNamespace(
            **dict.fromkeys(("MBarrierLayout", "init", "expect", "arrive", "wait"), _nothing)
        ),
        "tma": types.SimpleNamespace(make_tensor_descriptor=_Tiles),
        "tma_load": _load_tile,
        "tile_load": lambda layout, *args, **how: tl.load(*args, **how),
        "tile_store": lambda *args, **how: tl.store(*args, **how),
        "warpgroup_mma": lambda a, b, acc, is_async=False: tl.dot(a, b, acc),
        "warpgroup_mma_init": lambda acc: acc,
        "warpgroup_mma_wait": lambda outstanding, deps: deps[0],
    }


class _Language(types.SimpleNamespace):
    """What is the same in both languages is Triton's, as the interpreter has it by then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


class _Buffer:
    """A tile in shared memory: what was copied there last, or the tiles that queue there."""

    def __init__(self) -> None:
        self.value: Any = None
        self.queue: collections.deque[Any] = collections.deque()

    def load(self, layout: Any) -> Any:
        return self.queue.popleft() if self.queue else self.value

    def store(self, value: Any) -> None:
        self.value = value

    def permute(self, order: Any) -> Any:
        return tl.permute(self.load(None), order)


class _Buffers:
    """A ring of tiles."""

    def __init__(self, count: int) -> None:
        self._buffers = [_Buffer() for _ in range(count)]

    def index(self, index: Any) -> _Buffer:
        return self._buffers[_integer(index)]


def _copy(buffer: _Buffer, pointer: Any, mask: Any = None) -> None:
    buffer.value = tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=0)


@dataclasses.dataclass
class _Tiles:
    """A tensor descriptor."""

    base: Any
    shape: Sequence[Any]
    strides: Sequence[Any]
    block: Sequence[Any]
    layout: Any


def _load_tile(tiles: _Tiles, first: Sequence[Any], barrier: Any, buffer: _Buffer) -> None:
    """Two axes; zeros beyond the tensor's end."""
    rows, columns = (
        begin + tl.arange(0, _constant(size))
        for begin, size in zip(first, tiles.block, strict=True)
    )
    rows, columns = rows[:, None], columns[None, :]
    pointer = tiles.base + rows.to(tl.int64) * tiles.strides[0] + columns * tiles.strides[1]
    is_there = (rows < tiles.shape[0]) & (columns < tiles.shape[1])
    buffer.queue.append(tl.load(pointer, mask=is_there, other=0))


def _run_partitions(partitions: Sequence[Any], warps: Any, registers: Any) -> None:
    for partition, arguments in reversed(partitions):
        partition(*arguments)


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
