"""Time whole compiled models against stock compile and bf16: real sizes, random weights.

    python -m examples.benchmarks.models --models sam --json models.json
    python -m examples.benchmarks.models --models llama-decode llama-prefill deepseek --budget 580
    python -m examples.benchmarks.models --models encoders --quantizer torchao --layers 4 --profile
    python -m examples.benchmarks.models --models llama-linears --quantizer nf4 \\
        --systems ours-prepacked bf16

Models: transformers' Llama-3-8B, Qwen3-8B, Mistral-7B and Gemma-7B (decode with batches of 1, 16
and 64 after 1023 tokens in a static cache; prefill of 4096 tokens), a layer of DeepSeek-V3 with 64
and 4096 tokens; BERT-large (16 x 512 tokens), ViT-L (64 images), the encoders of Whisper-large
(4 x 30 s), T5-XXL (4 x 512 tokens) and SAM's ViT-H (16 images of 1024 x 1024); blocks as in Flux
(4096 + 512 tokens) and SD3; the seven linear layers of four Llama-3-8B layers, with 1 and 16 rows.
--layers replaces the number of layers: they are what takes the time to compile.

Every nn.Linear but lm_head is quantized (examples.benchmarks.workers.quantizers):
  plain      int8, per_channel weights, dynamic per_token activations, in plain PyTorch
  int4       int4 weights in groups of 128, GPTQ's layout
  fp8_block  FP8 weights and activations in DeepSeek-V3's blocks
  torchao    int8 as in plain, by torchao; torchao_fp8 by rows; torchao_int8_weights,
             torchao_int4_weights (tile-packed) weight-only
  compressed_tensors (W4A16), nf4, fine_grained_fp8: their layers as ``prepare_`` makes them
--dtype fp16 replaces bf16 by fp16. --profile adds where the time of a call goes, by kernels. Models
in ``TARGETS`` get a verdict against a bf16 system, or the faster of them.

Each system runs in its own process. Rounds are interleaved and use a CUDA graph if the model can be
captured. The error compares the compiled model with the same model in eager mode: relative RMS, the
worst element in brackets. It must not exceed the quantization error. Compile times are with empty
caches; the systems compile in parallel unless --apart is given."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.benchmarks.harness import (
    Results,
    Row,
    Verdict,
    measure,
    open_systems,
    show_ratios,
    show_table,
    show_verdicts,
)

WORKER = "examples.benchmarks.workers.model"
KEY = ("case", "quantizer", "per_layer", "layers", "tiny", "dtype")  # of a row in the file
DECODERS = ("llama", "qwen3", "mistral", "gemma")
MODELS = {
    **{f"{name}-decode": [f"{name}-decode-{m}" for m in (1, 16, 64)] for name in DECODERS},
    "prefill": [f"{name}-prefill" for name in DECODERS],
    "deepseek": ["deepseek-64", "deepseek"],
    "encoders": ["bert", "vit", "whisper", "t5", "sam"],
    "diffusion": ["flux", "sd3"],
    "llama-linears": ["llama-linears-1", "llama-linears-16"],
}
DEFAULT_MODELS = ["llama-decode", "llama-prefill", "deepseek", "encoders", "diffusion"]
QUANTIZERS = (
    *("plain", "int4", "fp8_block", "compressed_tensors", "nf4", "fine_grained_fp8"),
    *("torchao", "torchao_int8_weights", "torchao_int4_weights", "torchao_fp8"),
)
DEFAULT_SYSTEMS = ["ours", "stock", "bf16", "bf16-autotune"]
BEST_BF16 = "bf16 (best)"
# Of kernels, by parts of their names: the first that fits.
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention", "softmax"),
    "GEMM": ("triton_tem", "gemm", "nvjet", "cutlass", "_mm_", "splitk", "bmm", "partials"),
    "quantization": ("amax", "row_reduce", "round", "float8", "_maximum"),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Ours / ``peer`` <= ``limit``, for a figure of the reply: ms, peak_gb or weights_gb; or
    linear_ms, the time beyond what the peer's kernels other than GEMMs take (--profile)."""

    case: str
    quantizer: str
    limit: float
    quantity: str = "ms"
    peer: str = BEST_BF16
    ours: str = "ours"


