"""What every family's lowering does: describe problem and device, collect choices, select one."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import choice_modules, gluon, kernel_names
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels import Kernel, dispatch
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.kernel import ColumnOrder
from inductor_quant.kernels.problem import INTERPRETER_ARCH, Device, Problem
from inductor_quant.lowering.autotune_timing import time_in_graph
from inductor_quant.lowering.fusion_lookahead import is_narrowed
from inductor_quant.options import Options
from inductor_quant.report import events
from inductor_quant.spec.gemm import QuantGemmSpec

aten = torch.ops.aten
_INTERPRETER = Device(arch=INTERPRETER_ARCH, num_sms=132, shared_memory=232448)
_templates: dict[str, Any] = {}
_templates_lock = threading.Lock()


def describe_device(device: torch.device) -> Device:
    """The GPU that is compiled for."""
    if device.type == "cpu":
        return _INTERPRETER
    index = device.index if device.index is not None else torch.cuda.current_device()
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
        m_is_bounded=compat.limit(m) is not None,
        is_stored_narrow=out_dtype.itemsize <= 2 or is_narrowed(compat.current_node()),
        # required by kernels that use TMA descriptors
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

    With split-K or a ``column_order`` it is the fp32 partials [split_k, M, N], see ``Kernel``, with
    their columns in order.

    Takes one configuration, the best guess; under max-autotune it times up to
    ``Options.max_choices``. None: no kernel supports this spec on this device; the caller then
    lowers to what was matched.
    """
    if not compat.runs_triton(layout.device):
        return None
    options = fallback.active_options() or Options()
    device = describe_device(layout.device)
    limit = options.max_choices if compat.uses_max_autotune() else 1
    choices: list[Any] = []
    offered: list[str] = []
    whole = layout
    stored: tuple[int, ColumnOrder | None] = 1, None
    for kernel, config in dispatch.candidates(
        family, spec, problem, device, pinned=options.configs, has_gluon=has_gluon()
    ):
        if len(choices) == limit:
            break
        partials = kernel.partials(spec, problem, config, device)
        order = kernel.column_order(spec, problem, config, device)
        if choices and (partials, order) != stored:
            continue  # all choices of one selection have outputs of the same shape
        if (partials, order) != stored:  # the previous candidate could not be generated
            stored, layout = (partials, order), whole
            if partials > 1 or order is not None:
                sizes = [partials, *whole.size]
                layout = compat.FixedLayout(whole.device, torch.float32, sizes)
        extra = kernel.constants(spec, problem, config, device) | constants
        if options.numerics == "strict":
            # a multiply-add rounds once where the graph rounds twice
            meta = extra.setdefault("triton_meta", {})
            meta["enable_fp_fusion"] = False
            extra["FAST_MATH_EPILOGUE"] = False
        scratch = kernel.scratch(spec, problem, config, device)
        if scratch:  # an input more: Inductor times choices of the same inputs only
            if choices:
                continue
            limit = 1
        if _append_choice(kernel, config, choices, inputs, layout, extra, scratch):
            offered.append(f"{kernel.name} {config}")
    if not choices:
        return None
    handicaps = [1.0] + [events.HANDICAP] * (len(choices) - 1)
    for choice, handicap in zip(choices, handicaps, strict=True):
        time_in_graph(choice, handicap)
    # Inductor caches times, which include the handicaps, under this name.
    name = f"inductor_quant_{family} {offered[0]}"
    examples = None
    if problem.groups is not None:
        examples = {len(inputs) - 1: functools.partial(_example_of_route, problem)}
    result, found = compat.select(name, choices, inputs, layout, examples)
    times_us = tuple(
        None if ms is None else 1000 * ms / handicap
        for ms, handicap in zip(found, handicaps, strict=True)
    )
    for each in problem.members or (problem,):
        report_choice(
            *(family, spec, each, tuple(offered)),
            times_us=times_us,
            is_horizontal=bool(problem.members),
        )
    _, order = stored
    return result if order is None else _in_order(result, order)


def _in_order(partials: Any, order: ColumnOrder) -> Any:
    """Partials [split_k, M, N] with their columns in order."""
    *sizes, n = partials.get_size()
    view, permute = lowering_of(aten.view.default), lowering_of(aten.permute.default)
    places = [0, 1, *(2 + place for place in order.places)]
    return view(permute(view(partials, [*sizes, *order.sizes]), places), [*sizes, n])


