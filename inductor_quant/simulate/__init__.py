"""Tests without a GPU: generate, compile and interpret the code of a card that is not there.

Three layers, each of which works on a machine with no GPU and a CPU build of torch.

``generate``   torch.compile on fake CUDA inputs, with ``virtual_gpu`` answering for the card. Gives
               the generated wrapper and kernels, per compute capability.
               Sees: what was fused, which template and configuration, guards and strides in the
               wrapper, configurations that are not legal on a card.
               Does not see: what real autotuning would choose, backward graphs, CUDA graphs, user
               defined ``@triton.jit`` kernels under the interpreter, and constants that ``fn``
               itself creates on the card from Python data.

``compile_kernel``, ``compile_jit``
               Triton and ptxas, without a driver. Gives PTX, registers, spills, shared memory.
               Sees: which matrix instructions are used, whether TMA is, spills, and blocks too
               large for shared memory. Numbers differ between versions of Triton; test bounds.
               Does not see: occupancy, speed, what the driver of a machine makes of the PTX.

``interpret``, ``interpreted_cpu``
               The generated code on CPU tensors, kernels in Triton's interpreter (corrected by
               ``install``). Needs TRITON_INTERPRET=1 before triton is imported; then nothing can be
               compiled, so this takes a process of its own. ``interpret`` runs what ``generate``
               gave; ``interpreted_cpu`` is a torch.compile of real CPU tensors.
               Sees: numbers, masks, strides, the arithmetic of every index.
               Does not see: races and missing barriers; false claims of divisibility; limits of
               shared memory and registers; num_warps and num_stages; the order of sums in float32;
               tf32; imprecise accumulation of 8-bit floats; whatever needs two programs at a time,
               since they run one after the other (waiting for a later one hangs). A read out of
               bounds is a real one: put test tensors into a larger buffer of NaN. Block pointers
               (gone in Triton 3.9) and bfloat16 atomics do not work.

Nothing else in inductor_quant imports this package. Importing it imports neither Triton nor
Inductor; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capture import Generated, generate, interpret
    from .compile import CompiledKernel, compile_jit, compile_kernel
    from .cpu_backend import interpreted_cpu
    from .gpu import GPU, GPUS, Trace, virtual_gpu
    from .interpreter import install, is_interpreting, register_asm_emulation

__all__ = [
    "GPU",
    "GPUS",
    "CompiledKernel",
    "Generated",
    "Trace",
    "compile_jit",
    "compile_kernel",
    "generate",
    "install",
    "interpret",
    "interpreted_cpu",
    "is_interpreting",
    "register_asm_emulation",
    "virtual_gpu",
]

_MODULE_OF = {
    "GPU": "gpu",
    "GPUS": "gpu",
    "Trace": "gpu",
    "virtual_gpu": "gpu",
    "Generated": "capture",
    "generate": "capture",
    "interpret": "capture",
    "CompiledKernel": "compile",
    "compile_jit": "compile",
    "compile_kernel": "compile",
    "interpreted_cpu": "cpu_backend",
    "install": "interpreter",
    "is_interpreting": "interpreter",
    "register_asm_emulation": "interpreter",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