def _linears(quantizer: str, one: float, sixteen: float) -> tuple[Target, ...]:
    return tuple(
        Target(f"llama-linears-{m}", quantizer, limit, peer="bf16", ours="ours-prepacked")
        for m, limit in ((1, one), (16, sixteen))
    )


TARGETS = (
    Target("sam", "plain", 0.885),
    Target("sam", "plain", 0.94, "peak_gb"),
    Target("llama-decode-1", "int4", 1 / 2.0),  # twice the tokens a second
    Target("llama-decode-16", "int4", 1 / 1.6),
    Target("llama-decode-1", "int4", 0.37, "weights_gb"),
    Target("llama-decode-16", "int4", 0.37, "weights_gb"),
    Target("deepseek", "fp8_block", 0.77),
    Target("deepseek-64", "fp8_block", 0.77),
    Target("llama-decode-1", "torchao_fp8", 0.60, peer="bf16"),
    Target("llama-decode-16", "torchao_fp8", 0.68, peer="bf16"),
    *(Target(name, "torchao", 0.88, peer="bf16") for name in ("bert", "vit", "whisper")),
    Target("sam", "torchao", 0.82, peer="bf16"),
    Target("sam", "torchao", 0.94, "peak_gb", peer="bf16"),
    Target("flux", "torchao", 0.70, "linear_ms", peer="bf16"),
    Target("flux", "torchao", 1.0, peer="stock"),
    Target("flux", "torchao_fp8", 0.70, "linear_ms", peer="bf16"),
    Target("flux", "torchao_fp8", 1.0, peer="stock"),
    *_linears("compressed_tensors", 0.50, 0.60),
    *_linears("nf4", 0.62, 0.75),
    *_linears("torchao_int4_weights", 0.50, 0.60),
    *_linears("fine_grained_fp8", 0.65, 0.70),
)
CASES = sorted({case for cases in MODELS.values() for case in cases} - set(MODELS))


def label(row: Row) -> str:
    parts = [row["case"]]
    parts += [row["dtype"]] if row["dtype"] != "bf16" else []
    parts += [row["quantizer"]] if row["quantizer"] != "plain" else []
    parts += ["per layer"] if row["per_layer"] else []
    parts += [f"{row['layers']} layers"] if row["layers"] else []
    return ", ".join(parts)


def with_best_bf16(row: Row) -> Row:
    """The row with ratios to the faster bf16 system only, as ``BEST_BF16``."""
    timed = {n: r for n, r in row["systems"].items() if n.startswith("bf16") and "ms" in r}
    kept = {pair: q for pair, q in row["ratios"].items() if "/bf16" not in pair}
    if timed:
        best = min(timed, key=lambda name: timed[name]["ms"][1])
        for pair, found in row["ratios"].items():
            if pair.endswith(f"/{best}"):
                kept[pair.replace(f"/{best}", f"/{BEST_BF16}")] = found
    return {**row, "ratios": kept}


def judge(rows: Sequence[Row]) -> Iterator[Verdict]:
    for row in rows:
        timed = {n: r for n, r in row["systems"].items() if "ms" in r}
        for target in TARGETS:
            if (target.case, target.quantizer) != (row["case"], row["quantizer"]):
                continue
            what = f"{target.quantity} <= {target.limit:.3g} x {target.peer}"
            best = target.peer
            if best == BEST_BF16:
                found = [name for name in timed if name.startswith("bf16")]
                best = min(found, key=lambda name: timed[name]["ms"][1], default="bf16")
            lacking = ", ".join(n for n in (target.ours, best) if n not in timed)
            if not lacking and target.quantity == "linear_ms" and "kernels" not in timed[best]:
                lacking = "--profile"
            if lacking:
                yield Verdict(what, None, f"without {lacking}", label(row))
                continue
            ours, peer = timed[target.ours], timed[best]
            if target.quantity == "ms":
                low, ratio, high = row["ratios"][f"{target.ours}/{best}"]
                detail = f"{ratio:.3f} [{low:.3f}, {high:.3f}] of {best}"
            else:
                ratio = figure(target.quantity, ours, peer) / figure(target.quantity, peer, peer)
                detail = f"{ratio:.3f} of {best}"
            detail += ", WRONG" if ours["wrong"] else ""
            yield Verdict(what, ratio <= target.limit and not ours["wrong"], detail, label(row))


