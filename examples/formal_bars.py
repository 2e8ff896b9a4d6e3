"""What ``bench_formal.py`` measures and the bars it judges by: data, and how a verdict is reached.

A row is a shape of a family in one measure, with the systems that took part in its rounds. A ratio
is time ours / time peer of the same round, the median over the rounds; the fastest of several peers
is the one with the largest ratio, so rows measured in parts, each with ours, judge as one."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Sequence

import bench_gemm
from bench_systems import Row, Verdict, is_unknown

QKV, OUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)  # Llama-3-8B
DEEPSEEK = ((24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048))  # whole blocks
TUNED = "stock-autotune"
MEMORY = "reading the weight"  # at the bandwidth that the card showed in the same run
LAYOUTS = ("ours", "ours-awq", "ours-awq-prepacked", "ours-hqq", "ours-hqq-prepacked")
W8A8_LINEAR, W8A8_GEMM = ("bf16", "stock", "gemlite"), ("stock", "gemlite")
WEIGHT_ONLY = ("stock", "tinygemm", "gemlite", "dequantize")
BLOCK = ("cublaslt", "bf16", "stock", "deepseek")


@dataclasses.dataclass(frozen=True)
class Selection:
    """Rows of a family in one measure: of these M and (N, K), or all where none are given."""

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
class Bar(Selection):
    """Time of the fastest of ``ours`` / time of the fastest of ``peers`` <= ``limit``.

    slack_us    more than ``limit`` is as good if it is no more than these microseconds
    is_mean     the geometric mean over all of the rows, not each of them
    kernel      how the name of a kernel of ours that ran must begin: what was left to a library
                does not count
    """

    peers: tuple[str, ...]
    limit: float
    ours: tuple[str, ...] = ("ours",)
    slack_us: float = 0.0
    is_mean: bool = False
    kernel: str = ""

    def __str__(self) -> str:
        if self.slack_us:
            return f"not behind {', '.join(self.peers)}"
        peers = self.peers[0] if len(self.peers) == 1 else f"the best of {', '.join(self.peers)}"
        ours = "" if self.ours == ("ours",) else f"{' or '.join(self.ours)} "
        return f"{ours}<= {self.limit:.3g} x {peers}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid(Selection):
    """Rows that are measured: the formal shapes of the family, ours and ``systems``."""

    systems: tuple[str, ...]


def _not_behind(family: str, measure: str, peers: tuple[str, ...]) -> Bar:
    """The formal grid's bar: by no more than 3 %, or 0.3 us."""
    return Bar(family, measure, peers=peers, limit=1.03, slack_us=0.3)


