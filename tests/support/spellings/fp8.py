"""FP8 GEMMs as producers write them, as data, with the spec that recognizers must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.gemms.fp8 import Case, Tensor, e4m3, e8m0, make_inputs, reference

bf16, f32 = torch.bfloat16, torch.float32
HAS_V2 = hasattr(torch.ops.aten, "_scaled_mm_v2") and hasattr(F, "scaled_mm")


@dataclasses.dataclass(frozen=True)
class Spelling:
    """``fn(*inputs(device))`` computes ``finish`` of the canonical GEMM ``case``; a report says
    ``spec``."""

    name: str
    case: Case
    fn: Callable[..., Tensor]
    spec: str
    finish: Callable[[Tensor], Tensor] = lambda out: out
    make: Callable[[Case, str], tuple[Any, ...]] = make_inputs

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def inputs(self, device: str) -> tuple[Any, ...]:
        return self.make(self.case, device)

    def exact(self, inputs: tuple[Any, ...]) -> Tensor:
        return self.finish(reference(self.case, inputs))


def _mm(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, **kw: Any) -> Tensor:
    return torch._scaled_mm(a, w.t(), sa, sb, bias, out_dtype=bf16, **kw)


def _blocks(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    return _mm(a, w, sa, sb.t(), bias)


def _by_recipe(
    a: Tensor, b: Tensor, a_scale: tuple[Tensor, Any], b_scale: tuple[Tensor, Any], bias: Any
) -> Tensor:
    """``F.scaled_mm``; with torch 2.11, whose Dynamo does not trace it, the op that it calls."""
    if torch.__version__ >= "2.13":
        return F.scaled_mm(a, b, *a_scale, *b_scale, bias=bias, output_dtype=bf16)
    scales = (([scale], [recipe.value], []) for scale, recipe in (a_scale, b_scale))
    return torch.ops.aten._scaled_mm_v2(a, b, *sum(scales, ()), bias, bf16)


def _v2(recipes: tuple[str, str], transpose: bool = False) -> Callable[..., Tensor]:
    def fn(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
        first, second = (getattr(F.ScalingType, name) for name in recipes)
        sb = sb.t() if transpose else sb
        return _by_recipe(a, w.t(), (sa, first), (sb, second), bias)

    return fn


def _v2_named(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    """The dimensions that are summed are named."""
    row = [F.ScalingType.RowWise.value]
    scales = ([sa], row, [], [sb], row, [])
    return torch.ops.aten._scaled_mm_v2(a, w.t(), *scales, bias, bf16, contraction_dim=[-1, -2])


def _v2_blocks(rows: int, columns: int) -> Callable[..., Tensor]:
    """Blocks of ``rows`` of a and ``columns`` of b. Scales as torch requires: column-major, of
    128x128 padded to a multiple of 4 along K."""

    def laid_out(scale: Tensor, size: int) -> tuple[Tensor, Any]:
        if size == 1:
            return scale.t().contiguous().t(), F.ScalingType.BlockWise1x128
        padded = F.pad(scale, (0, -scale.shape[1] % 4), value=float("nan"))
        return padded.t(), F.ScalingType.BlockWise128x128

    def fn(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
        x, x_recipe = laid_out(sa[::rows], rows)
        y, y_recipe = laid_out(sb, columns)
        return _by_recipe(a, w.t(), (x, x_recipe), (y, y_recipe), bias)

    return fn


def _blocks_of_rows(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    """Scales as ``_scaled_mm`` requires: those of 128x128 contiguous (some versions need rows of 16
    bytes, so K is a multiple of 512), those of b column-major."""
    return _mm(a, w, sa[::128].contiguous(), sb.t().contiguous(), bias)


def _rows_of_blocks(case: Case, device: str) -> tuple[Any, ...]:
    """128 rows have the same scales."""
    a, w, sa, sb, bias = make_inputs(case, device)
    return a, w, sa[::128].repeat_interleave(128, 0)[: case.m], sb, bias


ROW = Case(32, 64, 128)
BLOCK = Case(48, 256, 512, block=(128, 128), a_scales="m", bias=False)
_ROW_SPEC = "(a=e4m3/token:f32, b=e4m3/channel:f32, out=bf16{})"
_BLOCK_SPEC = "(a=e4m3/1x128:f32, b=e4m3/128x{}:f32, out=bf16)"

SCALED_MM = [
    Spelling("row", ROW, _mm, _ROW_SPEC.format("+bias")),
    Spelling("row, fast", dataclasses.replace(ROW, fast_accum=True),
             lambda *given: _mm(*given, use_fast_accum=True),
             _ROW_SPEC.format("+bias, fast_accum").replace(")", "") + ")"),
    Spelling("row, bias outside", ROW,
             lambda a, w, sa, sb, bias: _mm(a, w, sa, sb, None) + bias, _ROW_SPEC.format("")),
    Spelling("row, gelu", ROW, lambda *given: F.gelu(_mm(*given)), _ROW_SPEC.format("+bias"),
             F.gelu),
    Spelling("tensor", Case(32, 64, 128, a_scale="tensor", b_scale="tensor"),
             lambda a, w, sa, sb, bias: _mm(a, w, sa.reshape(()), sb.reshape(()), bias),
             "(a=e4m3/tensor:f32, b=e4m3/tensor:f32, out=bf16+bias)"),
    Spelling("one row", Case(1, 64, 128), _mm,
             "(a=e4m3/tensor:f32, b=e4m3/channel:f32, out=bf16+bias)"),
]  # fmt: skip
BLOCKS = [
    Spelling("blocks", BLOCK, _blocks, _BLOCK_SPEC.format(128)),
    Spelling("blocks of one column", dataclasses.replace(BLOCK, block=(128, 1)), _blocks,
             _BLOCK_SPEC.format(1)),
]  # fmt: skip
VERSION_2 = [
    Spelling("v2, row", ROW, _v2(("RowWise", "RowWise")), _ROW_SPEC.format("+bias")),
    Spelling("v2, row, dimensions", ROW, _v2_named, _ROW_SPEC.format("+bias")),
    Spelling("v2, tensor", Case(32, 64, 128, a_scale="tensor", b_scale="tensor"),
             _v2(("TensorWise", "TensorWise")),
             "(a=e4m3/tensor:f32, b=e4m3/tensor:f32, out=bf16+bias)"),
]  # fmt: skip
WIDE = dataclasses.replace(BLOCK, m=256, k=384, block=(128, 1))
LAID_OUT = [
    Spelling("blocks of rows", dataclasses.replace(WIDE, k=512), _blocks_of_rows,
             _BLOCK_SPEC.format(1), make=_rows_of_blocks),
]  # fmt: skip
VERSION_2_BLOCKS = [
    Spelling("v2, blocks", dataclasses.replace(BLOCK, k=384), _v2_blocks(1, 128),
             _BLOCK_SPEC.format(128)),
    Spelling("v2, blocks of one column", dataclasses.replace(BLOCK, block=(128, 1)),
             _v2_blocks(1, 1), _BLOCK_SPEC.format(1)),
    Spelling("v2, blocks of rows", WIDE, _v2_blocks(128, 1), _BLOCK_SPEC.format(1),
             make=_rows_of_blocks),
]  # fmt: skip


# ------------------------------------------------------------------------------------------
# operands that the graph dequantizes

BOTH = Case(48, 256, 384, block=(128, 128), bias=False)
BOTH_SPEC = "(a=e4m3/1x128:f32, b=e4m3/128x128:f32, out={})"


def _rows_dequantized(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    """compressed-tensors, FP8 dynamic by token: everything in bf16."""
    x = a.to(bf16) * sa.to(bf16)
    return F.linear(x, w.to(bf16) * sb.t().to(bf16), bias)


def _scaled_behind(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor) -> Tensor:
    return ((a.float() @ w.float().t()) * sa * sb + bias).to(bf16)


def _views(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    (m, k), n = a.shape, w.shape[0]
    x = (a.float().view(m, k // 128, 128) * sa[..., None]).view(m, k)
    y = w.float().view(n // 128, 128, k // 128, 128) * sb[:, None, :, None]
    return (x @ y.view(n, k).t()).to(bf16)


def _repeated(block: int) -> Callable[..., Tensor]:
    def fn(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
        n, k = w.shape
        x = a.float() * sa.float().repeat_interleave(block, 1)[:, :k]
        columns = sb.float().repeat_interleave(block, 0)[:n]
        y = w.float() * columns.repeat_interleave(block, 1)[:, :k]
        return F.linear(x.to(bf16), y.to(bf16))

    return fn


def _loop(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    """DeepSeek-V3's formula, written out."""
    (m, k), n = a.shape, w.shape[0]
    out = torch.zeros(m, n, dtype=f32, device=a.device)
    for i in range(k // 128):
        part = slice(128 * i, 128 * i + 128)
        product = a[:, part].float() @ w[:, part].float().t()
        out += product * sa[:, i : i + 1] * sb.repeat_interleave(128, 0)[:, i][None]
    return out.to(bf16)


def _bmm(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    """The loop as one batched product."""
    (m, k), n = a.shape, w.shape[0]
    x = a.view(m, k // 128, 128).permute(1, 0, 2).float()
    y = w.view(n, k // 128, 128).permute(1, 2, 0).float()
    columns = sb.repeat_interleave(128, 0).t()[:, None]
    return (torch.bmm(x, y) * sa.t()[..., None] * columns).sum(0).to(bf16)


def _einsum(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    """The same as an einsum, which moves the batch after m and n and sums it there."""
    (m, k), n = a.shape, w.shape[0]
    x, y = a.float().view(m, k // 128, 128), w.float().view(n, k // 128, 128)
    parts = torch.einsum("mgk,ngk->mng", x, y)
    return (parts * sa[:, None] * sb.repeat_interleave(128, 0)).sum(-1).to(bf16)


def _one_scale(case: Case, device: str) -> tuple[Any, ...]:
    a, w, sa, sb, bias = make_inputs(case, device)
    return a, w, sa[:1, :1].expand(sa.shape).contiguous(), sb, bias


def _static(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    """transformers' FP8Linear with a static scale of x, beside blocks of w."""
    columns = sb.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return ((a.float() * sa.amax()) @ (w.float() * columns).t()).to(bf16)


def _in_three_dimensions(
    a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None
) -> Tensor:
    """A layer of a model: x [batch, sequence, K], N no multiple of the block."""
    n, k = w.shape
    x = (a.float().view(1, -1, k // 128, 128) * sa[None, ..., None]).flatten(-2)
    columns = sb.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    return F.linear(x, w.float() * columns).to(bf16)


DEQUANTIZED = [
    Spelling(
        "rows, bf16",
        dataclasses.replace(ROW, scale_dtype=bf16),
        _rows_dequantized,
        _ROW_SPEC.format("+bias").replace("f32", "bf16"),
    ),
    Spelling("rows, scaled behind", ROW, _scaled_behind, _ROW_SPEC.format("+bias")),
    Spelling("views", BOTH, _views, BOTH_SPEC.format("f32")),
    Spelling(
        "repeated, 64",
        Case(7, 201, 301, block=(64, 64), scale_dtype=bf16, bias=False),
        _repeated(64),
        "(a=e4m3/1x64:bf16, b=e4m3/64x64:bf16, out=bf16)",
    ),
    Spelling(
        "repeated, 32",
        Case(33, 72, 96, block=(32, 32), scale_dtype=e8m0, a_scales="m", bias=False),
        _repeated(32),
        "(a=e4m3/1x32:e8m0, b=e4m3/32x32:e8m0, out=bf16)",
    ),
    Spelling("loop", BOTH, _loop, BOTH_SPEC.format("f32")),
    Spelling("batched", BOTH, _bmm, BOTH_SPEC.format("f32")),
    Spelling("einsum", BOTH, _einsum, BOTH_SPEC.format("f32")),
    Spelling(
        "three dimensions",
        dataclasses.replace(BOTH, n=200),
        _in_three_dimensions,
        BOTH_SPEC.format("f32"),
        lambda out: out[None],
    ),
    Spelling("loop, one row", dataclasses.replace(BOTH, m=1), _loop, BOTH_SPEC.format("f32")),
]

# repeated for each row and block: one kernel more
STATIC = Spelling("one scale", BOTH, _static, BOTH_SPEC.format("f32"), make=_one_scale)


def layer(kind: str) -> Callable[..., Tensor]:
    """A linear layer of bf16 in and out that quantizes its activation as it runs: ``x``, the
    weight [N, K] and its scale."""

    def row(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        amax = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12)
        q = (x.float() / (amax / 448)).clamp(-448, 448).to(e4m3)
        return torch._scaled_mm(q, w.t(), amax / 448, scale, out_dtype=bf16, use_fast_accum=True)

    def block(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        m, k = x.shape
        parts = x.float().reshape(m, k // 128, 128)
        amax = parts.abs().amax(-1).clamp_min(1e-12) / 448
        q = (parts / amax[..., None]).to(e4m3).reshape(m, k)
        return torch.ops.inductor_quant.fp8_block(
            q, w.t(), amax, scale.t(), None, block_k=128, block_n=128, out_dtype=bf16
        )

    return {"row": row, "block": block}[kind]
