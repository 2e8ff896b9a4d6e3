"""Weight formats as quantizers store them, each with the plain torch code that dequantizes it.

``FORMATS[name]``: ``make(source, n, k)`` draws the stored tensors of a weight [N, K] at random,
``dequantize(k, *stored)`` gives the weight [N, K] in ``dtype``, that of the activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16

NF4: tuple[float, ...] = (
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.09105004,
    0.0,
)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
E2M1: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 += tuple(-x for x in E2M1)


class Source:
    """Random tensors on a device, the same in every process."""

    def __init__(self, device: str, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.options = {"device": device, "generator": generator}
        self.device = device

    def integers(self, dtype: torch.dtype, *size: int, below: int | None = None) -> Tensor:
        """Of all values of the type, or from 0 to ``below``."""
        info = torch.iinfo(dtype)
        low, high = (info.min, info.max + 1) if below is None else (0, below)
        return torch.randint(low, high, size, dtype=dtype, **self.options)  # type: ignore[call-overload]

    def scales(self, dtype: torch.dtype, *size: int) -> Tensor:
        return (torch.rand(size, **self.options) * 0.01 + 0.001).to(dtype)  # type: ignore[call-overload]

    def floats(self, dtype: torch.dtype, *size: int) -> Tensor:
        return torch.randn(size, **self.options).to(dtype)  # type: ignore[call-overload]

    def table(self, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclasses.dataclass(frozen=True)
class Format:
    make: Callable[[Source, int, int], tuple[Tensor, ...]]
    dequantize: Callable[..., Tensor]
    dtype: torch.dtype = BF16
    group: int = 1  # of K, which it must divide


def in_order(position: Tensor) -> Tensor:
    return position


def last_first(position: Tensor) -> Tensor:
    """The high nibble of a byte is the first."""
    return 1 - position


def interleaved(position: Tensor) -> Tensor:
    """AWQ's 0, 4, 1, 5, 2, 6, 3, 7."""
    return position % 2 * 4 + position // 2


def fields(
    words: Tensor, bits: int, dim: int, order: Callable[[Tensor], Tensor] = in_order
) -> Tensor:
    """The fields of each word, neighbours along ``dim``. ``order``: places from the low bits."""
    count = 8 * words.element_size() // bits
    shifts = bits * order(torch.arange(count, dtype=words.dtype, device=words.device))
    shape = (-1, 1) if dim == 0 else (-1,)
    return (words.unsqueeze(dim + 1) >> shifts.view(shape) & (1 << bits) - 1).flatten(dim, dim + 1)


def grouped(q: Tensor, zero: Tensor | None, scale: Tensor) -> Tensor:
    """(q - zero) * scale, zero and scale [N, groups], in the dtype of the scale."""
    q = q.unflatten(1, (scale.shape[1], -1))
    if zero is not None:
        q = q - zero[:, :, None]
    return (q * scale[:, :, None]).flatten(1)


