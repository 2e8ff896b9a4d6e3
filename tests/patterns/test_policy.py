"""Correct matches that the user's options or the device decline."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from inductor_quant.options import Options
from inductor_quant.report.events import collect
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms.generated import generate
from tests.support.graphs.post_grad import EagerBackend, capture
from tests.support.spellings.int8 import bf16, gemm, integers, mm, scale, scaled
from tests.support.spellings.quantizers import TorchaoLinear

M, N, K = 6, 24, 40


def layer_code(**options: Any) -> list[str]:
    torch._dynamo.reset()
    model = torch.nn.ModuleDict({"first": TorchaoLinear(K, N), "second": TorchaoLinear(N, N)})

    def fn(x: torch.Tensor) -> torch.Tensor:
        return model["second"](model["first"](x))

    _, [rewrite] = capture(
        fn, [torch.randn(M, K, dtype=bf16)], options=Options(on_error="raise", **options)
    )
    assert len(rewrite.report.matches) + len(rewrite.codes) == 2
    return rewrite.codes


def test_a_disabled_family_is_reported() -> None:
    assert layer_code(families=()) == ["family_disabled"] * 2


def test_excluded_modules_are_reported() -> None:
    assert layer_code(exclude_modules=("*",)) == ["module_excluded"] * 2
    assert layer_code(include_modules=("nothing*",)) == ["module_excluded"] * 2
    assert layer_code(include_modules=("*",)) == []


@pytest.mark.compiles
def test_a_scale_on_the_cpu_is_refused_on_a_gpu() -> None:
    def make_inputs(device: str) -> tuple[torch.Tensor, ...]:
        return integers(M, K, device), integers(K, N, device), torch.tensor(0.5)

    with collect() as report:
        generated = generate(scaled, make_inputs)
    assert [rejection.code for rejection in report.rejections] == [RejectionCode.DEVICE]
    assert not report.matches
    assert "w8a8" not in generated.wrapper
    assert "extern_kernels._int_mm" in generated.wrapper


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("names", "is_ours"),
    [
        ("^triton_mm", False),
        ("scaled_mm|fp8|triton_mm", False),
        ("w8a8|^triton_mm", True),
        (r"^triton_inductor_quant_w8a8_mm_\d+$", True),
    ],
)
def test_a_filter_of_choices_that_excludes_ours_leaves_the_graph_to_stock(
    names: str, is_ours: bool
) -> None:
    """Inductor drops the choices whose names do not match: none would be left for our op."""

    def make_inputs(device: str) -> tuple[torch.Tensor, ...]:
        return integers(M, K, device), integers(K, N, device), torch.ones(N, device=device)

    setting = {"test_configs.autotune_choice_name_regex": names}
    stock = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    with collect() as report:
        generated = generate(scaled, make_inputs, config=setting | stock)
    assert [rejection.code.value for rejection in report.rejections] == ["choice_filter"][is_ours:]
    [kernel] = generated.kernels
    assert ("w8a8" in kernel) == is_ours
    assert ("_int_mm" in kernel) != is_ours
    [choices] = generated.choices
    assert any(re.search(names, choice.name) for choice in choices)


def test_a_cpu_without_triton_is_reported_and_left_alone() -> None:
    backend = EagerBackend(as_if_triton=False)
    torch.compile(scaled, backend=backend)(*gemm(), scale(N))
    [rewrite] = backend.rewrites
    assert rewrite.codes == ["device"]
    assert rewrite.is_untouched


def test_a_cpu_compile_gives_the_bits_of_stock_inductor() -> None:
    def fn(a: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.tanh((mm(a, w) * s).to(bf16))

    args = [*gemm(), scale(N)]
    # of all caches that of compiled C++ alone, whose key is the source
    with torch._inductor.config.patch({"fx_graph_cache": False}):
        stock = torch.compile(fn, backend="inductor")(*args)
        torch._dynamo.reset()
        raising = {"inductor_quant.on_error": "raise"}
        with collect() as report:
            ours = torch.compile(fn, backend="inductor_quant", options=raising)(*args)
    assert [rejection.code for rejection in report.rejections] == [RejectionCode.DEVICE]
    assert torch.equal(stock, ours)
