"""The pass that Inductor runs in its post-grad *pre* slot: recognise, decide, rewrite, report.

Where parameters are frozen, constant folding makes a dense weight of a dequantization before that
slot. There it runs in the joint graph's pre slot, on the same operations.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from torch import fx

from inductor_quant import _torch_compat as compat
from inductor_quant import patterns, report
from inductor_quant.decisions import Match, Rejection, RejectionCode
from inductor_quant.errors import InductorQuantError, OptionError, RequirementError
from inductor_quant.ops import verify
from inductor_quant.options import Options
from inductor_quant.patterns import graph as reading
from inductor_quant.patterns import recipe, survey
from inductor_quant.patterns.activation import keep_rows_whole
from inductor_quant.patterns.canonicalize import rewrite, subgraph_of
from inductor_quant.patterns.exactness import classify, strictly
from inductor_quant.patterns.group_reduce import join_groups_to_rows
from inductor_quant.patterns.grouping import group_gemms
from inductor_quant.patterns.padding import unpadded
from inductor_quant.patterns.pattern import Pattern, RecognizedGemm
from inductor_quant.patterns.quantize import simplify_quantization
from inductor_quant.patterns.quantize_in_gemm import quantize_in_gemms
from inductor_quant.patterns.readers import repeat_casts
from inductor_quant.patterns.repack import make_weights_k_major
from inductor_quant.patterns.sharing import share
from inductor_quant.patterns.side_by_side import put_side_by_side

log = logging.getLogger(__name__)

SLOT = "post_grad_custom_pre_pass"
EARLY_SLOT = "joint_custom_pre_pass"
# Noted at a product that was decided about in the early slot.
_DECIDED = "inductor_quant_decided"
# What is said of a product of floats as well, where it tells nothing.
_OF_ANY_PRODUCT = (
    RejectionCode.NOT_QUANTIZED,
    RejectionCode.WEIGHT_FORM,
    RejectionCode.COMPUTED_WEIGHT,
    RejectionCode.BATCHED_WEIGHT,
    RejectionCode.BIAS,
)


class QuantGemmPass(compat.CustomGraphPass):
    """One instance per Options (``for_options``): Inductor compares passes by identity.

    The lowering finds ``options`` here as well: the config slot is the one thing that travels with
    every compilation, also with a backward pass that is compiled later.
    """

    def __init__(self, options: Options, constants: str = "", *, is_early: bool = False) -> None:
        self._options = options
        self._constants = constants
        self._is_early = is_early

    @property
    def options(self) -> Options | None:
        """The options in force; None: this pass does nothing now."""
        return self._options

    def __call__(self, graph: fx.Graph) -> None:
        options = self.options
        if options is None or (self._is_early and not _will_be_frozen(graph)):
            return
        by_anchor: dict[object, list[Pattern]] = {}
        for pattern in patterns.patterns():
            for op in pattern.anchors:
                by_anchor.setdefault(op, []).append(pattern)
        matches: Counter[str] = Counter()
        has_products = False
        for node in list(graph.nodes):
            if node.op != "call_function" or node._erased:  # with a rewrite before it
                continue
            if node.meta.pop(_DECIDED, False):
                continue
            candidates = by_anchor.get(node.target) or by_anchor.get(str(node.target), [])
            if not candidates and not (report.is_open() and survey.is_matrix_product(node)):
                continue
            decision = _treat_unpadded(node, candidates, options) or _treat(
                node, candidates, options
            )
            if decision is None:
                continue
            if self._is_early and not node._erased:
                node.meta[_DECIDED] = True
            log.info("%s", decision)
            report.add(decision)
            has_products = True
            matches[decision.family if isinstance(decision, Match) else ""] += 1
        if matches.keys() - {""}:
            _finish(graph, options, is_frozen=self._is_early)
        for family, least in dict(options.require).items():
            if has_products and matches[family] < least:
                raise RequirementError(family, least, matches[family])

    def uuid(self) -> tuple[str, ...] | None:
        """What Inductor's caches know us by: every file of the package, the options, the versions,
        and the constants that we put into this graph (AOTAutograd's cache knows them by shape
        alone).

        None (no caching) while a third party's pattern is registered, whose code is not covered,
        and with ``verify``, whose subgraphs are in this process alone.
        """
        if patterns.has_third_party() or (self.options is not None and self.options.verify):
            return None
        state = repr(self.options) if self.options is not None else "inactive"
        versions = (torch.__version__, triton.__version__)
        return (
            "inductor_quant",
            source_hash(),
            state,
            *versions,
            self._constants,
            "early" if self._is_early else "",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> QuantGemmPass:
        return self  # Inductor copies config values


def for_options(options: Options, constants: str = "", *, is_early: bool = False) -> QuantGemmPass:
    """The pass for these options, always the same object; ``is_early``: that for EARLY_SLOT."""
    return _made(options, constants, is_early)


@functools.cache
def _made(options: Options, constants: str, is_early: bool) -> QuantGemmPass:
    return QuantGemmPass(options, constants, is_early=is_early)


def _will_be_frozen(graph: fx.Graph) -> bool:
    """Whether the constants of this graph will be folded: no graph of a training is frozen."""
    is_joint = any("tangents" in node.name for node in graph.nodes if node.op == "placeholder")
    return compat.is_freezing() and not is_joint


@functools.cache
def source_hash() -> str:
    """SHA-256 over the names and contents of all ``.py``, ``.jinja`` and ``.json`` files of the
    package.

    Inductor's cache key covers torch's sources, not ours: without this, an edited template would be
    served from a warm cache in its old form.
    """
    roots = {"patterns": Path(__file__).parent, "inductor_quant": Path(report.__file__).parent}
    digest = hashlib.sha256()
    for label, root in roots.items():
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".jinja", ".json") and path.is_file():
                digest.update(f"{label}/{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _treat_unpadded(node: fx.Node, candidates: list[Pattern], options: Options) -> Match | None:
    """The match of a product that Inductor has padded; without one the graph is as it was."""
    try:
        product = unpadded(node) if candidates else None
    except Exception as error:
        if options.on_error == "raise":
            raise InductorQuantError(f"inductor_quant failed at {node.name}") from error
        log.warning("failed at %s", node.name, exc_info=True)
        return None
    if product is None:
        return None
    try:
        decision = _treat(product.node, candidates, options)
    except BaseException:
        product.undo()
        raise
    if not isinstance(decision, Match):
        product.undo()
        return None
    product.finish()
    return decision


def _treat(
    anchor: fx.Node, candidates: list[Pattern], options: Options
) -> Match | Rejection | None:
    """Decide about one matrix product, and rewrite it if it matched. Without a pattern that is
    anchored at its op, only say so. None: it is no matrix product."""
    module = reading.module_path(anchor)
    site = None
    try:
        # before the rewrite: a report shows what the user's model computes
        site = survey.describe(anchor) if report.is_open() else None
        if not candidates:
            return survey.decline(anchor, site)
        found = _first_recognition(anchor, candidates)
        if found is None:
            return None
        is_ordinary = isinstance(found, Rejection) and found.code in _OF_ANY_PRODUCT
        if is_ordinary and site is not None and not site.source:
            return survey.decline(anchor, site)
        if isinstance(found, RecognizedGemm) and options.numerics == "strict":
            found = _policy(found, module, options) or strictly(found)
        refusal = found if isinstance(found, Rejection) else _policy(found, module, options)
        if refusal is not None:
            where = refusal.node or anchor.name
            return Rejection(refusal.code, refusal.detail, where, module, site)
        assert isinstance(found, RecognizedGemm)
        if site is None and report.is_open():
            site = survey.describe_found(found)
        name, exactness = anchor.name, classify(found)
        activation = recipe.describe(found)
        call = rewrite(found, _watch(found, options)) if options.verify else rewrite(found)
        if found.row_scale is not None:
            keep_rows_whole(found.row_scale)
        size, names = (found.m, found.n, found.k), (name, module, call.name)
        return Match(found.family, found.spec, *size, *names, site, activation, exactness)
    except OptionError:
        raise
    except Exception as error:
        if options.on_error == "raise":
            raise InductorQuantError(f"inductor_quant failed at {anchor.name}") from error
        log.warning("failed at %s", anchor.name, exc_info=True)
        _warn_once(f"inductor_quant failed on a GEMM and left it as it was: {error!r}")
        return Rejection(RejectionCode.INTERNAL_ERROR, repr(error), anchor.name, module, site)


def _finish(graph: fx.Graph, options: Options, *, is_frozen: bool) -> None:
    """What is better done when every GEMM is known."""
    try:
        log.info("%d nodes before quantized GEMMs were there twice", share(graph))
        constants = _constants(graph) if is_frozen else set()
        log.info("%d GEMMs are parts of another", put_side_by_side(graph, constants))
        copies = make_weights_k_major(graph, constants)
        log.info("%d int8 weights are copied so that they lie along K", copies)
        if options.numerics != "strict":  # divides by a reciprocal
            simplify_quantization(graph)
            joined = join_groups_to_rows(graph)  # the row is added up in another order
            log.info("%d quantizations in groups move into the kernel of a norm", joined)
        if options.group_gemms:  # last: the others look for GEMMs alone
            log.info("%d GEMMs may go into the launch of another", group_gemms(graph))
        # of what is round_to_int8 by now; what is verified starts with the integers
        if options.fuse_quantization and not options.verify:
            log.info("%d GEMMs may quantize what they read", quantize_in_gemms(graph))
        log.info("%d nodes more behind GEMMs, casts for a reader each", repeat_casts(graph))
    except Exception as error:
        if options.on_error == "raise":
            raise InductorQuantError("inductor_quant failed after its rewrites") from error
        log.warning("failed after the rewrites", exc_info=True)


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """What will not change between calls, of a graph that is to be frozen."""
    inputs = graph.find_nodes(op="placeholder")[: compat.inputs_to_be_frozen()]
    return {*inputs, *graph.find_nodes(op="get_attr")}


def _watch(found: RecognizedGemm, options: Options) -> tuple[Any, ...]:
    """The arguments of ``inductor_quant::verify`` after the result."""
    if compat.is_exporting():
        raise OptionError("verify compares in the process that compiled: leave it out of an export")
    subgraph, tensors, sizes = subgraph_of(found)
    name = f"{found.family} {found.spec} at {found.anchor.name}"
    return tensors, sizes, verify.remember(subgraph, name, raises=options.on_error == "raise")


def _first_recognition(
    anchor: fx.Node, candidates: list[Pattern]
) -> RecognizedGemm | Rejection | None:
    """What the first pattern that recognises ``anchor`` says; if none does, what the first says
    that takes it for a quantized matrix product, or else for a matrix product."""
    first: Rejection | None = None
    for pattern in candidates:
        found = pattern.recognize(anchor)
        if isinstance(found, RecognizedGemm):
            return found
        if first is None or first.code is RejectionCode.NOT_QUANTIZED:
            first = found or first
    return first


def _policy(found: RecognizedGemm, module: str, options: Options) -> Rejection | None:
    """What the user or the device has against a rewrite that would be right."""
    if found.family not in options.families:
        return Rejection(RejectionCode.FAMILY_DISABLED, f"{found.family} {found.spec}")
    if not options.selects(module):
        return Rejection(RejectionCode.MODULE_EXCLUDED, module)
    device = reading.value(found.anchor).device
    if not compat.runs_triton(device):
        return Rejection(RejectionCode.DEVICE, f"{device} runs {found.family} without our kernels")
    if options.numerics == "strict" and not compat.keeps_roundings():
        return Rejection(
            RejectionCode.NUMERICS, "torch._inductor.config.emulate_precision_casts is off"
        )
    if found.too_many_rows:
        return Rejection(RejectionCode.MANY_ROWS, f"{found.m} rows; {found.family} {found.spec}")
    return None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
