"""Inductor's padding of strides (``comprehensive_padding``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from inductor_quant._compat.symbols import config_module, symbol


@contextlib.contextmanager
def of_rows_only(node: Any) -> Iterator[None]:
    """Within it a buffer whose layout is decided, of which ``node`` is a view, is padded only if
    that aligns its rows.

    Inductor pads long strides to multiples of 128 bytes, those of a batch too, which aligns no row.
    Rows of all batches then have no common stride, and a view of them, [M, K] of [B, M / B, K], is
    a copy.
    """
    row = (node.get_size() or [1])[-1]
    align = _setting("padding_alignment_bytes") // node.get_dtype().itemsize
    is_known = isinstance(row, int) or getattr(row, "is_Integer", False)
    pads_rows = is_known and row > _setting("padding_stride_threshold") and row % align != 0
    is_padded = bool(_setting("comprehensive_padding") and pads_rows)
    with config_module().patch(comprehensive_padding=is_padded):
        yield


def _setting(name: str) -> Any:
    return symbol(f"torch._inductor.config:{name}")
