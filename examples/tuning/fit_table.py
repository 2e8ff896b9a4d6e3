"""Measures the tile configurations of a kernel on this GPU and writes its configuration table.

    python -m examples.tuning.fit_table --samples samples.json              # measure, write
    python -m examples.tuning.fit_table --samples samples.json --fit-only   # write; needs no GPU

1. Time every legal configuration on every shape, in CUDA graphs over weights beyond the L2 cache.
   The template is rendered with sizes and strides as arguments (``examples.tuning.sweep``).
2. Select, greedily, a few configurations that together come near the best of every shape.
3. Time these and the best of each shape again, as Inductor compiles them, by the package's own
   autotuning. Sizes are constants there, so registers and occupancy differ from the sweep.
4. Fit the constants of the cost model (inductor_quant/kernels/tuning/cost_model.py) and print its
   regret: time of its choice / time of the best configuration.

Shapes that are in the --samples file already are not measured again."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

import inductor_quant
from examples.benchmarks.gemm import SHAPES
from examples.benchmarks.harness import show_table, track
from examples.tuning import cost
from examples.tuning.candidates import candidates, suits
from examples.tuning.cost import Card, Samples, Shape
from examples.tuning.sweep import TUNED, Sweep, time_compiled
from inductor_quant.kernels import KERNELS, Kernel
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem

SWEEP_ROUNDS = 3
NOTABLE = 0.97  # time / time of the selection: below this a configuration is added to it
FINALISTS = 8  # of the selection, per shape; compiling and timing them takes about six seconds

# ------------------------------------------------------------------------------------------
# what to measure


# family -> grid of shapes.json -> M
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "w8a8": {
        "llama8b": (16, 32, 64, 128, 256, 512, 1024, 4096),
        "deepseek": (16, 64, 256, 2048),
        "vit_h": (16384, 65536),
        "minilm": (512, 4096, 32768),
    },
    "fp8": {"llama8b": (16, 64, 128, 256, 512, 1024, 2048, 4096), "vit_h": (16384,)},
    "fp8_block": {"deepseek": (16, 32, 64, 128, 256, 512, 1024, 4096)},
}


def shapes(kernel: Kernel, device: Device) -> list[Shape]:
    """The shapes to measure: decode, prefill, and batches of an image encoder."""
    grids = json.loads(SHAPES.read_text())
    sizes = SIZES[kernel.family]
    found = [(m, n, k) for grid, ms in sizes.items() for m in ms for n, k in grids[grid]]
    spec = TUNED[kernel.name].spec()
    problems = {shape: Problem(*shape, has_aligned_rows=True) for shape in found}
    return [shape for shape in found if kernel.rejection(spec, problems[shape], device) is None]


# ------------------------------------------------------------------------------------------
# the file of measurements


def this_card() -> Card:
    found = torch.cuda.get_device_properties(0)
    return Card(
        name=found.name,
        arch=10 * found.major + found.minor,
        num_sms=found.multi_processor_count,
        block_shared_memory=found.shared_memory_per_block_optin,
        shared_memory=found.shared_memory_per_multiprocessor,
        registers=getattr(found, "regs_per_multiprocessor", 65536),  # some torch versions lack it
        threads=found.max_threads_per_multi_processor,
    )


class Store:
    """Measurements in a JSON file: the sweep of all candidates, and the finals of a few."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machine: dict[str, Any] = {}
        self.sweep: Samples = {}
        self.finals: Samples = {}
        self.resources: dict[GemmConfig, tuple[int, int]] = {}
        if path.exists():
            raw = json.loads(path.read_text())
            self.machine = raw["machine"]
            for name in ("sweep", "finals"):
                for shape, times in raw[name]:
                    samples = {GemmConfig(*config): us for config, us in times}
                    getattr(self, name)[tuple(shape)] = samples
            self.resources = {GemmConfig(*c): tuple(found) for c, found in raw["resources"]}

    def save(self) -> None:
        def plain(samples: Samples) -> list[Any]:
            return [
                [shape, [[dataclasses.astuple(c), us] for c, us in times.items()]]
                for shape, times in samples.items()
            ]

        resources = [[dataclasses.astuple(c), found] for c, found in self.resources.items()]
        raw = {
            "machine": self.machine,
            "resources": resources,
            "sweep": plain(self.sweep),
            "finals": plain(self.finals),
        }
        self.path.write_text(json.dumps(raw))


