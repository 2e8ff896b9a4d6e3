"""The FP8 problems of ``workers.linear``: row-wise scales, and scales of blocks.

'gemm' takes FP8 inputs: GEMM, scales, and with row-wise scales a bias. 'silu' adds SiLU, and a bias
in both families. 'linear' takes bf16 inputs and includes their quantization."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from examples.benchmarks.harness import NotMeasured
from examples.benchmarks.timing import copies_beyond_l2

Tensor = torch.Tensor
Call = Callable[[], Tensor]

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
BLOCK = 128
LARGEST = 448.0  # the largest e4m3 value


def row_gemm(a: Tensor, w: Tensor, sa: Tensor, sw: Tensor, bias: Tensor) -> Tensor:
    """``_scaled_mm`` as torchao calls it."""
    return torch._scaled_mm(a, w.t(), sa, sw, bias, out_dtype=BF16, use_fast_accum=True)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (x.float() / scale).to(E4M3), scale


def block_gemm(a: Tensor, w: Tensor, sa: Tensor, sw: Tensor, bias: Tensor | None = None) -> Tensor:
    """DeepSeek-V3's scales as cuBLASLt takes them, which takes no bias with them.

    sa [M, K / 128] with strides (1, M), sw [K / 128, N / 128] with strides (1, K / 128).
    """
    out = torch._scaled_mm(a, w.t(), sa, sw, out_dtype=BF16)
    return out if bias is None else out + bias


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    parts = x.float().reshape(m, k // BLOCK, BLOCK)
    scale = parts.abs().amax(-1).clamp_min(1e-12) / LARGEST
    a = (parts / scale[..., None]).to(E4M3).reshape(m, k)
    return a, scale.t().contiguous().t()


class Fp8:
    """e4m3 weights with per_channel scales, e4m3 activations with per_token scales."""

    quantize = staticmethod(quantize_rows)

    def __init__(self, measure: str, m: int, n: int, k: int, device: str) -> None:
        self.measure, self.m, self.n, self.k, self.device = measure, m, n, k, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.options: dict[str, Any] = {"device": device, "generator": self.generator}
        self.x = torch.randn(m, k, dtype=BF16, **self.options)
        self.a, self.sa = self.quantize(self.x)
        self.sw = self.weight_scale()
        self.bias = torch.randn(n, dtype=BF16, **self.options)

    def weight_scale(self) -> Tensor:
        return torch.rand(1, self.n, **self.options) * 1e-3 + 1e-4

    def count(self, element_bytes: int) -> int:
        return copies_beyond_l2(self.n * self.k * element_bytes, self.device)

    @functools.cached_property
    def weights(self) -> list[Tensor]:
        size = (self.n, self.k)
        return [(torch.randn(size, **self.options) * 50).to(E4M3) for _ in range(self.count(1))]

    def dense(self, w: Tensor) -> Tensor:
        return w.double() * self.sw.t().double()

    @functools.cached_property
    def bf16_weights(self) -> list[Tensor]:
        first = self.dense(self.weights[0]).to(BF16)
        return [first] + [first.clone() for _ in range(self.count(2) - 1)]

    @property
    def used_bias(self) -> Tensor | None:
        return self.bias

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Arguments of ``function`` after activation, weight and activation scale."""
        return self.sw, self.bias

    @property
    def product(self) -> Callable[..., Tensor]:
        return row_gemm

    @property
    def function(self) -> Callable[..., Tensor]:
        product, quantize = self.product, self.quantize
        if self.measure == "silu":
            return lambda a, w, sa, *more: F.silu(product(a, w, sa, *more))
        if self.measure == "gemm":
            return product

        def linear(x: Tensor, w: Tensor, *more: Tensor) -> Tensor:
            a, sa = quantize(x)
            return product(a, w, sa, *more)

        return linear

    def calls(self, fn: Callable[..., Tensor]) -> list[Call]:
        if self.measure == "linear":
            return [functools.partial(fn, self.x, w, *self.constants) for w in self.weights]
        return [functools.partial(fn, self.a, w, self.sa, *self.constants) for w in self.weights]

    def exact(self) -> Tensor:
        """The result in fp64, from the FP8 operands."""
        out = (self.a.double() * self.sa.double()) @ self.dense(self.weights[0]).t()
        return self.finished(out + self.bias.double())

    def finished(self, out: Tensor) -> Tensor:
        return F.silu(out) if self.measure == "silu" else out

    def unquantized(self) -> Tensor:
        """The result in fp64, from the activation before its quantization."""
        out = self.x.double() @ self.dense(self.weights[0]).t() + self.bias.double()
        return self.finished(out)


