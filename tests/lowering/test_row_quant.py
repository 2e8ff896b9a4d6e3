"""What is generated around quantized activations: which kernels, and what is in each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate

pytestmark = pytest.mark.compiles

bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8
K, N = 256, 512
PRODUCT = r"tl\.dot\(|mma_v2\(|warpgroup_mma\("  # Triton's and Gluon's


def kernels(
    fn: Callable[..., Any], make: Callable[[str], tuple[torch.Tensor, ...]]
) -> dict[str, str]:
    with collect() as report:
        code = generate(fn, make)
    assert [match.family for match in report.matches] == ["w8a8"], report
    assert "extern_kernels." not in code.wrapper.split("def call", 1)[1]
    return code.kernels


def empty(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("m", [1, 16, 130, 4096])
def test_an_int8_result_is_requantized_in_the_gemm(m: int) -> None:
    def fn(a: Any, w: Any, row: Any, column: Any, bias: Any, out: Any) -> torch.Tensor:
        y = torch._int_mm(a, w.t()) * row * column + bias
        return (y / out).round().clamp(-128, 127).to(torch.int8)

    def make(device: str) -> tuple[torch.Tensor, ...]:
        return (
            empty(m, K, dtype=i8, device=device), empty(N, K, dtype=i8, device=device),
            empty(m, 1, dtype=f32, device=device), empty(N, dtype=f32, device=device),
            empty(N, dtype=f32, device=device), empty(1, dtype=f32, device=device),
        )  # fmt: skip

    [(name, source)] = kernels(fn, make).items()
    assert name.startswith("triton_tem")
    assert "tl.int8" in re.split(PRODUCT, source)[-1]


def dynamic(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    high, low = x.float().amax(1, keepdim=True), x.float().amin(1, keepdim=True)
    scale = ((high - low) / 255).clamp_min(1e-6)
    zero = (-128 - low / scale).round().clamp(-128, 127).to(torch.int8)
    q = (x / scale + zero).round().clamp(-128, 127).to(torch.int8)
    acc = torch._int_mm(q, w.t())
    return ((acc - zero * w.sum(1)) * scale).to(bf16)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("m", [2, 16, 63, 64, 130])
def test_the_sums_of_an_input_weight_cost_a_kernel_only_where_rows_are_many(m: int) -> None:
    def make(device: str) -> tuple[torch.Tensor, ...]:
        return empty(m, K, dtype=bf16, device=device), empty(N, K, dtype=i8, device=device)

    names = [name.split("_fused")[0] for name in kernels(dynamic, make)]
    assert names.count("triton_tem") == 1
    assert len(names) == (2 if m < 64 else 3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("divides", [True, False])
def test_a_smoothed_activation_is_scaled_in_the_kernel_that_quantizes_it(divides: bool) -> None:
    def fn(x: torch.Tensor, smooth: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.rms_norm(x, x.shape[-1:])
        x = x / smooth if divides else x * smooth
        scale = x.abs().amax(-1, keepdim=True).float() / 127
        q = (x / scale).round().clamp(-128, 127).to(torch.int8)
        return (torch._int_mm(q, w.t()) * scale).to(bf16)

    def make(device: str) -> tuple[torch.Tensor, ...]:
        return (
            empty(64, K, dtype=bf16, device=device), empty(K, dtype=bf16, device=device),
            empty(N, K, dtype=i8, device=device),
        )  # fmt: skip

    assert len(kernels(fn, make)) == 2


F = torch.nn.functional
BEFORE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda x, up: F.rms_norm(x, x.shape[-1:], up[0]),
    "layer_norm": lambda x, up: F.layer_norm(x, x.shape[-1:], up[0], up[0]),
    "silu_mul": lambda x, up: F.silu(x) * up,
    "gelu": lambda x, up: F.gelu(x),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("before", "m"), list(zip(BEFORE, (7, 129, 1, 4097), strict=True)))
def test_a_quantization_is_one_kernel_with_what_precedes_it(before: str, m: int) -> None:
    """However many rows: the rows are not split, and what precedes is computed once."""

    def fn(x: torch.Tensor, up: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = BEFORE[before](x, up)
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
        q = (x / scale).round().clamp(-128, 127).to(torch.int8)
        return (torch._int_mm(q, w.t()) * scale).to(bf16)

    def make(device: str) -> tuple[torch.Tensor, ...]:
        return (
            empty(m, 4096, dtype=bf16, device=device), empty(m, 4096, dtype=bf16, device=device),
            empty(N, 4096, dtype=i8, device=device),
        )  # fmt: skip

    first, second = kernels(fn, make).values()
    assert "for r0_offset" not in first  # a row is read once
    assert re.search(PRODUCT, second)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_residual_is_added_in_the_kernel_that_quantizes_the_norm(norm: str) -> None:
    """And stored for what follows, for any number of rows."""

    def fn(x: torch.Tensor, up: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x + up
        x = BEFORE[norm](residual, up)
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
        q = (x / scale).round().clamp(-128, 127).to(torch.int8)
        return (torch._int_mm(q, w.t()) * scale).to(bf16), residual

    def make(device: str) -> tuple[torch.Tensor, ...]:
        x, up = (empty(64, 4096, dtype=bf16, device=device) for _ in range(2))
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(up, 0)
        return x, up, empty(N, 4096, dtype=i8, device=device)

    first, second = kernels(fn, make).values()
    assert "for r0_offset" not in first
    assert "tl.dot" in second


def test_a_fake_quantized_activation_is_stored_as_int8() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        x = (x / scale).round().clamp(-128, 127) * scale
        return torch.nn.functional.linear(x, w.to(bf16) * s)

    def make(device: str) -> tuple[torch.Tensor, ...]:
        return (
            empty(64, K, dtype=bf16, device=device), empty(N, K, dtype=i8, device=device),
            empty(N, 1, dtype=bf16, device=device),
        )  # fmt: skip

    first, second = kernels(fn, make).values()
    assert "*i8" in first
    assert "tl.int32" in second
    assert "*i8" in second


def test_a_factor_of_a_zero_point_on_the_cpu_is_left_in_the_graph() -> None:
    def fn(a: Any, w: Any, factor: Any, scale: Any) -> torch.Tensor:
        return (torch._int_mm(a, w.t()) - factor * w.sum(1)) * scale

    def make(device: str) -> tuple[torch.Tensor, ...]:
        return (
            empty(64, K, dtype=i8, device=device), empty(N, K, dtype=i8, device=device),
            torch.tensor(3.5), empty(64, 1, dtype=f32, device=device),
        )  # fmt: skip

    with collect() as report:
        generate(fn, make)
    assert not any(match.spec.a.zero for match in report.matches)