def measure(store: Store, kernel: Kernel, options: argparse.Namespace) -> None:
    """Steps 1 to 3. Stops between two shapes when the budget is spent."""
    until = time.perf_counter() + options.budget
    card = this_card()
    if store.machine.get("card", dataclasses.asdict(card)) != dataclasses.asdict(card):
        raise SystemExit(f"{options.samples} was measured on another card: {store.machine['card']}")
    store.machine = {
        "card": dataclasses.asdict(card),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
    wanted = shapes(kernel, card.device())
    sensible = candidates(kernel, card.device(), options.group_m)
    needed = [c for c in sensible if any(suits(c, shape) for shape in wanted)]
    began = time.perf_counter()
    sweep = Sweep(kernel, needed)
    print(
        f"{len(needed)} configurations compiled in {time.perf_counter() - began:.0f} s", flush=True
    )

    def run(
        found: Samples,
        pick: Callable[[Shape], list[GemmConfig]],
        clock: Callable[[Shape, list[GemmConfig]], dict[GemmConfig, float]],
        what: str,
    ) -> None:
        for shape in track([s for s in wanted if s not in found], what):
            if time.perf_counter() > until:
                print(f"time budget spent: {what} has {len(found)} of {len(wanted)} shapes")
                break
            times = clock(shape, pick(shape))
            if not times:
                raise SystemExit(f"nothing runs on {shape}: {sweep.failed}")
            best = min(times, key=times.__getitem__)
            print(f"{what} {shape}: {times[best]:.1f} us {best}, of {len(times)}", flush=True)
            found[shape] = times
            store.resources.update(sweep.resources)
            store.save()

    def swept(shape: Shape, configs: list[GemmConfig]) -> dict[GemmConfig, float]:
        return sweep.time(shape, configs, SWEEP_ROUNDS)

    run(store.sweep, lambda s: [c for c in needed if suits(c, s)], swept, "sweep")
    if not store.sweep:
        raise SystemExit("no shape was measured: the budget is too small")
    chosen = cost.select(store.sweep, options.configs)

    def finalists(shape: Shape) -> list[GemmConfig]:
        times = store.sweep.get(shape, {})
        ranked = sorted(times, key=times.__getitem__)
        kept = [config for config in ranked if config in chosen]
        return list(dict.fromkeys([*kept[:FINALISTS], *ranked[:3]]))

    wanted = [shape for shape in wanted if shape in store.sweep]
    if any(set(finalists(s)) - set(times) - set(sweep.failed) for s, times in store.finals.items()):
        store.finals.clear()  # the finals in the file are of another selection
    if options.sweep_only:
        wanted = []
    run(store.finals, finalists, functools.partial(time_compiled, kernel), "finals")
    for config, reason in sweep.failed.items():
        print(f"failed: {config}: {reason}")


def winners(finals: Samples, chosen: list[GemmConfig]) -> list[GemmConfig]:
    """Configurations outside the selection that are notably faster on some shape."""
    found = []
    for times in finals.values():
        best = min(times, key=times.__getitem__)
        selected = min((times[config] for config in chosen if config in times), default=math.inf)
        if times[best] < NOTABLE * selected:
            found.append(best)
    return sorted(set(found))


def fit(store: Store, kernel: Kernel, options: argparse.Namespace) -> bool:
    """Step 4: write the table. True if the model's mean regret is within the limit."""
    card = Card(**store.machine["card"])
    samples = {**store.sweep, **store.finals}
    # A configuration that was added for one shape has a single sample in the finals, too few for
    # three constants. Fit to the sweep's samples as well: the mean regret falls from 2.9 to 2.4 %.
    evidence = {shape: times | store.finals.get(shape, {}) for shape, times in store.sweep.items()}
    chosen = cost.select(store.sweep, options.configs)
    chosen += [config for config in winners(store.finals, chosen) if config not in chosen]
    ctas = {c: card.ctas_per_sm(c, *store.resources[c]) for c in chosen}
    measured = {
        "gpu": card.name,
        **{name: store.machine[name] for name in ("torch", "triton", "date")},
        "by": f"python -m examples.tuning.fit_table --kernel {kernel.name}"
        f" --configs {options.configs} --group-m {' '.join(map(str, options.group_m))}"
        + (" --sweep-only" if options.sweep_only else ""),
    }
    table = cost.make_table(kernel.name, card, measured, chosen, ctas, samples, evidence)
    cost.write_table(table, options.out)
    print(f"{options.out}: {len(table.configs)} configurations, {len(table.rows)} shapes")
    found = cost.regrets(table, card, samples)
    outside = cost.regrets(table, card, samples, leave_out_of=evidence)
    left_out = {f"{name}, leave one out": values for name, values in outside.items()}
    columns = ("regret", "mean", "p90", "max")
    show_table("model against the best measured", columns, cost.describe(found | left_out))
    mean = statistics.mean(outside["model"])
    if mean > options.max_regret:
        print(f"the mean regret {mean:.3f}, leave one out, is above {options.max_regret}")
    return mean <= options.max_regret


def main() -> int:
    kernels = {kernel.name: kernel for kernel in KERNELS if kernel.name in TUNED}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kernel", choices=list(kernels), default="w8a8_mm")
    parser.add_argument("--samples", type=Path, required=True, help="file of measurements")
    parser.add_argument("--out", type=Path, help="the table; default: the one of the package")
    parser.add_argument("--fit-only", action="store_true", help="do not measure")
    parser.add_argument("--sweep-only", action="store_true", help="skip step 3")
    parser.add_argument("--configs", type=int, default=26, help="configurations to select")
    parser.add_argument("--group-m", type=int, nargs="+", default=[8])
    parser.add_argument("--budget", type=float, default=480, help="seconds for measuring")
    parser.add_argument("--max-regret", type=float, default=1.25, help="fail above this mean")
    options = parser.parse_args()
    torch.compiler.config.force_disable_caches = True  # autotuning times no cached choice
    store = Store(options.samples)
    kernel = kernels[options.kernel]
    if not options.fit_only:
        measure(store, kernel, options)
    if options.out is None:
        arch = store.machine["card"]["arch"]
        folder = Path(inductor_quant.__file__).parent / "kernels" / "tuning" / "configs"
        options.out = folder / f"{kernel.name}_sm{arch}.json"
    return 0 if fit(store, kernel, options) else 1


if __name__ == "__main__":
    raise SystemExit(main())
