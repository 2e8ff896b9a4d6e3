"""Casts to a narrower type that torch 2.11 drops and torch 2.13 keeps.

A layer of fp16 or bf16 rounds its result; the next operation, GELU for one, computes in fp32. The
graph then has fp32 -> bf16 -> fp32. Torch 2.11 drops both casts (``pointless_convert``). A GEMM
whose result is fp32 until that cast would write it to memory in fp32: twice the bytes, and so much
shared memory to store a tile (131 KB a CTA, not 107) that an SM holds one CTA of
``w8a8_persistent`` instead of two. Torch 2.13 keeps what narrows, since it may be materialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from inductor_quant._compat.symbols import symbol

_DROPS = "pointless_convert"


def keep(is_wanted: Callable[[], bool]) -> None:
    """From now on Inductor's joint graph keeps these casts where ``is_wanted()``."""
    for entry in _entries():
        entry.extra_check = _checks_width(entry.extra_check, is_wanted)


def _entries() -> Iterator[Any]:
    """The patterns that drop casts; none where Inductor has no such pattern."""
    passes = symbol("torch._inductor.fx_passes.joint_graph:patterns")
    for entries in passes.patterns.values():
        for entry in entries:
            if getattr(getattr(entry, "handler", None), "__name__", "") == _DROPS:
                yield entry


def _checks_width(
    ordinary: Callable[[Any], bool], is_wanted: Callable[[], bool]
) -> Callable[[Any], bool]:
    def check(match: Any) -> bool:
        inner, outer = match.kwargs.get("dtype1"), match.kwargs.get("dtype2")
        narrows = inner is not None and outer is not None and inner.itemsize < outer.itemsize
        return not (narrows and is_wanted()) and ordinary(match)

    return check
