"""Barriers at which each warp arrives and waits for itself (``warps`` in a Gluon kernel).

Triton synchronizes all warps of a partition (``bar.sync``) before one thread arrives at, or waits
for, a Gluon ``mbarrier``. Two warpgroups of a partition should alternate, one multiplies while the
other dequantizes; a ``bar.sync`` twice an iteration forces them into step. These barriers have no
such synchronization.

They have shared memory of their own. Triton does not expose the address of Gluon's barriers, which
TMA signals; a relay warp forwards each arrival to ours (``forward_barrier``).

Imported by ``gluon.runtime`` alone: needs Triton. A phase is 0 or 1, as for ``mbarrier``.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language import core

# Bytes. Triton's own shared memory starts after it, at a multiple of 1024 as tiles with a 128-byte
# swizzle need.
MEMORY = 1024
BYTES = 8  # of a barrier
MOST = MEMORY // BYTES
LANES = 32  # of a warp
# A barrier of all threads of a CTA. Triton has those from 0 on: two, and one for each partition.
_MEETING = 7

_ALLOCATE = f"{{ .shared .align {MEMORY} .b8 barriers[{MEMORY}]; mov.u32 $0, barriers; }}"
_INIT = """{
    .reg .pred is_one;
    .reg .b32 lane, barrier;
    mov.u32 lane, %laneid;
    setp.lt.u32 is_one, lane, $2;
    mad.lo.u32 barrier, lane, 8, $1;
    @is_one mbarrier.init.shared::cta.b64 [barrier], $3;
    mov.u32 $0, 0;
}"""
_WAIT = """{
    .reg .pred is_over;
again:
    mbarrier.try_wait.parity.shared::cta.b64 is_over, [$1], $2;
    @!is_over bra.uni again;
    mov.u32 $0, 0;
}"""
_ARRIVE = """{
    .reg .pred is_first;
    .reg .b32 lane;
    mov.u32 lane, %laneid;
    setp.eq.u32 is_first, lane, 0;
    setp.ne.and.u32 is_first, $2, 0, is_first;
    @is_first mbarrier.arrive.shared::cta.b64 _, [$1];
    mov.u32 $0, 0;
}"""

# What a warp of one CTA tells the same warp of another, in memory: two signalling NaNs, which are
# no sums, so that memory that holds anything else needs no initialization. It is erased when it was
# seen.
SIGNAL = "0x7FA5A5A57FB37D19"
_SIGNALS = f"""
    .reg .pred is_one;
    .reg .b32 lane, warp, at;
    .reg .b64 address, signal;
    mov.u64 signal, {SIGNAL};
    mov.u32 lane, %laneid;
    mov.u32 warp, %tid.x;
    shr.u32 warp, warp, 5;
    setp.lt.u32 is_one, lane, $4;
    setp.ne.and.u32 is_one, lane, $5, is_one;
    mad.lo.u32 at, lane, $3, $2;
    mad.lo.u32 at, at, $6, warp;
    mad.wide.u32 address, at, 8, $1;
