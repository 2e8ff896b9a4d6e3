"""Inductor's padding of strides (``comprehensive_padding``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
    pads_rows = _is_number(row) and row > _setting("padding_stride_threshold") and row % align != 0
    is_padded = bool(_setting("comprehensive_padding") and pads_rows)
    with config_module().patch(comprehensive_padding=is_padded):
        yield


def _setting(name: str) -> Any:
    return symbol(f"torch._inductor.config:{name}")


@contextlib.contextmanager
def as_of_static_sizes() -> Iterator[None]:
    """Within it a buffer with a symbolic number of rows is padded like one with a number.

    Inductor pads nothing that has a symbol in its shape (``pad_dynamic_shapes`` would pad strides
    with symbols too). But the attention weights [M, heads, context] of an odd context, for one, are
    read by a matrix product, whose library wants aligned rows. The size of the dimension with the
    largest stride decides nothing, so any number serves for it.
    """
    layout = symbol("torch._inductor.ir:Layout")
    ordinary = layout._pad_strides

    def pad_strides(in_strides: Sequence[Any], size: Sequence[Any], dtype: Any) -> Sequence[Any]:
        known = [_is_number(each) for each in size]
        if known.count(False) == 1 and all(map(_is_number, in_strides)):
            rows = known.index(False)
            if in_strides[rows] == max(in_strides):
                size = [
                    number if is_known else 2 for number, is_known in zip(size, known, strict=True)
                ]
        padded: Sequence[Any] = ordinary(in_strides, size, dtype)
        return padded

    layout._pad_strides = staticmethod(pad_strides)
    try:
        yield
    finally:
        layout._pad_strides = staticmethod(ordinary)


def _is_number(size: Any) -> bool:
    return isinstance(size, int) or bool(getattr(size, "is_Integer", False))
