"""GEMMs of one activation become one op; values, shapes and strides stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_quant.errors import SpecError
from inductor_quant.ops import w8a8, weight_only
from inductor_quant.ops.fusion import horizontal, quantize
from inductor_quant.options import Options
from inductor_quant.patterns.fusion.horizontal import MAX_MEMBERS, horizontal_fusion
from tests.support.gemms import formats
from tests.support.gemms.fp8 import Case as Fp8Case
from tests.support.gemms.horizontal import (
    DecoderLayer,
    Floats,
    Group,
    Int4,
    Integers,
    PackedLayout,
    words,
)
from tests.support.gemms.w4a8 import Case as Int4Case
from tests.support.gemms.w8a8 import Case
from tests.support.gemms.weight_only import Case as WordsCase
from tests.support.graphs.post_grad import EagerBackend, calls, capture, count
from tests.support.spellings.int8 import bf16
from tests.support.spellings.quantizers import TorchaoLinear

aten = torch.ops.aten
GROUPS = (
    horizontal.w8a8_op,
    horizontal.fp8_op,
    horizontal.w4a8_op,
    horizontal.weight_only_op,
)
HIDDEN = 128


class SameStrides(fx.Interpreter):
    """Checks that every value has the shape, dtype and strides of the graph."""

    def run_node(self, node: fx.Node) -> Any:
        result, said = super().run_node(node), node.meta.get("val")
        if isinstance(result, Tensor) and isinstance(said, Tensor):
            assert (result.shape, result.dtype) == (said.shape, said.dtype), node
            steps = [s for s, size in zip(result.stride(), said.shape, strict=True) if size > 1]
            assert steps == [s for s, n in zip(said.stride(), said.shape, strict=True) if n > 1]
        return result


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("linear", "shape", "quantizations"),
    [(words, (1, 1, HIDDEN), 0), (TorchaoLinear, (2, 3, HIDDEN), 4)],
)
def test_a_decoder_layer_has_two_groups(
    linear: Any, shape: tuple[int, ...], quantizations: int
) -> None:
    torch.manual_seed(0)
    result, [rewrite] = capture(DecoderLayer(linear, HIDDEN), [torch.randn(shape, dtype=bf16)])
    [want] = rewrite.before(*rewrite.inputs)
    assert (result - want).abs().max() < 0.05 * want.abs().max()
    assert len(rewrite.report.matches) == 7
    assert sizes(rewrite.after) == [3, 2]
    assert count(rewrite.after, quantize.op) == quantizations
    found = [node.name for node in rewrite.after.graph.nodes if node.target in GROUPS]
    assert [event.call for event in rewrite.report.groups] == found
    assert [len(event.members) for event in rewrite.report.groups] == [3, 2]
    matched = {match.call for match in rewrite.report.matches}
    assert {name for event in rewrite.report.groups for name in event.members} < matched
    rewrite.after.graph.lint()
    SameStrides(rewrite.after).run(*rewrite.inputs)


# ------------------------------------------------------------------------------------------
# canonical ops in graphs that are written here


def traced(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> fx.GraphModule:
    gm = make_fx(fn, tracing_mode="fake")(*inputs)
    for node in gm.graph.nodes:  # after an in-place op, its input is read again
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            node.replace_all_uses_with(node.args[0])
    gm.graph.eliminate_dead_code()
    return gm


def regrouped(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> fx.GraphModule:
    """The graph of ``fn`` after the pass; its results are compared with ``fn``."""
    gm = traced(fn, inputs)
    horizontal_fusion(gm.graph)
    gm.graph.lint()
    gm.recompile()
    cases = [tuple(t.clone() if isinstance(t, Tensor) else t for t in inputs) for _ in range(2)]
    got, want = gm(*cases[0]), fn(*cases[1])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    return gm


def sizes(gm: fx.GraphModule) -> list[int]:
    return [len(node.users) for node in gm.graph.nodes if node.target in GROUPS]


def activated(members: Group) -> Callable[..., Any]:
    """Each GEMM, followed by a tanh."""
    alone = members.alone
    return lambda *inputs: [result.tanh() for result in alone(*inputs)]


INTEGERS = Integers(Case(5, 0, 48, out_dtype=bf16), (32, 16, 16))
WORDS = PackedLayout(WordsCase("gptq", 5, 0, 128, bias=True, column_scale="channel"), (64, 32, 32))
FLOATS = Floats(Fp8Case(5, 0, 64), (32, 16, 16))
INT4 = Int4(Int4Case("nibble_pairs", 5, 0, 128), (64, 32, 32))
MEMBERS = {"w8a8": INTEGERS, "fp8": FLOATS, "w4a8": INT4, "weight_only": WORDS}


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_calls_that_differ_in_columns_are_one_group(members: Group) -> None:
    inputs = members.make_inputs("cpu")
    gm = regrouped(activated(members), inputs)
    assert sizes(gm) == [3]
    results = [user for node in gm.graph.nodes if node.target in GROUPS for user in node.users]
    assert [tuple(node.meta["val"].shape) for node in results] == [(5, n) for n in members.columns]


def _a_parts(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn(a, a_scale, [(b, b_scale, bias), ...])``"""

    def given(a: Tensor, a_scale: Tensor, *rest: Tensor) -> Any:
        return fn(a, a_scale, [rest[i : i + 3] for i in range(0, len(rest), 3)])

    return given


