"""The options of the plugin: frozen, validated, and part of the cache key."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from inductor_quant.errors import OptionError

FAMILIES = ("w8a8", "weight_only", "fp8", "fp8_block")
PREFIX = "inductor_quant."
DISABLE_VARIABLE = "INDUCTOR_QUANT_DISABLE"
# The form that kernels.config.parse_config reads; a pin that is refused there is refused too late.
_CONFIG = re.compile(r"(\w+ )?\d+x\d+x\d+_w\d+_s\d+_g\d+(_k[1-9]\d*)?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Options:
    """How the plugin treats a compilation.

    families          families to rewrite; the others are reported as ``FAMILY_DISABLED``
    include_modules   glob patterns of module paths ("layers.*.mlp.*"); empty: every module
    exclude_modules   glob patterns of module paths that stay as they are; wins over include
    on_error          "fallback": a failure of the plugin leaves the graph untouched, warns once and
                      shows in the report. "raise": it is raised (for test suites). The same holds
                      for a torch that the plugin does not know.
    configs           configurations to offer, in order, in place of the tables', such as
                      "64x64x128_w4_s4_g8", or for one kernel alone, as a report names it,
                      "w8a8_mm 64x64x128_w4_s4_g8"; those that cannot run are passed over
    max_choices       configurations that a max-autotune compile times for one GEMM, at most
    numerics          "strict": only what is bit for bit what the graph computes in eager mode, on
                      the same quantized operands: integer products with scales (and bias) in fp32,
                      up to the first rounding; the rest stays in the graph, whose roundings
                      Inductor then keeps (``emulate_precision_casts``). Other GEMMs are declined
                      as ``NUMERICS``. "default": at least as near to the exact result as the graph
    read_tables       know small integer tables of the model (GPTQ's shift tables and ``g_idx``) by
                      their values, and look at each call whether they still have them; of
                      ``backend="inductor_quant"`` alone. False: kernels look them up
    verify            compare each fused GEMM on its first real inputs with its graph, op by op and
                      in fp64: ``Report.verifications`` has the errors; one beyond the graph's is
                      warned of, or raised as VerificationError with ``on_error="raise"``. Not
                      cached; a copy of each result. For tests
    group_gemms       GEMMs of one activation (q, k and v; gate and up) with few rows in one launch,
                      where a kernel takes them; False: one each
    fuse_quantization
                      quantize an activation of up to four rows in the GEMM that alone reads it,
                      where a kernel does both and is faster; False, and with ``verify``: in a
                      kernel before it
    require           family -> how many GEMMs of it each compiled graph with matrix products must
                      match at least; fewer raise RequirementError, whatever on_error (for a CI)

    Given to ``enable(**options)``, or to a single call as
    ``torch.compile(m, backend="inductor_quant", options={"inductor_quant.families": ("w8a8",)})``.
    Raises OptionError for an unknown name or an illegal value.
    """

    families: tuple[str, ...] = FAMILIES
    include_modules: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] = ()
    on_error: Literal["fallback", "raise"] = "fallback"
    configs: tuple[str, ...] = ()
    max_choices: int = 12
    read_tables: bool = True
    numerics: Literal["default", "strict"] = "default"
    verify: bool = False
    group_gemms: bool = True
    fuse_quantization: bool = True
    require: Mapping[str, int] | tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("families", "include_modules", "exclude_modules", "configs"):
            value = getattr(self, name)
            # A set or a generator has no order that could be part of a cache key.
            is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
            if not is_sequence or not all(isinstance(item, str) for item in value):
                raise OptionError(f"{name}={value!r} must be a sequence of strings")
            object.__setattr__(self, name, tuple(value))
        for text in self.configs:
            if not _CONFIG.fullmatch(text):
                raise OptionError(
                    f"configs={self.configs!r}: {text!r} is no configuration; one reads "
                    '"128x128x64_w4_s3_g8"'
                )
        unknown = set(self.families) - set(FAMILIES)
        if unknown:
            raise OptionError(
                f"families={self.families!r}: unknown {sorted(unknown)}; there are {list(FAMILIES)}"
            )
        self._check_require()
        if self.on_error not in ("fallback", "raise"):
            raise OptionError(f'on_error={self.on_error!r} must be "fallback" or "raise"')
        if self.numerics not in ("default", "strict"):
            raise OptionError(f'numerics={self.numerics!r} must be "default" or "strict"')
        for name in ("read_tables", "verify", "group_gemms", "fuse_quantization"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r} must be True or False")
        if isinstance(self.max_choices, bool) or not isinstance(self.max_choices, int):
            raise OptionError(f"max_choices={self.max_choices!r} must be an integer")
        if self.max_choices < 1:
            raise OptionError(f"max_choices={self.max_choices} must be at least 1")

    def _check_require(self) -> None:
        try:
            required = dict(self.require)
        except (TypeError, ValueError):
            required = {"": 0}
        for family, count in required.items():
            is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 0
            if family not in FAMILIES or not is_count:
                raise OptionError(
                    f"require={self.require!r} must map families of {list(FAMILIES)} to numbers"
                )
        # As pairs: options are hashed, for the cache key among others.
        object.__setattr__(self, "require", tuple(sorted(required.items())))

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Options:
        """Options from names and values; unknown names are refused, not dropped."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise OptionError.unknown(unknown, known)
        return cls(**values)

    @classmethod
    def split(cls, options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """``torch.compile``'s ``options`` as (ours without their prefix, Inductor's)."""
        ours: dict[str, Any] = {}
        inductors: dict[str, Any] = {}
        for name, value in (options or {}).items():
            if name.startswith(PREFIX):
                ours[name.removeprefix(PREFIX)] = value
            else:
                inductors[name] = value
        return ours, inductors

    def selects(self, module: str) -> bool:
        """Whether GEMMs of the module at this path ("": not known) are to be rewritten."""
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in self.exclude_modules):
            return False
        return not self.include_modules or any(
            fnmatch.fnmatchcase(module, pattern) for pattern in self.include_modules
        )


def is_disabled_by_environment() -> bool:
    """``INDUCTOR_QUANT_DISABLE=1`` turns the plugin off without a change to the program."""
    return os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0")
