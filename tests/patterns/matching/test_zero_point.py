"""Zero points after an integer product, value ranges, and near misses of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.patterns.match import Derived
from inductor_quant.patterns.matching.value_range import ValueRange, constant, value_range
from inductor_quant.patterns.matching.zero_point import frozen_sums
from tests.support.gemms.w8a8 import assert_close
from tests.support.graphs.post_grad import Float64Epilogue, calls, capture, printed
from tests.support.spellings.int8 import bf16, f32, gemm, i32, mm, scale

M, N, K = 6, 24, 40
i8 = torch.int8
aten, prims = torch.ops.aten, torch.ops.prims
Fn = Callable[..., Any]


def zeros(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=i8)


def rewritten(fn: Fn, args: list[torch.Tensor]) -> tuple[Any, Any]:
    """The result and the rewrite; the value is that of the graph in fp64."""
    result, [rewrite] = capture(fn, args)
    [exact] = Float64Epilogue(rewrite.before).run(*rewrite.inputs)
    assert_close(result, exact, slack=4)
    return result, rewrite


TAKEN: dict[str, tuple[Fn, str, bool]] = {
    # name -> function of a, w, zero, scale, column; kind of zero; whether the sums are the weight's
    "int8": (lambda a, w, z, s, c: (mm(a, w) - z * w.sum(0)) * s * c, "int", True),
    "keepdim": (lambda a, w, z, s, c: (mm(a, w) - z * w.sum(0, keepdim=True)) * s * c, "int", True),
    "of a transpose": (lambda a, w, z, s, c: (mm(a, w) - z * w.t().sum(1)) * s * c, "int", True),
    "in int32": (
        lambda a, w, z, s, c: (mm(a, w) - z.int() * w.sum(0, dtype=i32)) * s * c, "int", True),
    "in fp32": (
        lambda a, w, z, s, c: (mm(a, w).float() - z * w.float().sum(0)) * s * c, "int", True),
    "swapped": (lambda a, w, z, s, c: c * (s * (mm(a, w) - w.sum(0) * z)), "int", True),
    "behind the row": (
        lambda a, w, z, s, c: (mm(a, w) * s - z * s * w.sum(0)) * c, "int", True),
    "behind both": (
        lambda a, w, z, s, c: mm(a, w) * s * c - (z * s) * (w.sum(0) * c), "int", True),
    "added": (lambda a, w, z, s, c: (mm(a, w) + (-z.float()) * w.sum(0)) * s * c, "float", True),
    "of other sums": (
        lambda a, w, z, s, c: (mm(a, w) - z * w[:5].sum(0).float()) * s * c, "float", False),
    "of wrapped sums": (
        lambda a, w, z, s, c: (mm(a, w) - z.int() * w.sum(0, dtype=i8)) * s * c, "float", False),
    "of given sums": (
        lambda a, w, z, s, c: (mm(a, w) - z * w[0].int()) * s * c, "float", False),
    "a number": (lambda a, w, z, s, c: (mm(a, w) - 7 * w.sum(0)) * s * c, "const", True),
    "with a number behind": (
        lambda a, w, z, s, c: mm(a, w).float() * 0.5 - z * 0.5 * w.sum(0).float(), "int", True),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TAKEN)
def test_a_zero_point_is_taken(name: str) -> None:
    fn, kind, is_sum = TAKEN[name]
    args = [*gemm(), zeros(M, 1), scale(M, 1), scale(N)]
    _, rewrite = rewritten(fn, args)
    [match] = rewrite.report.matches
    assert match.spec.a.zero == kind
    [call] = calls(rewrite.after)
    assert (len(call.args) < 8 or call.args[7] is None) == is_sum
    assert "sum" not in printed(rewrite.after) or not is_sum
    assert not {n.target for n in rewrite.after.graph.nodes} & {aten.sub.Tensor}


WRAPPING: dict[str, Fn] = {
    "int8": lambda a, w, z, s, v: (mm(a, w) - z * v.to(i8)) * s,
    "int16": lambda a, w, z, s, v: (mm(a, w) - z.short() * v.short()) * s,
    "int8 numbers": lambda a, w, z, s, v: (mm(a, w) - (z * 3) * v) * s,
    "int32": lambda a, w, z, s, v: (mm(a, w) - z * (v * 2**20)) * s,
    "int32, wide zero": lambda a, w, z, s, v: (mm(a, w) - (z.int() << 24) * v) * s,
    "int64": lambda a, w, z, s, v: (mm(a, w) - z.long() * (v.long() << 50)) * s,
    "negative": lambda a, w, z, s, v: (mm(a, w) - (-z) * v) * s,
    "the product alone": lambda a, w, z, s, v: (mm(a, w) - z * (v * 2**17)) * s,
}


@pytest.mark.parametrize("name", WRAPPING)
def test_integers_that_wrap_around_keep_doing_so(name: str) -> None:
    z = torch.tensor([[-128], [127], [3], [-77], [100], [-1]], dtype=i8)
    v = torch.arange(N, dtype=i32) * 1000 - 9000
    result, [rewrite] = capture(WRAPPING[name], [*gemm(), z, scale(M, 1), v])
    [before] = rewrite.before(*rewrite.inputs)
    assert torch.allclose(result, before, rtol=1e-5)


LEFT: dict[str, Fn] = {
    "of another scale": lambda a, w, z, s, c: (mm(a, w) * s - z * (2 * s) * w.sum(0)) * c,
    "of a scale too many": lambda a, w, z, s, c: (mm(a, w) - z * s * w.sum(0)) * c,
    "of the column alone": lambda a, w, z, s, c: mm(a, w) * s * c - z * s * w.sum(0),
    "from the other side": lambda a, w, z, s, c: (z * w.sum(0) - mm(a, w)) * s * c,
    "twice": lambda a, w, z, s, c: (mm(a, w) - z * z.float() * w.sum(0)) * s * c,
    "of all": lambda a, w, z, s, c: (mm(a, w) - z * torch.ones(N)) * s * c,
    "divided": lambda a, w, z, s, c: (mm(a, w) / s - z * s * w.sum(0)) * c,
    "times two": lambda a, w, z, s, c: torch.sub(mm(a, w), z * w.sum(0), alpha=2) * s * c,
    "of each": lambda a, w, z, s, c: (mm(a, w) - torch.outer(s[:, 0], c).exp()) * s * c,
    "of products of sums": lambda a, w, z, s, c: (mm(a, w) - w.sum(0) * w.sum(0)) * s * c,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_zero_point_keeps_its_value(name: str) -> None:
    """It stays in the graph or is matched as it is: only the value counts."""
    rewritten(LEFT[name], [*gemm(), zeros(M, 1), scale(M, 1), scale(N)])


@pytest.mark.parametrize("name", ["of the column alone", "from the other side", "divided"])
def test_these_terms_stay_in_the_graph(name: str) -> None:
    _, rewrite = rewritten(LEFT[name], [*gemm(), zeros(M, 1), scale(M, 1), scale(N)])
    assert all(not match.spec.a.zero for match in rewrite.report.matches)


SQUARE: dict[str, Fn] = {
    "the row's along the columns": lambda a, w, z, s, c: (
        mm(a, w) * s[:, None] - z * s[None, :] * w.sum(0)) * c,
    "among the sums": lambda a, w, z, s, c: (mm(a, w) * s[:, None] - z * (s * w.sum(0))) * c,
    "both exchanged": lambda a, w, z, s, c: (
        mm(a, w) * s[:, None] * c - (z * c[:, None]) * (s * w.sum(0))),
    "the column's along the rows": lambda a, w, z, s, c: mm(a, w) * c - z * c[:, None] * w.sum(0),
}  # fmt: skip


@pytest.mark.parametrize("name", SQUARE)
def test_a_scale_along_the_other_axis_of_a_square_is_not_the_same(name: str) -> None:
    a, w = zeros(N, K), zeros(K, N)
    args = [a, w, zeros(N, 1), scale(N), scale(N)]
    _, rewrite = rewritten(SQUARE[name], args)
    assert all(not match.spec.a.zero for match in rewrite.report.matches)


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_a_term_that_is_repeated_along_the_rows_is_left(name: str) -> None:
    def fn(a: Any, w: Any, z: Any, c: Any) -> Any:
        return (mm(a, w).reshape(2, -1, N) - (z * w.sum(0)).reshape(1, -1, N)) * c

    a, w = zeros(2 * M, K), zeros(K, N)
    z = zeros(M, 1)
    if name == "dynamic":
        torch._dynamo.mark_dynamic(a, 0)
        torch._dynamo.mark_dynamic(z, 0)
    _, rewrite = rewritten(fn, [a, w, z, scale(N)])
    assert not calls(rewrite.after)


def test_sums_along_the_wrong_axis_of_a_square_weight_are_not_the_weights() -> None:
    a, w = zeros(M, N), zeros(N, N)
    fn = lambda a, w, z, s: (mm(a, w) - z * w.sum(1)) * s  # noqa: E731
    _, rewrite = rewritten(fn, [a, w, zeros(M, 1), scale(M, 1)])
    [call] = calls(rewrite.after)
    assert call.args[7] is not None


def exported_weight() -> fx.Node:
    root, drawn = torch.nn.Module(), fx.Graph()
    root.register_buffer("w", zeros(K, N))
    drawn.get_attr("w")
    [made] = fx.GraphModule(root, drawn).graph.nodes
    made.meta["val"] = zeros(K, N)
    return made


_FOLDED_WHEN_LOADED = "aot_inductor.use_runtime_constant_folding"


def test_the_sums_of_a_weight_that_is_frozen_are_a_node_that_inductor_folds() -> None:
    w, exported = node(aten.neg.default, None, dtype=i8).all_input_nodes[0], exported_weight()
    columns = w.graph.call_function(aten.permute.default, (w, [1, 0]))
    columns.meta["val"] = torch.zeros(4, dtype=i8)
    assert frozen_sums(columns) is None
    with torch._inductor.config.patch(freezing=True):
        sums = frozen_sums(columns)
        assert sums is not None
        assert sums.args == (columns, [0], True)
        assert frozen_sums(Derived(aten.permute.default, (w, [1, 0]))) is not None
        # what is a constant already will not be folded any more
        assert frozen_sums(exported) is None


@pytest.mark.parametrize(
    ("options", "is_folded"),
    [({}, False), ({"freezing": True}, True), ({_FOLDED_WHEN_LOADED: True}, True)],
    ids=str,
)
def test_the_sums_of_an_exported_weight_are_a_node_where_inductor_folds_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], is_folded: bool
) -> None:
    """A package that may get another weight computes the sums again."""
    monkeypatch.setattr(compat, "is_exporting", lambda: True)
    with torch._inductor.config.patch(options):
        assert (frozen_sums(exported_weight()) is not None) == is_folded


def test_k_beyond_which_a_zero_point_overflows_is_refused() -> None:
    k = 65794
    fn = lambda a, w, z, s: (mm(a, w) - z * w.sum(0)) * s  # noqa: E731
    args = [zeros(2, k), zeros(k, 3), zeros(2, 1), scale(2, 1)]
    _, [rewrite] = capture(fn, args)
    assert rewrite.codes == ["k_too_long"]
    assert rewrite.is_untouched


def test_a_weight_that_is_written_to_is_left() -> None:
    def fn(a: torch.Tensor, w: torch.Tensor, z: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        acc = mm(a, w)
        w.add_(1)
        return (acc - z * w.sum(0)) * s

    a, w = gemm()
    w.clamp_(-100, 100)
    want = fn(a, w.clone(), z := zeros(M, 1), s := scale(M, 1))
    got, _ = capture(fn, [a, w, z, s])
    assert torch.allclose(got, want, rtol=1e-5)


# ------------------------------------------------------------------------------------------
# value_range


def node(target: Any, *args: Any, dtype: torch.dtype = f32) -> fx.Node:
    """A call in a graph; None among the arguments is an input of that type."""
    owner = fx.Graph()

    def build(item: Any) -> Any:
        if item is None:
            made = owner.placeholder("x")
        elif isinstance(item, tuple):
            made = owner.call_function(item[0], tuple(map(build, item[1:-1])))
            made.meta["val"] = torch.zeros(4, dtype=item[-1])
            return made
        else:
            return item
        made.meta["val"] = torch.zeros(4, dtype=dtype)
        return made

    made: fx.Node = build((target, *args, dtype))
    return made


ROUND, CLAMP, CAST = aten.round.default, aten.clamp.default, prims.convert_element_type.default


@pytest.mark.parametrize(
    ("made", "want"),
    [
        (node(ROUND, (CLAMP, None, -128, 127, f32)), ValueRange(-128, 127, True)),
        (node(CLAMP, (ROUND, None, f32), -128, 127), ValueRange(-128, 127, True)),
        (node(CLAMP, None, -128, 127), ValueRange(-128, 127, False)),
        (node(CLAMP, (ROUND, None, f32), -128.5, 127), ValueRange(-128.5, 127, False)),
        (node(ROUND, (CLAMP, None, -0.5, 127.5, f32)), ValueRange(0, 128, True)),
        # 127.4 is 127.5 in bf16, and rounds to 128
        (node(ROUND, (CAST, (CLAMP, None, -1, 127.4, f32), bf16, bf16), dtype=bf16),
         ValueRange(-1, 128, True)),
        (node(aten.sub.Tensor, (CLAMP, (ROUND, None, f32), 0, 255, f32), 128),
         ValueRange(-128, 127, True)),
        (node(aten.add.Tensor, None, None, dtype=i8), ValueRange(-128, 127, True)),
        (node(CAST, (CLAMP, None, -300, 300, f32), i8, dtype=i8), ValueRange(-128, 127, True)),
        (node(aten.full.default, [4], 3.0), ValueRange(3, 3, True)),
        (node(aten.where.self, None, 1.0, -2.0), ValueRange(-2, 1, True)),
        (node(aten.exp.default, None), ValueRange()),
        (node(aten.round.decimals, None, 1), ValueRange()),
    ],
    ids=str,
)  # fmt: skip
def test_value_range(made: fx.Node, want: ValueRange) -> None:
    assert value_range(made) == want


@pytest.mark.parametrize(
    ("name", "frozen", "want"),
    [("_tensor_constant0", False, 3.0), ("zero_point", False, None), ("zero_point", True, 3.0)],
)
def test_a_buffer_of_an_exported_model_is_no_constant(
    monkeypatch: pytest.MonkeyPatch, name: str, frozen: bool, want: float | None
) -> None:
    """A ``get_attr`` like a literal; unless frozen, ``load_constants`` may replace it."""
    monkeypatch.setattr(compat, "is_exporting", lambda: True)
    monkeypatch.setattr(compat, "is_freezing", lambda: frozen)
    root = torch.nn.Module()
    root.register_buffer(name, torch.tensor(3.0))
    drawn = fx.Graph()
    drawn.get_attr(name)
    [made] = fx.GraphModule(root, drawn).graph.nodes
    made.meta["val"] = torch.tensor(3.0)
    assert constant(made) == want


def test_a_number_is_a_constant_and_a_bool_is_none() -> None:
    assert constant(3) == 3
    assert constant(True) is None
    assert constant(float("nan")) is None
    assert constant(node(aten.full.default, [4], 0.5)) == 0.5


def test_value_range_of_what_is_its_own_operand_many_times_are_found_at_once() -> None:
    owner = fx.Graph()
    last = owner.placeholder("x")
    last.meta["val"] = torch.zeros(4)
    for _ in range(60):
        last = owner.call_function(aten.maximum.default, (last, last))
        last.meta["val"] = torch.zeros(4)
    assert value_range(last) == ValueRange()
