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
    source, scales, zeros, axis = node.args[:4]
    channel = (index[dimension(axis, len(index))],)  # type: ignore[arg-type]
    return _dequantized(reader, node, reader.read(source, index), scales, zeros, channel)  # type: ignore[arg-type]


@handles("quantized_decomposed.dequantize_per_channel_group.default")
def _dequantize_per_channel_group(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_channel_group``: groups along the last dimension."""
    source, scales, zeros = node.args[:3]
    size = graph.arguments(node, *_GROUP_ARGUMENTS)[6]
    group = (index[0], reader.space.divmod(index[1], size)[0])
    return _dequantized(reader, node, reader.read(source, index), scales, zeros, group)  # type: ignore[arg-type]


_GROUP_ARGUMENTS = ("input", "scales", "zero_points", "quant_min", "quant_max", "dtype", "size")


@handles(
    "quantized_decomposed.dequantize_per_tensor.default",
    "quantized_decomposed.dequantize_per_tensor.tensor",
)
def _dequantize_per_tensor(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_tensor``: (q - zero_point) * scale."""
    source, scale, zero = node.args[:3]
    return _dequantized(reader, node, reader.read(source, index), scale, zero, ())  # type: ignore[arg-type]


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
    source, bits = node.args[:2]
    if not isinstance(bits, int) or graph.value(source).dtype != torch.uint8:  # type: ignore[arg-type]
        raise Unsupported("an unknown packing")
    block, row = reader.space.divmod(index[0], sizes(source)[0])  # type: ignore[arg-type]
    word = reader.read(source, (row, *index[1:]))  # type: ignore[arg-type]
    dtype = graph.value(node).dtype
    return reader.apply(lambda x: arithmetic.cast(extract(x, block * bits, bits), dtype), word)
