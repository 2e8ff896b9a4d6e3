"""``Codegen``: what writes the statements of a template that depend on the weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from inductor_quant.kernels.codegen.dialect import TRITON, Dialect
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Weight
from inductor_quant.ops.dequantize import EXPONENTS, FLOAT8
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field

# (name of an input, dimension) -> an expression: a template's ``stride`` and ``size``.
Hook = Callable[[str, int], str]


@dataclasses.dataclass(frozen=True)
class WeightTile:
    """What a ``Codegen`` writes statements for: tiles of a weight in one configuration.

    loop_ops    applied in the loop, to W or to the partial sums of a block of K
    column_ops  applied to the sum over K
    sum_ops     applied to the sums of each tile, after ``loop_ops``
    x_ops       of W alone, without ``loop_ops``; x is scaled instead
    """

    weight: Weight
    config: GemmConfig
    x_dtype: torch.dtype
    loop_ops: tuple[DequantOp, ...]
    column_ops: tuple[DequantOp, ...] = ()
    sum_ops: tuple[DequantOp, ...] = ()
    x_ops: tuple[DequantOp, ...] = ()


class Codegen:
    """The template constant ``CODEGEN``: templates call its methods for statements.

    ``str`` is the text of the format: that is what kernels and cache keys contain. The statements
    are part of the kernel's source, and so of the keys too.
    """

    dialect: Dialect = TRITON

    def __init__(self, tile: WeightTile) -> None:
        self.format = tile.weight.format
        self.dtypes = tuple(tensor.dtype for tensor in tile.weight.tensors)
        self.shapes = tuple(tensor.shape for tensor in tile.weight.tensors)
        self.x_dtype = tile.x_dtype
        self.loop_ops, self.column_ops = tile.loop_ops, tile.column_ops
        self.sum_ops, self.x_ops = tile.sum_ops, tile.x_ops
        self.block_m, self.block_n = tile.config.block_m, tile.config.block_n
        self.block_k, self.warps = tile.config.block_k, tile.config.num_warps
        self.k, self.n = self.format.shape
        self.sources = [f"W{i}" for i in range(len(self.dtypes))]

    def __str__(self) -> str:
        return repr(str(self.format))

    __repr__ = __str__

    @property
    def x_type(self) -> str:
        return self.dialect.type(self.x_dtype)

    def is_in_x_dtype(self, field: Field) -> bool:
        """Whether x's dtype has all values of ``field``."""
        if field.float8 in EXPONENTS:
            return self.x_dtype == torch.bfloat16
        exact = (self.x_dtype, *FLOAT8.values())
        return bool(field.float8) or self.dtypes[field.source] in exact

    def block(self, axis: str) -> int:
        return {"k": self.block_k, "n": self.block_n, "e": 1}[axis]

    def origin(self, axis: str) -> str:
        """The first position of the tile."""
        return {"k": "k", "n": "(pid_n * BLOCK_N).to(tl.int32)", "e": "expert"}[axis]

    def resolution(self, *indices: AffineIndex) -> tuple[int, int]:
        """(along K, along N) how many different values of these indices a tile has."""
        digits = frozenset[str]().union(*(index.digits for index in indices))
        return self._count(digits, "k"), self._count(digits, "n")

    def _count(self, digits: frozenset[str], axis: str) -> int:
        used = [self.format.weight_of(name) for name in self.format.digits(axis) if name in digits]
        block = self.block(axis)
        return block // math.gcd(block, *used) if used else 1

    def unit(self, axis: str, count: int) -> int:
        """How many positions of a tile one of ``count`` values along ``axis`` stands for."""
        return self.block(axis) // count

    def is_within(self, axis: str) -> bool:
        """Whether positions of a tile never exceed the size of the axis."""
        return math.prod(self.format.radices(axis)) % self.block(axis) == 0

    @property
    def casts_directly(self) -> bool:
        """Whether one conversion makes x's dtype of the stored element."""
        element = self.format.element
        dtype = self.dtypes[element.source]
        is_whole = not (element.width or element.add or element.minus)
        return (is_whole and dtype in (torch.int8, torch.uint8)) or dtype == self.x_dtype