class Fp8Block(Fp8):
    """DeepSeek-V3's blocks: 128 x 128 of the weight, 1 x 128 of the activation. Bias in 'silu'."""

    quantize = staticmethod(quantize_blocks)

    def weight_scale(self) -> Tensor:
        n_blocks, k_blocks = -(-self.n // BLOCK), -(-self.k // BLOCK)
        return (torch.rand(n_blocks, k_blocks, **self.options) * 1e-3 + 1e-4).t()

    def dense(self, w: Tensor) -> Tensor:
        scale = self.sw.t().double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return w.double() * scale[: self.n, : self.k]

    @property
    def used_bias(self) -> Tensor | None:
        return self.bias if self.measure == "silu" else None

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return (self.sw,) if self.used_bias is None else (self.sw, self.used_bias)

    @property
    def product(self) -> Callable[..., Tensor]:
        return block_gemm

    def exact(self) -> Tensor:
        rows = self.sa.double().repeat_interleave(BLOCK, 1)[:, : self.k]
        return self.finished((self.a.double() * rows) @ self.dense(self.weights[0]).t())

    def finished(self, out: Tensor) -> Tensor:
        return F.silu(out + self.bias.double()) if self.measure == "silu" else out

    def unquantized(self) -> Tensor:
        return self.finished(self.x.double() @ self.dense(self.weights[0]).t())


def deepseek(problem: Fp8Block, path: str | None = None) -> list[Call]:
    """DeepSeek-V3's own Triton kernel, from the file at ``path``.

    Its activation scales are contiguous along K. It is autotuned again for each M here; the kernel
    itself tunes once for each N and K.
    """
    if path is None:
        raise NotMeasured(
            "give --deepseek-kernel PATH, inference/kernel.py of github.com/deepseek-ai/DeepSeek-V3"
        )
    module = _load(path)
    sa, sw = problem.sa.contiguous(), problem.sw.t().contiguous()

    def gemm(w: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(BF16)  # the kernel's output type
        try:
            return module.fp8_gemm(problem.a, sa, w, sw)
        finally:
            torch.set_default_dtype(before)

    if problem.device == "cuda":
        m, n, k = problem.m, problem.n, problem.k
        out = torch.empty(m, n, dtype=BF16, device="cuda")
        _compile(module.fp8_gemm_kernel, problem.a, problem.weights[0], out, sa, sw, m, n, k)
    return [functools.partial(gemm, w) for w in problem.weights]


def _load(path: str) -> Any:
    """The module in the file, loaded again at each call."""
    spec = importlib.util.spec_from_file_location("deepseek_kernel", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise NotMeasured(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(autotuner: Any, *arguments: Any) -> None:
    """Compile all configurations in parallel, into the cache from which the autotuner loads."""

    def compile_one(config: Any) -> None:
        autotuner.fn.warmup(*arguments, grid=(1,), **config.all_kwargs())

    with ThreadPoolExecutor(16) as executor:
        list(executor.map(compile_one, autotuner.configs))


def cublaslt(problem: Fp8) -> list[Call]:
    """``torch._scaled_mm`` in eager mode."""
    return problem.calls(problem.product)
