"""The ways in which programs unpack the fields of packed words.

All of them give the same [D0, D1] tensor of integers from a [D0, D1 / fields] (or [D0 / fields,
D1]) tensor of words; ``Packing`` says where the fields lie, ``axes`` how it is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import fx

from tests.support.programs.axes import PER_SLICE, Axes
from tests.support.programs.builder import END, Builder, aten

Amount = int | fx.Node


@dataclasses.dataclass(frozen=True)
class Packing:
    """Fields of ``bits`` bits in words of ``word_bits``, along dimension ``dim`` of the words."""

    bits: int
    word_bits: int
    slots: tuple[int, ...]
    is_split: bool
    dim: int
    signed: bool

    @property
    def fields(self) -> int:
        return len(self.slots)

    @property
    def offsets(self) -> list[int]:
        return [self.bits * slot for slot in self.slots]

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def slot_dim(self) -> int:
        """The dimension of the fields where words and fields have one each."""
        return self.dim if self.is_split else self.dim + 1

    @property
    def word_dim(self) -> int:
        return self.dim + 1 if self.is_split else self.dim


class Unpacker:
    """Unpacks words of one packing. ``data(name, tensor)`` makes an input of a shift table."""

    def __init__(
        self,
        builder: Builder,
        axes: Axes,
        packing: Packing,
        data: Callable[[str, torch.Tensor], fx.Node],
    ) -> None:
        self.b, self.axes, self.p, self.data = builder, axes, packing, data
        self.tables: dict[tuple[str, torch.dtype], fx.Node] = {}
        # the same for all fields
        is_int8 = packing.signed or (packing.bits < 8 and builder.rng.random() < 0.7)
        self.narrow = torch.int8 if is_int8 else torch.uint8
        self.is_widened = builder.rng.random() < 0.3

    def unpack(self, words: fx.Node) -> fx.Node:
        """The fields, in the dtype that the spelling leaves them in."""
        if self.p.fields == 1:
            return words
        if self.axes.assembly in PER_SLICE:
            fields = self._per_slice(words)
        else:
            way = {
                "expand": self._expand,
                "strided": self._strided,
                "index": self._indexed,
                "index flat": self._indexed,
                "bytes": self._bytes,
            }[self.axes.assembly]
            fields = way(words)
        fields = self.b.reshape(fields, self._shape(words))
        return self._sign(fields) if self.p.signed else fields

    def _shape(self, words: fx.Node) -> list[int]:
        shape = self.b.shape(words)
        shape[self.p.dim] *= self.p.fields
        return shape

    # ---- shift amounts

    def _table(self, what: str, dtype: torch.dtype) -> fx.Node:
        """1-D: the offset of each field (``offsets``), the offsets in the order in which they lie
        in a word (``memory``), or the slot of each field (``slots``)."""
        key = (what, dtype)
        if key not in self.tables:
            self.tables[key] = self._new_table(what, dtype)
        return self.tables[key]

    def _new_table(self, what: str, dtype: torch.dtype) -> fx.Node:
        b, fields, bits = self.b, self.p.fields, self.p.bits
        if what == "memory":
            amounts = [bits * slot for slot in range(fields)]
        else:
            amounts = self.p.offsets if what == "offsets" else list(self.p.slots)
        kind = self.axes.shifts
        if kind == "input":
            return self.data(what, torch.tensor(amounts, dtype=dtype))
        if kind == "literal":
            return b.cat([b.full([1], amount, dtype) for amount in amounts], 0)
        if kind == "iota":
            step = amounts[1] - amounts[0]
            if amounts == list(range(amounts[0], amounts[0] + step * fields, step)):
                if b.rng.random() < 0.5:
                    return b.iota(fields, amounts[0], step, dtype)
                numbers = b.mul(b.iota(fields, 0, 1, dtype), step)
                return b.add(numbers, amounts[0]) if amounts[0] else numbers
            numbers = b.iota(fields, 0, 1 if what == "slots" else bits, dtype)
            return b.index(numbers, 0, b.constant(torch.tensor(self.p.slots)))
        return b.constant(torch.tensor(amounts, dtype=dtype))

    def _table_dtype(self, words: fx.Node) -> torch.dtype:
        own = self.b.dtype(words)
        if self.axes.extraction == "shl, shr":  # in a wider dtype no bit would drop out
            return own
        return self.b.rng.choice((own, torch.int32, torch.int64))

    def _aligned(self, table: fx.Node, rank: int, dim: int) -> fx.Node:
        """A 1-D table along ``dim`` of ``rank``."""
        b = self.b
        if b.rng.random() < 0.5:
            return b.reshape(table, [-1 if i == dim else 1 for i in range(rank)])
        for _ in range(dim):
            table = b.call(aten.unsqueeze.default, table, 0)
        for i in range(dim + 1, rank):
            table = b.call(aten.unsqueeze.default, table, i)
        return table

    # ---- one field of each word

    def _extract(self, words: fx.Node, amount: Amount) -> fx.Node:
        """The bits from ``amount`` up: unsigned, unless the spelling extends the sign."""
        b, p, how = self.b, self.p, self.axes.extraction
        if how == "shift, mask":
            return b.mask(b.shr(words, amount), p.mask)
        if how == "mask, shift":
            return self._mask_shift(words, amount)
        if how == "shl, shr":
            left = p.word_bits - p.bits
            rest = left - amount if isinstance(amount, int) else b.sub(left, amount)
            return b.shr(b.shl(words, rest), left)
        if how == "floor-div, remainder":
            return self._divided(words, amount)
        field = b.cast(b.shr(words, amount), self.narrow)
        return b.mask(field, p.mask) if p.bits < 8 else field

    def _mask_shift(self, words: fx.Node, amount: Amount) -> fx.Node:
        b, p = self.b, self.p
        if isinstance(amount, int):
            bits = p.mask << amount
            limit = 1 << (p.word_bits - 1)
            is_top = b.dtype(words).is_signed and bits >= limit
            field = b.shr(b.mask(words, bits - 2 * limit if is_top else bits), amount)
        else:
            ones = b.full([1], p.mask, b.dtype(words))
            field = b.shr(b.mask(words, b.shl(ones, amount)), amount)
            is_top = True
        return b.mask(field, p.mask) if is_top else field

    def _divided(self, words: fx.Node, amount: Amount) -> fx.Node:
        b = self.b
        by: Amount
        if isinstance(amount, int):
            by = 1 << amount
        else:
            by = b.shl(b.full([1], 1, b.dtype(words)), amount)
        if b.dtype(words) == torch.uint8 and self.is_widened:
            words = b.cast(words, torch.int32)
        quotient = words
        if by != 1:
            quotient = b.call(aten.div.Tensor_mode, words, by, rounding_mode="floor")
        if b.dtype(quotient) == torch.uint8 and self.p.bits == 8:
            return quotient
        return b.call(aten.remainder.Scalar, quotient, 1 << self.p.bits)

    def _spread(self, words: fx.Node, table: fx.Node, dim: int) -> fx.Node:
        """All fields of each word, in a new dimension ``dim``."""
        b = self.b
        words = b.unsqueeze(words, dim)
        if b.rng.random() < 0.4:
            shape = b.shape(words)
            shape[dim] = b.shape(table)[0]
            words = b.expand(words, shape)
        return self._extract(words, self._aligned(table, len(b.shape(words)), dim))

    # ---- all fields at once

    def _expand(self, words: fx.Node) -> fx.Node:
        return self._spread(
            words, self._table("offsets", self._table_dtype(words)), self.p.slot_dim
        )

    def _strided(self, words: fx.Node) -> fx.Node:
        """The even and the odd words, unpacked separately and interleaved."""
        b, p = self.b, self.p
        table = self._table("offsets", self._table_dtype(words))
        halves = [b.slice(words, p.dim, start, END, 2) for start in (0, 1)]
        return b.stack([self._spread(half, table, p.slot_dim) for half in halves], p.word_dim + 1)

    def _indexed(self, words: fx.Node) -> fx.Node:
        """In the order of the word, then reordered by an index."""
        b, p = self.b, self.p
        amounts = self._table("memory", self._table_dtype(words))
        fields = self._spread(words, amounts, p.slot_dim)
        slots = self._table("slots", b.rng.choice(INDEX_TYPES))
        if self.axes.assembly == "index":
            return b.index(fields, p.slot_dim, slots)
        flat = b.reshape(fields, self._shape(words))
        length, count = self._shape(words)[p.dim], self.p.fields
        everything = b.iota(length, 0, 1, torch.int32)
        if p.is_split:
            rows = b.reshape(everything, [count, length // count])
            at = b.index(rows, 0, slots)
        else:
            rows = b.reshape(everything, [length // count, count])
            at = b.index(rows, 1, slots)
        return b.index(flat, p.dim, b.reshape(at, [length]))

    def _bytes(self, words: fx.Node) -> fx.Node:
        """The words viewed as bytes, and the bytes unpacked."""
        b, p = self.b, self.p
        if b.values[words].stride(-1) != 1 or b.rng.random() < 0.2:
            words = b.contiguous(words)
        rows, count = b.shape(words)
        dtype = torch.int8 if p.bits == 8 and p.signed else torch.uint8
        fields = b.call(aten.view.dtype, words, dtype)
        if p.bits < 8:
            offsets = list(range(0, 8, p.bits))
            within = dataclasses.replace(
                p, word_bits=8, slots=tuple(range(8 // p.bits)), is_split=False, signed=False
            )
            part = Unpacker(b, self.axes, within, self._named("bytes"))
            if self.axes.shifts == "literal":
                fields = b.stack([part._extract(fields, amount) for amount in offsets], 2)
            else:
                table = part._table("offsets", part._table_dtype(fields))
                fields = part._spread(fields, table, 2)
        fields = b.reshape(fields, [rows, count, p.fields])
        if p.slots != tuple(range(p.fields)):
            fields = b.index(fields, 2, self._table("slots", torch.int64))
        return b.permute(fields, (0, 2, 1)) if p.is_split else fields

    def _named(self, prefix: str) -> Callable[[str, torch.Tensor], fx.Node]:
        return lambda name, value: self.data(f"{prefix}_{name}", value)

    # ---- field by field

    def _amounts(self, words: fx.Node) -> list[Amount]:
        if self.axes.shifts == "literal":
            return list(self.p.offsets)
        table = self._table("offsets", self._table_dtype(words))
        return [self.b.call(aten.select.int, table, 0, j) for j in range(self.p.fields)]

    def _per_slice(self, words: fx.Node) -> fx.Node:
        b, p, how = self.b, self.p, self.axes.assembly
        fields = [self._extract(words, amount) for amount in self._amounts(words)]
        shape = b.shape(fields[0])
        if how == "stack":
            return b.stack(fields, p.slot_dim)
        if how == "cat permute":
            everything = b.cat(fields, p.dim)
            if p.is_split:
                return everything
            split = [*shape[: p.dim], p.fields, *shape[p.dim :]]
            order = [0, 1, 2]
            order[p.dim], order[p.dim + 1] = p.dim + 1, p.dim
            return b.permute(b.reshape(everything, split), order)
        # The tensor written to is sometimes of a float type already, as in HQQ.
        dtype = b.dtype(fields[0])
        if not p.signed and self.axes.cast == "before" and b.rng.random() < 0.4:
            dtype = getattr(torch, self.axes.compute_dtype)
        has_copies = dtype != b.dtype(fields[0]) or b.rng.random() < 0.5
        if how == "select_scatter":
            shape.insert(p.slot_dim, p.fields)
        else:
            shape[p.dim] *= p.fields
        target = b.empty(shape, dtype) if b.rng.random() < 0.7 else b.full(shape, 0, dtype)
        for j, field in enumerate(fields):
            target = self._written(target, field, j, has_copies)
        return target

    def _written(self, target: fx.Node, field: fx.Node, j: int, has_copies: bool) -> fx.Node:
        b, p = self.b, self.p
        if self.axes.assembly == "select_scatter":
            where: tuple[int, ...] = (p.slot_dim, j)
            read, write = aten.select.int, aten.select_scatter.default
        else:
            read, write = aten.slice.Tensor, aten.slice_scatter.default
            count = b.shape(field)[p.dim]
            if p.is_split:
                is_last = j == p.fields - 1 and b.rng.random() < 0.5
                where = (p.dim, j * count, END if is_last else (j + 1) * count)
            else:
                where = (p.dim, j, END, p.fields)
        if has_copies:
            field = b.call(aten.copy.default, b.call(read, target, *where), field)
        return b.call(write, target, field, *where)

    # ---- the sign

    def _sign(self, field: fx.Node) -> fx.Node:
        """``field`` as a signed value, unless its extraction made it one."""
        b, p, how = self.b, self.p, self.axes.sign
        if self.axes.extraction == "shl, shr":
            return field
        if p.bits == 8 and b.dtype(field) == torch.int8:
            return field
        if how == "cast":
            return b.cast(field, torch.int8)
        if b.dtype(field) == torch.uint8 or how == "int8 shl, shr":
            is_viewed = b.dtype(field) == torch.uint8 and b.rng.random() < 0.4 and p.bits < 8
            if is_viewed:
                field = b.call(aten.view.dtype, field, torch.int8)
            elif how == "int8 shl, shr" and p.bits < 8:
                field = b.cast(field, torch.int8)
            else:
                field = b.cast(field, b.rng.choice((torch.int16, torch.int32)))
        top = 1 << (p.bits - 1)
        if how == "int8 shl, shr":
            left = torch.iinfo(b.dtype(field)).bits - p.bits
            return b.shr(b.shl(field, left), left)
        if b.dtype(field) == torch.int8 and p.bits == 8:
            return field
        if how == "xor, sub":
            return b.sub(b.call(aten.bitwise_xor.Scalar, field, top), top)
        if how == "where":
            compare = b.rng.choice(((aten.gt.Scalar, top - 1), (aten.ge.Scalar, top)))
            condition = b.call(compare[0], field, compare[1])
            return b.call(aten.where.self, condition, b.sub(field, 2 * top), field)
        return b.sub(field, b.shl(b.mask(field, top), 1))


INDEX_TYPES = (torch.int32, torch.int64)
