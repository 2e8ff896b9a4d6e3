"""What a quantized GEMM is: element types, scales and granularity, without shapes or devices.

Frozen and hashable: kernels are chosen by it, and reports print it.
"""

from __future__ import annotations

import dataclasses

import torch

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e8m0fnu: "e8m0",
}
GATHERED = 0
_GRANULARITY = {(-1, -1): "tensor", (1, -1): "token", (-1, 1): "channel"}


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16``, ``i8``, ...: the short name in specs and reports."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


@dataclasses.dataclass(frozen=True)
class ScaleSpec:
    """One level of scales.

    ``block``: extent of one value in the operand, a [M, K] or b [K, N]; -1: the whole dimension.
    (-1, -1) per tensor, (1, -1) per token, (-1, 1) per channel, (128, 1) per group of b, (1, 128)
    per group of a, (128, 128) per block. GATHERED in place of K's extent: a tensor lists the group
    of each k (act-order).
    """

    dtype: torch.dtype
    block: tuple[int, int]

    def __str__(self) -> str:
        sizes = ("gathered" if size == GATHERED else str(size) for size in self.block)
        block = _GRANULARITY.get(self.block) or "x".join(sizes)
        return f"{block}:{dtype_name(self.dtype)}"


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Block sparsity of b: ``count`` blocks of ``n`` x ``k`` elements are stored, the rest is 0.
    ``rows`` rows of blocks have one list of columns; ``longest``: of the longest, 0 if unknown."""

    n: int
    k: int
    count: int
    rows: int = 1
    longest: int = 0

    def __str__(self) -> str:
        together = f", {self.rows} rows together" if self.rows > 1 else ""
        return f"{self.count} blocks of {self.n}x{self.k}{together}"

    @property
    def height(self) -> int:
        """Rows of W of a list of columns."""
        return self.n * self.rows

    def stored_share(self, n: int, k: int) -> float:
        """How much of an N x K weight is stored, 0 to 1."""
        return self.count * self.n * self.k / (n * k)


@dataclasses.dataclass(frozen=True)
class OperandSpec:
    """One operand: its element type, and how it is dequantized.

    dtype   of a quantized value once it is unpacked
    scale   the finest level of scales; None: no scale
    bits    width of a quantized value if narrower than ``dtype``; ``u4`` is uint8, bits=4
    zero    the zero point: "" none, "const" a constant, "packed" bit fields, "int" or "float" a
            tensor; "folded" is subtracted after the scale (``q * s - t``)
    lut     a quantized value is an index into a table
    blocks  the blocks that are stored; None: all of the operand is
    """

    dtype: torch.dtype
    scale: ScaleSpec | None = None
    bits: int | None = None
    zero: str = ""
    lut: bool = False
    blocks: BlockSpec | None = None

    @property
    def element_bits(self) -> int:
        """Bits of one element in memory."""
        return self.bits or 8 * self.dtype.itemsize

    def __str__(self) -> str:
        name = dtype_name(self.dtype)
        if self.bits:
            name = f"{'i' if self.dtype.is_signed else 'u'}{self.bits}"
        text = name + (" lut" if self.lut else "") + (f"/{self.scale}" if self.scale else "")
        text += f" {self.blocks}" if self.blocks is not None else ""
        return text + (f" zero={self.zero}" if self.zero else "")


@dataclasses.dataclass(frozen=True)
class QuantGemmSpec:
    """``out = dequantize(a) @ dequantize(b) + bias``; the sum of int8 x int8 is int32, else fp32.

    fast_accum  the matrix unit may accumulate all of K in fewer bits than fp32 has
    """

    a: OperandSpec
    b: OperandSpec
    out_dtype: torch.dtype
    bias: bool = False
    fast_accum: bool = False

    @property
    def group_size(self) -> int:
        """Elements along K that share a scale; 0: no scale varies along K."""
        of_a = self.a.scale.block[1] if self.a.scale is not None else -1
        of_b = self.b.scale.block[0] if self.b.scale is not None else -1
        return max(0, of_a, of_b)

    def __str__(self) -> str:
        bias = "+bias" if self.bias else ""
        fast = ", fast_accum" if self.fast_accum else ""
        return f"(a={self.a}, b={self.b}, out={dtype_name(self.out_dtype)}{bias}{fast})"
