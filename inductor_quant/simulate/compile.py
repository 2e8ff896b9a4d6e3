"""Compile Triton kernels to machine code without a driver.

Registers and spills are those that the ptxas bundled with Triton reports; a real machine's driver
may assemble the PTX again. Not with TRITON_INTERPRET: there is nothing to compile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from .interpreter import is_interpreting

_module_number = itertools.count()
_MATRIX_INSTRUCTION = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one kernel, for one configuration. Sizes are in bytes."""

    name: str
    arch: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    ptx: str = dataclasses.field(repr=False)
    # ptxas makes each wgmma wait for the previous one, because it lacks registers (C7510, C7512).
    is_serialized: bool = False

    def matrix_instructions(self) -> dict[str, int]:
        """Matrix multiply opcodes (mma.sync, wgmma, tcgen05) in the PTX, with their counts."""
        return dict(Counter(_MATRIX_INSTRUCTION.findall(self.ptx)))


def compile_kernel(name: str, source: str) -> CompiledKernel:
    """Compile a kernel that Inductor generated, as Inductor would.

    The target is the one named in the source (``DeviceProperties(cc=...)``). Of a kernel with
    several configurations (pointwise, reductions) the first is compiled.

    Args:
        name: the kernel's name, a key of ``Trace.kernels``.
        source: its text.
    """
    _refuse_interpreter()
    autotuner = load_autotuner(name, source)
    autotuner.configs = autotuner.configs[:1]
    binaries: list[Any] = []
    compile_in_triton = triton.compile

    def compile_and_keep(*args: Any, **kwargs: Any) -> Any:
        binaries.append(compile_in_triton(*args, **kwargs))
        return binaries[-1]

    # The autotuner may wrap the binary in a static launcher, so take it before.
    patched = mock.patch.object(triton, "compile", compile_and_keep)
    with without_driver(), patched, _ptxas_log() as log:
        autotuner.precompile(warm_cache_only=True)
    [binary] = binaries
    return _describe(name, binary, autotuner.device_props.cc, log.getvalue())


def compile_jit(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    arch: int,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible_by_16: Collection[str] = (),
) -> CompiledKernel:
    """Compile a plain ``@triton.jit`` function.

    Args:
        fn: the function.
        signature: type of each argument that is not a constexpr, such as ``{"x": "*bf16"}``.
        constexprs: value of each constexpr argument.
        arch: compute capability, 90 for (9, 0).
        num_warps, num_stages: as at a launch.
        divisible_by_16: arguments whose value is a multiple of 16, which Triton finds out at a
            launch; without it loads are not vectorized, and registers differ.
    """
    _refuse_interpreter()
    missing = set(fn.arg_names) - set(signature) - set(constexprs)
    if missing:
        raise ValueError(f"no type and no value for arguments {sorted(missing)} of {fn.__name__}")
    types = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    attributes = {
        (fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16
    }
    kernel = ASTSource(fn=fn, signature=types, constexprs=dict(constexprs), attrs=attributes)
    with _ptxas_log() as log:
        binary = triton.compile(
            kernel,
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
    return _describe(fn.__name__, binary, arch, log.getvalue())


def without_driver() -> Any:
    """Context in which generated code may ask for the GPU driver and gets none."""
    return mock.patch.object(triton_helpers, "set_driver_to_gpu", return_value=None)


def load_autotuner(name: str, source: str) -> Any:
    """Execute ``source`` and return the ``CachingAutotuner`` ``name`` that it defines, a new one at
    each call: precompiling changes it."""
    with without_driver():
        module = PyCodeCache.load(f"# load {next(_module_number)}\n{source}")
    return getattr(module, name)


def _refuse_interpreter() -> None:
    if is_interpreting():
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, not compiled")


@contextlib.contextmanager
def _ptxas_log() -> Iterator[io.StringIO]:
    """The output of ptxas while Triton runs it; empty if the kernel is in Triton's cache."""
    log = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        yield log


def _describe(name: str, binary: Any, arch: int, log: str) -> CompiledKernel:
    ptx = binary.asm["ptx"]
    report = log or _ptxas_report(ptx, arch)
    return CompiledKernel(
        name=name,
        arch=arch,
        registers=_number(r"Used (\d+) registers", report),
        spill_stores=_number(r"(\d+) bytes spill stores", report),
        spill_loads=_number(r"(\d+) bytes spill loads", report),
        shared_bytes=binary.metadata.shared,
        ptx=ptx,
        is_serialized="wgmma.mma_async instructions are serialized" in report,
    )


def _number(pattern: str, report: str) -> int:
    match = re.search(pattern, report)
    if match is None:
        raise ValueError(f"ptxas report does not say {pattern!r}:\n{report}")
    return int(match[1])


# Triton's own, which registers and spills depend on.
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
PTXAS_OPTIONS = ("--regAllocOptLevel=2",) if _VERSION >= (3, 7) else ()


def _ptxas_report(ptx: str, arch: int) -> str:
    """The output of ``ptxas --verbose`` for ``ptx``, which Triton has assembled before."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        # Triton's own name of the architecture: sm_90a, without which wgmma does not assemble.
        target = nvidia.sm_arch_from_capability(arch)
        done = subprocess.run(
            [
                nvidia.get_ptxas(arch).path,
                "--verbose",
                *PTXAS_OPTIONS,
                f"--gpu-name={target}",
                str(source),
                "--output-file",
                str(Path(folder, "kernel.cubin")),
            ],
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(f"ptxas failed for {target}:\n{done.stderr}")
    return done.stderr
