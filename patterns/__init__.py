"""The FX half of the package: recognizers that read a graph, and the one writer that rewrites it.

The folder is at the top of the repository and is imported as ``inductor_quant.patterns``. A
``Pattern`` has one meaning: the ops that anchor it and a read-only function ``recognize(node) ->
RecognizedGemm | Rejection``. README.md describes the life of a match.
"""

from __future__ import annotations

if __name__ != "inductor_quant.patterns":
    raise ImportError(
        f"this package is inductor_quant.patterns; imported as {__name__!r} it would exist twice"
    )

from .match import Pattern, RecognizedGemm
from .recognizers import (
    block_sparse,
    experts,
    fp8_custom_ops,
    fp8_dequantized,
    qdq,
    scaled_experts,
    scaled_mm,
    w4a8,
    w8a8,
    w8a8_groupwise,
    weight_only,
)

BUILT_IN: tuple[Pattern, ...] = (
    w8a8_groupwise.PATTERN,  # first: it takes a whole sum over slices of K
    block_sparse.PATTERN,  # it and w4a8: before patterns that see a computed weight
    w4a8.PATTERN,
    w8a8.PATTERN,
    qdq.PATTERN,
    scaled_mm.PATTERN,
    fp8_dequantized.PATTERN,
    fp8_custom_ops.PATTERN,
    scaled_experts.PATTERN,  # before patterns that would take its rows for float ones
    experts.PATTERN,
    weight_only.PATTERN,
)
_patterns: list[Pattern] = list(BUILT_IN)


def patterns() -> tuple[Pattern, ...]:
    """All patterns, in the order in which they are tried."""
    return tuple(_patterns)


def register(pattern: Pattern) -> None:
    """Append a third party's pattern; raises ValueError if its name is taken.

    Inductor's caches are bypassed while one is registered: the cache key covers our files only.
    """
    if any(known.name == pattern.name for known in _patterns):
        raise ValueError(f"a pattern named {pattern.name!r} is registered already")
    _patterns.append(pattern)


def has_third_party() -> bool:
    return len(_patterns) > len(BUILT_IN)


__all__ = ["Pattern", "RecognizedGemm", "has_third_party", "patterns", "register"]
