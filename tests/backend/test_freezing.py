"""Parameters frozen before Inductor's passes: matched all the same, and no dense weight is kept.

What the passes made runs eagerly here; the constants of the graph are looked at.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._inductor import config

import inductor_quant
from inductor_quant import backend
from inductor_quant._compat import inductor as compat
from inductor_quant.errors import RequirementError
from inductor_quant.patterns.fusion import concat_weights
from inductor_quant.patterns.graph_pass import EARLY_SLOT, SLOT
from tests.support.graphs.post_grad import calls
from tests.support.producers import activation, blocks, fp8
from tests.support.producers.registry import GIVEN, need, need_package
from tests.support.spellings.quantizers import QUANTIZERS

pytestmark = pytest.mark.compiles

WEIGHT_ONLY = torch.ops.inductor_quant.weight_only.default
K, N = 256, 128


def run(module, x, *, freezing=True, backend="inductor_quant", **options):
    options = {f"inductor_quant.{k}": v for k, v in {"on_error": "raise", **options}.items()}
    as_if_triton = mock.patch("inductor_quant._compat.inductor.runs_triton", return_value=True)
    frozen = config.patch(freezing=freezing, force_disable_caches=True)
    torch._dynamo.reset()
    with torch.no_grad(), frozen, as_if_triton, inductor_quant.collect() as report:
        result = torch.compile(module, backend=backend, options=options)(x)
    return result, report


def constants(gm):
    return [getattr(gm, node.target) for node in gm.graph.nodes if node.op == "get_attr"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("producer", GIVEN, ids=str)
def test_a_frozen_layer_is_matched_as_any_other_and_stays_packed(graphs, producer):
    need(producer)
    module = producer.make(k=K, n=N)
    rows = min(producer.max_rows or 32, 32)
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(0)).to(producer.dtypes[0])
    with torch.no_grad():
        eager = module(x)
    plain, report = run(module, x, freezing=False)
    frozen, frozen_report = run(module, x)
    assert [str(m.spec) for m in frozen_report.matches] == [str(m.spec) for m in report.matches]
    assert len(frozen_report.matches) == 1
    assert frozen_report.rejections == []
    assert torch.equal(frozen, plain)
    assert torch.allclose(frozen.float(), eager.float(), rtol=0.05, atol=0.05)
    # (a bias in its place is the same in both)
    dense = [t for t in constants(graphs[-1]) if t.is_floating_point() and t.numel() >= K * N]
    assert [t for t in dense if t.element_size() > 1] == []
    assert max(t.nbytes for t in constants(graphs[-1])) <= K * N


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("producer", "rows"),
    [
        *((producer, 32) for producer in activation.GIVEN),
        *((p, 2) for p in activation.GIVEN if p.name in ("gpt_fast", "torchao_dyn_sym")),
    ],
    ids=str,
)
def test_a_frozen_w8a8_layer_is_matched(graphs, producer, rows):
    """Its literals (a range, a zero) are read while Inductor traces with fake tensors."""
    need_package(producer.needs)
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(0)).to(producer.dtype)
    module = producer.make(x)
    with activation.integer_products():
        plain, report = run(module, x, freezing=False)
        frozen, frozen_report = run(module, x)
    assert [match.family for match in frozen_report.matches] == ["w8a8"]
    assert str(frozen_report.matches[0].spec) == str(report.matches[0].spec)
    assert torch.equal(frozen, plain)
    assert {t.dtype for t in constants(graphs[-1]) if t.dim() == 2 and 1 not in t.shape} == {
        torch.int8
    }


@pytest.mark.parametrize("kind", [blocks.Sparse, blocks.Channels])
def test_a_frozen_weight_of_blocks_stays_in_blocks(graphs, kind):
    module, x = kind(), torch.randn(5, blocks.K).half()
    plain, report = run(module, x, freezing=False)
    frozen, frozen_report = run(module, x)
    assert [match.family for match in frozen_report.matches] == ["block_sparse"]
    assert str(frozen_report.matches[0].spec) == str(report.matches[0].spec)
    assert torch.equal(frozen, plain)
    assert all(t.numel() < blocks.N * blocks.K for t in constants(graphs[-1]))


FP8 = ("torchao rows", "loop", "rows by recipe", "compressed token", "compressed group")


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FP8)
def test_a_frozen_fp8_layer_is_matched(graphs, name):
    if not name.startswith(("loop", "rows")):
        need_package("torchao" if "torchao" in name else "compressed_tensors")
    make, spec = fp8.LAYERS[name]
    with torch.no_grad():
        module = make()
    x = torch.randn(2, 16, fp8.K, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain, _ = run(module, x, freezing=False)
    frozen, report = run(module, x)
    assert [str(match.spec) for match in report.matches] == [spec]
    assert torch.equal(frozen, plain)
    large = [t for t in constants(graphs[-1]) if t.numel() > fp8.K]
    assert [t.dtype for t in large] == [torch.float8_e4m3fn]


def test_without_the_early_slot_the_weight_would_be_dense(graphs, monkeypatch):
    """The slot is what keeps it packed."""
    monkeypatch.setattr(compat, "is_freezing", lambda: False)
    [producer] = [p for p in GIVEN if p.name == "gptq_gm_4b_g64_base"]
    _, report = run(producer.make(k=K, n=N), torch.randn(4, K).half())
    assert report.matches == []
    assert max(t.nbytes for t in constants(graphs[-1])) == 2 * K * N


def test_rejections_are_reported_once_and_requirements_hold(graphs):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(64, 48, dtype=torch.int8))
            self.linear = torch.nn.Linear(64, 48)

        def forward(self, a):
            return torch._int_mm(a, self.weight), self.linear(a.float())

    a = torch.ones(32, 64, dtype=torch.int8)
    _, report = run(Model(), a)
    assert [rejection.code for rejection in report.rejections] == ["no_scale"]
    assert len(report.decisions) == 2
    with pytest.raises(Exception) as raised:
        run(Model(), a, require={"w8a8": 1})
    assert RequirementError.__name__ in repr(raised.value) or "require asks" in str(raised.value)


def test_a_weight_that_freezing_computes_is_what_it_becomes(graphs):
    """Fake-quantized: dense. Quantized to int8 in the graph: stored."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(48, 64))

        def forward(self, a):
            codes = (self.weight * 32).round().clamp(-8, 7)
            product = torch._int_mm(a, codes.to(torch.int8).t())
            return a.float() @ (codes / 32).t(), product.float() * 0.125

    _, report = run(Model(), torch.ones(32, 64, dtype=torch.int8))
    assert [match.family for match in report.matches] == ["w8a8"]
    assert report.rejections == []


