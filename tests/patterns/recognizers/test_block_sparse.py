"""A weight in blocks becomes one ``block_sparse``, however it is put together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_quant.ops import block_sparse
from inductor_quant.options import Options
from inductor_quant.report.events import collect
from inductor_quant.spec.exactness import Exactness
from tests.support.gemms.weight_only import assert_close
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.blocks import (
    COLUMNS,
    ROWS,
    SIZE,
    AlongK,
    Bias,
    Channels,
    Columns,
    Einsum,
    Gathered,
    IndexCopy,
    IntMM,
    K,
    Kron,
    Masked,
    MaskedInt8,
    N,
    OfGrid,
    OneScale,
    Quantized,
    Repeated,
    RowsOfBlocks,
    Scatter,
    Searched,
    SetItem,
    Shuffled,
    Sparse,
    Summed,
    SummedInt8,
    Transposed,
    Where,
)

OP = torch.ops.inductor_quant.block_sparse.default
f16 = torch.float16

slow = pytest.mark.slow
SPELLINGS = [
    *(Bias, Searched, Scatter, Gathered, Shuffled, Masked),
    *(
        pytest.param(spelling, marks=slow)
        for spelling in (Sparse, SetItem, Repeated, IndexCopy, Transposed, Kron, Where, Columns)
    ),
]


def rewritten(module: nn.Module, x: torch.Tensor, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        result, [rewrite] = capture(module, [x], read_tables=True, **options)
    return result, rewrite


def is_right(module: Sparse, x: torch.Tensor, result: torch.Tensor) -> None:
    want = x.double() @ module.dense().t()
    assert_close(result, want + module.bias.double() if isinstance(module, Bias) else want)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_weight_in_blocks_is_one_product(spelling: Callable[[], Sparse]) -> None:
    module = spelling()
    x = torch.randn(5, K).to(f16)
    result, rewrite = rewritten(module, x)
    [match] = rewrite.report.matches
    assert (match.family, match.m, match.n, match.k) == ("block_sparse", 5, N, K)
    assert match.spec.b.blocks is not None
    assert match.spec.b.blocks.count == len(module.row)
    assert match.exactness is Exactness.SAME_WEIGHT_ROUNDING
    assert match.format == f"bsr 32x32, {1 - len(module.row) / 24:.0%} zero"
    is_right(module, x, result)
    [node] = calls(rewrite.after, OP)
    if isinstance(module, Masked):
        assert node.args[1].meta["val"].dim() == 4  # in place: no copy of W
    assert (node.args[4] is not None) == isinstance(module, Shuffled)
    assert node.kwargs["longest"] == COLUMNS
    kept = {str(n.target).partition(".")[2] for n in rewrite.after.graph.nodes}
    assert not kept & {"index_put.default", "mm.default", "scatter.src", "mul.Tensor"}


@pytest.mark.parametrize("spelling", [Sparse, Scatter, IndexCopy, Gathered])
def test_a_weight_of_one_block(spelling) -> None:
    """Its tables have one element, which Inductor makes a constant."""
    module = spelling()
    for name in ("values", "row", "col", "flat"):
        setattr(module, name, getattr(module, name)[:1])
    module.table = torch.where(module.table == 0, 0, 1)
    x = torch.randn(5, K).to(f16)
    result, rewrite = rewritten(module, x)
    [match] = rewrite.report.matches
    assert match.spec.b.blocks.count == 1
    is_right(module, x, result)


@pytest.mark.parametrize(
    ("spelling", "block"),
    [
        (Sparse, (32, 128)),
        (Masked, (64, 32)),
        pytest.param(Sparse, (128, 64), marks=slow),
        pytest.param(Masked, (128, 128), marks=slow),
    ],
)
def test_blocks_of_any_shape(spelling, block) -> None:
    module = spelling(torch.bfloat16, block)
    x = torch.randn(3, module.k).to(torch.bfloat16)
    result, rewrite = rewritten(module, x)
    [match] = rewrite.report.matches
    assert (match.spec.b.blocks.n, match.spec.b.blocks.k) == block
    is_right(module, x, result)


def test_m_may_be_symbolic() -> None:
    module, x = Bias(), torch.randn(2, 7, K).to(f16)
    result, rewrite = rewritten(module, x, dynamic=True)
    [match] = rewrite.report.matches
    assert isinstance(match.m, str)
    is_right(module, x, result)


def test_without_blocks_the_result_is_zero() -> None:
    module = Masked()
    module.mask.fill_(False)
    x = torch.randn(5, K).to(f16)
    result, rewrite = rewritten(module, x)
    [match] = rewrite.report.matches
    assert match.spec.b.blocks.count == 0
    assert result.shape == (5, N)
    assert not result.any()


def test_where_the_dense_product_is_faster_the_graph_stays() -> None:
    module = Masked()
    module.mask.fill_(True)
    for rows, zeros, code in ((5, 0, "many_rows"), (5, 12, None), (300, 12, "many_rows")):
        module.mask.view(-1)[:zeros] = False
        _, rewrite = rewritten(module, torch.randn(rows, K).to(f16))
        assert rewrite.codes == ([code] if code else [])
        assert rewrite.is_untouched == bool(code)


SAME, OTHER = Exactness.SAME_WEIGHT_ROUNDING, Exactness.REASSOCIATED


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "scale", "exactness"),
    [
        (Quantized, (32, 32), SAME),
        (RowsOfBlocks, (32, 1), SAME),
        (Channels, (-1, 1), OTHER),
        (OneScale, (-1, 1), OTHER),
        (MaskedInt8, (-1, 1), OTHER),
        (SummedInt8, (32, 32), Exactness.FEWER_ROUNDINGS),
    ],
)
def test_blocks_of_int8_and_fp8_with_their_scales(kind, scale, exactness) -> None:
    module, x = kind(), torch.randn(5, K).to(f16)
    result, rewrite = rewritten(module, x)
    [match] = rewrite.report.matches
    assert (match.family, match.spec.b.dtype) == ("block_sparse", module.stored)
    assert match.spec.b.scale.block == scale
    assert match.exactness is exactness
    want = x.double() @ module.dense().t()
    assert_close(result, want)
    kept = {str(n.target).partition(".")[2] for n in rewrite.after.graph.nodes}
    assert not kept & {"index_put.default", "mm.default", "bmm.default", "mul.Tensor"}


def test_a_product_of_integers_with_blocks() -> None:
    module, x = IntMM(), torch.randn(5, K).to(f16)
    result, rewrite = rewritten(module, x)
    [match] = rewrite.report.matches
    assert (match.family, match.spec.a.dtype) == ("block_sparse", torch.int8)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(result, module(x))


class Alike(Sparse):
    """Neighbouring rows of blocks have the same columns, but for one block."""

    def __init__(self, *args):
        super().__init__(*args)
        row, col = self.row.tolist(), self.col.tolist()
        pairs = sorted({(r // 2 * 2 + i, c) for r, c in zip(row, col, strict=True) for i in (0, 1)})
        self.row, self.col = torch.tensor(pairs[:-1]).t()
        draw = torch.Generator().manual_seed(3)
        self.values = torch.randn(len(self.row), *self.block, generator=draw).to(f16)
        order = torch.randperm(len(self.row), generator=draw)
        self.values, self.row, self.col = self.values[order], self.row[order], self.col[order]


@pytest.mark.parametrize(("rows", "together"), [(300, 2), (5, 1)])
def test_rows_of_blocks_with_the_same_columns_share_x(monkeypatch, rows, together) -> None:
    monkeypatch.setattr(block_sparse, "prefers_dense", lambda *_: False)
    monkeypatch.setattr(block_sparse, "MIN_RESULT", 300 * N)
    module, x = Alike(), torch.randn(rows, K).to(f16)
    result, rewrite = rewritten(module, x)
    [match] = rewrite.report.matches
    assert (match.spec.b.blocks.count, match.spec.b.blocks.rows) == (len(module.row), together)
    is_right(module, x, result)


# ------------------------------------------------------------------------------------------
# near misses


class Twice(Sparse):
    """Two blocks at one place: which one stays is not defined."""

    def __init__(self):
        super().__init__()
        self.row[1], self.col[1] = self.row[0], self.col[0]


class Halves(Masked):
    """A mask times a half."""

    def spread(self, x):
        return super().spread(x).to(x.dtype) * 0.5


class Ragged(Masked):
    """A mask of elements."""

    def __init__(self):
        super().__init__()
        self.mask = torch.rand(N, K) < 0.5

    def spread(self, x):
        return self.mask


class OnTop(Sparse):
    """Blocks over a dense weight."""

    def zeros(self, x):
        return self.whole.view(ROWS, SIZE, COLUMNS, SIZE).permute(0, 2, 1, 3).clone()


class Sums(Sparse):
    """The base is 1."""

    def zeros(self, x):
        return x.new_ones(*self.grid, *self.block)


class Small(Sparse):
    def __init__(self):
        super().__init__(f16, (8, 8))


class Wide(Sparse):
    def __init__(self):
        super().__init__(torch.float32)


class Swapped(Sparse):
    """Blocks that end up as columns of the weight: a reshape without the permute."""

    def joined(self, w):
        return w.reshape(self.n, self.k)


MISSES = [
    (Twice, "block_places"),
    (Ragged, "block_places"),
    (OnTop, "block_places"),
    (Sums, "block_places"),
    (Small, "block_places"),
    (Swapped, "block_places"),
    (Wide, "activation"),
    (OfGrid, "block_places"),
    (AlongK, "block_places"),
]


@pytest.mark.parametrize(("module", "code"), MISSES)
def test_a_near_miss_stays_as_it_was(module: Callable[[], Sparse], code: str) -> None:
    made = module()
    dtype = torch.float32 if isinstance(made, Wide) else f16
    x = torch.randn(5, made.k).to(dtype)
    result, rewrite = rewritten(made, x)
    assert rewrite.is_untouched
    assert rewrite.codes == [code]
    with torch.no_grad():
        assert torch.equal(result, made(x))


def test_a_mask_of_other_numbers_is_not_a_mask() -> None:
    x = torch.randn(5, K).to(f16)
    _, rewrite = rewritten(Halves(), x)
    assert rewrite.is_untouched


def test_tables_without_values_are_a_rejection_with_the_option_to_read_them() -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        _, [rewrite] = capture(Sparse(), [torch.randn(5, K).to(f16)])
    assert rewrite.is_untouched
    [rejection] = rewrite.report.rejections
    assert rejection.code.value == "block_places"
    assert "read_tables" in rejection.detail


def test_a_plain_product_is_no_candidate() -> None:
    module = nn.Linear(K, N, dtype=f16)
    _, rewrite = rewritten(module, torch.randn(5, K).to(f16))
    assert rewrite.codes == []
    assert rewrite.is_untouched


def test_strict_numerics_decline_it() -> None:
    options = Options(on_error="raise", numerics="strict")
    with collect(), torch._inductor.config.patch(emulate_precision_casts=True):
        _, rewrite = rewritten(Sparse(), torch.randn(5, K).to(f16), options=options)
    assert rewrite.codes == ["numerics"]


@pytest.mark.parametrize("kind", [Masked, RowsOfBlocks, SummedInt8])
def test_verify_compares_it_with_its_graph(kind) -> None:
    with collect() as found:
        rewritten(kind(), torch.randn(5, K).to(f16), options=Options(on_error="raise", verify=True))
    [verification] = found.verifications
    assert verification.is_good


def test_tables_elsewhere_in_a_weight_place_no_blocks() -> None:
    """A scale that is gathered for each k, as GPTQ's: the product is no candidate."""

    class Gathers(Sparse):
        def forward(self, x):
            return F.linear(x, self.whole * self.bias[self.row[:1]])

    _, rewrite = rewritten(Gathers(), torch.randn(5, K).to(f16))
    assert rewrite.codes == []
    assert rewrite.is_untouched


