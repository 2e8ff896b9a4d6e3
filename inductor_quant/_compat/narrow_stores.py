"""GEMMs that end with what narrows their result, in place of a store in fp32.

torch 2.11 leaves out the rounding of a layer's bf16 result before a GELU or a SiLU, which computes
in fp32. A row quantization behind it then fuses with the activation function, the GEMM stores fp32,
twice the bytes, and a persistent kernel has room for one CTA an SM instead of two.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from inductor_quant._compat.symbols import has, symbol

_SCORE = "torch._inductor.choices:InductorChoices.score_fusion"
_FIRST = 3  # before any other fusion: ``FusionScore.template_score`` is 0 to 2


def end_gemm_with(x: Any) -> None:
    """If ``x``, of 16 bits, is computed element by element from the fp32 result of a template, make
    that the end of the template, where Inductor can fuse both. In compilations of this thread."""
    virtualized = symbol("torch._inductor.virtualized:V")
    box = x
    while isinstance(box, symbol("torch._inductor.ir:MutableBox")) or _is_view(box):
        if isinstance(box, symbol("torch._inductor.ir:StorageBox")):
            break
        box = box.data
    if not has(_SCORE) or not isinstance(box, symbol("torch._inductor.ir:StorageBox")):
        return
    if not isinstance(box.data, symbol("torch._inductor.ir:Pointwise")):
        return
    if box.data.get_dtype().itemsize != 2:
        return
    reads = [virtualized.graph.try_get_buffer(name) for name in box.data.get_read_names()]
    template = symbol("torch._inductor.ir:TemplateBuffer")
    wide = [r for r in reads if isinstance(r, template) and r.get_dtype() == torch.float32]
    if not wide or wide[0].get_numel() != box.data.get_numel():
        return
    box.realize()
    _fused_first().add(box.get_name())


def _is_view(box: Any) -> bool:
    return isinstance(box, symbol("torch._inductor.ir:BaseView"))


def _fused_first() -> set[str]:
    """The names of the buffers that are fused into their template before other fusions."""
    virtualized = symbol("torch._inductor.virtualized:V")
    before = virtualized.choices
    if hasattr(before, "ends"):
        ends: set[str] = before.ends
        return ends
    names: set[str] = set()

    class Choices(type(before)):  # type: ignore[misc]
        ends = names

        @staticmethod
        def score_fusion(scheduler: Any, first: Any, second: Any) -> Any:
            score = before.score_fusion(scheduler, first, second)
            is_end = first.is_template() and not names.isdisjoint(second.get_buffer_names())
            return dataclasses.replace(score, template_score=_FIRST) if is_end else score

    after = copy.copy(before)
    after.__class__ = Choices
    virtualized.set_choices_handler(after)
    return names
