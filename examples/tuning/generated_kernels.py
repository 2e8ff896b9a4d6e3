"""Dump the kernels that are generated for many GEMMs, and compare two checkouts. Needs no GPU.

    python -m examples.tuning.generated_kernels dump before --coverage
    python -m examples.tuning.generated_kernels dump after             # in the other checkout
    python -m examples.tuning.generated_kernels diff before after --names old_name=new_name

``dump`` compiles each program of ``examples.tuning.programs`` for a virtual GPU with Triton and
ptxas, and writes FOLDER/kernels.json: the chosen kernels and configurations, hashes of each
kernel's source and PTX without names and comments, registers, spills and shared memory.
FOLDER/<program>.ptx is the hashed PTX. The exit status is 1 if a program fails. ``diff`` prints the
differences; its exit status is 1 if PTX or a configuration differs."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_CACHES = tempfile.TemporaryDirectory(prefix="generated_kernels_")
# set before torch and Triton read them, so that nothing comes from the caches of another checkout
for _variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
    os.environ[_variable] = str(Path(_CACHES.name, _variable))
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import torch  # noqa: E402

import inductor_quant  # noqa: E402
from examples.tuning.programs import Program, programs  # noqa: E402
from inductor_quant import simulate  # noqa: E402
from inductor_quant.kernels import KERNELS  # noqa: E402

# ------------------------------------------------------------------------------------------
# dump


def dump(folder: Path, pattern: str) -> dict[str, Any]:
    """Compile the programs whose names match ``pattern``."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in programs() if re.search(pattern, each.name)]
    names = [each.name for each in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"duplicate names: {[n for n, c in Counter(names).items() if c > 1]}")
    found: dict[str, Any] = {}
    for position, each in enumerate(chosen, start=1):
        begin = time.perf_counter()
        try:
            found[each.name], ptx = compiled(each)
            Path(folder, f"{each.name}.ptx").write_text(ptx)
        except Exception as error:  # the other programs are useful without it
            found[each.name] = {"arch": each.arch, "error": f"{type(error).__name__}: {error}"}
        seconds = time.perf_counter() - begin
        said = found[each.name].get("error") or ", ".join(found[each.name]["reached"])
        print(f"{position}/{len(chosen)} {each.name}: {said[:200]} ({seconds:.1f} s)", flush=True)
    result = {
        "package": str(inductor_quant.__file__),
        "torch": torch.__version__,
        "kernels": [kernel.name for kernel in KERNELS],
        "programs": found,
    }
    Path(folder, "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def compiled(each: Program) -> tuple[dict[str, Any], str]:
    """(the entry of a program in ``kernels.json``, the normalized PTX of its kernels)."""
    is_strict = each.options.get("numerics") == "strict"
    config = {"max_autotune": each.max_autotune, "emulate_precision_casts": is_strict}
    with inductor_quant.enabled(on_error="raise", **each.options), inductor_quant.collect() as seen:
        generated = simulate.generate(each.fn, each.inputs, arch=each.arch, config=config)
    # the first choice of each selection is taken; reports do not list helper kernels
    names = [choices[0].name for choices in generated.choices]
    ours = [re.search(r"inductor_quant_(\w+)_\d+$", name) for name in names]
    entry: dict[str, Any] = {
        "arch": each.arch,
        "reached": [match[1] for match in ours if match],
        "chosen": [choice.chosen for choice in seen.kernels],
        "offered": [list(choice.offered) for choice in seen.kernels],
        "kernels": [],
    }
    texts = []
    for name, source in generated.kernels.items():
        kernel = simulate.compile_kernel(name, source)
        ptx = normalized_ptx(kernel.ptx)
        entry["kernels"].append(
            {
                "name": name,
                "is_ours": name.startswith("triton_tem"),
                "text": digest(normalized_text(source, name)),
                "ptx": digest(ptx),
                "registers": kernel.registers,
                "spills": kernel.spill_stores + kernel.spill_loads,
                "shared": kernel.shared_bytes,
            }
        )
        texts.append(f"// kernel {len(texts)}\n{ptx}")
    return entry, "".join(texts)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def normalized_text(source: str, name: str) -> str:
    """The source of a kernel without its name, comments and empty lines."""
    lines = (line.rstrip() for line in source.replace(name, "KERNEL").splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def normalized_ptx(ptx: str) -> str:
    """PTX without comments and debug information, with functions renamed by their order."""
    ptx = re.sub(r"/\*.*?\*/", "", ptx, flags=re.DOTALL)
    ptx = re.sub(r"//[^\n]*", "", ptx)
    ptx = re.sub(r"\.section\s+\.debug\w*\s*\{.*?\n\s*\}", "", ptx, flags=re.DOTALL)
    ptx = re.sub(r"^\s*(\.loc|\.file|\$L__tmp\d+:|\$L__func_\w+:)[^\n]*$", "", ptx, flags=re.M)
    functions = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)
    # longer names first: a shorter one may be a prefix
    order = {name: f"FUNCTION{i}" for i, name in enumerate(dict.fromkeys(functions))}
    for name in sorted(order, key=len, reverse=True):
        ptx = re.sub(rf"(?<![\w$]){re.escape(name)}", order[name], ptx)
    lines = (" ".join(line.split()) for line in ptx.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def show_coverage(result: dict[str, Any]) -> None:
    """Print how many programs reach each kernel, on sm_90 and on other GPUs."""
    counts: Counter[tuple[str, bool]] = Counter()
    for entry in result["programs"].values():
        counts.update((name, entry["arch"] == 90) for name in set(entry.get("reached", [])))
    names = dict.fromkeys([*result["kernels"], *(name for name, _ in counts)])
    for name in names:
        print(f"{name:32} {counts[name, True]:3} on sm_90, {counts[name, False]:3} on others")


# ------------------------------------------------------------------------------------------
# diff


def diff(before: Path, after: Path, renames: Mapping[str, str]) -> bool:
    """Print how two dumps differ. True if PTX and configurations are the same."""
    old, new = (
        json.loads(Path(f, "kernels.json").read_text())["programs"] for f in (before, after)
    )
    verdicts: Counter[str] = Counter()
    other_names: Counter[tuple[str, str]] = Counter()
    for name in dict.fromkeys([*old, *new]):
        verdict, details = compared(old.get(name), new.get(name), renames)
        verdicts[verdict] += 1
        print(f"{verdict:10} {name}")
        for detail in details:
            print(f"{'':11}{detail}")
        pair = [entries.get(name, {}).get("reached", []) for entries in (old, new)]
        names = zip(renamed(pair[0], renames), pair[1], strict=False)
        other_names.update((was, now) for was, now in names if was != now)
    for (was, now), count in other_names.items():
        print(f"another kernel, or renamed (--names {was}={now}) in {count} programs")
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return set(verdicts) <= {"same text", "same PTX"}


def compared(old: Any, new: Any, renames: Mapping[str, str]) -> tuple[str, list[str]]:
    """(verdict on a program, its differences)."""
    if old is None or new is None:
        return "missing", [f"only {'after' if old is None else 'before'}"]
    errors = [
        f"{when}: {e['error']}" for when, e in (("before", old), ("after", new)) if "error" in e
    ]
    if errors:
        return "failed", errors
    details = []
    for field in ("reached", "chosen", "offered"):
        was, now = renamed(old[field], renames), new[field]
        if was != now:
            details.append(f"{field}: {was} -> {now}")
    is_same_text = True
    for i, (was, now) in enumerate(itertools.zip_longest(old["kernels"], new["kernels"])):
        if was is None or now is None:
            details.append(f"kernel {i}: only {'after' if was is None else 'before'}")
            continue
        for field in ("is_ours", "ptx", "registers", "spills", "shared"):
            if was[field] != now[field]:
                details.append(f"kernel {i}, {field}: {was[field]} -> {now[field]}")
        is_same_text &= was["text"] == now["text"]
    if details:
        return "different", details
    return "same text" if is_same_text else "same PTX", []


def renamed(value: Any, renames: Mapping[str, str]) -> Any:
    """``value`` with the kernel name that begins each text replaced by its new name."""
    if isinstance(value, list):
        return [renamed(item, renames) for item in value]
    name, space, rest = value.partition(" ")
    return renames.get(value, renames.get(name, name) + space + rest)


def read_renames(given: Sequence[str]) -> dict[str, str]:
    """Renames from ``old=new`` texts or JSON files."""
    renames: dict[str, str] = {}
    for item in given:
        old, equals, new = item.partition("=")
        renames |= {old: new} if equals else json.loads(Path(item).read_text())
    return renames


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump")
    dumping.add_argument("folder", type=Path)
    dumping.add_argument("--only", default="", help="regular expression on program names")
    dumping.add_argument("--coverage", action="store_true", help="count programs per kernel")
    diffing = commands.add_parser("diff")
    diffing.add_argument("before", type=Path)
    diffing.add_argument("after", type=Path)
    diffing.add_argument("--names", nargs="*", default=[], help="old=new, or JSON files")
    options = parser.parse_args()
    if options.command == "diff":
        return int(not diff(options.before, options.after, read_renames(options.names)))
    result = dump(options.folder, options.only)
    if options.coverage:
        show_coverage(result)
    return int(any("error" in entry for entry in result["programs"].values()))


if __name__ == "__main__":
    sys.exit(main())
