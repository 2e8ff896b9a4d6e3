"""What tests of the benchmarks share: the path to them, and a worker that needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

# A worker without torch: "ours" takes 2 us, the others 4; some of them misbehave.
WORKER = f"""
import os, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
from bench_systems import NotMeasured, serve

name = sys.argv[1]
prepared = 0

def prepare(**request):
    global prepared
    prepared += 1
    print("noise")
    os.system("echo noise")
    if name == "raises" or request.get("m") == 13:
        raise ValueError("no such shape\\nand more")
    if name == "dies":
        print("out of memory", file=sys.stderr)
        os._exit(1)
    if name == "hangs":
        time.sleep(60)
    if name == "lacks":
        raise NotMeasured("give a file")
    return {{"error_rms": 0.0, "wrong": name == "wrong", "prepared": prepared}}

serve({{
    "prepare": prepare,
    "time": lambda: {{"us": 2.0 if name.startswith("ours") else 4.0}},
    "machine": lambda: {{"gpu": "none", "torch": "none"}},
    "ceilings": lambda: {{"read_tbps": 1.0, "int8_tops": 1.0, "bf16_tflops": 1.0}},
}})
"""


def run_main(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", ["prog", *map(str, arguments)])
    return module.main()
