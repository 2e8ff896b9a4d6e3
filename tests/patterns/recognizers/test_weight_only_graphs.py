"""Graphs around a dequantized weight: which ops multiply, other users, mutations.

Numbers are small integers and powers of two, in fp32: nothing rounds, so the rewritten graph gives
every bit of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_quant.errors import InductorQuantError, RequirementError
from inductor_quant.options import Options
from inductor_quant.spec.decisions import RejectionCode
from tests.support.graphs.handmade import Call, results, rewritten
from tests.support.graphs.post_grad import CAST, EagerBackend, Rewrite, calls, capture

aten = torch.ops.aten
OP = torch.ops.inductor_quant.weight_only.default
bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8
M, K, N = 4, 32, 16
Node = Any

pytestmark = pytest.mark.filterwarnings("ignore")


def ints(*shape: int, dtype: torch.dtype = i8) -> torch.Tensor:
    return torch.randint(-128, 128, shape).to(dtype)


def small(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


def powers(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.exp2(torch.randint(-3, 3, shape).float()).to(dtype)


def dense(call: Call, q: Node, scale: Node) -> Node:
    return call(aten.mul.Tensor, call(CAST, q, f32), scale)


def assert_matches(rewrite: Rewrite, matches: int = 1) -> None:
    """This many matches, and bit-identical results."""
    assert len(rewrite.report.matches) == len(calls(rewrite.after, OP)) == matches
    before, after = results(rewrite)
    if isinstance(before, torch.Tensor):
        before, after = (before,), (after,)  # type: ignore[assignment]
    for want, got in zip(before, after, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert got.stride() == want.stride()


def assert_refused(rewrite: Rewrite, code: RejectionCode) -> None:
    assert rewrite.codes == [code.value]
    assert rewrite.is_untouched


# ------------------------------------------------------------------------------------------
# ops that multiply


def mul_sum(call: Call, x: Node, w: Node) -> Node:
    terms = call(aten.mul.Tensor, call(aten.unsqueeze.default, x, 2), w)
    return call(aten.sum.dim_IntList, terms, [1])


def batch(call: Call, w: Node) -> Node:
    return call(aten.expand.default, call(aten.unsqueeze.default, w, 0), [2, K, N])


Body = Callable[..., Node]
X, X3, Q, S, B = small(M, K), small(2, M, K), ints(K, N), powers(N), small(N)
PRODUCTS: dict[str, tuple[list[torch.Tensor], Body]] = {
    "mm": ([X, Q, S], lambda c, x, q, s: c(aten.mm.default, x, dense(c, q, s))),
    "mm, stored by n": (
        [X, ints(N, K), powers(N, 1)],
        lambda c, x, q, s: c(aten.mm.default, x, c(aten.permute.default, dense(c, q, s), [1, 0])),
    ),
    "mm, transposed in memory": (
        [X.T.contiguous().T, ints(N, K).T, S],
        lambda c, x, q, s: c(aten.mm.default, x, dense(c, q, s)),
    ),
    "mm of one row": ([X[:1], Q, S], lambda c, x, q, s: c(aten.mm.default, x, dense(c, q, s))),
    "mm of no rows": ([X[:0], Q, S], lambda c, x, q, s: c(aten.mm.default, x, dense(c, q, s))),
    "mm to one column": (
        [X, Q[:, :1], S[:1]],
        lambda c, x, q, s: c(aten.mm.default, x, dense(c, q, s)),
    ),
    "addmm": ([X, Q, S, B], lambda c, x, q, s, b: c(aten.addmm.default, b, x, dense(c, q, s))),
    "addmm of a row": (
        [X, Q, S, B[None]],
        lambda c, x, q, s, b: c(aten.addmm.default, b, x, dense(c, q, s)),
    ),
    "bmm of one weight": (
        [X3, Q, S],
        lambda c, x, q, s: c(aten.bmm.default, x, batch(c, dense(c, q, s))),
    ),
    "bmm with a scale computed for a batch": (
        [small(2, M, K, dtype=bf16), ints(K, N) // 32, powers(1, N, dtype=bf16)],
        lambda c, x, q, s: c(
            aten.bmm.default,
            x,
            c(
                aten.mul.Tensor,
                c(CAST, batch(c, q), bf16),
                c(aten.mul.Tensor, c(aten.expand.default, s, [2, 1, N]), 0.5),
            ),
        ),
    ),
    "baddbmm": (
        [X3, Q, S, B[None, None]],
        lambda c, x, q, s, b: c(aten.baddbmm.default, b, x, batch(c, dense(c, q, s))),
    ),
    "linear": (
        [X3, ints(N, K), powers(N, 1), B],
        lambda c, x, q, s, b: c(aten.linear.default, x, dense(c, q, s), b),
    ),
    "linear of a vector": (
        [X[0], ints(N, K), powers(N, 1)],
        lambda c, x, q, s: c(aten.linear.default, x, dense(c, q, s)),
    ),
    "mv": (
        [X[0], ints(N, K), powers(N, 1)],
        lambda c, x, q, s: c(aten.mv.default, dense(c, q, s), x),
    ),
    "mul and sum": ([X[:1], Q, S], lambda c, x, q, s: mul_sum(c, x, dense(c, q, s))),
    "mul and sum of rows": ([X, Q, S], lambda c, x, q, s: mul_sum(c, x, dense(c, q, s))),
    "int8pack": (
        [X, ints(N, K), S],
        lambda c, x, q, s: c(aten._weight_int8pack_mm.default, x, q, s),
    ),
    "mm, then scaled": (
        [X, Q, S],
        lambda c, x, q, s: c(aten.mul.Tensor, c(aten.mm.default, x, c(CAST, q, f32)), s),
    ),
    "square, then scaled by columns": (
        [small(N, K), Q, S],
        lambda c, x, q, s: c(aten.mul.Tensor, c(aten.mm.default, x, c(CAST, q, f32)), s),
    ),
    "square, then scaled by rows": (
        [small(N, K), Q, powers(N, 1)],
        lambda c, x, q, s: c(aten.mul.Tensor, c(aten.mm.default, x, c(CAST, q, f32)), s),
    ),
    "square, then a column added": (
        [small(N, K), Q, small(N, 1)],
        lambda c, x, q, b: c(aten.add.Tensor, c(aten.mm.default, x, c(CAST, q, f32)), b),
    ),
    "scaled in another shape": (
        [small(N, K), Q, powers(4, 1)],
        lambda c, x, q, s: c(
            aten.mul.Tensor,
            c(aten.reshape.default, c(aten.mm.default, x, c(CAST, q, f32)), [4, 4, N]),
            s,
        ),
    ),
    "scaled by what depends on x": (
        [small(M, K), Q],
        lambda c, x, q: c(
            aten.mm.default,
            x,
            dense(c, q, c(aten.slice.Tensor, c(aten.amax.default, x, [0]), 0, 0, N)),
        ),
    ),
    "an activation made of the weight": (
        [Q, S],
        lambda c, q, s: c(
            aten.mm.default, c(aten.permute.default, dense(c, q, s), [1, 0]), dense(c, q, s)
        ),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_an_op_that_multiplies_becomes_the_canonical_one(name: str) -> None:
    inputs, body = PRODUCTS[name]
    assert_matches(rewritten(body, inputs))


REFUSED: dict[str, tuple[RejectionCode, list[torch.Tensor], Body]] = {
    "a scale for each batch": (
        RejectionCode.BATCHED_WEIGHT,
        [X3, Q, powers(2, 1, N)],
        lambda c, x, q, s: c(aten.bmm.default, x, dense(c, q, s)),
    ),
    "a bias that is a number": (
        RejectionCode.BIAS,
        [X, Q, S, torch.tensor(2.0)],
        lambda c, x, q, s, b: c(aten.addmm.default, b, x, dense(c, q, s)),
    ),
    "a bias of the rows": (
        RejectionCode.BIAS,
        [X, Q, S, small(M, 1)],
        lambda c, x, q, s, b: c(aten.addmm.default, b, x, dense(c, q, s)),
    ),
    "a factor of the product": (
        RejectionCode.BIAS,
        [X, Q, S, B],
        lambda c, x, q, s, b: c(aten.addmm.default, b, x, dense(c, q, s), alpha=2),
    ),
    "an empty weight": (
        RejectionCode.WEIGHT_FORM,
        [small(M, 0), ints(N, 0), S],
        lambda c, x, q, s: c(aten.mm.default, x, dense(c, c(aten.reshape.default, q, [0, N]), s)),
    ),
    "a scale that is infinite": (
        RejectionCode.WEIGHT_FORM,
        [X, Q],
        lambda c, x, q: c(aten.mm.default, x, dense(c, q, float("inf"))),
    ),
    "an activation of 64 bits": (
        RejectionCode.ACTIVATION,
        [X.double(), Q],
        lambda c, x, q: c(aten.mm.default, x, c(CAST, q, torch.float64)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_near_miss_is_refused_with_its_code(name: str) -> None:
    code, inputs, body = REFUSED[name]
    assert_refused(rewritten(body, inputs), code)


SUMS: dict[str, tuple[list[torch.Tensor], Body]] = {
    "of a part of the rows": (
        [small(M, K), Q, S],
        lambda c, x, q, s: mul_sum(c, c(aten.slice.Tensor, x, 0, 0, 1), dense(c, q, s)),
    ),
    "of a part of the columns": (
        [small(1, 2 * K), Q, S],
        lambda c, x, q, s: mul_sum(c, c(aten.slice.Tensor, x, 1, 0, K), dense(c, q, s)),
    ),
    "along another dimension": (
        [X, Q, S],
        lambda c, x, q, s: c(
            aten.sum.dim_IntList,
            c(aten.mul.Tensor, c(aten.unsqueeze.default, x, 2), dense(c, q, s)),
            [2],
        ),
    ),
    "by a vector": (
        [X, ints(K)],
        lambda c, x, q: c(aten.linear.default, x, c(CAST, q, f32)),
    ),
    "of a factor with columns": (
        [small(K, N), Q, S],
        lambda c, x, q, s: mul_sum(c, c(aten.select.int, c(
            aten.unsqueeze.default, x, 0), 2, 0), dense(c, q, s)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_what_is_no_product_of_two_matrices_stays(name: str) -> None:
    inputs, body = SUMS[name]
    rewrite = rewritten(body, inputs)
    assert not rewrite.report.matches
    assert rewrite.is_untouched


def test_a_sum_is_not_of_a_narrower_type_than_its_weight() -> None:
    """x was bf16 and the scaled weight is fp32: rounding it to bf16 would lose digits."""

    def body(call: Call, x: Node, q: Node, s: Node) -> Node:
        groups = call(aten.reshape.default, call(CAST, q, f32), [4, K // 4, N])
        w = call(aten.reshape.default, call(aten.mul.Tensor, groups, s), [K, N])
        return mul_sum(call, call(CAST, x, f32), w)

    rewrite = rewritten(body, [small(1, K, dtype=bf16), Q, torch.rand(4, 1, N)])
    before, after = results(rewrite)
    assert len(rewrite.report.matches) == 1
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-4)


# ------------------------------------------------------------------------------------------
# users


def test_several_products_with_one_weight() -> None:
    def body(call: Call, x: Node, y: Node, q: Node, s: Node) -> Node:
        w = dense(call, q, s)
        return call(aten.mm.default, x, w), call(aten.mm.default, y, w)

    rewrite = rewritten(body, [X, small(7, K), Q, S])
    assert_matches(rewrite, 2)
    assert not calls(rewrite.after, CAST)


def test_a_product_that_nobody_uses_does_no_harm() -> None:
    def body(call: Call, x: Node, q: Node, s: Node) -> Node:
        w = dense(call, q, s)
        found = call(aten.mm.default, x, w)
        call(aten.mm.default, x, w)
        return found

    rewrite = rewritten(body, [X, Q, S])
    assert_matches(rewrite)
    assert not rewrite.report.rejections
    assert not calls(rewrite.after, CAST)


def test_interior_nodes_with_other_users_stay() -> None:
    def body(call: Call, x: Node, q: Node, s: Node) -> Node:
        cast = call(CAST, q, f32)
        w = call(aten.mul.Tensor, cast, s)
        product = call(aten.mm.default, x, w)
        return product, w, call(aten.neg.default, cast)

    rewrite = rewritten(body, [X, Q, S])
    assert_matches(rewrite)
    assert len(calls(rewrite.after, CAST)) == 1


def test_a_product_with_other_users_is_given_to_all_of_them() -> None:
    def body(call: Call, x: Node, q: Node, s: Node) -> Node:
        product = call(aten.mm.default, x, call(CAST, q, f32))
        return call(aten.mul.Tensor, product, s), product

    assert_matches(rewritten(body, [X, Q, S]))


# ------------------------------------------------------------------------------------------
# writes

WRITES: dict[str, Callable[..., Node]] = {
    "the activation": lambda call, x, q, s, w: call(aten.add_.Tensor, x, 1),
    "the stored numbers": lambda call, x, q, s, w: call(aten.add_.Tensor, q, 1),
    "the scale": lambda call, x, q, s, w: call(aten.mul_.Tensor, s, 2),
    "a view of the scale": lambda call, x, q, s, w: call(
        aten.mul_.Tensor, call(aten.slice.Tensor, s, 0, 0, 2), 2
    ),
    "the weight": lambda call, x, q, s, w: call(aten.relu_.default, w),
}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_written_to_is_refused(what: str, is_first: bool) -> None:
    """Before or after the product: the time of the write does not matter."""

    def body(call: Call, x: Node, q: Node, s: Node) -> Node:
        w = dense(call, q, s)
        if is_first:
            WRITES[what](call, x, q, s, w)
        product = call(aten.mm.default, x, w)
        if not is_first:
            WRITES[what](call, x, q, s, w)
        return product

    assert_refused(rewritten(body, [X, Q, S]), RejectionCode.MUTATED_OPERAND)


def test_a_copy_in_the_midst_that_is_written_to_is_refused() -> None:
    def body(call: Call, x: Node, q: Node, s: Node) -> Node:
        copy = call(aten.clone.default, q)
        call(aten.bitwise_and_.Scalar, copy, 15)
        return call(aten.mm.default, x, dense(call, copy, s))

    assert_refused(rewritten(body, [X, Q, S]), RejectionCode.MUTATED_OPERAND)


# ------------------------------------------------------------------------------------------
# whole programs


def linear(x: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x @ (q.to(x.dtype) * s).t()


def test_any_number_of_rows_is_one_graph() -> None:
    backend = EagerBackend()
    compiled = torch.compile(linear, backend=backend)
    q, s = ints(N, K), powers(N, 1)
    for rows in (5, 2, 64):
        x = small(rows, K)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x, q, s), linear(x, q, s))
    [rewrite] = backend.rewrites
    [match] = rewrite.report.matches
    assert isinstance(match.m, str)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "view", [lambda x: x[:, -1:], lambda x: x[:, 1:], lambda x: x.swapdims(0, 1)]
)
def test_a_view_of_any_batch_and_length_is_one_product(view: Any) -> None:
    """Such an x is not contiguous: Dynamo's linear multiplies each sequence by the same weight."""
    x, *inputs = small(3, 5, K), ints(N, K), powers(N, 1), small(N)
    torch._dynamo.mark_dynamic(x, (0, 1))
    _, [rewrite] = capture(lambda x, q, s, b: F.linear(view(x), q * s, b), (x, *inputs))
    assert any(node.target == aten.bmm.default for node in rewrite.before.graph.nodes)
    assert_matches(rewrite)