def _example_of_route(problem: Problem, route: Any) -> torch.Tensor:
    """Random experts, for the timing: Inductor's integers are zeros, so no expert would have rows,
    or one all."""
    assert problem.groups is not None
    count = problem.groups.experts
    drawn = torch.randint(count, (problem.m,), generator=torch.Generator().manual_seed(0))
    if problem.groups.is_sorted:
        drawn = drawn.bincount(minlength=count).cumsum(0)
    return drawn.to(route.get_device(), route.get_dtype())


def report_choice(
    family: str,
    spec: QuantGemmSpec,
    problem: Problem,
    offered: tuple[str, ...],
    *,
    times_us: tuple[float | None, ...] = (),
    is_horizontal: bool = False,
) -> None:
    """Record what was offered for the node that is being lowered."""
    node = compat.current_node()
    events.add(
        events.KernelChoice(
            family,
            str(spec),
            offered,
            node=node.name if node is not None else "",
            times_us=times_us,
            sizes=(problem.m, problem.n, problem.k),
            weight=_packed_weight(problem),
            is_horizontal=is_horizontal,
            gate=str(problem.groups.gate) if problem.groups and problem.groups.gate else "",
        )
    )


def _packed_weight(problem: Problem) -> events.PackedWeight | None:
    """The weight for a report; None if there is none, or a size is symbolic."""
    weight = problem.weight
    if weight is None or any(None in tensor.shape for tensor in weight.tensors):
        return None
    return weight.format, tuple(
        (tensor.dtype, tuple(size for size in tensor.shape if size is not None))
        for tensor in weight.tensors
    )


def run_first(
    family: str, spec: QuantGemmSpec, problem: Problem, inputs: list[Any], layout: Any
) -> Any | None:
    """The output of the family's first candidate, in ``layout``; None if there is none.

    For a helper kernel: neither reported nor timed.
    """
    if not compat.runs_triton(layout.device):
        return None
    device = describe_device(layout.device)
    for kernel, config in dispatch.candidates(family, spec, problem, device, has_gluon=has_gluon()):
        choices: list[Any] = []
        constants = kernel.constants(spec, problem, config, device)
        if _append_choice(kernel, config, choices, inputs, layout, constants):
            result, _ = compat.select(f"inductor_quant_{family}", choices, inputs, layout)
            return result
    return None


def has_gluon() -> bool:
    """Whether Gluon kernels may be taken; under cpp_wrapper they are untested."""
    return gluon.available() and not compat.uses_cpp_wrapper()


def _append_choice(
    kernel: Kernel,
    config: GemmConfig,
    choices: list[Any],
    inputs: list[Any],
    layout: Any,
    constants: dict[str, Any],
    scratch: int = 0,
) -> bool:
    if scratch:
        empty = lowering_of(aten.empty.memory_format)
        memory = empty([scratch], dtype=torch.float32, device=layout.device)
        inputs = [*inputs, compat.realize(memory)]
    with choice_modules.not_imported():
        error = _template(kernel).maybe_append_choice(
            choices,
            input_nodes=tuple(inputs),
            layout=layout,
            num_stages=config.num_stages,
            num_warps=kernel.launched_warps(config),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            **constants,
        )
    return error is None


def _template(kernel: Kernel) -> Any:
    """Inductor's template of a kernel, parsed at its first use: parsing all takes a second.

    Nothing looks a template up by name: a cached graph and a tuning subprocess hold the generated
    code. Inductor's registry only refuses a second template of the same name, hence the lock.
    """
    with _templates_lock:
        if kernel.name not in _templates:
            template = gluon.template_type() if kernel.is_gluon else compat.TritonTemplate
            made = template(
                name=kernel.template_name,
                grid=compat.SymbolicGridFn(kernel.grid),
                source=kernel.source(),
            )
            _templates[kernel.name] = kernel_names.own_names(made, kernel.name)
        return _templates[kernel.name]


@functools.cache
def lowering_of(op: torch._ops.OpOverload) -> Any:
    """Inductor's own lowering of ``op``: IR in, IR out."""
    return compat.lowerings[op]
