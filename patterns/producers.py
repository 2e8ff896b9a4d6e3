"""Ops of producers that stay in the graph as they are, by name: what each of them computes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from inductor_quant.patterns import arithmetic, graph
from inductor_quant.patterns.digits import ZERO, Unsupported
from inductor_quant.patterns.expression import Expr, Number, extract
from inductor_quant.patterns.reader import At, Reader, dimension, handles, sizes


@handles("quantized_decomposed.dequantize_per_channel.default")
def _dequantize_per_channel(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_channel``: (q - zero_point[c]) * scale[c]."""
    names = ("input", "scales", "zero_points", "axis")
    source, scales, zeros, axis = graph.arguments(node, *names)
    _check_no_wrap(source, zeros)
    channel = (index[dimension(axis, len(index))],)
    return _dequantized(reader, node, reader.read(source, index), scales, zeros, channel)


@handles("quantized_decomposed.dequantize_per_channel_group.default")
def _dequantize_per_channel_group(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_channel_group``: groups along the last dimension."""
    source, scales, zeros, *_, size = graph.arguments(node, *_GROUP_ARGUMENTS)
    _check_no_wrap(source, zeros)
    rows, columns = sizes(source)
    size = min(size, columns)
    for item in (scales, zeros):  # the op takes them in any shape, row by row
        shape = [rows, columns // size] if item is None else sizes(item)
        if shape != [rows, columns // size] and math.prod(shape) != 1:
            raise Unsupported("scales in a shape of their own")
    group = (index[0], reader.space.divmod(index[1], size)[0])
    return _dequantized(reader, node, reader.read(source, index), scales, zeros, group)


_GROUP_ARGUMENTS = (
    *("w_int8", "scales", "zero_points", "quant_min", "quant_max", "dtype", "group_size"),
)


def _check_no_wrap(source: fx.Node, zeros: fx.Node | None) -> None:
    """Integers are subtracted in the wider of both types."""
    small = (torch.int8, torch.uint8, torch.int16)
    if zeros is not None and {graph.value(source).dtype, graph.value(zeros).dtype} <= {*small}:
        raise Unsupported("a zero point whose subtraction may wrap around")


@handles(
    "quantized_decomposed.dequantize_per_tensor.default",
    "quantized_decomposed.dequantize_per_tensor.tensor",
)
def _dequantize_per_tensor(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_tensor``: (q - zero_point) * scale."""
    source, scale, zero = graph.arguments(node, "input", "scale", "zero_point")
    return _dequantized(reader, node, reader.read(source, index), scale, zero, ())


def _dequantized(reader: Reader, node: fx.Node, q: Expr, scale: Any, zero: Any, index: At) -> Expr:
    """In fp32, as these ops compute; tensors are read at ``index``, those of one element at 0."""

    def number(item: Any) -> Expr:
        if not isinstance(item, fx.Node):
            return Number(float(item), torch.float32)
        shape = sizes(item)
        if math.prod(shape) == 1:
            at: At = (ZERO,) * len(shape)
        elif len(shape) == len(index):
            at = index
        else:
            raise Unsupported("scales in a shape of their own")
        return arithmetic.cast(reader.read(item, at), torch.float32)

    value = arithmetic.cast(q, torch.float32)
    if zero is not None:
        value = arithmetic.subtract(value, number(zero), torch.float32)
    value = arithmetic.multiply(value, number(scale), torch.float32)
    return arithmetic.cast(value, graph.value(node).dtype)


@handles("quanto.unpack.default")
def _quanto_unpack(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quanto.unpack(packed, bits)``: the fields of a byte lie in blocks along the first
    dimension, the lowest bits first."""
    source, bits = graph.arguments(node, "self", "bits")
    if not isinstance(bits, int) or graph.value(source).dtype != torch.uint8:
        raise Unsupported("an unknown packing")
    block, row = reader.space.divmod(index[0], sizes(source)[0])
    word = reader.read(source, (row, *index[1:]))
    dtype = graph.value(node).dtype
    return reader.apply(lambda x: arithmetic.cast(extract(x, block * bits, bits), dtype), word)
