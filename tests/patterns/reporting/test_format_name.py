"""Names of packed formats: what a block holds tells two of the same size apart."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from inductor_quant.patterns.reporting.format_name import _ggml
from inductor_quant.spec.weight_format import DequantOp, Field, WeightFormat
from tests.support.gemms.formats import form

BLOCKS = {
    "q4_0": (32, 18, 4, ""),
    "iq4_nl": (32, 18, 4, "table"),
    "q5_0": (32, 22, 5, ""),
    "q5_1": (32, 24, 5, "least"),
    "q3_k": (256, 110, 3, ""),
    "": (32, 18, 5, ""),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_ggml_has_its_name(name: str) -> None:
    size, block, bits, kind = BLOCKS[name]
    n, k = 4, 2 * size
    stored, table = fx.Graph().placeholder("w"), fx.Graph().placeholder("t")
    stored.meta["val"] = torch.empty(n, 2 * block, dtype=torch.uint8)
    table.meta["val"] = torch.empty(16)
    place = (form(("n0", 1)), form(("k0", 1)))
    code = Field(0, place, form(), bits)
    element = Field(1, (form(data=code),)) if kind == "table" else code
    steps = (DequantOp("sub", Field(0, place)),) if kind == "least" else ()
    assert _ggml(WeightFormat((k,), (n,), element, steps), [stored, table]) == name


@pytest.mark.parametrize(("source", "name"), [(0, "q4_0"), (1, "")])
def test_scales_are_in_the_blocks(source: int, name: str) -> None:
    """Rows of nibbles that are padded may be as long as rows of blocks."""
    n, k = 4, 64
    stored, scales = fx.Graph().placeholder("w"), fx.Graph().placeholder("s")
    stored.meta["val"], scales.meta["val"] = torch.empty(n, 36, dtype=torch.uint8), torch.empty(n)
    code, scale = Field(0, (form(("n0", 1)), form(("k0", 1))), form(), 4), Field(source, ())
    found = WeightFormat((k,), (n,), code, (DequantOp("mul", scale),))
    assert _ggml(found, [stored, scales]) == name
