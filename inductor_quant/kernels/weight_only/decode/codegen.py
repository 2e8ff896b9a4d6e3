"""Gluon statements of ``weight_only_decode``, whose warps share K.

Each lane of ``mma.sync`` (W is the first operand) multiplies certain k of certain columns. Which k
is free, as long as x has the same; so a lane loads whole packed words from memory to registers, and
the x at their k. Packed weights never pass through shared memory. Two fields of a word that are 16
bits apart are unpacked into one register.

Each warp prefetches one K iteration, 2 KB, straight to registers; cp.async with 3 to 8 stages was
slower at every size on an H200.

A zero point that is a small integer is subtracted as values are unpacked. All other ops within a
group along K are applied to the sum over the group, as in ``small_m``:
``(sum x*u - (bias + z) * sum x) * s``. The MMA also computes the sum of x, as a product with ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import Dim, bits
from inductor_quant.kernels.codegen.gluon_columns import (
    ColumnStatements,
    Gluon,
    GluonCodegen,
    Loads,
    Uses,
    converted,
)
from inductor_quant.kernels.codegen.gluon_layout import layout, positions, summed_outputs
from inductor_quant.kernels.codegen.packed_layout import BASES, PackedLayout
from inductor_quant.kernels.codegen.packed_tile import PackedTile
from inductor_quant.kernels.codegen.statements import Value
from inductor_quant.kernels.codegen.unpack_ptx import (
    SUBNORMALS,
    unpack_pair,
    unpack_pair_shifted,
)
from inductor_quant.spec.weight_format import DequantOp, Field

SLICE = 128  # of K, per warp and iteration
WORDS = SLICE // 8
COLUMNS = 32  # of N, per warp and iteration: 16 bytes of packed weights per lane
# Per SM at once: with more, a thread lacks registers for what it prefetches.
MAX_WARPS = 16
REGISTERS = 65536
T: Dim = ("t", 4)
R: Dim = ("r", 4)
G: Dim = ("g", 8)
PAIR: Dim = ("pair", 2)
LANE_COLUMNS: tuple[Dim, ...] = (("v1", 2), ("v0", 2))
# Pairs of fields in a word.
PAIRS: tuple[Dim, ...] = (("f1", 2), ("f0", 2))

S = TypeVar("S", bound=ColumnStatements)


class DecodeCodegen(GluonCodegen):
    """A tile is ``blocks`` of 32 columns, a K iteration ``slices`` of 128 for each warp.

    is_resident  there is one K iteration, and x stays in registers from tile to tile
    is_even      K iterations end where K, or its split, does; else the last one masks some warps
    """

    def __init__(self, tile: WeightTile, packed_layout: PackedLayout) -> None:
        config, weight = tile.config, tile.weight
        super().__init__(
            dataclasses.replace(tile, config=dataclasses.replace(config, block_n=COLUMNS))
        )
        self.packed_layout = packed_layout
        self.packed = PackedTile(weight, packed_layout, SLICE, COLUMNS)
        self.slices = config.block_k // (SLICE * self.warps)
        self.blocks = config.block_n // COLUMNS
        split_k = self.k // config.split_k
        self.is_resident = split_k <= config.block_k
        self.is_even = split_k % config.block_k == 0
        self.k_slices, self.slice_k = self.warps, SLICE
        w: Dim = ("w", self.warps)
        self.slice_dims = (w,)
        self.column_dims, self.mma_dims = (G, *LANE_COLUMNS), (*LANE_COLUMNS, G)
        rows: tuple[Dim, ...] = (("b", self.block_m // G[1]), G)
        # A lane loads 16 bytes of words along n, or along k.
        packed_k = (R, T) if self.packed.contiguous == "n" else (T, R)
        self.packed_dims: tuple[Dim, ...] = (w, *packed_k, *self.column_dims)
        self.x_dims: tuple[Dim, ...] = (w, *rows, *packed_k, PAIR, *PAIRS)
        self.x_target: tuple[Dim, ...] = (w, R, T, PAIR, *rows, *PAIRS)
        placed: Any = {"lanes": (T, G), "warps": (w,)}
        self.dialect = Gluon(layout(((w,), self.column_dims), **placed))
        partials, stored, _ = summed_outputs(
            self.warps, self.block_m, self.column_dims, self.mma_dims
        )
        self.layouts = {
            "PACKED": layout(((w,), packed_k, self.column_dims), **placed),
            "UNPACKED": layout(((w,), self.mma_dims, (R, T), (PAIR,)), **placed),
            "X_READ": layout(((w,), rows, (*packed_k, PAIR, *PAIRS)), **placed),
            # Sums for each 8 columns, as the MMA leaves them.
            "X_SUMS": layout(
                ((w,), LANE_COLUMNS, (G,), bits("m", self.block_m)),
                lanes=(("m1", 2), ("m2", 2), G),
                warps=(w,),
            ),
            "PARTIALS": partials,
            "STORED": stored,
            "MMA": f"gl.NVMMADistributedLayout([2, 0], [{self.warps}, 1, 1], [1, 16, 8])",
            "W_MMA": "gl.DotOperandLayout(0, MMA, 2)",
            "X_MMA": "gl.DotOperandLayout(1, MMA, 2)",
            # Free of bank conflicts for what the MMA leaves and for a row of columns.
            "PARTIALS_SHARED": "gl.SwizzledSharedLayout(8, 2, 4, [1, 2, 0])",
        }

    @property
    def buffers(self) -> int:
        """Buffers of partials in shared memory: two if those of a tile are read while those of the
        next are stored."""
        return self.blocks * (2 if self.is_resident else 1)

    @property
    def is_shifted(self) -> bool:
        """Whether unpacking subtracts the zero point. That is exact for small integers, and leaves
        values divided by ``divisor``: half of them need no shift, and no sum of x is needed, which
        would cost MMAs and registers."""
        zero, *others = self.loop_ops or (None,)
        return (
            zero is not None
            and subtracts_small_integers(zero, self.packed_layout, self.x_dtype)
            and all(op.kind == "mul" for op in others)
        )

    @property
    def divisor(self) -> int:
        """The factor of the final sums."""
        return SUBNORMALS[self.x_dtype].divisor if self.is_shifted else 1

    @property
    def loads_x_early(self) -> bool:
        """Whether x is prefetched like the weights: not if that takes too many registers."""
        return self.is_resident or self.block_m == G[1]

    @property
    def max_registers(self) -> int:
        """Per thread, so that ``MAX_WARPS`` warps of several CTAs run at once."""
        return REGISTERS // (32 * MAX_WARPS)

    # x

    def x_offsets(self, stride_m: str, stride_k: str) -> str:
        """Statements that leave in ``x_at`` the addresses of x at k = 0. Rows beyond M repeat the
        last one; the store masks them."""
        return "\n".join(
            [
                f"x_rows = gl.minimum({positions('X_READ', 3, 1, self.block_m)}, M - 1)",
                f"x_slices = {positions('X_READ', 3, 0, self.warps)} * {SLICE}",
                f"x_columns = x_slices + {positions('X_READ', 3, 2, SLICE)}",
                f"x_at = X + x_rows.to(INDEX_DTYPE) * {stride_m}"
                f" + x_columns.to(INDEX_DTYPE) * {stride_k}",
            ]
        )

    def load_x(self, i: int, stride_k: str) -> str:
        """Statements that load x at k for slice i; 0 beyond K, which cancels any W there."""
        how = "" if self.is_even else ", mask=k + x_slices < first + K_SPLIT, other=0.0"
        return f"x{i} = gl.load(x_at + k.to(INDEX_DTYPE) * {stride_k}{how})"

    def x_operands(self, i: int) -> str:
        """Statements that make of ``x<i>`` [warps, BLOCK_M, 128] the second operands ``x<i>_<j>``,
        one for pair j of each word, and ``x_sum<i>``, the sums over k."""
        shape = f"[{self.warps}, {SLICE // 4}, BLOCK_M, 2, 2]"
        lines = [
            f"x = {self.dialect.reordered(f'x{i}', self.x_dims, self.x_target, shape)}",
            "even, odd = gl.split(x)",
            "pair0, pair2 = gl.split(even)",
            "pair1, pair3 = gl.split(odd)",
        ]
        for j in range(4):
            lines.append(f"x{i}_{j} = gl.convert_layout(pair{j}, X_MMA, assert_trivial=True)")
            if not self.is_shifted:
                lines.append(f"x_sum = mma_v2(ones, x{i}_{j}, {'x_sum' if j else 'no_sum'})")
        return "\n".join(lines if self.is_shifted else [*lines, *self._for_all_columns(i)])

    def _for_all_columns(self, i: int) -> list[str]:
        """``x_sum`` is the same in all of its 16 rows. Resident, it is kept once; else a lane uses
        its copies for other columns."""
        if self.is_resident:
            return [f"x_sum{i} = gl.expand_dims(gl.max(x_sum, axis=1), 1)"]
        halves = f"gl.permute(gl.reshape(x_sum, [{self.warps}, 2, 8, BLOCK_M]), [0, 2, 3, 1])"
        zeros = f"gl.full([{self.warps}, {COLUMNS // 8}, 8, BLOCK_M], 0.0, gl.float32, X_SUMS)"
        return [
            f"x_sum, _ = gl.split({halves})",
            f"x_sum = gl.broadcast({converted('x_sum', 'X_SUMS', (1,))}, {zeros})[0]",
            f"x_sum = gl.reshape(x_sum, [{self.warps}, {COLUMNS}, BLOCK_M])",
            f"x_sum{i} = gl.convert_layout(x_sum, MMA, assert_trivial=True)",
        ]

    # the weight

    def offsets(self) -> str:
        """Statements before the loop: the words of a warp, in a slice and a block."""
        slices, rows, columns = (
            positions("PACKED", 3, axis, size)
            for axis, size in enumerate((self.warps, WORDS, COLUMNS))
        )
        return "\n".join(
            [
                f"w_slices = {slices} * {SLICE}",
                f"w_rows = {slices} * {WORDS} + {rows}",
                f"w_columns = {columns}",
            ]
        )

    def load(self, i: int, c: int, stride: Hook, size: Hook, mask: str = "") -> str:
        """Statements that load packed weights, scales and zero points of slice i at k, of block c,
        which is the block ``pid_n`` of all columns."""
        count = self.packed_layout.count
        base = f"{self.packed.base(stride)} + (k // {count}).to(INDEX_DTYPE) * stride_wk"
        offsets = "w_rows.to(INDEX_DTYPE) * stride_wk + w_columns.to(INDEX_DTYPE) * stride_wn"
        masks = [mask] if mask else []
        masks += [] if self.is_even else ["(k + w_slices < first + K_SPLIT)"]
        how = (f", mask={' & '.join(masks)}" if masks else "") + ", eviction_policy='evict_first'"
        out = self._statements(Loads, i, c, stride, size, mask=mask)
        out.load(self.loop_ops)
        return "\n".join(
            [
                *self.packed.strides(stride),
                f"q{i}_{c} = gl.load({base} + ({offsets}){how})",
                *out.lines,
                *out.keep(self._slot(i, c)),
            ]
        )

    def sums(self, i: int, c: int, stride: Hook, size: Hook) -> str:
        """Statements that leave in ``sums`` [warps, 32, BLOCK_M] the scaled products of slice i,
        block c."""
        out = self._statements(Uses, i, c, stride, size, slot=self._slot(i, c))
        shifts = self._shifts(out) if self.is_shifted else []
        before, out.lines = [*out.lines, *shifts], []
        after = self._scaled(out, i)
        return "\n".join([*before, *self._products(i, c), *out.lines, *after])

    def _shifts(self, out: Uses) -> list[str]:
        """``shifts``, the summand of the values of a column."""
        zero, *_ = self.loop_ops
        value = out.widen(out.operand(zero), 1, COLUMNS)
        code = f"(-({value.code}) - {float(self.packed_layout.bias())}) * {1 / self.divisor}"
        return [f"shifts = {self.mma_columns(f'({code}).to({self.x_type})', 'UNPACKED', (2, 3))}"]

    def _products(self, i: int, c: int) -> list[str]:
        target = (*self.slice_dims, *self.mma_dims, R, T)
        shape = f"[{self.warps}, {COLUMNS}, {WORDS}]"
        q = self.dialect.reordered(f"q{i}_{c}", self.packed_dims, target, shape)
        zeros = f"gl.full([{self.warps}, {COLUMNS}, {WORDS}, 2], 0, gl.int32, UNPACKED)"
        lines = [f"q = gl.broadcast({converted(q, 'UNPACKED', (3,))}, {zeros})[0]"]
        arguments = ["q", "shifts"] if self.is_shifted else ["q"]
        for j in range(4):  # one after the other: fewer are in registers at once
            if self.is_shifted:
                assembly = unpack_pair_shifted(self.packed_layout, self.x_dtype, j)
            else:
                assembly = unpack_pair(self.packed_layout, BASES[self.x_dtype], j)
            lines += [
                *self.dialect.inline_asm(assembly, ["w"], arguments, self.x_dtype),
                f"w = gl.reshape(w, [{self.warps}, {COLUMNS}, {SLICE // 4}])",
                "w = gl.convert_layout(w, W_MMA, assert_trivial=True)",
                f"sums = mma_v2(w, x{i}_{j}, {'sums' if j else 'no_sums'})",
            ]
        return lines

    def _scaled(self, out: Uses, i: int) -> list[str]:
        """Statements that apply the bias and the ops to ``sums``."""
        bias = 0.0 if self.is_shifted else float(self.packed_layout.bias(BASES[self.x_dtype]))
        lines = []
        for op in self.loop_ops[1 if self.is_shifted else 0 :]:
            value = out.widen(out.operand(op), 1, COLUMNS)
            if bias and op.kind == "sub":
                value = dataclasses.replace(value, code=f"({value.code} + {bias})")
            elif bias:
                lines.append(f"sums = sums - {bias} * x_sum{i}")
            bias = 0.0
            code = self._like_sums(value)
            if op.kind in ("add", "sub"):
                code += f" * x_sum{i}"
            lines.append(f"sums = {self.dialect.apply(op, 'sums', code)}")
        if bias:
            lines.append(f"sums = sums - {bias} * x_sum{i}")
        return lines

    def _like_sums(self, value: Value) -> str:
        """A value for each column and warp, for each warp, or one for all, like ``sums``."""
        if value.columns > 1:
            return self.mma_columns(value.code, "MMA", (2,))
        return value.code if value.rows == 1 else converted(value.code, "MMA", (2,))

    def _slot(self, i: int, c: int) -> int:
        return i * self.blocks + c

    def _statements(
        self, kind: type[S], i: int, c: int, stride: Hook, size: Hook, **options: Any
    ) -> S:
        tag = f"{kind.__name__[0].lower()}{self._slot(i, c)}_"
        return kind(self, stride, size, tag=tag, position_k="k", **options)


def subtracts_small_integers(op: DequantOp, layout: PackedLayout, x_dtype: torch.dtype) -> bool:
    """Whether ``op`` subtracts integers so small that ``unpack_pair_shifted`` is exact."""
    field = op.operand
    if op.kind != "sub" or not isinstance(field, Field):
        return False
    if not field.width or field.float8 or field.size:
        return False
    highest = abs(layout.bias()) + abs(field.add) + (1 << field.width)
    return highest <= 2 * BASES[x_dtype].value
