"""What opaque ops of quantizers compute, in plain PyTorch: shared by ``prepare_``, which replaces
layers, and by the adapters of ``patterns``, which replace ops of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


# ------------------------------------------------------------------------------------------
# bitsandbytes 0.50, backends/default/ops.py

# functional.get_4bit_type: the values of the codes
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * value / 12.0 for sign in (1, -1) for value in _FP4)


def gemm_4bit(
    x: Tensor, packed: Tensor, code: Tensor, absmax: Tensor, bias: Tensor | None, n: int
) -> Tensor:
    """``x @ W.T + bias``, W = ``code[q] * absmax`` [N, K] rounded to the dtype of x."""
    weight = codes_times_absmax(packed, code, absmax, (n, x.shape[-1])).to(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def codes_times_absmax(
    packed: Tensor, code: Tensor, absmax: Tensor, shape: Sequence[int]
) -> Tensor:
    """``code[q] * absmax`` in fp32, [N, K]: packed uint8 with even k in the high nibble, absmax of
    equal blocks of the flat weight, that lie in a row."""
    n, k = shape
    packed = packed.reshape(n, k // 2)
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten(1)
    blocks = code[codes.int()].reshape(n, absmax.numel() // n, -1)
    return (blocks * absmax.view(n, -1, 1)).flatten(1)


def nested_absmax(q: Tensor, absmax: Tensor, code: Tensor, offset: Tensor, size: int) -> Tensor:
    """``code[q] * absmax[i // size] + offset``."""
    values, rest = code[q.int()].flatten(), -q.numel() % size
    if rest:
        values = torch.nn.functional.pad(values, (0, rest))
    return (values.view(-1, size) * absmax.view(-1, 1)).flatten()[: q.numel()] + offset


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``int8_vectorwise_quant`` without outliers: x [M, K] as int8, and the absmax [M] in fp32."""
    rows = x.abs().amax(1).float()
    return (x * (127.0 / rows.unsqueeze(-1))).round().to(torch.int8), rows


def int8_scaled_mm(
    a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``a [M, K] @ b [N, K].T * (rows * columns) / 127^2 + bias``, by float products, which are
    exact up to K = 1040; 6.200124e-05 is the constant of the library."""
    product = torch.nn.functional.linear(a.float(), b.float())
    out = product * (rows.unsqueeze(1) * columns.unsqueeze(0)) * 6.200124e-05
    return (out if bias is None else out + bias).to(dtype)


# ------------------------------------------------------------------------------------------
# aten::_weight_int4pack_mm on CUDA, aten/src/ATen/native/cuda/int4mm.cu


def int4pack_mm(x: Tensor, words: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """``x @ W.T``, ``W[n, k] = (q - 8) * scale + zero``, rounded once to bf16.

    words int32 [N / 8, K / (16 I), 32, I / 2], I the inner k tiles: field p of word (a, b, t, j) is
    n = 8a + t // 4, k = 16 (I b + 2j + p % 4 // 2) + 2 (t % 4) + 8 (p % 2) + p // 4.
    scales_and_zeros [K / group, N, 2].
    """
    a, b, _, j = words.shape
    n, k = 8 * a, 32 * j * b
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    codes = ((words.unsqueeze(-1) >> shifts) & 15).view(a, b, 8, 4, j, 2, 2, 2)
    codes = codes.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(n, k // group, group)
    scale, zero = scales_and_zeros.float().permute(2, 1, 0).unsqueeze(-1)
    weight = (codes.float() - 8) * scale + zero
    return torch.nn.functional.linear(x, weight.view(n, k).to(x.dtype))


# ------------------------------------------------------------------------------------------
# optimum-quanto 0.2, library/qbytes_mm.py


def qbytes_mm(a: Tensor, b: Tensor, scales: Tensor) -> Tensor:
    """``a [..., K] @ b [N, K].T * scales [N, 1].T`` of 8-bit numbers on both sides."""
    product = torch.nn.functional.linear(a.float(), b.float())
    return (product * scales.t()).to(scales.dtype)


# ------------------------------------------------------------------------------------------
# torchao 0.18, sparsity/blocksparse.py


def blocksparse_int_addmm(
    crow: Tensor, col: Tensor, values: Tensor, a: Tensor, left: Tensor, right: Tensor
) -> Tensor:
    """``(left * (W @ a) * right).T`` in bf16 [M, N]: W [N, K] of int8 blocks, a int8 [K, M]."""
    n, k = left.shape[-1], a.shape[0]
    weight = torch.ops.blocksparse.bsr_to_dense(crow, col, values, n, k)
    out = torch._int_mm(a.t(), weight.t()).float()
    return (out * left.reshape(1, n).float() * right.reshape(-1, 1).float()).to(torch.bfloat16)


# ------------------------------------------------------------------------------------------
# MSLK, mslk/gemm/triton/int4_gemm.py and mslk/quantize/shuffle.py; FBGEMM had the same ops before


def bf16i4bf16_rowwise(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """``x @ W.T``, ``W[n, k] = q * scale + zero`` in fp32, rounded to bf16.

    packed int8 [N, K / 2]: q in two's complement, even k in the low nibble. scales and zeros
    [K / group, N].
    """
    q = torch.stack([(packed << 4) >> 4, packed >> 4], -1).flatten(1)
    scale, zero = (t.float().t().unsqueeze(-1) for t in (scales, zeros))
    weight = q.float().view(len(q), len(scales), -1) * scale + zero
    return torch.nn.functional.linear(x, weight.flatten(1).to(x.dtype))


def f8f8bf16_rowwise(
    a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """``a [M, K] @ b [N, K].T * rows * columns + bias`` in bf16."""
    scales = rows.view(-1, 1), columns.view(1, -1)
    return torch._scaled_mm(
        *(a, b.t(), *scales), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
    )
