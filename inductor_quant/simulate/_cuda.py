"""Patches of torch and Triton that answer for a virtual card.

One function each: ``torch.cuda``, Dynamo's device interface, the C entry points that generated code
imports, c10's device guard, Triton's driver. Tested with torch 2.13 (CPU) and 2.15 (CUDA).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch._dynamo import device_interface
from torch._inductor.codecache import CacheBase
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget

from .cards import GPU

# c10::DeviceType, values that serialized tensors rely on
_CUDA_DEVICE_TYPE = 1
_META_DEVICE_TYPE = 14

# Modules with functools caches of answers about the card.
_CACHING_MODULES = ("torch.utils._triton", "torch._inductor.utils")


class CurrentDevice:
    """The CUDA runtime's notion of the current device, for ``count`` devices."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.index = 0

    def resolve(self, device: Any = None) -> int:
        """Index that the ``device`` argument of a ``torch.cuda`` function means."""
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            device = device.index
        index = self.index if device is None else int(device)
        if not 0 <= index < self.count:
            raise AssertionError(f"Invalid device id {index}; the virtual GPU has {self.count}")
        return index

    def get(self) -> int:
        return self.index

    def set(self, device: Any) -> None:
        self.index = self.resolve(device)

    def exchange(self, device: int) -> int:
        """Make ``device`` current and return the previous one; a negative one changes nothing."""
        previous = self.index
        if device >= 0:
            self.set(device)
        return previous


class VirtualDriver:
    """The part of ``triton.runtime.driver.active`` that Inductor and ``triton.compile`` use."""

    def __init__(self, gpu: GPU, current: CurrentDevice) -> None:
        self._target = GPUTarget("cuda", gpu.arch, gpu.warp_size)
        self._current = current
        device_properties = {
            "max_shared_mem": gpu.shared_memory_per_block_optin,
            "max_num_regs": gpu.registers_per_sm,
            "multiprocessor_count": gpu.num_sms,
            "warpSize": gpu.warp_size,
        }
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: dict(device_properties)
        )

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._current.get()

    def set_current_device(self, device: int) -> None:
        self._current.set(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self._current.get())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        raise RuntimeError("a virtual GPU cannot time a kernel")


def device_properties(gpu: GPU) -> types.SimpleNamespace:
    """For ``torch.cuda.get_device_properties``: every field that Inductor reads."""
    major, minor = gpu.capability
    return types.SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.num_sms,
        total_memory=gpu.total_memory,
        warp_size=gpu.warp_size,
        regs_per_multiprocessor=gpu.registers_per_sm,
        max_threads_per_multi_processor=gpu.threads_per_sm,
        max_threads_per_block=1024,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=gpu.shared_memory_per_block_optin,
        shared_memory_per_multiprocessor=gpu.shared_memory_per_block_optin + 1024,
        L2_cache_size=gpu.l2_cache,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )


def clear_device_caches() -> None:
    """Empty the functools caches of answers about the card."""
    for name in _CACHING_MODULES:
        for member in vars(importlib.import_module(name)).values():
            clear = getattr(member, "cache_clear", None)
            if callable(clear):
                clear()
    # The cache of a classmethod is on its function.
    getattr(DeviceProperties.create, "__func__", DeviceProperties.create).cache_clear()
    CacheBase.get_system.cache_clear()
    CacheBase.get_local_cache_path.cache_clear()


def install(stack: contextlib.ExitStack, gpu: GPU, num_devices: int) -> None:
    """Answer as ``gpu`` everywhere until ``stack`` unwinds."""
    current = CurrentDevice(num_devices)
    _freeze_pattern_tables(stack)
    _patch_torch_cuda(stack, gpu, current)
    _patch_device_interface(stack, current)
    _patch_c_entry_points(stack, current)
    stack.enter_context(cuda_device_guard())
    stack.enter_context(triton_driver(VirtualDriver(gpu, current)))


