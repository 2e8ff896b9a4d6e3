"""Layers exported together, compiled ahead of time, and run by a process without this package.

    python -m tests.support.graphs.exported PACKAGE.pt2 ROWS DEVICE KIND [LAYER ...]

Kinds: ``folded`` (the package folds its constants when it is loaded), ``frozen`` (folded constants
are part of the package). Each step is logged on stderr; ``pytest -s`` shows it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from inductor_quant.backend import enabled
from inductor_quant.report.events import collect
from tests.support.spellings.quantizers import GptFastLinear, Int8Linear

ROOT = Path(__file__).parents[3]
K, N = 256, 512
TIMEOUT = 200  # seconds to build a package beside other tests
# Precompiled headers and an optimized wrapper are not worth their compile time.
_ONE_PACKAGE = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
KINDS = {
    "folded": {**_ONE_PACKAGE, "aot_inductor.use_runtime_constant_folding": True},
    "frozen": {**_ONE_PACKAGE, "freezing": True},
}
# Runs a package before and after load_constants (then with a larger M, if M is dynamic); inputs and
# results are in the .pt beside it. This repository is not on its path. The process starts before
# the package exists and reads its name from stdin: importing torch takes as long as the rest.
RUN = """
import faulthandler, sys, time
import torch
import torch._inductor.package

name, device = sys.argv[1:]

def say(step):
    print(time.strftime("%T"), name, step, file=sys.stderr, flush=True)

torch.ones(1, device=device).sum().item()
say("waits for its package")
package = sys.stdin.readline().strip()
if not package:
    sys.exit("no package")
faulthandler.dump_traceback_later(60, exit=True)
say("is loaded")
(x, want), state, then = torch.load(package.removesuffix("2"))
loaded = torch._inductor.aoti_load_package(package)

def compare(got, want):
    errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(got, want)]
    is_equal = len(got) == len(want) and all(map(torch.equal, got, want))
    return "equal" if is_equal else f"off by {torch.stack(errors).tolist()}"

say("runs")
found = compare(loaded(x), want)
if state:
    say("takes other constants")
    known = {name: state[name] for name in loaded.get_constant_fqns() if name in state}
    loaded.load_constants(known, check_full_update=False)
    found += ", then " + compare(loaded(then[0]), then[1])
say("is done")
print(found)
assert "inductor_quant" not in {name.split(".")[0] for name in sys.modules}
"""


def say(package: Path, step: str) -> None:
    print(time.strftime("%T"), package.stem, step, file=sys.stderr, flush=True)


class ZeroPoint(Int8Linear):
    """A static zero point; the activation is truncated to an integer, which a CPU can do too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = (x * 16).clamp(-128, 127).to(torch.int8)
        acc = torch._int_mm(q, self.weight.t()) - self.weight.sum(1) * -9
        return (acc * 0.0625 * self.scale.reshape(-1) + self.bias).to(x.dtype)


