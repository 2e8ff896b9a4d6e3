"""Gates in the epilogues of experts on a GPU: every kernel, whole layers, never slower."""

from __future__ import annotations

import functools
import os
import statistics

import pytest
import torch

from examples.benchmarks.timing import Replay
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.experts.mm_sm90.kernel import (
    BLOCKS,
    DEEP_BLOCKS,
    TALL_BLOCKS,
    TALLEST,
)
from inductor_quant.kernels.weight_only.mm_sm90 import cost
from inductor_quant.patterns import graph_pass
from inductor_quant.report.events import collect
from tests.support.gemms import formats
from tests.support.gemms.experts import GATES, Case, gemm, make_inputs, reference
from tests.support.gemms.weight_only import assert_close
from tests.support.producers import experts
from tests.support.producers.experts import Experts, GptOssExperts, route

pytestmark = pytest.mark.gpu

OPTIONS = {"inductor_quant.on_error": "raise"}
GPT_OSS = {"gate": "clamped", "has_bias": True}


@pytest.fixture(autouse=True)
def _large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    monkeypatch.setattr(experts, "GROUP", 128)


def check(case: Case, configs: tuple[str, ...] = (), *, is_gated: bool = True) -> None:
    """A format that has no pairs in such a tile gets the same result by two kernels."""
    torch.manual_seed(0)
    inputs = tuple(t.cuda() for t in make_inputs(case, "cpu"))
    options = OPTIONS | ({"inductor_quant.configs": configs} if configs else {})
    with collect() as report:
        got = torch.compile(gemm(case), backend="inductor_quant", options=options)(*inputs)
    if configs and not report.kernels:
        pytest.skip("no such tile: the graph is as it was, and rounds the product before the gate")
    # W is rounded to 16 bits; the tensor core sums in its own order
    assert_close(got, reference(case, inputs), slack=4)
    if report.kernels and case.name != "awq":
        assert report.kernels[0].gate == str(GATES[case.gate][0]) * is_gated


EVERY_BLOCK = (*cost.BLOCKS, *BLOCKS, *DEEP_BLOCKS, *TALL_BLOCKS)
NAMES = ("gptq", "awq", "nibble_pairs", "int8_channel", "nf4", "mxfp4", "int8_group")


@pytest.mark.parametrize("gate", [{"gate": "silu"}, {"gate": "every_op"}, GPT_OSS], ids=str)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_few_rows(name, is_sorted, gate):
    check(Case(name, (3, 0, 20, 1), 544, 1024, 2 * is_sorted, is_sorted, **gate))
    check(Case(name, (3, 0, 21, 0), 512, 1024, is_sorted=is_sorted, repeats=2, **gate))


@pytest.mark.sm90
@pytest.mark.parametrize("gate", [{"gate": "silu"}, GPT_OSS], ids=str)
@pytest.mark.parametrize("block", [block for block, *_ in EVERY_BLOCK], ids=str)
@pytest.mark.parametrize("name", ["gptq", "nibble_pairs", "int8_channel", "nf4", "mxfp4"])
def test_many_rows_in_every_tile(name, block, gate):
    """What is stored ends within a tile; odd numbers of rows, empty experts, rows of none."""
    case = Case(name, (129, 0, 257, 1, 64, 0, 321), 416, 1024, left_over=150, **gate)
    config = GemmConfig(*block)
    is_gated = gate != GPT_OSS or config.block_m < TALLEST
    check(case, (f"experts_mm_sm90 {config}",), is_gated=is_gated)


@pytest.mark.parametrize("kind", [Experts, GptOssExperts])
@pytest.mark.parametrize(
    ("form", "tokens"),
    [("transformers_batched", 1), ("transformers_grouped", 37), ("transformers_grouped", 400)],
)
def test_a_layer(kind, form, tokens):
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model = kind("int4_words", form, e=16, h=512, i=256).cuda()
    args = tuple(t.cuda() for t in route(tokens, 16, 4, 512))
    run = torch.compile(model, backend="inductor_quant", options=OPTIONS)
    with torch.no_grad(), collect() as report:
        got, want = run(*args), model(*args)
    is_gated = kind is Experts or tokens == 1  # not with a bias of sorted rows
    name = "silu" if kind is Experts else "clamped"
    assert [kernel.gate for kernel in report.kernels] == [str(GATES[name][0]) * is_gated, ""]
    assert (got - want).norm() <= 0.02 * want.norm()


LAYERS = {
    "qwen3": (Experts, 128, 8, 2048, 768, 128),
    "mixtral": (Experts, 8, 2, 4096, 14336, 128),
    "gpt-oss": (GptOssExperts, 32, 4, 2880, 2880, 32),
}
TOKENS = (1, 16, 64, 256, 4096)
GATED = [(name, tokens) for name in LAYERS for tokens in TOKENS if name != "gpt-oss" or tokens == 1]


@pytest.mark.sm90
@pytest.mark.parametrize(("name", "tokens"), GATED)
def test_a_layer_is_not_slower(name, tokens, monkeypatch):
    """Interleaved with the same layer without gates, a routing in each call: 3 % are noise."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other processes use the GPU")
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    kind, count, k, h, i, group = LAYERS[name]
    monkeypatch.setattr(experts, "GROUP", group)
    form = "transformers_batched" if tokens == 1 else "transformers_grouped"
    with torch.device("cuda"):
        model = kind("int4_words", form, e=count, h=h, i=i)
    routes = [tuple(t.cuda() for t in route(tokens, count, k, h)) for _ in range(8)]

    def replay() -> Replay:
        torch.compiler.reset()
        run = torch.compile(model, backend="inductor_quant", options=OPTIONS)
        with torch.no_grad():
            run(*routes[0])
            return Replay([functools.partial(run, *each) for each in routes], "cuda")

    with collect() as report:
        with_gate = replay()
    assert any(kernel.gate for kernel in report.kernels)
    monkeypatch.setattr(graph_pass, "gate_in_experts", lambda graph: 0)
    without = replay()
    times = [(with_gate.seconds(), without.seconds()) for _ in range(15)]
    ours, before = (1e6 * statistics.median(each) for each in zip(*times, strict=True))
    print(f"{name}, {tokens} tokens: {ours:.1f} us, {before:.1f} without")
    assert ours <= 1.03 * before
