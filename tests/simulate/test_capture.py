"""What ``generate`` gives for stock Inductor, and that ``interpret`` of it agrees with eager."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from inductor_quant import simulate
from inductor_quant.simulate import capture

ONLY_TRITON = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}


def tensor(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor on the virtual GPU, or one with the same random content each time."""
    if device != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def int8_linear(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch._int_mm(a, b).float() * scale).to(torch.bfloat16)


def int8_inputs(device: str, m: int = 40, n: int = 72, k: int = 48) -> tuple[torch.Tensor, ...]:
    return (
        tensor(device, (m, k), torch.int8),
        tensor(device, (n, k), torch.int8).t(),
        tensor(device, (n,), torch.float32) * 1e-4,
    )


def small_tile(choice) -> float:
    """Cost by which the smallest tile wins: the interpreter computes whole tiles."""
    fields = dict(item.split("=") for item in choice.description.split(", "))
    return float(int(fields["BLOCK_M"]) * int(fields["BLOCK_N"]))


def dynamic_quant_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    quantized = torch.clamp(torch.round(x.float() / scale), -128, 127).to(torch.int8)
    return (torch._int_mm(quantized, weight).float() * scale * weight_scale).to(torch.bfloat16)


def dynamic_inputs(m: int, device: str) -> tuple[torch.Tensor, ...]:
    x = tensor(device, (m, 64), torch.bfloat16)
    if device != "cpu":
        torch._dynamo.mark_dynamic(x, 0)
    return (
        x,
        tensor(device, (32, 64), torch.int8).t(),
        tensor(device, (32,), torch.float32),
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", simulate.GPUS)
def test_int_mm_with_its_epilogue_is_one_kernel(arch):
    generated = simulate.generate(int8_linear, int8_inputs, arch=arch, config=ONLY_TRITON)
    [(name, source)] = generated.kernels.items()
    assert name.startswith("triton_tem_fused")
    assert f"cc={arch}" in source
    assert "extern_kernels.int_mm" not in generated.wrapper
    assert generated.arch == arch
    assert (generated.output.shape, generated.output.dtype) == ((40, 72), torch.bfloat16)
    assert generated.output.device.type == "cuda"
    assert len(generated.choices) == 1


def test_extern_kernel_is_called_without_autotuning():
    generated = simulate.generate(int8_linear, int8_inputs)
    assert "extern_kernels._int_mm" in generated.wrapper.replace("torch.ops.aten.", "")


def test_module_in_place_of_a_function_is_refused():
    with pytest.raises(TypeError, match="make the module an input"):
        simulate.generate(torch.nn.Linear(4, 4), lambda device: (torch.empty(4, device=device),))


def test_backend_function_gets_options_as_from_torch_compile():
    seen = {}

    def backend(gm, example_inputs, *, options):
        seen.update(options)
        return torch._inductor.compile(gm, example_inputs)

    generated = simulate.generate(
        torch.relu,
        lambda device: (torch.empty(16, device=device),),
        backend=backend,
        options={"answer": 42},
    )
    assert seen == {"answer": 42}
    assert len(generated.kernels) == 1


def test_options_of_inductor_are_its_config():
    generated = simulate.generate(int8_linear, int8_inputs, options=ONLY_TRITON)
    assert "extern_kernels.int_mm" not in generated.wrapper
    assert len(generated.kernels) == 1


def test_registered_backend_is_found_by_name():
    generated = simulate.generate(
        torch.relu, lambda device: (torch.empty(16, device=device),), backend="eager"
    )
    assert (generated.wrapper, generated.kernels) == ("", {})
    assert generated.output.shape == (16,)


def test_output_in_a_reused_buffer_is_a_fake_tensor():
    def row_sums(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True) + 1

    generated = simulate.generate(row_sums, lambda device: (torch.empty(64, 48, device=device),))
    assert "reinterpret_tensor(buf" in generated.wrapper
    assert isinstance(generated.output, FakeTensor)
    assert generated.output.shape == (64, 1)


def softmax_of_slice(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x[:, 3:40].float(), -1).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (weight.numel(),), weight)


def several_outputs(x: torch.Tensor, bias: torch.Tensor | None) -> dict[str, object]:
    assert bias is None
    return {"twice": x * 2, "itself": x, "pair": [x.sum(-1), 3]}


def mixed_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y + y.t()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 32)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.linear(x)))


