"""``Producer``: a way to write a layer with a quantized weight; helpers to write its module.

The data is random: any bits are a valid packed weight. ``dense`` decodes them by a formula over
(n, k) in int64 and fp64, which shares no code with the module's own forward.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Tensor = torch.Tensor

# Act-order: a tensor holds the group of each k.
BY_INDEX = -1


def _own_dense(module: Any) -> Tensor:
    return module.dense()


@dataclasses.dataclass(frozen=True)
class Producer:
    """A way to write one linear layer with a quantized weight, and the weight's meaning.

    build       ``build(dtype, k, n, bias)``; called by ``make``
    dense       the weight [N, K] in fp64, decoded from what the module stores
    bits        of the stored field; an int4 in an int8 tensor has 8; of all fields that are joined
    element     "int", "e4m3", "e5m2", "e2m1", or "lut": an index into a table
    signed      whether the stored field is
    group_size  neighbours along K that share a scale; None: all; BY_INDEX: a tensor says which
    group_n     channels of N that share a scale; None: all
    zero        "none"; "const": a literal; "packed": bit fields; "int", "float": a tensor;
                "folded": the t in ``q * s - t``
    bias        where it is added: "addmm", "add", or an "argument" of the op
    scaled      "weight": before the product; "result": after it
    reads       graph inputs whose values must be known: shift tables
    anchors     the ops that multiply; the graph calls one of them once
    max_rows    the largest M at which the graph has this form
    needs       the package to import
    given       a primary format; the others are spellings of the same
    expected_matches  0 for a near miss, whose ``reason`` says why
    """

    name: str
    build: Callable[[torch.dtype, int, int, bool], nn.Module]
    bits: int
    dense: Callable[[Any], Tensor] = _own_dense
    element: str = "int"
    signed: bool = True
    group_size: int | None = None
    group_n: int | None = 1
    zero: str = "none"
    bias: str = "addmm"
    scaled: str = "weight"
    reads: tuple[str, ...] = ()
    anchors: tuple[str, ...] = ("aten.mm", "aten.addmm")
    max_rows: int | None = None
    needs: str | None = None
    dtypes: tuple[torch.dtype, ...] = (bf16, f16)
    given: bool = False
    expected_matches: int = 1
    reason: str = ""

    def __str__(self) -> str:
        return self.name

    def make(
        self, dtype: torch.dtype | None = None, k: int = 256, n: int = 128, bias: bool = True
    ) -> nn.Module:
        """The module on a CPU, always the same. ``dtype`` None: the first supported."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(self.name.encode()))
            module = self.build(dtype or self.dtypes[0], k, n, bias)
        return module.eval().requires_grad_(False)


class PackedLinear(nn.Module):
    """Base of the modules: ``weight`` computes [N, K] in the graph.

    ``store`` makes the buffers, ``dense`` decodes them.
    """

    group: ClassVar[int] = 64
    bias: Tensor | None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # a buffer, or a dimension

    def __init__(self, dtype: torch.dtype, k: int, n: int, bias: bool) -> None:
        super().__init__()
        self.dtype, self.k, self.n = dtype, k, n
        self.register_buffer("bias", torch.randn(n).to(dtype) if bias else None)
        self.store(k, n, dtype)

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        raise NotImplementedError

    def weight(self) -> Tensor:
        raise NotImplementedError

    def dense(self) -> Tensor:
        raise NotImplementedError

    def keep(self, **buffers: Tensor) -> None:
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def grid(self) -> tuple[Tensor, Tensor]:
        """n as a column and k as a row; indexing by both gives [N, K]."""
        return torch.arange(self.n)[:, None], torch.arange(self.k)[None, :]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight(), self.bias)

    def add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias


# ------------------------------------------------------------------------------------------
# random data


def words(*shape: int) -> Tensor:
    """int32 with any bits."""
    return torch.randint(-(2**31), 2**31, shape).int()


def octets(*shape: int) -> Tensor:
    """uint8 with any bits."""
    return torch.randint(0, 256, shape).to(torch.uint8)


def int8s(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape).to(torch.int8)


def scales(*shape: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Positive values over three octaves that scale ``bits`` wide integers to about 0.1."""
    return (torch.exp2(3 * torch.rand(shape)) * 0.1 / 2**bits).to(dtype)


def zeros(*shape: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Zero points in the middle of ``bits`` wide unsigned integers, with a fractional part."""
    return ((torch.rand(shape) * 0.5 + 0.25) * 2**bits).to(dtype)


def f8s(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return (torch.randn(shape) * 64).to(dtype)


# ------------------------------------------------------------------------------------------
# decoding


def field(word: Tensor, shift: Tensor | int, bits: int) -> Tensor:
    """``bits`` bits of ``word`` from bit ``shift`` on, as an unsigned int64."""
    return (word.long() >> shift) & ((1 << bits) - 1)


def signed(value: Tensor, bits: int) -> Tensor:
    """An unsigned field read as two's complement."""
    return torch.where(value >= 1 << (bits - 1), value - (1 << bits), value)
