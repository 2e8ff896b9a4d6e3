"""What every family's lowering does: describe problem and device, collect choices, select one."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from inductor_quant import _gluon_compat as gluon
from inductor_quant import _torch_compat as compat
from inductor_quant import report
from inductor_quant.errors import OptionError
from inductor_quant.kernels import KERNELS, Kernel, measured
from inductor_quant.kernels.config import (
    INTERPRETER_ARCH,
    Device,
    GemmConfig,
    Problem,
    parse_config,
)
from inductor_quant.lowering.epilogue import is_narrowed
from inductor_quant.lowering.timing import time_in_graph
from inductor_quant.options import Options
from inductor_quant.spec import QuantGemmSpec

log = logging.getLogger(__name__)

# Templates register themselves under their name when they are made: at import, before any cache
# look-up.
_TEMPLATES = {
    kernel.name: (gluon.template_type() if kernel.is_gluon else compat.TritonTemplate)(
        name=kernel.template_name, grid=compat.SymbolicGridFn(kernel.grid), source=kernel.source()
    )
    for kernel in KERNELS
    if gluon.available() or not kernel.is_gluon
}
_INTERPRETER = Device(arch=INTERPRETER_ARCH, num_sms=132, shared_memory=232448)


def current_options() -> Options:
    """The options of the compilation under way: those of our pass in its config, or defaults."""
    for item in compat.active_passes("post_grad_custom_pre_pass"):
        options = getattr(item, "options", None)
        if isinstance(options, Options):
            return options
    return Options()


def describe_device(device: torch.device) -> Device:
    """The card that is compiled for."""
    if device.type == "cpu":
        return _INTERPRETER
    return _describe_cuda(device.index if device.index is not None else torch.cuda.current_device())


def _describe_cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        arch=10 * properties.major + properties.minor,
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


def describe_problem(a: Any, b: Any, out_dtype: torch.dtype) -> Problem:
    """Sizes of ``a [M, K] @ b [K, N]`` from buffers; hints where they are symbolic."""
    (m, k), n = a.get_size(), b.get_size()[1]
    hint_m, hint_n, hint_k = compat.size_hints((m, n, k))
    return Problem(
        m=hint_m,
        n=hint_n,
        k=hint_k,
        k_is_static=compat.known_int(k) is not None,
        m_is_static=compat.known_int(m) is not None,
        is_stored_narrow=out_dtype.itemsize <= 2 or is_narrowed(compat.current_node()),
        # what kernels ask who describe their operands to the tensor memory accelerator
        has_aligned_rows=compat.may_make_descriptors()
        and compat.has_aligned_rows(a, 0)
        and compat.has_aligned_rows(b, 1),
    )


@dataclasses.dataclass(frozen=True)
class Gemm:
    """A call of a canonical op as kernels see it.

    ``shared`` are the inputs that belong to the activation, ``own`` those of the weight and its
    columns, realized, in the template's order; ``constants`` are the template's.
    """

    spec: QuantGemmSpec
    problem: Problem
    shared: list[Any]
    own: list[Any]
    constants: dict[str, Any]


def lower_gemm(
    family: str,
    spec: QuantGemmSpec,
    problem: Problem,
    inputs: list[Any],
    layout: Any,
    constants: dict[str, Any],
) -> Any | None:
    """The output of the best kernel for the GEMM, as IR that the scheduler may fuse into.

    Of three dimensions where it is the sums of parts of K, see ``Kernel``.

    One configuration, the best guess, unless max-autotune pays for timing up to
    ``Options.max_choices``. None: no kernel supports this spec on this device, or, with
    ``on_error="fallback"``, we failed; the caller then lowers to what was matched.
    """
    if not compat.runs_triton(layout.device):
        return None
    options = current_options()
    try:
        return _best_kernel(family, spec, problem, inputs, layout, constants, options)
    except OptionError:
        raise  # a configuration that the user pinned and that does not read as one
    except Exception as error:
        if options.on_error == "raise":
            raise
        log.warning("no kernel for %s %s", family, spec, exc_info=True)
        _warn_once(f"inductor_quant failed to lower {family} {spec}, which runs unfused: {error!r}")
        return None


def _best_kernel(
    family: str,
    spec: QuantGemmSpec,
    problem: Problem,
    inputs: list[Any],
    layout: Any,
    constants: dict[str, Any],
    options: Options,
) -> Any | None:
    device = describe_device(layout.device)
    limit = options.max_choices if compat.uses_max_autotune() else 1
    choices: list[Any] = []
    offered: list[str] = []
    whole, split_k = layout, 1
    for kernel, config in _candidates(family, spec, problem, device, options):
        if len(choices) == limit:
            break
        if choices and config.split_k != split_k:
            continue  # one selection is among outputs of the same shape
        if config.split_k != split_k:  # than the one before, which could not be generated
            split_k, layout = config.split_k, whole
            if split_k > 1:
                parts = [split_k, *whole.size]
                layout = compat.FixedLayout(whole.device, torch.float32, parts)
        extra = kernel.constants(spec, problem, config, device) | constants
        if options.numerics == "strict":
            # a multiply-add rounds once where the graph rounds twice
            extra["triton_meta"] = {"enable_fp_fusion": False}
            extra["BRISK_EPILOGUE"] = False
        if _append_choice(kernel, config, choices, inputs, layout, extra):
            offered.append(f"{kernel.name} {config}")
    if not choices:
        return None
    handicaps = [1.0] + [report.HANDICAP] * (len(choices) - 1)
    for choice, handicap in zip(choices, handicaps, strict=True):
        time_in_graph(choice, handicap)
    # Times are kept under this name: with the handicaps that they have.
    name = f"inductor_quant_{family} {offered[0]}"
    result, found = compat.select(name, choices, inputs, layout)
    times_us = tuple(
        None if ms is None else 1000 * ms / handicap
        for ms, handicap in zip(found, handicaps, strict=True)
    )
    node = compat.current_node()
    for part in problem.members or (problem,):
        report.add(
            report.KernelChoice(
                family,
                str(spec),
                tuple(offered),
                node=node.name if node is not None else "",
                times_us=times_us,
                sizes=(part.m, part.n, part.k),
                weight=packed_weight(part),
                is_grouped=bool(problem.members),
            )
        )
    return result


def packed_weight(problem: Problem) -> report.PackedWeight | None:
    """For a report; None where there is none, or where a size is symbolic."""
    weight = problem.weight
    if weight is None:
        return None
    tensors = []
    for tensor in weight.tensors:
        sizes = tuple(size for size in tensor.shape if size is not None)
        if len(sizes) != len(tensor.shape):
            return None
        tensors.append((tensor.dtype, sizes))
    return weight.format, tuple(tensors)


def run_first(
    family: str, spec: QuantGemmSpec, problem: Problem, inputs: list[Any], layout: Any
) -> Any | None:
    """The output of the family's kernel in its first configuration, in ``layout``; None: there is
    none for this spec on this device. A helper's kernel: not in reports, not timed."""
    if not compat.runs_triton(layout.device):
        return None
    device = describe_device(layout.device)
    for kernel, config in _candidates(family, spec, problem, device, Options()):
        choices: list[Any] = []
        constants = kernel.constants(spec, problem, config, device)
        if _append_choice(kernel, config, choices, inputs, layout, constants):
            result, _ = compat.select(f"inductor_quant_{family}", choices, inputs, layout)
            return result
    return None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _candidates(
    family: str, spec: QuantGemmSpec, problem: Problem, device: Device, options: Options
) -> Iterator[tuple[Kernel, GemmConfig]]:
    """Legal configurations of the kernels that support the spec: the user's, else those measured
    for this GEMM, then the kernels' own."""
    pinned = [(name, parse_config(text)) for name, text in map(_kernel_and_config, options.configs)]
    first = [] if pinned else measured.choices(family, spec, problem, device)

    def listed() -> Iterator[tuple[Kernel, GemmConfig]]:
        yield from (choice for choice in first if _is_usable(choice[0], spec, problem, device))
        for kernel in KERNELS:
            if kernel.family == family and _is_usable(kernel, spec, problem, device):
                mine = [config for name, config in pinned if name in ("", kernel.name)]
                offered = mine if pinned else kernel.configs(spec, problem, device)
                yield from ((kernel, c) for c in offered if (kernel, c) not in first)

    for kernel, config in listed():
        if kernel.legal(spec, problem, config, device) is None:
            yield kernel, config