def test_the_op_of_torchao_by_its_schema() -> None:
    blocksparse = pytest.importorskip("torchao.sparsity.blocksparse")
    module = Sparse(torch.bfloat16)
    layer = nn.Linear(K, N, dtype=torch.bfloat16)
    weight = blocksparse.BlockSparseTensor.from_dense(module.dense().to(torch.bfloat16), SIZE)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(16, K).to(torch.bfloat16)
    result, rewrite = rewritten(layer, x)
    [match] = rewrite.report.matches
    assert (match.family, match.m, match.n, match.k) == ("block_sparse", 16, N, K)
    assert match.spec.b.blocks.count == len(module.row)
    want = (x.double() @ module.dense().t()).to(torch.bfloat16) + layer.bias
    assert_close(result, want.double())


class ToDense(IntMM):
    """torchao's op for the dense weight."""

    def forward(self, x):
        given = self.crow, self.col, self.values.to(f16), self.n, self.k
        return F.linear(x, torch.ops.blocksparse.bsr_to_dense(*given), self.bias)


class IntAddmm(IntMM):
    def forward(self, x):
        left, right = self.scale.bfloat16(), torch.full((len(x),), 0.5, dtype=torch.bfloat16)
        codes = (10 * x).round().clamp(-128, 127).to(torch.int8)
        given = self.crow, self.col, self.values, codes.t(), left, right
        return torch.ops.blocksparse.int_addmm(*given)