BARS = (
    # W8A8
    Bar("w8a8", "linear", (4096,), (GATE_UP,), peers=(TUNED,), limit=0.72),
    Bar("w8a8", "linear", (4096,), (DOWN,), peers=(TUNED,), limit=0.80),
    Bar("w8a8", "linear", (256,), (DOWN, QKV), peers=(*W8A8_LINEAR, TUNED), limit=0.80),
    Bar("w8a8", "linear", (64,), (GATE_UP,), peers=(*W8A8_LINEAR, TUNED), limit=0.80),
    Bar("w8a8", "linear", (16,), (QKV,), peers=(*W8A8_LINEAR, TUNED), limit=0.75),
    Bar("w8a8", "linear", (16, 64, 256, 1024, 4096), peers=("bf16",), limit=1.0),
    Bar("w8a8", "gemm", (4096,), (GATE_UP, DOWN, QKV, OUT), peers=("stock",), limit=0.74),
    Bar("w8a8", "gemm", (16,), (QKV,), peers=("gemlite",), limit=0.65),
    _not_behind("w8a8", "linear", (*W8A8_LINEAR, TUNED)),
    _not_behind("w8a8", "gemm", (*W8A8_GEMM, TUNED)),
    _not_behind("w8a8_fp16", "linear", W8A8_LINEAR),
    _not_behind("w8a8_fp16", "gemm", W8A8_GEMM),
    # weights of 4 bits
    Bar("weight_only", "linear", (1,), (GATE_UP,), peers=(MEMORY,), limit=1 / 0.60),
    Bar("weight_only", "linear", (1,), (GATE_UP,), peers=("bf16", *WEIGHT_ONLY), limit=0.70),
    Bar("weight_only", "linear", (1,), (DOWN, QKV), peers=("bf16", *WEIGHT_ONLY), limit=0.80),
    Bar("weight_only", "linear", (16,), (GATE_UP,), peers=("bf16",), limit=0.42),
    Bar("weight_only", "linear", (16,), (QKV,), peers=("bf16",), limit=0.65),
    Bar("weight_only", "linear", (16,), (DOWN,), peers=("bf16",), limit=0.55),
    Bar("weight_only", "linear", (64,), (GATE_UP,), peers=("bf16",), limit=0.75),
    Bar("weight_only", "linear", (256,), peers=("bf16",), limit=1.0),
    Bar("weight_only", "linear", (4096,), peers=("bf16",), limit=1.06),
    Bar("weight_only", "linear", (1, 4, 16), peers=LAYOUTS, limit=1.10),
    Bar(
        *("weight_only", "linear", (1, 4, 16)),
        ours=("ours-awq", "ours-awq-prepacked"),
        peers=LAYOUTS,
        limit=1.10,
    ),
    _not_behind("weight_only", "linear", WEIGHT_ONLY),
    _not_behind("weight_only_fp16", "linear", ("stock", "gemlite", "dequantize")),
    # FP8 by rows: cuBLASLt with the bias, then one kernel of Inductor's for SiLU
    Bar("fp8", "silu", peers=("stock",), limit=1.0, is_mean=True),
    Bar("fp8", "silu", peers=("stock",), limit=1.05),
    # FP8 in blocks
    Bar(
        *("fp8_block", "gemm", (4096,), ((7168, 16384), (4096, 7168), (24576, 1536))),
        peers=("cublaslt",),
        limit=1.10,
        kernel="fp8_block",
    ),
    Bar("fp8_block", "gemm", (64,), ((7168, 16384),), peers=("cublaslt",), limit=0.80),
    Bar("fp8_block", "gemm", (128,), ((4096, 7168),), peers=("bf16",), limit=0.75),
    Bar("fp8_block", "gemm", (1, 16), peers=BLOCK, limit=0.80),
    Bar("fp8_block", "gemm", (4096,), DEEPSEEK, peers=("deepseek",), limit=0.5),
    Bar("fp8_block", "gemm", (1, 16, 64, 128, 1024), DEEPSEEK, peers=("deepseek",), limit=1.0),
    Bar(
        *("fp8_block", "silu", (4096,), ((7168, 16384), (4096, 7168), (24576, 1536))),
        peers=("stock",),
        limit=1.0,
    ),
    Bar("fp8_block", "linear", (64, 128, 1024, 4096), peers=("bf16",), limit=1.0),
)
GRIDS = (
    Grid("w8a8", "linear", systems=W8A8_LINEAR),
    Grid("w8a8", "gemm", systems=W8A8_GEMM),
    Grid("w8a8_fp16", "linear", (256,), (OUT,), systems=W8A8_LINEAR),
    Grid("w8a8_fp16", "gemm", (256,), (OUT,), systems=W8A8_GEMM),
    # tuning is most of its time, so where a bar names the shape alone
    *(
        Grid(bar.family, bar.measure, bar.m, bar.nk, systems=(TUNED,))
        for bar in BARS
        if bar.family == "w8a8" and bar.nk
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
    """Who takes part in a row, ours first; ``is_tiny``: everybody who does in some row."""
    mine = [
        grid
        for grid in GRIDS
        if grid.covers(row)
        or (is_tiny and (grid.family, grid.measure) == (row["family"], row["measure"]))
    ]
    return list(dict.fromkeys(["ours", *(name for grid in mine for name in grid.systems)]))


def where(row: Row) -> str:
    return f"{row['family']} {row['measure']} {bench_gemm.label(row)}"


# ------------------------------------------------------------------------------------------
# verdicts


def judge(rows: Sequence[Row], expected: Sequence[Row] = ()) -> Iterator[Verdict]:
    """Each bar on each of the rows; a mean is whole where it has all of the ``expected`` rows."""
    for bar in BARS:
        mine = [row for row in rows if bar.covers(row)]
        if bar.is_mean and mine:
            yield _mean_verdict(bar, mine, sum(map(bar.covers, expected)))
        elif not bar.is_mean:
            yield from (_verdict(bar, row) for row in mine)
    yield from _few_rows(rows)


def ratio(row: Row, ours: str, peer: str) -> list[float] | None:
    """Quartiles of time ours / time peer; None: one of them was not timed."""
    if peer != MEMORY:
        return row["ratios"].get(f"{ours}/{peer}")
    reply = row["systems"].get(ours, {})
    floor = bench_gemm.weight_bytes(row) / row["ceilings"]["read_tbps"] / 1e6
    return [us / floor for us in reply["us"]] if "us" in reply else None


def to_fastest(row: Row, ours: str, peers: Sequence[str]) -> tuple[list[float], str] | None:
    """(quartiles of the ratio, peer) of the fastest of the peers that were timed."""
    found = [(q, peer) for peer in peers if peer != ours and (q := ratio(row, ours, peer))]
    return max(found, key=lambda item: item[0][1], default=None)


def _verdict(bar: Bar, row: Row) -> Verdict:
    systems, said = row["systems"], functools.partial(Verdict, str(bar), row=where(row))
    timed = [name for name in bar.ours if "us" in systems.get(name, {})]
    for name in timed:
        if systems[name].get("wrong"):
            return said(met=False, detail=f"{name} is wrong")
    found = [(*pair, name) for name in timed if (pair := to_fastest(row, name, bar.peers))]
    if not timed and not all(is_unknown(systems.get(name)) for name in bar.ours):
        return said(met=False, detail="ours fails")
    absent = [
        name
        for name in dict.fromkeys((*bar.ours, *bar.peers))
        if name in systems_of(row) and is_unknown(systems.get(name))
    ]
    if not found:
        return said(met=None, detail="without " + (", ".join(absent) or "a peer"))
    quartiles, peer, ours = min(found, key=lambda item: item[0][1])
    # timed, but never in one run with ours
    absent += [
        name
        for name in bar.peers
        if name != ours and "us" in systems.get(name, {}) and not ratio(row, ours, name)
    ]
    limit = bar.limit
    if bar.slack_us:
        limit = max(limit, 1 + bar.slack_us / systems[peer]["us"][1])
    detail = f"{quartiles[1]:.3f} [{quartiles[0]:.3f}, {quartiles[2]:.3f}]"
    detail += f" of {peer}" if len(bar.peers) > 1 else ""
    detail += f" by {ours}" if len(bar.ours) > 1 else ""
    if peer == MEMORY:
        detail += f": {1 / quartiles[1]:.0%} of {row['ceilings']['read_tbps']:.2f} TB/s"
    refused = [name for name in bar.peers if "failed" in systems.get(name, {})]
    detail += "".join(f"; {name} fails" for name in refused if name not in absent)
    if quartiles[1] > limit:
        return said(met=False, detail=detail)
    kernels = systems[ours].get("kernels", [])
    if bar.kernel and not any(kernel.startswith(bar.kernel) for kernel in kernels):
        return said(met=None, detail=f"{detail}, but by no kernel of {bar.kernel}")
    if absent:
        return said(met=None, detail=f"{detail}, without {', '.join(absent)}")
    return said(met=True, detail=detail)


def _mean_verdict(bar: Bar, rows: Sequence[Row], expected: int) -> Verdict:
    said = functools.partial(Verdict, f"geometric mean {bar}", row=f"{bar.family} {bar.measure}")
    pairs = [to_fastest(row, bar.ours[0], bar.peers) for row in rows]
    medians = [pair[0][1] for pair in pairs if pair]
    if not medians:
        return said(met=None, detail="no row")
    mean, count = statistics.geometric_mean(medians), f"of {len(medians)} rows"
    if len(medians) < max(expected, len(rows)):
        return said(met=None, detail=f"{mean:.3f} {count}, {expected} are wanted")
    return said(met=mean <= bar.limit, detail=f"{mean:.3f} {count}")


def _few_rows(rows: Sequence[Row]) -> Iterator[Verdict]:
    """W8A8 below 16 rows against 16, which cost as much as the smallest tile."""
    mine = [row for row in rows if row["family"] == "w8a8" and "us" in row["systems"]["ours"]]
    times = {
        (row["measure"], row["n"], row["k"], row["m"]): row["systems"]["ours"]["us"][1]
        for row in mine
    }
    for (measure, n, k, m), us in times.items():
        if m >= 16:
            continue
        label = f"w8a8 {measure} {m}x{n}x{k}"
        said = functools.partial(Verdict, "no slower than with 16 rows", row=label)
        full = times.get((measure, n, k, 16))
        if full is None:
            yield said(met=None, detail="without 16 rows")
        else:
            limit = full * max(1.03, 1 + 0.3 / full)
            yield said(met=us <= limit, detail=f"{us:.1f} and {full:.1f} us")
