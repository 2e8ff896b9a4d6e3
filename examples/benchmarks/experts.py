"""The experts of mixture-of-experts models, quantized: products, gate and routing of one layer.

    python -m examples.benchmarks.experts                                     # every model
    python -m examples.benchmarks.experts --models qwen3 --formats int4 --tokens 1 64
    python -m examples.benchmarks.experts --published --systems stock vllm --peer-path DIR

``ours`` and ``stock`` compile the same quantized layer, with the plugin and without; ``bf16`` and
``bf16-autotune`` the layer that is not quantized. The forwards are those of ``transformers``:
``batched_mm`` for one token, as its ``generate`` does, else ``grouped_mm``. Rows of ``fp8_block``
are quantized 1 x 128, those of ``w8a8`` to int8 by row. ``--published`` times one product instead,
FP8 in blocks, its rows quantized and sorted before, in the sizes for which DeepGEMM has published
times.

``vllm`` and ``triton_kernels`` are peers written in Triton: vLLM's kernels of experts in the
configuration that it chooses, ``vllm-tuned`` in the fastest of some, and OpenAI's ``matmul_ogs``
as vLLM calls it for MXFP4. They are imported from the folder ``--peer-path`` that contains ``vllm``
(an unpacked wheel of 0.20.0). Their rows are sorted by expert before; that time is not counted.

Each cell is a line of JSON: microseconds, the median of interleaved rounds of CUDA graphs with a
random routing for each call; ``of_X`` the time of ours over that of X; ``difference`` from fp32
products of one expert at a time, as norms; ``peak_mb`` the most memory of a call beyond its weights
and inputs (``dense_mb``: the stacks in bf16); ``products_us`` what the kernels of the products
take in a profile, without routing, gather and sum; ``floor_us`` the least time of the products by
the card's measured bandwidth, for the experts that are hit, and the rate of its datasheet;
``of_floor`` the products' time over it.
``--skew 2`` lets some experts have most of the rows. ``--tiny`` tries the script, also without a
GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from examples.benchmarks.harness import Row, measure, open_systems

WORKER = "examples.benchmarks.workers.experts"


@dataclasses.dataclass(frozen=True)
class Model:
    experts: int
    top_k: int
    hidden: int
    inner: int
    formats: tuple[str, ...] = ("int4", "int8", "fp8_block", "nvfp4", "w8a8")
    is_gpt_oss: bool = False


MODELS = {
    "qwen3": Model(128, 8, 2048, 768),
    "mixtral": Model(8, 2, 4096, 14336),
    "deepseek": Model(256, 8, 7168, 2048),
    "gpt-oss": Model(32, 4, 2880, 2880, ("mxfp4",), is_gpt_oss=True),
}
FORMATS = ("int4", "int8", "fp8_block", "nvfp4", "w8a8", "mxfp4")
OF_8_BIT_ROWS = ("fp8_block", "w8a8")
TOKENS = (1, 16, 64, 256, 4096)
SYSTEMS = ("ours-autotune", "stock", "stock-autotune", "bf16", "bf16-autotune")
PEERS = ("vllm", "vllm-tuned", "triton_kernels")


@dataclasses.dataclass(frozen=True)
class Published:
    """One product with ``each`` rows an expert, and DeepGEMM's figure for it."""

    experts: int
    each: int
    us: float | None = None
    tflops: float | None = None
    n: int = 4096
    k: int = 7168


PUBLISHED = {
    "8x16": Published(8, 16, us=68),  # H200, DeepGEMM's issue 287
    "16x16": Published(16, 16, us=127),  # likewise
    "4x8192": Published(4, 8192, tflops=1381),  # H800, its issue 74
}


