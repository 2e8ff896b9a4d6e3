"""Tables that place blocks: which are read by value, and that a change is detected."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_quant.tables import constant_buffers
from tests.support.graphs.post_grad import calls
from tests.support.producers.blocks import Channels, K, Masked, Searched, Sparse, Summed

pytestmark = pytest.mark.compiles

OP = torch.ops.inductor_quant.block_sparse.default
f16 = torch.float16


def has_op(rewrites):
    return [len(calls(rewrite.after, OP)) for rewrite in rewrites]


def is_right(module, f, x):
    exact = x.double() @ module.dense().t()
    with torch.no_grad():
        return (f(x).double() - exact).norm() <= 2e-3 * exact.norm()


def shift(module):
    """Every block one column further."""
    module.col.copy_((module.col + 1) % 4)


def drop(module):
    """One block more is masked."""
    module.mask.view(-1)[module.mask.flatten().nonzero()[0]] = False


@pytest.mark.parametrize(("kind", "change"), [(Searched, shift), (Masked, drop), (Channels, shift)])
def test_a_written_table_is_seen_by_the_next_call(rewrites, kind, change):
    module, x = kind(), torch.randn(5, K).to(f16)
    run = torch.compile(module, backend="inductor_quant")
    assert is_right(module, run, x)
    assert has_op(rewrites) == [1]
    change(module)
    assert is_right(module, run, x)
    assert has_op(rewrites) == [1, 0]  # compiled again, for any content
    assert is_right(module, run, x)
    assert len(rewrites) == 2


def test_a_second_module_with_other_tables_is_right(rewrites):
    modules, x = (Sparse(), Sparse()), torch.randn(5, K).to(f16)
    shift(modules[1])

    @torch.compile(backend="inductor_quant")
    def run(module, x):
        return module(x)

    for module in modules:
        assert is_right(module, lambda x, m=module: run(m, x), x)


class Returned(Sparse):
    """The table is more than a position."""

    def forward(self, x):
        return super().forward(x) + self.col.sum()


class Embedded(Sparse):
    """Rows of x are gathered for a plain linear layer: no blocks."""

    def forward(self, x):
        return F.gelu(F.linear(x[self.flat[:2]], self.whole))


class Ordered(Summed):
    """The columns of x are in another order for a plain linear layer behind the blocks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("flat_order", torch.randperm(K))

    def forward(self, x):
        return super().forward(x), F.linear(x[None].index_select(-1, self.flat_order), self.whole)


class Given(nn.Module):
    """The table is an argument."""

    def __init__(self):
        super().__init__()
        self.layer = Sparse()

    def forward(self, x, col):
        layer = self.layer
        w = layer.zeros(x).index_put((layer.row, col), layer.values)
        return F.linear(x, layer.joined(w))


@pytest.mark.parametrize(
    "module", [Returned(), Embedded(), Ordered(), Given()], ids=lambda m: type(m).__name__
)
def test_other_tables_stay_data(module, monkeypatch):
    found = []

    def backend(gm, inputs):
        found.extend(constant_buffers.find(gm, inputs))
        return gm

    args = (torch.randn(5, K).to(f16), Sparse().col)[: 2 if isinstance(module, Given) else 1]
    torch._dynamo.reset()
    torch.compile(module, backend=backend)(*args)
    names = [table.node.name for table in found]
    others = ("flat",) if isinstance(module, Ordered) else ("col", "flat")
    assert not any(other in name for name in names for other in others)
