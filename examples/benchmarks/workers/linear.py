"""One quantized linear layer in one system: the worker process of ``examples.benchmarks.gemm``.

A family (``FAMILIES``) makes a problem. A system (``SYSTEMS``) turns it into calls, one for each of
several weights. The weights exceed the L2 cache together, so that each call reads its weight from
memory. One CUDA graph captures all calls; ``us`` is the time of one call.

A problem has up to three measures: 'gemm' takes quantized inputs (GEMM, scales, bias), 'silu' adds
SiLU to that, 'linear' takes bf16 inputs and includes their quantization."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from examples.benchmarks.harness import serve
from examples.benchmarks.timing import Replay, copies_beyond_l2, machine, seconds
from examples.benchmarks.workers import w4a8, weight_only
from examples.benchmarks.workers.fp8 import Fp8, Fp8Block, cublaslt, deepseek
from inductor_quant.report import events

Tensor = torch.Tensor
Call = Callable[[], Tensor]

# Bounds on the relative RMS error. EXACT: against fp64 of the same int8 operands; rounding the
# output to bf16 alone gives 1.7e-3. REQUANTIZED: against fp64 of the operands before quantization,
# for systems that choose their own scales; quantization gives about 9e-3 with these inputs.
EXACT, REQUANTIZED = 4e-3, 3e-2


def int8_gemm(a: Tensor, w: Tensor, sa: Tensor, sw: Tensor, bias: Tensor) -> Tensor:
    """int8 in: GEMM, both scales, bias, as W8A8 quantizers write it."""
    return (torch._int_mm(a, w.t()).float() * sa * sw + bias).to(bias.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def int8_linear(x: Tensor, w: Tensor, sw: Tensor, bias: Tensor) -> Tensor:
    """bf16 in: per_token quantization of the activation, then ``int8_gemm``."""
    a, sa = quantize_rows(x)
    return int8_gemm(a, w, sa, sw, bias)


class W8A8:
    """int8 weights with per_channel scales, int8 activations with per_token scales."""

    dtype = torch.bfloat16

    def __init__(self, measure: str, m: int, n: int, k: int, device: str) -> None:
        self.measure, self.m, self.n, self.k, self.device = measure, m, n, k, device
        self.generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"device": device, "generator": self.generator}
        self.bias = torch.randn(n, dtype=self.dtype, **options)
        self.x = torch.randn(m, k, dtype=self.dtype, **options)
        self.a = self.integers(m, k)
        self.sa, self.sw = (torch.rand(s, **options) * 0.01 + 0.001 for s in ((m, 1), (n,)))

    def integers(self, *size: int) -> Tensor:
        return torch.randint(
            -128, 128, size, dtype=torch.int8, device=self.device, generator=self.generator
        )

    def count(self, element_bytes: int) -> int:
        return copies_beyond_l2(self.n * self.k * element_bytes, self.device)

    @property
    def used_bias(self) -> Tensor | None:
        return self.bias

    @functools.cached_property
    def weights(self) -> list[Tensor]:
        return [self.integers(self.n, self.k) for _ in range(self.count(1))]

    def bf16_weight(self, w: Tensor) -> Tensor:
        return (w * self.sw[:, None]).to(self.dtype)

    @functools.cached_property
    def bf16_weights(self) -> list[Tensor]:
        first = self.bf16_weight(self.weights[0])
        return [first] + [first.clone() for _ in range(self.count(2) - 1)]

    def calls(self, fn: Callable[..., Tensor]) -> list[Call]:
        """Calls of ``fn``, a compiled ``function``, one for each weight."""
        if self.measure == "linear":
            return [functools.partial(fn, self.x, w, self.sw, self.bias) for w in self.weights]
        return [functools.partial(fn, self.a, w, self.sa, self.sw, self.bias) for w in self.weights]

    @property
    def function(self) -> Callable[..., Tensor]:
        if self.measure == "silu":
            return lambda *given: F.silu(int8_gemm(*given))
        return int8_gemm if self.measure == "gemm" else int8_linear

    def exact(self) -> Tensor:
        """The result in fp64, from the int8 operands."""
        a, sa = quantize_rows(self.x) if self.measure == "linear" else (self.a, self.sa)
        out = self.integer_product(a) * sa.double() * self.sw.double() + self.bias.double()
        return F.silu(out) if self.measure == "silu" else out

    def integer_product(self, a: Tensor) -> Tensor:
        return a.double() @ self.weights[0].double().t()

    def unquantized(self) -> Tensor:
        """The result in fp64, from the activation before its quantization."""
        if self.measure != "linear":
            return self.exact()
        return self.x.double() @ (self.weights[0] * self.sw[:, None]).double().t() + self.bias


class W8A8Half(W8A8):
    """W8A8 in fp16."""

    dtype = torch.float16


@dataclasses.dataclass(frozen=True)
class Entry:
    """A system: ``build`` makes the calls, ``reference`` the expected result of the first one."""

    build: Callable[[Any], list[Call]]
    reference: Callable[[Any], Tensor] = lambda problem: problem.exact()
    bound: float = EXACT
    measures: tuple[str, ...] = ("gemm", "silu", "linear")
    families: tuple[str, ...] = ("w8a8", "w8a8_fp16", "fp8", "fp8_block")


def compiled(backend: str, mode: str | None = None, **how: Any) -> Entry:
    """A compiled system. ``how``: fields of ``Entry``, and ``options`` for ``torch.compile``."""
    options = how.pop("options", None)

    def build(problem: W8A8) -> list[Call]:
        given: dict[str, Any] = {"backend": backend, "mode": mode, "options": options}
        return problem.calls(torch.compile(problem.function, dynamic=False, **given))

    return Entry(build, **how)


def bf16(mode: str | None) -> Entry:
    """The layer without quantization. It has all measures beside FP8, else 'linear' alone."""

    def linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, w, bias)

    def build(problem: W8A8 | Fp8) -> list[Call]:
        if problem.measure != "linear" and not isinstance(problem, Fp8):
            raise ValueError(f"bf16 has no measure {problem.measure!r} beside int8")
        function = linear if problem.measure != "silu" else lambda *given: F.silu(linear(*given))
        fn = torch.compile(function, mode=mode, dynamic=False)
        bias = problem.used_bias
        return [functools.partial(fn, problem.x, w, bias) for w in problem.bf16_weights]

    # bf16 weights are rounded, those of the reference are not
    return Entry(build, unquantized, 2 * EXACT)


def unquantized(problem: Any) -> Tensor:
    return problem.unquantized()


def bare_int_mm(problem: W8A8) -> list[Call]:
    return [functools.partial(torch._int_mm, problem.a, w.t()) for w in problem.weights]


def gemlite(problem: W8A8) -> list[Call]:
    """GemLite's A8W8_int8_dynamic layer. 'gemm' calls the kernel that this layer would call."""
    from gemlite import core, helper

    processor = helper.A8W8_int8_dynamic(device=problem.device, dtype=problem.dtype)
    sw = problem.sw[:, None]
    layers = [processor.from_weights(w, problem.bias, sw) for w in problem.weights]
    if problem.measure == "linear":
        return [functools.partial(layer, problem.x) for layer in layers]
    kernel = core.GEMLITE_TRITON_MAPPING[core.get_matmul_type(problem.m, 8)]

    def gemm(layer: Any) -> Tensor:
        meta = layer.get_meta_args()  # passed on as gemlite.core.forward_functional does
        type_id = meta[5] * 100 + meta[1]
        tensors = layer.get_tensor_args()[:3]
        out = kernel.forward(
            problem.a, *tensors, problem.sa, *meta[1:-1], True, type_id, meta_scale=0.0
        )
        out += layer.bias
        return out

    return [functools.partial(gemm, layer) for layer in layers]