def gemm(a: Tensor, a_scale: Tensor, own: tuple[Tensor, ...], **options: Any) -> Tensor:
    b, b_scale, bias = own
    return w8a8.op(a, b, a_scale, b_scale, bias, **{"out_dtype": bf16, **options})


def other_activation(a, scale, parts):
    return [gemm(a, scale, parts[0]).tanh(), gemm(a + 1, scale, parts[1]).tanh()]


def other_scale(a, scale, parts):
    return [gemm(a, scale, parts[0]).tanh(), gemm(a, scale * 2, parts[1]).tanh()]


def other_type(a, scale, parts):
    return [
        gemm(a, scale, parts[0]).tanh(),
        gemm(a, scale, parts[1], out_dtype=torch.float32).tanh(),
    ]


def no_bias(a, scale, parts):
    return [gemm(a, scale, parts[0]).tanh(), gemm(a, scale, (*parts[1][:2], None)).tanh()]


def zero_points(a, scale, parts):
    return [gemm(a, scale, part, a_zero=3).tanh() for part in parts[:2]]


def returned(a, scale, parts):
    first, second = (gemm(a, scale, part) for part in parts[:2])
    return [first.tanh(), second]


def returned_as_a_view(a, scale, parts):
    first, second = (gemm(a, scale, part) for part in parts[:2])
    return [first.tanh(), second.view(5, 4, -1).transpose(0, 1)]


def strides_read(a, scale, parts):
    first, second = (gemm(a, scale, part) for part in parts[:2])
    return [first.tanh(), second.as_strided((5, 2), (16, 3)) + 1]


def result_written(a, scale, parts):
    first, second = (gemm(a, scale, part) for part in parts[:2])
    return [first.tanh(), second.mul_(2).tanh()]


def written_between(a, scale, parts):
    first = gemm(a, scale, parts[0]).tanh()
    a.add_(1)
    return [first, gemm(a, scale, parts[1]).tanh()]


def weight_written_between(a, scale, parts):
    first = gemm(a, scale, parts[0]).tanh()
    parts[1][1].mul_(2)
    return [first, gemm(a, scale, parts[1]).tanh()]


def computed_of_what_is_written(a, scale, parts):
    first = gemm(a, scale, parts[0]).tanh()
    parts[1][1].mul_(2)
    return [first, gemm(a, scale, (parts[1][0], parts[1][1] + 1, parts[1][2])).tanh()]


def depends_on_the_first(a, scale, parts):
    first = gemm(a, scale, parts[0])
    bias = first.float().sum(0)[:16]
    return [first.tanh(), gemm(a, scale, (*parts[1][:2], bias)).tanh()]