def figure(quantity: str, reply: Row, peer: Row) -> float:
    if quantity != "linear_ms":
        return float(reply[quantity])
    others = sum(ms for kind, ms in by_kind(peer).items() if kind not in ("GEMM", "quantization"))
    return float(reply["ms"][1] - others)


def by_kind(reply: Row) -> dict[str, float]:
    """Milliseconds of one call in the ``KINDS`` of kernels, the rest, and between kernels."""
    found = {**dict.fromkeys(KINDS, 0.0), "rest": 0.0, "between kernels": reply["gaps_ms"]}
    for name, _, ms in reply["kernels"]:
        fits = (kind for kind, parts in KINDS.items() if any(p in name.lower() for p in parts))
        found[next(fits, "rest")] += ms
    return found


def tokens_per_second(case: str, milliseconds: float) -> str:
    """Throughput of a decode step, one token per sequence of the batch; "-" for other models."""
    name, _, batch = case.rpartition("-")
    return f"{1000 * int(batch) / milliseconds:.0f}" if name.endswith("-decode") else "-"


def cells(reply: Row, case: str) -> list[str]:
    """One system's row of the table."""
    if "ms" not in reply:
        return ["fails", *["-"] * 8]
    low, median, high = reply["ms"]
    errors = [reply["error"], reply["error_bf16"]]
    texts = [f"{e['rms']:.2e} [{e['max']:.2f}]" for e in errors]
    return [
        f"{median:.3f} [{low:.3f}, {high:.3f}]" + ("" if reply["graph"] else " no graph"),
        tokens_per_second(case, median),
        f"{reply['peak_gb']:.2f}",
        f"{reply['weights_gb']:.2f}",
        f"{reply['compile_s']:.1f}",
        texts[0] + (" WRONG" if reply["wrong"] else ""),
        texts[1],
        f"{reply['quantization']['rms']:.2e}" if "quantization" in reply else "-",
        str(reply["fused_gemms"]),
    ]


COLUMNS = (
    "model",
    "system",
    "ms [quartiles]",
    "tokens/s",
    "peak GB",
    "weights GB",
    "compile s",
    "error vs eager",
    "error vs bf16",
    "quantization error",
    "fused GEMMs",
)


def show(rows: Sequence[Row]) -> None:
    lines = []
    for row in rows:
        for i, (name, reply) in enumerate(row["systems"].items()):
            lines.append([label(row) if i == 0 else "", name, *cells(reply, row["case"])])
    show_table("whole models", COLUMNS, lines)
    show_ratios([with_best_bf16(row) for row in rows], label)
    profiled = list(profiles(rows))
    for title, reply in profiled:
        show_profile(title, reply)
    if profiled:
        kinds = [(title, by_kind(reply)) for title, reply in profiled]
        lines = [[title, *(f"{ms:.3f}" for ms in of.values())] for title, of in kinds]
        show_table("milliseconds of one call", ("", *kinds[0][1]), lines)


