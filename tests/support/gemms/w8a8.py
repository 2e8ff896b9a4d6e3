"""Inputs of W8A8 GEMMs in awkward layouts, the fp64 reference, and the bounds on the error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

# Half an ulp of the output and, with a fused epilogue, of the value before it. The RMS of a uniform
# rounding error is 1 / sqrt(12) ulp, and values spread over a binade.
MAX_ERROR = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-21}
RMS_ERROR = {torch.bfloat16: 2**-8.5, torch.float16: 2**-11.5, torch.float32: 2**-23}


@dataclasses.dataclass(frozen=True)
class Case:
    """One W8A8 GEMM. ``a_layout`` and ``w_layout`` name an entry of LAYOUTS. ``group``: elements
    along K that share a scale of w, for each channel; 0: all."""

    m: int
    n: int
    k: int
    out_dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.float32
    a_scale: str = "token"
    b_scale: str = "channel"
    bias: bool = True
    a_layout: str = "rows"
    w_layout: str = "rows"
    group: int = 0

    def __str__(self) -> str:
        parts = [f"{self.m}x{self.n}x{self.k}", str(self.out_dtype).removeprefix("torch.")]
        defaults = Case(0, 0, 0)
        for name in ("scale_dtype", "a_scale", "b_scale", "bias", "a_layout", "w_layout", "group"):
            if getattr(self, name) != getattr(defaults, name):
                parts.append(f"{name}={getattr(self, name)}".replace("torch.", ""))
        return "-".join(parts)


def _rows(rows: int, cols: int, device: str) -> torch.Tensor:
    return _integers(rows, cols, device)


def _columns(rows: int, cols: int, device: str) -> torch.Tensor:
    return _integers(cols, rows, device).t()


def _sliced(rows: int, cols: int, device: str) -> torch.Tensor:
    return _integers(rows + 3, cols + 5, device)[2 : rows + 2, 4 : cols + 4]


def _every_second(rows: int, cols: int, device: str) -> torch.Tensor:
    return _integers(2 * rows, 2 * cols, device)[::2, ::2]


def _unaligned(rows: int, cols: int, device: str) -> torch.Tensor:
    return _integers(1, rows * cols + 1, device).flatten()[1:].view(rows, cols)


def _padded(rows: int, cols: int, device: str) -> torch.Tensor:
    """Contiguous along the last axis; rows begin at multiples of 16 if ``cols`` is one."""
    return _integers(rows, cols + 16, device)[:, :cols]


LAYOUTS: dict[str, Callable[[int, int, str], torch.Tensor]] = {
    "rows": _rows,
    "columns": _columns,
    "sliced": _sliced,
    "every_second": _every_second,
    "unaligned": _unaligned,
    "padded": _padded,
}


def _integers(rows: int, cols: int, device: str) -> torch.Tensor:
    if device == "cuda" and not torch.cuda.is_available():
        return torch.empty(rows, cols, dtype=torch.int8, device=device)  # a virtual GPU
    return torch.randint(-128, 128, (rows, cols), dtype=torch.int8, device=device)


def make_inputs(case: Case, device: str) -> tuple[torch.Tensor | None, ...]:
    """a [M, K], w [N, K], a_scale, b_scale ([K / group, N] with groups), bias. No two scales are
    equal."""
    a = LAYOUTS[case.a_layout](case.m, case.k, device)
    w = LAYOUTS[case.w_layout](case.n, case.k, device)

    def scale(kind: str, size: tuple[int, ...]) -> torch.Tensor | None:
        if kind == "none":
            return None
        shape = size if kind in ("token", "channel") else (1,)
        return (torch.rand(shape, device=device) * 0.02 + 0.001).to(case.scale_dtype)

    a_scale = scale(case.a_scale, (case.m, 1))
    groups = (case.k // case.group,) if case.group else ()
    b_scale = scale(case.b_scale, (*groups, case.n))
    bias = torch.randn(case.n, device=device).to(case.scale_dtype) if case.bias else None
    return a, w, a_scale, b_scale, bias


def gemm(case: Case) -> Callable[..., torch.Tensor]:
    """The GEMM in plain PyTorch, as a quantizer would write it."""

    def fn(a, w, a_scale, b_scale, bias):  # type: ignore[no-untyped-def]
        if case.group:
            return _gemm_of_groups(case, a, w, a_scale, b_scale, bias)
        out = torch._int_mm(a, w.t()).to(torch.float32)
        for scale in (a_scale, b_scale):
            if scale is not None:
                out = out * scale
        if bias is not None:
            out = out + bias
        return out.to(case.out_dtype)

    return fn


def _gemm_of_groups(
    case: Case,
    a: torch.Tensor,
    w: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    of_k = b_scale.t().repeat_interleave(case.group, 1)
    out = a.float() @ (w.float() * of_k).t()
    out = out if a_scale is None else out * a_scale
    return (out if bias is None else out + bias).to(case.out_dtype)


def reference(inputs: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    """The same in fp64."""
    a, w, a_scale, b_scale, bias = inputs
    assert a is not None
    assert w is not None
    right = w.double()
    if b_scale is not None and b_scale.dim() > 1:
        right = right * b_scale.double().t().repeat_interleave(w.shape[1] // len(b_scale), 1)
        b_scale = None
    out = a.double() @ right.t()
    for scale in (a_scale, b_scale):
        if scale is not None:
            out = out * scale.double()
    return out if bias is None else out + bias.double()


def assert_close(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype | None = None, slack: float = 1.0
) -> None:
    """Bounds max and RMS error of all elements, relative to max(rms(want), |want|), by dtype."""
    assert got.shape == want.shape
    if got.numel() == 0:
        return
    dtype = dtype or got.dtype
    size = want.abs().clamp_min(want.square().mean().sqrt())
    error = (got.double() - want).abs() / size
    worst = error.max().item()
    rms = error.square().mean().sqrt().item()
    assert worst <= slack * MAX_ERROR[dtype], f"max error {worst:.2e} at {error.argmax().item()}"
    assert rms <= slack * RMS_ERROR[dtype], f"rms error {rms:.2e}"
