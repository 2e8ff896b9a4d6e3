"""Gluon statements of ``weight_only_small_m_sm90``, whose MMA is wgmma.

W is the first operand, from registers: 64 columns per warpgroup. So x, the second, is read from
shared memory once for all of them, and by the tensor core itself. As in ``decode`` a lane takes
whole packed words, two fields of a word that are 16 bits apart share a register, and zero points
are subtracted while unpacking; the resulting order of K is that of x in shared memory.

All operands of a K iteration are copied ahead by ``cp.async``: packed weights, scales, zero points,
and x one iteration earlier, because an iteration reorders the x of the next. (If values are loaded
ahead into registers, ptxas moves their first use to the load, and waits for them.) Each slice of
128 along K has its own allocation per buffer: between accesses to one allocation, whichever part,
Triton synchronizes all warps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import TRITON_TYPES, Dim, bits
from inductor_quant.kernels.codegen.gluon_columns import (
    Copies,
    Gluon,
    GluonCodegen,
    Uses,
    columns_layout,
    converted,
    copied_layout,
    copy_layout,
    kept,
)
from inductor_quant.kernels.codegen.gluon_layout import layout, positions
from inductor_quant.kernels.codegen.packed_layout import PackedLayout
from inductor_quant.kernels.codegen.packed_tile import PackedTile
from inductor_quant.kernels.codegen.statements import Value
from inductor_quant.kernels.codegen.unpack_ptx import SUBNORMALS, unpack_pair_shifted
from inductor_quant.kernels.problem import Weight
from inductor_quant.kernels.weight_only.decode.codegen import (
    REGISTERS,
    SLICE,
    WORDS,
    subtracts_small_integers,
)
from inductor_quant.spec.weight_format import DequantOp, Field, WeightFormat

WARPGROUP = 4
MAX_WARPS = 16  # per SM at once
# The packed words of a slice by row: t counts lanes. (In the order r1, r0, t the 8 lanes that read
# words at once, of two rows, would have bank conflicts.)
R1: Dim = ("r1", 2)
T: Dim = ("t", 4)
R0: Dim = ("r0", 2)
ROWS: tuple[Dim, ...] = (R1, T, R0)
# The fields of a word: which of a pair, in which half of the slice's products, which of the two
# pairs in the 16 k of one wgmma.
PAIR: Dim = ("pair", 2)
HALF: Dim = ("half", 2)
K0: Dim = ("k0", 2)
G: Dim = ("g", 8)
V: Dim = ("v", 2)  # a lane's neighbouring columns
X_DIMS: tuple[Dim, ...] = (*ROWS, PAIR, HALF, K0)
COPIED_TYPES = (*TRITON_TYPES, torch.int32, torch.int16, torch.int8, torch.uint8)


class SmallMSm90Codegen(GluonCodegen):
    """A tile is BLOCK_N columns, 16 per warp; a K iteration is ``slices`` of 128.

    has_all_rows  x has BLOCK_M rows; else rows beyond M are masked, which is faster than repeating
                  the last one
    """

    def __init__(
        self, tile: WeightTile, packed_layout: PackedLayout, *, has_all_rows: bool
    ) -> None:
        super().__init__(tile)
        self.has_all_rows, self.packed_layout = has_all_rows, packed_layout
        self.slices, self.stages = self.block_k // SLICE, tile.config.num_stages
        self.packed = PackedTile(tile.weight, packed_layout, SLICE, self.block_n)
        self.fields = fields_of(self.loop_ops)
        w: Dim = ("w", self.warps)
        self.column_dims, self.mma_dims = (w, G, V), (w, V, G)
        self.rows = bits("m", self.block_m)
        placed: Any = {"lanes": (T, G), "warps": (w,)}
        m: tuple[Dim, ...] = (("m", self.block_m // 8), T, ("pair", 2))
        self.dialect = Gluon(layout(((("s", 1),), self.column_dims), **placed))
        x_shape = f"[{2 * self.block_m}, {SLICE // 2}]"
        self.layouts = {
            "PACKED": layout((ROWS, self.column_dims), **placed),
            "UNPACKED": layout((self.mma_dims, ROWS, (PAIR,)), **placed),
            "X_REORDERED": self._x_reordered(),
            # A lane's neighbours along n are stored together.
            "STORED": layout((m, self.column_dims), **placed),
            "PACKED_COPIED": copy_layout(self.block_n, 4, self.warps),
            "X_COPIED": copy_layout(SLICE, 8, self.warps),
            "MMA": "gl.NVMMADistributedLayout("
            f"[3, 0], [{self.warps}, 1], [16, {self.block_m}, 16])",
            "W_MMA": "gl.DotOperandLayout(0, MMA, 2)",
            "X_SHARED": f"gl.NVMMASharedLayout.get_default_for({x_shape}, {self.x_type})",
            "PACKED_SHARED": "gl.SwizzledSharedLayout(8, 2, 4, [1, 0])",
            "PLAIN_SHARED": "gl.SwizzledSharedLayout(1, 1, 1, [1, 0])",
        }
        for field in self.fields:
            columns, itemsize = self._columns(field), self._itemsize(field)
            copied = copy_layout(columns, 16 // itemsize, self.warps)
            self.layouts[copied_layout(columns, itemsize)] = copied

    @property
    def divisor(self) -> int:
        """The factor of the final sums."""
        return SUBNORMALS[self.x_dtype].divisor

    @property
    def max_registers(self) -> int:
        return REGISTERS // (32 * MAX_WARPS)

    def _x_reordered(self) -> str:
        """The layout in which x is loaded to be reordered, 16 bytes per lane. Neither these loads
        nor the stores of 4 bytes each have bank conflicts."""
        dims: list[Dim] = [("m1", 2), *reversed(self.rows[:-3]), R1]
        count = self.warps.bit_length() - 1
        dims += [("none", 2)] * (count - len(dims))
        lanes: tuple[Dim, ...] = (R0, T, ("m0", 2), ("m2", 2))
        return str(layout((self.rows, X_DIMS), lanes=lanes, warps=dims[:count]))

    def _columns(self, field: Field) -> int:
        """How many values of a field the tile has."""
        return self.resolution(*field.index)[1]

    def _itemsize(self, field: Field) -> int:
        return self.dtypes[field.source].itemsize

    # shared memory

    def buffers(self) -> str:
        """Statements that allocate what is copied for each stage, and x reordered for two K
        iterations."""
        buffers: dict[str, tuple[str, int, int, str]] = {}
        for stage in range(self.stages):
            for i in range(self.slices):
                at = f"{stage}_{i}"
                buffers[f"packed{at}"] = ("gl.int32", WORDS, self.block_n, "PACKED_SHARED")
                buffers[f"raw{at}"] = (self.x_type, self.block_m, SLICE, "PLAIN_SHARED")
                for number, field in enumerate(self.fields):
                    type = self.dialect.type(self.dtypes[field.source])
                    buffers[f"field{number}_{at}"] = (type, 1, self._columns(field), "PLAIN_SHARED")
        for turn in range(2):
            for i in range(self.slices):
                shape = (2 * self.block_m, SLICE // 2)
                buffers[f"x{turn}_{i}"] = (self.x_type, *shape, "X_SHARED")
        return "\n".join(
            f"{name} = gl.allocate_shared_memory({type}, [1, {rows}, {columns}], {shared}).index(0)"
            for name, (type, rows, columns, shared) in buffers.items()
        )

    def shared_bytes(self) -> int:
        fields = sum(self._columns(field) * self._itemsize(field) for field in self.fields)
        x = self.block_m * SLICE * self.x_dtype.itemsize
        stage = WORDS * self.block_n * 4 + x + fields
        return self.slices * (self.stages * stage + 2 * x)

    # copies

    def offsets(self, stride: Hook, stride_m: str, stride_k: str) -> str:
        """Statements before the loop: the addresses of a slice's words, and of x."""
        rows = positions("PACKED_COPIED", 2, 0, WORDS)
        columns = positions("PACKED_COPIED", 2, 1, self.block_n)
        return "\n".join(
            [
                *self.packed.strides(stride),
                f"w_at = {self.packed.base(stride)} + ({rows}).to(INDEX_DTYPE) * stride_wk"
                f" + ({columns}).to(INDEX_DTYPE) * stride_wn",
                f"x_rows = {positions('X_COPIED', 2, 0, self.block_m)}",
                f"x_columns = {positions('X_COPIED', 2, 1, SLICE)}",
                f"x_at = X + x_rows.to(INDEX_DTYPE) * {stride_m}"
                f" + x_columns.to(INDEX_DTYPE) * {stride_k}",
            ]
        )

    def copy(self, stage: int, i: int, stride: Hook, size: Hook, mask: str = "") -> str:
        """Statements that copy slice i at k to ``stage``, all but x."""
        out = Copies(self, stride, size, tag=f"c{stage}_{i}_", position_k="k")
        how = f", mask={mask}" if mask else ""
        first = f"(k // {self.packed_layout.count}).to(INDEX_DTYPE) * stride_wk"
        out.lines.append(f"copy_async(packed{stage}_{i}, w_at + {first}{how})")
        for number, field in enumerate(self.fields):
            out.copy(field, f"field{number}_{stage}_{i}", mask)
        return "\n".join(out.lines)

    def copy_x(self, stage: int, i: int, stride_k: str, mask: str = "") -> str:
        masks = [mask] if mask else []
        masks += [] if self.has_all_rows else ["(x_rows < M)"]
        how = f", mask={' & '.join(masks)}" if masks else ""
        return f"copy_async(raw{stage}_{i}, x_at + k.to(INDEX_DTYPE) * {stride_k}{how})"

    # use

    def reorder_x(self, turn: int, stage: int, i: int) -> str:
        """Statements that store x in the order of the words: [half of the products, row], k."""
        target = (HALF, *self.rows, R1, R0, K0, T, PAIR)
        shape = f"[{2 * self.block_m}, {SLICE // 2}]"
        x = self.dialect.reordered("x", (*self.rows, *X_DIMS), target, shape)
        return f"x = raw{stage}_{i}.load(X_REORDERED)\nx{turn}_{i}.store({x})"

    def products(self, turn: int, stage: int, i: int, stride: Hook, size: Hook) -> str:
        """Statements that add the scaled sums of slice i to ``acc``."""
        out = Uses(self, stride, size, tag=f"u{stage}_{i}_", position_k="k", slot=0)
        for number, field in enumerate(self.fields):
            columns = columns_layout(self._columns(field))
            out.lines.append(f"{kept(0, number)} = field{number}_{stage}_{i}.load({columns})")
        has_zero = bool(self.loop_ops) and self.loop_ops[0].kind == "sub"
        shifts = self._shifts(out, self.loop_ops[0] if has_zero else None)
        target = (*self.mma_dims, *ROWS)
        reordered = self.dialect.reordered
        q = reordered("q", (*ROWS, *self.column_dims), target, f"[BLOCK_N, {WORDS}]")
        lines = [
            f"q = packed{stage}_{i}.load(PACKED)",
            f"whole = gl.full([BLOCK_N, {WORDS}, 2], 0, gl.int32, UNPACKED)",
            f"q = gl.broadcast({converted(q, 'UNPACKED', (2,))}, whole)[0]",
        ]
        for half in range(2):
            for k0 in range(2):
                assembly = unpack_pair_shifted(self.packed_layout, self.x_dtype, 2 * half + k0)
                arguments = ["q", "shifts"]
                lines += self.dialect.inline_asm(assembly, [f"w{k0}"], arguments, self.x_dtype)
            dims = (*self.mma_dims, *ROWS, PAIR, K0)
            target = (*self.mma_dims, R1, R0, K0, T, PAIR)
            w = reordered("gl.join(w0, w1)", dims, target, f"[BLOCK_N, {SLICE // 2}]")
            x = f"x{turn}_{i}.slice({half * self.block_m}, {self.block_m}).permute((1, 0))"
            before = "sums" if half else "no_sums"
            lines += [
                f"w = gl.convert_layout({w}, W_MMA, assert_trivial=True)",
                f"sums = warpgroup_mma(w, {x}, {before}, use_acc={bool(half)}, is_async=True)",
            ]
        after = self._scaled(out, self.loop_ops[1 if has_zero else 0 :])
        return "\n".join([*out.lines, *shifts, *lines, *after])

    def _shifts(self, out: Uses, zero: DequantOp | None) -> list[str]:
        """``shifts``, the summand of the values of a column."""
        value = Value("0.0", 1, 1)
        if zero is not None:
            value = out.widen(out.operand(zero), 1, self.block_n)
        bias = float(self.packed_layout.bias())
        code = out.broadcast(value, f"((-({value.code}) - {bias}) * {1 / self.divisor})")
        return [f"shifts = {self.mma_columns(f'({code}).to({self.x_type})', 'UNPACKED', (1, 2))}"]

    def _scaled(self, out: Uses, scales: tuple[DequantOp, ...]) -> list[str]:
        """Statements that wait for ``sums``, scale them and add them to ``acc``."""
        lines = ["sums = warpgroup_mma_wait(0, deps=(sums,))"]
        for op in scales:
            value = out.widen(out.operand(op), 1, self.block_n)
            code = value.code
            if value.columns > 1:
                code = self.mma_columns(code, "MMA", (1,))
            lines.append(f"sums = {self.dialect.apply(op, 'sums', code)}")
        return [*lines, "acc = acc + sums"]