def test_a_model_without_quantization_is_left_alone() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(K, N), torch.nn.GELU(), torch.nn.LayerNorm(N), torch.nn.Linear(N, K)
    )
    with torch.no_grad():
        _, [rewrite] = capture(model, [small(M, K)])
    assert rewrite.is_untouched
    assert not rewrite.report.matches
    assert {RejectionCode(code) for code in rewrite.codes} <= {RejectionCode.NOT_QUANTIZED}


@pytest.mark.parametrize("steps", [40, 150, 400])
@pytest.mark.parametrize("is_doubled", [True, False])
def test_a_long_computation_is_no_weight(steps: int, is_doubled: bool) -> None:
    """And neither overflows the stack nor takes exponential time if results are used twice."""

    def body(call: Call, x: Node, h: Node) -> Node:
        for _ in range(steps):
            h = call(aten.add.Tensor, h, call(aten.mul.Tensor, h, 0.5) if is_doubled else 0.5)
        return call(aten.mm.default, x, h)

    rewrite = rewritten(body, [X, small(K, N)])
    assert rewrite.is_untouched
    assert "internal_error" not in rewrite.codes


def test_fewer_matches_than_required_are_an_error() -> None:
    inputs = [small(M, K), ints(N, K), powers(N, 1)]
    enough = Options(on_error="raise", require={"weight_only": 1})
    _, [rewrite] = capture(linear, inputs, options=enough)
    assert len(rewrite.report.matches) == 1
    torch._dynamo.reset()
    more = Options(on_error="raise", require={"weight_only": 2})
    with pytest.raises(
        Exception, match="require demands 2 weight_only GEMMs, this graph has 1"
    ) as caught:
        capture(linear, inputs, options=more)
    causes = [caught.value]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    assert any(isinstance(cause, RequirementError) for cause in causes)
    assert issubclass(RequirementError, InductorQuantError)
    torch._dynamo.reset()
    # a graph without matrix products is not asked for any
    capture(lambda x: x + 1, [small(M, K)], options=more)


