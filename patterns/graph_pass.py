"""The pass in Inductor's post-grad *pre* slot: recognize, decide, rewrite, report.

With freezing, constant folding would turn a dequantization into a dense weight before that slot.
The pass then runs in the joint graph's pre slot, on the same operations.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from torch import fx

import inductor_quant
from inductor_quant import fallback
from inductor_quant._compat import freezing, variants
from inductor_quant._compat import inductor as compat
from inductor_quant.errors import OptionError, RequirementError
from inductor_quant.ops import experts, scaled_experts, verify
from inductor_quant.options import Options, matches_any
from inductor_quant.report import events
from inductor_quant.spec.decisions import Match, Rejection, RejectionCode
from inductor_quant.spec.exactness import Exactness

from . import fx_utils, has_third_party, patterns
from .fusion.concat_weights import concat_weights
from .fusion.cse import eliminate_common_subexpressions
from .fusion.duplicate_casts import duplicate_casts
from .fusion.erf import narrow_erf
from .fusion.experts.gate import gate_in_experts
from .fusion.experts.ids import read_ids_of_topk
from .fusion.experts.quantize_tokens import quantize_tokens_once
from .fusion.experts.routing import route_experts, sum_experts
from .fusion.experts.rows import gather_in_experts
from .fusion.experts.token_order import compute_by_token
from .fusion.horizontal import horizontal_fusion
from .fusion.norm_group_quant import fuse_norm_and_group_quant
from .fusion.quantize_in_gemm import quantize_in_gemms
from .fusion.repack_weights import repack_weights
from .fusion.row_quant import mark_row_reductions
from .fusion.simplify_quant import simplify_quantization
from .fusion.weight_k_major import make_weights_k_major
from .match import Pattern, RecognizedGemm
from .matching.operands import source_of
from .products import adapters, collectives, stock
from .products.pad_mm import unpadded
from .reporting import activation_scheme, matrix_products
from .reporting.exactness import classify, strictly
from .reporting.format_name import format_name
from .rewrite import rewrite, subgraph_of

log = logging.getLogger(__name__)

SLOT = fallback.SLOT
EARLY_SLOT = "joint_custom_pre_pass"
# Metadata of a product that the early slot has decided about.
_DECIDED = "inductor_quant_decided"
# Codes that recognizers return for unquantized products too, where they tell nothing.
_UNINFORMATIVE = (
    RejectionCode.NOT_QUANTIZED,
    RejectionCode.WEIGHT_FORM,
    RejectionCode.COMPUTED_WEIGHT,
    RejectionCode.BATCHED_WEIGHT,
    RejectionCode.BIAS,
)


class QuantGemmPass(compat.CustomGraphPass):
    """One instance for each Options (``for_options``): Inductor compares passes by identity.

    The lowering reads ``options`` from here: only the config slot travels with every compilation,
    even with that of a backward pass, which happens later.
    """

    def __init__(self, options: Options, constants: str = "", *, is_early: bool = False) -> None:
        self._options = options
        self._constants = constants
        self._is_early = is_early

    @property
    def options(self) -> Options | None:
        """The options in force; None: the pass does nothing."""
        return self._options

    def __call__(self, graph: fx.Graph) -> None:
        options = self.options
        if options is None or (self._is_early and not compat.is_freezing()):
            return
        module = graph.owning_module
        if fallback.is_inside() or module is None:
            self._rewrite(graph, options)
        else:  # the early slot
            fallback.run(
                lambda: self._rewrite(module.graph, options), lambda: None, options, module
            )

    def _rewrite(self, graph: fx.Graph, options: Options) -> None:
        if self._is_early and _is_joint(graph):  # Inductor freezes no training graph
            return
        by_anchor: dict[object, list[Pattern]] = {}
        for pattern in patterns():
            for op in pattern.anchors:
                by_anchor.setdefault(op, []).append(pattern)
        matches: Counter[str] = Counter()
        has_products = False
        modules = set()
        for node in list(graph.nodes):
            if node.op != "call_function" or node._erased:  # by an earlier rewrite
                continue
            if node.meta.pop(_DECIDED, False):
                continue
            candidates = by_anchor.get(node.target) or by_anchor.get(str(node.target), [])
            is_reported = events.is_open() and matrix_products.is_matrix_product(node)
            if not candidates and not is_reported and not adapters.is_known(node):
                continue
            decision: Match | Rejection | None
            if cause := fallback.declined().get(node.name):
                decision = Rejection(RejectionCode.INTERNAL_ERROR, cause, node.name)
            else:
                node.meta[fallback.ANCHOR] = node.name
                with fallback.at(node.name):
                    match = _match_without_padding(node, candidates, options)
                    match = match or _match_formula(node, by_anchor, options)
                    if match is None and not candidates and not is_reported:
                        continue
                    decision = match or _decide(node, candidates, options)
            if decision is None:
                continue
            if self._is_early and _is_folded(decision):
                continue  # the later slot decides
            if self._is_early and not node._erased:
                node.meta[_DECIDED] = True
            log.info("%s", decision)
            events.add(decision)
            has_products = True
            modules.add(decision.module)
            matches[decision.family if isinstance(decision, Match) else ""] += 1
        if matches.keys() - {""}:
            _run_fusion_passes(graph, options, is_frozen=self._is_early)
        _warn_of_filters(modules, options)
        for family, least in dict(options.require).items():
            if has_products and matches[family] < least and not events.is_in_bucket():
                raise RequirementError(family, least, matches[family])

    def uuid(self) -> tuple[str, ...] | None:
        """Our part of Inductor's cache key: the files of the package, the options, the
        versions and the constants that we put into this graph (AOTAutograd's cache keys them by
        shape alone).

        None (no caching) while a third party's pattern is registered, whose code the key does not
        cover, with ``verify``, whose subgraphs exist in this process only, and after a failure,
        which may not occur again.
        """
        options = self.options
        if has_third_party() or fallback.declined() or (options is not None and options.verify):
            return None
        return fallback.run(self._key, lambda: None, options or Options())

    def _key(self) -> tuple[str, ...] | None:
        state = repr(self.options) if self.options is not None else "inactive"
        versions = (torch.__version__, triton.__version__, self._constants)
        slot = "early" if self._is_early else ""
        return "inductor_quant", source_hash(), state, *versions, slot

    def __deepcopy__(self, memo: dict[int, object]) -> QuantGemmPass:
        return self  # Inductor copies config values


def for_options(options: Options, constants: str = "", *, is_early: bool = False) -> QuantGemmPass:
    """The one pass for these options; with ``is_early`` that of EARLY_SLOT."""
    return _made(options, constants, is_early)


@functools.cache
def _made(options: Options, constants: str, is_early: bool) -> QuantGemmPass:
    return QuantGemmPass(options, constants, is_early=is_early)


def _is_joint(graph: fx.Graph) -> bool:
    return any("tangents" in node.name for node in graph.find_nodes(op="placeholder"))


@functools.cache
def source_hash() -> str:
    """SHA-256 over the names and contents of the package's ``.py``, ``.jinja`` and ``.json`` files.

    Inductor's cache key covers torch's sources only: without this hash, a warm cache would serve
    the old kernel after a template is edited.
    """
    roots = {
        "patterns": Path(__file__).parent,
        "inductor_quant": Path(inductor_quant.__file__).parent,
    }
    digest = hashlib.sha256()
    for label, root in roots.items():
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".jinja", ".json") and path.is_file():
                digest.update(f"{label}/{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _match_without_padding(
    node: fx.Node, candidates: list[Pattern], options: Options
) -> Match | None:
    """The match of a product that Inductor has padded; if there is none, the graph is unchanged."""
    product = unpadded(node) if candidates else None
    if product is None:
        return None
    decision = _decide(product.node, candidates, options)
    if not isinstance(decision, Match):
        product.undo()
        return None
    product.finish()
    return decision


def _match_formula(
    node: fx.Node, by_anchor: dict[object, list[Pattern]], options: Options
) -> Match | None:
    """The match of an op by the formula that it computes; if there is none, the graph is unchanged.
    How the op rounds is not known."""
    formula = adapters.expanded(node) if options.numerics != "strict" else None
    if formula is None:
        return None
    site = matrix_products.describe(node) if matrix_products.is_matrix_product(node) else None
    decision, product = None, formula.product
    if product is not None:
        product.meta[fallback.ANCHOR] = node.name
        decision = _decide(product, by_anchor[product.target], options)
    if not isinstance(decision, Match):
        formula.undo()
        return None
    formula.finish()
    site = site if events.is_open() and site is not None else decision.site
    return dataclasses.replace(decision, site=site, exactness=Exactness.REASSOCIATED)


def _decide(
    anchor: fx.Node, candidates: list[Pattern], options: Options
) -> Match | Rejection | None:
    """Match and rewrite one matrix product, or say why not; None if it is no matrix product.

    ``candidates``: the patterns that are anchored at its op.
    """
    module = fx_utils.module_path(anchor)
    # before the rewrite: the report shows the user's model
    site = matrix_products.describe(anchor) if events.is_open() else None
    if not candidates:
        return matrix_products.decline(anchor, site)
    found = _first_recognition(anchor, candidates, options)
    if found is None:
        return None
    if isinstance(found, Rejection) and site is not None:
        # recognizers do not say what the other operand is computed from
        is_other = found.code is RejectionCode.NOT_QUANTIZED
        if is_other or (found.code in _UNINFORMATIVE and not site.source):
            return matrix_products.decline(anchor, site)
    if isinstance(found, RecognizedGemm) and options.numerics == "strict":
        found = _policy(found, module, options) or strictly(found)
    refusal = found if isinstance(found, Rejection) else _policy(found, module, options)
    depends_on_rows = refusal is None or refusal.code in (
        RejectionCode.MANY_ROWS,
        RejectionCode.UNTUNED,
    )
    if depends_on_rows and isinstance(found, RecognizedGemm) and isinstance(found.m, str):
        variants.note(f"{found.row_kind or found.family}; {found.m}; {found.k}")
    if refusal is not None:
        where = refusal.node or anchor.name
        return Rejection(refusal.code, refusal.detail, where, module, site)
    assert isinstance(found, RecognizedGemm)
    if events.is_open() and (site is None or found.op in (experts.op, scaled_experts.op)):
        site = matrix_products.describe_found(found)
    name, product, exactness = anchor.name, anchor.meta[fallback.ANCHOR], classify(found)
    activation = activation_scheme.describe(found)
    format, computed = format_name(found), _computed_weight(found)
    call = rewrite(found, _verify_args(found, options) if options.verify else None)
    call.meta[fallback.ANCHOR] = product
    if found.row_scale is not None:
        mark_row_reductions(found.row_scale)
    size, names = (found.m, found.n, found.k), (name, module, call.name)
    match = Match(found.family, found.spec, *size, *names, site, activation, exactness, format)
    return dataclasses.replace(match, computed=computed)


def _computed_weight(found: RecognizedGemm) -> str:
    """The node that computes the 8-bit weight of a match in each call; "": it is in memory."""
    weight = found.args[1]
    if isinstance(weight, (list, tuple)) or compat.is_freezing():
        return ""
    source = source_of(weight)
    return "" if fx_utils.is_stored(source) else source.name


def _is_folded(decision: Match | Rejection) -> bool:
    """Whether the weight is computed in the graph: freezing does that once, if it is constant."""
    return isinstance(decision, Rejection) and decision.code is RejectionCode.COMPUTED_WEIGHT


def _run_fusion_passes(graph: fx.Graph, options: Options, *, is_frozen: bool) -> None:
    """The passes that need to see every canonical op. Their order matters."""
    merged = eliminate_common_subexpressions(graph)
    log.info("%d duplicate nodes merged before quantized GEMMs", merged)
    log.info("%d experts read ids as topk gives them", read_ids_of_topk(graph))
    log.info("%d experts have each token quantized once", quantize_tokens_once(graph))
    log.info("%d experts read rows where they are", gather_in_experts(graph))
    log.info("%d sorts of experts are counts, or of fewer bytes", route_experts(graph))
    if options.numerics != "strict":  # rounds less often than the graph, adds in another order
        log.info("%d experts compute their activation", gate_in_experts(graph))
        log.info("%d sums over the experts of a token", sum_experts(graph))
    log.info("%d gathers by token are by fewer tables", compute_by_token(graph))
    constants = _constants(graph) if is_frozen else set()
    if is_frozen and not options.verify:  # verified subgraphs read the weight as it was
        log.info("%d weights are repacked", repack_weights(graph, _values(graph)))
    log.info("%d GEMMs became part of another", concat_weights(graph, constants))
    copies = make_weights_k_major(graph, constants)
    log.info("%d int8 weights are copied to K-major", copies)
    if options.numerics != "strict":  # divides by a reciprocal
        simplify_quantization(graph)
        log.info("%d error functions are quantized", narrow_erf(graph))
        joined = fuse_norm_and_group_quant(graph)  # sums a row in another order
        log.info("%d quantizations in groups joined the kernel of a norm", joined)
    if options.horizontal_fusion:  # after them: the passes above look for single GEMMs
        log.info("%d GEMMs may share the launch of another", horizontal_fusion(graph))
    # Needs ``quantize`` of the passes above; verified subgraphs start at the integers.
    if options.fuse_quantization and not options.verify:
        log.info("%d GEMMs may quantize their activation", quantize_in_gemms(graph))
    log.info("%d casts duplicated after GEMMs, one for each user", duplicate_casts(graph))


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """The inputs that are constants of a graph that Inductor will freeze."""
    inputs = graph.find_nodes(op="placeholder")[: freezing.inputs_to_be_frozen()]
    return {*inputs, *graph.find_nodes(op="get_attr")}


def _values(graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """Those of ``_constants`` that are known and that nobody writes to."""
    found = freezing.values_to_be_frozen(graph)
    for node in graph.find_nodes(op="get_attr"):
        if fx_utils.has_fixed_values(node) and (tensor := fx_utils.attribute(node)) is not None:
            found[node] = tensor
    return {node: tensor for node, tensor in found.items() if not fx_utils.is_mutated(node)}


def _verify_args(found: RecognizedGemm, options: Options) -> tuple[Any, ...]:
    """The arguments of ``inductor_quant::verify`` that follow the result."""
    if compat.is_exporting():
        raise OptionError("verify compares in the process that compiled: leave it out of an export")
    subgraph, tensors, sizes = subgraph_of(found)
    name = f"{found.family} {found.spec} at {found.anchor.name}"
    return tensors, sizes, verify.remember(subgraph, name, raises=options.on_error == "raise")


def _first_recognition(
    anchor: fx.Node, candidates: list[Pattern], options: Options
) -> RecognizedGemm | Rejection | None:
    """The result of the first pattern of the user's families that recognizes ``anchor``. If none
    does, that of one of other families, or the first rejection that is not NOT_QUANTIZED, or else
    the first one."""
    first: RecognizedGemm | Rejection | None = None
    for pattern in candidates:
        found = pattern.recognize(anchor)
        if isinstance(found, RecognizedGemm) and found.family in options.families:
            return found
        is_better = isinstance(found, RecognizedGemm) and isinstance(first, Rejection)
        is_open = isinstance(first, Rejection) and first.code is RejectionCode.NOT_QUANTIZED
        if first is None or is_open or is_better:
            first = found or first
    return first


def _policy(found: RecognizedGemm, module: str, options: Options) -> Rejection | None:
    """Why the user's options, the device or what reads the result forbid a rewrite."""
    if found.family not in options.families:
        return Rejection(RejectionCode.FAMILY_DISABLED, f"{found.family} {found.spec}")
    if not options.selects(module):
        return Rejection(RejectionCode.MODULE_EXCLUDED, module)
    device = fx_utils.value(found.anchor).device
    if not compat.runs_triton(device):
        return Rejection(RejectionCode.DEVICE, f"{device} runs {found.family} without our kernels")
    if options.numerics == "strict" and not compat.keeps_roundings():
        return Rejection(
            RejectionCode.NUMERICS, "torch._inductor.config.emulate_precision_casts is off"
        )
    if collectives.is_overlapped(found.anchor):
        return Rejection(RejectionCode.COLLECTIVE, f"{found.family} {found.spec}")
    if (names := compat.choice_filter()) is not None and not _names_ours(names, found.family):
        return Rejection(RejectionCode.CHOICE_FILTER, f"{names!r}; {found.family} {found.spec}")
    if not options.untuned and stock.is_left_to_it(found):
        return Rejection(RejectionCode.UNTUNED, f"{found.family} {found.spec}")
    if fx_utils.are_strides_read(found.end) and not fx_utils.is_row_major(found.end):
        strides = fx_utils.value(found.end).stride()
        return Rejection(RejectionCode.STRIDES, f"{found.end.name} has {tuple(strides)}")
    if found.too_many_rows:
        return Rejection(RejectionCode.MANY_ROWS, f"{found.m} rows; {found.family} {found.spec}")
    return None


def _names_ours(names: str, family: str) -> bool:
    """Whether a regular expression matches, or spells out, the names of the family's choices. If it
    matches none, the canonical op cannot be lowered."""
    prefix = "inductor_quant_"  # of Kernel.template_name
    return prefix in names or re.search(names, f"triton_{prefix}{family}_") is not None


def _warn_of_filters(modules: set[str], options: Options) -> None:
    """Warn of a filter that matches none of the products' modules."""
    for name in ("include_modules", "exclude_modules"):
        patterns = getattr(options, name)
        if modules and patterns and not any(matches_any(module, patterns) for module in modules):
            fallback.warn_once(
                f"{name}={list(patterns)} matches no matrix product of this graph: their modules "
                f"are {', '.join(map(repr, sorted(modules)[:3]))}, ... (inductor_quant.explain "
                "lists them)"
            )
