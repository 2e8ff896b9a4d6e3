"""What a user can do about products that were not matched: one call or option for each code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from inductor_quant import prepare
from inductor_quant.spec.decisions import Rejection, RejectionCode

ADVICE: dict[RejectionCode, str] = {
    RejectionCode.EXTRA_USER: "call the model under torch.no_grad() if it was traced for training",
    RejectionCode.DYNAMIC_K: "compile with dynamic=False, or mark the size of K as static",
    RejectionCode.SCALE_DYNAMIC_SHAPE: "compile with dynamic=False",
    RejectionCode.FAMILY_DISABLED: 'options={"inductor_quant.families": [...]} names this family',
    RejectionCode.MODULE_EXCLUDED: "change include_modules or exclude_modules",
    RejectionCode.NUMERICS: 'numerics="default" allows results of fewer roundings',
    RejectionCode.COMPUTED_WEIGHT: "store it, or set torch._inductor.config.freezing = True",
    RejectionCode.UNTUNED: "untuned=True takes it all the same",
    RejectionCode.COLLECTIVE: "torch._inductor.config._micro_pipeline_tp = False",
    RejectionCode.STRIDES: "read the result by view, reshape or slices, not by as_strided",
    RejectionCode.CHOICE_FILTER: "unset TORCHINDUCTOR_AUTOTUNE_CHOICE_NAME_REGEX, or let it match "
    "triton_inductor_quant",
    RejectionCode.MUTATED_OPERAND: "do not write to quantized tensors inside the compiled call",
    RejectionCode.INTERNAL_ERROR: 'on_error="raise" shows the failure; please report it',
    RejectionCode.DEVICE: "move the model to an NVIDIA GPU of compute capability 8.0 or newer",
}
# For ``codes`` alone: what the model's code would have to be, which ``explain`` does not ask for.
HINTS: dict[RejectionCode, str] = {
    RejectionCode.NO_SCALE: "multiply the int32 result by its scale in the same graph",
    RejectionCode.SCALE_DTYPE: "cast it to fp32, bf16 or fp16",
    RejectionCode.ACTIVATION: "run the model in bf16, fp16 or fp32",
    RejectionCode.K_TOO_LONG: "split the product along K, or use groups along K",
    RejectionCode.WEIGHT_FORM: "the detail names the step that was not understood: write it with "
    "shifts, masks, views and tables, or report it",
    RejectionCode.OPAQUE: "call prepare_, or add an adapter (patterns/README.md)",
    RejectionCode.BIAS: "add one value per channel, before anything else",
    RejectionCode.BLOCK_PLACES: "use torch.sparse_bsr and prepare_, or compute the places from the "
    "numbers of blocks",
    RejectionCode.NO_PATTERN: "the detail names the step; patterns/README.md has what is matched",
    RejectionCode.MANY_ROWS: "nothing: a library is faster here",
}


def pending(model: Any) -> Counter[str]:
    """What ``prepare_`` would do to a model, as kinds of layers and hooks. To be asked before the
    model's first call, which may change it."""
    return Counter(prepare.pending(model) if isinstance(model, nn.Module) else ())


def by_hand(model: Any) -> tuple[str, ...]:
    """What has to be written in another way."""
    names = list(prepare.untraceable(model)) if isinstance(model, nn.Module) else []
    return tuple(f"{name}: {prepare.sparse_bsr.MANUAL}" for name in names)


def left(model: Any) -> Counter[tuple[str, str]]:
    """The layers that no graph can hold and ``prepare_`` leaves, with the reason; likewise."""
    return Counter(prepare.left(model) if isinstance(model, nn.Module) else ())


def of(
    rejections: Iterable[Rejection],
    pending: Counter[str],
    matched: int,
    left: Counter[tuple[str, str]] | None = None,
) -> tuple[str, ...]:
    """``pending`` and ``left`` are left out where as many products are ``matched``: the graph was
    enough."""
    lines = []
    if left and left.total() > matched:
        opaque = RejectionCode.OPAQUE.value
        lines = [f"{opaque} ({n} {kind}): {reason}" for (kind, reason), n in left.items()]
    if pending.total() > matched:
        what = ", ".join(f"{count} {kind}" for kind, count in pending.items())
        lines += [f"inductor_quant.prepare_(model), after loading, before its first call: {what}"]
    codes = Counter(rejection.code for rejection in rejections if rejection.code in ADVICE)
    return (*lines, *(f"{code.value} ({n}): {ADVICE[code]}" for code, n in codes.items()))
