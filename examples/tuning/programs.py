"""GEMMs that reach every kernel, for ``examples.tuning.generated_kernels``.

A ``Program`` is a function of fake tensors in plain PyTorch. ``programs()`` yields all of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo import mark_dynamic  # noqa: TID251

Tensor = torch.Tensor
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
i8, u8, i32 = torch.int8, torch.uint8, torch.int32
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
GROUP = 128
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
Spec = tuple[tuple[int, ...], torch.dtype]
# A product in plain PyTorch, and shape and dtype of each of its tensors.
Made = tuple[Callable[..., Any], list[Spec]]


@dataclasses.dataclass(frozen=True)
class Program:
    """``fn`` of ``tensors``. ``dynamic``: positions of the tensors with a symbolic M."""

    name: str
    fn: Callable[..., Any]
    tensors: Sequence[Spec]
    arch: int = 90
    dynamic: tuple[int, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_autotune: bool = False

    def inputs(self, device: str) -> tuple[Tensor, ...]:
        made = tuple(torch.empty(s, dtype=dtype, device=device) for s, dtype in self.tensors)
        for position in self.dynamic:
            mark_dynamic(made[position], 0)
        return made


def int8(
    m: int, n: int, k: int, *, rows: str = "token", columns: str = "channel", out: Any = bf16,
    zero: bool = False, bias: bool = False,
) -> Made:  # fmt: skip
    """int8 times int8, then scales. ``zero``: with a per_token zero_point of the activation."""
    sizes = {"token": (m, 1), "channel": (n,), "tensor": (1,)}
    tensors = [((m, k), i8), ((n, k), i8), (sizes[rows], f32), (sizes[columns], f32)]
    tensors += [((m, 1), i8)] if zero else []
    tensors += [((n,), f32)] if bias else []

    def fn(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, *more: Tensor) -> Tensor:
        acc = torch._int_mm(a, w.t())
        if zero:
            acc = acc - more[0].int() * w.sum(1, dtype=i32)
        y = acc.float() * sa * sb
        return (y + more[-1] if bias else y).to(out)

    return fn, tensors


def int8_groups(m: int, n: int, k: int, *, both: bool = False, group: int = 64) -> Made:
    """int8 with scales of groups along K, of the weight or of both operands."""

    def fn(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        y = torch.zeros((), device=a.device)
        for i in range(k // group):
            part = slice(group * i, group * i + group)
            row = sa[:, i : i + 1] if both else sa
            y = y + torch._int_mm(a[:, part], w[:, part].t()) * row * sb[:, i]
        return y.to(bf16)

    scales = [((m, k // group if both else 1), f32), ((n, k // group), f32)]
    return fn, [((m, k), i8), ((n, k), i8), *scales]


def _to_int8(x: Tensor, scheme: str, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if scheme == "torchao":
        scale = (x.abs().amax(-1, keepdim=True) / 127.5).float().clamp_min(1.2e-7)
        scale = scale.to(x.dtype).float()
        return (x * (1.0 / scale)).round().clamp(-128, 127).to(i8), scale
    scale = given[0] if given else x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127.0
    return (x.float() / scale).round().clamp(-127, 127).to(i8), scale


def int8_linear(
    m: int, columns: int | Sequence[int], k: int, *, dtype: Any = bf16, scheme: str = "gptfast"
) -> Made:
    """int8 layers of one activation with a dynamic scale; ``static``: with a given scale."""
    sizes = [columns] if isinstance(columns, int) else list(columns)

    def fn(x: Tensor, *rest: Tensor) -> Any:
        given, weights = (rest[:1], rest[1:]) if scheme == "static" else ((), rest)
        q, scale = _to_int8(x, scheme, given)
        pairs = zip(weights[::2], weights[1::2], strict=True)
        found = [(torch._int_mm(q, w.t()).float() * scale * sw).to(dtype) for w, sw in pairs]
        return found[0] if isinstance(columns, int) else [F.silu(y) for y in found]

    given = [((1, 1), f32)] if scheme == "static" else []
    return fn, [((m, k), dtype), *given, *(t for n in sizes for t in (((n, k), i8), ((n,), f32)))]


def fp8(
    m: int, n: int, k: int, *, rows: str = "token", fast: bool = False, library: bool = True,
    a_dtype: Any = e4m3, bias: bool = False,
) -> Made:  # fmt: skip
    """FP8 with scales of rows or tensors: ``_scaled_mm``, or dequantized to fp32."""

    def fn(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, *bias: Tensor) -> Tensor:
        if library:
            options = {"out_dtype": bf16, "use_fast_accum": fast}
            return torch._scaled_mm(a, w.t(), sa, sb, *bias, **options)
        y = (a.float() @ w.float().t()) * sa * sb
        return (y + bias[0] if bias else y).to(bf16)

    scales = [((), f32)] * 2 if rows == "tensor" else [((m, 1), f32), ((1, n), f32)]
    return fn, [((m, k), a_dtype), ((n, k), e4m3), *scales, *([((n,), bf16)] if bias else [])]


def fp8_linear(m: int, n: int, k: int) -> Made:
    """FP8 with a dynamic scale for each row, as torchao."""

    def fn(x: Tensor, w: Tensor, sb: Tensor) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 448).float()
        q = (x.float() / scale).clamp(-448, 448).to(e4m3)
        return torch._scaled_mm(q, w.t(), scale, sb, out_dtype=bf16, use_fast_accum=True)

    return fn, [((m, k), bf16), ((n, k), e4m3), ((1, n), f32)]


def fp8_block(m: int, n: int, k: int, *, block: int = 128, how: str = "scaled_mm") -> Made:
    """FP8 with scales of blocks: ``_scaled_mm``, dequantized in views, or in a loop over K."""
    row_scales = ((k // block, m) if how == "scaled_mm" else (m, k // block), f32)

    def fn(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        if how == "scaled_mm":
            return torch._scaled_mm(a, w.t(), sa.t(), sb.t(), out_dtype=bf16)
        if how == "loop":
            y = torch.zeros(m, n, dtype=f32, device=a.device)
            for i in range(k // block):
                part = slice(block * i, block * i + block)
                columns = sb.repeat_interleave(block, 0)[:, i][None]
                y = y + (a[:, part].float() @ w[:, part].float().t()) * sa[:, i : i + 1] * columns
            return y.to(bf16)
        x = (a.float().view(m, k // block, block) * sa[..., None]).view(m, k)
        blocks = w.float().view(n // block, block, k // block, block)
        return (x @ (blocks * sb[:, None, :, None]).view(n, k).t()).to(bf16)

    return fn, [((m, k), e4m3), ((n, k), e4m3), row_scales, ((n // block, k // block), f32)]


def _fields(packed: Tensor, shifts: Sequence[int], dim: int) -> Tensor:
    return torch.stack([(packed >> shift) & 15 for shift in shifts], dim)


def weight(kind: str, n: int, k: int, dtype: Any) -> Made:
    """A packed weight: the function that decodes W [K, N], and its tensors."""
    groups, order = k // GROUP, range(0, 32, 4)
    scales: Spec = ((groups, n), dtype)

    def spread(t: Tensor, dim: int = 0) -> Tensor:
        return t.repeat_interleave(GROUP, dim)

    def gptq(q: Tensor, s: Tensor, *zero: Tensor) -> Tensor:
        zeros = spread(_fields(zero[0], order, -1).reshape(-1, n)) if zero else 8
        return (_fields(q, order, 1).reshape(k, n) - zeros).to(dtype) * spread(s)

    def act_order(q: Tensor, s: Tensor, z: Tensor, group: Tensor) -> Tensor:
        zeros = _fields(z, order, -1).reshape(-1, n)[group]
        return (_fields(q, order, 1).reshape(k, n) - zeros).to(dtype) * s[group]

    def awq(q: Tensor, s: Tensor, z: Tensor) -> Tensor:
        codes, zeros = (_fields(t, AWQ_SHIFTS, -1).reshape(-1, n) for t in (q, z))
        return (codes - spread(zeros)).to(dtype) * spread(s)

    def hqq(q: Tensor, s: Tensor, z: Tensor) -> Tensor:
        codes = torch.cat([q >> 4, q & 15]).to(dtype).view(n, groups, GROUP)
        return ((codes - z[..., None]) * s[..., None]).view(n, k).t()

    def pairs(q: Tensor, s: Tensor) -> Tensor:
        codes = torch.stack([q & 15, q >> 4], -1).reshape(n, groups, GROUP)
        return ((codes.to(i8) - 8).to(dtype) * s[..., None]).reshape(n, k).t()

    def int8_group(q: Tensor, s: Tensor, z: Tensor) -> Tensor:
        codes = q.view(n, groups, GROUP).to(torch.int16) - z[..., None]
        return (codes.to(dtype) * s[..., None]).view(n, k).t()

    def nf4(q: Tensor, s: Tensor, table: Tensor) -> Tensor:
        codes = torch.stack([q >> 4, q & 15], -1).reshape(-1).long()
        return (table[codes].view(-1, 64) * s[:, None]).view(n, k).to(dtype).t()

    def block(q: Tensor, s: Tensor) -> Tensor:
        blocks = q.float().view(n // 128, 128, k // 128, 128) * s[:, None, :, None]
        return blocks.view(n, k).to(dtype).t()

    def channel(q: Tensor, s: Tensor) -> Tensor:
        return (q.to(dtype) * s).t()

    def by_k(q: Tensor, s: Tensor) -> Tensor:
        return q.to(dtype) * s

    by_column: Spec = ((n, groups), dtype)
    packed, zeros = ((k // 8, n), i32), ((groups, n // 8), i32)
    made: dict[str, Made] = {
        "gptq": (gptq, [packed, scales, zeros]),
        "gptq_symmetric": (gptq, [packed, scales]),
        "act_order": (act_order, [packed, scales, zeros, ((k,), torch.int64)]),
        "awq": (awq, [((k, n // 8), i32), scales, zeros]),
        "hqq": (hqq, [((n // 2, k), u8), by_column, by_column]),
        "pairs": (pairs, [((n, k // 2), u8), by_column]),
        "int8_group": (int8_group, [((n, k), i8), by_column, ((n, groups), i8)]),
        "int8": (channel, [((n, k), i8), ((n, 1), dtype)]),
        "int8_by_k": (by_k, [((k, n), i8), ((n,), dtype)]),
        "int8_tensor": (channel, [((n, k), i8), ((), dtype)]),
        "e4m3": (channel, [((n, k), e4m3), ((n, 1), dtype)]),
        "e5m2": (channel, [((n, k), e5m2), ((n, 1), dtype)]),
        "e4m3_block": (block, [((n, k), e4m3), ((n // 128, k // 128), f32)]),
        "nf4": (nf4, [((n * k // 2, 1), u8), ((n * k // 64,), f32), ((16,), f32)]),
    }
    return made[kind]


def weight_only(
    kind: str, m: int, columns: int | Sequence[int], k: int, *, dtype: Any = bf16
) -> Made:
    """Products of one activation with packed weights; several ones with SiLU after each."""
    sizes = [columns] if isinstance(columns, int) else list(columns)
    weights = [weight(kind, n, k, dtype) for n in sizes]
    count = len(weights[0][1])

    def fn(x: Tensor, *tensors: Tensor) -> Any:
        given = [tensors[i : i + count] for i in range(0, len(tensors), count)]
        found = [x @ w(*each) for (w, _), each in zip(weights, given, strict=True)]
        return found[0] if isinstance(columns, int) else [F.silu(y) for y in found]

    return fn, [((m, k), dtype), *(tensor for _, tensors in weights for tensor in tensors)]


EPILOGUES: dict[str, Callable[..., Tensor]] = {
    "bias": lambda y, bias: y + bias,
    "silu": lambda y, up: F.silu(y) * up,
    "residual": lambda y, residual: residual + y,
    "gelu": F.gelu,
}


def program(
    make: Callable[..., Made], *args: Any, arch: int = 90, then: str = "", dynamic: bool = False,
    max_autotune: bool = False, options: Mapping[str, Any] | None = None, **given: Any,
) -> Program:  # fmt: skip
    """The product ``make(*args, **given)`` with the epilogue ``then``."""
    product, tensors = make(*args, **given)
    m, n = args[-3:-1]
    out = given.get("out") or given.get("dtype") or bf16
    extra: dict[str, list[Spec]] = {"bias": [((n,), out)], "silu": [((m, n), out)]}
    extra["residual"] = extra["silu"]
    more = extra.get(then, [])

    def fn(*all_given: Tensor) -> Any:
        count = len(tensors)
        y = product(*all_given[:count])
        return EPILOGUES[then](y, *all_given[count:]) if then else y

    symbolic = [i for i, (shape, _) in enumerate([*tensors, *more]) if shape and shape[0] == m]
    flags = [f"{key}={value}" for key, value in {**given, **(options or {})}.items()]
    flags += ["dynamic"] * dynamic + ["max_autotune"] * max_autotune
    parts = [f"sm{arch}", make.__name__, *args, *flags, then]
    text = "-".join(str(part).replace("torch.", "") for part in parts if part != "")
    return Program(
        name=re.sub(r"[^\w.=]+", "-", text).strip("-"),
        fn=fn,
        tensors=[*tensors, *more],
        arch=arch,
        dynamic=tuple(symbolic) if dynamic else (),
        options=options or {},
        max_autotune=max_autotune,
    )


def programs() -> Iterator[Program]:
    """All programs. The comments name the kernels that the following lines reach on sm_90."""
    yield from _int8_programs()
    yield from _fp8_programs()
    yield from _weight_only_programs()
    yield from _other_gpus()


def _int8_programs() -> Iterator[Program]:
    p = program
    # w8a8_decode_quantize
    yield p(int8_linear, 1, 4096, 4096)
    yield p(int8_linear, 1, 28672, 4096, then="silu")
    yield p(int8_linear, 2, 2048, 8192, scheme="static", then="residual")
    yield p(int8_linear, 3, 4096, 4096, dtype=f16, scheme="torchao", then="bias")
    yield p(int8_linear, 4, 2048, 2048, then="gelu")
    # w8a8_decode; quantization before the GEMM; horizontal fusion
    yield p(int8_linear, 2, 4096, 4096, options={"fuse_quantization": False})
    yield p(int8_linear, 7, 6144, 4096, scheme="torchao")
    yield p(int8_linear, 2, (1024, 256, 256), 4096)
    yield p(int8_linear, 5, (4096, 4096), 4096, scheme="torchao")
    yield p(int8_linear, 16, (512, 256, 256), 1024)
    yield p(int8_linear, 16, (512, 256, 256), 1024, options={"horizontal_fusion": False})
    yield p(int8, 8, 6144, 4096, then="silu")
    yield p(int8, 3, 2100, 8192, out=f16, bias=True, rows="tensor")
    yield p(int8, 1, 1024, 1024, rows="tensor", columns="tensor", max_autotune=True)
    # w8a8_large_m_sm90, w8a8_persistent
    yield p(int8, 4096, 4096, 4096, then="silu")
    yield p(int8, 1024, 6144, 4096, out=f16, bias=True)
    yield p(int8, 3000, 4096, 4224, rows="tensor", then="residual")
    yield p(int8, 4096, 4096, 256)
    yield p(int8, 4100, 4096, 272, bias=True, then="gelu")
    yield p(int8, 8192, 2048, 1280, out=f16, max_autotune=True)
    # w8a8_mm
    yield p(int8, 64, 512, 256, then="silu")
    yield p(int8, 33, 504, 264, bias=True)
    yield p(int8, 256, 4096, 1024, out=f16, then="residual", max_autotune=True)
    yield p(int8, 77, 1024, 512, dynamic=True)
    yield p(int8, 4096, 4096, 256, out=f32)
    yield p(int8, 128, 1024, 512, zero=True)
    yield p(int8, 1, 512, 512, zero=True, columns="tensor")
    yield p(int8, 64, 512, 512, options={"configs": ("64x64x128_w4_s4_g8",)})
    yield p(int8, 64, 512, 512, options={"numerics": "strict"})
    yield p(int8_groups, 20, 512, 256)
    yield p(int8_groups, 130, 512, 256, both=True)
    yield p(int8_linear, 100, 2048, 1024, then="silu")


def _fp8_programs() -> Iterator[Program]:
    p = program
    # fp8_decode_quantize, fp8_decode
    yield p(fp8_linear, 1, 4096, 4096)
    yield p(fp8_linear, 4, 2048, 2048, then="gelu")
    yield p(fp8_linear, 6, 4096, 4096)
    yield p(fp8, 1, 512, 512, fast=True, then="gelu")
    # fp8_large_m_sm90, fp8_persistent
    yield p(fp8, 4096, 2112, 1536)
    yield p(fp8, 2048, 4096, 1024, fast=True, bias=True, then="gelu")
    yield p(fp8, 4096, 4096, 256, fast=True)
    yield p(fp8, 4096, 4096, 256, then="silu")
    yield p(fp8, 4096, 4096, 256, library=False, bias=True)
    # fp8_mm
    yield p(fp8, 64, 512, 512, bias=True)
    yield p(fp8, 33, 1024, 512, rows="tensor", then="residual")
    yield p(fp8, 64, 512, 512, a_dtype=e5m2, then="silu")
    yield p(fp8, 77, 512, 512, library=False, dynamic=True)
    yield p(fp8, 128, 4096, 1024, fast=True, max_autotune=True)
    # fp8_block_decode, fp8_block_two_block_sm90, fp8_block_split_k
    yield p(fp8_block, 1, 2176, 1024)
    yield p(fp8_block, 8, 4096, 1024, then="silu")
    yield p(fp8_block, 5, 640, 7168, how="views")
    yield p(fp8_block, 128, 7168, 2048)
    yield p(fp8_block, 64, 8192, 1024, then="residual")
    yield p(fp8_block, 128, 6400, 512, how="loop")
    yield p(fp8_block, 16, 2176, 7168)
    yield p(fp8_block, 64, 512, 512, then="silu")
    yield p(fp8_block, 9, 4096, 2048, how="views", max_autotune=True)
    yield p(fp8_block, 48, 256, 384, how="loop", then="gelu")
    # fp8_block_large_m_sm90, fp8_block_persistent, fp8_block_mm
    yield p(fp8_block, 4096, 2176, 1536)
    yield p(fp8_block, 4096, 4096, 1024, how="views", then="silu")
    yield p(fp8_block, 4096, 4096, 512, block=64, how="views")
    yield p(fp8_block, 4096, 4096, 512, block=32, how="views", then="residual")
    yield p(fp8_block, 300, 8192, 512, block=64, how="views")
    yield p(fp8_block, 128, 24576, 512, how="views", then="gelu")
    yield p(fp8_block, 400, 512, 512, how="views", max_autotune=True)


def _weight_only_programs() -> Iterator[Program]:
    p = program
    # weight_only_small_m_sm90
    yield p(weight_only, "gptq", 16, 28672, 4096)
    yield p(weight_only, "gptq", 9, 22016, 4096, dtype=f16, then="silu")
    yield p(weight_only, "gptq", 32, 28672, 4096, then="bias")
    yield p(weight_only, "gptq_symmetric", 16, 28672, 4096, dtype=f16)
    # weight_only_mm_sm90
    yield p(weight_only, "gptq", 256, 4096, 512, dtype=f16, then="residual")
    yield p(weight_only, "gptq", 128, 14336, 3072, dtype=f16)
    yield p(weight_only, "gptq", 4096, 4096, 512, then="silu")
    yield p(weight_only, "gptq_symmetric", 1000, 8192, 1024, max_autotune=True)
    yield p(weight_only, "gptq", 64, 12288, 4096, dtype=f16)
    yield p(weight_only, "gptq", 33, 6144, 2048, then="gelu")
    yield p(weight_only, "gptq_symmetric", 17, 4096, 4096, dtype=f16, then="residual")
    # weight_only_decode, with horizontal fusion
    yield p(weight_only, "gptq", 1, 4096, 4096, dtype=f16)
    yield p(weight_only, "gptq", 1, 28672, 4096, then="silu")
    yield p(weight_only, "gptq", 13, 6144, 4096, then="bias", max_autotune=True)
    yield p(weight_only, "gptq_symmetric", 8, 4096, 11008, then="residual")
    yield p(weight_only, "gptq", 1, (4096, 1024, 1024), 4096)
    yield p(weight_only, "gptq", 7, (2048, 2048), 2048, dtype=f16)
    # weight_only_small_m
    yield p(weight_only, "awq", 1, 4096, 4096, dtype=f16)
    yield p(weight_only, "awq", 16, 6144, 4096, dtype=f16, then="silu")
    yield p(weight_only, "awq", 32, 2048, 2048, then="bias")
    yield p(weight_only, "awq", 4, (1024, 512, 512), 4096, dtype=f16)
    yield p(weight_only, "pairs", 3, 4096, 4096, then="residual")
    yield p(weight_only, "gptq", 15, 4096, 4096, dtype=f16, dynamic=True)
    # weight_only_medium_m
    yield p(weight_only, "awq", 64, 2048, 2048, dtype=f16)
    yield p(weight_only, "awq", 128, 4096, 1024, dtype=f16, then="gelu", max_autotune=True)
    yield p(weight_only, "pairs", 63, 2048, 2048, then="silu")
    # weight_only_bytes
    yield p(weight_only, "int8", 1, 4096, 4096)
    yield p(weight_only, "int8", 16, 16384, 2048, dtype=f16, then="silu")
    yield p(weight_only, "int8_group", 31, 4096, 2048, then="bias")
    yield p(weight_only, "int8_tensor", 100, 2048, 2048, max_autotune=True)
    yield p(weight_only, "e4m3", 7, 4096, 4096, then="residual")
    yield p(weight_only, "e4m3_block", 64, 4096, 1024)
    yield p(weight_only, "e5m2", 4, 2048, 2048, dtype=f16)
    yield p(weight_only, "hqq", 1, 4096, 4096)
    yield p(weight_only, "hqq", 21, 2048, 2048, dtype=f16, then="gelu")
    yield p(weight_only, "int8", 15, 2048, 2048, dynamic=True)
    # weight_only_mm, weight_only_dequantize
    yield p(weight_only, "hqq", 64, 2048, 1024, then="silu")
    yield p(weight_only, "act_order", 16, 2048, 1024, dtype=f16)
    yield p(weight_only, "nf4", 1, 2048, 1024, then="residual")
    yield p(weight_only, "nf4", 33, 1024, 1024, max_autotune=True)
    yield p(weight_only, "int8_by_k", 8, 2048, 1024, then="bias")
    yield p(weight_only, "int8", 5, 512, 512, dtype=f32)
    yield p(weight_only, "nf4", 200, 1024, 1024)
    yield p(weight_only, "int8", 600, 2048, 1024, then="silu")
    yield p(weight_only, "awq", 512, 1024, 1024, dtype=f16, then="bias")


def _other_gpus() -> Iterator[Program]:
    for arch in (80, 89, 100):
        given = {"arch": arch}
        yield program(int8, 64, 512, 256, then="silu", **given)
        yield program(int8, 4096, 4096, 1024, bias=True, **given)
        yield program(int8, 128, 1024, 512, zero=True, **given)
        yield program(int8_linear, 1, (1024, 256, 256), 1024, **given)
        yield program(fp8, 64, 512, 512, library=False, bias=True, **given)
        yield program(fp8_block, 48, 512, 512, how="views", then="residual", **given)
        yield program(weight_only, "gptq", 1, 4096, 4096, dtype=f16, **given)
        yield program(weight_only, "gptq", 64, 2048, 1024, dtype=f16, then="bias", **given)
        yield program(weight_only, "awq", 16, 2048, 2048, dtype=f16, **given)
        yield program(weight_only, "int8", 16, 4096, 2048, then="gelu", **given)
        yield program(weight_only, "hqq", 40, 1024, 1024, then="silu", **given)
        yield program(weight_only, "nf4", 200, 1024, 1024, **given)