def test_a_training_graph_is_left_to_the_later_slot(graphs):
    """With gradients on, Inductor freezes nothing."""
    torch.manual_seed(0)
    module, x = QUANTIZERS[1](64, 48), torch.randn(32, 64)
    with config.patch(freezing=True, force_disable_caches=True), inductor_quant.collect() as report:
        as_if_triton = mock.patch("inductor_quant._compat.inductor.runs_triton", return_value=True)
        with as_if_triton:
            torch.compile(module, backend="inductor_quant")(x)
    assert len(report.matches) == 1
    assert constants(graphs[-1]) == []


def test_a_canonical_op_of_constants_is_not_folded(graphs):
    """Nothing is saved by it, and a product with a constant would be computed by the reference."""
    [producer] = [p for p in GIVEN if p.name == "gptq_gm_4b_g64_base"]
    module = producer.make(k=K, n=N)

    class Constant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module
            self.register_buffer("x", torch.randn(4, K).half())

        def forward(self, y):
            return self.layer(self.x) + y

    run(Constant(), torch.zeros(4, N).half())
    assert len(calls(graphs[-1], WEIGHT_ONLY)) == 1


def test_users_passes_in_the_early_slot_stay():
    def theirs(graph):
        pass

    with config.patch(freezing=True):
        patched = backend.patches({EARLY_SLOT: theirs}, inductor_quant.Options())
    assert compat.passes_in(patched[EARLY_SLOT])[0] is theirs
    assert len(compat.passes_in(patched[EARLY_SLOT])) == 2
    assert EARLY_SLOT not in backend.patches({}, inductor_quant.Options())


def test_enable_takes_both_slots_and_disable_gives_them_back():
    before = [getattr(config, slot) for slot in (EARLY_SLOT, SLOT)]
    with inductor_quant.backend.enabled():
        for slot in (EARLY_SLOT, SLOT):
            ours = backend._ambient_pass(is_early=slot == EARLY_SLOT)
            assert ours in compat.passes_in(getattr(config, slot))
    assert [getattr(config, slot) for slot in (EARLY_SLOT, SLOT)] == before