def block_inputs(device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    with torch.device(device):
        return Block(), tensor(device, (24, 64), torch.float32)


def apply(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def aliased_inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = tensor(device, (24, 24), torch.float32)
    return x, x


CASES = {
    "int8 linear": (int8_linear, int8_inputs),
    "dynamic quantization": (
        dynamic_quant_linear,
        lambda device: (
            tensor(device, (24, 64), torch.bfloat16),
            tensor(device, (32, 64), torch.int8).t(),
            tensor(device, (32,), torch.float32),
        ),
    ),
    "softmax of a slice": (
        softmax_of_slice,
        lambda device: (tensor(device, (16, 50), torch.bfloat16),),
    ),
    "layer norm": (
        layer_norm,
        lambda device: (
            tensor(device, (16, 96), torch.bfloat16),
            tensor(device, (96,), torch.bfloat16),
        ),
    ),
    "bf16 matmul": (
        torch.mm,
        lambda device: (
            tensor(device, (40, 48), torch.bfloat16),
            tensor(device, (48, 24), torch.bfloat16),
        ),
    ),
    "several outputs and None": (
        several_outputs,
        lambda device: (tensor(device, (16, 8), torch.float32), None),
    ),
    "one tensor twice": (mixed_sum, aliased_inputs),
    "module as input": (apply, block_inputs),
}


@pytest.mark.interp
@pytest.mark.parametrize("case", CASES)
def test_interpreted_code_agrees_with_eager(case):
    fn, make_inputs = CASES[case]
    generated = simulate.generate(fn, make_inputs, config=ONLY_TRITON, pick=small_tile)
    assert generated.kernels
    args = make_inputs("cpu")
    with torch.no_grad():
        expected = fn(*args)
    torch.testing.assert_close(simulate.interpret(generated, args), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.interp
@pytest.mark.parametrize("m", [7, 33])
def test_dynamic_size_may_differ_from_the_one_compiled(m):
    generated = simulate.generate(
        dynamic_quant_linear,
        functools.partial(dynamic_inputs, 16),
        config=ONLY_TRITON,
        pick=small_tile,
    )
    args = dynamic_inputs(m, "cpu")
    torch.testing.assert_close(
        simulate.interpret(generated, args), dynamic_quant_linear(*args), rtol=1e-2, atol=1e-3
    )


@pytest.mark.interp
def test_static_size_must_be_the_one_compiled():
    generated = simulate.generate(int8_linear, int8_inputs, config=ONLY_TRITON, pick=small_tile)
    with pytest.raises(AssertionError, match="expected size"):
        simulate.interpret(generated, int8_inputs("cpu", m=41))


@pytest.mark.interp
def test_argument_on_another_device_is_reported():
    generated = simulate.generate(torch.relu, lambda device: (torch.empty(4, device=device),))
    with pytest.raises(ValueError, match="is on meta, need a CPU tensor"):
        simulate.interpret(generated, (torch.empty(4, device="meta"),))


@pytest.mark.interp
def test_mutation_of_an_argument_reaches_the_argument():
    def add_one(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x, x * 2

    generated = simulate.generate(add_one, lambda device: (torch.empty(4, 4, device=device),))
    x = torch.zeros(4, 4)
    mutated, doubled = simulate.interpret(generated, (x,))
    assert mutated is x
    assert torch.equal(x, torch.ones(4, 4))
    assert torch.equal(doubled, torch.full((4, 4), 2.0))


@torch.library.custom_op("inductor_quant_tests::widened", mutates_args=())
def widened(exponents: torch.Tensor) -> torch.Tensor:
    return exponents.to(torch.float32, copy=True)


widened.register_fake(lambda exponents: torch.empty_like(exponents, dtype=torch.float32))


@pytest.mark.interp
def test_a_call_of_the_wrapper_gets_e8m0_and_kernels_bytes():
    """An argument, which is returned too, and what a kernel makes of it."""

    def fn(scale: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = (scale.view(torch.uint8) - 1).view(torch.float8_e8m0fnu)
        return scale, widened(scale) + widened(halves), scale.float() * x

    def make_inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.arange(100, 132, device=device).to(torch.uint8)
        return codes.view(torch.float8_e8m0fnu), tensor(device, (32,), torch.float32)

    generated = simulate.generate(fn, make_inputs)
    assert generated.kernels
    args = make_inputs("cpu")
    found = simulate.interpret(generated, args)
    assert found[0] is args[0]
    for each, expected in zip(found, fn(*args), strict=True):
        assert each.dtype == expected.dtype
        assert torch.equal(each.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.interp
def test_wrong_kernel_gives_wrong_numbers(monkeypatch):
    """The comparison with eager can fail: interpreted is what was generated, not the function."""
    load_autotuner = capture.load_autotuner

    def load_wrong(name: str, source: str) -> object:
        return load_autotuner(name, source.replace("maximum(", "minimum("))

    monkeypatch.setattr(capture, "load_autotuner", load_wrong)
    generated = simulate.generate(torch.relu, lambda device: (torch.empty(64, device=device),))
    x = tensor("cpu", (64,), torch.float32)
    assert torch.equal(simulate.interpret(generated, (x,)), x.clamp(max=0))


@pytest.mark.interp
def test_graph_break_is_reported():
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    generated = simulate.generate(broken, lambda device: (torch.empty(4, device=device),))
    with pytest.raises(ValueError, match="exactly one graph to interpret, got 2"):
        simulate.interpret(generated, (torch.zeros(4),))


@pytest.mark.interp
def test_tensor_that_is_no_argument_is_reported():
    hidden = []

    def uses_hidden(x: torch.Tensor) -> torch.Tensor:
        return x + hidden[0]

    def make_inputs(device: str) -> tuple[torch.Tensor]:
        hidden[:] = [torch.empty(4, device=device)]
        return (torch.empty(4, device=device),)

    generated = simulate.generate(uses_hidden, make_inputs)
    with pytest.raises(ValueError, match=r"graph input .*hidden"):
        simulate.interpret(generated, (torch.zeros(4),))


@pytest.mark.compiles
def test_interpreting_without_the_interpreter_says_what_to_set():
    generated = simulate.generate(torch.relu, lambda device: (torch.empty(4, device=device),))
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
        simulate.interpret(generated, (torch.zeros(4),))
