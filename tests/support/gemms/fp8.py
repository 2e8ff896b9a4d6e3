"""Inputs of FP8 GEMMs in awkward layouts, and the fp64 reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from inductor_quant.ops import fp8, fp8_block
from tests.support.gemms.w8a8 import LAYOUTS

Tensor = torch.Tensor
e4m3, e5m2, e8m0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


@dataclasses.dataclass(frozen=True)
class Case:
    """One FP8 GEMM. ``block``: (block_k, block_n), with ``a_scales`` contiguous along "k" or "m";
    None: scales per token, channel or tensor. ``group``: elements along K that share a scale of w,
    for each channel; 0: all. ``a_layout``, ``w_layout``: entries of LAYOUTS."""

    m: int
    n: int
    k: int
    block: tuple[int, int] | None = None
    out_dtype: torch.dtype = torch.bfloat16
    a_dtype: torch.dtype = e4m3
    w_dtype: torch.dtype = e4m3
    scale_dtype: torch.dtype = torch.float32
    a_scale: str = "token"
    b_scale: str = "channel"
    a_scales: str = "k"
    bias: bool = True
    fast_accum: bool = False
    a_layout: str = "rows"
    w_layout: str = "rows"
    group: int = 0

    def __str__(self) -> str:
        text = f"{self.m}x{self.n}x{self.k}"
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                text += f"-{field.name}={value}".replace("torch.", "").replace(" ", "")
        return text

    @property
    def family(self) -> str:
        return "fp8_block" if self.block else "fp8"


def is_fake(device: str) -> bool:
    """Whether tensors on ``device`` have no values: a virtual GPU."""
    return device == "cuda" and not torch.cuda.is_available()


def _elements(layout: str, rows: int, cols: int, dtype: torch.dtype, device: str) -> Tensor:
    found = LAYOUTS[layout](rows, cols, device)
    if is_fake(device):
        return found.view(dtype)
    # all finite bytes: every exponent, and subnormals
    return found.masked_fill_(~found.view(dtype).float().isfinite(), 1).view(dtype)


def _scales(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if is_fake(device):
        return torch.empty(shape, device=device, dtype=dtype)
    if dtype == e8m0:
        return torch.randint(118, 124, shape, device=device).to(torch.uint8).view(e8m0)
    return (torch.rand(shape, device=device) * 0.02 + 0.001).to(dtype)


def make_inputs(case: Case, device: str) -> tuple[Tensor | None, ...]:
    """a [M, K], w [N, K], a_scale, b_scale, bias. Scales differ, unless they are powers of two."""
    a = _elements(case.a_layout, case.m, case.k, case.a_dtype, device)
    w = _elements(case.w_layout, case.n, case.k, case.w_dtype, device)
    bias = torch.randn(case.n, device=device).to(torch.bfloat16) if case.bias else None
    if case.block is not None:
        k_blocks, n_blocks = -(-case.k // case.block[0]), -(-case.n // case.block[1])
        if case.a_scales == "k":
            a_scale = _scales((case.m, k_blocks), case.scale_dtype, device)
        else:
            a_scale = _scales((k_blocks, case.m), case.scale_dtype, device).t()
        return a, w, a_scale, _scales((n_blocks, k_blocks), case.scale_dtype, device), bias

    def scale(kind: str, full: tuple[int, int]) -> Tensor | None:
        if kind == "none":
            return None
        return _scales((1, 1) if kind == "tensor" else full, case.scale_dtype, device)

    groups = case.k // case.group if case.group else 1
    return a, w, scale(case.a_scale, (case.m, 1)), scale(case.b_scale, (groups, case.n)), bias


def gemm(case: Case) -> Callable[..., Tensor]:
    """The canonical op, on inputs as ``make_inputs`` gives them."""

    def fn(a: Any, w: Any, a_scale: Any, b_scale: Any, bias: Any) -> Tensor:
        if case.block is None:
            return fp8.op(
                *(a, w.t(), a_scale, b_scale, bias),
                fast_accum=case.fast_accum,
                out_dtype=case.out_dtype,
            )
        return fp8_block.op(
            *(a, w.t(), a_scale, b_scale.t(), bias),
            block_k=case.block[0],
            block_n=case.block[1],
            out_dtype=case.out_dtype,
        )

    return fn


def reference(case: Case, inputs: tuple[Tensor | None, ...]) -> Tensor:
    """The same in fp64, of the dequantized operands."""
    a, w, a_scale, b_scale, bias = inputs
    assert a is not None
    assert w is not None
    a, w = a.double(), w.double()
    if case.block is not None:
        assert a_scale is not None
        assert b_scale is not None
        k, n = torch.arange(case.k), torch.arange(case.n)
        k, n = (k // case.block[0]).to(a.device), (n // case.block[1]).to(a.device)
        a = a * a_scale.double()[:, k]
        w = w * b_scale.double()[n][:, k]
        out = a @ w.t()
    else:
        if case.group:
            assert b_scale is not None
            w, b_scale = w * b_scale.double().t().repeat_interleave(case.group, 1), None
        out = a @ w.t()
        for scale in (a_scale, b_scale):
            if scale is not None:
                out = out * scale.double()
    return out if bias is None else out + bias.double()
