"""A model exported, compiled ahead of time and run by a process that knows nothing of us.

python -m tests.support.exported FOLDER        exports and compiles, writes what is expected
python FOLDER/run.py FOLDER                    loads the packages and runs them
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inductor_quant.backend import enabled
from inductor_quant.report import collect

# Runs without a path to this repository: PACKAGE.pt2 with the inputs and results in PACKAGE.pt.
RUN = """
import sys
import torch
import torch._inductor

package = sys.argv[1]
x, y = torch.load(package.removesuffix("2"))
got = torch._inductor.aoti_load_package(package)(x)
error = (got.double() - y.double()).norm() / y.double().norm()
print("equal" if torch.equal(got, y) else f"off by {error}")
ours = [name for name in sys.modules if name.split(".")[0] in ("inductor_quant", "triton")]
assert "inductor_quant" not in ours, ours
"""


def run(packages: list[Path]) -> dict[str, tuple[int, str]]:
    """What a process of its own prints for each package, with its exit status."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    processes = {
        package.stem: subprocess.Popen(
            [sys.executable, "-c", RUN, str(package)],
            cwd=package.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for package in packages
    }
    found = {}
    for name, process in processes.items():
        try:
            output, _ = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            output = "no answer in 90 seconds"
        lines = output.strip().splitlines() or [""]
        found[name] = (process.wait(), lines[-1])
    return found


def models() -> dict[str, nn.Module]:
    """Two layers each, with what is between them: quantization of the activation, an epilogue."""
    from tests.support.producers import PRODUCERS
    from tests.support.quantizers import GptFastLinear

    torch.manual_seed(0)
    gptq = PRODUCERS["gptq_gm_4b_g64_base"]
    return {
        "w8a8": nn.Sequential(GptFastLinear(256, 512), nn.GELU(), GptFastLinear(512, 256)),
        "gptq": nn.Sequential(
            gptq.make(torch.float16, 256, 512), nn.GELU(), gptq.make(torch.float16, 512, 256)
        ),
        "act_order": PRODUCERS["gptq_4b_act_order"].make(torch.float16, 256, 512),
    }


def export(folder: Path, rows: tuple[int, ...], device: str) -> dict[str, int]:
    """Packages for ``rows`` of input each, beside what torch.compile gives; the number of GEMMs
    matched in each. On a GPU, ``plain_*`` has no quantized weight and knows nothing of the plugin.
    """
    matched, modules = {}, models()
    if device == "cuda":
        modules["plain"] = nn.Sequential(nn.Linear(256, 512), nn.GELU()).half()
    for name, module in modules.items():
        module = module.to(device).eval().requires_grad_(False)
        dtype = torch.bfloat16 if name == "w8a8" else torch.float16
        for m in rows:
            x = torch.randn(m, 256, dtype=dtype, device=device)
            torch._dynamo.reset()
            package: Any = folder / f"{name}_{m}.pt2"
            backend = "inductor" if name == "plain" else "inductor_quant"
            scope = contextlib.nullcontext() if name == "plain" else enabled(on_error="raise")
            with torch.no_grad(), collect() as report:
                expected = torch.compile(module, backend=backend, dynamic=False)(x)
                report.decisions.clear()
                with scope:
                    program = torch.export.export(module, (x,))
                    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
            torch.save((x, expected), package.with_suffix(".pt"))
            matched[package.stem] = len(report.matches)
    return matched
