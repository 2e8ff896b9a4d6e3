"""A CUDA card that exists only for the compiler.

``virtual_gpu`` makes torch.compile take Inductor's CUDA path on a machine without one, with
FakeTensors for inputs. What Inductor asks about the card is answered from a ``GPU`` record; what it
would launch or time is replaced by a stand-in. ``Trace`` holds what it generated.

The patches themselves are in ``_cuda`` (torch and Triton), and ``_selection`` (autotuning).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch._inductor.compile_fx  # noqa: F401  Import all of it while no GPU is to be seen.
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering

from . import _cuda, _selection

# Padding is decided by timing real matrices, uniform constants are folded by making real ones.
_INDUCTOR_CONFIG = {
    "compile_threads": 1,
    "shape_padding": False,
    "joint_graph_constant_folding": False,
}

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class GPU:
    """What the compiler may know of a card. Sizes are in bytes."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_memory_per_block_optin: int
    total_memory: int
    l2_cache: int
    threads_per_sm: int = 2048
    registers_per_sm: int = 65536
    warp_size: int = 32

    @property
    def arch(self) -> int:
        """The capability as one number: 90 for (9, 0)."""
        major, minor = self.capability
        return major * 10 + minor


GPUS: dict[int, GPU] = {
    80: GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * KIB, 80 * GIB, 40 * MIB),
    89: GPU("NVIDIA L40S", (8, 9), 142, 99 * KIB, 48 * GIB, 96 * MIB, threads_per_sm=1536),
    90: GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * KIB, 80 * GIB, 50 * MIB),
    100: GPU("NVIDIA B200", (10, 0), 148, 227 * KIB, 180 * GIB, 126 * MIB),
}
NUM_DEVICES = 2


class RecordedKernel:
    """Takes the place of a compiled kernel: notes its launches and runs nothing."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.launches.append((args, kwargs))


@dataclasses.dataclass
class Trace:
    """What Inductor produced while the virtual GPU was there.

    wrappers  text of each generated module, in order of generation
    kernels   kernel name -> source text, as handed to ``AsyncCompile.triton``
    choices   per kernel selection, the ``ChoiceCaller`` objects that were on offer
    launched  kernel name -> what ``run_kernel`` gave for it
    """

    gpu: GPU
    wrappers: list[str] = dataclasses.field(default_factory=list)
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)
    choices: list[list[Any]] = dataclasses.field(default_factory=list)
    launched: dict[str, Any] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def virtual_gpu(
    arch: int = 90,
    *,
    run_kernel: Callable[[str, str], Any] | None = None,
    pick: Callable[[Any], float] | None = None,
) -> Iterator[Trace]:
    """Let Inductor believe in ``NUM_DEVICES`` cards of compute capability ``arch``.

    Make the inputs with ``device="cuda"`` under a ``FakeTensorMode``. Everything is restored on
    exit, and functools caches that remember a card are emptied on the way in and out.

    Args:
        arch: a key of ``GPUS``.
        run_kernel: ``run_kernel(name, source)`` returns the object whose ``run(*args, stream=...)``
            the generated wrapper calls. Default: ``RecordedKernel``.
        pick: cost of an autotuning choice; the cheapest is taken. Default: the first on the list.
    """
    if arch not in GPUS:
        raise ValueError(f"no virtual GPU for arch {arch}; known: {sorted(GPUS)}")
    gpu = GPUS[arch]
    trace = Trace(gpu)
    make_kernel = run_kernel or RecordedKernel

    def load_kernel(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        trace.kernels[kernel_name] = source_code
        kernel = make_kernel(kernel_name, source_code)
        trace.launched[kernel_name] = kernel
        return kernel

    with contextlib.ExitStack() as stack:
        # Cleared after everything else is restored, so that no answer of the virtual card survives.
        stack.callback(_cuda.clear_device_caches)
        _cuda.install(stack, gpu, NUM_DEVICES)
        _selection.install(stack, trace.choices, pick)
        stack.enter_context(config.patch(_INDUCTOR_CONFIG))
        stack.enter_context(mock.patch.object(AsyncCompile, "triton", load_kernel))
        save_wrapper = staticmethod(trace.wrappers.append)
        stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", save_wrapper))
        _cuda.clear_device_caches()
        yield trace