class Blocks(nn.Module):
    """A weight [N, K] of which a quarter of the blocks of 32 are stored."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        row, col = (torch.rand(N // 32, K // 32, generator=draw) < 0.25).nonzero(as_tuple=True)
        self.register_buffer("row", row)
        self.register_buffer("col", col)
        self.register_buffer("weight", torch.randn(len(row), 32, 32, generator=draw).half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x.new_zeros(N // 32, K // 32, 32, 32).index_put((self.row, self.col), self.weight)
        return nn.functional.linear(x, blocks.permute(0, 2, 1, 3).reshape(N, K))


class Layers(nn.Module):
    """All layers on the same input, each in its own dtype."""

    def __init__(self, layers: dict[str, nn.Module], dtypes: dict[str, torch.dtype]) -> None:
        super().__init__()
        self.layers, self.dtypes = nn.ModuleDict(layers), dtypes

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x.to(self.dtypes[name])) for name, layer in self.layers.items()]


def layers(names: tuple[str, ...] = ("w8a8", "zero", "gptq", "act_order")) -> Layers:
    from tests.support.producers.registry import PRODUCERS
    from tests.support.producers.w4a8 import QQQGroup

    torch.manual_seed(0)
    bf16, f16 = torch.bfloat16, torch.float16
    gptq, act_order = PRODUCERS["gptq_gm_4b_g64_base"], PRODUCERS["gptq_4b_act_order"]
    # After a product only ops that commute with rounding to 16 bits: torch 2.11 removes a pair of
    # casts from a graph (``pointless_convert``), but not from a frozen one, which we rewrite first.
    made = {
        "w8a8": (bf16, nn.Sequential(GptFastLinear(K, N), nn.ReLU())),
        "zero": (bf16, ZeroPoint(K, N)),
        "gptq": (f16, gptq.make(f16, K, N)),
        "act_order": (f16, act_order.make(f16, K, N)),
        "blocks": (f16, Blocks()),
        "w4a8": (f16, QQQGroup(N, K)),
    }
    chosen = {name: made[name] for name in names}
    return Layers(
        {name: layer for name, (_, layer) in chosen.items()},
        {name: dtype for name, (dtype, _) in chosen.items()},
    )


def export(
    module: Layers, package: Path, rows: int, device: str, kind: str, *, dynamic: bool = False
) -> list[str]:
    """Write ``package`` and the results of torch.compile; returns the matched modules.

    ``dynamic``: for any M.
    """
    say(package, "is compiled by torch.compile")
    module = module.to(device).eval().requires_grad_(False)
    # exact in every dtype: whether a cast rounds depends on fusion
    x = torch.randint(-64, 65, (rows, K), device=device) / 16
    rows_of = torch.export.Dim.DYNAMIC if dynamic else torch.export.Dim.STATIC
    # tables of a package are data unless they are frozen
    options = {"inductor_quant.read_tables": kind == "frozen"}
    compiled = torch.compile(module, backend="inductor_quant", options=options, dynamic=dynamic)
    # a package has no Gluon kernels
    without_gluon = mock.patch("inductor_quant.lowering.select.has_gluon", return_value=False)
    with torch.no_grad(), without_gluon, contextlib.ExitStack() as stack:
        expected = compiled(x)
        say(package, "is exported")
        program = torch.export.export(module, (x,), dynamic_shapes=({0: rows_of},))
        say(package, "is compiled ahead of time")
        stack.enter_context(enabled(on_error="raise"))
        stack.enter_context(torch._inductor.config.patch(KINDS[kind]))
        report = stack.enter_context(collect())
        torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    state, then = {}, None
    if kind != "frozen":
        state, again = _other_constants(module), torch.cat([x, x]) if dynamic else x
        with torch.no_grad():
            then = again, compiled(again)
        assert not any(torch.equal(a, b[:rows]) for a, b in zip(expected, then[1], strict=True))
    torch.save(((x, expected), state, then), package.with_suffix(".pt"))
    return sorted(match.module for match in report.matches)


def _other_constants(module: nn.Module) -> dict[str, torch.Tensor]:
    """Moves the elements of every weight and the groups of every k."""
    for name, value in module.named_buffers():
        if name.endswith(("weight", "qweight", "g_idx")):
            value.copy_(value.roll(1, 0))
    return {name: value.clone() for name, value in module.named_buffers()}


def export_and_run(
    folder: Path, packages: dict[str, tuple[Any, ...]], device: str
) -> dict[str, tuple[list[str], str]]:
    """For each package (rows, kind, names of layers if not all): the matched modules, and the
    output of a process that runs it. All packages run in parallel."""
    runs = {name: Run(name, device, folder) for name in packages}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    here = [sys.executable, "-m", "tests.support.graphs.exported"]
    exports = {
        name: subprocess.Popen(
            [*here, str(folder / f"{name}.pt2"), str(rows), device, kind, *names],
            cwd=ROOT,
            env=_environment(PYTHONPATH=path),
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, (rows, kind, *names) in packages.items()
    }
    matched = {name: _last_line(process) for name, process in exports.items()}
    return {
        name: (json.loads(line), runs[name](folder / f"{name}.pt2"))
        if line.startswith("[")
        else ([line], runs[name](None))
        for name, line in matched.items()
    }


class Run:
    """A process without this package that waits for an exported package to run."""

    def __init__(self, name: str, device: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, name, device],
            cwd=folder,
            env={k: v for k, v in _environment().items() if k != "PYTHONPATH"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, package: Path | None) -> str:
        """Compares the package with torch.compile: "equal" if every bit is."""
        return _last_line(self.process, "" if package is None else f"{package}\n")


def _last_line(process: subprocess.Popen[str], text: str | None = None) -> str:
    """The last line of its output, or how it failed; the reason is on stderr."""
    try:
        output, _ = process.communicate(text, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"no answer in {TIMEOUT} seconds"
    lines = output.strip().splitlines()
    return lines[-1] if process.returncode == 0 and lines else f"status {process.returncode}"


def _environment(**more: str) -> dict[str, str]:
    """With a compiler that suits packages, and without torch's test of the CPU's vector unit, which
    compiles too."""
    return {**os.environ, "CXX": compiler(), "TORCHINDUCTOR_VEC_ISA_OK": "1", **more}


def compiler() -> str:
    """The first C++ compiler that links libstdc++ dynamically.

    With a second, static copy in the package, torch's loader crashes in ``std::regex``: one copy
    looks up the facets of a locale with the ids of the other.
    """
    program = "#include <string>\nvoid twice(std::string& s) { s += s; }\n"
    candidates = (os.environ.get("CXX", "g++"), "g++", "/usr/bin/g++", "/usr/bin/c++")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "library.so"
        for path in filter(None, map(shutil.which, candidates)):
            command = [path, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
            done = subprocess.run(command, input=program, text=True, capture_output=True)
            if done.returncode == 0 and b"libstdc++.so" in library.read_bytes():
                return path
    raise FileNotFoundError(f"no compiler of {candidates} links libstdc++ dynamically")


def main(package: str, rows: str, device: str, kind: str, *names: str) -> None:
    faulthandler.dump_traceback_later(TIMEOUT - 10, exit=True)
    module = layers(names) if names else layers()
    matched: Any = export(module, Path(package), int(rows), device, kind)
    print(json.dumps(matched))


if __name__ == "__main__":
    main(*sys.argv[1:])