def gptq(group: int, bits: int = 4, dtype: torch.dtype = FP16) -> Format:
    """int32 [K * bits / 32, N], zero points [K / group, N * bits / 32], scales [K / group, N]."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        words = source.integers(torch.int32, k * bits // 32, n)
        zeros = source.integers(torch.int32, k // group, n * bits // 32)
        return words, zeros, source.scales(dtype, k // group, n)

    def dequantize(k: int, words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        q = fields(words, bits, 0).unflatten(0, (scales.shape[0], -1))
        return ((q - fields(zeros, bits, 1)[:, None]) * scales[:, None]).flatten(0, 1).t()

    return Format(make, dequantize, dtype, group)


def gptq_with_zeros(zero: torch.dtype) -> Format:
    """GPTQ's words, groups of 128, and a zero point [K / 128, N] of its own type."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        zeros = source.integers(torch.int8, k // 128, n, below=16).to(zero)
        return source.integers(torch.int32, k // 8, n), zeros, source.scales(BF16, k // 128, n)

    def dequantize(k: int, words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        q = fields(words, 4, 0).unflatten(0, (scales.shape[0], -1)).to(BF16)
        return ((q - zeros[:, None].to(BF16)) * scales[:, None]).flatten(0, 1).t()

    return Format(make, dequantize, group=128)


def awq(group: int = 128) -> Format:
    """int32 [K, N / 8] and zero points [K / group, N / 8], both in AWQ's order along N."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        words = source.integers(torch.int32, k, n // 8)
        zeros = source.integers(torch.int32, k // group, n // 8)
        return words, zeros, source.scales(FP16, k // group, n)

    def dequantize(k: int, words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        q = fields(words, 4, 1, interleaved).unflatten(0, (scales.shape[0], -1))
        return ((q - fields(zeros, 4, 1, interleaved)[:, None]) * scales[:, None]).flatten(0, 1).t()

    return Format(make, dequantize, FP16, group)


def rows(storage: torch.dtype, group: int, offset: int = 8, bits: int = 4) -> Format:
    """Words or bytes [N, K * bits / width] packed along K, symmetric, scales [N, K / group]."""
    width = 8 * storage.itemsize

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        return source.integers(storage, n, k * bits // width), source.scales(BF16, n, k // group)

    def dequantize(k: int, words: Tensor, scales: Tensor) -> Tensor:
        return grouped((fields(words, bits, 1).to(torch.int8) - offset).to(BF16), None, scales)

    return Format(make, dequantize, group=group)


def halves(group: int, axis: int) -> Format:
    """HQQ: high nibbles hold the first half; zero points bf16; groups along K (axis 1) or N (0)."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        groups = n * k // group
        size, each = (
            ((groups // 2, group), (groups, 1)) if axis else ((group // 2, groups), (1, groups))
        )
        return (
            source.integers(torch.uint8, *size),
            source.floats(BF16, *each) * 2 + 8,
            source.scales(BF16, *each),
        )

    def dequantize(k: int, packed: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        q = torch.cat([packed >> 4, packed & 15]).to(BF16)
        return ((q - zeros) * scales).reshape(-1, k)

    return Format(make, dequantize, group=group)


def halves_of_k(group: int) -> Format:
    """uint8 [N, K / 2]: low nibbles hold the first half of K; symmetric, scales [N, K / group]."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        return source.integers(torch.uint8, n, k // 2), source.scales(BF16, n, k // group)

    def dequantize(k: int, packed: Tensor, scales: Tensor) -> Tensor:
        q = torch.cat([packed & 15, packed >> 4], 1).to(torch.int8) - 8
        return grouped(q.to(BF16), None, scales)

    return Format(make, dequantize, group=2 * group)


def table(values: tuple[float, ...], group: int) -> Format:
    """Codes of a table in nibbles of uint8 [N, K / 2], high first, and scales [N, K / group]."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        codes = source.integers(torch.uint8, n, k // 2)
        return codes, source.table(values, BF16), source.scales(BF16, n, k // group)

    def dequantize(k: int, codes: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        return grouped(values[fields(codes, 4, 1, last_first).int()], None, scales)

    return Format(make, dequantize, group=group)


def mxfp4() -> Format:
    """E2M1 in nibbles, low first, and an exponent e8m0 (uint8) for 32 of them."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        exponents = source.integers(torch.uint8, n, k // 32, below=8) + 118
        return source.integers(torch.uint8, n, k // 2), source.table(E2M1, BF16), exponents

    def dequantize(k: int, codes: Tensor, values: Tensor, exponents: Tensor) -> Tensor:
        w = values[fields(codes, 4, 1).int()].unflatten(1, (exponents.shape[1], -1))
        return torch.ldexp(w, exponents.to(torch.int32)[:, :, None] - 127).flatten(1)

    return Format(make, dequantize, group=32)


def nvfp4() -> Format:
    """E2M1 in nibbles, low first, scales e4m3 of 16, and one fp32 of the tensor, which divides: as
    compressed-tensors stores and computes it."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        scales = (source.floats(torch.float32, n, k // 16).abs() * 50 + 1).to(torch.float8_e4m3fn)
        codes = source.integers(torch.uint8, n, k // 2)
        return codes, source.table(E2M1, BF16), scales, 1 / source.scales(torch.float32, 1)

    def dequantize(
        k: int, codes: Tensor, values: Tensor, scales: Tensor, overall: Tensor
    ) -> Tensor:
        w = grouped(values[fields(codes, 4, 1).int()], None, scales.float() / overall)
        return w.to(BF16)

    return Format(make, dequantize, group=16)


def bytes_of(storage: torch.dtype, group: int | None, zero: bool = False) -> Format:
    """int8, e4m3 or e5m2 [N, K], scales [N, 1] or [N, K / group], int8 zero points [N, 1]."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        draw = source.floats if storage.is_floating_point else source.integers
        zeros = (source.integers(torch.int8, n, 1),) if zero else ()
        return draw(storage, n, k), source.scales(BF16, n, k // group if group else 1), *zeros

    def dequantize(k: int, w: Tensor, scales: Tensor, *zeros: Tensor) -> Tensor:
        return grouped(w.to(BF16), zeros[0].to(BF16) if zeros else None, scales)

    return Format(make, dequantize, group=group or 1)


def fp8_blocks() -> Format:
    """e4m3 [N, K] with an fp32 scale for each block of 128 x 128."""

    def make(source: Source, n: int, k: int) -> tuple[Tensor, ...]:
        w = source.floats(torch.float8_e4m3fn, n, k)
        return w, source.scales(torch.float32, -(-n // 128), -(-k // 128))

    def dequantize(k: int, w: Tensor, scales: Tensor) -> Tensor:
        n, k = w.shape
        each = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return (w.float() * each).to(BF16)

    return Format(make, dequantize)


FORMATS: dict[str, Format] = {
    "gptq": gptq(128),
    "gptq_32": gptq(32),
    "gptq_2bit": gptq(128, 2),
    "gptq_8bit": gptq(128, 8),
    "gptq_zero_int8": gptq_with_zeros(torch.int8),
    "gptq_zero_bf16": gptq_with_zeros(BF16),
    "awq": awq(),
    "words": rows(torch.int32, 128),
    "words_32": rows(torch.int32, 32),
    "pairs": rows(torch.uint8, 128),
    "pairs_32": rows(torch.uint8, 32),
    "quarters": rows(torch.uint8, 64, 2, 2),
    "halves_of_k": halves_of_k(64),
    "hqq": halves(64, 1),
    "hqq_axis0": halves(64, 0),
    "nf4": table(NF4, 64),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
    "int8": bytes_of(torch.int8, None),
    "int8_128": bytes_of(torch.int8, 128),
    "int8_zero": bytes_of(torch.int8, None, zero=True),
    "e4m3": bytes_of(torch.float8_e4m3fn, None),
    "e4m3_blocks": fp8_blocks(),
    "e5m2": bytes_of(torch.float8_e5m2, None),
}