def requests(options: argparse.Namespace) -> Iterator[Row]:
    """What each system is to prepare."""
    more = {"skew": options.skew, "tiny": options.tiny}
    if options.published:
        for name, product in PUBLISHED.items():
            each = min(product.each, 32) if options.tiny else product.each
            yield {"model": name, "format": "fp8_block", "tokens": each, **more}
        return
    for name in options.models:
        for format in MODELS[name].formats:
            if not options.formats or format in options.formats:
                for tokens in options.tokens:
                    yield {"model": name, "format": format, "tokens": tokens, **more}


def line(request: Row, found: Row, ceilings: dict[str, list[float]]) -> Row:
    """What is printed of a cell."""
    replies: dict[str, Row] = found["systems"]
    shown = {key: request[key] for key in ("model", "format", "tokens")}
    known = next((reply for reply in replies.values() if "hit" in reply), None)
    if known is not None:
        shown |= {key: round(known[key], 1) for key in ("hit", "weights_mb", "dense_mb")}
        floor = floor_us(request["format"], known["least"], ceilings)
        shown |= {"floor_us": round(floor, 1)} if floor else {}
    for name, reply in replies.items():
        if "us" not in reply:
            shown[f"{name}_failed"] = reply.get("failed", "not timed")
            continue
        us = reply["us"][1]
        shown[f"{name}_us"] = round(us, 1)
        shown[f"{name}_difference"] = round(reply["difference"], 4)
        if reply.get("products_us") is not None:
            shown[f"{name}_products_us"] = round(reply["products_us"], 1)
        if reply["peak_mb"] is not None:
            shown[f"{name}_peak_mb"] = round(reply["peak_mb"], 1)
        if request["model"] in PUBLISHED:
            operations = sum(each for _, each in reply["least"])
            shown[f"{name}_tflops"] = round(operations / us / 1e6, 1)
        if "config" in reply:  # a peer's
            shown[f"{name}_config"] = reply["config"]
    if shown.get("floor_us") and "ours_products_us" in shown:
        shown["of_floor"] = round(shown["ours_products_us"] / shown["floor_us"], 2)
    for pair, (_, median, _) in found["ratios"].items():
        if pair.startswith("ours/"):
            shown[f"of_{pair.removeprefix('ours/')}"] = round(median, 3)
    if request["model"] in PUBLISHED:
        product = PUBLISHED[request["model"]]
        figures = {"published_us": product.us, "published_tflops": product.tflops}
        shown |= {key: value for key, value in figures.items() if value is not None}
    return shown


def floor_us(format: str, least: list[list[float]], ceilings: dict[str, list[float]]) -> float:
    """0 where the card's rates are not known."""
    if not ceilings:
        return 0.0
    bandwidth, rate = ceilings["8 bits" if format in OF_8_BIT_ROWS else "16 bits"]
    return 1e6 * sum(max(moved / bandwidth, count / rate) for moved, count in least)


def run(options: argparse.Namespace) -> None:
    arguments = ["--device", options.device]
    if options.peer_path is not None:
        arguments += ["--peer-path", str(options.peer_path.resolve())]
    with open_systems(["ours", *options.systems], WORKER, *arguments) as systems:
        for what in ("machine", "ceilings"):
            reply = systems[0].ask(do=what)
            if "failed" in reply:
                raise SystemExit(f"ours does not start: {reply['failed']}")
            print(json.dumps(reply), flush=True)
        for request in requests(options):
            found = measure(
                systems,
                request,
                rounds=options.rounds,
                limit_s=options.limit,
                alone=lambda name: name.endswith(("autotune", "tuned")),
            )
            for system in systems:
                if "us" in found["systems"][system.name]:
                    found["systems"][system.name] |= system.ask(do="profile")
            print(json.dumps(line(request, found, reply)), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--published", action="store_true", help="DeepGEMM's sizes, no models")
    parser.add_argument("--formats", nargs="+", choices=FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument(
        "--systems", nargs="*", choices=[*SYSTEMS, *PEERS], default=["stock", "bf16"]
    )
    parser.add_argument("--peer-path", type=Path, metavar="DIR", help="contains vllm/")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--limit", type=float, default=600, help="seconds to prepare a cell")
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
