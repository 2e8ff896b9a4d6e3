"""Common subexpressions: GEMMs of one tensor quantize it once, and nothing else is merged."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

from inductor_quant.ops.fusion import quantize, row_reduce
from inductor_quant.options import Options
from inductor_quant.patterns.fusion.cse import eliminate_common_subexpressions
from inductor_quant.patterns.matching.value_numbering import Numbering
from tests.support.gemms.generated import generate
from tests.support.graphs.post_grad import W8A8, EagerBackend, Rewrite, capture, count
from tests.support.producers.real import unchanged_inductor_config
from tests.support.sampling import sampled
from tests.support.spellings.int8 import bf16
from tests.support.spellings.quantizers import QUANTIZERS, Int8Linear, TorchaoLinear

aten = torch.ops.aten
K, N = 40, 24
EACH_ALONE = Options(on_error="raise", horizontal_fusion=False, fuse_quantization=False)


class Attention(nn.Module):
    """Three layers of one input, and one layer of their results."""

    def __init__(self, layer: type[Int8Linear]) -> None:
        super().__init__()
        self.q, self.k, self.v = (layer(K, N) for _ in range(3))
        self.o = layer(N, K, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))
        return y


def quantizations(gm: fx.GraphModule) -> int:
    return count(gm, aten.round.default) + count(gm, quantize.op)


def reductions(gm: fx.GraphModule) -> int:
    return count(gm, row_reduce.op) + count(gm, aten.amax.default) + count(gm, aten.amin.default)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("layer", "shape"),
    sampled(itertools.product(QUANTIZERS, [(7, K), (1, K), (2, 3, K)]), every=4),  # each of both
)
def test_q_k_v_share_one_quantization(layer: type[Int8Linear], shape: tuple[int, ...]) -> None:
    if len(shape) > 2 and layer.__name__ == "GptFastLinear":
        shape = (6, K)
    x = torch.randn(*shape, dtype=bf16)
    _, [rewrite] = capture(Attention(layer), [x], options=EACH_ALONE)
    assert len(rewrite.report.matches) == 4
    assert quantizations(rewrite.before) == 4
    assert quantizations(rewrite.after) == 2
    assert reductions(rewrite.before) == (8 if layer is TorchaoLinear else 4)
    assert reductions(rewrite.after) == 2
    q, k, v, _ = (node for node in rewrite.after.graph.nodes if node.target == W8A8)
    assert q.args[0] is k.args[0] is v.args[0]
    assert q.args[2] is k.args[2] is v.args[2]
    rewrite.after.graph.lint()


def test_merging_changes_no_bit() -> None:
    model, x = Attention(TorchaoLinear), torch.randn(7, K, dtype=bf16)
    shared, _ = capture(model, [x])
    torch._dynamo.reset()
    with mock.patch(
        "inductor_quant.patterns.graph_pass.eliminate_common_subexpressions", return_value=0
    ):
        apart, [rewrite] = capture(model, [x])
    assert quantizations(rewrite.after) == 4
    assert torch.equal(shared, apart)


def test_a_dynamic_m_is_merged_too() -> None:
    backend = EagerBackend()
    compiled = torch.compile(Attention(TorchaoLinear), backend=backend, dynamic=True)
    for rows in (5, 9):
        compiled(torch.randn(2, rows, K, dtype=bf16))
    [rewrite] = backend.rewrites
    assert quantizations(rewrite.after) == 2


@pytest.mark.compiles
def test_the_generated_code_quantizes_once() -> None:
    """One kernel reduces and quantizes, and three GEMMs read its result."""

    def fn(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        a, b, c = (product(x, w.t()) for w in weights)
        return a * b + c

    def make(device: str) -> tuple[torch.Tensor, ...]:
        x = torch.empty(64, 256, dtype=bf16, device=device)
        return x, *(torch.empty(128, 256, dtype=torch.int8, device=device) for _ in "qkv")

    code = generate(fn, make, horizontal_fusion=False)
    body = code.wrapper.split("def call", 1)[1].split("def benchmark", 1)[0]
    calls = Counter(re.findall(r"(triton_[a-z]+)_\w+\.run\(", body))
    assert (calls["triton_per"] + calls["triton_red"], calls["triton_tem"]) == (1, 3)
    assert sum(calls.values()) == 4, calls  # the products of the results are an epilogue


@pytest.mark.filterwarnings("ignore")
def test_a_llama_of_torchao_quantizes_five_times_for_its_eight_gemms() -> None:
    """A layer: q, k and v share one, gate and up another, o and down have their own. One more for
    the head."""
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    from torchao import quantization

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(bf16).eval().requires_grad_(False)

    def logits(ids: torch.Tensor) -> Any:
        return model(ids, use_cache=False).logits

    intmm = "torchao.kernel.intmm"
    with (
        warnings.catch_warnings(),
        unchanged_inductor_config(),
        mock.patch(f"{intmm}._cpu_is_amx_tile_supported", return_value=False),
        mock.patch(f"{intmm}._cpu_is_vnni_supported", return_value=False),
    ):
        warnings.simplefilter("ignore")
        quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
        ids = torch.randint(0, 128, (1, 16))
        want = logits(ids)
        got, [rewrite] = capture(logits, [ids], options=EACH_ALONE)
    assert len(rewrite.report.matches) == count(rewrite.after, W8A8) == 8
    assert not rewrite.codes
    assert (quantizations(rewrite.before), quantizations(rewrite.after)) == (8, 5)
    assert (reductions(rewrite.before), reductions(rewrite.after)) == (16, 5)
    assert (got.double() - want.double()).square().mean() < 1e-3 * want.double().square().mean()


# ------------------------------------------------------------------------------------------
# what must not be merged


def shared(fn: Any, *args: Any) -> Rewrite:
    _, [rewrite] = capture(fn, list(args))
    return rewrite


def quantized(x: torch.Tensor, limit: float = 127) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / limit
    return (x / scale).round().to(torch.int8), scale


def product(x: torch.Tensor, w: torch.Tensor, limit: float = 127) -> torch.Tensor:
    q, scale = quantized(x, limit)
    return torch._int_mm(q, w) * scale


def operands() -> list[torch.Tensor]:
    return [torch.randn(6, K), *(torch.randint(-9, 9, (K, N), dtype=torch.int8) for _ in "ab")]


def test_another_divisor_is_another_quantization() -> None:
    rewrite = shared(lambda x, v, w: product(x, v) + product(x, w, 127.5), *operands())
    assert quantizations(rewrite.after) == 2


def test_another_tensor_is_another_quantization() -> None:
    rewrite = shared(lambda x, v, w: product(x, v) + product(x * 2, w), *operands())
    assert quantizations(rewrite.after) == 2


def test_what_is_written_to_in_between_is_read_again() -> None:
    def fn(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = product(x, v)
        x.mul_(2)
        return y + product(x, w)

    arguments = operands()
    want = fn(arguments[0].clone(), *arguments[1:])
    got, [rewrite] = capture(fn, arguments)
    assert torch.allclose(got, want)
    assert quantizations(rewrite.after) == 2


def test_dropout_is_drawn_twice() -> None:
    def fn(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        drop = torch.nn.functional.dropout
        return product(drop(x, 0.5), v) + product(drop(x, 0.5), w)

    assert quantizations(shared(fn, *operands()).after) == 2


def test_two_results_stay_two_tensors() -> None:
    """The caller may write to one of them."""

    def fn(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (p, r), (q, s) = quantized(x), quantized(x)
        return torch._int_mm(p, v) * r, torch._int_mm(q, w) * s, p.t(), q.t()

    (*_, p, q), [rewrite] = capture(fn, operands())
    assert torch.equal(p, q)
    assert p.data_ptr() != q.data_ptr()
    assert quantizations(rewrite.after) in (1, 2)


def test_a_graph_without_a_match_stays_as_it_was() -> None:
    def fn(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (p, _), (q, _) = quantized(x), quantized(x)
        return torch._int_mm(p, v) + torch._int_mm(q, w)

    assert shared(fn, *operands()).is_untouched


def built(*calls: tuple[Any, tuple[Any, ...]]) -> list[fx.Node]:
    """Nodes of a graph with one input x [4]; arguments are "x" or "v0", an earlier call."""
    owner = fx.Graph()
    x = owner.placeholder("x")
    x.meta["val"] = torch.zeros(4)
    nodes: list[fx.Node] = []
    for target, args in calls:
        real = tuple(
            x if a == "x" else nodes[int(a[1:])] if isinstance(a, str) else a for a in args
        )
        node = owner.call_function(target, real)
        node.meta["val"] = torch.zeros(4)
        nodes.append(node)
    owner.output(tuple(nodes))
    return nodes


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (0.0, -0.0), (2, 3), (1, True)],
    ids=str,
)
def test_numbers_that_compare_equal_are_not_the_same(one: Any, other: Any) -> None:
    a, b, c = built(*((aten.mul.Tensor, ("x", value)) for value in (one, other, one)))
    numbering = Numbering()
    assert not numbering.equal(a, b)
    assert numbering.equal(a, c)


@pytest.mark.parametrize(
    "call",
    [
        (aten.rand_like.default, ("x",)),
        (aten.bernoulli.p, ("x", 0.5)),
        (aten.native_dropout.default, ("x", 0.5, True)),
        (aten.empty_like.default, ("x",)),
        (aten.add_.Tensor, ("x", 1)),
        (aten.mul.Tensor, ("x", "x"), "in-place"),
    ],
    ids=lambda call: str(call[0]),
)
def test_what_is_no_function_of_its_arguments_is_never_equal(call: Any) -> None:
    calls = [call[:2], call[:2]]
    if len(call) == 3:
        calls.insert(1, (aten.add_.Tensor, ("x", 1)))
    nodes = built(*calls)
    assert not Numbering().equal(nodes[0], nodes[-1])


def test_a_deep_graph_is_numbered_without_recursion() -> None:
    calls: list[Any] = [(aten.neg.default, ("x",))]
    calls += [(aten.neg.default, (f"v{i}",)) for i in range(5000)]
    nodes = built(*calls)
    assert not Numbering().equal(nodes[-1], nodes[-2])


def test_a_second_run_finds_nothing() -> None:
    rewrite = shared(lambda x, v, w: product(x, v) + product(x, w), *operands())
    assert eliminate_common_subexpressions(rewrite.after.graph) == 0


def test_results_of_a_size_that_follows_from_values_stay_two():
    """Each has a symbol of its own."""
    q, scale = torch.randint(-9, 9, (2, 64, 64), dtype=torch.int8), torch.rand(2, 64, 1).to(bf16)

    def product(x, ids, ends):
        rows = x[(ids < 3).nonzero().squeeze(1)]
        return torch._grouped_mm(rows, (q.to(bf16) * scale).transpose(1, 2), offs=ends).sum(0)

    def fn(x, ids, ends):
        return product(x, ids, ends) + product(x * 2, ids, ends)

    args = (
        torch.randn(9, 64).to(bf16),
        torch.tensor([0, 1, 2, 0, 1, 2, 3, 3, 3]),
        torch.tensor([2, 6], dtype=torch.int32),
    )
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got, [rewrite] = capture(fn, args)
    assert len(rewrite.report.matches) == 2
    assert (got - fn(*args)).norm() <= 0.02 * got.norm()


def test_gathers_by_numbers_are_merged():
    """Torch marks them as of a size that follows from values, as a mask's would."""
    q, scale = torch.randint(-9, 9, (2, 64, 64), dtype=torch.int8), torch.rand(2, 64, 1).to(bf16)
    table = torch.tensor([1, 0, 1])

    def fn(x, ids):
        w = q[table[ids]].to(bf16) * scale[table[ids]]
        return torch.bmm(x[:, None], w.transpose(1, 2))

    args = torch.randn(3, 64).to(bf16), torch.tensor([2, 0, 1])
    got, [rewrite] = capture(fn, args)
    assert len(rewrite.report.matches) == 1
    assert (got - fn(*args)).norm() <= 0.02 * got.norm()
