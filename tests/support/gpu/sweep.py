"""Products of 8-bit operands at many sizes on a GPU: none fails, every element is right.

    python -m tests.support.gpu.sweep                        # everything; needs sm_90
    python -m tests.support.gpu.sweep fp8_block --every-m    # each M in 1 ... 600 at one N x K
    python -m tests.support.gpu.sweep w8a8 --sizes 7:19      # 12 row counts x some of 40 (N, K)
    python -m tests.support.gpu.sweep --refusals             # at which M eager mode fails

A graph calls ``_int_mm`` or ``_scaled_mm``; what it keeps of them is the library's. Each M at one
N x K is a call of one graph with a dynamic M; the others are compiled for their sizes alone. Exit
code 1 if a product failed or is wrong."""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch

import inductor_quant
from tests.support.gemms.w8a8 import assert_close

Tensor = torch.Tensor
bf16, f32, e4m3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ROWS = (1, 3, 16, 17, 31, 64, 129, 255, 258, 385, 602, 1023)
EVERY_M, AT = 600, (1600, 1088)  # which end within a block
OPTIONS = {"inductor_quant.on_error": "raise"}


def sizes(count: int = 40, seed: int = 0) -> list[tuple[int, int]]:
    """(N, K), multiples of 64 up to 8192, drawn by their logarithms."""
    draw = random.Random(seed)
    size = lambda: 64 * round(2 ** draw.uniform(0, 7))  # noqa: E731
    return [(size(), size()) for _ in range(count)]


