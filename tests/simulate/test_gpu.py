"""The virtual GPU: what Inductor is told, what is recorded, and that nothing of it stays."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import get_code, get_max_num_sms
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import has_triton

from inductor_quant import simulate

ONLY_TRITON = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "TRITON",
    "force_disable_caches": True,
}


def double_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def compile_on(device: str, arch: int = 90, cached: bool = False, **kwargs) -> simulate.Trace:
    torch._dynamo.reset()
    with (
        simulate.virtual_gpu(arch, **kwargs) as trace,
        FakeTensorMode(),
        inductor_config.patch(force_disable_caches=not cached),
        torch.no_grad(),
    ):
        torch.compile(double_relu)(torch.empty(64, 64, device=device))
    return trace


@pytest.mark.parametrize("arch", simulate.GPUS)
def test_torch_and_triton_see_the_card_of_the_table(arch):
    gpu = simulate.GPUS[arch]
    with simulate.virtual_gpu(arch) as trace:
        assert trace.gpu is gpu
        assert gpu.arch == arch
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == gpu.capability
        properties = torch.cuda.get_device_properties("cuda:0")
        assert properties.shared_memory_per_block_optin == gpu.shared_memory_per_block_optin
        assert DeviceProperties.create(torch.device("cuda", 0)).cc == arch
        assert CudaInterface.Worker.get_device_properties(0).name == gpu.name
        assert CudaInterface.is_bf16_supported()
        assert torch.version.cuda is not None
        assert get_max_num_sms() == gpu.num_sms
        assert triton.runtime.driver.active.get_current_target().arch == arch
        assert has_triton()


def test_unknown_arch_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no virtual GPU for arch 75"), simulate.virtual_gpu(75):
        pass


def test_there_are_two_devices_and_one_is_current():
    with simulate.virtual_gpu():
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_properties(1).name == torch.cuda.get_device_properties(0).name
        with pytest.raises(AssertionError, match="Invalid device id 2"):
            torch.cuda.get_device_properties(2)
        with torch.cuda._DeviceGuard(1):
            assert torch.cuda.current_device() == CudaInterface.current_device() == 1
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("index", [0, 1])
def test_code_is_generated_for_either_device(index):
    trace = compile_on(f"cuda:{index}")
    [wrapper] = trace.wrappers
    [source] = trace.kernels.values()
    assert f"torch.cuda._DeviceGuard({index})" in wrapper
    assert f"DeviceProperties(type='cuda', index={index}," in source


def test_kernels_are_recorded_and_launched_but_not_run():
    trace = compile_on("cuda")
    [(name, source)] = trace.kernels.items()
    assert f"def {name}" in source
    assert source in trace.wrappers[0]
    [(args, kwargs)] = trace.launched[name].launches
    assert [arg.device.type for arg in args if isinstance(arg, torch.Tensor)] == ["cuda"] * 2
    assert kwargs == {"stream": 0}


@pytest.mark.parametrize("cached", [False, True], ids=["generated again", "from Inductor's cache"])
def test_same_code_is_recorded_each_time(cached):
    first, second = compile_on("cuda", cached=cached), compile_on("cuda", cached=cached)
    assert first.kernels == second.kernels != {}


def test_run_kernel_takes_the_place_of_each_kernel():
    class Kernel:
        def __init__(self, name: str, source: str) -> None:
            self.name = name
            self.runs = 0

        def run(self, *args, **kwargs) -> None:
            self.runs += 1

    trace = compile_on("cuda", run_kernel=Kernel)
    [kernel] = trace.launched.values()
    assert isinstance(kernel, Kernel)
    assert (kernel.name, kernel.runs) == (next(iter(trace.kernels)), 1)


def test_pick_decides_among_the_choices_on_offer():
    def largest_tile(choice) -> float:
        fields = dict(item.split("=") for item in choice.description.split(", "))
        return -float(int(fields["BLOCK_M"]) * int(fields["BLOCK_N"]))

    traces = {}
    for pick in (None, largest_tile):
        torch._dynamo.reset()
        with (
            simulate.virtual_gpu(90, pick=pick) as trace,
            FakeTensorMode(),
            inductor_config.patch(ONLY_TRITON),
            torch.no_grad(),
        ):
            a = torch.empty(256, 256, dtype=torch.bfloat16, device="cuda")
            torch.compile(torch.mm)(a, a)
        traces[pick] = trace

    for pick, trace in traces.items():
        [offered] = trace.choices
        assert len(offered) > 5
        expected = offered[0] if pick is None else min(offered, key=pick)
        block_m = next(
            item for item in expected.description.split(", ") if item.startswith("BLOCK_M=")
        )
        [source] = trace.kernels.values()
        assert block_m.replace("=", " : tl.constexpr = ") in source
    assert traces[None].kernels != traces[largest_tile].kernels


def test_fake_cuda_tensors_can_be_indexed():
    with simulate.virtual_gpu(), FakeTensorMode():
        x = torch.empty(8, 16, device="cuda:1")
        assert x[2:, ..., 3:5].shape == (6, 2)
        assert x[0].device == torch.device("cuda", 1)


def state_that_is_patched() -> list[object]:
    return [
        *(getattr(torch.cuda, name) for name in ("is_available", "set_device", "_lazy_init")),
        torch.cuda.is_available(),
        torch.version.cuda,
        CudaInterface.get_device_properties,
        torch._C._dynamo.guards._empty_strided_cuda
        if hasattr(torch._C._dynamo.guards, "_empty_strided_cuda")
        else None,
        torch._C._dynamo.guards._reinterpret_tensor,
        hasattr(torch._C, "_cuda_getCurrentRawStream"),
        torch._inductor.async_compile.AsyncCompile.triton,
        torch._inductor.select_algorithm.AlgorithmSelectorCache.benchmark,
        torch._inductor.fx_passes.joint_graph.lazy_init,
        dict(vars(triton.runtime.driver)),
        has_triton(),
        inductor_config.save_config_portable(),
    ]


def test_everything_is_restored_even_after_an_error():
    before = state_that_is_patched()
    compile_on("cuda", arch=80)
    assert state_that_is_patched() == before
    with pytest.raises(ZeroDivisionError), simulate.virtual_gpu():
        raise ZeroDivisionError
    assert state_that_is_patched() == before


@pytest.mark.skipif(torch.cuda._is_compiled(), reason="CUDA builds keep their own device guard")
def test_device_guard_is_handed_back():
    mode = FakeTensorMode()
    with simulate.virtual_gpu(), mode:
        x = torch.empty(4, device="cuda")
    with mode, pytest.raises(RuntimeError, match="not linked with support for cuda"):
        x[1:]


def cpu_code() -> str:
    """C++ for the CPU, without the line that numbers the compile."""
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        return get_code(torch.compile(double_relu), torch.randn(8, 8))[0].split("\n", 1)[1]


def test_cpu_compile_between_two_virtual_gpus_is_ordinary():
    before = cpu_code()
    assert "async_compile.cpp" in before
    assert "cc=80" in next(iter(compile_on("cuda", 80).kernels.values()))
    assert cpu_code() == before
    assert "cc=100" in next(iter(compile_on("cuda", 100).kernels.values()))
    assert cpu_code() == before