@pytest.mark.parametrize("kind", [ToDense, IntAddmm])
def test_other_ops_of_torchao(kind) -> None:
    pytest.importorskip("torchao.sparsity.blocksparse")
    module, x = kind(), torch.randn(20, K).to(f16)
    result, rewrite = rewritten(module, x)
    [match] = rewrite.report.matches
    assert (match.family, match.m, match.n, match.k) == ("block_sparse", 20, N, K)
    w = torch.zeros(*module.grid, *module.block, dtype=torch.float64)
    w[module.row, module.col] = module.values.double()
    if kind is ToDense:
        assert_close(result, x.double() @ module.joined(w).t() + module.bias.double())
    else:
        codes = (10 * x).round().clamp(-128, 127).double()
        scale = module.scale.bfloat16().double() * 0.5
        assert_close(result, codes @ module.joined(w).t() * scale)


@pytest.mark.parametrize(
    ("spelling", "lead"), [(Summed, (5,)), (Einsum, (2, 3)), (Summed, (1,)), (Summed, (SIZE,))]
)
def test_gathered_products_that_are_added_up_are_one(spelling, lead) -> None:
    module = spelling()
    x = torch.randn(*lead, K).to(f16)
    result, rewrite = rewritten(module, x)
    [match] = rewrite.report.matches
    assert (match.m, match.n, match.k) == (torch.Size(lead).numel(), N, K)
    assert match.exactness is Exactness.FEWER_ROUNDINGS
    assert result.shape == (*lead, N)
    is_right(module, x.flatten(0, -2), result.flatten(0, -2))
    kept = {str(n.target).partition(".")[2] for n in rewrite.after.graph.nodes}
    assert not kept & {"index_put.default", "bmm.default", "index.Tensor"}


