"""Near misses of ``fields``: functions of two fields.

The two are of tensors of their own and each has a value for every k and n. What they make is a
table of both, as long as they have at most 8 bits together; beyond, nothing but a number of
disjoint fields is a format. Words, scales and zero points around them are as in ``fields``.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import fx

from tests.support.programs import data
from tests.support.programs.builder import aten
from tests.support.programs.dequantization import Program
from tests.support.programs.fields import FieldWriter, Part, draw_fields, f32, i32, i64, program_of

Miss = Callable[[FieldWriter, fx.Node, fx.Node, int], fx.Node]


def _masked(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    """The mask depends on the other field."""
    return w.b.mask(code, w.b.call(aten.bitwise_or.Scalar, other, 1 << w.rng.randrange(bits)))


def _chosen(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    """The other field says whether some bits count."""
    condition = w.b.call(aten.gt.Scalar, other, 0)
    less = w.b.mask(code, (1 << bits) - 2) if w.rng.random() < 0.5 else other
    return w.b.call(aten.where.self, condition, code, less)


def _shared_bit(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    """The lowest bit of one is at the place of the highest of the other."""
    high = w.b.shl(other, bits - 1)
    if w.rng.random() < 0.5:
        return w.b.add(code, high)
    return w.b.call(w.rng.choice((aten.bitwise_or, aten.bitwise_xor)).Tensor, code, high)


def _signed(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    """The sign is a bit of another tensor."""
    b, bit = w.b, w.b.mask(other, 1)
    if w.rng.random() < 0.5:
        return b.mul(code, b.sub(1, b.shl(bit, 1)))
    return b.call(aten.where.self, b.call(aten.gt.Scalar, bit, 0), b.sub(0, code), code)


def _product(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    return w.b.mul(code, other)


def _difference(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    return w.b.sub(code, other) if w.rng.random() < 0.5 else w.b.add(code, other)


def _clamped(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    """Of both, a function that is none of either."""
    joined = w.b.call(aten.bitwise_or.Tensor, code, w.b.shl(other, bits))
    return w.b.call(aten.clamp_max.default, joined, w.rng.randrange(1 << bits, 2 << bits))


def _by_two_tables(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    """A table for each field: the second may be a scale of each element, if it is gathered."""
    return w.b.mul(_looked_up(w, code, bits), _looked_up(w, other, bits))


def _one_index(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    """The sum of the fields is looked up."""
    return _looked_up(w, w.b.add(code, other), bits + 1)


def _written_table(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    """The table is written to for some rows, from the weight's own numbers."""
    b, table = w.b, _table(w, bits)
    first = b.call(aten.select.int, b.call(aten.select.int, b.cast(other, f32), 0, 0), 0, 0)
    place = w.rng.randrange(1 << bits)
    written = b.call(aten.select_scatter.default, table, first, 0, place)
    half = b.shape(code)[0] // 2
    parts = (table, b.slice(code, 0, 0, half)), (written, b.slice(code, 0, half))
    return b.cat([b.index(t, 0, b.cast(part, i64)) for t, part in parts], 0)


def _summed(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    return w.b.call(aten.cumsum.default, code, w.rng.randrange(2))


def _unwritten(w: FieldWriter, code: fx.Node, other: fx.Node, bits: int) -> fx.Node:
    """The upper bits of some rows come from memory that nothing wrote."""
    b = w.b
    last = b.shape(other)[0] - 1
    target = b.empty(b.shape(other), b.dtype(other))
    high = b.call(aten.slice_scatter.default, target, b.slice(other, 0, 0, last), 0, 0, last)
    return b.call(aten.bitwise_or.Tensor, code, b.shl(b.mask(high, (1 << bits) - 1), bits))


def _table(w: FieldWriter, bits: int) -> fx.Node:
    return w.stored(data.floats((1 << bits,), f32, -7, 7, 0.5)).node


def _looked_up(w: FieldWriter, code: fx.Node, bits: int) -> fx.Node:
    return w.b.index(_table(w, bits), 0, w.b.cast(code, i64))


# No functions of the two fields.
NEVER = ("written table", "running sum", "unwritten")
MISSES: dict[str, Miss] = {
    "mask of another field": _masked,
    "chosen by another field": _chosen,
    "shared bit": _shared_bit,
    "sign of another tensor": _signed,
    "product": _product,
    "difference": _difference,
    "clamped number": _clamped,
    "two tables": _by_two_tables,
    "sum as index": _one_index,
    "written table": _written_table,
    "running sum": _summed,
    "unwritten": _unwritten,
}


def field_miss(seed: object) -> Program:
    """The near miss of a seed."""
    rng = random.Random(f"field miss/{seed}")
    writer = FieldWriter(draw_fields(rng), rng)
    name, bits = rng.choice(list(MISSES)), rng.choice((2, 4, 8))
    shape = writer.shape()
    code, other = (
        writer.b.cast(writer.shard(shape, rng.randrange(2), bits).node, i32) for _ in "ab"
    )
    node = MISSES[name](writer, code, other, bits)
    result = writer.scaled(Part(node, lambda stored: torch.zeros(())), bits)
    program, _ = program_of(writer, result, name)
    program.must_reject = name in NEVER or (bits == 8 and name != "two tables")
    return program