def random_operand(a, scale, parts):
    first = gemm(a, scale, parts[0]).tanh()
    return [first, gemm(a, scale, (*parts[1][:2], torch.rand(16) * 0)).tanh()]


NEAR_MISSES = (
    *(other_activation, other_scale, other_type, no_bias, zero_points),
    *(returned, returned_as_a_view, strides_read, result_written, written_between),
    *(weight_written_between, computed_of_what_is_written, depends_on_the_first, random_operand),
)


@pytest.mark.parametrize("fn", NEAR_MISSES, ids=lambda fn: fn.__name__)
def test_no_group(fn: Callable[..., Any]) -> None:
    assert sizes(regrouped(_a_parts(fn), INTEGERS.make_inputs("cpu"))) == []


def test_another_group_size_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    members = PackedLayout(WordsCase("gptq", 5, 0, 128), (64, 32))
    other = PackedLayout(WordsCase("gptq", 5, 0, 128), (32, 64))
    inputs = members.make_inputs("cpu")
    count = len(inputs)
    first = members.alone
    monkeypatch.setattr(formats, "GROUP", 2 * formats.GROUP)
    more = other.make_inputs("cpu")[1:]
    second = other.alone
    gm = regrouped(
        lambda x, *rest: [
            t.tanh() for t in (*first(x, *rest[: count - 1]), *second(x, *rest[count - 1 :]))
        ],
        (*inputs, *more),
    )
    assert sizes(gm) == [2, 2]


@pytest.mark.parametrize(("rows", "found"), [(128, [2]), (129, []), (0, [])])
def test_only_small_m(rows: int, found: list[int]) -> None:
    members = Integers(Case(rows, 0, 32, out_dtype=bf16), (32, 16))
    gm = regrouped(activated(members), members.make_inputs("cpu"))
    assert sizes(gm) == found


