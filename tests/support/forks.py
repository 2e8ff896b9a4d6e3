"""Python programs in forks of one process that has imported torch and Inductor, and nothing of
ours.

A test of caches, or of what importing us does, needs a fresh process. Importing torch and Inductor
takes most of its time; forks share one import.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
SERVER = """
import gc, json, os, sys, tempfile, traceback

gc.disable()  # what is imported here stays, in every fork
import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

# What a first compilation imports and traces (Inductor's patterns) takes two seconds.
with config.patch(force_disable_caches=True), torch.no_grad():
    torch.compile(torch.mm, backend=compile_fx)(torch.ones(8, 8), torch.ones(8, 8))
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
gc.freeze()
gc.enable()

def run(path, program, arguments, environment):
    os.environ.update(environment)
    sys.path.insert(0, path)
    sys.argv[1:] = arguments
    exec(program, {"__name__": "__main__"})

def forked(job):
    output = tempfile.TemporaryFile()
    pid = os.fork()
    if pid:
        return pid, output
    status = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        run(*job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)

for line in sys.stdin:
    answers = []
    for pid, output in [forked(job) for job in json.loads(line)]:
        status = os.waitpid(pid, 0)[1]
        output.seek(0)
        answers.append([status, output.read().decode()])
    print(json.dumps(answers), flush=True)
"""

# One thread; no processes of Inductor's own, and no program of it that tests the vector unit.
FEW_PROCESSES = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}

MODULE = """
import contextlib, io, json, runpy, sys
printed, status = io.StringIO(), 0
name = sys.argv.pop(1)
run = runpy.run_path if name.endswith(".py") else runpy.run_module
try:
    with contextlib.redirect_stdout(printed):
        run(name, run_name="__main__")
except SystemExit as end:
    status = end.code or 0
print(json.dumps([status, printed.getvalue()]))
"""


@dataclasses.dataclass
class Program:
    """What a fork runs: ``text``, with ``path`` first among the folders to import from. Variables
    that torch or Triton read when they are imported belong to ``Forks``."""

    text: str
    arguments: Sequence[str] = ()
    path: str = str(ROOT)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Forks:
    """The process that is forked, as a context. ``environment``: what its own has besides."""

    def __init__(self, **environment: str) -> None:
        self.environment = {**os.environ, **FEW_PROCESSES, **environment}

    def __enter__(self) -> Forks:
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER],  # -P: this folder is not on the path
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._server.communicate()

    def python(self, name: str, *arguments: str, **environment: str) -> tuple[int, str]:
        """The status and the output of ``python name.py`` or ``python -m name``."""
        [line] = self.run(Program(MODULE, (name, *arguments), environment=environment))
        status, printed = json.loads(line)
        return status, printed

    def run(self, *programs: Program) -> list[str]:
        """The last line that each program prints. They run at the same time; each must succeed."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        jobs = [(p.path, p.text, tuple(p.arguments), dict(p.environment)) for p in programs]
        print(json.dumps(jobs), file=self._server.stdin, flush=True)
        answers = json.loads(self._server.stdout.readline())
        for status, output in answers:
            assert status == 0, output
        return [(output.splitlines() or [""])[-1] for _, output in answers]