def torchao(problem: W8A8) -> list[Call]:
    """torchao's int8 dynamic quantization of nn.Linear, compiled by stock Inductor."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    weights = []
    for w in problem.weights:
        linear = torch.nn.Linear(problem.k, problem.n, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(problem.bf16_weight(w), requires_grad=False)
        quantize_(linear, Int8DynamicActivationInt8WeightConfig())
        weights.append(linear.weight)
    fn = torch.compile(F.linear, dynamic=False)
    return [functools.partial(fn, problem.x, w, problem.bias) for w in weights]


MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
W8A8S = ("w8a8", "w8a8_fp16")
SYSTEMS: dict[str, Entry] = {
    "ours": compiled("inductor_quant"),
    "ours-autotune": compiled("inductor_quant", MAX_AUTOTUNE),
    # always quantize in a kernel before the GEMM
    "ours-apart": compiled(
        "inductor_quant",
        options={"inductor_quant.fuse_quantization": False},
        measures=("linear",),
        families=W8A8S,
    ),
    "stock": compiled("inductor"),
    "stock-autotune": compiled("inductor", MAX_AUTOTUNE),
    "bf16": bf16(None),  # cuBLAS
    "bf16-autotune": bf16(MAX_AUTOTUNE),
    # eager PyTorch: cuBLASLt's int8 GEMM, then scales and bias
    "int_mm": Entry(lambda problem: problem.calls(problem.function), families=W8A8S),
    # cuBLASLt's int8 GEMM alone: does less work than the others
    "int_mm-bare": Entry(
        *(bare_int_mm, lambda problem: problem.integer_product(problem.a), 0, ("gemm",)),
        families=W8A8S,
    ),
    "gemlite": Entry(gemlite, unquantized, REQUANTIZED, ("gemm", "linear"), W8A8S),
    "torchao": Entry(torchao, unquantized, REQUANTIZED, ("linear",), W8A8S),
    # eager PyTorch: cuBLASLt's FP8 GEMM with scales
    "cublaslt": Entry(cublaslt, measures=("gemm",), families=("fp8", "fp8_block")),
    "deepseek": Entry(deepseek, measures=("gemm",), families=("fp8_block",)),
}

_INT4 = ("weight_only", "weight_only_fp16", "weight_only_awq", "weight_only_hqq")
_EIGHT_BIT = ("weight_only_int8", "weight_only_fp8")
_WEIGHT_ONLY = functools.partial(
    Entry,
    reference=weight_only.Problem.exact,
    bound=2 * EXACT,  # the weight is rounded to bf16 too; in tinygemm its zero points are
    measures=("linear",),
    families=(*_INT4, *_EIGHT_BIT),
)


def _gemlite(problem: Any) -> list[Call]:
    is_int4 = isinstance(problem, weight_only.GPTQ)
    return weight_only.gemlite(problem) if is_int4 else weight_only.gemlite_8bit(problem)


WEIGHT_ONLY_SYSTEMS: dict[str, Entry] = (
    {
        name: _WEIGHT_ONLY(functools.partial(weight_only.compiled, backend, mode))
        for name, backend, mode in (
            ("ours", "inductor_quant", None),
            ("ours-autotune", "inductor_quant", MAX_AUTOTUNE),
            ("stock", "inductor", None),
        )
    }
    | {
        "bf16": _WEIGHT_ONLY(weight_only.bf16),  # cuBLAS
        "dequantize": _WEIGHT_ONLY(weight_only.dequantize_once),
        "tinygemm": _WEIGHT_ONLY(weight_only.tinygemm, bound=REQUANTIZED, families=_INT4),
        "int8pack": _WEIGHT_ONLY(weight_only.int8pack, families=("weight_only_int8",)),
        "gemlite": _WEIGHT_ONLY(_gemlite, bound=REQUANTIZED),
    }
    | {
        # the quantized values of "ours" (GPTQ's layout) in other layouts, as they are and repacked
        f"ours-{name}{suffix}": _WEIGHT_ONLY(
            functools.partial(build, kind), families=("weight_only",)
        )
        for name, kind in (("awq", weight_only.AWQ), ("hqq", weight_only.HQQ))
        for suffix, build in (
            ("", weight_only.packed_as),
            ("-prepacked", weight_only.prepacked_from),
        )
    }
)

_W4A8 = functools.partial(Entry, measures=("gemm", "linear"), families=("w4a8", "w4a8_channel"))
W4A8_SYSTEMS: dict[str, Entry] = {
    "ours": _W4A8(functools.partial(w4a8.compiled, "inductor_quant")),
    "stock": _W4A8(functools.partial(w4a8.compiled, "inductor")),
    "w8a8": _W4A8(w4a8.w8a8, w4a8.Channel.integers),  # ours, of the weight in int8
    # ours, of the packed weight and a bf16 activation; the scaled weight is rounded to bf16
    "w4a16": _W4A8(w4a8.w4a16, unquantized, 2 * EXACT),
    "bf16": _W4A8(w4a8.bf16, unquantized, 2 * EXACT, measures=("linear",)),  # cuBLAS
}

# family -> its problem and its systems
FAMILIES: dict[str, tuple[type[Any], dict[str, Entry]]] = {
    "w8a8": (W8A8, SYSTEMS),
    "w8a8_fp16": (W8A8Half, SYSTEMS),
    "fp8": (Fp8, SYSTEMS),
    "fp8_block": (Fp8Block, SYSTEMS),
    "w4a8": (w4a8.Groups, W4A8_SYSTEMS),
    "w4a8_channel": (w4a8.Channel, W4A8_SYSTEMS),
    "weight_only": (weight_only.GPTQ, WEIGHT_ONLY_SYSTEMS),
    "weight_only_fp16": (weight_only.GPTQHalf, WEIGHT_ONLY_SYSTEMS),
    "weight_only_awq": (weight_only.AWQ, WEIGHT_ONLY_SYSTEMS),
    "weight_only_hqq": (weight_only.HQQ, WEIGHT_ONLY_SYSTEMS),
    "weight_only_int8": (weight_only.Int8, WEIGHT_ONLY_SYSTEMS),
    "weight_only_fp8": (weight_only.E4M3, WEIGHT_ONLY_SYSTEMS),
}


class Worker:
    def __init__(self, system: str, device: str) -> None:
        self.system, self.device = system, device
        self.replay: Replay | None = None

    def prepare(self, family: str, measure: str, m: int, n: int, k: int) -> dict[str, Any]:
        self.replay = None
        torch.compiler.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        make, systems = FAMILIES[family]
        if self.system not in systems:
            raise ValueError(f"{self.system} does not have the family {family}")
        entry = systems[self.system]
        if measure not in entry.measures or family not in entry.families:
            raise ValueError(f"{self.system} has no measure {measure!r} of {family}")
        problem = make(measure, m, n, k, self.device)
        with torch.no_grad():
            calls = entry.build(problem)
            start = time.perf_counter()
            with events.collect() as decisions:
                out = calls[0]().double()  # synchronizes
            compile_s = time.perf_counter() - start
            reference = entry.reference(problem)
            error = (out - reference).abs_()
            rms = (error.square().mean().sqrt() / reference.square().mean().sqrt()).item()
            del out, reference
            self.replay = Replay(calls, self.device)
        return {
            "error_rms": rms,
            "error_max": error.max().item(),
            "wrong": not rms <= entry.bound,  # not ``>``: a NaN is wrong
            "compile_s": compile_s,
            "kernels": [choice.chosen for choice in decisions.kernels],  # of inductor_quant
        }

    def time(self) -> dict[str, Any]:
        assert self.replay is not None, "nothing is prepared"
        return {"us": self.replay.seconds() * 1e6}

    def ceilings(self) -> dict[str, float]:
        """Measured limits of this GPU: read bandwidth in TB/s, 8192^3 products in T(FL)OP/s."""
        if self.device == "cpu":
            return {"read_tbps": 0.02, "bf16_tflops": 0.1, "int8_tops": 0.1}  # any value will do
        big = torch.randint(0, 2**30, (2**28,), dtype=torch.int32, device="cuda")
        size = 8192
        a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        i = torch.randint(-128, 128, (size, size), dtype=torch.int8, device="cuda")
        tera = 2 * size**3 / 1e12
        found = {
            "read_tbps": big.nbytes / 1e12 / seconds(lambda: big.max()),
            "bf16_tflops": tera / seconds(lambda: a @ a.t()),
            "int_mm_tops": tera / seconds(lambda: torch._int_mm(i, i.t())),
        }
        # FP8 products run at the peak rate of int8 ones, and the library's FP8 product comes
        # nearer to it than its int8 product. The ceiling is the better of both.
        found["int8_tops"] = found["int_mm_tops"]
        if torch.cuda.get_device_capability() >= (8, 9):
            f8, one = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda")

            def fp8() -> Tensor:
                return torch._scaled_mm(
                    f8, f8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
                )

            found["fp8_tflops"] = tera / seconds(fp8)
            found["int8_tops"] = max(found["int8_tops"], found["fp8_tflops"])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=[*SYSTEMS, *W4A8_SYSTEMS, *WEIGHT_ONLY_SYSTEMS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deepseek-kernel", help="Python file of the system 'deepseek'")
    options = parser.parse_args()
    if options.system.startswith("ours"):
        # a cached compilation runs no lowering and reports no kernel
        torch.compiler.config.force_disable_caches = True
    if options.deepseek_kernel is not None:
        build = functools.partial(deepseek, path=options.deepseek_kernel)
        SYSTEMS["deepseek"] = dataclasses.replace(SYSTEMS["deepseek"], build=build)
    worker = Worker(options.system, options.device)
    serve(
        {
            "prepare": worker.prepare,
            "time": worker.time,
            "ceilings": worker.ceilings,
            "machine": lambda: machine(options.device),
        }
    )


if __name__ == "__main__":
    main()
