"""Random programs after an integer GEMM: whatever the pass makes of them is right."""

from __future__ import annotations

import dataclasses
import operator
from functools import reduce
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.graphs.handmade import Call, rewritten
from tests.support.graphs.post_grad import CAST, INT_MM, W8A8, Float64Epilogue, Rewrite, calls

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MUL, RESHAPE = aten.mul.Tensor, aten.reshape.default
PROFILE = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@dataclasses.dataclass
class Program:
    """``steps`` after ``_int_mm(x0, x1)``: (what, position of an input, or a value)."""

    m: int
    n: int
    args: list[torch.Tensor]
    steps: list[tuple[str, Any]]

    def body(self, call: Call, *x: torch.fx.Node) -> torch.fx.Node:
        y = call(INT_MM, x[0], x[1])
        for what, value in self.steps:
            if what == "cast":
                y = call(CAST, y, value)
            elif what == "reshape":
                y = call(RESHAPE, y, value)
            elif what == "number":
                y = call(MUL, y, value)
            elif what == "outer":
                y = call(MUL, y, call(MUL, x[value], x[value + 1]))
            elif what == "expanded":
                shape = list(y.meta["val"].shape)
                y = call(MUL, call(aten.expand.default, x[value], shape), y)
            elif what == "square":
                y = call(MUL, y, y)
            elif what == "twice":
                y = call(aten.add.Tensor, call(MUL, y, x[value]), y)
            elif what in ("add", "div"):
                y = call(getattr(aten, what).Tensor, y, x[value])
            elif what == "mul":
                y = call(MUL, y, x[value])
            else:
                y = call(getattr(aten, what).default, y)
        return y


# A step of these and nothing else is part of the canonical op.
LEGAL = ("row", "column", "scalar", "number", "cast", "reshape", "outer", "expanded", "bias")
AXES = {
    "row": ("row",),
    "expanded": ("row",),
    "column": ("column",),
    "scalar": ("scalar",),
    "outer": ("row", "column"),
}
OTHERS = (
    *("batch", "position") * 2,
    *("full", "batch", "position", "row bias", "residual", "integer", "double"),
    *("relu", "abs", "square", "twice", "div"),
)


@st.composite
def programs(draw: st.DrawFn, *, legal: bool) -> Program:
    """All values are positive, so that nothing cancels."""
    # One seed an example: choices of Hypothesis's own would rarely be as different.
    rng = draw(st.randoms(use_true_random=True))
    batch, rows = rng.choice([(1, 1), (1, 6), (6, 1), (2, 3), (3, 3)])
    m = batch * rows
    n = rng.choice([1, 2, 3, 6, 9, m])
    k = rng.choice([1, 4, 9, m])
    torch.manual_seed(rng.randint(0, 9))
    args = [
        torch.randint(0, 4, (m, k), dtype=torch.int8),
        torch.randint(0, 4, (k, n), dtype=torch.int8),
    ]
    steps: list[tuple[str, Any]] = []
    used: list[str] = []  # axes of the factors so far
    has_bias = False
    lead: tuple[int, ...] = (m,)
    if rng.random() < 0.5:
        lead = (batch, rows)
        steps.append(("reshape", [batch, rows, n]))

    def new(*shape: int) -> int:
        """An input of values in [0.5, 1.5], and its position."""
        dtype = rng.choice(FLOATS)
        args.append((torch.rand(shape) + 0.5).to(dtype))
        return len(args) - 1

    for _ in range(rng.randint(1, 8)):
        kind = rng.choice(LEGAL if legal else 4 * LEGAL + OTHERS)
        axes = AXES.get(kind, ())
        if legal and not _has_room(used, axes):
            continue
        if legal and has_bias and (axes or kind == "number"):
            continue
        if kind == "row":
            steps.append(("mul", new(*lead, 1)))
        elif kind == "column":
            steps.append(("mul", new(*rng.choice([(n,), (1, n)]))))
        elif kind == "scalar":
            steps.append(("mul", new(*rng.choice([(), (1,), (1, 1)]))))
        elif kind == "expanded":
            steps.append(("expanded", new(*lead, 1)))
        elif kind == "outer":
            steps.append(("outer", new(*lead, 1)))
            new(n)
        elif kind == "number":
            steps.append(("number", rng.choice([0.5, 0.7, 1.0, 1.3])))
        elif kind == "cast":
            steps.append(("cast", rng.choice(FLOATS)))
        elif kind == "reshape":
            lead = rng.choice([(m,), (batch, rows), (1, m), (m, 1), (batch, 1, rows)])
            steps.append(("reshape", [*lead, n]))
        elif kind == "bias":
            if legal and (has_bias or n == 1 or not used):
                continue
            steps.append(("add", new(n)))
            has_bias = True
        elif kind == "full":
            steps.append(("mul", new(*lead, n)))
        elif kind == "batch":
            steps.append(("mul", new(lead[0], *[1] * len(lead))))
        elif kind == "position":
            steps.append(("mul", new(lead[-1], 1)))
        elif kind == "row bias":
            steps.append(("add", new(*lead, 1)))
        elif kind == "residual":
            steps.append(("add", new(*lead, n)))
        elif kind == "integer":
            args.append(torch.arange(1, n + 1, dtype=torch.int32))
            steps.append((rng.choice(["mul", "add"]), len(args) - 1))
        elif kind == "double":
            steps.append(("cast", torch.float64))
        elif kind in ("twice", "div"):
            steps.append((kind, new(n)))
        else:
            steps.append((kind, None))
        used += axes
    return Program(m, n, args, steps)


