"""What was decided about a candidate GEMM, as values: a ``Match``, or a ``Rejection`` with a code.

"No match" is an ordinary outcome that reports show, so it is never an exception.
"""

from __future__ import annotations

import dataclasses
import enum

from inductor_quant.spec.exactness import Exactness
from inductor_quant.spec.gemm import QuantGemmSpec


class RejectionCode(enum.StrEnum):
    """Why a GEMM was left unchanged, or why a kernel or configuration does not apply."""

    # recognition
    NO_SCALE = "no_scale"
    SCALE_AXIS = "scale_axis"
    SCALE_DTYPE = "scale_dtype"
    SCALE_DYNAMIC_SHAPE = "scale_dynamic_shape"
    EXTRA_USER = "extra_user"
    DTYPE = "dtype"
    K_TOO_LONG = "k_too_long"
    DYNAMIC_K = "dynamic_k"
    MUTATED_OPERAND = "mutated_operand"
    WEIGHT_FORM = "weight_form"
    COMPUTED_WEIGHT = "computed_weight"
    BATCHED_WEIGHT = "batched_weight"
    OPAQUE = "opaque"
    BIAS = "bias"
    ACTIVATION = "activation"
    BLOCK_PLACES = "block_places"
    NO_PATTERN = "no_pattern"
    NOT_QUANTIZED = "not_quantized"
    # policy
    DEVICE = "device"
    FAMILY_DISABLED = "family_disabled"
    MODULE_EXCLUDED = "module_excluded"
    NUMERICS = "numerics"
    MANY_ROWS = "many_rows"
    UNTUNED = "untuned"
    COLLECTIVE = "collective"
    CHOICE_FILTER = "choice_filter"
    STRIDES = "strides"
    INTERNAL_ERROR = "internal_error"
    # kernels
    NO_KERNEL = "no_kernel"
    BLOCK_SHAPE = "block_shape"
    SHARED_MEMORY = "shared_memory"
    REGISTERS = "registers"


MEANINGS: dict[RejectionCode, str] = {
    RejectionCode.NO_SCALE: "the integer result is not multiplied by a scale",
    RejectionCode.SCALE_AXIS: "a scale is not per token, per channel, per group nor per tensor",
    RejectionCode.SCALE_DTYPE: "a scale or the result is not fp32, bf16 or fp16",
    RejectionCode.SCALE_DYNAMIC_SHAPE: "a scale has a symbolic shape that is not provably M or N",
    RejectionCode.EXTRA_USER: "the integer result, or a dequantized stack, is also used elsewhere",
    RejectionCode.DTYPE: "an operand is not of the family's element type",
    RejectionCode.K_TOO_LONG: "at this K, full-range operands overflow the int32 accumulator",
    RejectionCode.DYNAMIC_K: "K is symbolic, so overflow of the accumulator cannot be excluded",
    RejectionCode.MUTATED_OPERAND: "an operand is written to in this graph",
    RejectionCode.WEIGHT_FORM: "the weight is not affine in one quantized value per element",
    RejectionCode.COMPUTED_WEIGHT: "the quantized weight is computed in this graph, not stored",
    RejectionCode.BATCHED_WEIGHT: "each matrix of the batch has its own weight",
    RejectionCode.OPAQUE: "a custom op of the quantizer, whose meaning is unknown",
    RejectionCode.BIAS: "the addend is not a bias per channel",
    RejectionCode.ACTIVATION: "the activation is not bf16, fp16 or fp32",
    RejectionCode.BLOCK_PLACES: "tables place parts of the weight, but not provably whole blocks",
    RejectionCode.NO_PATTERN: "the operands are quantized data, but no pattern matches",
    RejectionCode.NOT_QUANTIZED: "neither operand is computed from quantized data",
    RejectionCode.DEVICE: "no kernel for this device; the graph is left unchanged",
    RejectionCode.FAMILY_DISABLED: "Options.families excludes this family",
    RejectionCode.MODULE_EXCLUDED: "include_modules or exclude_modules excludes this module",
    RejectionCode.NUMERICS: 'not bit for bit the graph, as numerics="strict" requires',
    RejectionCode.MANY_ROWS: "M is so large that the graph is faster unchanged",
    RejectionCode.UNTUNED: "nothing was tuned for this card, and a library computes the product",
    RejectionCode.COLLECTIVE: "_micro_pipeline_tp overlaps the product with a collective",
    RejectionCode.CHOICE_FILTER: "test_configs.autotune_choice_name_regex excludes our kernels",
    RejectionCode.STRIDES: "the graph reads the result by strides that our kernels do not give it",
    RejectionCode.INTERNAL_ERROR: "inductor_quant failed on this GEMM and left it unchanged",
    RejectionCode.NO_KERNEL: "no kernel supports this GEMM, or this kernel does not",
    RejectionCode.BLOCK_SHAPE: "a tile size that the kernel or the matrix unit does not support",
    RejectionCode.SHARED_MEMORY: "the pipeline stages exceed the shared memory of a CTA",
    RejectionCode.REGISTERS: "the accumulator does not fit in registers",
}