"""
_SEND = f"""{{{_SIGNALS}
    bar.warp.sync 0xffffffff;
    @is_one st.release.gpu.global.b64 [address], signal;
    mov.u32 $0, 0;
}}"""
_RECEIVE = f"""{{{_SIGNALS}
    .reg .pred is_missing;
    .reg .b64 seen;
    mov.u64 seen, signal;
again:
    @is_one ld.acquire.gpu.global.b64 seen, [address];
    setp.ne.b64 is_missing, seen, signal;
    vote.sync.any.pred is_missing, is_missing, 0xffffffff;
    @is_missing bra.uni again;
    @is_one st.relaxed.gpu.global.b64 [address], 0;
    bar.warp.sync 0xffffffff;
    mov.u32 $0, 0;
}}"""


@core.builtin
def barriers(*, _semantic: Any) -> Any:
    """Allocates ``MOST`` barriers, once a kernel."""
    return _run(_ALLOCATE, [], _semantic)


@core.builtin
def init(base: Any, first: Any, number: Any, count: Any, *, _semantic: Any) -> None:
    """``number`` barriers from ``first`` on, at each of which ``count`` warps must arrive. A warp
    does this, before all ``meet``."""
    first, number = (core._unwrap_if_constexpr(each) for each in (first, number))
    for begin in range(0, number, LANES):
        base_of_some = _address(base, first + begin, _semantic)
        _run(_INIT, [base_of_some, min(LANES, number - begin), count], _semantic)


@core.builtin
def meet(warps: Any, *, _semantic: Any) -> None:
    """Wait for the ``warps`` of all partitions, each of which must come here, once. What was
    initialized before is so for all."""
    threads = LANES * core._unwrap_if_constexpr(warps)
    _run(f"{{ bar.sync {_MEETING}, {threads}; mov.u32 $0, 0; }}", [], _semantic)


@core.builtin
def wait(base: Any, index: Any, phase: Any, *, _semantic: Any) -> None:
    """Wait until the phase is over: all warps have arrived, and what they wrote is visible."""
    _run(_WAIT, [_address(base, index, _semantic), phase], _semantic)


@core.builtin
def arrive(base: Any, index: Any, pred: Any = True, *, _semantic: Any) -> None:
    """Each warp arrives once, if ``pred``."""
    is_due = _semantic.cast(_semantic.to_tensor(pred), core.int32)
    _run(_ARRIVE, [_address(base, index, _semantic), is_due], _semantic)


@core.builtin
def forward_barrier(
    barrier: Any, phase: Any, base: Any, index: Any, fence: Any = False, *, _semantic: Any
) -> None:
    """Wait for the phase of Gluon's ``barrier``, then arrive. With ``fence`` wgmma may read from
    shared memory what threads have copied there."""
    mbarrier.wait(barrier, phase, _semantic=_semantic)
    if core._unwrap_if_constexpr(fence):
        _run("{ fence.proxy.async.shared::cta; mov.u32 $0, 0; }", [], _semantic)
    arrive(base, index, _semantic=_semantic)


@core.builtin
def store_early(buffer: Any, value: Any, barrier: Any, *, _semantic: Any) -> None:
    """Store what the warp's next arrival makes visible: it forwards that of ``barrier``."""
    buffer.store(value, _semantic=_semantic)
    _run("{ bar.warp.sync 0xffffffff; mov.u32 $0, 0; }", [], _semantic)


@core.builtin
def send_signals(
    *signals: Any, count: Any = 1, skipped: Any = -1, warps: Any, _semantic: Any
) -> None:
    """Each warp says that its CTA has stored what the same warp of others is to read. ``signals``:
    a pointer, ``first`` and ``step``; it sends those number ``first + i * step``, for all i below
    ``count`` but ``skipped``. A number has a signal for each of ``warps``."""
    _run_signals(_SEND, signals, count, skipped, warps, _semantic)


@core.builtin
def await_signals(
    *signals: Any, count: Any = 1, skipped: Any = -1, warps: Any, _semantic: Any
) -> None:
    """Each warp waits for its signals of these numbers, and erases them."""
    _run_signals(_RECEIVE, signals, count, skipped, warps, _semantic)


@core.builtin
def prefetch(pointers: Any, *, _semantic: Any) -> None:
    """Prefetch to L2."""
    asm = "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    core.inline_asm_elementwise(
        asm, "=r,l", [pointers], core.int32, is_pure=False, pack=1, _semantic=_semantic
    )


def _run_signals(
    asm: str, signals: tuple[Any, ...], count: Any, skipped: Any, warps: Any, semantic: Any
) -> None:
    arguments = [*signals, *(semantic.to_tensor(each) for each in (count, skipped, warps))]
    core.inline_asm_elementwise(
        asm,
        "=r,l,r,r,r,r,r,~{memory}",
        arguments,
        core.int32,
        is_pure=False,
        pack=1,
        _semantic=semantic,
    )


def _address(base: Any, index: Any, semantic: Any) -> Any:
    offset = semantic.mul(semantic.to_tensor(index), semantic.to_tensor(BYTES), True)
    return semantic.add(base, offset, True)


def _run(asm: str, arguments: list[Any], semantic: Any) -> Any:
    constraints = ",".join(["=r", *("r" for _ in arguments), "~{memory}"])
    return core.inline_asm_elementwise(
        asm, constraints, arguments, core.int32, is_pure=False, pack=1, _semantic=semantic
    )
