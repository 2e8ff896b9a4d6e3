"""Layers exported together, compiled ahead of time, and run by a process that knows nothing of us.

    python -m tests.support.exported PACKAGE.pt2 ROWS DEVICE KIND

Kinds: ``plain``, ``folded`` (what depends on constants alone is computed where the package is
loaded), ``frozen`` (it is part of the package).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inductor_quant.backend import enabled
from inductor_quant.report import collect
from tests.support.quantizers import GptFastLinear, Int8Linear

ROOT = Path(__file__).parents[2]
K, N = 256, 512
TIMEOUT = 240  # seconds: 60 to 80 alone on an H200 machine, more beside other tests
# Headers are not worth compiling beforehand, nor what calls the kernels worth optimising.
_ONE_PACKAGE = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
KINDS = {
    "plain": _ONE_PACKAGE,
    "folded": {**_ONE_PACKAGE, "aot_inductor.use_runtime_constant_folding": True},
    "frozen": {**_ONE_PACKAGE, "freezing": True},
}
# PACKAGE.pt2 with the inputs and results in PACKAGE.pt: before and after other constants are put
# into it. Runs without a path to this repository.
RUN = """
import sys
import torch
import torch._inductor

package = sys.argv[1]
x, want, state, want_then = torch.load(package.removesuffix("2"))
loaded = torch._inductor.aoti_load_package(package)

def compare(got, want):
    errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(got, want)]
    is_equal = len(got) == len(want) and all(map(torch.equal, got, want))
    return "equal" if is_equal else f"off by {torch.stack(errors).tolist()}"

found = compare(loaded(x), want)
if state:
    known = {name: state[name] for name in loaded.get_constant_fqns() if name in state}
    loaded.load_constants(known, check_full_update=False)
    found += ", then " + compare(loaded(x), want_then)
print(found)
assert "inductor_quant" not in {name.split(".")[0] for name in sys.modules}
"""


class ZeroPoint(Int8Linear):
    """A static zero point; the activation is cut off to an integer, which a CPU can do as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = (x * 16).clamp(-128, 127).to(torch.int8)
        acc = torch._int_mm(q, self.weight.t()) - self.weight.sum(1) * -9
        return (acc * 0.0625 * self.scale.reshape(-1) + self.bias).to(x.dtype)


class Layers(nn.Module):
    """Each on the same input, in its own type."""

    def __init__(self, layers: dict[str, nn.Module], dtypes: dict[str, torch.dtype]) -> None:
        super().__init__()
        self.layers, self.dtypes = nn.ModuleDict(layers), dtypes

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x.to(self.dtypes[name])) for name, layer in self.layers.items()]


def layers(names: tuple[str, ...] = ("w8a8", "zero", "gptq", "act_order")) -> Layers:
    from tests.support.producers import PRODUCERS

    torch.manual_seed(0)
    bf16, f16 = torch.bfloat16, torch.float16
    gptq, act_order = PRODUCERS["gptq_gm_4b_g64_base"], PRODUCERS["gptq_4b_act_order"]
    made = {
        "w8a8": (bf16, nn.Sequential(GptFastLinear(K, N), nn.GELU(), GptFastLinear(N, K))),
        "zero": (bf16, ZeroPoint(K, N)),
        "gptq": (f16, gptq.make(f16, K, N)),
        "act_order": (f16, act_order.make(f16, K, N)),
    }
    chosen = {name: made[name] for name in names}
    return Layers(
        {name: layer for name, (_, layer) in chosen.items()},
        {name: dtype for name, (dtype, _) in chosen.items()},
    )


def export(module: Layers, package: Path, rows: int, device: str, kind: str) -> list[str]:
    """Write ``package`` and, beside it, what torch.compile gives; the modules of what matched."""
    module = module.to(device).eval().requires_grad_(False)
    # the same in every type: whether a cast rounds before the next step is a matter of fusion
    x = torch.randint(-64, 65, (rows, K), device=device) / 16
    # A package's tables are data, unless they are frozen.
    options = {"inductor_quant.read_tables": kind == "frozen"}
    compiled = torch.compile(module, backend="inductor_quant", options=options, dynamic=False)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        expected = compiled(x)
        program = torch.export.export(module, (x,))
        stack.enter_context(enabled(on_error="raise"))
        stack.enter_context(torch._inductor.config.patch(KINDS[kind]))
        report = stack.enter_context(collect())
        torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    state, then = {}, None
    if kind != "frozen":
        state = _other_constants(module)
        with torch.no_grad():
            then = compiled(x)
        assert not any(map(torch.equal, expected, then))
    torch.save((x, expected, state, then), package.with_suffix(".pt"))
    return sorted(match.module for match in report.matches)


def _other_constants(module: nn.Module) -> dict[str, torch.Tensor]:
    """Puts the numbers of every weight, and the groups of every row, elsewhere."""
    for name, value in module.named_buffers():
        if name.endswith(("weight", "qweight", "g_idx")):
            value.copy_(value.roll(1, 0))
    return {name: value.clone() for name, value in module.named_buffers()}


def export_in_processes(
    folder: Path, packages: dict[str, tuple[int, str]], device: str
) -> dict[str, list[str]]:
    """``export`` of all layers for each (rows, kind), at the same time."""
    here = ("-m", "tests.support.exported")
    commands = {
        name: [*here, str(folder / f"{name}.pt2"), str(rows), device, kind]
        for name, (rows, kind) in packages.items()
    }
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = _in_processes(commands, _environment(PYTHONPATH=path), ROOT)
    return {
        name: json.loads(line) if status == 0 else [line] for name, (status, line) in found.items()
    }


def run(packages: list[Path]) -> dict[str, tuple[int, str]]:
    """What a process of its own prints for each package, with its exit status."""
    environment = {k: v for k, v in _environment().items() if k != "PYTHONPATH"}
    commands = {package.stem: ["-c", RUN, str(package)] for package in packages}
    return _in_processes(commands, environment, packages[0].parent)


def _in_processes(
    commands: dict[str, list[str]], environment: dict[str, str], cwd: Path
) -> dict[str, tuple[int, str]]:
    processes = {
        name: subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, command in commands.items()
    }
    found = {}
    for name, process in processes.items():
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            output = f"no answer in {TIMEOUT} seconds"
        lines = output.strip().splitlines() or [""]
        found[name] = (process.wait(), lines[-1])
    return found


def _environment(**more: str) -> dict[str, str]:
    """With a compiler that is fit for packages; the CPU's instructions, which torch finds out by
    compiling as well, do not matter on a GPU."""
    return {**os.environ, "CXX": compiler(), "TORCHINDUCTOR_VEC_ISA_OK": "1", **more}


def compiler() -> str:
    """The first C++ compiler that links the language's library dynamically.

    One that puts a copy of it into each package makes two of it in the process that loads one:
    torch's loader then dies in ``std::regex``, where one looks for the facets of a locale in the
    numbering of the other.
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


def main(package: str, rows: str, device: str, kind: str) -> None:
    matched: Any = export(layers(), Path(package), int(rows), device, kind)
    print(json.dumps(matched))


if __name__ == "__main__":
    main(*sys.argv[1:])
