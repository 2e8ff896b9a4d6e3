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

    def __str__(self) -> str:
        return str(self.plain)

    __repr__ = __str__

    @property
    def factor(self) -> float:
        """By how much ``w`` is too small."""
        return float(self.conversion.factor if self.conversion else 1)

    def offsets(self, stride: Hook) -> str:
        """Statements before the loop: where the bytes of the tile lie, counted from its corner."""
        name, width = self.source, self.numbers.width

        def total(values: Sequence[int]) -> str:
            terms = [f"{v * width} * {stride(name, d)}" for d, v in enumerate(values) if v]
            return " + ".join(terms) or "0"

        of_n = total([n for _, n, _ in self.numbers.steps])
        const = total([c for _, _, c in self.numbers.steps])
        bytes = name
        if width > 1:
            bytes = f"{name}.to(tl.pointer_type(tl.uint8), bitcast=True)"
        return "\n".join(
            [
                f"byte_n = {of_n}",
                "bytes = (tl.arange(0, BLOCK_N).to(INDEX_DTYPE) * byte_n)[:, None] + rk[None, :]",
                f"corner = {bytes} + (pid_n * BLOCK_N).to(INDEX_DTYPE) * byte_n + {const}",
            ]
        )

    def tile(self) -> str:
        """Statements inside the loop that leave the tile at k in ``w`` [BLOCK_N, BLOCK_K], over
        ``factor``."""
        x_type = TRITON_TYPES[self.x_dtype]
        lines = ["q = tl.load(corner + k.to(INDEX_DTYPE) + bytes)"]
        if self.conversion is None:
            # By way of fp16 and fp32, in pairs and exact: a direct conversion to bf16 takes a slow
            # instruction a number (e4m3), or loses infinities (e5m2).
            way = ["tl.float16"] if x_type == "tl.float16" else ["tl.float16", "tl.float32", x_type]
            return "\n".join([*lines, "w = q" + "".join(f".to({t})" for t in way)])
        lines += [
            "w = tl.inline_asm_elementwise(",
            f'    """{self.conversion.text}""",',
            f'    "{self.conversion.constraints}",',
            "    [q],",
            f"    dtype={x_type},",
            "    is_pure=True,",
            f"    pack={self.conversion.pack},",
            ")",
        ]
        return "\n".join(lines)

    def product(self, stride: Hook, size: Hook) -> str:
        """Statements inside the loop that add the product of ``x`` and ``w`` to ``acc``: [BLOCK_N,
        BLOCK_M], or [BLOCK_M, BLOCK_N] where x is first."""
        operands = "x, tl.trans(w)" if self.is_x_first else "w, tl.trans(x)"
        if not self.loop_steps:
            return f"acc = tl.dot({operands}, acc)"
        lines = [f"sums = tl.dot({operands})"]
        if self.factor != 1:
            lines.append(f"sums = sums * {self.factor}")
        if any(step.kind in ("add", "sub") for step in self.loop_steps):
            across = "[:, None]" if self.is_x_first else "[None, :]"
            lines.append(f"x_sum = tl.sum(x.to(tl.float32), axis=1){across}")
        out = Statements(self.plain, stride, size)
        for step in self.loop_steps:
            value = out.widen(out.operand(step), 1, self.plain.block["n"])
            code = value.code
            if value.columns > 1 and not self.is_x_first:
                code = f"tl.trans({code})"
            if step.kind in ("add", "sub"):
                lines.append(f"sums = sums {'+' if step.kind == 'add' else '-'} {code} * x_sum")
            else:
                lines.append(f"sums = {arithmetic(step, 'sums', code)}")
        return "\n".join([*out.lines, *lines, "acc += sums"])

    def sums(self) -> str:
        """``acc`` behind the loop as [BLOCK_M, BLOCK_N]."""
        acc = "acc" if self.is_x_first else "tl.trans(acc)"
        is_scaled = self.loop_steps or self.factor == 1
        return acc if is_scaled else f"{acc} * {self.factor}"

    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements behind the loop that apply the scales of whole columns to ``out``."""
        return self.plain.columns(stride, size)
