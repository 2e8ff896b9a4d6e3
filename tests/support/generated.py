"""What Inductor generates with our backend for a virtual GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inductor_quant import simulate
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.kernels.config import Device


def generate(
    fn: Callable[..., Any],
    make: Callable[[str], tuple[Any, ...]],
    *configs: object,
    arch: int = 90,
    group_gemms: bool = True,
    fuse_quantization: bool = True,
    **simulated: Any,
) -> simulate.Generated:
    """``fn(*make(device))`` as compiled for ``arch``; errors of ours are raised.

    ``configs``: configurations to choose from instead of the kernels' own, as the option takes
    them; ``group_gemms``, ``fuse_quantization``: the options. ``simulated``: what else
    ``simulate.generate`` takes.
    """
    return simulate.generate(
        fn,
        make,
        arch=arch,
        backend=inductor_quant_backend,
        options={
            "inductor_quant.on_error": "raise",
            "inductor_quant.configs": tuple(map(str, configs)),
            "inductor_quant.group_gemms": group_gemms,
            "inductor_quant.fuse_quantization": fuse_quantization,
        },
        **simulated,
    )


def device(arch: int) -> Device:
    """What kernels ask of the virtual GPU of ``arch``."""
    gpu = simulate.GPUS[arch]
    return Device(arch, gpu.num_sms, gpu.shared_memory_per_block_optin)