def fields_of(ops: tuple[DequantOp, ...]) -> tuple[Field, ...]:
    """What the ops read, each once."""
    return tuple(dict.fromkeys(op.operand for op in ops if isinstance(op.operand, Field)))


def supports_ops(ops: tuple[DequantOp, ...], layout: PackedLayout, x_dtype: torch.dtype) -> bool:
    """Whether ``ops`` are a small integer zero point, if any, and scales."""
    if ops and subtracts_small_integers(ops[0], layout, x_dtype):
        ops = ops[1:]
    return all(op.kind == "mul" for op in ops)


def are_neighbours(field: Field, weight: Weight, columns: int) -> bool:
    """Whether ``columns`` columns of W read contiguous values of a field, at least 16 bytes, of a
    dtype that can be copied to shared memory."""
    tensor, format = weight.tensors[field.source], weight.format
    if tensor.dtype not in COPIED_TYPES:
        return False
    digits = [_digits(format, n) for n in range(columns)]
    places = list(dict.fromkeys(tuple(index.value(at) for index in field.index) for at in digits))
    *others, last = zip(*places, strict=True)
    is_row = all(len(set(each)) == 1 for each in others)
    is_row = is_row and list(last) == list(range(last[0], last[0] + len(last)))
    return is_row and len(last) * tensor.dtype.itemsize >= 16


