"""Which kernel computes a GEMM: the order of ``KERNELS``, the user's pins, the kernels' rejections.

The lowering takes the first candidate that Inductor can generate (max-autotune: times several);
``python -m inductor_quant which`` prints the same decision without a compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inductor_quant.errors import OptionError
from inductor_quant.kernels import KERNELS, Kernel
from inductor_quant.kernels.config import GemmConfig, parse_config
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

# A weight_only GEMM without a kernel: DEQUANTIZE writes W [K, N], the library multiplies.
DEQUANTIZE = "weight_only_dequantize"
DEQUANTIZE_THEN_MM = "dequantize once, then aten.mm"
LIBRARY = "W written once and a product of the library are faster"
# A w4a8 GEMM without a kernel of its own.
UNPACK_THEN_MULTIPLY = "unpack W to 8 bits in each call, then w8a8 or fp8"
AS_WEIGHT_ONLY = "as weight_only: the 8-bit activation in bf16"
# The column sums of b, which a zero point of a needs, cost nothing in a spare row of the tile. With
# more rows than this a reduction kernel of their own is faster (lowering/README.md).
MAX_ROWS_WITH_SPARE = 63


def candidates(
    family: str,
    spec: QuantGemmSpec,
    problem: Problem,
    device: Device,
    *,
    pinned: Sequence[str] = (),
    has_gluon: bool = True,
    rejected: list[tuple[Kernel, Rejection]] | None = None,
) -> Iterator[tuple[Kernel, GemmConfig]]:
    """Kernels that apply with their legal configurations, best first.

    ``pinned`` (``Options.configs``) replaces the kernels' own configurations. ``rejected`` receives
    each kernel that is passed over, and why. Raises OptionError for a malformed pin.
    """
    pins = [_parse_pin(text) for text in pinned]
    for kernel in KERNELS:
        if kernel.family != family:
            continue
        rejection = _rejection(kernel, spec, problem, device, has_gluon=has_gluon)
        if rejection is None:
            rejection = Rejection(RejectionCode.NO_KERNEL, "no configuration for these sizes")
            own = [config for name, config in pins if name in ("", kernel.name)]
            is_taken = False
            for config in own if pins else kernel.configs(spec, problem, device):
                misfit = kernel.config_rejection(spec, problem, config, device)
                if misfit is None:
                    is_taken = True
                    yield kernel, config
                rejection = misfit or rejection
            if is_taken:
                continue
            if not pins and kernel.prefers_library(spec, problem, device):
                if rejected is not None:
                    rejected.append((kernel, Rejection(RejectionCode.NO_KERNEL, LIBRARY)))
                return
        if rejected is not None:
            rejected.append((kernel, rejection))


def _rejection(
    kernel: Kernel, spec: QuantGemmSpec, problem: Problem, device: Device, *, has_gluon: bool
) -> Rejection | None:
    reason = ""
    if kernel.is_gluon and not has_gluon:
        reason = "Gluon is not available: an old Triton, or cpp_wrapper, where it is untested"
    elif problem.members and not kernel.is_horizontal:
        reason = "it computes one GEMM a launch"
    elif kernel.quantizes and not problem.quantized_bytes:
        reason = "it quantizes its activation, which is quantized already"
    elif problem.quantized_bytes and not kernel.quantizes:
        reason = "it takes a quantized activation"
    if reason:
        return Rejection(RejectionCode.NO_KERNEL, reason)
    return kernel.rejection(spec, problem, device)


def _parse_pin(text: str) -> tuple[str, GemmConfig]:
    """``w8a8_mm 64x64x128_w4_s4_g8``, as reports name it; without a kernel's name it pins all."""
    name, _, config = text.rpartition(" ")
    names = [kernel.name for kernel in KERNELS]
    if name and name not in names:
        raise OptionError(f"{text!r} names no kernel; they are {', '.join(names)}")
    return name, parse_config(config)


def has_spare_row(problem: Problem) -> bool:
    """Whether the tile of a w8a8 GEMM has a row to spare for the column sums of b."""
    return problem.m_is_bounded and problem.m <= MAX_ROWS_WITH_SPARE and problem.m * problem.n > 1