def blocks(size: int) -> int:
    return -(-size // 128)


def w8a8(a: Tensor, s: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (torch._int_mm(a, w.t()).float() * s * t.t()).to(bf16)


def fp8(a: Tensor, s: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return torch._scaled_mm(a, w.t(), s, t.t(), out_dtype=bf16)


def fp8_fast(a: Tensor, s: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return torch._scaled_mm(a, w.t(), s, t.t(), out_dtype=bf16, use_fast_accum=True)


FAMILIES: dict[str, Callable[..., Tensor]] = {
    "w8a8": w8a8,
    "fp8": fp8,
    "fp8_fast": fp8_fast,
    "fp8_block": fp8,
}


def elements(family: str, rows: int, columns: int) -> Tensor:
    if family == "w8a8":
        return torch.randint(-128, 128, (rows, columns), device="cuda").to(torch.int8)
    return torch.randn(rows, columns, device="cuda").to(e4m3)


def activation(family: str, m: int, k: int) -> tuple[Tensor, Tensor]:
    """Rows and their scales; with blocks these are contiguous along M, as cuBLASLt wants them."""
    shape = (blocks(k), m) if family == "fp8_block" else (1, m)
    return elements(family, m, k), (torch.rand(shape, device="cuda") + 0.1).t()


def weight(family: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    shape = (blocks(n), blocks(k)) if family == "fp8_block" else (n, 1)
    return elements(family, n, k), torch.rand(shape, device="cuda") + 0.1


def wide(q: Tensor, scale: Tensor, rows: int = 1) -> Tensor:
    """In fp64; ``rows``: how many a block has."""
    if scale.shape[1] == 1 and rows == 1:
        return q.double() * scale.double()
    scale = scale.double().repeat_interleave(rows, 0)[: q.shape[0]]
    return q.double() * scale.repeat_interleave(128, 1)[:, : q.shape[1]]


def reference(family: str, a: Tensor, s: Tensor, w: Tensor, t: Tensor) -> Tensor:
    is_block = family == "fp8_block"
    return wide(a, s, 1) @ wide(w, t, 128 if is_block else 1).t()


def wrong(family: str, got: Tensor, *inputs: Tensor) -> str:
    try:
        assert_close(got, reference(family, *inputs), slack=4 if family == "fp8_fast" else 2)
    except AssertionError as error:
        return str(error)
    return ""


def every_m(family: str, most: int = EVERY_M) -> Iterator[tuple[str, str]]:
    """(what, what is wrong with it): each M at one N x K through one dynamic graph."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    n, k = AT
    w, t = weight(family, n, k)
    fn = torch.compile(FAMILIES[family], backend="inductor_quant", options=OPTIONS)
    for m in range(most, 0, -1):
        a, s = activation(family, m, k)
        if m > 1:
            torch._dynamo.mark_dynamic(a, 0)
            torch._dynamo.mark_dynamic(s, 0)
        yield f"{family} {m} x {n} x {k}", attempt(family, fn, a, s, w, t)


def attempt(family: str, fn: Callable[..., Tensor], *inputs: Tensor) -> str:
    try:
        got = fn(*inputs)
    except Exception as error:
        return repr(error)[:400]
    return wrong(family, got, *inputs)


def at_sizes(family: str, some: list[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Likewise: 12 row counts, in one graph for each (N, K)."""

    def all_rows(w: Tensor, t: Tensor, *activations: Tensor) -> list[Tensor]:
        pairs = zip(activations[::2], activations[1::2], strict=True)
        return [FAMILIES[family](a, s, w, t) for a, s in pairs]

    for n, k in some:
        torch.manual_seed(0)
        torch._dynamo.reset()
        w, t = weight(family, n, k)
        activations = [activation(family, m, k) for m in ROWS]
        fn = torch.compile(all_rows, backend="inductor_quant", dynamic=False, options=OPTIONS)
        try:
            with inductor_quant.collect() as report:
                results = fn(w, t, *(tensor for pair in activations for tensor in pair))
        except Exception as error:
            yield f"{family} {ROWS} x {n} x {k}", repr(error)[:2000]
            continue
        KERNELS.update(choice.chosen.partition(" ")[0] for choice in report.kernels)
        KERNELS[f"{family}: library"] += sum(r.code == "many_rows" for r in report.rejections)
        for m, (a, s), got in zip(ROWS, activations, results, strict=True):
            yield f"{family} {m} x {n} x {k}", wrong(family, got, a, s, w, t)


KERNELS: Counter[str] = Counter()


def refusals(family: str, some: list[tuple[int, int]]) -> Iterator[str]:
    """What eager mode says at which M."""
    for n, k in some:
        w, t = weight(family, n, k)
        at: dict[str, list[int]] = {}
        for m in range(1, EVERY_M + 1):
            a, s = activation(family, m, k)
            try:
                FAMILIES[family](a, s, w, t)
            except Exception as error:
                message = re.sub("[0-9]+$", "...", str(error).splitlines()[0][:100])
                at.setdefault(message, []).append(m)
        yield f"{family} x {n} x {k}: eager mode computes {EVERY_M - sum(map(len, at.values()))}"
        for message, rows in at.items():
            ends = f"{rows[:3]} ... {rows[-3:]}, {sum(m % 4 == 0 for m in rows)} multiples of 4"
            yield f"    fails at {len(rows)}: {ends}: {message}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=" ".join(FAMILIES))
    parser.add_argument("--every-m", action="store_true")
    parser.add_argument("--sizes", help="FROM:TO of the 40")
    parser.add_argument("--refusals", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="ends after the product that exceeds these"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    families = options.families or list(FAMILIES)
    start, failures, is_all = time.monotonic(), 0, not (options.every_m or options.sizes)
    first, last = map(int, (options.sizes or "0:40").split(":"))
    for family in families:
        if options.refusals:
            print(*refusals(family, [AT, (512, 512)]), sep="\n", flush=True)
            continue
        runs = [every_m(family)] if options.every_m or is_all else []
        if options.sizes or is_all:
            runs += [at_sizes(family, [each]) for each in sizes()[first:last]]
        right = done = 0
        for each in runs:
            done += 1
            for what, why in each:
                right += not why
                failures += bool(why)
                if why:
                    print(f"WRONG {what}: {why}", flush=True)
                if time.monotonic() - start > options.seconds:
                    break
            if time.monotonic() - start > options.seconds:
                break
        took = time.monotonic() - start
        print(f"{family}: {done} of {len(runs)} graphs, {right} products right, {took:.0f} s")
        print("   ", ", ".join(f"{name} {count}" for name, count in sorted(KERNELS.items())))
        sys.stdout.flush()
    return int(failures > 0)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
