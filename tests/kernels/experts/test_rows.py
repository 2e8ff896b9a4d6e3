"""Which rows each CTA of sorted rows has: ``rows.jinja``, run with tensors for Triton's."""

from __future__ import annotations

import textwrap
import types
from importlib import resources

import jinja2
import pytest
import torch

from tests.support.gemms import experts, scaled_experts
from tests.support.gemms.generated import generate

BLOCK_M = 4
COUNTS = {
    "any": (9, 0, 4, 1, 0, 13),
    "one": (0, 0, 23, 0),
    "few": (1, 0, 0, 0, 0, 1),  # fewer rows than numbers: each tile is its first row
    "none": (0, 0, 0),
}


class Pointer:
    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, at):
        return Pointer(self.values, self.at + at)


def load(pointer, mask=True, other=0):
    at = torch.as_tensor(pointer.at)
    mask = torch.as_tensor(mask).expand(at.shape)
    values = pointer.values[torch.where(mask, at, 0)]
    return torch.where(mask, values, other)


def of_two(name):
    return lambda a, b: getattr(torch, name)(torch.as_tensor(a), torch.as_tensor(b))


LANGUAGE = types.SimpleNamespace(
    arange=torch.arange,
    int32=torch.int32,
    load=load,
    where=torch.where,
    max=lambda values, dim: values.max(dim).values,
    maximum=of_two("maximum"),
    minimum=of_two("minimum"),
)


def tiles(counts: tuple[int, ...], left: int, *, apart: bool) -> list[tuple[int, int, int]]:
    """(expert, first row, end of its rows) of each CTA that has rows, in the order of CTAs."""
    file = resources.files("inductor_quant.kernels.experts") / "rows.jinja"
    call = '{{ chosen_rows("tl", "tl.arange(0, 8)", stride, "pid", apart=APART) }}'
    rendered = jinja2.Template(file.read_text() + call).render(
        EXPERTS=len(counts),
        IS_SORTED=True,
        APART=apart,
        HAS_ROWS=False,
        inputs=[],
        stride=lambda *args: 1,
    )
    body = textwrap.indent(rendered, "    ")
    code = f"def cta(pid, M, BLOCK_M, ROUTE):\n{body}\n    return expert, first_row, end_row"
    names = {"tl": LANGUAGE}
    exec(code, names)
    m, route = sum(counts) + left, Pointer(torch.tensor(counts).cumsum(0).to(torch.int32))
    count = min(m, len(counts) + 1 + m // BLOCK_M)
    found = (
        names["cta"](torch.tensor(pid), torch.tensor(m), BLOCK_M, route) for pid in range(count)
    )
    return [tuple(map(int, each)) for each in found if each is not None]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("left", [0, 1, 9])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_each_row_is_in_one_tile_with_rows_of_one_expert(counts, left, apart):
    found = sorted(tiles(counts, left, apart=apart), key=lambda tile: tile[1])
    wanted, start = [], 0
    for expert, rows in enumerate((*counts, left)):
        end = start + rows
        known = min(expert, len(counts) - 1)  # whose weight rows without one read, and do not use
        wanted += [(known, first, end) for first in range(start, end, BLOCK_M)]
        start = end
    assert found == wanted


def test_tiles_of_an_expert_are_neighbours_or_apart():
    """Neighbours find its weight in the L2 cache; apart, CTAs without a tile come last."""
    experts = [expert for expert, *_ in tiles((9, 8, 4, 1), 0, apart=False)]
    assert experts == [0, 0, 0, 1, 1, 2, 3]
    experts = [expert for expert, *_ in tiles((9, 8, 4, 1), 0, apart=True)]
    assert experts == [0, 1, 2, 3, 0, 0, 1]


@pytest.mark.parametrize("module", [experts, scaled_experts])
def test_few_rows_are_apart_where_a_cta_takes_least(module):
    """``experts_direct``; the kernels of 8-bit rows, whose experts have several tiles, are not."""
    packed = ("nibble_pairs",) if module is experts else ()
    case = module.Case(*packed, (5,) * 8, 512, 512)
    generated = generate(module.gemm(case), lambda device: module.make_inputs(case, device))
    [source] = generated.kernels.values()
    assert ("further = pid_m" in source) == (module is experts)
