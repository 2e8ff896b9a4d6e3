"""The FX half: recognisers that read a graph, and the one writer that rewrites it.

Lives at the top of the repository and is imported as ``inductor_quant.patterns``. A ``Pattern`` is
one meaning: the ops that anchor it and a read-only function ``recognize(node) -> RecognizedGemm |
Rejection``.
"""

from __future__ import annotations

if __name__ != "inductor_quant.patterns":
    raise ImportError(
        f"this package is inductor_quant.patterns; imported as {__name__!r} it would exist twice"
    )

from inductor_quant.patterns import (
    fp8,
    fp8_dequantized,
    fp8_producers,
    qdq,
    w8a8,
    w8a8_groups,
    weight_only,
)
from inductor_quant.patterns.pattern import Pattern, RecognizedGemm

BUILT_IN: tuple[Pattern, ...] = (
    w8a8_groups.PATTERN,  # a sum over slices of K, before each slice alone
    w8a8.PATTERN,
    qdq.PATTERN,
    fp8.PATTERN,
    fp8_dequantized.PATTERN,
    fp8_producers.PATTERN,
    weight_only.PATTERN,
)
_patterns: list[Pattern] = list(BUILT_IN)


def patterns() -> tuple[Pattern, ...]:
    """All patterns, in the order in which they are tried."""
    return tuple(_patterns)


def register(pattern: Pattern) -> None:
    """Add a pattern behind those that are there. Its name must be new.

    A third party's pattern changes what a compilation does, so Inductor's caches are bypassed while
    one is registered: the cache key covers our files, not theirs.
    """
    if any(known.name == pattern.name for known in _patterns):
        raise ValueError(f"a pattern named {pattern.name!r} is registered already")
    _patterns.append(pattern)


def has_third_party() -> bool:
    return len(_patterns) > len(BUILT_IN)


__all__ = ["Pattern", "RecognizedGemm", "has_third_party", "patterns", "register"]