def test_a_frozen_weight_that_lies_along_n_is_kept_along_k_alone(graphs):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.randint(-128, 128, (64, 48), dtype=torch.int8))

        def forward(self, x):
            a = (x / 0.1).round().clamp(-128, 127).to(torch.int8)
            return torch._int_mm(a, self.weight).float() * 0.1

    module, x = Layer(), torch.randn(20, 64)
    result, report = run(module, x)
    assert [match.family for match in report.matches] == ["w8a8"]
    assert torch.equal(result, module(x))
    [weight] = [t for t in constants(graphs[-1]) if t.dtype == torch.int8]
    assert sorted(weight.stride()) == [1, 64]


class Attention(torch.nn.Module):
    """q, k and v of one activation, and one that is an input of the graph."""

    def __init__(self, bias=True, other_scale=False):
        super().__init__()
        for name, n in (("q", 48), ("k", 16), ("v", 16)):
            weight = torch.randint(-128, 128, (n, 64), dtype=torch.int8)
            self.register_buffer(f"{name}_weight", weight)
            self.register_buffer(f"{name}_scale", torch.rand(n) * 0.01)
            self.register_buffer(f"{name}_bias", torch.randn(n))
        self.bias, self.other_scale = bias, other_scale

    def forward(self, x, other):
        scale = x.abs().amax(-1, keepdim=True) / 127
        a = (x / scale).round().clamp(-128, 127).to(torch.int8)

        def part(name, weight):
            out = torch._int_mm(a, weight.t()).float() * scale * getattr(self, f"{name}_scale")
            return out + getattr(self, f"{name}_bias") if self.bias or name == "v" else out

        q, k, v = (part(name, getattr(self, f"{name}_weight")) for name in "qkv")
        return -q, torch.tanh(k), v * 2, part("k", other)


class Strided(Attention):
    """What it returns is contiguous: a caller may view it as he likes. So is what as_strided reads,
    which knows the strides."""

    def forward(self, x, other):
        a = x.round().clamp(-128, 127).to(torch.int8)
        k, v, q = (
            torch._int_mm(a, getattr(self, f"{name}_weight").t()) * getattr(self, f"{name}_scale")
            for name in "kvq"
        )
        return k.view(4, 5, 16), torch.tanh(v), q.as_strided((20, 40), (48, 1)) + 1


@pytest.mark.quick
@pytest.mark.parametrize(("bias", "count"), [(True, 2), (False, 3)])
def test_frozen_gemms_of_one_activation_are_one_with_few_rows(graphs, bias, count):
    """Those with the same operands; not one whose weight is an input."""
    torch.manual_seed(0)
    module, x = Attention(bias), torch.randn(20, 64)
    other = torch.randint(-128, 128, (16, 64), dtype=torch.int8)
    result, report = run_all(module, x, other)
    assert len(report.matches) == 4
    assert len(calls(graphs[-1], torch.ops.inductor_quant.w8a8.default)) == count
    for got, want in zip(result, module(x, other), strict=True):
        assert torch.equal(got, want)


def test_what_is_read_by_its_strides_is_no_part_of_another(graphs):
    module, x = Strided(), torch.randn(20, 64)
    other = torch.randint(-128, 128, (16, 64), dtype=torch.int8)
    result, _ = run_all(module, x, other)
    assert len(calls(graphs[-1], torch.ops.inductor_quant.w8a8.default)) == 3
    assert all(tensor.is_contiguous() for tensor in result)
    for got, want in zip(result, module(x, other), strict=True):
        assert torch.equal(got, want)


def test_with_many_rows_or_columns_each_has_its_own(graphs, monkeypatch):
    monkeypatch.setattr(concat_weights, "MAX_N", 79)
    other = torch.randint(-128, 128, (16, 64), dtype=torch.int8)
    _, report = run_all(Attention(), torch.randn(20, 64), other)
    monkeypatch.setattr(concat_weights, "MAX_N", 80)
    _, _ = run_all(Attention(), torch.randn(concat_weights.MAX_M + 1, 64), other)
    assert len(report.matches) == 4
    op = torch.ops.inductor_quant.w8a8.default
    assert [len(calls(gm, op)) for gm in graphs] == [4, 4]


def run_all(module, *inputs):
    as_if_triton = mock.patch("inductor_quant._compat.inductor.runs_triton", return_value=True)
    frozen = config.patch(freezing=True, force_disable_caches=True)
    torch._dynamo.reset()
    options = {"inductor_quant.on_error": "raise", "inductor_quant.horizontal_fusion": False}
    with torch.no_grad(), frozen, as_if_triton, inductor_quant.collect() as report:
        return torch.compile(module, backend="inductor_quant", options=options)(*inputs), report