@pytest.mark.parametrize(
    ("columns", "out_dtype", "found"),
    [
        ((256, 128, 128), bf16, [3]),
        ((256, 128, 64), bf16, [2]),  # no whole tile
        ((384, 128, 128), bf16, [2]),  # long
        ((256, 128, 128), torch.float32, []),
    ],
)
def test_many_rows_where_it_may_pay(
    columns: tuple[int, ...],
    out_dtype: torch.dtype,
    found: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(horizontal, "MAX_PRODUCTS", 130 * 256 * 32)
    members = Integers(Case(130, 0, 32, out_dtype=out_dtype), columns)
    gm = regrouped(activated(members), members.make_inputs("cpu"))
    assert sizes(gm) == found


@pytest.mark.parametrize(
    ("rows", "name", "found"), [(130, "any", [2]), (130, "own", []), (5, "own", [2])]
)
def test_strides_of_many_rows_are_those_that_a_library_asks_for(
    rows: int, name: str, found: list[int]
) -> None:
    """Else Inductor would copy the results."""
    with torch.library._scoped_library("test_horizontal", "FRAGMENT") as library:
        tags = (torch.Tag.flexible_layout,) if name == "any" else ()
        library.define(f"read_{name}(Tensor x) -> Tensor", tags=tags)
        library.impl(f"read_{name}", lambda x: x.sum(), "CompositeExplicitAutograd")
        read = getattr(torch.ops.test_horizontal, f"read_{name}").default
        members = Integers(Case(rows, 0, 32, out_dtype=bf16), (128, 128))
        alone = members.alone
        gm = regrouped(
            lambda *inputs: [read(result.view(rows, 2, 64)) for result in alone(*inputs)],
            members.make_inputs("cpu"),
        )
        assert sizes(gm) == found


def test_packed_weights_of_many_rows_stay_alone() -> None:
    members = PackedLayout(WordsCase("gptq", 129, 0, 128), (128, 128))
    assert sizes(regrouped(activated(members), members.make_inputs("cpu"))) == []


def test_rows_that_are_not_known_stay_alone() -> None:
    backend = EagerBackend()
    model = nn.ModuleList([words(64, 32), words(64, 16)])
    compiled = torch.compile(lambda x: [m(x).tanh() for m in model], backend=backend, dynamic=True)
    compiled(torch.randn(5, 64, dtype=bf16))
    [rewrite] = backend.rewrites
    assert len(rewrite.report.matches) == 2
    assert rewrite.report.groups == []


def test_operands_that_are_made_later_are_moved() -> None:
    """A call that depends on the first one stays where it is."""

    def fn(a, scale, parts):
        first = gemm(a, scale, parts[0])
        between = first.float().sum()
        b, b_scale, bias = parts[1]
        cast = (b_scale * 3).to(torch.float32)
        second = gemm(a, scale, (b, cast.view(1, -1), bias + 1))
        third = gemm(a, scale, (parts[2][0], parts[2][1] * between, parts[2][2]))
        return [first.tanh(), second.tanh(), third.tanh()]

    gm = regrouped(_a_parts(fn), INTEGERS.make_inputs("cpu"))
    assert sizes(gm) == [2]
    assert len(calls(gm)) == 1


def test_many_weights_are_several_groups() -> None:
    members = Integers(Case(3, 0, 32, out_dtype=bf16), (16,) * (MAX_MEMBERS + 3))
    gm = regrouped(activated(members), members.make_inputs("cpu"))
    assert sizes(gm) == [MAX_MEMBERS, 3]


def test_a_failure_leaves_a_graph_that_runs() -> None:
    model, x = nn.ModuleList([words(64, 32), words(64, 16)]), torch.randn(3, 64, dtype=bf16)

    def fn(x: Tensor) -> list[Tensor]:
        return [layer(x).tanh() for layer in model]

    with mock.patch("inductor_quant.patterns.fusion.horizontal.operator") as broken:
        broken.getitem = None  # not callable
        result, [rewrite] = capture(fn, [x], options=Options())
    assert rewrite.report.groups == []
    assert count(rewrite.after, weight_only.op) == 2
    torch._dynamo.reset()
    apart, [rewrite] = capture(fn, [x], options=Options(on_error="raise", horizontal_fusion=False))
    assert count(rewrite.after, weight_only.op) == 2
    assert all(map(torch.equal, result, apart))


# ------------------------------------------------------------------------------------------
# the ops
INT4 = Int4(Int4Case("nibble_pairs", 5, 0, 128), (64, 32, 32))


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_the_op_is_as_it_says(members: Group) -> None:
    """Each result is contiguous, in its own memory, also for the fake implementation."""
    inputs = members.make_inputs("cpu")
    got = members.grouped(*inputs)
    for result, alone in zip(got, members.alone(*inputs), strict=True):
        assert torch.equal(result, alone)
        assert result.is_contiguous()
        assert result.untyped_storage().nbytes() == result.nbytes
    given = make_fx(members.grouped, tracing_mode="fake")(*inputs)
    [call] = [node for node in given.graph.nodes if node.target in GROUPS]
    assert [t.stride() for t in call.meta["val"]] == [t.stride() for t in got]


def test_scales_of_groups_and_of_channels_are_apart() -> None:
    a, a_scale, *own = FLOATS.make_inputs("cpu")
    own[1] = own[1].repeat(2, 1)  # the scales of the first GEMM, in two groups

    def fn(*inputs: Tensor) -> list[Tensor]:
        return [result.tanh() for result in FLOATS.alone(*inputs)]

    assert sizes(regrouped(fn, (a, a_scale, *own))) == [2]


def test_lists_that_do_not_go_together_are_an_error() -> None:
    a, _, b, scale, bias = INTEGERS.make_inputs("cpu")[:5]
    with pytest.raises(SpecError, match="one entry per GEMM"):
        horizontal.w8a8_op(a, [b, b], None, [scale], [bias], out_dtype=bf16)
    x, _, _, *weight = WORDS.make_inputs("cpu")[:6]
    formats = [case.packed.format.encode() for case in WORDS.cases[:2]]
    with pytest.raises(SpecError, match="3 tensors for 2 weights"):
        horizontal.weight_only_op(x, weight, [None] * 2, [None] * 2, format=formats, out_dtype=bf16)
