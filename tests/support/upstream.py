"""Other projects' tests, run with this package enabled beside a run without it.

    python -m tests.support.upstream DIR --suite torchao -- -n 4    # DIR: a checkout of pytorch/ao
    python -m tests.support.upstream DIR --suite torch              # of pytorch/pytorch
    python -m tests.support.upstream DIR --tests test/inductor/test_fp8.py -- -k rowwise

The tag must be that of the installed version. What follows ``--`` is for pytest. Each test whose
outcome differs is printed with its message, and how many tests had a product that was rewritten.
Exit code 1 if a test fails with this package and not without it, or ran in one run alone, or none
ran. Also the pytest plugin of both runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import inductor_quant

_WORKFLOWS = "test/quantization/quantize_/workflows"
SUITES = {
    "torchao": (
        "test/integration/test_integration.py",
        f"{_WORKFLOWS}/float8/test_float8_tensor.py",
        f"{_WORKFLOWS}/int4/test_int4_tile_packed_to_4d_tensor.py",
        f"{_WORKFLOWS}/int8/test_int8_tensor.py",
        f"{_WORKFLOWS}/intx/test_intx_unpacked_to_int8_tensor.py",
    ),
    "torch": (
        "test/inductor/test_pattern_matcher.py",
        "test/inductor/test_fp8.py",
        "test/inductor/test_cuda_select_algorithm.py",
    ),
}
ROOT = Path(__file__).parents[2]
WITHOUT, WITH = "without", "with"
_RUN, _FILE = "INDUCTOR_QUANT_UPSTREAM_RUN", "INDUCTOR_QUANT_UPSTREAM_FILE"
Outcome = tuple[str, str, int]  # passed, failed or skipped; the message; how many matches


def pytest_configure() -> None:
    if os.environ.get(_RUN) == WITH:
        inductor_quant.enable(on_error="raise")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with inductor_quant.collect() as report:
        try:
            yield
        finally:
            item.user_properties.append(("matches", len(report.matches)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test, at once: what has run before a process is killed counts."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    matches = dict(report.user_properties).get("matches", 0)
    with open(os.environ[_FILE], "a") as file:
        print(json.dumps([report.nodeid, report.outcome, report.longreprtext, matches]), file=file)


def start(run: str, checkout: Path, folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """pytest in ``checkout``; its outcomes go to ``folder``, with caches of its own."""
    environment = {
        **os.environ,
        _RUN: run,
        _FILE: str(folder / f"{run}.jsonl"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / run / "inductor"),
        "TRITON_CACHE_DIR": str(folder / run / "triton"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", __spec__.name]
    command += ["-p", "no:cacheprovider", "-p", "no:logging", "-c", os.devnull, "--rootdir", "."]
    with open(folder / f"{run}.log", "wb") as log:
        return subprocess.Popen(
            command + arguments,
            cwd=checkout,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def outcomes(folder: Path, run: str) -> dict[str, Outcome]:
    """By test id; of a test that also failed in its teardown, that."""
    file = folder / f"{run}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {
        name: (outcome, text, matches) for name, outcome, text, matches in map(json.loads, lines)
    }


def compare(without: dict[str, Outcome], ours: dict[str, Outcome]) -> tuple[list[str], bool]:
    """What to print, and whether a test is ours to explain."""
    lines, failures = [], 0
    missing: Outcome = ("not run", "", 0)
    for name in sorted(without.keys() | ours.keys()):
        before, after = without.get(name, missing), ours.get(name, missing)
        if before[0] != after[0]:
            failures += after[0] == "failed" or missing in (before, after)
            lines.append(f"{name}: {before[0]} without, {after[0]} with\n{before[1]}{after[1]}")
    for title, run in ((WITHOUT, without), (WITH, ours)):
        lines.append(f"{title}: {dict(Counter(outcome for outcome, _, _ in run.values()))}")
    matched = [matches for _, _, matches in ours.values() if matches]
    lines.append(f"{sum(matched)} products were rewritten, in {len(matched)} tests")
    lines.append(f"{failures} failed with this package only, or ran in one run only")
    return lines, failures > 0 or not ours


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--suite", choices=SUITES)
    parser.add_argument("--tests", nargs="+", default=[], help="files or ids, from the checkout")
    parser.add_argument("--out", type=Path, help="folder for logs and outcomes, one object a line")
    parser.add_argument("--limit", type=float, help="seconds, after which what has run counts")
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    tests = [*SUITES.get(options.suite, ()), *options.tests]
    if not tests:
        parser.error("give --suite or --tests")
    folder = options.out or Path(tempfile.mkdtemp(prefix="inductor_quant_upstream_"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    arguments: list[Any] = [*tests, *argv[split + 1 :]]
    for run in (WITHOUT, WITH):
        (folder / f"{run}.jsonl").unlink(missing_ok=True)
    processes = [start(run, options.checkout, folder, arguments) for run in (WITHOUT, WITH)]
    for process in processes:
        try:
            process.wait(options.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines, is_different = compare(outcomes(folder, WITHOUT), outcomes(folder, WITH))
    print("\n".join([*lines, f"logs: {folder}"]))
    return int(is_different)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
