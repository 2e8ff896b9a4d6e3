"""Gluon for Triton's interpreter: the language of Triton, in which layouts are not said.

What a layout decides, who holds what, an interpreter does not have. A copy is done when it is
begun, and so is a product; barriers, TMA and warp specialisation are not modelled.
"""

from __future__ import annotations

import types
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
    """A tile in shared memory: what was copied there last."""

    def __init__(self) -> None:
        self.value: Any = None

    def load(self, layout: Any) -> Any:
        return self.value

    def store(self, value: Any) -> None:
        self.value = value

    def permute(self, order: Any) -> Any:
        return tl.permute(self.value, order)


class _Buffers:
    """A ring of tiles."""

    def __init__(self, count: int) -> None:
        self._buffers = [_Buffer() for _ in range(count)]

    def index(self, index: Any) -> _Buffer:
        return self._buffers[_integer(index)]


def _copy(buffer: _Buffer, pointer: Any, mask: Any = None) -> None:
    buffer.value = tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=0)


def _nothing(*args: Any) -> None:
    pass


def _integer(value: Any) -> int:
    if hasattr(value, "handle"):
        return int(np.asarray(value.handle.data).item())
    return int(getattr(value, "value", value))


def _constant(value: Any) -> Any:
    return tl.constexpr(_integer(value))


def _shape(shape: Any) -> list[Any]:
    return [_constant(size) for size in shape]
