"""torch.compile of real CPU tensors, with every Triton kernel in the interpreter.

Inductor can generate Triton for CPU tensors (``config.cpu_backend = "triton"``) if Triton has a
"cpu" backend. Stock Triton has none. A placeholder is enough, because with TRITON_INTERPRET
Inductor gives kernels to the interpreter and compiles none.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import triton.backends
from torch._inductor import config
from triton.backends.compiler import GPUTarget

from . import _cuda, _selection, interpreter


class InterpretedDriver:
    """The part of Triton's driver that Inductor uses."""

    utils = types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 1 << 20})

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class InterpretedCompiler:
    """The part of Triton's compiler that Inductor uses: options, and a hash for cache keys."""

    def __init__(self, target: Any) -> None:
        self.target = target

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def parse_options(self, options: dict[str, Any]) -> types.SimpleNamespace:
        return types.SimpleNamespace(extern_libs=())

    def hash(self) -> str:
        return "interpreter"


@contextlib.contextmanager
def interpreted_cpu(*, pick: Callable[[Any], float] | None = None) -> Iterator[None]:
    """A context in which ``torch.compile`` on CPU tensors generates Triton and interprets it.

    Needs TRITON_INTERPRET=1. Call the functions compiled within it within it too.

    Args:
        pick: cost of an autotuning choice; the cheapest is taken. Default: the first on the list.
    """
    interpreter.install()
    backend = triton.backends.Backend(compiler=InterpretedCompiler, driver=InterpretedDriver)
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.callback(_cuda.clear_device_caches)
        stack.callback(torch._dynamo.reset)
        stack.enter_context(mock.patch.dict(triton.backends.backends, {"cpu": backend}))
        stack.enter_context(_cuda.triton_driver(InterpretedDriver()))
        stack.enter_context(
            config.patch(cpu_backend="triton", compile_threads=1, force_disable_caches=True)
        )
        _selection.install(stack, [], pick)
        _cuda.clear_device_caches()
        yield
