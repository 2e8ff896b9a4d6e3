"""A kernel as the lowering sees it: one template, when it applies, and its configurations."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from importlib import resources
from typing import Any, ClassVar

from inductor_quant.kernels.codegen.digits.order import Order
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

# Inductor's Jinja environment has no loader, so we resolve includes ourselves.
_INCLUDE = re.compile(r"\{#- include ([\w/]+) -#\}")


@dataclasses.dataclass(frozen=True)
class ColumnOrder:
    """Of columns that are counted by digits: the ``sizes`` of these as columns are stored, and the
    ``places`` among them of the digits of n, the first one first."""

    sizes: tuple[int, ...]
    places: tuple[int, ...]


class Kernel(ABC):
    """One Triton or Gluon template. ``kernels/README.md`` says how a kernel is chosen and added.

    name           unique; Inductor knows the kernel as ``inductor_quant_<name>``
    family         the canonical op that it computes
    template       its file, relative to ``inductor_quant/kernels``, without ``.py.jinja``
    is_gluon       written in Gluon, which not every Triton has
    is_horizontal  can compute several GEMMs of one activation in one launch
    quantizes      quantizes its activation, and takes no quantized one

    With ``split_k`` above 1, or a ``column_order``, the output is fp32 partials [split_k, M, N].
    The lowering adds them and applies what follows (scales, bias).
    """

    name: ClassVar[str]
    family: ClassVar[str]
    template: ClassVar[str]
    is_gluon: ClassVar[bool] = False
    is_horizontal: ClassVar[bool] = False
    quantizes: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
        """CTAs for (m, n, meta), or (split_k, m, n, meta) if K is split. Takes ints and sympy
        expressions; ``meta`` has the tile sizes and ``constants``."""

    @abstractmethod
    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        """Why the kernel does not take this GEMM; None: it does."""

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        """The template's constants, other than the tile sizes."""
        return {}

    def launched_warps(self, config: GemmConfig) -> int:
        """Warps of a launch, without those that Gluon adds for other partitions."""
        return config.num_warps

    @abstractmethod
    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Legal configurations, best guess first; they all have the ``split_k`` of the first.

        Empty: a later kernel is the better choice, or ``prefers_library`` says that none is."""

    def prefers_library(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> bool:
        """Where ``configs`` is empty: whether the later kernels of the family are no alternative
        either, but what the lowering does without a kernel is."""
        return False

    @abstractmethod
    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        """Why ``config`` cannot run; None: it can."""

    def partials(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> int:
        """How many partials of the output the kernel stores; 1: the output."""
        return config.split_k

    def column_order(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> ColumnOrder | None:
        """The order in which partials, or a single one, have the columns; None: that of n."""
        return None

    def k_order(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> Order | None:
        """An order of W's K in which the kernel is faster than in its own; x is put in that order
        where it is written for the kernel in any case."""
        return None

    def scratch(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> int:
        """Of how many fp32 the kernel's last input is, uninitialized memory for its own use."""
        return 0

    @property
    def template_name(self) -> str:
        return f"inductor_quant_{self.name}"

    def source(self) -> str:
        """The template's text, with each ``include <path>`` replaced by ``<path>.jinja``."""
        folder = resources.files("inductor_quant.kernels")
        return _INCLUDE.sub(
            lambda found: (folder / f"{found[1]}.jinja").read_text(encoding="utf-8").strip(),
            (folder / f"{self.template}.py.jinja").read_text(encoding="utf-8"),
        )
