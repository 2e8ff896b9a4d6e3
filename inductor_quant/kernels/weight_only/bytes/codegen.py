"""Triton statements of ``weight_only_bytes``: load a tile of bytes, convert, multiply.

The tile keeps its natural order: shared memory gives four neighbours along K at a time, in the
layout of the MMA's first operand (x first: the converted tile returns to shared memory). As in
``small_m``, loop ops are applied to the sums of a group.
"""

from __future__ import annotations

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.byte_layout import ByteLayout
from inductor_quant.kernels.codegen.packed_tile import join, split
from inductor_quant.kernels.codegen.statements import Statements
from inductor_quant.kernels.codegen.unpack_ptx import convert_bytes
from inductor_quant.kernels.codegen.weight import TritonCodegen
from inductor_quant.spec.weight_format import DequantOp


class BytesCodegen(TritonCodegen):
    """``is_x_first``: x is the MMA's first operand, W the second; else W^T is (swap_ab)."""

    def __init__(self, tile: WeightTile, layout: ByteLayout, *, is_x_first: bool) -> None:
        super().__init__(tile)
        self.is_x_first, self.layout = is_x_first, layout
        self.source = f"W{self.format.element.source}"
        self.conversion = convert_bytes(layout, self.x_dtype) if layout.kind == "u8" else None
        self.factor = self.conversion.factor if self.conversion else 1
        self.bias = self.conversion.bias if self.conversion else 0
        self.bytes_n = self.block_n // layout.count
        self.accumulators = [f"acc{i}" for i in range(layout.count)]
        step = tile.config.split_k * self.block_k
        self.is_even_k, self.is_even_n = self.k % step == 0, self.n % self.block_n == 0
        self.k_split = -(-self.k // step) * self.block_k  # of a slice of K

    def offsets(self, stride: Hook) -> str:
        """Statements before the loop: ``w_base``, the offset of each byte from it, and an
        accumulator for each field of a byte."""
        layout, pointer = self.layout, self.source
        found = [str(stride(self.source, dim)) for dim in range(len(layout.strides))]
        # The stride of a dimension of size 1 is arbitrary.
        shape = self.shapes[int(self.source[1:])]
        for size, text, known in zip(shape, found, layout.strides, strict=True):
            assert size == 1 or text == str(known), f"strides {found}, not {layout.strides}"
        if layout.element_bytes > 1:
            pointer = f"{pointer}.to(tl.pointer_type(tl.uint8), bitcast=True)"
        n, stride_n = self.bytes_n, layout.stride_n
        shape_of_sums = f"(BLOCK_M, {n})" if self.is_x_first else f"({n}, BLOCK_M)"
        base = f"{pointer} + (pid_n * {n}).to(INDEX_DTYPE) * {stride_n} + {layout.start}"
        return "\n".join(
            [
                f"bytes_n = {self._row()} * {stride_n}",
                "w_offsets = bytes_n[:, None] + rk[None, :]",
                f"w_base = {base}",
                *(f"{a} = tl.zeros({shape_of_sums}, dtype=tl.float32)" for a in self.accumulators),
            ]
        )

    def _row(self) -> str:
        """The row of bytes of each column of the tile, from the tile's first one."""
        if self.is_even_n:
            return f"tl.arange(0, {self.bytes_n}).to(INDEX_DTYPE)"
        return "(rn - pid_n * BLOCK_N)"

    def tile(self) -> str:
        """Statements in the loop that leave the tile at k in ``w0`` [bytes along N, BLOCK_K],
        ``w1`` and so on: a field of each byte, divided by ``factor`` and with its ``bias``."""
        mask = "" if self.is_even_k else ", mask=(k + rk)[None, :] < K"
        lines = [f"q = tl.load(w_base + k.to(INDEX_DTYPE) + w_offsets{mask})"]
        if self.conversion is None:
            # Through fp16 and fp32, in pairs and exact: a direct conversion to bf16 takes a slow
            # instruction per value (e4m3), or loses infinities (e5m2).
            types = ["tl.float16"]
            if self.x_type != "tl.float16":
                types += ["tl.float32", self.x_type]
            lines.append("w0 = q" + "".join(f".to({type})" for type in types))
            if mask:  # x is 0 beyond K, where W may be NaN
                lines.append("w0 = tl.where((k + rk)[None, :] < K, w0, 0.0)")
            return "\n".join(lines)
        names = [f"w{i}" for i in range(self.layout.count)]
        assembly = self.conversion.assembly
        return "\n".join([*lines, *self.dialect.inline_asm(assembly, names, ["q"], self.x_dtype)])

    @property
    def scales_blocks(self) -> bool:
        """Whether ops are applied to the sums of each block of K."""
        return bool(self.loop_ops or self.bias)

    def product(self, stride: Hook, size: Hook) -> str:
        """Statements in the loop that add the products of ``x`` and ``w0``, ``w1`` ... to the
        accumulators, [bytes along N, BLOCK_M], or its transpose if x is first."""
        names = list(enumerate(self.accumulators))
        operands = "x, tl.trans(w{})" if self.is_x_first else "w{}, tl.trans(x)"
        if not self.scales_blocks:
            return "\n".join(f"{acc} = tl.dot({operands.format(i)}, {acc})" for i, acc in names)
        lines = [f"sums{i} = tl.dot({operands.format(i)})" for i, _ in names]
        if self.factor != 1:
            lines += [f"sums{i} = sums{i} * {float(self.factor)}" for i, _ in names]
        if self.bias or any(op.kind in ("add", "sub") for op in self.loop_ops):
            across = "[:, None]" if self.is_x_first else "[None, :]"
            lines.append(f"x_sum = tl.sum(x.to(tl.float32), axis=1){across}")
        if self.bias:
            lines += [f"sums{i} = sums{i} - {float(self.bias)} * x_sum" for i, _ in names]
        out = Statements(self, stride, size)
        for op in self.loop_ops:
            for (i, _), code in zip(names, self._of_fields(out, op), strict=True):
                if op.kind in ("add", "sub"):
                    code += " * x_sum"
                lines.append(f"sums{i} = {self.dialect.apply(op, f'sums{i}', code)}")
        return "\n".join([*out.lines, *lines, *(f"{acc} += sums{i}" for i, acc in names)])

    def _of_fields(self, out: Statements, op: DequantOp) -> list[str]:
        """The op's operand for the columns of each field, along the N of the sums."""
        count, n = self.layout.count, self.bytes_n
        value = out.operand(op)
        if value.columns == 1:
            return [value.code] * count
        code = out.widen(value, 1, self.block_n).code
        columns = [code] if count == 1 else split(out, code, count, n)
        shape = f"[1, {n}]" if self.is_x_first else f"[{n}, 1]"
        return [f"tl.reshape({each}, {shape})" for each in columns]

    def sums(self) -> str:
        """Statements after the loop that leave the sums in ``out`` [BLOCK_M, BLOCK_N]."""
        lines, whole = join(self.accumulators)
        if self.layout.count > 1:
            fields = range(self.layout.count.bit_length(), 1, -1)
            order = [0, 1, *fields] if self.is_x_first else [1, 0, *fields]
            whole = f"tl.reshape(tl.permute({whole}, {order}), [BLOCK_M, BLOCK_N])"
        elif not self.is_x_first:
            whole = f"tl.trans({whole})"
        if self.factor != 1 and not self.scales_blocks:
            whole = f"{whole} * {float(self.factor)}"
        return "\n".join([*lines, f"out = {whole}"])