def test_a_place_that_comes_twice_counts_twice() -> None:
    module = Summed()
    module.row[1], module.col[1] = module.row[0], module.col[0]
    x = torch.randn(5, K).to(f16)
    result, rewrite = rewritten(module, x)
    assert len(rewrite.report.matches) == 1
    w = torch.zeros(ROWS, COLUMNS, SIZE, SIZE, dtype=torch.float64)
    w.index_put_((module.row, module.col), module.values.double(), accumulate=True)
    assert_close(result, x.double() @ module.joined(w).t())


class Ones(Summed):
    """Added to ones."""

    def base(self, x):
        return super().base(x) + 1


class Crossed(Summed):
    """Each block of x has every fourth of its columns."""

    def parts(self, x):
        x = x.reshape(-1, self.block[1], COLUMNS).permute(2, 0, 1)
        return torch.bmm(x[self.col], self.values.transpose(1, 2))


class Mixed(Summed):
    """The result is not put in order."""

    def forward(self, x):
        y = self.base(x).index_add(0, self.row, self.parts(x))
        return y.permute(1, 2, 0).reshape(len(x), self.n)


@pytest.mark.parametrize("module", [Ones, Crossed, Mixed])
def test_another_sum_stays_as_it_was(module) -> None:
    made = module()
    x = torch.randn(5, K).to(f16)
    result, rewrite = rewritten(made, x)
    assert rewrite.is_untouched
    assert rewrite.codes == ["block_places"]
    torch.testing.assert_close(result, made(x), rtol=0.01, atol=0.05)  # its sums have no order
