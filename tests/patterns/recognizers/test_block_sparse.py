"""A weight in blocks becomes one ``block_sparse``, however it is put together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_quant.options import Options
from inductor_quant.report.events import collect
from inductor_quant.spec.exactness import Exactness
from tests.support.gemms.weight_only import assert_close
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.blocks import (
    COLUMNS,
    ROWS,
    SIZE,
    Bias,
    Columns,
    Gathered,
    IndexCopy,
    K,
    Kron,
    Masked,
    N,
    Repeated,
    Scatter,
    Searched,
    SetItem,
    Shuffled,
    Sparse,
    Transposed,
    Where,
)

OP = torch.ops.inductor_quant.block_sparse.default
f16 = torch.float16

SPELLINGS = [
    *(Sparse, SetItem, Bias, Searched, Repeated, IndexCopy, Scatter, Gathered, Shuffled),
    *(Transposed, Masked, Kron, Where, Columns),
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
    kept = {str(n.target).partition(".")[2] for n in rewrite.after.graph.nodes}
    assert not kept & {"index_put.default", "mm.default", "scatter.src", "mul.Tensor"}


@pytest.mark.parametrize("block", [(64, 32), (32, 128), (128, 64)])
@pytest.mark.parametrize("spelling", [Sparse, Masked])
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
]


@pytest.mark.parametrize(("module", "code"), MISSES)
def test_a_near_miss_stays_as_it_was(module: Callable[[], Sparse], code: str) -> None:
    made = module()
    x = torch.randn(5, made.k).to(made.values.dtype)
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
