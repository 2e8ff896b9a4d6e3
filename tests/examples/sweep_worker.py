"""A worker process of a sweep, without torch: "default" takes 6 us, ``FAST`` 4; one is wrong."""

from __future__ import annotations

from examples.benchmarks.harness import serve

FAST = "w8a8_mm 64x64x128_w4_s4_g8"
US = {"w8a8_mm 32x64x128_w4_s4_g8": 6.0, FAST: 4.0, "w8a8_mm 64x32x128_w4_s4_g8": 4.1}
NAMES = list(US)
MACHINE = {"gpu": "H200", "torch": "2", "triton": "3", "date": "today", "arch": 90, "num_sms": 132}


def compile_one(case, name):
    if name == NAMES[2] and case[1] == 64:
        return {"failed": "wrong: relative RMS error 1"}
    return {"chosen": NAMES[0] if name in ("default", "max-autotune") else name}


if __name__ == "__main__":
    serve(
        {
            "machine": lambda: MACHINE,
            "describe": lambda case, name: compile_one(case, name) | {"choices": NAMES},
            "compile": compile_one,
            "time": lambda case, names: {name: US.get(name, 6.0) for name in names},
            "forget": dict,
        }
    )
