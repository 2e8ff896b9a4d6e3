"""Tests without a GPU: generate, compile and interpret code for a virtual card.

Three layers. Each works on a machine without a GPU, with a CPU build of torch.

``generate``   torch.compile on fake CUDA inputs, with ``virtual_gpu`` answering for the card. Gives
               the generated wrapper and kernels, per compute capability.
               Sees: fusion, template and configuration, guards and strides in the wrapper,
               configurations that are not legal on a card.
               Does not see: the choice of real autotuning, backward graphs, CUDA graphs,
               user-defined ``@triton.jit`` kernels under the interpreter, constants that ``fn``
               itself creates on the card from Python data.

``compile_kernel``, ``compile_jit``
               Triton and ptxas, without a driver. Gives PTX, registers, spills, shared memory.
               Sees: matrix instructions, TMA, spills, blocks too large for shared memory. Counts
               differ between versions of Triton; test bounds.
               Does not see: occupancy, speed, what a machine's driver makes of the PTX.

``interpret``, ``interpreted_cpu``
               The generated code on CPU tensors, kernels in Triton's interpreter (corrected by
               ``install``). Needs TRITON_INTERPRET=1 before triton is imported. Nothing can be
               compiled then, so this takes a process of its own. ``interpret`` runs the result of
               ``generate``; ``interpreted_cpu`` is a torch.compile of real CPU tensors.
               Sees: values, masks, strides, the arithmetic of every index.
               Does not see: races and missing barriers; false claims of divisibility; limits of
               shared memory and registers; num_warps and num_stages; the order of sums in float32;
               tf32; imprecise accumulation of 8-bit floats; anything that needs two CTAs at a time,
               since they run one after the other (waiting for a later one hangs). A read out of
               bounds is a real one: put test tensors into a larger buffer of NaN. Block pointers
               (gone in Triton 3.9), bfloat16 atomics and those of a broadcast value do not work.

The rest of inductor_quant does not import this package, except that ``_compat.gluon`` takes the
names of an interpreted Gluon kernel from it. Importing it imports neither Triton nor Inductor; the
first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capture import Generated as Generated
    from .capture import generate as generate
    from .capture import interpret as interpret
    from .cards import GPU as GPU
    from .cards import GPUS as GPUS
    from .compile import CompiledKernel as CompiledKernel
    from .compile import compile_jit as compile_jit
    from .compile import compile_kernel as compile_kernel
    from .cpu_backend import interpreted_cpu as interpreted_cpu
    from .gpu import Trace as Trace
    from .gpu import virtual_gpu as virtual_gpu
    from .interpreter import install as install
    from .interpreter import is_interpreting as is_interpreting
    from .interpreter import register_asm_emulation as register_asm_emulation

_NAMES_OF = {
    "capture": ("Generated", "generate", "interpret"),
    "cards": ("GPU", "GPUS"),
    "compile": ("CompiledKernel", "compile_jit", "compile_kernel"),
    "cpu_backend": ("interpreted_cpu",),
    "gpu": ("Trace", "virtual_gpu"),
    "interpreter": ("install", "is_interpreting", "register_asm_emulation"),
}
__all__ = [name for names in _NAMES_OF.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_OF.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
