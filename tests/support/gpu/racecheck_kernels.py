"""Copies of tiles of 64 x 64 by TMA: by partitions, and by all warps (see ``racecheck``)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _load(source, tile, full, tiles, row):
    sources = tma.make_tensor_descriptor(source, [tiles * 64, 64], [64, 1], [64, 64], TILE)
    mbarrier.expect(full, 64 * 64 * 2)
    tma.async_copy_global_to_shared(sources, [row, 0], full, tile)


@gluon.jit
def _store(target, tile, full, row):
    mbarrier.wait(full, 0)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    columns = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    gl.store(target + rows[:, None] * 64 + columns[None, :], tile.load(ROWS))


@gluon.jit
def _nothing(target):
    pass


@gluon.jit
def copied_by_partitions(source, target, tiles):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], TILE)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * 64
    gl.warp_specialize(
        [
            (_store, (target, tile, full, row)),
            (_load, (source, tile, full, tiles, row)),
            (_nothing, (target,)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def copied(source, target, tiles):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], TILE)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * 64
    _load(source, tile, full, tiles, row)
    _store(target, tile, full, row)
