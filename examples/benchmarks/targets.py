"""The grids and performance targets of ``examples.benchmarks.acceptance``, and the verdicts.

A row is a shape of a family in one measure, with the systems of its rounds. A ratio is time of
ours / time of the peer in the same round, the median over the rounds. The fastest of several peers
is the one with the largest ratio, so that a row may be measured in several runs, each with ours."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Sequence

from examples.benchmarks import gemm
from examples.benchmarks.harness import Row, Verdict, is_unknown

QKV, OUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)  # Llama-3-8B
DEEPSEEK = ((24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048))  # multiples of the block
TUNED = "stock-autotune"
MEMORY = "reading the weight"  # at the bandwidth measured in the same run
LAYOUTS = ("ours", "ours-awq", "ours-awq-prepacked", "ours-hqq", "ours-hqq-prepacked")
W8A8_LINEAR, W8A8_GEMM = ("bf16", "stock", "gemlite"), ("stock", "gemlite")
WEIGHT_ONLY = ("stock", "tinygemm", "gemlite", "dequantize")
BLOCK = ("cublaslt", "bf16", "stock", "deepseek")


@dataclasses.dataclass(frozen=True)
class Selection:
    """Rows of a family in one measure, with these M and (N, K); empty: all."""

    family: str
    measure: str
    m: tuple[int, ...] = ()
    nk: tuple[tuple[int, int], ...] = ()

    def covers(self, row: Row) -> bool:
        return (
            (row["family"], row["measure"]) == (self.family, self.measure)
            and (not self.m or row["m"] in self.m)
            and (not self.nk or (row["n"], row["k"]) in self.nk)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(Selection):
    """Time of the fastest of ``ours`` / time of the fastest of ``peers`` <= ``limit``.

    slack_us    a difference up to this many microseconds is accepted too
    is_mean     applies to the geometric mean over the rows, not to each row
    kernel      required prefix of a kernel of ours: a product left to the library does not count
    """

    peers: tuple[str, ...]
    limit: float
    ours: tuple[str, ...] = ("ours",)
    slack_us: float = 0.0
    is_mean: bool = False
    kernel: str = ""

    def __str__(self) -> str:
        if self.slack_us:
            return f"not slower than {', '.join(self.peers)}"
        peers = self.peers[0] if len(self.peers) == 1 else f"the best of {', '.join(self.peers)}"
        ours = "" if self.ours == ("ours",) else f"{' or '.join(self.ours)} "
        return f"{ours}<= {self.limit:.3g} x {peers}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid(Selection):
    """Rows to measure: shapes of the family's acceptance grid, with ours and ``systems``."""

    systems: tuple[str, ...]


def _not_slower(family: str, measure: str, peers: tuple[str, ...]) -> Target:
    """The target of the whole grid: at most 3 % or 0.3 us slower."""
    return Target(family, measure, peers=peers, limit=1.03, slack_us=0.3)


