"""Shared by the tests of the benchmarks: ``run_main``, and a worker process without torch.

As a worker (``WORKER``) "ours" takes 2 us and every other system 4 us; some systems misbehave."""

from __future__ import annotations

import os
import sys
import time

from examples.benchmarks.harness import NotMeasured, serve

WORKER = "tests.support.benchmarks"


def run_main(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", ["prog", *map(str, arguments)])
    return module.main()


def main() -> None:
    name = sys.argv[1]
    prepared = 0

    def prepare(**request):
        nonlocal prepared
        prepared += 1
        print("noise")
        os.system("echo noise")
        if name == "raises" or request.get("m") == 13:
            raise ValueError("no such shape\nand more")
        if name == "dies":
            print("out of memory", file=sys.stderr)
            os._exit(1)
        if name == "hangs":
            time.sleep(60)
        if name == "lacks":
            raise NotMeasured("give a file")
        return {"error_rms": 0.0, "wrong": name == "wrong", "prepared": prepared}

    serve(
        {
            "prepare": prepare,
            "time": lambda cell=0: {"us": 2.0 if name.startswith("ours") else 4.0},
            "machine": lambda: {"gpu": "none", "torch": "none"},
            "ceilings": lambda: {"read_tbps": 1.0, "int8_tops": 1.0, "bf16_tflops": 1.0},
        }
    )


if __name__ == "__main__":
    main()
