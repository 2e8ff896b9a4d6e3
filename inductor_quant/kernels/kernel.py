"""The record that describes one kernel to the lowering."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

from inductor_quant.decisions import Rejection
from inductor_quant.kernels.config import Device, GemmConfig, Problem
from inductor_quant.spec import QuantGemmSpec

# Inductor's Jinja has no loader.
_INCLUDE = re.compile(r"\{#- include (\w+) -#\}")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Triton template.

    name       its Inductor name is ``inductor_quant_<name>``
    family     the canonical op that it computes
    grid       (m, n, meta, *, cdiv, min) -> (x, y, z), on ints and on sympy expressions alike;
               (split_k, m, n, ...) for a configuration that splits K
    supports   (spec, problem, device) -> None, or why the kernel does not apply
    constants  (spec, problem, config, device) -> the template's constants beside the tile sizes
    configs    (spec, problem, device) -> legal configurations, best guess first
    legal      (spec, problem, config, device) -> None, or why the configuration cannot run
    template   file ``templates/<template>.py.jinja``, where several kernels share one; "": ``name``
    is_gluon   it is written in Gluon, which not every Triton has
    is_grouped
               its template takes a ``GROUP``: GEMMs of one activation in one launch
    quantizes  it quantizes its activation, and takes no other

    With ``split_k`` above 1 the template's output is the sums of the parts, fp32 [split_k, M, N];
    to add them and to do what follows (scales, bias) is the lowering's part.
    """

    name: str
    family: str
    grid: Callable[..., tuple[Any, Any, Any]]
    supports: Callable[[QuantGemmSpec, Problem, Device], Rejection | None]
    constants: Callable[[QuantGemmSpec, Problem, GemmConfig, Device], dict[str, Any]]
    configs: Callable[[QuantGemmSpec, Problem, Device], list[GemmConfig]]
    legal: Callable[[QuantGemmSpec, Problem, GemmConfig, Device], Rejection | None]
    template: str = ""
    is_gluon: bool = False
    is_grouped: bool = False
    quantizes: bool = False

    @property
    def template_name(self) -> str:
        return f"inductor_quant_{self.name}"

    def source(self) -> str:
        """The template's text, with that of ``templates/<name>.jinja`` for ``include <name>``."""
        folder = resources.files("inductor_quant.kernels") / "templates"
        name = f"{self.template or self.name}.py.jinja"
        return _INCLUDE.sub(
            lambda found: (folder / f"{found[1]}.jinja").read_text(encoding="utf-8").strip(),
            (folder / name).read_text(encoding="utf-8"),
        )
