"""Reading a weight again where its digits met edges that no dimension has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .. import fx_utils
from ..symbolic.expr import FLOAT8, INTEGERS
from ..symbolic.index import WHOLE, Unsupported, Whole
from ..symbolic.reader import Reader

Found = TypeVar("Found")


def attempt(read: Callable[[Reader], Found], is_good: Callable[[Found], bool]) -> Found:
    """The result of ``read``; after conflicting splits of a digit, retried with it kept whole, or
    in digits of their own where a dimension's edges are not met."""
    reader = Reader()
    first = read(reader)
    if is_good(first) or not reader.space.is_torn or reader.is_cut or not _has_codes(reader):
        return first
    ways: list[tuple[Whole | None, bool]] = [(whole, False) for whole in WHOLE]
    likely = len(WHOLE)
    if reader.pieces:
        ways.sort(key=lambda way: way[0] is None or way[0].radix != reader.pieces)
        likely = sum(whole.radix == reader.pieces for whole in WHOLE)
    ways.insert(likely, (None, True))
    for whole, computes in ways:
        try:
            found = read(Reader(whole, computes=computes))
        except Unsupported:
            continue
        if is_good(found):
            return found
    return first


def _has_codes(reader: Reader) -> bool:
    """Whether it has met integers or fp8 in memory: the keys and values of attention, which are
    read as a weight too, are floats or computed."""
    quantized = (*INTEGERS, *FLOAT8)
    return any(
        fx_utils.value(node).dtype in quantized and fx_utils.is_stored(node)
        for node in reader.nodes()
        if fx_utils.is_tensor_node(node)
    )