def profiles(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    for row in rows:
        for name, reply in row["systems"].items():
            if "kernels" in reply:
                yield f"{label(row)}: {name}", reply


def show_profile(title: str, reply: Row, most: int = 16) -> None:
    kernels = [
        (name[:90], str(n), f"{1e3 * ms / n:.1f}", f"{ms:.3f}") for name, n, ms in reply["kernels"]
    ]
    rest = reply["kernels"][most:]
    lines = kernels[:most]
    lines.append(
        (f"{len(rest)} others", str(sum(k[1] for k in rest)), "", f"{sum(k[2] for k in rest):.3f}")
    )
    lines.append(
        ("all kernels", str(sum(k[1] for k in reply["kernels"])), "", f"{reply['busy_ms']:.3f}")
    )
    lines.append(("between kernels", "", "", f"{reply['gaps_ms']:.3f}"))
    show_table(f"{title}: kernels of one call", ("kernel", "launches", "us each", "ms"), lines)


def run(options: argparse.Namespace, names: list[str], cache: str) -> list[Row]:
    """The rows of the models. Measures rows missing in the file until the budget is spent."""
    until = time.perf_counter() + options.budget
    cases = [case for model in options.models for case in MODELS.get(model, [model])]
    rows: list[Row] = []
    arguments = ("--device", options.device, "--cache", cache)
    with open_systems(names, WORKER, *arguments) as systems:
        machine = systems[0].ask(do="machine")
        if "failed" in machine:
            raise SystemExit(f"{names[0]} does not start: {machine['failed']}")
        print(", ".join(machine.values()), flush=True)
        results = Results(options.json, {"machine": machine}, KEY)
        for case in cases:
            request: Row = {"case": case, "quantizer": options.quantizer, "tiny": options.tiny}
            request |= {"per_layer": options.per_layer, "dtype": options.dtype}
            request |= {"layers": options.layers}
            row = results.find({**request, "systems": names})
            left = until - time.perf_counter()
            if row is None and left > 0:
                row = request | measure(
                    systems,
                    request,
                    rounds=options.rounds,
                    unit="ms",
                    limit_s=left + 30,
                    alone=lambda name: options.apart or "autotune" in name,
                )
                for system in systems if options.profile else []:
                    if "ms" in row["systems"][system.name]:
                        row["systems"][system.name] |= system.ask(do="profile")
                results.add(row)
                texts = (
                    f"{name} {cells(reply, case)[0]}" for name, reply in row["systems"].items()
                )
                print(" | ".join([label(row), *texts]), flush=True)
            if row is not None:
                rows.append(row)
    if len(rows) < len(cases):
        print(f"time budget spent: {len(cases) - len(rows)} of {len(cases)} models left out")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    choices = [*MODELS, *CASES]
    parser.add_argument("--models", choices=choices, nargs="+", default=DEFAULT_MODELS)
    parser.add_argument("--systems", nargs="+", default=DEFAULT_SYSTEMS)
    parser.add_argument("--quantizer", choices=QUANTIZERS, default="plain")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--layers", type=int, help="of a model, instead of all")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one call")
    parser.add_argument("--plot", type=Path, help="with --profile: bars of where the time goes")
    parser.add_argument(
        "--per-layer", action="store_true", help="compile each layer, not the model"
    )
    parser.add_argument("--apart", action="store_true", help="compile one system after the other")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=540, help="seconds for measuring")
    parser.add_argument("--json", type=Path, help="file of results; a later run resumes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    options = parser.parse_args()
    if options.quantizer.startswith("torchao") and importlib.util.find_spec("torchao") is None:
        parser.error("torchao is not installed")

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        rows = run(options, options.systems, cache)
    if not rows:
        print("nothing was measured")
        return 1
    show(rows)
    if options.plot:
        from inductor_quant.report import pictures

        bars = {title: by_kind(reply) for title, reply in profiles(rows)}
        pictures.stacked_bars(options.plot, bars, "ms of one call")
    verdicts = list(judge(rows))
    if verdicts:
        show_verdicts(verdicts)
    wrong = [
        f"{label(row)}: {name}"
        for row in rows
        for name, reply in row["systems"].items()
        if reply.get("wrong")
    ]
    print("wrong results: " + ", ".join(wrong) if wrong else "every result is right")
    missing = [
        label(row)
        for row in rows
        for name, reply in row["systems"].items()
        if name.startswith("ours") and "ms" not in reply
    ]
    if missing:
        print("ours does not run: " + ", ".join(missing))
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