def _is_usable(kernel: Kernel, spec: QuantGemmSpec, problem: Problem, device: Device) -> bool:
    if kernel.name not in _TEMPLATES:
        return False
    if kernel.is_gluon and compat.uses_cpp_wrapper():
        return False  # never seen to run there
    if problem.members and not kernel.is_grouped:
        return False
    if kernel.quantizes != (problem.quantized_bytes > 0):
        return False
    return kernel.supports(spec, problem, device) is None


def _kernel_and_config(text: str) -> tuple[str, str]:
    """``w8a8_mm 64x64x128_w4_s4_g8``, as reports say it; without a kernel's name, for all."""
    name, _, config = text.rpartition(" ")
    names = [kernel.name for kernel in KERNELS]
    if name and name not in names:
        raise OptionError(f"{text!r} names no kernel; they are {', '.join(names)}")
    return name, config


def _append_choice(
    kernel: Kernel,
    config: GemmConfig,
    choices: list[Any],
    inputs: list[Any],
    layout: Any,
    constants: dict[str, Any],
) -> bool:
    error = _TEMPLATES[kernel.name].maybe_append_choice(
        choices,
        input_nodes=tuple(inputs),
        layout=layout,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        **constants,
    )
    return error is None


@functools.cache
def lowering_of(op: torch._ops.OpOverload) -> Any:
    """Inductor's own lowering of ``op``: IR in, IR out."""
    return compat.lowerings[op]
