"""Handlers of producers' custom ops, which Inductor does not decompose; by name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from .. import fx_utils
from . import arithmetic
from .bits import extract
from .expr import Expr, Number
from .index import ZERO, Unsupported
from .reader import At, Reader, dimension, handles, sizes


@handles("quantized_decomposed.dequantize_per_channel.default")
def _dequantize_per_channel(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_channel``: (q - zero_point[c]) * scale[c]."""
    names = ("input", "scales", "zero_points", "axis")
    source, scales, zeros, axis = fx_utils.arguments(node, *names)
    _check_no_wrap(source, zeros)
    channel = (index[dimension(axis, len(index))],)
    return _dequantized(reader, node, reader.read(source, index), scales, zeros, channel)


@handles("quantized_decomposed.dequantize_per_channel_group.default")
def _dequantize_per_channel_group(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_channel_group``: groups along the last dimension."""
    names = ("w_int8", "scales", "zero_points", "quant_min", "quant_max", "dtype", "group_size")
    source, scales, zeros, *_, size = fx_utils.arguments(node, *names)
    _check_no_wrap(source, zeros)
    rows, columns = sizes(source)
    size = min(size, columns)
    for item in (scales, zeros):  # the op takes any shape, row-major
        shape = [rows, columns // size] if item is None else sizes(item)
        if shape != [rows, columns // size] and math.prod(shape) != 1:
            raise Unsupported("scales in another shape")
    group = (index[0], reader.space.divmod(index[1], size)[0])
    return _dequantized(reader, node, reader.read(source, index), scales, zeros, group)


def _check_no_wrap(source: fx.Node, zeros: fx.Node | None) -> None:
    """The op subtracts integers in the wider of both dtypes."""
    narrow = {torch.int8, torch.uint8, torch.int16}
    if zeros is not None and {fx_utils.value(n).dtype for n in (source, zeros)} <= narrow:
        raise Unsupported("a zero point whose subtraction may wrap around")


@handles(
    "quantized_decomposed.dequantize_per_tensor.default",
    "quantized_decomposed.dequantize_per_tensor.tensor",
)
def _dequantize_per_tensor(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_tensor``: (q - zero_point) * scale."""
    source, scale, zero = fx_utils.arguments(node, "input", "scale", "zero_point")
    return _dequantized(reader, node, reader.read(source, index), scale, zero, ())


def _dequantized(reader: Reader, node: fx.Node, q: Expr, scale: Any, zero: Any, index: At) -> Expr:
    """``(q - zero) * scale`` in fp32, as these ops compute. Tensors are read at ``index``, those of
    one element at 0."""

    def operand(item: Any) -> Expr:
        if not isinstance(item, fx.Node):
            return Number(float(item), torch.float32)
        shape = sizes(item)
        if math.prod(shape) == 1:
            at: At = (ZERO,) * len(shape)
        elif len(shape) == len(index):
            at = index
        else:
            raise Unsupported("scales in another shape")
        return arithmetic.cast(reader.read(item, at), torch.float32)

    value = arithmetic.cast(q, torch.float32)
    if zero is not None:
        value = arithmetic.subtract(value, operand(zero), torch.float32)
    value = arithmetic.multiply(value, operand(scale), torch.float32)
    return arithmetic.cast(value, fx_utils.value(node).dtype)


@handles("quanto.unpack.default")
def _quanto_unpack(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quanto.unpack(packed, bits)``: field i of every byte, the lowest bits first, makes block i
    along the first dimension."""
    source, bits = fx_utils.arguments(node, "self", "bits")
    if not isinstance(bits, int) or fx_utils.value(source).dtype != torch.uint8:
        raise Unsupported("an unknown packing")
    block, row = reader.space.divmod(index[0], sizes(source)[0])
    word = reader.read(source, (row, *index[1:]))
    dtype = fx_utils.value(node).dtype
    return reader.apply(lambda x: arithmetic.cast(extract(x, block * bits, bits), dtype), word)
