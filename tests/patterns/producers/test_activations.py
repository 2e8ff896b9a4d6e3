"""Layers with an int8 activation, by every producer: one match with the right spec, at least as
close to fp64 of the same quantized operands as the graph that it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from inductor_quant.ops import w8a8
from inductor_quant.options import Options
from tests.support.graphs.post_grad import CAST, W8A8, EagerBackend, Rewrite, count, snapshot
from tests.support.producers.activation import (
    GIVEN,
    PRODUCERS,
    ActivationProducer,
    Decomposed,
    K,
    integer_products,
)
from tests.support.producers.registry import need_package
from tests.support.sampling import sampled

# 32 rows of the other producers are a dynamic number of rows below
STATIC = [
    (producer, lead)
    for producer in PRODUCERS
    for lead in ((1,), (32,), (2, 16))
    if (len(lead) < 2 or not producer.is_2d) and (lead != (32,) or producer in GIVEN)
]


class Float64Op(fx.Interpreter):
    """The rewritten graph with the canonical op and everything after it in fp64: the value of the
    same quantized operands without rounding."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._exact: set[fx.Node] = set()

    def run_node(self, node: fx.Node) -> Any:
        if node.target != W8A8 and self._exact.isdisjoint(node.all_input_nodes):
            return super().run_node(node)
        self._exact.add(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.op == "output":
            return args[0]
        if node.target == W8A8:
            return exact(*args, **kwargs)
        if node.target == CAST and args[1].is_floating_point:
            return args[0]
        args, kwargs = fx.node.map_aggregate((args, kwargs), _widen)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _widen(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def exact(a: Any, b: Any, *rest: Any, alpha: float = 1.0, a_zero: int = 0, **_: Any) -> Any:
    """The op's formula in fp64."""
    a_scale, b_scale, bias, za, zb, sums = (*rest, *(None,) * (6 - len(rest)))
    zero = a_zero if za is None else za.double()
    out = a.double() @ b.double()
    out = out - zero * (b.double().sum(0, keepdim=True) if sums is None else sums.double())
    if zb is not None:
        out = out - zb.double() * (a.double() - zero).sum(1, keepdim=True)
    for factor in (alpha, a_scale, b_scale):
        if factor is not None:
            out = out * (factor if isinstance(factor, float) else factor.double())
    return out if bias is None else out + bias.double()


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def compiled(
    producer: ActivationProducer, lead: tuple[int, ...], *, is_dynamic: bool = False
) -> tuple[Any, Any, torch.Tensor]:
    need_package(producer.needs)
    torch.manual_seed(0)  # a zero point that is calibrated may be 0, and is then not there
    x = (torch.randn(*lead, K) + 0.3).to(producer.dtype)
    for dim in range(len(lead)) if is_dynamic else ():
        torch._dynamo.mark_dynamic(x, dim)
    module = producer.make(x)
    backend = EagerBackend(Options(on_error="raise", fuse_quantization=False))
    return torch.compile(module, backend=backend), backend, x


def assert_right(rewrite: Rewrite, result: torch.Tensor) -> None:
    [match] = rewrite.report.matches
    assert not rewrite.report.rejections
    assert count(rewrite.after, W8A8) == 1
    assert match.family == "w8a8"
    rewrite.after.graph.lint()
    [before] = rewrite.before(*rewrite.inputs)
    assert (result.dtype, result.stride()) == (before.dtype, before.stride())
    if any("quantized_decomposed" in str(node.target) for node in behind(rewrite)):
        # the result is quantized again: what is compared is what goes into that
        before, result = (
            at(gm, name, rewrite.inputs)
            for gm, name in ((rewrite.before, match.node), (rewrite.after, match.call))
        )
        want = Float64Op(at_node(rewrite.after, match.call)).run(*rewrite.inputs)
    else:
        [want] = Float64Op(rewrite.after).run(*rewrite.inputs)
    ours, eager = rms(result - want), rms(before - want)
    assert ours <= 1.02 * eager + 1e-7 * rms(want)
    # ... and these operands are the graph's: what it computes is near
    assert eager <= 0.02 * rms(want)


def behind(rewrite: Rewrite) -> list[fx.Node]:
    nodes = list(rewrite.after.graph.nodes)
    return nodes[[node.target for node in nodes].index(W8A8) :]


def at_node(gm: fx.GraphModule, name: str) -> fx.GraphModule:
    """The graph up to a node, which is its result."""
    copied = snapshot(gm.graph)
    [output] = copied.graph.find_nodes(op="output")
    output.args = (next(node for node in copied.graph.nodes if node.name == name),)
    copied.graph.eliminate_dead_code()
    copied.recompile()
    return copied


def at(gm: fx.GraphModule, name: str, inputs: list[Any]) -> torch.Tensor:
    value: torch.Tensor = at_node(gm, name)(*inputs)
    return value


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("producer", "lead"), sampled(STATIC, every=3), ids=str)
def test_a_producer_is_matched(producer: ActivationProducer, lead: tuple[int, ...]) -> None:
    run, backend, x = compiled(producer, lead)
    with integer_products(), torch.no_grad():
        result = run(x)
    [rewrite] = backend.rewrites
    spec, does = expected(producer, lead)
    if x.numel() == K:
        spec = spec.replace("token", "tensor")
    assert [str(match.spec) for match in rewrite.report.matches] == [spec]
    assert rewrite.report.matches[0].m == x.numel() // K
    assert str(rewrite.report.matches[0].activation) == does
    assert_right(rewrite, result)


def expected(producer: ActivationProducer, lead: tuple[int, ...]) -> tuple[str, str]:
    """Spec and recipe. compressed-tensors takes one scale for all of a matrix."""
    if producer.name == "compressed_dyn_token" and len(lead) == 1:
        return producer.spec.replace("token", "tensor"), producer.does.replace("token", "tensor")
    return producer.spec, producer.does


DYNAMIC = [
    *((producer, (32,), (7,)) for producer in PRODUCERS),
    # batch and sequence, each of any length
    *sampled((producer, (2, 16), (3, 5)) for producer in GIVEN if not producer.is_2d),
]


@pytest.mark.one_in(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("producer", "lead", "other"), DYNAMIC, ids=str)
def test_a_dynamic_number_of_rows_is_matched(
    producer: ActivationProducer, lead: tuple[int, ...], other: tuple[int, ...]
) -> None:
    run, backend, x = compiled(producer, lead, is_dynamic=True)
    spec, does = expected(producer, lead)
    with integer_products(), torch.no_grad():
        for given in (x, (torch.randn(*other, K) + 0.3).to(producer.dtype)):
            result = run(given)
            [rewrite] = backend.rewrites
            [match] = rewrite.report.matches
            assert (str(match.spec), str(match.activation)) == (spec, does)
            assert isinstance(match.m, str)
            assert_right(rewrite, result)


@pytest.mark.filterwarnings("ignore")
def test_a_scale_of_another_dtype_than_its_meta_is_left_to_eager_ops() -> None:
    x = torch.randn(4, K) + 0.3
    backend = EagerBackend()
    with torch.no_grad():
        layer = Decomposed("plain")
        result = torch.compile(layer, backend=backend)(x)
        assert torch.allclose(result, layer(x), rtol=1e-5, atol=1e-4)
    [rewrite] = backend.rewrites
    assert [match.family for match in rewrite.report.matches] == ["weight_only"]


def test_the_formula_in_fp64_is_that_of_the_op() -> None:
    torch.manual_seed(0)
    a, w = (torch.randint(-9, 9, (n, 8), dtype=torch.int8) for n in (3, 5))
    scales = torch.rand(3, 1), torch.rand(1, 5), torch.rand(5)
    zeros = torch.ones(3, 1, dtype=torch.int8), torch.rand(1, 5)
    got = w8a8.op(a, w.t(), *scales, *zeros, alpha=0.5, out_dtype=torch.float32)
    assert torch.allclose(
        got.double(), exact(a, w.t(), *scales, *zeros, alpha=0.5), rtol=1e-5, atol=1e-4
    )