@pytest.mark.parametrize("rows", [1, 128, 4096])
def test_any_number_of_rows_is_taken(rows: int) -> None:
    """At large M the lowering writes the dequantized weight once instead of for every tile."""
    q, scale = ints(N, K), powers(N, 2)

    def model(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x @ (q.to(f32) * scale.repeat_interleave(K // scale.shape[1], dim=1)).t()

    _, [rewrite] = capture(model, (small(rows, K), q, scale))
    assert len(rewrite.report.matches) == 1


@pytest.mark.parametrize("shape", [(1, K), (1, 1, K), (1, 1, 1, K)], ids=str)
@pytest.mark.parametrize("x_dtype", [f32, torch.bfloat16])
def test_one_row_of_an_activation_of_any_dimensions_is_a_product(shape, x_dtype) -> None:
    """Inductor's decomposition of mm at one row, on a GPU."""
    q, scale = ints(N, K), powers(N)

    def model(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        w = q.to(x.dtype).t()
        rows = (x.view(1, K).unsqueeze(2) * w.unsqueeze(0)).sum(1) * scale.to(x.dtype)
        return rows.view(*shape[:-1], N)

    args = (small(*shape).to(x_dtype), q, scale)
    got, [rewrite] = capture(model, args)
    [match] = rewrite.report.matches
    assert (match.m, match.n, match.k) == (1, N, K)
    want = model(*args).float()  # rounds each term
    assert (got.float() - want).norm() <= 1e-2 * want.norm()


@pytest.mark.parametrize(
    "rows",
    [
        lambda x: x[:, 1],  # one row of several
        lambda x: x.view(2, 1, K)[1],
        lambda x: x[:, :1].flip(2)[0],
    ],
)
def test_a_row_that_is_a_part_of_a_tensor_is_not_the_whole_tensor(rows) -> None:
    q, x = ints(N, K), small(1, 2, K)

    def model(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (rows(x).unsqueeze(2) * q.to(f32).t().unsqueeze(0)).sum(1)

    got, _ = capture(model, (x, q))
    assert torch.allclose(got, model(x, q), rtol=1e-4, atol=1e-3)
