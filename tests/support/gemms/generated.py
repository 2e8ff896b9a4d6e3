"""What Inductor generates with our backend for a virtual GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from inductor_quant import simulate
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device


def generate(
    fn: Callable[..., Any],
    make: Callable[[str], tuple[Any, ...]],
    *configs: object,
    arch: int = 90,
    horizontal_fusion: bool = True,
    fuse_quantization: bool = True,
    **simulated: Any,
) -> simulate.Generated:
    """``fn(*make(device))`` as compiled for ``arch``; errors of ours are raised.

    ``configs``: configurations to choose from instead of the kernels' own, as the option takes
    them; ``horizontal_fusion``, ``fuse_quantization``: the options. A symbolic M has no ranges.
    ``simulated``: what else ``simulate.generate`` takes.
    """
    return simulate.generate(
        fn,
        make,
        arch=arch,
        backend=inductor_quant_backend,
        options={
            "inductor_quant.on_error": "raise",
            "inductor_quant.configs": tuple(map(str, configs)),
            "inductor_quant.horizontal_fusion": horizontal_fusion,
            "inductor_quant.fuse_quantization": fuse_quantization,
            "inductor_quant.row_buckets": False,
            "inductor_quant.untuned": True,
        },
        **simulated,
    )


def generated_by(
    kernel: str, fn: Callable[..., Any], make: Callable[[str], tuple[Any, ...]], config: object
) -> simulate.Generated:
    """``generate`` in a configuration of ``kernel``, which is chosen."""
    generated = generate(fn, make, f"{kernel} {config}")
    [chosen, *_] = [choices[0].name for choices in generated.choices]
    assert f"inductor_quant_{kernel}_" in chosen
    return generated


def hardest(configs: Iterable[GemmConfig], count: int = 3) -> list[GemmConfig]:
    """Those with the most of a tile for each warp, with the deepest of its pipelines: if any
    spills, they do."""
    deepest = {
        (config.block_m, config.block_n, config.block_k, config.num_warps): config
        for config in sorted(configs, key=lambda config: config.num_stages)
    }
    tile_a_warp = lambda c: c.block_m * c.block_n * c.block_k / c.num_warps  # noqa: E731
    return sorted(deepest.values(), key=tile_a_warp, reverse=True)[:count]


def device(arch: int) -> Device:
    """What kernels ask of the virtual GPU of ``arch``."""
    gpu = simulate.GPUS[arch]
    return Device(arch, gpu.num_sms, gpu.shared_memory_per_block_optin)
