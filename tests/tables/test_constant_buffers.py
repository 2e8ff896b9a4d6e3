"""Constant buffers: which are read by value.

The rewritten graph runs eagerly here, so a result shows what was compiled, on any machine.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inductor_quant.errors import OptionError
from inductor_quant.options import Options
from inductor_quant.tables import constant_buffers
from tests.support.tables import compiled, formats, gptq, has_data, is_right, x_of

pytestmark = pytest.mark.compiles


@pytest.mark.parametrize(
    "name", ["gptq_gm_4b_g64_base", "gptq_gm_8b_g64_base", "gptq_4b_attribute", "gptq_4b_autogptq"]
)
def test_gptq_is_a_format_without_data(rewrites, name):
    module = gptq(name)
    assert is_right(module, compiled(module), x_of())
    [format] = formats(rewrites)
    assert not has_data(format)
    [scale] = format.scales
    assert format.block(scale.operand) == (64, 1)


def test_act_order_reads_the_order_of_rows_as_data_and_the_shifts_by_value(rewrites):
    module = gptq("gptq_4b_act_order")
    assert is_right(module, compiled(module), x_of())
    [format] = formats(rewrites)
    assert has_data(format)
    assert not format.code.offset.is_data
    assert format.pack_order == tuple(range(0, 32, 4))


def test_the_option_leaves_all_tables_to_the_kernel(rewrites):
    module = gptq()
    assert is_right(module, compiled(module, read_tables=False), x_of())
    [format] = formats(rewrites)
    assert has_data(format)
    assert format.code.offset.is_data
    with pytest.raises(OptionError, match="read_tables"):
        Options(read_tables="no")


class Variant(nn.Module):
    """A small module with one table, used in the way that ``use`` says."""

    def __init__(self, use):
        super().__init__()
        self.use = use
        self.register_buffer("weight", torch.randint(-9, 9, (8, 8), dtype=torch.int8))
        self.register_buffer("table", torch.arange(8))
        self.register_buffer("scale", torch.rand(8, 8))

    def forward(self, x):
        return self.use(self, x)


def found_tables(fn, *args):
    found = []

    def backend(gm, inputs):
        found.extend(str(table.node) for table in constant_buffers.find(gm, inputs))
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=False)(*args)
    return found


GOOD = {
    "index": lambda m, x: x @ (m.weight * m.scale[m.table]),
    "index of columns": lambda m, x: x @ (m.weight * m.scale[:, m.table.long()]),
    "index_select": lambda m, x: x @ (m.weight * m.scale.index_select(0, m.table)),
    "embedding": lambda m, x: x @ nn.functional.embedding(m.table, m.scale),
    "shift": lambda m, x: x @ (m.weight >> m.table).float(),
    "shift by a part": lambda m, x: nn.functional.linear(x, (m.weight >> m.table[None, :]).float()),
    "of a table": lambda m, x: x @ m.scale[m.table[m.table]],
    "computed": lambda m, x: x @ m.scale[(m.table * 2 + 1) % 8],
}
BAD = {
    "indexes the input": lambda m, x: x[m.table] @ m.scale,
    "indexes the result": lambda m, x: (x @ m.scale)[m.table],
    "is added to the input": lambda m, x: (x + m.table) @ m.scale[m.table],
    "is arithmetic": lambda m, x: x @ (m.scale * m.table),
    "is shifted": lambda m, x: x @ m.scale[m.table >> (m.table * 0)],
    "no product": lambda m, x: x + m.scale[m.table],
    "also no product": lambda m, x: (x @ m.scale[m.table]) + m.scale[m.table],
    "an index of two dimensions": lambda m, x: x @ m.scale[0][m.weight.long() % 8].float(),
    "is written to": lambda m, x: x @ m.scale[m.table.remainder_(8)],
    "is written to later": lambda m, x: (x @ m.scale[m.table], m.table.add_(0))[0],
    "is returned": lambda m, x: (x @ m.scale[m.table], m.table + 1),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_table_that_says_where_a_weight_is_read_is_found(name):
    assert found_tables(Variant(GOOD[name]), torch.randn(8, 8)) == ["l_self_buffers_table_"]


@pytest.mark.parametrize("name", BAD)
def test_a_table_that_does_anything_else_is_not(name):
    assert found_tables(Variant(BAD[name]), torch.randn(8, 8)) == []


def without_table(change):
    module = Variant(GOOD["index"])
    module.table = change(module.table)
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table[torch.tensor([3, 1, 0, 2, 7, 5, 4, 6])].repeat(32)[torch.randperm(256)],
        lambda table: table.reshape(4, 2).repeat(1, 4),
        lambda table: table.repeat(1 << 14 | 1),
        lambda table: table.double().bool(),
    ],
    ids=["without form", "a matrix", "long", "bool"],
)
def test_a_tensor_that_is_no_such_table_is_not_found(change):
    module = without_table(change)
    rows = module.scale[module.table].shape[0]
    module.use = lambda m, x: x @ m.scale[m.table].reshape(rows, -1)
    assert found_tables(module, torch.randn(8, rows)) == []


def test_an_argument_of_the_call_is_not_read():
    module = Variant(GOOD["index"])

    def fn(x, weight, scale, table):
        return x @ (weight * scale[table])

    assert found_tables(fn, torch.randn(8, 8), module.weight, module.scale, module.table) == []


def test_a_tensor_of_inference_mode_is_not_read():
    with torch.inference_mode():
        module = Variant(GOOD["index"])
        assert found_tables(module, torch.randn(8, 8)) == []


def test_a_table_in_the_memory_of_another_tensor_is_not_read():
    module = Variant(lambda m, x: (x @ m.scale[m.table], m.other.add_(0))[0])
    module.other = module.table[2:]
    assert found_tables(module, torch.randn(8, 8)) == []


def test_nothing_else_of_a_graph_becomes_a_constant(rewrites):
    """Embeddings and masks, without a quantized weight: unchanged."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(32, 8)
            self.out = nn.Linear(8, 8)
            self.register_buffer("positions", torch.arange(16))

        def forward(self, tokens):
            return self.out(self.embed(tokens) + self.embed(self.positions[:4]))

    model = Model().requires_grad_(False)
    tokens = torch.arange(4)
    assert torch.allclose(compiled(model)(tokens), model(tokens), atol=1e-6)
    [rewrite] = rewrites
    assert not [n for n in rewrite.before.graph.nodes if n.op == "get_attr"]
