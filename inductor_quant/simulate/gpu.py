"""A CUDA card that exists only for the compiler.

``virtual_gpu`` makes torch.compile take Inductor's CUDA path on a machine without a GPU, with
FakeTensors as inputs. A ``GPU`` record answers for the card; launches and timings are replaced.
``Trace`` holds the generated code. The patches are in ``_cuda`` (torch and Triton) and
``_selection`` (autotuning).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx  # all of it while no GPU is to be seen
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_quant._compat import inductor as compat

from . import _cuda, _selection
from .cards import GPU, GPUS

# Padding would time real matrices, folding of uniform constants would make real ones.
_INDUCTOR_CONFIG = {
    "compile_threads": 1,
    "shape_padding": False,
    "joint_graph_constant_folding": False,
}

NUM_DEVICES = 2


class RecordedKernel:
    """In place of a compiled kernel: records its launches and runs nothing."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.launches.append((args, kwargs))


@dataclasses.dataclass
class Trace:
    """What Inductor generated for the virtual GPU.

    wrappers  text of each generated module, in order of generation
    kernels   kernel name -> source text, as handed to ``AsyncCompile.triton``
    choices   of each kernel selection, the ``ChoiceCaller`` objects on offer
    launched  kernel name -> the result of ``run_kernel``
    """

    gpu: GPU
    wrappers: list[str] = dataclasses.field(default_factory=list)
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)
    choices: list[list[Any]] = dataclasses.field(default_factory=list)
    launched: dict[str, Any] = dataclasses.field(default_factory=dict)


def _on_virtual_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A constant of the generated wrapper: a fake tensor that remembers its values."""
    with FakeTensorMode():
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    fake.real_values = tensor  # type: ignore[attr-defined]
    return fake


@contextlib.contextmanager
def virtual_gpu(
    arch: int = 90,
    *,
    run_kernel: Callable[[str, str], Any] | None = None,
    pick: Callable[[Any], float] | None = None,
) -> Iterator[Trace]:
    """Let Inductor see ``NUM_DEVICES`` cards of compute capability ``arch``.

    Make the inputs with ``device="cuda"`` under a ``FakeTensorMode``. Everything is restored on
    exit; functools caches of answers about the card are emptied on entry and exit.

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
        # Runs after everything else is restored, so that no answer of the virtual card survives.
        stack.callback(_cuda.clear_device_caches)
        _cuda.install(stack, gpu, NUM_DEVICES)
        _selection.install(stack, trace.choices, pick)
        stack.enter_context(config.patch(_INDUCTOR_CONFIG))
        stack.enter_context(mock.patch.object(AsyncCompile, "triton", load_kernel))
        stack.enter_context(mock.patch.object(compat, "on_device", _on_virtual_device))
        save_wrapper = staticmethod(trace.wrappers.append)
        stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", save_wrapper))
        _cuda.clear_device_caches()
        yield trace
