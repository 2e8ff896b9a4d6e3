"""Make Inductor's ``CachingAutotuner`` of a generated kernel's text."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers

_module_number = itertools.count()


def without_driver() -> Any:
    """Context in which generated code may ask for the GPU driver and gets none."""
    return mock.patch.object(triton_helpers, "set_driver_to_gpu", return_value=None)


def load_autotuner(name: str, source: str) -> Any:
    """Execute ``source`` and return the ``CachingAutotuner`` ``name`` that it defines, a new one at
    each call: precompiling changes it."""
    with without_driver():
        module = PyCodeCache.load(f"# load {next(_module_number)}\n{source}")
    return getattr(module, name)
