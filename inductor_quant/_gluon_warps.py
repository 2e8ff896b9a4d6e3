"""The boundary's part for Gluon: what warps of one partition do each for itself (``warps``).

Before a partition arrives at one of Gluon's barriers (``mbarrier``), or asks for it, Triton has all
of its warps wait for each other (``bar.sync``), and one thread speaks for all. Of two warpgroups in
a partition one should multiply while the other dequantizes; twice in each step that brings them
together again. At the barriers of ``warps`` each warp arrives for itself and asks for itself.
(Triton 3.9 has warpgroups meet behind their products as well; never timed there.)

They lie in shared memory of their own. Where those of Gluon lie Triton does not say, and they are
what the tensor memory accelerator signals: another warp waits for them and passes it on.

Imported where a kernel is made (``_gluon_compat.runtime``): needs Triton. A phase is 0 or 1, as
there.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language import core

# Bytes. Shared memory that Triton hands out begins behind them, and has to begin at a multiple of
# 1024, for the tiles that are swizzled in 128 bytes.
MEMORY = 1024
BYTES = 8  # of a barrier
MOST = MEMORY // BYTES

_ALLOCATE = f"{{ .shared .align {MEMORY} .b8 barriers[{MEMORY}]; mov.u32 $0, barriers; }}"
_INIT = """{
    .reg .pred is_first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 is_first, thread, 0;
    @is_first mbarrier.init.shared::cta.b64 [$1], $2;
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


@core.builtin
def barriers(*, _semantic: Any) -> Any:
    """``MOST`` barriers; once a kernel."""
    return _run(_ALLOCATE, [], _semantic)


@core.builtin
def init(among: Any, index: Any, count: Any, *, _semantic: Any) -> None:
    """So many warps have to arrive. For the kernel's first thread; then a ``cta_barrier``."""
    _run(_INIT, [_address(among, index, _semantic), count], _semantic)


@core.builtin
def wait(among: Any, index: Any, phase: Any, *, _semantic: Any) -> None:
    """Until the phase is over: all have arrived, and all they did before is seen."""
    _run(_WAIT, [_address(among, index, _semantic), phase], _semantic)


@core.builtin
def arrive(among: Any, index: Any, pred: Any = True, *, _semantic: Any) -> None:
    """Each warp that comes here, where ``pred`` says so."""
    is_due = _semantic.cast(_semantic.to_tensor(pred), core.int32)
    _run(_ARRIVE, [_address(among, index, _semantic), is_due], _semantic)


@core.builtin
def pass_on(barrier: Any, phase: Any, among: Any, index: Any, *, _semantic: Any) -> None:
    """When the phase of Gluon's ``barrier`` is over, arrive."""
    mbarrier.wait(barrier, phase, _semantic=_semantic)
    arrive(among, index, _semantic=_semantic)


@core.builtin
def own(buffers: Any, index: Any, parts: Any, count: Any, *, _semantic: Any) -> Any:
    """Of ``parts`` times as many buffers, that of the part which this warp is in: of ``count``
    warps, the first of the kernel, in as many parts."""
    parts, count = core._unwrap_if_constexpr(parts), core._unwrap_if_constexpr(count)
    if parts > 1:
        shift = (32 * count // parts).bit_length() - 1
        asm = f"{{ mov.u32 $0, %tid.x; shr.u32 $0, $0, {shift}; }}"
        part = core.inline_asm_elementwise(
            asm, "=r", [], core.int32, is_pure=True, pack=1, _semantic=_semantic
        )
        first = _semantic.mul(_semantic.to_tensor(index), _semantic.to_tensor(parts), True)
        index = _semantic.add(first, part, True)
    return buffers.index(index, _semantic=_semantic)


@core.builtin
def prefetch(pointers: Any, *, _semantic: Any) -> None:
    """The L2 cache fetches what lies there."""
    asm = "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    core.inline_asm_elementwise(
        asm, "=r,l", [pointers], core.int32, is_pure=False, pack=1, _semantic=_semantic
    )


def _address(among: Any, index: Any, semantic: Any) -> Any:
    offset = semantic.mul(semantic.to_tensor(index), semantic.to_tensor(BYTES), True)
    return semantic.add(among, offset, True)


def _run(asm: str, arguments: list[Any], semantic: Any) -> Any:
    constraints = ",".join(["=r", *("r" for _ in arguments), "~{memory}"])
    return core.inline_asm_elementwise(
        asm, constraints, arguments, core.int32, is_pure=False, pack=1, _semantic=semantic
    )