def _replace(stack: contextlib.ExitStack, owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        stack.enter_context(mock.patch.object(owner, name, value))


def _freeze_pattern_tables(stack: contextlib.ExitStack) -> None:
    """Trace Inductor's pattern tables for the CPU now, and never again: they are traced once a
    device, by running code on real tensors there."""
    lazy_init = joint_graph.lazy_init
    lazy_init(None)

    def lazy_init_for_cpu(input_device: torch.device | None = None) -> None:
        lazy_init(None)

    _replace(stack, joint_graph, lazy_init=lazy_init_for_cpu)


def _patch_torch_cuda(stack: contextlib.ExitStack, gpu: GPU, current: CurrentDevice) -> None:
    properties = device_properties(gpu)

    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        current.resolve(device)
        return properties

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        current.resolve(device)
        return gpu.capability

    _replace(
        stack,
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: current.count,
        current_device=current.get,
        set_device=current.set,
        get_device_properties=get_device_properties,
        get_device_capability=get_device_capability,
        # Two objects: Dynamo keys a table of handlers by them.
        _exchange_device=lambda device: current.exchange(device),
        _maybe_exchange_device=lambda device: current.exchange(device),
        get_rng_state=lambda device="cuda": torch.get_rng_state(),
        set_rng_state=lambda state, device="cuda": None,
        # CUDA wheels look for a driver here.
        _lazy_init=lambda: None,
        is_current_stream_capturing=lambda: False,
    )
    _replace(stack, torch.version, cuda="12.8")
    # 2.11 allocates a real CUDA tensor if is_available() says yes; later versions do not.
    _replace(stack, fake_tensor, init_gpu_context=lambda device: None)


def _patch_device_interface(stack: contextlib.ExitStack, current: CurrentDevice) -> None:
    """The interface bound functions of ``torch.cuda`` at import; bind the replacements."""
    _replace(
        stack,
        device_interface.CudaInterface,
        current_device=staticmethod(torch.cuda.current_device),
        set_device=staticmethod(torch.cuda.set_device),
        device_count=staticmethod(torch.cuda.device_count),
        get_device_properties=staticmethod(torch.cuda.get_device_properties),
        exchange_device=staticmethod(torch.cuda._exchange_device),
        maybe_exchange_device=staticmethod(torch.cuda._maybe_exchange_device),
    )
    _replace(stack, device_interface, caching_worker_device_properties={})


def _patch_c_entry_points(stack: contextlib.ExitStack, current: CurrentDevice) -> None:
    """Functions of ``torch._C`` that generated code imports; a CPU build lacks some of them."""

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        # Fake buffers are on the virtual card, real ones on the CPU.
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        device = torch.device("cuda", current.get()) if fake else torch.device("cpu")
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    guards: Any = torch._C._dynamo.guards
    reinterpret_real_tensor = guards._reinterpret_tensor
    copy_real_tensor_if_misaligned: Any = getattr(guards, "copy_if_misaligned", None)

    def reinterpret_tensor(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> Any:
        # The C++ function turns a fake tensor into a plain one.
        if isinstance(tensor, fake_tensor.FakeTensor):
            return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
        return reinterpret_real_tensor(tensor, size, stride, offset)

    def copy_if_misaligned(tensor: torch.Tensor) -> Any:
        # A fake tensor has no address.
        if isinstance(tensor, fake_tensor.FakeTensor):
            return tensor
        return copy_real_tensor_if_misaligned(tensor)

    replacements: list[tuple[Any, str, Any]] = [
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (guards, "_empty_strided_cuda", empty_strided),
        (guards, "_reinterpret_tensor", reinterpret_tensor),
    ]
    if hasattr(guards, "copy_if_misaligned"):  # not in every version
        replacements.append((guards, "copy_if_misaligned", copy_if_misaligned))
    for owner, name, function in replacements:
        stack.enter_context(mock.patch.object(owner, name, function, create=True))


@contextlib.contextmanager
def cuda_device_guard() -> Iterator[None]:
    """Let C++ code switch to the virtual device.

    Indexing a fake CUDA tensor goes through a device guard, and a CPU build has none for CUDA
    ("PyTorch is not linked with support for cuda devices"). A CUDA build can install a guard that
    does nothing. In a CPU build, the CUDA slot of c10's registry gets the guard of Meta tensors.
    """
    if torch.cuda._is_compiled():
        ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
        if ensure is not None:
            ensure()
        yield
        return

    [library] = (Path(torch.__file__).parent / "lib").glob("libc10.*")
    registry_type = ctypes.c_void_p * (_META_DEVICE_TYPE + 1)
    registry = registry_type.in_dll(
        ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE"
    )
    torch.empty(1, device="meta")
    before = registry[_CUDA_DEVICE_TYPE]
    if not before:
        if not registry[_META_DEVICE_TYPE]:
            raise RuntimeError("c10 has no device guard for Meta tensors to lend to CUDA")
        registry[_CUDA_DEVICE_TYPE] = registry[_META_DEVICE_TYPE]
    try:
        yield
    finally:
        registry[_CUDA_DEVICE_TYPE] = before


@contextlib.contextmanager
def triton_driver(driver: Any) -> Iterator[None]:
    """Make ``driver`` the active driver of Triton."""
    holder = triton.runtime.driver
    before = dict(vars(holder))
    holder.set_active(driver)
    try:
        yield
    finally:
        vars(holder).clear()
        vars(holder).update(before)
