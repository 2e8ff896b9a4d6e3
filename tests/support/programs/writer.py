"""Writes the graph of a dequantization program.

Words to fields (``unpacking``), fields to numbers, zeros and scales, the layout of W.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from tests.support.programs import data
from tests.support.programs.axes import FLOATS, TABLES, WORDS, Axes, is_chain
from tests.support.programs.builder import Builder, aten, noop
from tests.support.programs.data import FP8, Data
from tests.support.programs.unpacking import Packing, Unpacker

DTYPES: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16)


class Writer:
    """Writes one program."""

    def __init__(self, axes: Axes, rng: random.Random) -> None:
        self.axes, self.rng = axes, rng
        self.numbers = np.random.default_rng(rng.getrandbits(32))
        self.b = Builder(rng)
        self.data = Data()
        self.arrangements: dict[str, str] = {}
        self.marks: dict[str, fx.Node] = {}
        self.noop_at = rng.choice(("words", "codes", "result"))
        self.compute_dtype = getattr(torch, axes.compute_dtype)
        self.scale_dtype = getattr(torch, axes.scale_dtype)

    def write(self) -> fx.Node:
        axes, b = self.axes, self.b
        words = self.noop(self.words(), "words")
        self.marks["words"] = words
        dim = axes.compute.index(axes.pack) if axes.pack != "-" else 0
        self.unpacker = Unpacker(b, axes, self.packing(dim, axes.layout == "split"), self.table)
        codes = self.noop(self.unpacker.unpack(words), "codes")
        self.marks["codes"] = codes
        if axes.element in TABLES:
            codes = self.looked_up(codes)
        result = self.affine(codes)
        if axes.output != axes.compute:
            result = b.swap(result)
        result = b.cast(result, getattr(torch, axes.output_dtype))
        if not b.dtype(result).is_floating_point:
            result = b.cast(result, self.compute_dtype)
        return self.noop(result, "result")

    def packing(self, dim: int, is_split: bool) -> Packing:
        axes = self.axes
        size = WORDS.get(axes.word, 8)
        return Packing(axes.bits, size, axes.slots, is_split, dim, axes.is_signed)

    def input(self, name: str, fill: data.Fill) -> fx.Node:
        return self.b.input(name, self.data.add(self.numbers, name, fill))

    def table(self, name: str, value: torch.Tensor) -> fx.Node:
        """An input that holds shift amounts or slots."""
        bits, size = self.axes.bits, WORDS.get(self.axes.word, 8)
        most = self.axes.fields - 1 if name.endswith("slots") else size - bits
        if name.startswith("bytes_o"):
            most = 8 - bits
        return self.input(f"table_{name}_{len(self.data.values)}", data.table(value, most))

    # ---- words

    def words(self) -> fx.Node:
        """The words, [K, N] or [N, K] as the program computes."""
        axes, b = self.axes, self.b
        k, n = axes.k, axes.n
        if axes.pack == "K":
            k //= axes.fields
        elif axes.pack == "N":
            n //= axes.fields
        groups = self.leading_groups(k)
        shape = {"KN": (k, n), "NK": (n, k), "3-D": (groups, n, k // groups)}[axes.stored]
        stored = self.input("words", self.filled(shape))
        if axes.stored == "3-D":
            if axes.compute == "KN":
                return b.reshape(b.permute(stored, (0, 2, 1)), [k, n])
            return b.reshape(b.permute(stored, (1, 0, 2)), [n, k])
        return stored if axes.stored == axes.compute else b.swap(stored)

    def leading_groups(self, rows: int) -> int:
        """The leading size of a 3-D tensor of ``rows`` words along K: the groups if they nest."""
        axes = self.axes
        is_adjacent = axes.pack == "K" and axes.layout == "adjacent"
        strides, fields = axes.strides("K"), axes.fields if is_adjacent else 1
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        nesting = [d for d in divisors if is_chain(strides | {fields * (rows // d)})]
        are_groups_leading = axes.groups[0] in nesting and axes.groups[0] > 1
        return axes.groups[0] if are_groups_leading else self.rng.choice(nesting or divisors)

    def filled(self, shape: tuple[int, ...]) -> data.Fill:
        axes = self.axes
        if axes.element in FLOATS:
            dtype = FP8[axes.element]
            return data.floats8(shape, dtype, dtype if axes.word == "own" else torch.uint8)
        if axes.element == "i4 in i8":
            return data.unpacked(shape, -8, 7)
        if axes.word == "uint8 each":
            return data.integers(shape, torch.uint8, 0, 2**axes.bits - 1)
        return data.words(shape, getattr(torch, axes.word))

    def looked_up(self, codes: fx.Node) -> fx.Node:
        size = (2**self.axes.bits,)
        fill = data.floats(size, self.rng.choice(DTYPES), -7, 7, 0.5)
        if self.rng.random() < 0.3:
            table = self.b.constant(fill(self.numbers, "base", self.data))
            self.arrangements["lut"] = "constant"
            self.data.fills["lut"] = lambda rng, style, all_data: self.b.values[table]
            self.data.values["lut"] = self.b.values[table]
        else:
            table = self.input("lut", fill)
        if self.b.dtype(codes) not in (torch.int32, torch.int64):
            codes = self.b.cast(codes, self.rng.choice((torch.int32, torch.int64)))
        return self.b.index(table, 0, codes)

    # ---- zeros and scales

    def affine(self, codes: fx.Node) -> fx.Node:
        axes, b = self.axes, self.b
        shape = b.shape(codes)
        is_float8 = axes.element in FLOATS
        if is_float8 and axes.word != "own":
            codes = b.call(aten.view.dtype, codes, FP8[axes.element])
        codes = self.blocked(codes)
        if axes.is_folded:
            x = self.scaled(self.number(codes, is_float8))
            offset = self.aligned(self.folded())
            x = (b.sub if axes.zero == "q*s - t" else b.add)(x, self.like_compute(offset))
        else:
            x = self.scaled(self.without_zero(codes, is_float8))
        x = b.reshape(x, shape)
        if axes.scale == "two factors" and not self.has_second:
            x = b.mul(x, self.second())
        return x

    def number(self, x: fx.Node, is_float8: bool = False) -> fx.Node:
        if self.axes.cast == "promoted" or (self.b.dtype(x).is_floating_point and not is_float8):
            return x
        x = self.b.cast(x, self.compute_dtype)
        self.marks["numbers"] = x
        return x

    def without_zero(self, codes: fx.Node, is_float8: bool) -> fx.Node:
        """The codes minus their zeros, cast where the program does."""
        axes, b = self.axes, self.b
        if axes.zero == "none":
            return self.number(codes, is_float8)
        if axes.cast == "before":
            x = self.number(codes)
            if axes.zero == "constant":
                return self.minus(x, self.constant_zero())
            if axes.zero == "float":
                return b.sub(x, self.like_compute(self.aligned(self.float_zero())))
            return b.sub(x, b.cast(self.integer_zero(self.compute_dtype), self.compute_dtype))
        fits_int8 = axes.bits < 8 and axes.zero != "integer"
        narrow = torch.int8 if fits_int8 else torch.int16
        dtype = torch.int8 if axes.cast == "int8" else self.rng.choice((torch.int32, torch.int16))
        if axes.cast == "promoted" and self.rng.random() < 0.5:
            dtype = narrow
        x = b.cast(codes, dtype)
        self.marks["codes to subtract"] = x
        if axes.zero == "constant":
            x = self.minus(x, self.constant_zero())
        else:
            x = b.sub(x, b.cast(self.integer_zero(dtype), dtype))
        return self.number(x)

    def minus(self, x: fx.Node, number: int) -> fx.Node:
        return self.b.sub(x, number) if self.rng.random() < 0.7 else self.b.add(x, -number)

    def constant_zero(self) -> int:
        return 3 if self.axes.is_signed else 1 << (self.axes.bits - 1)

    def zero_range(self) -> tuple[int, int]:
        half = 1 << (self.axes.bits - 1)
        return (1 - half, half) if self.axes.is_signed else (0, 2 * half - 1)

    def float_zero(self) -> fx.Node:
        low, high = self.zero_range()
        step = 0.5 if self.axes.bits <= 4 else 1.0
        low, high = (low, high - 1) if step == 1.0 else (2 * low, 2 * high)
        return self.stored(
            "zero", lambda shape: data.floats(shape, self.scale_dtype, low, high, step)
        )

    def folded(self) -> fx.Node:
        low, high = self.zero_range()

        def fill(shape: tuple[int, ...]) -> data.Fill:
            zeros = data.integers(shape, torch.int32, low, high - 1)
            return data.folded(zeros, "scale", self.scale_dtype, self.axes.scale)

        return self.stored("zero", fill, self.arrangements["scale"])

    def integer_zero(self, dtype: torch.dtype) -> fx.Node:
        """The zeros as integers, aligned with the codes, to be subtracted as ``dtype``."""
        axes, b = self.axes, self.b
        if axes.zero == "integer":
            low, high = self.zero_range()
            # Wider zeros could make a subtraction wrap, or a cast to a float round.
            options = [torch.int8 if axes.is_signed or axes.bits < 8 else torch.uint8]
            if dtype in (torch.int32, torch.float32):
                options.append(torch.int16)
            high -= axes.is_signed
            kind = self.rng.choice(options)
            return self.aligned(
                self.stored("zero", lambda shape: data.integers(shape, kind, low, high))
            )
        zero = self.packed_zero()
        if axes.zero == "packed":
            return self.aligned(zero)
        is_late = self.rng.random() < 0.5
        zero = self.aligned(zero) if is_late else zero
        if axes.bits == 8:
            zero = b.cast(zero, torch.int32)
        zero = b.add(zero, 1)
        if axes.zero == "packed + 1 wrapped":
            zero = b.mask(zero, (1 << axes.bits) - 1)
        return zero if is_late else self.aligned(zero)

    def packed_zero(self) -> fx.Node:
        """Zeros packed like the weight, along the axis that has no groups."""
        axes, b = self.axes, self.b
        axis = "N" if axes.group_axis == "K" else "K"
        k, n = axes.groups
        k, n = (k, n // axes.fields) if axis == "N" else (k // axes.fields, n)
        orientation = self.rng.choice(("KN", "NK"))
        shape = (k, n) if orientation == "KN" else (n, k)
        self.arrangements["zero"] = orientation
        words = self.input("zero", data.words(shape, getattr(torch, axes.word)))
        if orientation != axes.compute:
            words = b.swap(words)
        dim = axes.compute.index(axis)
        assembly = axes.assembly
        if assembly == "bytes" and dim == 0:
            assembly = "expand"
        if assembly == "strided" and b.shape(words)[dim] % 2:
            assembly = "expand"
        spelled = dataclasses.replace(axes, assembly=assembly, cast="int")  # integers, in any case
        if assembly == "expand" and axes.assembly == "bytes" and axes.extraction == "-":
            shifts = axes.shifts if axes.shifts != "-" else "iota"
            spelled = dataclasses.replace(spelled, extraction="shift, mask", shifts=shifts)
        unpacker = Unpacker(b, spelled, self.packing(dim, False), self.table)
        if self.rng.random() < 0.5:
            unpacker.tables = self.unpacker.tables
        return unpacker.unpack(words)

    def scaled(self, x: fx.Node) -> fx.Node:
        axes, b = self.axes, self.b
        self.has_second = False
        high = -1 if axes.element in FLOATS else 1
        if axes.scale == "exp2":
            exponents = self.stored(
                "scale", lambda shape: data.integers(shape, torch.int8, -4, high)
            )
            exponents = b.cast(exponents, torch.float32)
            if self.rng.random() < 0.5:
                scale = b.call(aten.exp2.default, exponents)
            else:
                scale = b.call(aten.pow.Scalar, 2.0, exponents)
        else:
            is_exact = axes.scale in ("div", "reciprocal") or axes.bits == 8 or axes.is_folded
            bounds = (1, 4) if axes.scale in ("div", "reciprocal") else (-4, high)
            scale = self.stored(
                "scale", lambda shape: data.scales(shape, self.scale_dtype, bounds, is_exact)
            )
        if axes.scale == "reciprocal":
            scale = b.call(aten.reciprocal.default, scale)
        is_flat = axes.operands in ("repeat", "index", "broadcast")
        scale = self.aligned(scale)
        if (
            axes.scale == "two factors"
            and is_flat
            and not axes.is_folded
            and self.rng.random() < 0.5
        ):
            self.has_second = True
            scale = b.mul(scale, self.second())
        scale = self.like_compute(scale)
        if axes.scale == "div":
            return b.call(aten.div.Tensor, x, scale)
        return b.mul(x, scale) if self.rng.random() < 0.5 else b.mul(scale, x)

    def second(self) -> fx.Node:
        """A second scale per column of W."""
        b, n = self.b, self.axes.n
        high = 0 if self.axes.element in FLOATS else 1
        node = self.input("scale2", data.scales((n,), self.scale_dtype, (-1, high), True))
        return b.unsqueeze(node, 1) if self.axes.compute == "NK" else node

    def like_compute(self, x: fx.Node) -> fx.Node:
        if self.axes.scale_cast == "implicit" or self.axes.cast == "promoted":
            return x
        return self.b.cast(x, self.compute_dtype)

    # ---- how operands are broadcast to the weight

    def stored(self, name: str, fill: Any, arrangement: str = "") -> fx.Node:
        """[groups of dimension 0, groups of dimension 1] out of a tensor stored in some way."""
        b, axes = self.b, self.axes
        k, n = axes.groups
        if not arrangement:
            arrangement = self.rng.choice(("KN", "NK", *["flat"] * (2 * (k == 1 or n == 1))))
        self.arrangements[name] = arrangement
        shape: tuple[int, ...] = {"KN": (k, n), "NK": (n, k), "flat": (k * n,)}[arrangement]
        if shape == (1,) and self.rng.random() < 0.5:
            shape = ()
        if name == "zero" and axes.is_folded:
            shape = tuple(self.data.values["scale"].shape)
        node = self.input(name, fill(shape))
        groups = [k, n] if axes.compute == "KN" else [n, k]
        if arrangement == "flat":
            is_last = groups[0] == 1 and axes.operands == "broadcast" and self.rng.random() < 0.5
            return node if is_last else b.reshape(node, groups)
        return node if arrangement == axes.compute else b.swap(node)

    def blocked(self, codes: fx.Node) -> fx.Node:
        """The codes in the shape in which zeros and scales broadcast to them."""
        b, axes = self.b, self.axes
        rows, columns = b.shape(codes)
        if axes.operands == "rows":
            return b.reshape(codes, [-1, self.blocks()[1]])
        if axes.operands != "view":
            return codes
        shape: list[int] = []
        for size, block in zip((rows, columns), self.blocks(), strict=True):
            shape += [size] if block in (1, size) else [size // block, block]
        return b.reshape(codes, shape)

    def blocks(self) -> tuple[int, int]:
        k, n = self.axes.block
        return (k, n) if self.axes.compute == "KN" else (n, k)

    def aligned(self, x: fx.Node) -> fx.Node:
        """Scales or zeros [S0, S1] in a shape that broadcasts to the blocked codes."""
        b, axes = self.b, self.axes
        if axes.operands == "broadcast":
            return x
        if axes.operands == "rows":
            rows, columns = b.shape(x)
            return b.reshape(x, [rows * columns, 1])
        groups, blocks = b.shape(x), self.blocks()
        for dim in (1, 0):
            if blocks[dim] == 1 or groups[dim] == 1:
                continue
            if axes.operands == "view":
                x = b.unsqueeze(x, dim + 1)
            elif axes.operands == "repeat":
                x = self.repeated(x, dim, blocks[dim])
            else:
                x = b.index(x, dim, self.group_index(axes.compute[dim], groups[dim], blocks[dim]))
        return x

    def repeated(self, x: fx.Node, dim: int, times: int) -> fx.Node:
        """``repeat_interleave``."""
        b = self.b
        shape = b.shape(x)
        wide = b.unsqueeze(x, dim + 1)
        wide = b.expand(wide, [*shape[: dim + 1], times, *shape[dim + 1 :]])
        shape[dim] *= times
        return b.reshape(b.contiguous(wide), shape)

    def group_index(self, axis: str, groups: int, block: int) -> fx.Node:
        """The group of each position: act-order's tensor, or position // group size."""
        b, size = self.b, groups * block
        if self.axes.act_order != "-":
            if "g_idx" not in self.marks:
                dtype = self.rng.choice((torch.int32, torch.int64))
                self.marks["g_idx"] = self.input(
                    "g_idx", data.integers((size,), dtype, 0, groups - 1)
                )
            return b.cast(self.marks["g_idx"], torch.int64)
        dtype = self.rng.choice((torch.int32, torch.int64))
        way = self.rng.randrange(4)
        if way == 0:
            return b.constant(torch.arange(size) // block)
        if way == 1:
            positions = b.iota(size, 0, 1, dtype)
            return b.call(aten.div.Tensor_mode, positions, block, rounding_mode="floor")
        if way == 2 and block & (block - 1) == 0:
            return b.shr(b.iota(size, 0, 1, dtype), block.bit_length() - 1)
        return self.repeated(b.iota(groups, 0, 1, dtype), 0, block)

    def noop(self, x: fx.Node, where: str) -> fx.Node:
        """The program's no-op, if this is its place."""
        kind = self.axes.noop
        place = {"mul 1": "result", "lshift 0": "codes"}.get(kind, self.noop_at)
        return x if kind == "none" or place != where else noop(self.b, x, kind)
