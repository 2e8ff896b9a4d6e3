"""One product with a block-sparse weight: ours, the dense product, and torch's own kernel.

    python -m examples.benchmarks.block_sparse               # the cells that the targets name
    python -m examples.benchmarks.block_sparse --nk 4096x4096 --m 16 --block 32 --zeros 0.9 --tune
    python -m examples.benchmarks.block_sparse --stored int8 --m 1 16        # scales of blocks

It prints a JSON line for each cell: median microseconds of interleaved rounds of CUDA graphs, in
which each call reads its own weight from memory. ``--tune`` lets torch search the settings of
``bsr_dense_addmm`` (its search, on times of CUDA graphs; minutes). The MLPs of whole models:
``python -m examples.block_sparse``."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import inductor_quant
from examples.benchmarks.timing import Replay, copies_beyond_l2, machine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SIZES = ((4096, 4096), (14336, 4096))
MAX_ERROR = 4e-3  # relative rms: a rounding of results, and one of scaled weights


class Cell(NamedTuple):
    m: int
    n: int
    k: int
    block: int
    zeros: float
    dtype: str
    stored: str = ""


class Prepared(NamedTuple):
    cell: Cell
    replays: dict[str, Replay]
    facts: dict[str, Any]


def targets() -> Iterator[Cell]:
    """The cells of the performance targets."""
    for (n, k), zeros, block in itertools.product(SIZES, (0.8, 0.9), (32, 64, 128)):
        yield from (Cell(m, n, k, block, zeros, "bf16") for m in (1, 16, 256, 4096))
    for size, zeros, m in itertools.product((1024, 4096), (0.8, 0.9), (16, 64, 256, 1024, 4096)):
        yield Cell(m, size, size, 32, zeros, "fp16")
    for (n, k), m in itertools.product(SIZES, (1, 16)):
        yield Cell(m, n, k, 32, 0.8, "bf16", "int8")


def weight(cell: Cell, device: str) -> tuple[Any, ...]:
    """values, crow, col, order, scale of blocks at random places."""
    grid = cell.n // cell.block, cell.k // cell.block
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(grid, generator=draw) >= cell.zeros
    counts, (_, col) = mask.sum(1), mask.nonzero(as_tuple=True)
    crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    order = counts.argsort(descending=True, stable=True)
    values: Tensor = torch.randn(len(col), cell.block, cell.block, device=device)
    scale = torch.rand(len(col), 1, device=device) / 100 + 0.001 if cell.stored else None
    dtype = STORED[cell.stored] if cell.stored else DTYPES[cell.dtype]
    values = (40 * values if cell.stored else values).to(dtype)
    return values, *(table.int().to(device) for table in (crow, col, order)), scale


def product(
    n: int, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, order: Tensor, scale: Any
) -> Tensor:
    found: Tensor = torch.ops.inductor_quant.block_sparse(
        x, values, crow, col, None, order, scale, None, n=n
    )
    return found


def dense_of(cell: Cell, values: Tensor, crow: Tensor, col: Tensor, scale: Any) -> Tensor:
    """W [N, K] in the dtype of x."""
    real = values.float() if scale is None else values.float() * scale[:, :, None]
    grid = real.new_zeros(cell.n // cell.block, cell.k // cell.block, cell.block, cell.block)
    row = torch.arange(len(crow) - 1, device=col.device).repeat_interleave(crow.diff().long())
    grid[row, col.long()] = real
    return grid.permute(0, 2, 1, 3).reshape(cell.n, cell.k).to(DTYPES[cell.dtype])


def prepare(cell: Cell, device: str, *, tune: bool = False, config: str = "") -> Prepared:
    """Compile, check against fp64, and capture."""
    torch.compiler.reset()
    size = values_bytes(cell)
    sets = [weight(cell, device) for _ in range(copies_beyond_l2(size, device))]
    x = torch.randn(cell.m, cell.k, device=device).to(DTYPES[cell.dtype])
    options = {"inductor_quant.configs": (config,)} if config else None
    # code of its own, so that Dynamo counts no recompilations
    run = torch.compile(
        functools.partial(product, cell.n), backend="inductor_quant", dynamic=False, options=options
    )
    with inductor_quant.collect() as report:
        result = run(x, *sets[0])
    values, crow, col, _, scale = sets[0]
    dense = dense_of(cell, values, crow, col, scale)
    exact = x.double() @ dense.double().t()
    facts: dict[str, Any] = {
        "kernel": report.kernels[0].chosen if report.kernels else None,
        "error": error(result, exact),
    }
    replays = {"ours": Replay([functools.partial(run, x, *each) for each in sets], device)}
    others = [dense] + [
        torch.randn_like(dense) for _ in range(copies_beyond_l2(dense.nbytes, device) - 1)
    ]
    replays["dense"] = Replay([functools.partial(torch.mm, x, w.t()) for w in others], device)
    if cell.stored:  # the same blocks without a scale, in the dtype of x
        plain = [
            ((each[0].float() * each[-1][:, :, None]).to(x.dtype), *each[1:4], None)
            for each in (*sets, *sets)[: copies_beyond_l2(2 * size, device)]
        ]
        run(x, *plain[0])
        replays["blocks"] = Replay([functools.partial(run, x, *each) for each in plain], device)
    elif device == "cuda" and cell.m % 16 == 0:
        replays["bsr"], facts["bsr"] = torchs(cell, x, sets, exact, tune=tune)
    return Prepared(cell, replays, facts)


def values_bytes(cell: Cell) -> int:
    share = max((1 - cell.zeros) * cell.n * cell.k, 1)
    return math.ceil(share * (1 if cell.stored else 2))


def torchs(
    cell: Cell, x: Tensor, sets: list[tuple[Any, ...]], exact: Tensor, *, tune: bool
) -> tuple[Replay, dict[str, Any]]:
    """``bsr_dense_addmm`` on x [M, K] as ``F.linear`` gives it, and its settings."""
    from torch.sparse import _triton_ops as ops

    bsrs = [
        torch.sparse_bsr_tensor(crow, col, values, size=(cell.n, cell.k))
        for values, crow, col, *_ in sets
    ]
    out = torch.empty(cell.n, cell.m, dtype=x.dtype, device=x.device)
    settings = searched(out, bsrs[0], x.t()) if tune else None

    def call(bsr: Tensor) -> Tensor:
        return ops.bsr_dense_addmm(out, bsr, x.t(), beta=0, out=out, meta=settings)

    wrong = error(call(bsrs[0]).t(), exact)
    return Replay([functools.partial(call, bsr) for bsr in bsrs], "cuda"), {
        "settings": settings,
        "error": wrong,
    }


def searched(out: Tensor, bsr: Tensor, columns: Tensor) -> dict[str, Any]:
    """What torch's own search finds, on times of CUDA graphs: eager calls time the host."""
    from torch.sparse._triton_ops_meta import tune_bsr_dense_addmm
    from triton import testing

    def milliseconds(call: Callable[[], Any], **_: Any) -> float:
        replay = Replay([call] * 8, "cuda")
        return 1000 * min(replay.seconds() for _ in range(4))

    before, testing.do_bench = testing.do_bench, milliseconds
    try:
        found: dict[str, Any] = tune_bsr_dense_addmm(out, bsr, columns, beta=0)
        return found
    finally:
        testing.do_bench = before


