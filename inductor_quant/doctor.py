"""``python -m inductor_quant doctor``: whether the plugin can work here, in a paste-able page.

Exit code 0: something of ours runs here. 1: nothing does, and the last line says why.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch

from inductor_quant import _torch_compat as compat
from inductor_quant._version import __version__
from inductor_quant.kernels import fp8, w8a8, weight_only
from inductor_quant.options import DISABLE_VARIABLE, FAMILIES, is_disabled_by_environment

# What a family needs of a card: the lowest compute capability that its kernels run on.
_FAMILY_ARCH = {
    "w8a8": w8a8.MIN_ARCH,
    "weight_only": weight_only.MIN_ARCH,
    "fp8": fp8.MIN_ARCH,
    "fp8_block": fp8.MIN_ARCH,
}
_OPTIONAL = ("rich", "torchao", "transformers", "gemlite")


def examine() -> tuple[list[tuple[str, str]], list[str]]:
    """(facts to print, reasons why nothing of ours can run here)."""
    facts = _versions()
    obstacles = []
    if is_disabled_by_environment():
        obstacles.append(f"{DISABLE_VARIABLE} is set: every way in is plain Inductor")
    missing = compat.problems()
    facts.append(("private torch symbols", "all there" if not missing else f"{len(missing)} lost"))
    obstacles += missing
    facts += _devices()
    if not torch.cuda.is_available():
        obstacles.append("no CUDA device: models compile, but their graphs stay as they are")
    elif not any(_capability(i) >= min(_FAMILY_ARCH.values()) for i in _indices()):
        obstacles.append("no GPU of compute capability 8.0 or newer")
    facts += _caches()
    return facts, obstacles


def _versions() -> list[tuple[str, str]]:
    triton = _installed("triton") or "not installed"
    expected = ", ".join(compat.SUPPORTED)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    optional = [f"{name} {v}" for name in _OPTIONAL if (v := _installed(name))]
    return [
        ("inductor_quant", f"{__version__} at {Path(__file__).parent}"),
        ("python", f"{platform.python_version()} on {platform.platform(terse=True)}"),
        ("torch", f"{torch.__version__} ({cuda}); tried with {expected}"),
        ("triton", triton),
        ("beside it", ", ".join(optional) or "nothing optional"),
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
        features = {"wgmma": arch == 90, "TMA": arch >= 90, "fp8": arch >= 89}
        has = [name for name, there in features.items() if there]
        found.append(
            (
                f"cuda:{index}",
                f"{properties.name}, sm_{arch}, {properties.multi_processor_count} SMs, "
                f"{properties.total_memory / 2**30:.0f} GiB; {', '.join(families)}; "
                f"the card has {', '.join(has) or 'none of wgmma, TMA, fp8'}",
            )
        )
    return found or [("devices", "no CUDA device")]


def _caches() -> list[tuple[str, str]]:
    # Where Inductor and Triton look by default; the environment variables win.
    user = os.environ.get("USER", "root")
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    triton = Path.home() / ".triton" / "cache"
    return [
        ("inductor cache", os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(inductor))),
        ("triton cache", os.environ.get("TRITON_CACHE_DIR", str(triton))),
    ]


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


if __name__ == "__main__":
    sys.exit(main())
