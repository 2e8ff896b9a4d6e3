"""Which tests run in which process, and private caches for all of them."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before torch or triton read them: a cache left by another run would hide what this one compiles.
for _variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
    os.environ[_variable] = tempfile.mkdtemp(prefix="inductor_quant_tests_")
# What is imported and collected stays: a third of that time would go to looking for what does not.
gc.disable()
# There are as many workers as cores: more threads would only wait. (Child processes inherit it.)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its processes import torch, too

import pytest  # noqa: E402

from tests.support.forks import Forks  # noqa: E402

# (Torch is imported where it is used: the process that hands out the tests of ``-n 2`` needs none,
# and the others wait for it.)

IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
# Files whose first test is no quick one: their processes or compilers take too long.
NOT_QUICK = {
    "test_interpreter_layer.py",
    *("test_caches.py", "test_exported.py", "test_quickstart.py", "test_packaging.py"),
    *("test_minimal.py", "test_generality.py", "test_recognition_time.py"),
    *("test_fault_injection.py", "test_tensor_parallel.py"),
}


def _capability() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out tests/gpu without a GPU, unless it is asked for."""
    is_asked_for = any("gpu" in str(arg) for arg in (*config.args, config.option.markexpr))
    is_gpu = collection_path == Path(__file__).parent / "gpu"
    return True if is_gpu and not is_asked_for and _capability() == 0 else None


@pytest.hookimpl(tryfirst=True)  # before ``-m`` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # These take minutes: begun last, they would be what the other process of ``-n 2`` waits for.
    items.sort(key=lambda item: "test_interpreter_layer" not in item.nodeid)
    _mark_slow(items)
    _mark_quick(items)
    arch = _capability()
    for item in items:
        if "interp" in item.keywords and not IS_INTERPRETER:
            reason = "runs in the interpreter's process, which test_interpreter_layer starts"
        elif "compiles" in item.keywords and IS_INTERPRETER:
            reason = "compiles kernels, which TRITON_INTERPRET=1 forbids"
        elif "gpu" in item.keywords and (arch == 0 or IS_INTERPRETER):
            reason = "no CUDA device"
        elif "sm89" in item.keywords and arch < 89:
            reason = f"needs sm_89, this is sm_{arch}"
        elif "sm90" in item.keywords and arch < 90:
            reason = f"needs sm_90, this is sm_{arch}"
        else:
            continue
        item.add_marker(pytest.mark.skip(reason=reason))


def _mark_slow(items: list[pytest.Item]) -> None:
    """Marks what CI leaves out of the cases of a test that is marked ``one_in(n)``; of a test that
    runs in the interpreter, eleven of twelve."""
    seen: Counter[str] = Counter()
    for item in items:
        if "slow" in item.keywords:
            continue
        marker = item.get_closest_marker("one_in")
        every = marker.args[0] if marker else 12 if "interp" in item.keywords else 1
        test = item.nodeid.partition("[")[0]
        if seen[test] % every:
            item.add_marker("slow")
        seen[test] += 1


def _mark_quick(items: list[pytest.Item]) -> None:
    """Marks the first test of each file; other tests are marked where they are written.

    The files of tests mirror those of the source, so this covers every file of it without a list.
    """
    seen: set[Path] = set()
    for item in items:
        if item.path in seen or item.path.name in NOT_QUICK or "slow" in item.keywords:
            continue
        seen.add(item.path)
        item.add_marker("quick")


def pytest_collection_finish() -> None:
    """Starts the garbage collector, but a slow one, and not after each compilation: it takes a
    seventh of the time to look at what compilations allocate and give back. Not on a GPU, where a
    cycle of references may hold its memory."""
    gc.freeze()
    gc.enable()
    if not _capability():
        from torch._dynamo import config

        gc.set_threshold(50_000, 20, 20)
        config.run_gc_after_compile = False


def pytest_sessionfinish(session: pytest.Session) -> None:
    """On a GPU machine, GPU tests that were all skipped are a failure, not a pass."""
    gpu_items = [item for item in getattr(session, "items", ()) if "gpu" in item.keywords]
    if not gpu_items or IS_INTERPRETER or not _capability():
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    ran = {report.nodeid for key in ("passed", "failed") for report in reporter.stats.get(key, [])}
    if not any(item.nodeid in ran for item in gpu_items):
        reporter.write_line("every gpu test was skipped on a machine with a GPU", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _plain_cpp():
    """Inductor writes scalar C++ here, and does not compile programs to find out which vector
    instructions the CPU has. Its headers are compiled once a process: a kernel takes a quarter of
    the time."""
    from torch._inductor import config as inductor_config

    scalar = {"cpp.simdlen": 1, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": True}
    with inductor_config.patch(scalar):
        yield


@pytest.fixture(scope="session", autouse=True)
def _little_is_logged():
    """Dynamo times the guards of each compilation for its log, and empties the CPU's caches first:
    20 to 30 ms a compilation. It writes all options down, too: 5 ms."""
    from torch._dynamo import guards, utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        for name in ("_scrubbed_inductor_config_for_logging", "_get_dynamo_config_for_logging"):
            patch.setattr(utils, name, lambda: None, raising=False)
        yield


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Dynamo's caches and counts do not leak between tests. (A reset takes 0.03 ms.)"""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Runs programs that need a process of their own; what they import is on ``Program.path``."""
    with Forks(PYTHONPATH="") as forks:
        yield forks


@pytest.fixture(scope="session")
def interpreter_forks() -> Iterator[Forks]:
    """Runs programs that need a process of their own with Triton's interpreter."""
    with Forks(TRITON_INTERPRET="1") as forks:
        yield forks