@functools.cache  # layers of a model are alike, and this loops over all columns
def are_aligned(field: Field, weight: Weight, columns: int) -> bool:
    """Whether a field's tensor is contiguous along its last axis, and what each ``columns`` columns
    read begins at a multiple of 16 bytes for every k: ``cp.async`` is fastest with 16 bytes."""
    tensor, format = weight.tensors[field.source], weight.format
    strides = [stride for stride in tensor.strides if stride is not None]
    if not tensor.is_aligned or len(strides) < len(tensor.shape) or strides[-1] != 1:
        return False

    def is_at_16(digits: dict[str, int]) -> bool:
        places = [index.value(digits) for index in field.index]
        elements = sum(place * stride for place, stride in zip(places, strides, strict=True))
        return elements * tensor.dtype.itemsize % 16 == 0

    _, n = format.shape
    of_k = [
        _digits(format, 0) | {name: digit}
        for name in format.digits("k")
        for digit in range(format.radix(name))
    ]
    return all(map(is_at_16, [_digits(format, first) for first in range(0, n, columns)] + of_k))


def _digits(format: WeightFormat, n: int) -> dict[str, int]:
    """The digits of column n at k = 0."""
    of_n = (f"n{i}" for i in range(len(format.n)))
    return dict.fromkeys((f"k{i}" for i in range(len(format.k))), 0) | {
        name: n // format.weight_of(name) % format.radix(name) for name in of_n
    }
