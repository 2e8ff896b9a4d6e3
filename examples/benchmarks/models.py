"""Time whole compiled models against stock compile and bf16: real sizes, random weights.

    python -m examples.benchmarks.models --models sam --json models.json
    python -m examples.benchmarks.models --models llama-decode llama-prefill deepseek --budget 580
    python -m examples.benchmarks.models --models llama-decode-1 llama-decode-16 --quantizer int4 \\
        --per-layer --systems ours bf16 --profile

Models: SAM's ViT-H image encoder (batch 16, 1024x1024), Llama-3-8B decode (batch 1, 16 and 64 after
1023 tokens), Llama-3-8B prefill of 4096 tokens, a layer of DeepSeek-V3 with 64 and 4096 tokens.

Every nn.Linear but lm_head is quantized (examples.benchmarks.workers.quantizers):
  plain      int8, per_channel weights, dynamic per_token activations, in plain PyTorch
  int4       int4 weights in groups of 128, GPTQ's layout
  fp8_block  FP8 weights and activations in DeepSeek-V3's blocks
  torchao    int8 as in plain, by torchao
--dtype fp16 replaces bf16 by fp16. --profile adds the kernels of one call. Models in ``TARGETS``
get a verdict against the faster of the bf16 systems.

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
MODELS = {
    "sam": ["sam"],
    "llama-decode": ["llama-decode-1", "llama-decode-16", "llama-decode-64"],
    "llama-prefill": ["llama-prefill"],
    "deepseek": ["deepseek-64", "deepseek"],
}
QUANTIZERS = ("plain", "int4", "fp8_block", "torchao")
DEFAULT_SYSTEMS = ["ours", "stock", "bf16", "bf16-autotune"]
BEST_BF16 = "bf16 (best)"


@dataclasses.dataclass(frozen=True)
class Target:
    """Ours / the faster bf16 system <= ``limit``, for ms, peak_gb or weights_gb of the reply."""

    case: str
    quantizer: str
    limit: float
    quantity: str = "ms"


TARGETS = (
    Target("sam", "plain", 0.885),
    Target("sam", "plain", 0.94, "peak_gb"),
    Target("llama-decode-1", "int4", 1 / 2.0),  # twice the tokens a second
    Target("llama-decode-16", "int4", 1 / 1.6),
    Target("llama-decode-1", "int4", 0.37, "weights_gb"),
    Target("llama-decode-16", "int4", 0.37, "weights_gb"),
    Target("deepseek", "fp8_block", 0.77),
    Target("deepseek-64", "fp8_block", 0.77),
)
CASES = sorted({case for cases in MODELS.values() for case in cases} - set(MODELS))


def label(row: Row) -> str:
    parts = [row["case"]]
    parts += [row["dtype"]] if row["dtype"] != "bf16" else []
    parts += [row["quantizer"]] if row["quantizer"] != "plain" else []
    parts += ["per layer"] if row["per_layer"] else []
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
        baselines = [name for name in timed if name.startswith("bf16")]
        for target in TARGETS:
            if (target.case, target.quantizer) != (row["case"], row["quantizer"]):
                continue
            what = f"{target.quantity} <= {target.limit:.3g} x {BEST_BF16}"
            if "ours" not in timed or not baselines:
                lacking = ", ".join(n for n in ("ours", "bf16") if n not in timed)
                yield Verdict(what, None, f"without {lacking}", label(row))
                continue
            best = min(baselines, key=lambda name: timed[name]["ms"][1])
            if target.quantity == "ms":
                low, ratio, high = row["ratios"][f"ours/{best}"]
                detail = f"{ratio:.3f} [{low:.3f}, {high:.3f}] of {best}"
            else:
                ratio = timed["ours"][target.quantity] / timed[best][target.quantity]
                detail = f"{ratio:.3f} of {best}"
            is_wrong = timed["ours"]["wrong"]
            detail += ", WRONG" if is_wrong else ""
            yield Verdict(what, ratio <= target.limit and not is_wrong, detail, label(row))


def tokens_per_second(case: str, milliseconds: float) -> str:
    """Throughput of a decode step, one token per sequence of the batch; "-" for other models."""
    name, _, batch = case.rpartition("-")
    return f"{1000 * int(batch) / milliseconds:.0f}" if name == "llama-decode" else "-"


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
    for row in rows:
        for name, reply in row["systems"].items():
            if "kernels" in reply:
                show_profile(f"{label(row)}: {name}", reply)


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
        results = Results(
            options.json, {"machine": machine}, ("case", "quantizer", "per_layer", "tiny", "dtype")
        )
        for case in cases:
            request: Row = {"case": case, "quantizer": options.quantizer, "tiny": options.tiny}
            request |= {"per_layer": options.per_layer, "dtype": options.dtype}
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
    parser.add_argument("--models", choices=choices, nargs="+", default=list(MODELS))
    parser.add_argument("--systems", nargs="+", default=DEFAULT_SYSTEMS)
    parser.add_argument("--quantizer", choices=QUANTIZERS, default="plain")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one call")
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
    if options.quantizer == "torchao" and importlib.util.find_spec("torchao") is None:
        parser.error("torchao is not installed")

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        rows = run(options, options.systems, cache)
    if not rows:
        print("nothing was measured")
        return 1
    show(rows)
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
