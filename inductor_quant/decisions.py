"""What was decided about each candidate GEMM, as values: a ``Match`` or a ``Rejection`` with a
code.

"No match" is an ordinary outcome that the report shows to the user, so it is never an exception.
"""

from __future__ import annotations

import dataclasses
import enum

from inductor_quant.numerics import Exactness
from inductor_quant.spec import QuantGemmSpec


class RejectionCode(enum.StrEnum):
    """Why a GEMM was left as it was, or why a kernel or configuration does not apply."""

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
    NO_PATTERN = "no_pattern"
    NOT_QUANTIZED = "not_quantized"
    # policy
    DEVICE = "device"
    FAMILY_DISABLED = "family_disabled"
    MODULE_EXCLUDED = "module_excluded"
    NUMERICS = "numerics"
    MANY_ROWS = "many_rows"
    INTERNAL_ERROR = "internal_error"
    # kernels
    NO_KERNEL = "no_kernel"
    BLOCK_SHAPE = "block_shape"
    SHARED_MEMORY = "shared_memory"
    REGISTERS = "registers"


MEANINGS: dict[RejectionCode, str] = {
    RejectionCode.NO_SCALE: "the integer result is not multiplied by a scale",
    RejectionCode.SCALE_AXIS: "a scale varies along neither rows, columns nor the whole tensor",
    RejectionCode.SCALE_DTYPE: "a scale is not fp32, bf16 or fp16, or the result is none of them",
    RejectionCode.SCALE_DYNAMIC_SHAPE: "a scale's symbolic shape cannot be shown to be M or N",
    RejectionCode.EXTRA_USER: "the integer result is also used elsewhere",
    RejectionCode.DTYPE: "an operand is not of the family's element type",
    RejectionCode.K_TOO_LONG: "at this K, full-range operands overflow the int32 accumulator",
    RejectionCode.DYNAMIC_K: "K is symbolic, so overflow of the accumulator cannot be excluded",
    RejectionCode.MUTATED_OPERAND: "an operand is written to in this graph",
    RejectionCode.WEIGHT_FORM: "the weight is no affine function of one stored number each",
    RejectionCode.COMPUTED_WEIGHT: "the quantized weight is computed in this graph, not stored",
    RejectionCode.BATCHED_WEIGHT: "each matrix of the batch has a weight of its own",
    RejectionCode.OPAQUE: "an op of the producer's own, whose meaning we do not know",
    RejectionCode.BIAS: "what is added is no bias of the columns",
    RejectionCode.ACTIVATION: "the activation is not bf16, fp16 or fp32",
    RejectionCode.NO_PATTERN: "fed from quantized data, but no pattern knows this form",
    RejectionCode.NOT_QUANTIZED: "neither operand comes from quantized data",
    RejectionCode.DEVICE: "there is no kernel for this device; the graph stays as it was",
    RejectionCode.FAMILY_DISABLED: "Options.families leaves this family out",
    RejectionCode.MODULE_EXCLUDED: "include_modules or exclude_modules leaves this module out",
    RejectionCode.NUMERICS: 'not bit for bit what the graph computes, as numerics="strict" asks',
    RejectionCode.MANY_ROWS: "so many rows that the graph is faster as it is",
    RejectionCode.INTERNAL_ERROR: "inductor_quant failed on this GEMM and left it as it was",
    RejectionCode.NO_KERNEL: "recognised, but no kernel covers it",
    RejectionCode.BLOCK_SHAPE: "a block size that the kernel or the matrix unit does not take",
    RejectionCode.SHARED_MEMORY: "the pipeline stages exceed the shared memory of a block",
    RejectionCode.REGISTERS: "the accumulator does not fit in the registers of a block",
}


@dataclasses.dataclass(frozen=True)
class Site:
    """One matrix product of a graph: what a report says of it, whatever was decided.

    ``op`` is the anchor ("aten._int_mm"); sizes are ints, or the symbolic expression as text;
    ``a_dtype`` and ``b_dtype`` are the operands' types as they reach the op; ``source`` is the
    quantized type that feeds it from further up (a weight that is dequantized first), "" if none.
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


@dataclasses.dataclass(frozen=True)
class Rejection:
    """``code`` is stable and greppable, ``detail`` is one sentence for a person, ``node`` names the
    FX node that stopped us (empty where none did)."""

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

    granularity   "per_token", "per_tensor", or "per_group": of each row's slices of K
    dtype         of the numbers in the graph: "int8" or "uint8" (which the kernel takes shifted)
    statistic     of a dynamic one: "amax", of the absolute values, or "aminmax"
    divisor       what the statistic is divided by: 127, 127.5, 255; 0: not found
    scale_dtype   the type in which it is divided: "bf16"
    guard         what keeps the scale from being 0: "clamp_min 1.19e-07", "where"
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

    ``m`` is an int, or a symbol's name where M is dynamic; ``node`` is the anchor that was
    recognised, ``call`` the canonical op's node that stands for it now. ``activation``: how it is
    quantized, None where it is not. ``exactness``: how near the op's result is to the graph's.
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

    def __str__(self) -> str:
        return f"{self.family} {self.spec} {self.m}x{self.n}x{self.k} at {self.node}"
