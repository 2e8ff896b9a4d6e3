"""The tile configurations that are worth timing.

Each kernel has a ``Space``: values for each field of a configuration, and a filter. ``legal_sweep``
returns the configurations of every kernel of a family that are legal for one problem."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator

from examples.tuning.sweep import EVEN, TUNED, Shape
from inductor_quant.kernels import Kernel
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.spec.gemm import QuantGemmSpec

# ------------------------------------------------------------------------------------------
# filters: in sweeps on an H200 nothing that they exclude came near the best


def is_sensible_block(c: GemmConfig) -> bool:
    """BLOCK_K is one scale block."""
    return c.block_k == 128 and is_sensible(c)


def is_sensible_block_persistent(c: GemmConfig) -> bool:
    return (
        c.block_k == 128
        and c.num_stages in (3, 4, 5, 6)
        and c.num_warps in (4, 8)
        and c.block_m * c.block_n >= 64 * 128
        and min(c.block_m, c.block_n) >= 64
    )


def is_sensible_persistent(c: GemmConfig) -> bool:
    """Large tiles: a side of 64 costs 10 % or more."""
    return (
        c.block_m >= 128
        and c.block_n >= 128
        and 64 <= c.block_k <= 128
        and 3 <= c.num_stages <= 5
        and c.num_warps >= 4
        and (c.num_warps == 4 or c.block_m * c.block_n >= 128 * 256)
    )


def is_sensible(c: GemmConfig) -> bool:
    area = c.block_m * c.block_n
    in_flight = c.num_stages * (c.block_m + c.block_n) * c.block_k
    accumulators = area / (32 * c.num_warps)
    return not (
        (in_flight < 24 * 1024 and area <= 64 * 64)
        or accumulators < 4
        or (c.block_m == 16 and c.block_n == 256)
        or (c.num_warps == 2 and c.block_m > 16)
        or (c.num_warps == 8 and area <= 64 * 64)
        or (c.block_k == 64 and (c.block_m < 64 or (area >= 128 * 128 and c.num_stages < 4)))
        or (c.block_k == 512 and c.block_m > 32)
        or (c.block_n == 16 and c.block_m > 32)
        or (c.block_m == 256 and c.block_n < 64)
        or (c.num_stages == 2 and c.block_k < 128)
    )


def has_work_for_warps(c: GemmConfig) -> bool:
    """Each warp unpacks 1024 to 8192 elements of W per K step."""
    return 1024 <= c.block_n * c.block_k // c.num_warps <= 8192


def has_registers_for_prefetch(c: GemmConfig) -> bool:
    """A warp prefetches one, two or four times 32 of N by 128 of K: 16 registers per lane each."""
    return c.block_n * c.block_k // c.num_warps in (32 * 128, 2 * 32 * 128, 4 * 32 * 128)


# ------------------------------------------------------------------------------------------
# spaces


@dataclasses.dataclass(frozen=True)
class Space:
    """Values of each field of a configuration, and a filter on their combinations."""

    block_m: tuple[int, ...]
    block_n: tuple[int, ...]
    block_k: tuple[int, ...]
    num_warps: tuple[int, ...]
    num_stages: tuple[int, ...]
    group_m: tuple[int, ...] = (8,)
    split_k: tuple[int, ...] = (1,)
    is_sensible: Callable[[GemmConfig], bool] = lambda _: True
    is_general: bool = False  # much slower than any other kernel that takes the problem

    def configs(self) -> Iterator[GemmConfig]:
        values = (getattr(self, field.name) for field in dataclasses.fields(GemmConfig))
        return filter(self.is_sensible, (GemmConfig(*each) for each in itertools.product(*values)))


_TILE = (16, 32, 64, 128, 256)
_SPLIT_K = (1, 2, 4, 8)
_EIGHT_BIT = functools.partial(
    Space, _TILE, _TILE, (64, 128, 256, 512), (2, 4, 8), (2, 3, 4, 5, 6, 8)
)
# The Gluon kernels of 8-bit operands have no space: a sweep takes the configurations they offer.
SPACES: dict[str, Space] = {
    "w8a8_mm": _EIGHT_BIT(is_sensible=is_sensible),
    "w8a8_swap_ab": Space((16, 32, 64), (64, 128), (128, 256), (4,), (4, 6, 8)),
    "w8a8_persistent": _EIGHT_BIT(is_sensible=is_sensible_persistent),
    "fp8_mm": _EIGHT_BIT(is_sensible=is_sensible),
    "fp8_persistent": _EIGHT_BIT(is_sensible=is_sensible_persistent),
    "fp8_block_mm": _EIGHT_BIT(is_sensible=is_sensible_block),
    "fp8_block_persistent": _EIGHT_BIT(is_sensible=is_sensible_block_persistent),
    "fp8_split_k": Space(
        *((16, 32, 64, 128), (64, 128, 256), (128, 256), (4, 8), (3, 4, 6, 8)),
        split_k=(1, 2, 3, 4),
        is_sensible=is_sensible,
    ),
    "fp8_block_split_k": Space(
        (16, 32, 64, 128), (32, 64, 128), (128,), (4, 8), (3, 4, 6), split_k=(1, 2, 3, 4, 8)
    ),
    "w4a8_mm": Space(
        *((16, 32, 64, 128), (32, 64, 128), (32, 64, 128), (2, 4, 8), (2, 3, 4, 5)),
        split_k=_SPLIT_K,
        is_general=True,
    ),
    "weight_only_small_m": Space(
        (8, 16, 32),
        (32, 64, 128, 256),
        (64, 128),
        (1, 2, 4),
        (2, 3, 4),
        split_k=_SPLIT_K,
        is_sensible=has_work_for_warps,
    ),
    "weight_only_decode": Space(
        (8, 16),
        (32, 64, 128),
        (256, 512, 1024, 2048, 4096),
        (2, 4, 8, 16),
        (1,),
        split_k=(1, 2, 4, 7),
        is_sensible=has_registers_for_prefetch,
    ),
    "weight_only_small_m_sm90": Space(
        (16, 32), (64, 128, 256), (128, 256, 512), (4, 8, 16), (2, 4)
    ),
    "weight_only_medium_m": Space(
        (32, 64, 128), (64, 128), (64, 128), (4, 8), (3, 4), split_k=_SPLIT_K
    ),
    "weight_only_bytes": Space(
        (8, 16, 32, 64, 128),
        (16, 32, 64, 128),
        (64, 128, 256, 512),
        (1, 2, 4),
        (3, 5),
        split_k=_SPLIT_K,
        is_sensible=has_work_for_warps,
    ),
    "weight_only_direct": Space(
        (8, 16),
        (16, 32, 64, 128),
        (64, 128, 256, 512, 1024, 2048),
        (2, 4, 8, 16),
        (1,),
        split_k=_SPLIT_K,
    ),
    "weight_only_mm_sm90": Space(
        (32, 64, 128, 256),
        (64, 128, 256),
        (64, 128),
        (4, 8),
        (3, 4, 6, 8),
        split_k=_SPLIT_K,
    ),
    "weight_only_mm": Space(
        *((16, 32, 64, 128), (16, 32, 64, 128), (32, 64, 128, 256), (2, 4, 8), (2, 3, 4, 5)),
        is_general=True,
    ),
}


def candidates(kernel: Kernel, device: Device, group_m: Iterable[int]) -> list[GemmConfig]:
    """All configurations of the kernel's space that are legal for large sizes."""
    space = dataclasses.replace(SPACES[kernel.name], group_m=tuple(group_m))
    rejection = functools.partial(kernel.config_rejection, TUNED[kernel.name].spec(), EVEN)
    return [config for config in space.configs() if rejection(config, device) is None]


