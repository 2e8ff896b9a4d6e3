"""Modules of a template's choices, imported only if they are timed.

Inductor writes the code of each choice to a file and imports it, but all that it keeps is where the
file is: autotuning imports it from there. An import takes up to 0.1 s, in which Triton splits the
text of each function into tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from inductor_quant._compat.symbols import symbol


@dataclasses.dataclass(frozen=True)
class Written:
    """What is asked of a choice's module."""

    key: str
    __file__: str


@functools.cache
def _cache() -> type:
    """Inductor's cache of modules, whose ``load`` only writes the file."""
    ordinary = symbol("torch._inductor.codecache:PyCodeCache")

    class Unloaded(ordinary):  # type: ignore[valid-type, misc]
        @classmethod
        def load(cls, source_code: str, extra: str = "", **_: Any) -> Written:
            return Written(*ordinary.write(source_code, extra))

    return Unloaded


@contextlib.contextmanager
def not_imported() -> Iterator[None]:
    """Choices that are generated in the block are not imported."""
    select_algorithm = symbol("torch._inductor.select_algorithm:")
    before = select_algorithm.PyCodeCache
    select_algorithm.PyCodeCache = _cache()
    try:
        yield
    finally:
        select_algorithm.PyCodeCache = before