@dataclasses.dataclass(frozen=True)
class Site:
    """One matrix product of a graph, as reports describe it whatever was decided.

    op                the anchor ("aten._int_mm")
    m, n, k           ints, or the symbolic expression as text
    a_dtype, b_dtype  of the operands as they reach the op
    source            the quantized dtype that they are computed from (of a weight that is
                      dequantized first), "" if none
    rows              the range of M that is compiled ("17..32"), "" if the graph serves all
    experts           how many weights the rows choose from; 0: there is one. ``batch``, if all have
                      as many rows
    """

    node: str
    op: str
    batch: int | str
    m: int | str
    n: int | str
    k: int | str
    a_dtype: str
    b_dtype: str
    device: str
    module: str = ""
    source: str = ""
    rows: str = ""
    experts: int = 0


@dataclasses.dataclass(frozen=True)
class Rejection:
    """``code`` is stable and greppable, ``detail`` one sentence for people, ``node`` the FX node
    that prevented the match, "" if none did."""

    code: RejectionCode
    detail: str = ""
    node: str = ""
    module: str = ""
    site: Site | None = None

    def __str__(self) -> str:
        where = f" at {self.node}" if self.node else ""
        return f"{self.code.value}{where}: {self.detail or MEANINGS[self.code]}"


@dataclasses.dataclass(frozen=True)
class Activation:
    """How the activation of a match is quantized, as far as the graph shows it.

    granularity   "per_token", "per_tensor", or "per_group" (along K)
    dtype         in the graph: "int8" or "uint8" (which the kernel takes shifted to int8)
    statistic     of a dynamic scale: "amax" (of absolute values) or "aminmax"
    divisor       of the statistic: 127, 127.5, 255; 0: not found
    scale_dtype   dtype of that division: "bf16"
    guard         what keeps the scale from 0: "clamp_min 1.19e-07", "where"
    """

    is_dynamic: bool
    granularity: str
    dtype: str
    is_symmetric: bool
    statistic: str = ""
    divisor: float = 0.0
    scale_dtype: str = ""
    guard: str = ""

    def __str__(self) -> str:
        kind = "dynamic" if self.is_dynamic else "static"
        symmetry = "symmetric" if self.is_symmetric else "asymmetric"
        text = f"{kind} {self.granularity} {self.dtype} {symmetry}"
        if self.divisor:
            text += f", {self.statistic}/{self.divisor:g} in {self.scale_dtype}"
        return text


@dataclasses.dataclass(frozen=True)
class Match:
    """A GEMM that was rewritten.

    m           an int; the symbol's name if M is dynamic
    node, call  the anchor that was recognized, and the canonical op's node that replaced it
    activation  how the activation is quantized; None: it is not
    exactness   how close the op's result is to the graph's
    format      the common name of a packed weight's format ("nvfp4", "q4_k"); "": it has none
    computed    the node that computes the 8-bit weight in each call; "": it is in memory
    """

    family: str
    spec: QuantGemmSpec
    m: int | str
    n: int | str
    k: int | str
    node: str
    module: str = ""
    call: str = ""
    site: Site | None = None
    activation: Activation | None = None
    exactness: Exactness = Exactness.REASSOCIATED
    format: str = ""
    computed: str = ""

    def __str__(self) -> str:
        return f"{self.family} {self.spec} {self.m}x{self.n}x{self.k} at {self.node}"