TARGETS = (
    # W8A8
    Target("w8a8", "linear", (4096,), (GATE_UP,), peers=(TUNED,), limit=0.72),
    Target("w8a8", "linear", (4096,), (DOWN,), peers=(TUNED,), limit=0.80),
    Target("w8a8", "linear", (256,), (DOWN, QKV), peers=(*W8A8_LINEAR, TUNED), limit=0.80),
    Target("w8a8", "linear", (64,), (GATE_UP,), peers=(*W8A8_LINEAR, TUNED), limit=0.80),
    Target("w8a8", "linear", (16,), (QKV,), peers=(*W8A8_LINEAR, TUNED), limit=0.75),
    Target("w8a8", "linear", (16, 64, 256, 1024, 4096), peers=("bf16",), limit=1.0),
    Target("w8a8", "gemm", (4096,), (GATE_UP, DOWN, QKV, OUT), peers=("stock",), limit=0.74),
    Target("w8a8", "gemm", (16,), (QKV,), peers=("gemlite",), limit=0.65),
    _not_slower("w8a8", "linear", (*W8A8_LINEAR, TUNED)),
    _not_slower("w8a8", "gemm", (*W8A8_GEMM, TUNED)),
    _not_slower("w8a8_fp16", "linear", W8A8_LINEAR),
    _not_slower("w8a8_fp16", "gemm", W8A8_GEMM),
    # int4 weights
    Target("weight_only", "linear", (1,), (GATE_UP,), peers=(MEMORY,), limit=1 / 0.60),
    Target("weight_only", "linear", (1,), (GATE_UP,), peers=("bf16", *WEIGHT_ONLY), limit=0.70),
    Target("weight_only", "linear", (1,), (DOWN, QKV), peers=("bf16", *WEIGHT_ONLY), limit=0.80),
    Target("weight_only", "linear", (16,), (GATE_UP,), peers=("bf16",), limit=0.42),
    Target("weight_only", "linear", (16,), (QKV,), peers=("bf16",), limit=0.65),
    Target("weight_only", "linear", (16,), (DOWN,), peers=("bf16",), limit=0.55),
    Target("weight_only", "linear", (64,), (GATE_UP,), peers=("bf16",), limit=0.75),
    Target("weight_only", "linear", (256,), peers=("bf16",), limit=1.0),
    Target("weight_only", "linear", (4096,), peers=("bf16",), limit=1.06),
    Target("weight_only", "linear", (1, 4, 16), peers=LAYOUTS, limit=1.10),
    Target(
        *("weight_only", "linear", (1, 4, 16)),
        ours=("ours-awq", "ours-awq-prepacked"),
        peers=LAYOUTS,
        limit=1.10,
    ),
    _not_slower("weight_only", "linear", WEIGHT_ONLY),
    _not_slower("weight_only_fp16", "linear", ("stock", "gemlite", "dequantize")),
    # row-wise FP8: stock is cuBLASLt with the bias, then one kernel for SiLU
    Target("fp8", "silu", peers=("stock",), limit=1.0, is_mean=True),
    Target("fp8", "silu", peers=("stock",), limit=1.05),
    # FP8 in blocks
    Target(
        *("fp8_block", "gemm", (4096,), ((7168, 16384), (4096, 7168), (24576, 1536))),
        peers=("cublaslt",),
        limit=1.10,
        kernel="fp8_block",
    ),
    Target("fp8_block", "gemm", (64,), ((7168, 16384),), peers=("cublaslt",), limit=0.80),
    Target("fp8_block", "gemm", (128,), ((4096, 7168),), peers=("bf16",), limit=0.75),
    Target("fp8_block", "gemm", (1, 16), peers=BLOCK, limit=0.80),
    Target("fp8_block", "gemm", (4096,), DEEPSEEK, peers=("deepseek",), limit=0.5),
    Target("fp8_block", "gemm", (1, 16, 64, 128, 1024), DEEPSEEK, peers=("deepseek",), limit=1.0),
    Target(
        *("fp8_block", "silu", (4096,), ((7168, 16384), (4096, 7168), (24576, 1536))),
        peers=("stock",),
        limit=1.0,
    ),
    Target("fp8_block", "linear", (64, 128, 1024, 4096), peers=("bf16",), limit=1.0),
)
GRIDS = (
    Grid("w8a8", "linear", systems=W8A8_LINEAR),
    Grid("w8a8", "gemm", systems=W8A8_GEMM),
    Grid("w8a8_fp16", "linear", (256,), (OUT,), systems=W8A8_LINEAR),
    Grid("w8a8_fp16", "gemm", (256,), (OUT,), systems=W8A8_GEMM),
    # stock-autotune takes long to tune: only at the shapes that a target names
    *(
        Grid(target.family, target.measure, target.m, target.nk, systems=(TUNED,))
        for target in TARGETS
        if target.family == "w8a8" and target.nk
    ),
    Grid("weight_only", "linear", systems=("bf16", *WEIGHT_ONLY)),
    Grid("weight_only", "linear", (1, 4, 16), systems=LAYOUTS[1:]),
    Grid(
        *("weight_only_fp16", "linear", (16,), (GATE_UP,)),
        systems=("bf16", "stock", "gemlite", "dequantize"),
    ),
    Grid("fp8", "silu", systems=("stock", "bf16")),
    Grid("fp8_block", "gemm", systems=("cublaslt", "bf16", "stock")),
    Grid("fp8_block", "gemm", nk=DEEPSEEK, systems=("deepseek",)),
    Grid("fp8_block", "silu", (4096,), systems=("stock", "bf16")),
    Grid("fp8_block", "linear", (64, 128, 1024, 4096), systems=("stock", "bf16")),
)


def systems_of(row: Row, *, is_tiny: bool = False) -> list[str]:
    """The systems of a row, ours first; ``is_tiny``: those of all rows of its measure."""
    mine = [
        grid
        for grid in GRIDS
        if grid.covers(row)
        or (is_tiny and (grid.family, grid.measure) == (row["family"], row["measure"]))
    ]
    return list(dict.fromkeys(["ours", *(name for grid in mine for name in grid.systems)]))


def where(row: Row) -> str:
    return f"{row['family']} {row['measure']} {gemm.label(row)}"


# ------------------------------------------------------------------------------------------
# verdicts


def judge(rows: Sequence[Row], expected: Sequence[Row] = ()) -> Iterator[Verdict]:
    """The verdict of each target on each row. A mean needs all ``expected`` rows."""
    for target in TARGETS:
        mine = [row for row in rows if target.covers(row)]
        if target.is_mean and mine:
            yield _mean_verdict(target, mine, sum(map(target.covers, expected)))
        elif not target.is_mean:
            yield from (_verdict(target, row) for row in mine)
    yield from _decode_verdicts(rows)


