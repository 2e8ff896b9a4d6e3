"""Triton statements of the kernel for weights of bytes: read a tile as it lies, convert, multiply.

The tile keeps its natural order: its bytes come from shared memory four neighbours along K at a
time, in the layout of the matrix instruction's first operand (of its second, where x is the first,
the converted tile goes back to shared memory). As in ``few_rows_code``, steps that are the same for
a group of rows are applied to the group's sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inductor_quant.kernels.byte_numbers import Bytes, conversion
from inductor_quant.kernels.config import GemmConfig, Weight
from inductor_quant.kernels.weight_code import (
    TRITON_TYPES,
    Hook,
    Statements,
    WeightCode,
    arithmetic,
)
from inductor_quant.kernels.word_tile import join
from inductor_quant.weight_format import Step


class BytesCode:
    """The code of one weight in one configuration: what the template's constant ``WEIGHT`` is."""

    def __init__(
        self,
        weight: Weight,
        numbers: Bytes,
        config: GemmConfig,
        *,
        x_dtype: torch.dtype,
        loop_steps: Sequence[Step],
        column_steps: Sequence[Step],
        is_x_first: bool,
    ) -> None:
        self.is_x_first = is_x_first
        self.numbers, self.x_dtype = numbers, x_dtype
        self.source = f"W{weight.format.element.source}"
        # Everything but the bytes is read as in the kernel for all formats.
        self.plain = WeightCode(
            weight.format,
            weight.tensors,
            config,
            x_dtype=x_dtype,
            loop_steps=loop_steps,
            column_steps=column_steps,
        )
        self.sources, self.column_steps = self.plain.sources, self.plain.column_steps
        self.loop_steps = self.plain.loop_steps
        self.k, self.n = self.plain.k, self.plain.n
        self.conversion = conversion(numbers, x_dtype) if numbers.kind == "u8" else None
        self.factor = self.conversion.factor if self.conversion else 1
        self.bias = self.conversion.bias if self.conversion else 0
        self.block_rows = config.block_n // numbers.count
        self.accumulators = [f"acc{i}" for i in range(numbers.count)]

    def __str__(self) -> str:
        return str(self.plain)

    __repr__ = __str__

    def column(self, position: str) -> str:
        """The column of W at a position in the kernel's order."""
        return self.numbers.column(position)

    def offsets(self, stride: Hook) -> str:
        """Statements before the loop: where the bytes of the tile lie, counted from its corner, and
        an accumulator for each field of a byte."""
        numbers, pointer = self.numbers, self.source
        found = [str(stride(self.source, d)) for d in range(len(numbers.strides))]
        # of a dimension of one element the stride is anything
        shape = self.plain.shapes[int(self.source[1:])]
        for size, text, known in zip(shape, found, numbers.strides, strict=True):
            assert size == 1 or text == str(known), f"strides {found}, not {numbers.strides}"
        if numbers.element_bytes > 1:
            pointer = f"{pointer}.to(tl.pointer_type(tl.uint8), bitcast=True)"
        rows, step = self.block_rows, numbers.step
        shape_of_sums = "(BLOCK_M, {})" if self.is_x_first else "({}, BLOCK_M)"
        zeros = f"tl.zeros({shape_of_sums.format(rows)}, dtype=tl.float32)"
        return "\n".join(
            [
                f"rows = tl.arange(0, {rows}).to(INDEX_DTYPE) * {step}",
                "bytes = rows[:, None] + rk[None, :]",
                f"corner = {pointer} + (pid_n * {rows}).to(INDEX_DTYPE) * {step} + {numbers.start}",
                *(f"{name} = {zeros}" for name in self.accumulators),
            ]
        )

    def tile(self) -> str:
        """Statements inside the loop that leave the tile at k in ``w0`` [rows of bytes, BLOCK_K],
        ``w1`` and so on: a field of each byte, over ``factor`` and with its ``bias``."""
        x_type = TRITON_TYPES[self.x_dtype]
        lines = ["q = tl.load(corner + k.to(INDEX_DTYPE) + bytes)"]
        if self.conversion is None:
            # By way of fp16 and fp32, in pairs and exact: a direct conversion to bf16 takes a slow
            # instruction a number (e4m3), or loses infinities (e5m2).
            way = ["tl.float16"] if x_type == "tl.float16" else ["tl.float16", "tl.float32", x_type]
            return "\n".join([*lines, "w0 = q" + "".join(f".to({t})" for t in way)])
        count = self.numbers.count
        types = x_type if count == 1 else f"({x_type},) * {count}"
        lines += [
            f"{', '.join(f'w{i}' for i in range(count))} = tl.inline_asm_elementwise(",
            f'    """{self.conversion.text}""",',
            f'    "{self.conversion.constraints}",',
            "    [q],",
            f"    dtype={types},",
            "    is_pure=True,",
            f"    pack={self.conversion.pack},",
            ")",
        ]
        return "\n".join(lines)

    @property
    def scales_blocks(self) -> bool:
        """Whether something is done to the sums of each block of K."""
        return bool(self.loop_steps or self.bias)

    def product(self, stride: Hook, size: Hook) -> str:
        """Statements inside the loop that add the products of ``x`` and ``w0``, ``w1`` ... to the
        accumulators, [rows of bytes, BLOCK_M], or [BLOCK_M, rows of bytes] where x is first."""
        names = list(enumerate(self.accumulators))
        operands = "x, tl.trans(w{})" if self.is_x_first else "w{}, tl.trans(x)"
        if not self.scales_blocks:
            return "\n".join(f"{acc} = tl.dot({operands.format(i)}, {acc})" for i, acc in names)
        lines = [f"sums{i} = tl.dot({operands.format(i)})" for i, _ in names]
        if self.factor != 1:
            lines += [f"sums{i} = sums{i} * {float(self.factor)}" for i, _ in names]
        if self.bias or any(step.kind in ("add", "sub") for step in self.loop_steps):
            across = "[:, None]" if self.is_x_first else "[None, :]"
            lines.append(f"x_sum = tl.sum(x.to(tl.float32), axis=1){across}")
        if self.bias:
            lines += [f"sums{i} = sums{i} - {float(self.bias)} * x_sum" for i, _ in names]
        out = Statements(self.plain, stride, size)
        for step in self.loop_steps:
            for (i, _), code in zip(names, self._of_fields(out, step), strict=True):
                if step.kind in ("add", "sub"):
                    sign = "+" if step.kind == "add" else "-"
                    lines.append(f"sums{i} = sums{i} {sign} {code} * x_sum")
                else:
                    lines.append(f"sums{i} = {arithmetic(step, f'sums{i}', code)}")
        return "\n".join([*out.lines, *lines, *(f"{acc} += sums{i}" for i, acc in names)])

    def _of_fields(self, out: Statements, step: Step) -> list[str]:
        """The step's operand for the columns of each field, along the columns of the sums."""
        count = self.numbers.count
        value = out.operand(step)
        if value.columns == 1:
            return [value.code] * count
        value = out.widen(value, 1, self.plain.block["n"])
        parts = [value.code]
        if count > 1:
            bits = count.bit_length() - 1
            sizes = [self.block_rows, *[2] * bits]
            parts = [out.assign("c", f"tl.reshape({value.code}, {sizes})")]
            for _ in range(bits):  # the last bit first
                halves = []
                for part in parts:
                    halves.append((f"{part}l", f"{part}h"))
                    out.lines.append(f"{part}l, {part}h = tl.split({part})")
                parts = [low for low, _ in halves] + [high for _, high in halves]
        shape = f"[1, {self.block_rows}]" if self.is_x_first else f"[{self.block_rows}, 1]"
        return [f"tl.reshape({part}, {shape})" for part in parts]

    def sums(self) -> str:
        """Statements behind the loop that leave the sums in ``out`` [BLOCK_M, BLOCK_N]."""
        lines, whole = join(self.accumulators)
        if self.numbers.count > 1:
            bits = self.numbers.count.bit_length() - 1
            fields = list(reversed(range(2, 2 + bits)))
            order = [0, 1, *fields] if self.is_x_first else [1, 0, *fields]
            whole = f"tl.reshape(tl.permute({whole}, {order}), [BLOCK_M, BLOCK_N])"
        elif not self.is_x_first:
            whole = f"tl.trans({whole})"
        if self.factor != 1 and not self.scales_blocks:
            whole = f"{whole} * {float(self.factor)}"
        return "\n".join([*lines, f"out = {whole}"])

    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements behind the loop that apply the scales of whole columns to ``out``."""
        return self.plain.columns(stride, size)
