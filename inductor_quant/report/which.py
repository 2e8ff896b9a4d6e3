"""``python -m inductor_quant which``: the kernel of a GEMM, without a GPU or a compilation."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from inductor_quant._compat import gluon
from inductor_quant.errors import SpecError
from inductor_quant.kernels import Kernel, dispatch
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.ops import fp8, weight_only
from inductor_quant.ops.fusion import quantized_linear
from inductor_quant.options import FAMILIES
from inductor_quant.report import formats
from inductor_quant.report.formats import Gemm
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A100, A40, L40S, H100 and H200, B200, RTX 5090: SMs, and the most shared memory of a CTA (CUDA C++
# Programming Guide, table "Technical Specifications per Compute Capability").
DEVICES = {
    80: Device(80, num_sms=108, shared_memory=163 * 1024),
    86: Device(86, num_sms=84, shared_memory=99 * 1024),
    89: Device(89, num_sms=142, shared_memory=99 * 1024),
    90: Device(90, num_sms=132, shared_memory=227 * 1024),
    100: Device(100, num_sms=148, shared_memory=227 * 1024),
    120: Device(120, num_sms=170, shared_memory=99 * 1024),
}
TUNED = 90


@dataclasses.dataclass(frozen=True)
class Decision:
    """The kernel that runs (None: none applies), those passed over before it, and what was decided
    before kernels were asked."""

    spec: QuantGemmSpec
    device: Device
    kernel: Kernel | None
    config: GemmConfig | None
    rejected: tuple[tuple[Kernel, Rejection], ...]
    notes: tuple[str, ...] = ()


def which(
    family: str, gemm: Gemm, *, format: str = "", arch: int = 90, linear: bool = False
) -> Decision:
    """What default mode runs for a GEMM alone, of static sizes.

    ``linear``: a w8a8 GEMM whose activation is ``gemm.dtype`` in memory. Raises SpecError for sizes
    that the format cannot have.
    """
    format = format or next(iter(formats.names(family)))
    spec, problem = formats.build(family, format, gemm)
    notes: list[str] = []

    def first(family: str, problem: Problem) -> Decision:
        rejected: list[tuple[Kernel, Rejection]] = []
        found = dispatch.candidates(
            *(family, spec, problem, DEVICES[arch]),
            has_gluon=gluon.available(),
            rejected=rejected,
        )
        kernel, config = next(found, (None, None))
        return Decision(spec, DEVICES[arch], kernel, config, tuple(rejected))

    decision = None
    if linear:
        decision = first(family, dataclasses.replace(problem, quantized_bytes=gemm.dtype.itemsize))
        why = f"M > {quantized_linear.MAX_ROWS}" if gemm.m > quantized_linear.MAX_ROWS else ""
        why = why or ("zero points and groups" if spec.a.zero or spec.group_size else "")
        if why or decision.kernel is None:
            why = why or next(why.detail for kernel, why in decision.rejected if kernel.quantizes)
            notes.append(f"a kernel before the GEMM quantizes x: {why}")
            decision = None
    if decision is None and spec.a.zero and dispatch.has_spare_row(problem):
        decision = first(family, dataclasses.replace(problem, needs_spare_row=True))
        notes.append("computes the column sums of the weight itself, if they are not constants")
    if decision is None or decision.kernel is None:
        decision = first(family, problem)
    if arch != TUNED and family in ("w8a8", "fp8"):
        notes.append("a graph that calls aten._int_mm or aten._scaled_mm keeps it (untuned)")
    elif arch == TUNED and family.startswith("fp8"):
        sizes = gemm.m, gemm.n, gemm.k
        kept = "a graph that calls aten._scaled_mm keeps it: cuBLASLt is faster (many_rows)"
        if fp8.prefers_library(spec, *sizes):
            notes.append(kept)
        elif fp8.prefers_library(spec, *sizes, has_epilogue=False):
            notes.append(f"if no more than a bias follows, {kept}")
    if decision.kernel is None and family == "w4a8":
        notes.append(f"{dispatch.AS_WEIGHT_ONLY} (few rows), or {dispatch.UNPACK_THEN_MULTIPLY}")
    elif decision.kernel is None and problem.weight is not None and not problem.groups:
        helper = first(dispatch.DEQUANTIZE, problem)
        if helper.kernel is not None:
            details = [rejection.detail for _, rejection in decision.rejected]
            is_faster = dispatch.LIBRARY in details
            notes.append(_why_dequantized(spec, problem, is_faster=is_faster))
        decision = dataclasses.replace(decision, kernel=helper.kernel, config=helper.config)
    return dataclasses.replace(decision, notes=tuple(notes))


def _why_dequantized(spec: QuantGemmSpec, problem: Problem, *, is_faster: bool) -> str:
    assert problem.weight is not None
    dtypes = [tensor.dtype for tensor in problem.weight.tensors]
    most = weight_only.preferred_rows(problem.weight.format, spec.a.dtype, dtypes)
    why = f"M > {most}, where that is faster" if problem.m > most else "no fused kernel applies"
    why = "that is faster" if is_faster else why
    return f"{dispatch.DEQUANTIZE_THEN_MM}: {why}; the kernel writes W [K, N] for the library"


def lines(decision: Decision) -> Iterator[str]:
    """What the command prints."""
    device, kernel = decision.device, decision.kernel
    yield f"gemm      {decision.spec} on sm_{device.arch}, {device.num_sms} SMs"
    width = max((len(each.name) for each, _ in decision.rejected), default=0)
    yield from (f"not       {each.name:<{width}}  {why}" for each, why in decision.rejected)
    if kernel is None:
        yield "runs      no kernel of ours: the graph runs as Inductor lowers it"
    else:
        yield f"runs      {kernel.name} {decision.config}"
        yield f"module    {module_path(kernel)}"
        yield f"template  inductor_quant/kernels/{kernel.template}.py.jinja"
    yield from (f"note      {note}" for note in decision.notes)


def module_path(kernel: Kernel) -> str:
    """The file that says when ``kernel`` applies, from the repository's root."""
    return f"{type(kernel).__module__.replace('.', '/')}.py"


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    parser.add_argument("family", nargs="?", choices=FAMILIES)
    for size in "mnk":
        parser.add_argument(f"--{size}", type=int, help=f"{size.upper()} of the GEMM")
    parser.add_argument("--arch", type=int, default=90, choices=DEVICES, help="compute capability")
    parser.add_argument("--format", default="", help="how it is quantized; see --list")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of x and the result")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument(
        "--linear", action="store_true", help="w8a8: x is in memory and not quantized yet"
    )
    parser.add_argument("--experts", type=int, default=0, help="how many weights rows choose from")
    parser.add_argument("--unsorted", action="store_true", help="rows in any order of experts")
    parser.add_argument("--list", action="store_true", help="list the formats of each family")
    return functools.partial(run, parser)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.list:
        for family in [options.family] if options.family else FAMILIES:
            print(family)
            for name, line in formats.names(family).items():
                print(f"  {name:<18} {line}")
        return 0
    sizes = (options.m, options.n, options.k)
    if not options.family:
        parser.error(f"a family is required: {', '.join(FAMILIES)}")
    names = formats.names(options.family)
    if options.format and options.format not in names:
        parser.error(f"the formats of {options.family} are {', '.join(names)}")
    if not all(size and size > 0 for size in sizes):
        parser.error("positive --m, --n and --k are required")
    if options.linear and options.family != "w8a8":
        parser.error("--linear is for w8a8")
    gemm = Gemm(
        *sizes,
        dtype=DTYPES[options.dtype],
        bias=options.bias,
        experts=options.experts,
        is_sorted=not options.unsorted,
    )
    given = {"format": options.format, "arch": options.arch, "linear": options.linear}
    try:
        decision = which(options.family, gemm, **given)
    except SpecError as error:
        parser.error(str(error))
    print("\n".join(lines(decision)))
    return 0
