"""Kernels that Triton compiles while Inductor generates the code of the next graph.

A generated module starts its kernels in Inductor's pool of processes and waits for them when it is
loaded. Within ``later`` it does not wait; ``Later.wait`` does, before the module's first call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

from inductor_quant._compat.symbols import symbol

Waits = list[tuple[Callable[[], None], dict[str, Any]]]

_waits: ContextVar[Waits | None] = ContextVar("inductor_quant_waits", default=None)


class Later:
    """The kernels of what was compiled in a ``later`` block."""

    def __init__(self) -> None:
        self.waits: Waits = []

    def wait(self, known: dict[int, tuple[Any, Any]]) -> None:
        """Until the kernels are compiled. Raises what their compilation does. ``known``: id of a
        future -> it and its kernel; modules share them."""
        kinds = (Future, symbol("torch._inductor.codecache:CodeCacheFuture"))
        for wait, scope in self.waits:
            for name, value in scope.items():
                if id(value) in known:
                    scope[name] = known[id(value)][1]
            pending = {name: value for name, value in scope.items() if isinstance(value, kinds)}
            wait()
            known.update({id(value): (value, scope[name]) for name, value in pending.items()})
        self.waits.clear()


@contextlib.contextmanager
def later() -> Iterator[Later]:
    """Modules that this thread loads in the block do not wait for their kernels."""
    _install()
    found = Later()
    token = _waits.set(found.waits)
    try:
        yield found
    finally:
        _waits.reset(token)


@functools.cache
def _install() -> None:
    compiler = symbol("torch._inductor.async_compile:AsyncCompile")
    ordinary = compiler.wait

    @functools.wraps(ordinary)
    def wait(self: Any, scope: dict[str, Any]) -> None:
        waits = _waits.get()
        if waits is None:
            ordinary(self, scope)
        else:
            waits.append((functools.partial(ordinary, self, scope), scope))

    compiler.wait = wait