def ratio(row: Row, ours: str, peer: str) -> list[float] | None:
    """Quartiles of time of ours / time of the peer; None if one of them was not timed."""
    if peer != MEMORY:
        return row["ratios"].get(f"{ours}/{peer}")
    reply = row["systems"].get(ours, {})
    floor = gemm.weight_bytes(row) / row["ceilings"]["read_tbps"] / 1e6
    return [us / floor for us in reply["us"]] if "us" in reply else None


def to_fastest(row: Row, ours: str, peers: Sequence[str]) -> tuple[list[float], str] | None:
    """(quartiles of the ratio, peer) for the fastest peer that was timed."""
    found = [(q, peer) for peer in peers if peer != ours and (q := ratio(row, ours, peer))]
    return max(found, key=lambda item: item[0][1], default=None)


def _verdict(target: Target, row: Row) -> Verdict:
    systems, verdict = row["systems"], functools.partial(Verdict, str(target), row=where(row))
    timed = [name for name in target.ours if "us" in systems.get(name, {})]
    for name in timed:
        if systems[name].get("wrong"):
            return verdict(met=False, detail=f"{name} is wrong")
    found = [(*pair, name) for name in timed if (pair := to_fastest(row, name, target.peers))]
    if not timed and not all(is_unknown(systems.get(name)) for name in target.ours):
        return verdict(met=False, detail="ours fails")
    absent = [
        name
        for name in dict.fromkeys((*target.ours, *target.peers))
        if name in systems_of(row) and is_unknown(systems.get(name))
    ]
    if not found:
        return verdict(met=None, detail="without " + (", ".join(absent) or "a peer"))
    quartiles, peer, ours = min(found, key=lambda item: item[0][1])
    # timed, but never in the same run as ours
    absent += [
        name
        for name in target.peers
        if name != ours and "us" in systems.get(name, {}) and not ratio(row, ours, name)
    ]
    limit = target.limit
    if target.slack_us:
        limit = max(limit, 1 + target.slack_us / systems[peer]["us"][1])
    detail = f"{quartiles[1]:.3f} [{quartiles[0]:.3f}, {quartiles[2]:.3f}]"
    detail += f" of {peer}" if len(target.peers) > 1 else ""
    detail += f" by {ours}" if len(target.ours) > 1 else ""
    if peer == MEMORY:
        detail += f": {1 / quartiles[1]:.0%} of {row['ceilings']['read_tbps']:.2f} TB/s"
    refused = [name for name in target.peers if "failed" in systems.get(name, {})]
    detail += "".join(f"; {name} fails" for name in refused if name not in absent)
    if quartiles[1] > limit:
        return verdict(met=False, detail=detail)
    kernels = systems[ours].get("kernels", [])
    if target.kernel and not any(kernel.startswith(target.kernel) for kernel in kernels):
        return verdict(met=None, detail=f"{detail}, but no kernel {target.kernel}* ran")
    if absent:
        return verdict(met=None, detail=f"{detail}, without {', '.join(absent)}")
    return verdict(met=True, detail=detail)


def _mean_verdict(target: Target, rows: Sequence[Row], expected: int) -> Verdict:
    place = f"{target.family} {target.measure}"
    verdict = functools.partial(Verdict, f"geometric mean {target}", row=place)
    pairs = [to_fastest(row, target.ours[0], target.peers) for row in rows]
    medians = [pair[0][1] for pair in pairs if pair]
    if not medians:
        return verdict(met=None, detail="no row")
    mean, count = statistics.geometric_mean(medians), f"of {len(medians)} rows"
    if len(medians) < max(expected, len(rows)):
        return verdict(met=None, detail=f"{mean:.3f} {count}, {expected} expected")
    return verdict(met=mean <= target.limit, detail=f"{mean:.3f} {count}")


def _decode_verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """W8A8 with M < 16 takes no longer than with M = 16, the rows of the smallest tile."""
    mine = [row for row in rows if row["family"] == "w8a8" and "us" in row["systems"]["ours"]]
    times = {
        (row["measure"], row["n"], row["k"], row["m"]): row["systems"]["ours"]["us"][1]
        for row in mine
    }
    for (measure, n, k, m), us in times.items():
        if m >= 16:
            continue
        label = f"w8a8 {measure} {m}x{n}x{k}"
        verdict = functools.partial(Verdict, "not slower than M = 16", row=label)
        full = times.get((measure, n, k, 16))
        if full is None:
            yield verdict(met=None, detail="without M = 16")
        else:
            limit = full * max(1.03, 1 + 0.3 / full)
            yield verdict(met=us <= limit, detail=f"{us:.1f} and {full:.1f} us")