def _has_room(used: list[str], axes: tuple[str, ...]) -> bool:
    """The op has two scales, at most one of them per row and one per column."""
    both = [*used, *axes]
    return not axes or (len(both) <= 2 and both.count("row") <= 1 and both.count("column") <= 1)


def source(node: Any) -> torch.fx.Node | None:
    while node is not None and node.target in (RESHAPE, aten.expand.default):
        node = node.args[0]
    return node


def assert_right(rewrite: Rewrite) -> None:
    """Every element is within the rewritten graph's rounding error of the fp64 value."""
    [call] = calls(rewrite.after)
    behind = list(rewrite.after.graph.nodes)
    behind = behind[behind.index(call) : -1]
    # Scales that are multiplied first round there, in what we compare with.
    inputs = rewrite.before.graph.find_nodes(op="placeholder")
    outer = [n for n in rewrite.before.graph.nodes if n.args and set(n.args) <= set(inputs[2:])]
    dtypes = [node.meta["val"].dtype for node in (*behind, *outer)]
    bound = sum(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    bound += 8 * torch.finfo(torch.float32).eps  # inside of the op
    bound *= 2 ** sum(n.target == MUL and n.args[0] is n.args[1] for n in behind)
    interpreter = Float64Epilogue(rewrite.before)
    want = interpreter.run(*rewrite.inputs).double()
    if interpreter.largest > 6e4:
        return  # fp16 may have overflowed
    got = rewrite.after(*rewrite.inputs).double()
    assert (got - want).abs().le(bound * want.abs() + 1e-6).all()


def assert_arguments_are_those_of_the_program(rewrite: Rewrite, program: Program) -> None:
    [call] = calls(rewrite.after)
    a, b, a_scale, b_scale, bias, *zeros = call.args
    # An integer bias is in the place of the sums of columns, times a zero point of -1.
    integer_bias = zeros[-1] if zeros else None
    assert call.kwargs.get("a_zero", 0) == (-1 if zeros else 0)
    if integer_bias is not None:
        assert integer_bias.meta["val"].dtype == torch.int32
    inputs = rewrite.after.graph.find_nodes(op="placeholder")
    assert (a, b) == tuple(inputs[:2])
    given = (a_scale, b_scale, bias, integer_bias)
    used = [inputs.index(source(arg)) for arg in given if source(arg) in inputs]
    assert len(used) == len(set(used)), "one input in two places"
    for arg, full in ((a_scale, [program.m, 1]), (b_scale, [1, program.n]), (bias, [program.n])):
        if arg is not None:
            shape = list(arg.meta["val"].shape)
            assert shape == full or (arg is not bias and shape == [1, 1])
            assert arg.meta["val"].dtype in FLOATS
    numbers = [value for what, value in program.steps if what == "number"]
    products = [reduce(operator.mul, numbers[:i], 1.0) for i in range(len(numbers) + 1)]
    assert any(abs(call.kwargs["alpha"] - product) < 1e-12 for product in products)
    # Nothing is multiplied twice and nothing forgotten.
    users = {node for node in inputs if node.users}
    assert len(users) == len(program.args)


@PROFILE
@given(programs(legal=False))
def test_no_program_changes_its_value(program: Program) -> None:
    rewrite = rewritten(program.body, program.args)
    if not rewrite.report.matches:
        assert rewrite.is_untouched
        assert len(rewrite.report.rejections) == 1
        return
    assert not rewrite.report.rejections
    assert_arguments_are_those_of_the_program(rewrite, program)
    assert_right(rewrite)


@PROFILE
@given(programs(legal=True))
def test_a_program_of_scales_is_taken_whole(program: Program) -> None:
    is_scaled = any(what in ("mul", "outer", "expanded") for what, _ in program.steps)
    rewrite = rewritten(program.body, program.args)
    if not is_scaled:
        return
    assert len(rewrite.report.matches) == 1
    assert_arguments_are_those_of_the_program(rewrite, program)
    assert_right(rewrite)
    nodes = [node.target for node in rewrite.after.graph.nodes]
    assert set(nodes[nodes.index(W8A8) + 1 : -1]) <= {RESHAPE, CAST}


def test_the_generator_draws_what_matters() -> None:
    """Both outcomes, and every kind of step, are among the examples."""
    biases: list[bool | None] = []  # None: no match
    kinds: set[str] = set()

    @settings(PROFILE, max_examples=100)
    @given(programs(legal=False))
    def collect(program: Program) -> None:
        found = rewritten(program.body, program.args).report.matches
        biases.append(found[0].spec.bias if found else None)
        kinds.update(what for what, _ in program.steps)

    collect()
    assert {True, False, None} == set(biases)
    assert 0.2 < biases.count(None) / len(biases) < 0.8
    assert kinds >= {"mul", "outer", "expanded", "number", "cast", "reshape", "add", "square"}
