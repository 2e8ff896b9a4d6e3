"""A model exported, compiled ahead of time and run by a process that knows nothing of us.

python -m tests.support.exported FOLDER        exports and compiles, writes what is expected
python FOLDER/run.py FOLDER                    loads the packages and runs them
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Runs without a path to this repository.
RUN = """
import sys
from pathlib import Path
import torch

folder = Path(sys.argv[1])
for package in sorted(folder.glob("*.pt2")):
    inputs, expected = torch.load(package.with_suffix(".pt"))
    loaded = torch._inductor.aoti_load_package(str(package))
    for x, y in zip(inputs, expected):
        got = loaded(x)
        error = (got.double() - y.double()).abs().max().item()
        print(package.stem, tuple(x.shape), "equal" if torch.equal(got, y) else f"off by {error}")
assert not [name for name in sys.modules if name.startswith("inductor_quant")]
"""


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
    """Packages for ``rows`` of input each; the number of GEMMs matched in each."""
    import inductor_quant

    (folder / "run.py").write_text(RUN)
    matched = {}
    for name, module in models().items():
        module = module.to(device).eval().requires_grad_(False)
        dtype = torch.bfloat16 if name == "w8a8" else torch.float16
        for m in rows:
            x = torch.randn(m, 256, dtype=dtype, device=device)
            torch._dynamo.reset()
            with torch.no_grad():
                compiled = torch.compile(module, backend="inductor_quant", dynamic=False)
                expected = compiled(x)
                program = torch.export.export(module, (x,))
                with inductor_quant.enabled(on_error="raise"), inductor_quant.collect() as report:
                    package: Any = folder / f"{name}_{m}.pt2"
                    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
            torch.save(([x], [expected]), folder / f"{name}_{m}.pt")
            matched[f"{name}_{m}"] = len(report.matches)
    return matched


if __name__ == "__main__":
    print(export(Path(sys.argv[1]), (1, 16, 2048), "cuda"))
