"""The worker processes of the quickstart.

virtual       compiles the whole model for a virtual GPU (sm_90)
interpreter   runs the Triton kernels of one layer in the interpreter; needs TRITON_INTERPRET=1,
              with which kernels cannot be compiled
SYSTEMS       each runs the model on the GPU in one way, to be timed

    python -m examples.quickstart.worker NAME FOLDER     # JSON lines on stdin and stdout"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.benchmarks.harness import Row, serve
from examples.benchmarks.timing import Replay
from examples.quickstart.model import (
    TOKENS,
    be_quiet,
    load,
    paragraphs,
    quantize,
    read_sentences,
    skeleton,
    tokenize,
)
from inductor_quant import collect, simulate

ARCH = 90
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"  # the timing captures a CUDA graph itself
# name: (is quantized, backend, mode). torchao sets Inductor options for its process, such as
# coordinate descent tuning; they stay, as for its users.
SYSTEMS: dict[str, tuple[bool, str, str | None]] = {
    "ours": (True, "inductor_quant", None),
    "ours-autotune": (True, "inductor_quant", MAX_AUTOTUNE),
    "bf16": (False, "inductor", None),
    "stock": (True, "inductor", None),
    "stock-autotune": (True, "inductor", MAX_AUTOTUNE),
}


def compile_for_virtual_gpu(folder: Path, batch: int, layers: int) -> Row:
    """Generate code for the model's first layers on a virtual GPU, and compile its GEMM kernels
    with Triton and ptxas."""

    def make_inputs(device: str) -> tuple[Any, ...]:
        ids = torch.zeros(batch, TOKENS, dtype=torch.long, device=device)
        return skeleton(folder, device, layers), ids, torch.ones_like(ids)

    with collect() as report:
        generated = simulate.generate(
            lambda model, ids, mask: model(ids, mask),
            make_inputs,
            arch=ARCH,
            backend="inductor_quant",
        )
    chosen = {kernel.node: kernel.chosen for kernel in report.kernels}
    # q, k and v are one call, and may be one launch
    together = {member: group.call for group in report.groups for member in group.members}
    rows = Counter(
        (
            f"{match.m}x{match.n}x{match.k}",
            f"{match.family} {match.spec}",
            chosen[together.get(match.call, match.call)],
        )
        for match in report.matches
    )
    kernels = []
    for name, source in generated.kernels.items():
        if not name.startswith("triton_tem_"):  # pointwise kernels and reductions
            continue
        made = simulate.compile_kernel(name, source)
        kernels.append(
            [
                ", ".join(made.matrix_instructions()),
                made.registers,
                made.spill_stores + made.spill_loads,
                made.shared_bytes,
            ]
        )
    return {
        "matched": len(report.matches),
        "int_mm": "_int_mm" in generated.wrapper,
        "rows": [[count, *row] for row, count in rows.items()],
        "kernels": kernels,
    }


class Up(nn.Module):
    """The first half of a layer's MLP."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


def interpret_layer(folder: Path) -> Row:
    """Run the kernels of ``gelu(linear(x))`` of the first layer in the interpreter, on its real
    input. Errors are relative RMS against fp32."""
    ids, mask = tokenize(folder, read_sentences()[0][:1])
    model = load(folder)
    exact = Up(model.bert.encoder.layer[0].intermediate.dense)
    x = input_of(exact.linear, lambda: model(ids, mask))
    wanted = exact(x)
    x = x.to(torch.bfloat16)
    layer = quantize(exact.to(torch.bfloat16))

    def make_inputs(device: str) -> tuple[Any, ...]:
        with torch.device(device):
            linear = nn.Linear(x.shape[-1], wanted.shape[-1], dtype=x.dtype)
            return quantize(Up(linear)), torch.empty(x.shape, dtype=x.dtype)

    with collect() as report:
        generated = simulate.generate(
            lambda model, x: model(x),
            make_inputs,
            arch=ARCH,
            backend="inductor_quant",
        )
    start = time.perf_counter()
    got = simulate.interpret(generated, (layer, x))
    seconds = time.perf_counter() - start
    return {
        "shape": [x.shape[0] * x.shape[1], wanted.shape[-1], x.shape[-1]],
        "kernel": ", ".join(choice.chosen for choice in report.kernels),
        "seconds": seconds,
        "error": relative_rms(got, wanted),
        "eager_error": relative_rms(layer(x), wanted),
    }


def input_of(module: nn.Module, run: Any) -> Tensor:
    """The first argument of ``module`` during ``run()``."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run()
    hook.remove()
    return seen[0]


def relative_rms(got: Tensor, wanted: Tensor) -> float:
    error = got.double() - wanted.double()
    return (error.square().mean() / wanted.double().square().mean()).sqrt().item()


class Timed:
    """The model on the GPU in one of ``SYSTEMS``, as a CUDA graph."""

    def __init__(self, system: str, folder: Path) -> None:
        self.is_quantized, self.backend, self.mode = SYSTEMS[system]
        self.folder = folder

    def prepare(self, batch: int, tokens: int) -> Row:
        ids, mask = (t.cuda() for t in tokenize(self.folder, paragraphs(batch), tokens))
        model = load(self.folder).cuda()
        wanted = model(ids, mask)
        model = model.to(torch.bfloat16)
        if self.is_quantized:
            quantize(model)
        compiled = torch.compile(model, backend=self.backend, mode=self.mode, dynamic=False)

        def call() -> Tensor:
            return compiled(ids, mask)

        start = time.perf_counter()
        cosine = F.cosine_similarity(call(), wanted).min().item()
        compile_s = time.perf_counter() - start
        self.replay = Replay([call], "cuda")
        return {"compile_s": compile_s, "cosine": cosine}

    def time(self) -> Row:
        return {"us": self.replay.seconds() * 1e6}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    be_quiet()
    torch.set_grad_enabled(False)
    if name == "virtual":
        serve({"compile": functools.partial(compile_for_virtual_gpu, folder)})
    elif name == "interpreter":
        serve({"compute": functools.partial(interpret_layer, folder)})
    else:
        timed = Timed(name, folder)
        serve({"prepare": timed.prepare, "time": timed.time})


if __name__ == "__main__":
    main()
