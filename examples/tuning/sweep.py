"""Times a kernel's template as a plain Triton kernel under many tile configurations.

Inductor compiles a template with the sizes of one problem as constants. Here the same text takes
sizes and strides as arguments, so that one compilation serves all shapes: hundreds of
configurations on dozens of shapes take a minute. Used by ``examples.tuning.fit_table``."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import torch
import triton

import inductor_quant
from inductor_quant.kernels import Kernel
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Problem
from inductor_quant.lowering.select import describe_device
from inductor_quant.ops import fp8, w8a8
from inductor_quant.report.events import KernelChoice
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec

WEIGHT_BYTES = 320 * 2**20  # several times the L2 cache of the largest GPU
MAX_CALLS = 32

Shape = tuple[int, int, int]

# ------------------------------------------------------------------------------------------
# the tuned kernels


F32 = torch.float32


def w8a8_spec() -> QuantGemmSpec:
    return w8a8.make_spec(
        a_scale=ScaleSpec(F32, (1, -1)),
        b_scale=ScaleSpec(F32, (-1, 1)),
        out_dtype=torch.bfloat16,
        bias=False,
    )


def fp8_spec() -> QuantGemmSpec:
    """``_scaled_mm`` as torchao calls it."""
    return fp8.make_spec(
        a_scale=ScaleSpec(F32, (1, -1)),
        b_scale=ScaleSpec(F32, (-1, 1)),
        out_dtype=torch.bfloat16,
        bias=False,
        fast_accum=True,
    )


def fp8_block_spec() -> QuantGemmSpec:
    """DeepSeek-V3's blocks."""
    return fp8.make_spec(
        a_scale=ScaleSpec(F32, (1, 128)),
        b_scale=ScaleSpec(F32, (128, 128)),
        out_dtype=torch.bfloat16,
        bias=False,
    )


