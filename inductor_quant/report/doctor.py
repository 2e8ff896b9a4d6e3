"""``python -m inductor_quant doctor``: whether the plugin can run here, as text to paste.

Exit code 0: it can, at least in part. 1: it cannot, and the last line says why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from inductor_quant._compat.symbols import PARTS, SUPPORTED, SYMBOLS, problems
from inductor_quant._version import __version__
from inductor_quant.kernels.block_sparse.mm import kernel as block_sparse
from inductor_quant.kernels.scaled_mm import fp8, int8
from inductor_quant.kernels.weight_only import rules
from inductor_quant.options import DISABLE_VARIABLE, FAMILIES, is_disabled_by_environment
from inductor_quant.report.which import TUNED

# The lowest compute capability of a family's kernels.
_FAMILY_ARCH = {
    "w8a8": int8.MIN_ARCH,
    "w4a8": int8.MIN_ARCH,
    "weight_only": rules.MIN_ARCH,
    "fp8": fp8.MIN_ARCH,
    "fp8_block": fp8.MIN_ARCH,
    "block_sparse": block_sparse.MIN_ARCH,
    "experts": rules.MIN_ARCH,
    "scaled_experts": fp8.MIN_ARCH,
}
UNTUNED = (
    "untuned tiles: what aten._int_mm and aten._scaled_mm compute there is left to them, unless "
    "untuned=True"
)
_OPTIONAL = ("rich", "torchao", "transformers", "gemlite")


def examine() -> tuple[list[tuple[str, str]], list[str]]:
    """(facts to print, reasons why the plugin cannot run here)."""
    facts = _versions()
    obstacles = []
    if is_disabled_by_environment():
        obstacles.append(f"{DISABLE_VARIABLE} is set: compilations are plain Inductor's")
    missing = problems("inductor")
    facts.append(("private symbols", _symbols()))
    obstacles += missing
    facts += _devices()
    if not torch.cuda.is_available():
        obstacles.append("no CUDA device: models compile, but their graphs are left unchanged")
    elif not any(_capability(i) >= min(_FAMILY_ARCH.values()) for i in _indices()):
        obstacles.append("no GPU of compute capability 8.0 or newer")
    facts += _caches()
    return facts, obstacles


def _symbols() -> str:
    """``50 of 50 found``, and the parts that missing symbols turn off."""
    lost = {part: problems(part) for part in PARTS}
    count = sum(map(len, lost.values()))
    parts = [f"{part} is off: {'; '.join(found)}" for part, found in lost.items() if found]
    return ", ".join([f"{len(SYMBOLS) - count} of {len(SYMBOLS)} found", *parts])


def _versions() -> list[tuple[str, str]]:
    triton = _installed("triton") or "not installed"
    expected = ", ".join(SUPPORTED)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    optional = [f"{name} {v}" for name in _OPTIONAL if (v := _installed(name))]
    return [
        ("inductor_quant", f"{__version__} at {Path(__file__).parents[1]}"),
        ("python", f"{platform.python_version()} on {platform.platform(terse=True)}"),
        ("torch", f"{torch.__version__} ({cuda}); supported: {expected}"),
        ("triton", triton),
        ("optional", ", ".join(optional) or "none installed"),
    ]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _indices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def _devices() -> list[tuple[str, str]]:
    found = []
    for index in _indices():
        properties = torch.cuda.get_device_properties(index)
        arch = _capability(index)
        families = [
            f"{family} {'yes' if arch >= _FAMILY_ARCH[family] else 'no'}" for family in FAMILIES
        ]
        tiles = "tuned tiles" if arch == TUNED else UNTUNED
        features = {"wgmma": arch == 90, "TMA": arch >= 90, "fp8": arch >= 89}
        has = [name for name, there in features.items() if there]
        found.append(
            (
                f"cuda:{index}",
                f"{properties.name}, sm_{arch}, {properties.multi_processor_count} SMs, "
                f"{properties.total_memory / 2**30:.0f} GiB; {', '.join(families)}; {tiles}; "
                f"has {', '.join(has) or 'none of wgmma, TMA, fp8'}",
            )
        )
    return found or [("devices", "no CUDA device")]


def _caches() -> list[tuple[str, str]]:
    # The defaults of Inductor and Triton, unless the environment variables are set.
    user = os.environ.get("USER", "root")
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    triton = Path.home() / ".triton" / "cache"
    return [
        ("inductor cache", os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(inductor))),
        ("triton cache", os.environ.get("TRITON_CACHE_DIR", str(triton))),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    return lambda _: main()


def main() -> int:
    facts, obstacles = examine()
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        print(f"{name:<{width}}  {text}")
    if obstacles:
        print("NOT USABLE HERE: " + "; ".join(obstacles))
        return 1
    print("inductor_quant can run here")
    return 0