def suits(config: GemmConfig, shape: Shape) -> bool:
    """Whether ``config`` is worth timing for ``shape``. The cost model covers an uneven K."""
    m, _, k = shape
    if k % config.block_k:
        return False
    if m >= 512:
        return config.block_m >= 64 and config.block_m * config.block_n >= 64 * 64
    return (
        config.block_m <= max(m, 16)
        and config.block_m >= m // 8
        and (m > 32 or config.num_stages > 2)
    )


# ------------------------------------------------------------------------------------------
# the sweep of one problem


def legal_sweep(
    kernels: Iterable[Kernel], spec: QuantGemmSpec, problem: Problem, device: Device
) -> list[str]:
    """The ``kernel config`` texts to time for ``problem``.

    First the configurations that the ``kernels`` offer by themselves, then the legal ones of their
    spaces in random order, so that a part covers the whole.
    """
    offered: list[str] = []
    others: list[str] = []
    for kernel in kernels:
        if kernel.rejection(spec, problem, device) is not None:
            continue
        rejection = functools.partial(kernel.config_rejection, spec, problem)
        own = [c for c in kernel.configs(spec, problem, device) if rejection(c, device) is None]
        space = SPACES.get(kernel.name)
        if own and space is not None and not (space.is_general and offered):
            swept = _fitting(space, problem, device)
            others += [f"{kernel.name} {c}" for c in swept if rejection(c, device) is None]
        offered += [f"{kernel.name} {config}" for config in own]
    random.Random(0).shuffle(others)
    return list(dict.fromkeys([*offered, *others]))


def _fitting(space: Space, problem: Problem, device: Device) -> Iterator[GemmConfig]:
    """The configurations of ``space`` that are worth timing for the sizes.

    Weight-only: each tile along M unpacks W again, so BLOCK_M is the least that covers M; for
    M > 32 half of it is tried too.
    """
    m, n, k = problem.m, problem.n, problem.k
    covering = next((block for block in space.block_m if m <= block), space.block_m[-1])
    rows = {covering} if m <= 32 or problem.weight is None else {covering, covering // 2}
    if covering >= 2 * max(m, 16):  # a kernel for a larger M
        return
    for config in space.configs():
        if max(space.split_k) == 1:
            fits = suits(config, (m, n, k))
        else:
            fits = config.block_m in rows and k % config.block_k == 0
        if fits and _splits_well(config, problem, device):
            yield config


def _splits_well(c: GemmConfig, problem: Problem, device: Device) -> bool:
    """split_k = 1, or at least four K steps per split, CTAs for at least half of the SMs, and at
    most eight CTAs and 16 warps per SM."""
    if c.split_k == 1:
        return True
    tiles = math.ceil(problem.n / c.block_n) * math.ceil(problem.m / c.block_m)
    ctas = tiles * c.split_k
    most = min(8, 16 // c.num_warps) * device.num_sms
    is_long = problem.k >= 4 * c.split_k * c.block_k
    return is_long and device.num_sms // 2 <= ctas <= most