def row_inputs(m: int, n: int, k: int, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    device = weight.device
    return {
        "A": random_elements(weight.dtype, m * k, device).view(m, k),
        "B": weight.t(),
        "A_SCALE": torch.rand(m, 1, device=device),
        "B_SCALE": torch.rand(1, n, device=device),
    }


def block_inputs(m: int, n: int, k: int, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Activation scales have strides (1, M), as cuBLASLt takes them."""
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    return row_inputs(m, n, k, weight) | {
        "A_SCALE": torch.rand(k_blocks, m, device=weight.device).t(),
        "B_SCALE": torch.rand(n_blocks, k_blocks, device=weight.device).t(),
    }


def random_elements(dtype: torch.dtype, count: int, device: torch.device | str) -> torch.Tensor:
    """Elements of an operand. The power draw depends on them: floats are normally distributed."""
    if dtype == torch.int8:
        return torch.randint(-128, 128, (count,), dtype=dtype, device=device)
    part = torch.randn(min(count, 2**24), device=device).to(dtype).view(torch.int8)
    return part.repeat(-(-count // part.numel()))[:count].view(dtype)


@dataclasses.dataclass(frozen=True)
class TunedKernel:
    """A kernel to tune: its spec, inputs by their names in the template, options of the op."""

    spec: Callable[[], QuantGemmSpec]
    inputs: Callable[..., dict[str, torch.Tensor]]
    options: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        return self.spec().b.dtype


EVEN = Problem(4096, 4096, 4096, has_aligned_rows=True)  # tiles divide M, N and K
_W8A8 = TunedKernel(w8a8_spec, row_inputs, {})
_FP8 = TunedKernel(fp8_spec, row_inputs, {"fast_accum": True})
_FP8_BLOCK = TunedKernel(fp8_block_spec, block_inputs, {"block_k": 128, "block_n": 128})
TUNED = {
    "w8a8_mm": _W8A8,
    "w8a8_persistent": _W8A8,
    "fp8_mm": _FP8,
    "fp8_persistent": _FP8,
    "fp8_block_mm": _FP8_BLOCK,
    "fp8_block_persistent": _FP8_BLOCK,
}


# ------------------------------------------------------------------------------------------
# measuring


# constants that the lowering of w8a8 adds: no factor and no zero points here
LOWERED = {
    "ALPHA": 1.0,
    "A_ZERO": 0,
    "A_ZERO_PER_TOKEN": False,
    "B_ZERO_PER_CHANNEL": False,
    "EXACT_A_ZERO": False,
    "EXACT_B_ZERO": False,
    "HAS_B_SUM": False,
}


def render(kernel: Kernel, constants: dict[str, Any]) -> tuple[str, list[str], list[str]]:
    """(module text, tensors, sizes and strides): the template as a plain Triton kernel ``kernel``.

    Sizes and strides are its arguments; in Inductor's kernel they are constants.
    """
    tensors: list[str] = []
    sizes: dict[str, None] = {}

    def size_argument(name: str) -> str:
        sizes[name] = None
        return name

    def def_kernel(*names: str) -> str:
        tensors.extend(names)
        return "<head>"

    def store_output(indices: tuple[str, str], value: str, mask: str, **_: Any) -> str:
        # Exactly Inductor's address: row * stride + column takes 27 registers less at 128x128,
        # and so gives another occupancy than the kernels that users run.
        m, n = indices
        return f"tl.store(OUT + ({n} + {size_argument('B_size1')} * {m}), {value}, {mask})"

    body = jinja2.Template(kernel.source(), undefined=jinja2.StrictUndefined).render(
        def_kernel=def_kernel,
        size=lambda name, dim: size_argument(f"{name}_size{dim}"),
        stride=lambda name, dim: size_argument(f"{name}_stride{dim}"),
        store_output=store_output,
        **(LOWERED | constants),
    )
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", *numeric(constants))
    tiles = [f"{name}: tl.constexpr" for name in names]
    head = f"""import triton
import triton.language as tl


@triton.jit
def kernel({", ".join([*tensors, "OUT", *sizes, *tiles])}):
    INDEX_DTYPE: tl.constexpr = tl.int32
"""
    return body.replace("<head>", head), tensors, list(sizes)


def numeric(constants: dict[str, Any]) -> dict[str, int]:
    """The constants that the kernel uses by name. The others select parts of the template."""
    return {name: value for name, value in constants.items() if type(value) is int}


def load_kernel(source: str, folder: str, name: str = "rendered") -> Any:
    """The kernel in ``source``, loaded from a file because Triton reads the source from one."""
    path = Path(folder) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


class Sweep:
    """A kernel compiled for many configurations, and its operands.

    ``device="cpu"`` is for Triton's interpreter: nothing is compiled, and ``time`` does not work.
    """

    def __init__(self, kernel: Kernel, configs: list[GemmConfig], device: str = "cuda") -> None:
        self.kernel = kernel
        tuned = TUNED[kernel.name]
        spec, self.make_inputs = tuned.spec(), tuned.inputs
        self.spec, self.card = spec, describe_device(torch.device(device))
        self.folder = tempfile.TemporaryDirectory()
        self._jits: dict[str, Any] = {}
        self.out_dtype = spec.out_dtype
        self.pool = random_elements(tuned.dtype, WEIGHT_BYTES, device)
        self.failed: dict[GemmConfig, str] = {}
        self.resources: dict[GemmConfig, tuple[int, int]] = {}  # registers, shared memory
        for config in configs:
            self.jit(config)
        if device == "cpu":
            return
        # Triton allocates memory for tensor descriptors
        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
        arguments = self.arguments(EVEN.m, EVEN.n, EVEN.k)[0]
        with ThreadPoolExecutor(16) as executor:
            list(executor.map(lambda config: self._compile(config, arguments), configs))

    def jit(self, config: GemmConfig) -> Any:
        """The plain kernel. Configurations that render to the same text share it."""
        flags = self.kernel.constants(self.spec, EVEN, config, self.card)
        source, self.tensors, self.sizes = render(self.kernel, flags)
        if source not in self._jits:
            name = f"rendered{len(self._jits)}"
            self._jits[source] = load_kernel(source, self.folder.name, name)
        return self._jits[source]

    def _compile(self, config: GemmConfig, arguments: list[Any]) -> None:
        try:
            self.jit(config).warmup(*arguments, grid=(1,), **self.meta(config))
        except Exception as error:
            self.failed[config] = f"{type(error).__name__}: {str(error)[:100]}"

    def arguments(self, m: int, n: int, k: int) -> list[list[Any]]:
        """The kernel's arguments for each call: its own weight, and a shared output."""
        calls = min(MAX_CALLS, self.pool.numel() // (n * k))
        weights = [self.pool[i * n * k : (i + 1) * n * k].view(n, k) for i in range(max(calls, 1))]
        out = torch.empty(m, n, dtype=self.out_dtype, device=self.pool.device)
        inputs = self.make_inputs(m, n, k, weights[0])
        values = {
            f"{name}_{what}{dim}": value
            for name, tensor in inputs.items()
            for what, found in (("size", tensor.shape), ("stride", tensor.stride()))
            for dim, value in enumerate(found)
        }
        sizes = [values[name] for name in self.sizes]
        return [
            [*(w.t() if name == "B" else inputs[name] for name in self.tensors), out, *sizes]
            for w in weights
        ]

    def time(self, shape: Shape, configs: list[GemmConfig], rounds: int) -> dict[GemmConfig, float]:
        """Median microseconds of each configuration, over interleaved rounds."""
        arguments = self.arguments(*shape)
        graphs: dict[GemmConfig, torch.cuda.CUDAGraph] = {}
        for config in configs:
            if config in self.failed:
                continue
            try:
                graphs[config] = self._capture(shape, config, arguments)
            except Exception as error:
                self.failed[config] = f"{type(error).__name__}: {str(error)[:100]}"
        times: dict[GemmConfig, list[float]] = {config: [] for config in graphs}
        for _ in range(rounds + 1):
            events = {}
            for config, graph in graphs.items():
                events[config] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[config][0].record()
                graph.replay()
                events[config][1].record()
            torch.cuda.synchronize()
            for config, (start, end) in events.items():
                times[config].append(start.elapsed_time(end) * 1000 / len(arguments))
        return {c: round(statistics.median(values[1:]), 3) for c, values in times.items()}

    def launch(self, shape: Shape, config: GemmConfig, arguments: list[Any]) -> Any:
        """Run the kernel once. Returns Triton's compiled kernel."""
        meta = self.meta(config)
        m, n, _ = shape
        grid = self.kernel.grid(m, n, meta, cdiv=triton.cdiv)
        return self.jit(config)[grid](*arguments, **meta)

    def meta(self, config: GemmConfig) -> dict[str, int]:
        """The kernel's constexpr arguments: the tile and the template's numeric constants."""
        constants = self.kernel.constants(self.spec, EVEN, config, self.card)
        return keywords(config) | numeric(constants)

    def _capture(self, shape: Shape, config: GemmConfig, arguments: list[list[Any]]) -> Any:
        compiled = self.launch(shape, config, arguments[0])
        self.resources[config] = (compiled.n_regs, compiled.metadata.shared)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in arguments:
                self.launch(shape, config, call)
        return graph


def time_compiled(
    kernel: Kernel, shape: Shape, configs: list[GemmConfig]
) -> dict[GemmConfig, float]:
    """Median microseconds of each configuration as Inductor compiles it, by the package's own
    autotuning."""
    texts = {f"{kernel.name} {config}": config for config in configs}
    pinned = {
        "inductor_quant.configs": tuple(texts),
        "inductor_quant.max_choices": len(configs),
    }
    choice = _compiled(kernel, shape, pinned)
    return {
        texts[name]: round(us, 3)
        for name, us in zip(choice.offered, choice.times_us, strict=True)
        if us is not None and us != float("inf")
    }


def _compiled(kernel: Kernel, shape: Shape, more: dict[str, Any]) -> KernelChoice:
    tuned = TUNED[kernel.name]
    op = getattr(torch.ops.inductor_quant, kernel.family)
    m, n, k = shape
    weight = random_elements(tuned.dtype, n * k, "cuda").view(n, k)
    tensors = list(tuned.inputs(m, n, k, weight).values())
    out_dtype = tuned.spec().out_dtype
    bias = torch.randn(n, device="cuda", dtype=out_dtype)
    torch.compiler.reset()
    with inductor_quant.collect() as report:
        torch.compile(
            lambda *given: op(*given, **tuned.options, out_dtype=out_dtype),
            backend="inductor_quant",
            dynamic=False,
            options={"max_autotune": True, "inductor_quant.on_error": "raise", **more},
        )(*tensors, bias)
    [choice] = report.kernels
    return choice


def keywords(config: GemmConfig) -> dict[str, int]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
