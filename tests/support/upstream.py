"""Other projects' tests with this package enabled; those that fail run again with and without it.

    python -m tests.support.upstream DIR --suite torchao -- -n 4    # DIR: a checkout of pytorch/ao
    python -m tests.support.upstream DIR --suite torch              # of pytorch/pytorch
    python -m tests.support.upstream DIR --tests test/inductor/test_fp8.py -- -k rowwise

The tag must be that of the installed version. What follows ``--`` is for pytest. Each test that
fails with this package and passes without it is printed with its message; at the end, how often
each reason occurs, and how many tests had a product that was rewritten. Exit code 1 if there is
such a test, if a test that was collected has no outcome, or if none ran. Also the pytest plugin of
each run.

``--out`` keeps, for each run, the log, JUnit XML and a JSON line for each test, which ends with its
seconds. ``--max-choices`` limits what max-autotune compiles and times for a product: of ours, and
of each template of Inductor, which has about 110 for an FP8 product on an H100."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config

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
WITH, AGAIN, WITHOUT = "with", "again", "without"
SECOND_ROUND = 0.25  # of the budget
_RUN, _FOLDER = "INDUCTOR_QUANT_UPSTREAM_RUN", "INDUCTOR_QUANT_UPSTREAM_FOLDER"
_OPTIONS = "INDUCTOR_QUANT_UPSTREAM_OPTIONS"
_WORKER = "PYTEST_XDIST_WORKER"
Outcome = tuple[str, str, int]  # passed, failed or skipped; the message; how many matches
MISSING: Outcome = ("not run", "", 0)
_precision: dict[Path, str] = {}  # of fp32 products, for the tests of a file


def pytest_configure() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # pytest then writes what it has
    options = json.loads(os.environ.get(_OPTIONS, "{}"))
    torch._inductor.config.test_configs.max_mm_configs = options.get("max_choices")
    if os.environ.get(_RUN) in (WITH, AGAIN):
        inductor_quant.enable(on_error="raise", **options)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """What a file sets while it is imported holds for its own tests alone: test_fp8 allows TF32, by
    which products of the other files then differ from eager mode."""
    torch.set_float32_matmul_precision("highest")
    try:
        return (yield)
    finally:
        if isinstance(collector, pytest.Module):
            _precision[collector.path] = torch.get_float32_matmul_precision()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.set_float32_matmul_precision(_precision.get(item.path, "highest"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    run, folder = os.environ[_RUN], Path(os.environ[_FOLDER])
    if run != WITH:
        failed = {name for name, outcome in outcomes(folder, WITH).items() if is_failure(outcome)}
        items[:] = [item for item in items if item.nodeid in failed]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Every worker collects the same tests, and the process that starts them none."""
    if session.items and os.environ.get(_WORKER, "gw0") == "gw0":
        names = "".join(f"{item.nodeid}\n" for item in session.items)
        Path(os.environ[_FOLDER], f"{os.environ[_RUN]}.collected").write_text(names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with inductor_quant.collect() as report:
        try:
            yield
        finally:
            item.user_properties.append(("matches", len(report.matches)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test, at once: what has run before a process is killed counts."""
    if _WORKER in os.environ or (report.when != "call" and report.passed):
        return
    matches = dict(report.user_properties).get("matches", 0)
    with open(Path(os.environ[_FOLDER], f"{os.environ[_RUN]}.jsonl"), "a") as file:
        line = [report.nodeid, report.outcome, report.longreprtext, matches, report.duration]
        print(json.dumps(line), file=file)


def uses_workers(arguments: list[str]) -> bool:
    return any(argument.startswith(("-n", "--numprocesses")) for argument in arguments)


def start(
    run: str, checkout: Path, folder: Path, arguments: list[str], options: dict[str, int]
) -> subprocess.Popen[bytes]:
    """pytest in ``checkout``; its outcomes go to ``folder``, with caches of its own.

    ``options`` are fields of ``inductor_quant.Options``."""
    for name in (f"{run}.jsonl", f"{run}.collected", f"{run}.xml"):
        (folder / name).unlink(missing_ok=True)
    environment = {
        **os.environ,
        _RUN: run,
        _FOLDER: str(folder),
        _OPTIONS: json.dumps(options),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / run / "inductor"),
        "TRITON_CACHE_DIR": str(folder / run / "triton"),
    }
    if uses_workers(arguments):
        # Otherwise each worker starts a pool of compilers and of threads for all cores.
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", __spec__.name]
    command += ["-p", "no:cacheprovider", "-p", "no:logging", "-c", os.devnull, "--rootdir", "."]
    command += ["--junitxml", str(folder / f"{run}.xml"), *arguments]
    with open(folder / f"{run}.log", "wb") as log:
        return subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def finish(process: subprocess.Popen[bytes], deadline: float | None) -> None:
    """Waits until ``deadline`` (of time.monotonic), then stops the process and its children."""
    try:
        process.wait(None if deadline is None else max(0, deadline - time.monotonic()))
        return
    except subprocess.TimeoutExpired:
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcomes(folder: Path, run: str) -> dict[str, Outcome]:
    """By test id; of a test that also failed in its teardown, that."""
    file = folder / f"{run}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {
        name: (outcome, text, matches) for name, outcome, text, matches, _ in map(json.loads, lines)
    }


def collected(folder: Path, run: str) -> list[str]:
    file = folder / f"{run}.collected"
    return file.read_text().splitlines() if file.exists() else []


def is_failure(outcome: Outcome) -> bool:
    return outcome[0] == "failed"


def reason(message: str) -> str:
    """What was raised, in one line: pytest marks it by ``E``, followed by what torch adds."""
    lines = message.splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E ")), "".join(lines[-1:]))


def verdict(
    names: list[str],
    ours: dict[str, Outcome],
    again: dict[str, Outcome],
    without: dict[str, Outcome],
) -> tuple[list[str], bool]:
    """What to print, and whether a test is ours to explain. ``names``: all that were collected."""
    lines, failed = [], [name for name, outcome in sorted(ours.items()) if is_failure(outcome)]
    to_explain = [name for name in failed if not is_failure(without.get(name, MISSING))]
    for name in to_explain:
        (second, _, _), (before, _, _) = (run.get(name, MISSING) for run in (again, without))
        lines.append(
            f"{name}: failed with, {second} when run again, {before} without\n{ours[name][1]}"
        )
    reasons = Counter(reason(ours[name][1]) for name in to_explain)
    lines += [f"{count} of them: {text}" for text, count in reasons.most_common()]
    not_run = [name for name in names if name not in ours]
    if not_run:
        lines.append(f"{len(not_run)} of {len(names)} were not run, from {not_run[0]} on")
    matched = [matches for _, _, matches in ours.values() if matches]
    lines.append(f"{sum(matched)} products were rewritten, in {len(matched)} tests")
    lines.append(f"{len(failed) - len(to_explain)} fail without this package as well")
    lines.append(f"{len(to_explain)} of {len(ours)} failed with this package only")
    return lines, bool(to_explain or not_run or not ours)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--suite", choices=SUITES)
    parser.add_argument("--tests", nargs="+", default=[], help="files or ids, from the checkout")
    parser.add_argument("--out", type=Path, help="folder for logs, JUnit XML and outcomes")
    parser.add_argument(
        "--budget", type=float, help="seconds in all; a quarter is kept for the tests that fail"
    )
    parser.add_argument("--max-choices", type=int, help="of ours, and of each of stock's templates")
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    tests = [*SUITES.get(options.suite, ()), *options.tests]
    if not tests:
        parser.error("give --suite or --tests")
    folder = options.out or Path(tempfile.mkdtemp(prefix="inductor_quant_upstream_"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    ours_set = {} if options.max_choices is None else {"max_choices": options.max_choices}
    begun = time.monotonic()

    def together(
        runs: tuple[str, ...], share: float, most: int | None = None
    ) -> list[dict[str, Outcome]]:
        deadline = None if options.budget is None else begun + share * options.budget
        arguments = [*tests, *argv[split + 1 :]]
        if most is not None and uses_workers(arguments):  # each imports torch
            arguments.append(f"--maxprocesses={most}")
        started = [start(run, options.checkout, folder, arguments, ours_set) for run in runs]
        for process in started:
            finish(process, deadline)
        found = [outcomes(folder, run) for run in runs]
        for run, each in zip(runs, found, strict=True):
            counts = dict(Counter(outcome for outcome, _, _ in each.values()))
            print(f"{run}: {counts}, {time.monotonic() - begun:.0f} s", flush=True)
        return found

    [ours] = together((WITH,), 1 - SECOND_ROUND)
    again, without = ({}, {})
    if failed := sum(map(is_failure, ours.values())):
        again, without = together((AGAIN, WITHOUT), 1, failed)
    lines, is_to_be_explained = verdict(collected(folder, WITH), ours, again, without)
    print("\n".join([*lines, f"logs: {folder}"]))
    return int(is_to_be_explained)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
