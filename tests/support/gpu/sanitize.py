"""compute-sanitizer over a GEMM of odd sizes for each kernel, and the same bits again and again.

    python -m tests.support.gpu.sanitize                # every kernel, every tool; needs sm_90
    python -m tests.support.gpu.sanitize racecheck --kernels w8a8_mm

``values`` is no tool of its: every element against fp64, then 1,000 repetitions beside another
stream's products, all of the same bits. The others check Triton's kernels alone, each tensor in
memory of its own. Exit code 1 if anything was found: of racecheck, at a kernel's own lines."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

import inductor_quant
from inductor_quant.kernels import dispatch
from tests.support.gemms import each_kernel, formats
from tests.support.gpu import racecheck

VALUES = "values"
RACECHECK = "racecheck"
TOOLS = (VALUES, "memcheck", RACECHECK, "synccheck")
REPETITIONS = 1000
SANITIZER = (
    "compute-sanitizer",
    *("--target-processes", "application-only", "--kernel-name", "kns=triton_"),
    *("--error-exitcode", "9", "--launch-timeout", "120"),
)


def compiled(name: str) -> tuple[Callable[[], torch.Tensor], tuple[object, ...]]:
    """A call of the kernel on the inputs, which are given too."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    case = each_kernel.GEMMS[name]
    inputs = each_kernel.on_gpu(case)
    fn = torch.compile(
        each_kernel.parts(case)[0],
        backend="inductor_quant",
        dynamic=False,
        options={"inductor_quant.on_error": "raise"},
    )
    return lambda: fn(*inputs), inputs


def differing(call: Callable[[], torch.Tensor], count: int = REPETITIONS) -> int:
    """How many of ``count`` calls give other bits than the first, beside another stream's load."""
    first = call()
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32}[first.itemsize]
    other, load = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", dtype=torch.float16)
    busy = torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
    found = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for i in range(count):
        with torch.cuda.stream(other):
            if i % 3:
                load @ load
            else:
                busy.random_()
        found += (call().view(words) != first.view(words)).any()
    torch.cuda.synchronize()
    return int(found)


def check(name: str) -> str:
    """What is wrong with the kernel's values; "": nothing."""
    with inductor_quant.collect() as report:
        call, inputs = compiled(name)
        got = call()
    chosen = [choice.chosen for choice in report.kernels]
    wanted = dispatch.DEQUANTIZE_THEN_MM if name == dispatch.DEQUANTIZE else f"{name} "
    if chosen and not any(each.startswith(wanted) for each in chosen):
        return f"computed by {chosen}"
    try:
        each_kernel.assert_right(got, each_kernel.GEMMS[name], inputs)
    except AssertionError as error:
        return f"wrong: {error}"
    count = differing(call)
    return f"{count} of {REPETITIONS} repetitions differ" if count else ""


def child(tool: str, names: list[str]) -> int:
    """Runs the kernels in this process; how many failed."""
    formats.GROUP = each_kernel.GROUP
    failures = 0
    for name in names:
        start = time.perf_counter()
        try:
            if tool == VALUES:
                found = check(name)
            else:
                call, _ = compiled(name)
                call()
                call()
                torch.cuda.synchronize()
                found = ""
        except Exception as error:
            found = repr(error)[:2000]
        failures += bool(found)
        took = time.perf_counter() - start
        print(f"KERNEL {name} {found or 'ok'} ({took:.1f} s)", flush=True)
    return failures


def run(tool: str, names: list[str], limit: float) -> tuple[int, str]:
    """Exit code and output of a process with these kernels under the tool."""
    module = "tests.support.gpu.sanitize"
    command = [sys.executable, "-m", module, tool, "--child", "--kernels", *names]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if tool != VALUES:
        # racecheck reports each pair of accesses, of which Triton's own are many
        limit_of_reports = "100000" if tool == RACECHECK else "20"
        options = [*SANITIZER[1:], "--print-limit", limit_of_reports]
        command = [SANITIZER[0], "--tool", tool, *options, *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        text, _ = process.communicate()
        timer.cancel()
    if tool == RACECHECK:
        count, own = racecheck.own_hazards(text, Path(cache_dir()))
        kernels = [line for line in text.splitlines() if line.startswith("KERNEL")]
        other = racecheck.other_errors(text)
        text = "\n".join(
            [*kernels, *own, *other, f"{count} reports, {len(own)} of the kernels' own lines"]
        )
        is_whole = sum(" ok (" in line for line in kernels) == len(names)
        # The exit code is explained by the reports, if there are any, and nothing else went wrong.
        is_explained = (count > 0 and not other) or process.returncode == 0
        return 0 if is_whole and is_explained and not own else process.returncode or 1, text
    return process.returncode, text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=" ".join(TOOLS))
    parser.add_argument("--kernels", nargs="+", choices=each_kernel.GEMMS)
    parser.add_argument("--jobs", type=int, default=4, help="processes at once")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tools, names = options.tools or list(TOOLS), options.kernels or list(each_kernel.GEMMS)
    if options.child:
        return min(child(tools[0], names), 99)
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    # Each begins elsewhere: what one has compiled the others find in the caches.
    step = len(names) // len(tools)
    parts = [names[i * step :] + names[: i * step] for i in range(len(tools))]
    failures = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(run, tools, parts, [options.limit] * len(tools))
        for tool, (code, text) in zip(tools, found, strict=True):
            failures += code != 0
            print(f"\n{tool}: {'ok' if code == 0 else f'FOUND SOMETHING (exit code {code})'}")
            print(text, flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
