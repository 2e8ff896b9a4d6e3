"""What it costs to use: the first call with cold and warm caches, imports, the host time of a call.

    python -m examples.benchmarks.costs                          # every model and format; a GPU
    python -m examples.benchmarks.costs --models mlp --formats int8

Ours beside stock, each in processes of their own with caches of their own: the first finds them
empty, the second finds what the first left. The first call includes Dynamo, Inductor and Triton,
not the imports. The host time is that of calls which do not wait for the GPU. Widths are small,
since the host's time does not depend on them. ``--tiny`` tries the script, also without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = ("llama", "vit", "mlp")
FORMATS = ("int8", "int4", "none")
SYSTEMS = ("stock", "ours")
COLD, WARM, HOST_US = 1.25, 1.1, 2.0  # targets: ratios to stock, microseconds more than stock
CALLS = 200


def build(model: str, format: str, device: str, *, tiny: bool) -> tuple[Any, Any]:
    """(model in bf16, its input)."""
    import torch
    from torch import nn

    from examples.benchmarks.workers import architectures, quantizers, serving

    class Mlp(nn.Module):
        def __init__(self, hidden: int, layers: int) -> None:
            super().__init__()
            blocks = (serving.SwiGLU(hidden, 2 * hidden) for _ in range(layers))
            self.layers = nn.Sequential(*blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    class Decoding(nn.Module):
        """A token of each of 32 sequences."""

        def __init__(self, config: serving.LlamaConfig) -> None:
            super().__init__()
            self.model = serving.ServedLlama(config, 64)
            self.cache = self.model.cache(32)
            self.at = torch.full((32,), 63)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids, self.cache, self.at, lambda layer, *inputs: layer(*inputs))

    class Block(nn.Module):
        """A layer of a ViT."""

        def __init__(self, hidden: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shape = (*x.shape[:2], 3, self.heads, -1)
            q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.proj(attended.transpose(1, 2).flatten(2))
            return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))

    layers = 1 if tiny else 8
    hidden = 128 if tiny else 1024
    made: nn.Module
    with architectures.construction(device, torch.bfloat16):
        if model == "llama":
            sizes = (hidden, 2 * hidden, layers, hidden // 128, 1, 128, 1000)
            made = architectures.init(Decoding(serving.LlamaConfig(*sizes)))
            x = torch.zeros(32, 1, dtype=torch.int64)
        elif model == "vit":
            made = architectures.init(
                nn.Sequential(*(Block(hidden, hidden // 64) for _ in range(layers)))
            )
            x = torch.randn(2, 197, hidden)
        else:
            made = architectures.init(Mlp(hidden, min(layers, 2)))
            x = torch.randn(32, hidden)
        if format != "none":
            quantizers.QUANTIZERS["plain" if format == "int8" else format](made)
    return made, x


def measure(model: str, format: str, system: str, *, tiny: bool = False) -> dict[str, float]:
    """One process: seconds of imports and of the first call, microseconds of the host a call."""
    start = time.perf_counter()
    import torch
    from torch._inductor import compile_fx, metrics  # noqa: F401, TID251

    torch_seconds = time.perf_counter() - start
    start = time.perf_counter()
    backend: Any = "inductor"
    if system == "ours":
        from inductor_quant.backend import inductor_quant_backend as backend
    import_seconds = time.perf_counter() - start
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made, x = build(model, format, device, tiny=tiny)
    with torch.no_grad():
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        compiled = torch.compile(made, backend=backend)
        compiled(x)
        wait()
        first_seconds = time.perf_counter() - start
        times = []
        for _ in range(1 if tiny else 5):
            wait()
            start = time.perf_counter()
            for _ in range(1 if tiny else CALLS):
                compiled(x)
            times.append((time.perf_counter() - start) / CALLS)
    return {
        "torch_s": torch_seconds,
        "import_s": import_seconds,
        "first_s": first_seconds,
        "host_us": 1e6 * min(times),
        "kernels": metrics.generated_kernel_count,
    }


def in_process(arguments: list[str], cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "examples.benchmarks.costs", "--child", *arguments]
    caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **caches}, check=False
    )
    if done.returncode:
        raise SystemExit(f"{arguments}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child, tiny=options.tiny)))
        return
    print("seconds of the first call, cold and warm; us of the host a call; stock / ours / ratio")
    results = []
    for model in options.models:
        for format in options.formats:
            runs: dict[str, dict[str, dict[str, float]]] = {}
            for system in SYSTEMS:
                arguments = [model, format, system, *(["--tiny"] if options.tiny else [])]
                with tempfile.TemporaryDirectory() as cache:
                    runs[system] = {when: in_process(arguments, cache) for when in ("cold", "warm")}
            stock, ours = (runs[system] for system in SYSTEMS)
            line = f"{model:<6} {format:<5}"
            for when, most in (("cold", COLD), ("warm", WARM)):
                s, o = stock[when]["first_s"], ours[when]["first_s"]
                missed = " MISSED" if o > most * s else ""
                line += f"  {when} {s:6.2f} {o:6.2f} {o / s:5.2f}{missed}"
            s, o = (min(run[when]["host_us"] for when in run) for run in (stock, ours))
            line += f"  host {s:7.1f} {o:7.1f} {o - s:+6.1f}{' MISSED' if o > s + HOST_US else ''}"
            line += f"  import {ours['warm']['import_s']:.2f} (torch {ours['warm']['torch_s']:.2f})"
            print(f"{line}  kernels {stock['cold']['kernels']:.0f} {ours['cold']['kernels']:.0f}")
            sys.stdout.flush()
            results.append({"model": model, "format": format, **runs})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