def error(result: Tensor, exact: Tensor) -> float:
    """Relative rms."""
    return float(((result.double() - exact).square().mean() / exact.square().mean()).sqrt())


def measure(prepared: Prepared, rounds: int) -> dict[str, Any]:
    """The line of a cell; a ratio is the median of those of each round."""
    times: dict[str, list[float]] = {name: [] for name in prepared.replays}
    for _ in range(rounds):
        for name, replay in prepared.replays.items():
            times[name].append(1e6 * replay.seconds())
    line = {**prepared.cell._asdict(), **prepared.facts}
    line |= {f"{name}_us": round(statistics.median(each), 2) for name, each in times.items()}
    for name in times.keys() - {"ours"}:
        ratios = (a / b for a, b in zip(times["ours"], times[name], strict=True))
        line[f"of_{name}"] = round(statistics.median(ratios), 3)
    return line


def cells(options: argparse.Namespace) -> list[Cell]:
    if options.tiny:
        return [Cell(5, 128, 128, 32, 0.5, "bf16", stored) for stored in ("", "int8")]
    given = options.nk, options.m, options.block, options.zeros, options.dtype, options.stored
    if not any(given):
        return list(targets())
    sizes = options.nk or ["4096x4096"]
    grid = itertools.product(
        (tuple(map(int, text.split("x"))) for text in sizes),
        options.zeros or [0.8],
        options.block or [32],
        options.m or [1, 16, 64, 256, 1024, 4096],
    )
    dtype, stored = options.dtype or "bf16", options.stored or ""
    return [Cell(m, n, k, block, zeros, dtype, stored) for (n, k), zeros, block, m in grid]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nk", nargs="+", help="N x K, as 4096x4096")
    parser.add_argument("--m", nargs="+", type=int)
    parser.add_argument("--block", nargs="+", type=int)
    parser.add_argument("--zeros", nargs="+", type=float)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--stored", choices=STORED, help="blocks with scales, dtype of the values")
    parser.add_argument("--config", default="", help="pin a kernel and configuration")
    parser.add_argument("--tune", action="store_true", help="tune bsr_dense_addmm: minutes a cell")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("--tiny", action="store_true", help="two small cells, to try the script")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("this needs a GPU; --tiny tries the script")
    warnings.filterwarnings("ignore", message="Sparse BSR")
    wrong = 0
    for cell in cells(options):
        with torch.no_grad():
            prepared = prepare(cell, device, tune=options.tune, config=options.config)
            line = measure(prepared, options.rounds)
        wrong += line["error"] > MAX_ERROR
        text = json.dumps(line | machine(device))
        print(text, flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
