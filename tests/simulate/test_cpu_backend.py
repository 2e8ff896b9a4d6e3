"""torch.compile of real CPU tensors, with Triton kernels in the interpreter."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
import triton.backends
from torch._inductor.utils import run_and_get_code
from torch.utils._triton import has_triton, triton_backend

from inductor_quant import simulate

pytestmark = pytest.mark.interp

ONLY_TRITON = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}


def layer_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.silu(F.layer_norm(x, (96,), weight))


def int8_linear(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch._int_mm(a, b).float() * scale).to(torch.bfloat16)


def int8_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    a = torch.randint(-128, 128, (33, 40), dtype=torch.int8)
    b = torch.randint(-128, 128, (24, 40), dtype=torch.int8).t()
    return a, b, torch.rand(24) * 1e-4


CASES = {
    "reduction": (
        layer_norm,
        (torch.randn(16, 96).to(torch.bfloat16), torch.randn(96).to(torch.bfloat16)),
    ),
    "template": (int8_linear, int8_inputs()),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_cpu_function_agrees_with_eager(case):
    fn, args = CASES[case]
    with simulate.interpreted_cpu(), inductor_config.patch(ONLY_TRITON), torch.no_grad():
        result, [code] = run_and_get_code(torch.compile(fn), *args)
    assert "async_compile.triton(" in code
    assert "extern_kernels." not in code
    torch.testing.assert_close(result, fn(*args), rtol=1e-2, atol=1e-3)


def test_pick_decides_among_the_choices_on_offer():
    def widest(choice) -> float:
        fields = dict(item.split("=") for item in choice.description.split(", "))
        return -float(fields["BLOCK_N"])

    codes = []
    for pick in (None, widest):
        with (
            simulate.interpreted_cpu(pick=pick),
            inductor_config.patch(ONLY_TRITON),
            torch.no_grad(),
        ):
            _, [code] = run_and_get_code(torch.compile(int8_linear), *int8_inputs())
        codes.append(code)
    assert codes[0] != codes[1]


def test_everything_is_restored():
    before = has_triton()
    with simulate.interpreted_cpu():
        assert "cpu" in triton.backends.backends
        assert triton.runtime.driver.active.get_current_target().backend == "cpu"
        assert triton_backend().hash() == "interpreter"
    assert "cpu" not in triton.backends.backends
    assert inductor_config.cpu_backend == "cpp"
    assert has_triton() == before
