"""The other processes of ``quickstart.py``, which asks and shows the answers.

virtual       compiles the whole model for a GPU that is not there (sm_90)
interpreter   computes one layer with its Triton kernels, in the interpreter; needs
              TRITON_INTERPRET=1, with which kernels cannot be compiled
SYSTEMS       one way to run the model on the GPU each, to be timed

python quickstart_worker.py NAME FOLDER     requests and replies are JSON lines"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_systems import Row, serve
from models_timing import Replay
from quickstart_model import (
    TOKENS,
    be_quiet,
    load,
    paragraphs,
    quantize,
    read_sentences,
    skeleton,
    tokenize,
)
from torch import Tensor, nn

from inductor_quant import collect, simulate

ARCH = 90
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"  # the timing makes a CUDA graph of every system
# name: (is quantized, backend, mode). torchao sets options of Inductor for the process, such as
# coordinate descent tuning; each system is as its user gets it.
SYSTEMS: dict[str, tuple[bool, str, str | None]] = {
    "ours": (True, "inductor_quant", None),
    "ours-autotune": (True, "inductor_quant", MAX_AUTOTUNE),
    "bf16": (False, "inductor", None),
    "stock": (True, "inductor", None),
    "stock-autotune": (True, "inductor", MAX_AUTOTUNE),
}


def compile_for_virtual_gpu(folder: Path, batch: int, layers: int) -> Row:
    """What Inductor with the plugin generates for the model's first layers on an H100-like card,
    and what Triton and ptxas make of the GEMM kernels."""

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
    rows = Counter(
        (f"{match.m}x{match.n}x{match.k}", f"{match.family} {match.spec}", chosen[match.call])
        for match in report.matches
    )
    kernels = []
    for name, source in generated.kernels.items():
        if not name.startswith("triton_tem_"):  # a template; the others are pointwise, reductions
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
    """The widening half of a layer's MLP."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


def interpret_layer(folder: Path) -> Row:
    """``gelu(linear(x))`` of the first layer's MLP, on what really arrives there, by the kernels
    that a GPU would run. Errors are relative RMS against fp32."""
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
    """The first argument that ``module`` gets while ``run()`` runs."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run()
    hook.remove()
    return seen[0]


def relative_rms(got: Tensor, wanted: Tensor) -> float:
    error = got.double() - wanted.double()
    return (error.square().mean() / wanted.double().square().mean()).sqrt().item()


class Timed:
    """The model in one of SYSTEMS on the GPU, replayed as a CUDA graph."""

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
