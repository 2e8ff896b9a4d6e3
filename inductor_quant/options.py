"""The options of the plugin: frozen, validated, and part of the cache key."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from inductor_quant.errors import OptionError

FAMILIES = (
    *("w8a8", "w4a8", "weight_only", "fp8", "fp8_block", "block_sparse"),
    *("experts", "scaled_experts"),
)
PREFIX = "inductor_quant."
DISABLE_VARIABLE = "INDUCTOR_QUANT_DISABLE"
# As kernels.config.parse_config reads it, so that a malformed pin fails here and not in a compile.
_CONFIG = re.compile(r"(\w+ )?\d+x\d+x\d+_w\d+_s\d+_g\d+(_k[1-9]\d*)?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Options:
    """How the plugin treats a compilation.

    families          families to rewrite; others are rejected as ``FAMILY_DISABLED``
    include_modules   glob patterns of module paths ("layers.*.mlp.*"); empty: every module
    exclude_modules   glob patterns of module paths to leave unchanged; wins over include
    on_error          if the plugin fails, or does not support this torch. "fallback": leave the
                      graph unchanged, warn once and report it. "raise": raise (for test suites)
    configs           configurations to offer, in order, instead of the kernels' own:
                      "64x64x128_w4_s4_g8", or for one kernel "w8a8_mm 64x64x128_w4_s4_g8"; illegal
                      ones are skipped
    max_choices       most configurations that max-autotune times for one GEMM
    read_tables       specialize on small integer tables of the model (GPTQ's shift tables and
                      ``g_idx``) and compare them on every call; only with
                      ``backend="inductor_quant"``. False: kernels read the tables
    numerics          "default": at least as close to the exact result as the graph. "strict": only
                      GEMMs that are bit for bit the graph's in eager mode on the same quantized
                      operands (integer products, scales and bias in fp32, up to the first
                      rounding); others are rejected as ``NUMERICS``. Inductor keeps the roundings
                      of the rest of the graph (``emulate_precision_casts``)
    verify            compare each fused GEMM on its first real inputs with its graph, op by op and
                      in fp64, see ``Report.verifications``; a larger error than the graph's warns,
                      or with ``on_error="raise"`` raises VerificationError. Copies each result,
                      disables caches. For tests
    horizontal_fusion GEMMs of one activation (q, k and v; gate and up) in one launch, for small M,
                      and for short int8 GEMMs of any, if a kernel supports it; False: one launch
                      each
    fuse_quantization quantize an activation of up to four rows in the GEMM, if that is its only
                      reader and a kernel does both faster; False, and with ``verify``: before it
    row_buckets       with a symbolic M, compile the graph for each range of M that a call meets:
                      True: the ranges in which a choice differs (``spec/row_ranges.py``); the
                      largest M of each, such as (1, 16, 128, 1024), beyond which is one more;
                      False: the kernels of the first call's size serve all
    compile_buckets   when: "met": in the first call of a range; "ahead": all ranges in the first
                      call; "background": in a thread, while the kernels of the first call's size
                      serve
    untuned           take every GEMM on cards where nothing was tuned (all but sm_90); False: leave
                      those as ``UNTUNED`` that a library computes there from quantized operands
    require           family -> least matches in each compiled graph that has matrix products; fewer
                      raise RequirementError, whatever on_error (for a CI)

    Given to ``enable(**options)``, or to one call as
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
    horizontal_fusion: bool = True
    fuse_quantization: bool = True
    row_buckets: bool | tuple[int, ...] = True
    compile_buckets: Literal["met", "ahead", "background"] = "met"
    untuned: bool = False
    require: Mapping[str, int] | tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("families", "include_modules", "exclude_modules", "configs"):
            value = getattr(self, name)
            # Part of the cache key, which needs an order: no set, no generator.
            is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
            if not is_sequence or not all(isinstance(item, str) for item in value):
                raise OptionError(f"{name}={value!r} must be a sequence of strings")
            object.__setattr__(self, name, tuple(value))
        for text in self.configs:
            if not _CONFIG.fullmatch(text):
                raise OptionError(
                    f"configs={self.configs!r}: {text!r} is not a configuration such as "
                    '"128x128x64_w4_s3_g8"'
                )
        unknown = set(self.families) - set(FAMILIES)
        if unknown:
            raise OptionError(
                f"families={self.families!r}: unknown {sorted(unknown)}; "
                f"the families are {list(FAMILIES)}"
            )
        self._check_require()
        self._check_row_buckets()
        if self.on_error not in ("fallback", "raise"):
            raise OptionError(f'on_error={self.on_error!r} must be "fallback" or "raise"')
        if self.numerics not in ("default", "strict"):
            raise OptionError(f'numerics={self.numerics!r} must be "default" or "strict"')
        switches = ("read_tables", "verify", "horizontal_fusion", "fuse_quantization", "untuned")
        for name in switches:
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r} must be True or False")
        if isinstance(self.max_choices, bool) or not isinstance(self.max_choices, int):
            raise OptionError(f"max_choices={self.max_choices!r} must be an integer")
        if self.max_choices < 1:
            raise OptionError(f"max_choices={self.max_choices} must be at least 1")

    def _check_row_buckets(self) -> None:
        value: Any = self.row_buckets
        if self.compile_buckets not in ("met", "ahead", "background"):
            raise OptionError(
                f'compile_buckets={self.compile_buckets!r} must be "met", "ahead" or "background"'
            )
        if isinstance(value, bool):
            return
        sizes = tuple(value) if isinstance(value, list | tuple) else ()
        are_sizes = all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sizes)
        if not sizes or not are_sizes or list(sizes) != sorted(set(sizes)):
            raise OptionError(
                f"row_buckets={value!r} must be True, False or ascending sizes such as (1, 16, 128)"
            )
        object.__setattr__(self, "row_buckets", sizes)

    def _check_require(self) -> None:
        try:
            required = dict(self.require)
        except (TypeError, ValueError):
            required = {"": 0}
        for family, count in required.items():
            is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 0
            if family not in FAMILIES or not is_count:
                raise OptionError(
                    f"require={self.require!r} must map families {list(FAMILIES)} to counts"
                )
        # As pairs, which are hashable.
        object.__setattr__(self, "require", tuple(sorted(required.items())))

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Options:
        """Options from names and values. Raises OptionError for unknown names."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise OptionError.unknown(unknown, known)
        return cls(**values)

    @classmethod
    def split(cls, options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """``torch.compile``'s ``options``: (ours without their prefix, Inductor's)."""
        ours: dict[str, Any] = {}
        inductors: dict[str, Any] = {}
        for name, value in (options or {}).items():
            if name.startswith(PREFIX):
                ours[name.removeprefix(PREFIX)] = value
            else:
                inductors[name] = value
        return ours, inductors

    def selects(self, module: str) -> bool:
        """Whether to rewrite GEMMs of the module at this path ("": unknown)."""
        if matches_any(module, self.exclude_modules):
            return False
        return not self.include_modules or matches_any(module, self.include_modules)


def matches_any(module: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


def is_disabled_by_environment() -> bool:
    """``INDUCTOR_QUANT_DISABLE=1`` turns the plugin off without a change to the program."""
    return os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0")
