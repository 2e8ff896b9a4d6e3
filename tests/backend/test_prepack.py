"""``prepack_``: the same function in the layout that our kernels read fastest."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm

import inductor_quant
from inductor_quant.prepack.layer import PrepackedLinear
from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate
from tests.support.graphs.post_grad import capture
from tests.support.producers.packed import GptqActOrder, GptqPlusOne
from tests.support.producers.registry import PRODUCERS

bf16, f16 = torch.bfloat16, torch.float16
K = 256
LAYERS = {
    "awq_autoawq_g64": "along N, packed zeros, fp16",
    "int4_along_n": "signed",
    "hqq_like": "halves of N in a byte, float zeros",
    "int8_stored_by_k": "int8 [K, N]",
    "gptq_4b_act_order": "groups of any k",
}
KEPT = ("int8_channel_in_f32", "gptq_4b_list")


class HqqLike(nn.Module):
    def __init__(self):
        super().__init__()
        groups = K // 64
        self.register_buffer("halves", torch.randint(0, 256, (K // 2, K), dtype=torch.uint8))
        self.register_buffer("zeros", torch.rand(K, groups, 1).to(bf16) * 15)
        self.register_buffer("scales", torch.rand(K, groups, 1).to(bf16) * 0.01)

    def forward(self, x):
        q = torch.cat([self.halves >> 4, self.halves & 15]).to(bf16).unflatten(1, (-1, 64))
        return x @ ((q - self.zeros) * self.scales).flatten(1).t()


def model_of(names):
    layers = [
        HqqLike() if name == "hqq_like" else PRODUCERS[name].make(bf16, K, K, bias=i % 2 == 0)
        for i, name in enumerate(names)
    ]
    return nn.Sequential(*layers, nn.Linear(K, 8, dtype=bf16))


@pytest.mark.compiles
def test_layers_are_replaced_in_place_and_compute_the_same():
    model = model_of([*LAYERS, *KEPT])
    x = torch.randn(2, 3, K, dtype=bf16)
    with torch.no_grad():
        want = [x]
        for layer in model:
            want.append(layer(want[-1]))
        assert inductor_quant.prepack_(model, x) == [str(i) for i in range(len(LAYERS))]
        for i in range(len(LAYERS)):
            layer = model[i]
            assert isinstance(layer.prepacked, PrepackedLinear)
            error = (layer(want[i]) - want[i + 1]).float().norm() / want[i + 1].float().norm()
            assert error < 5e-3, i
            assert layer.prepacked.qdata.nbytes == K * K * layer.prepacked.bits // 8
            assert layer.prepacked.bits == (8 if i == 3 else 4)
    assert inductor_quant.prepack_(model, x) == []  # once


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize("change", [None, "unequal", "unused"])
def test_groups_of_any_k_become_neighbours_if_all_have_as_many(change):
    layer = PRODUCERS["gptq_4b_act_order"].make(f16, K, K)
    if change == "unequal":
        layer.g_idx[layer.g_idx.argmax()] = 0
    if change == "unused":
        layer.g_idx.clamp_(max=2)
    model, held = nn.Sequential(layer), copy.deepcopy(dict(layer.named_buffers()))
    x = torch.randn(3, K).half()
    with torch.no_grad():
        want = model(x)
        assert inductor_quant.prepack_(model, x) == ([] if change else ["0"])
        if change:
            assert torch.equal(model(x), want)
            return
        order = layer.prepacked.order.long()
        assert torch.equal(held["g_idx"][order], held["g_idx"].sort().values)
        exact = x.double() @ layer.dense().half().double().t() + layer.bias
        torch.testing.assert_close(model(x).double(), exact, rtol=2e-3, atol=5e-3)
        for name, tensor in held.items():
            assert torch.equal(getattr(layer, name), tensor)
            assert getattr(layer, name).dtype == tensor.dtype
        assert sum(t.nbytes for t in layer.buffers()) <= sum(t.nbytes for t in held.values())
        # another layer with another order
        other = nn.Sequential(PRODUCERS["gptq_4b_act_order"].make(f16, K, K))
        other[0].g_idx.copy_(other[0].g_idx.flip(0))
        assert inductor_quant.prepack_(other, x) == ["0"]
        other.load_state_dict(model.state_dict())
        assert torch.equal(other[0].g_idx, held["g_idx"])
        assert torch.equal(copy.deepcopy(other)(x), model(x))


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize("is_reversed", [False, True])
def test_groups_that_repeat_become_neighbours(is_reversed):
    """k % groups is a rule, no list, for all that read it."""
    layer = PRODUCERS["gptq_4b_act_order"].make(f16, K, K)
    groups = len(layer.scales)
    cycle = torch.arange(K) % groups
    layer.g_idx.copy_(groups - 1 - cycle if is_reversed else cycle)
    held, w = copy.deepcopy(dict(layer.named_buffers())), layer.dense()
    x = torch.eye(K).half()
    with torch.no_grad():
        want = layer(x)
        assert inductor_quant.prepack_(nn.Sequential(layer), x[:3]) == ["0"]
        order = held["g_idx"].sort(stable=True).indices
        assert torch.equal(layer.prepacked.order.long(), order)
        assert torch.equal(layer.prepacked(x), want)  # a row of W each
        q, zeros = layer.prepacked.unpacked()
        zeros, scales = (t.repeat_interleave(K // groups, 0) for t in (zeros, layer.scales))
        assert torch.equal((q - zeros) * scales.double(), w.t()[order])
        for name, tensor in held.items():
            assert torch.equal(getattr(layer, name), tensor)
            assert getattr(layer, name).dtype == tensor.dtype
        assert sum(t.nbytes for t in layer.buffers()) <= sum(t.nbytes for t in held.values())


@pytest.mark.compiles
def test_a_layer_that_inductor_would_pad_is_prepacked(monkeypatch):
    """On a GPU a benchmark decides whether M is padded; here it always is."""
    monkeypatch.setattr(pad_mm, "check_device", lambda *tensors: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    model = nn.Sequential(HqqLike())
    with inductor_config.patch(force_shape_pad=True):
        assert inductor_quant.prepack_(model, torch.randn(3, K, dtype=bf16)) == ["0"]


class OfThreeDimensions(HqqLike):
    def forward(self, x):
        out = super().forward(x)
        return out.mean(1, keepdim=True) if out.dim() == 3 else out


class Scaled(HqqLike):
    def forward(self, x, scale=None):
        out = super().forward(x)
        return out if scale is None else out * scale


class ScalesByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Scaled()

    def forward(self, x):
        return self.layer(x) + self.layer(x, scale=2.0)


class ByRows(HqqLike):
    def forward(self, x):
        out = super().forward(x)
        return out.clamp(-1, 1) if x.shape[0] > 2 else out


class OfOneRow(HqqLike):
    def forward(self, x):
        out = super().forward(x)
        return out * 2 if x.shape[0] == 1 else out


class Positions(HqqLike):  # of one row it looks like a bias of the columns
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.randn(9, K).to(bf16))

    def forward(self, x):
        return super().forward(x) + self.positions[: x.shape[-2]]


@pytest.mark.compiles
@pytest.mark.parametrize("kind", [ByRows, OfOneRow, Positions, OfThreeDimensions, ScalesByName])
def test_a_module_that_is_more_than_its_layer_stays(kind):
    model = nn.Sequential(kind())
    x = torch.randn(2, 3, K, dtype=bf16)
    with torch.no_grad():
        want = model(x)
        assert inductor_quant.prepack_(model, x[:, :1]) == []
        assert torch.equal(model(x), want)


class Dropped(Scaled):
    def forward(self, x, scale=None):
        return nn.functional.dropout(super().forward(x, scale), 0.5, self.training)


@pytest.fixture(scope="module")
def dropped():
    """A module before, and after, it was read in eval mode, for bf16 with two dimensions."""
    before = Dropped().eval()
    after = nn.Sequential(copy.deepcopy(before))
    tensors = {t.data_ptr(): t.nbytes for t in after.buffers()}
    assert inductor_quant.prepack_(after, torch.randn(1, K, dtype=bf16)) == ["0"]
    assert sum(t.nbytes for t in after.buffers()) <= sum(tensors.values())
    return before, after[0]


CALLS = {
    "what it was read for": lambda layer, x: layer(x),
    "another argument": lambda layer, x: layer(x, 2.0),
    "a keyword": lambda layer, x: layer(x=x),
    "another dtype": lambda layer, x: layer(x.float().to(torch.float16).to(bf16).view(2, 2, K)),
    "training": lambda layer, x: layer.train()(x),
    "autocast": lambda layer, x: autocast(layer, x),
    "read": lambda layer, x: x.to(layer.halves.dtype) * layer.zeros.flatten(1).sum(),
    "deepcopy": lambda layer, x: copy.deepcopy(layer)(x, scale=1.0),
    "pickle": lambda layer, x: pickle.loads(pickle.dumps(layer))(x),
}


def autocast(layer, x):
    with torch.autocast("cpu", torch.float16):
        return layer(x)


@pytest.mark.compiles
@pytest.mark.parametrize("call", CALLS)
def test_every_call_computes_what_it_did_before(dropped, call):
    x = torch.randn(4, K).to(bf16)
    results = []
    with torch.no_grad():
        for layer in dropped:
            layer.eval()
            torch.manual_seed(0)
            results.append(CALLS[call](layer, x))
    want, got = results
    assert got.dtype == want.dtype
    assert (got - want).float().norm() <= 5e-3 * want.float().norm()
    assert isinstance(dropped[1], Dropped)


@pytest.mark.compiles
def test_a_prepacked_layer_is_one_graph_where_a_default_device_is_set():
    layer, x = nn.Sequential(HqqLike()), torch.randn(3, K).to(bf16)
    assert inductor_quant.prepack_(layer, x) == ["0"]
    with torch.no_grad(), torch.device("cpu"):
        got, [rewrite] = capture(layer, (x,))
        assert len(rewrite.report.matches) == 1
        assert torch.equal(got, layer(x))


@pytest.mark.compiles
def test_a_state_dict_makes_a_round_trip(dropped):
    layer = dropped[1]
    other = copy.deepcopy(layer)
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.halves, dropped[0].halves)


class PlusOne(GptqActOrder, GptqPlusOne):
    """Zero points from 1 to 16."""


@pytest.mark.compiles
def test_a_state_dict_suits_layers_with_other_zero_points():
    torch.manual_seed(0)
    layers = [PlusOne(f16, K, K, False).eval() for _ in range(2)]
    layers[0].qzeros &= 0x77777777  # up to 8
    x = torch.randn(2, K).half()
    with torch.no_grad():
        want = layers[1](x)
        for layer in layers:
            assert inductor_quant.prepack_(nn.Sequential(layer), x) == ["0"]
        layers[0].load_state_dict(layers[1].state_dict())
        torch.testing.assert_close(layers[0](x), want, rtol=2e-3, atol=5e-3)
        assert torch.equal(layers[0].qzeros, layers[1].qzeros)


class OfIntegers(HqqLike):
    """Zero points in int32, from ``first`` to ``last``."""

    def __init__(self, first, last):
        super().__init__()
        self.zeros = torch.randint(first, last + 1, self.zeros.shape, dtype=torch.int32)
        self.zeros[0, 0], self.zeros[0, 1] = first, last


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize(
    "ranges", [((0, 9), (10, 20)), ((10, 20), (0, 9)), ((0, 9), (-50, 90)), ((-50, 90), (10, 20))]
)
def test_a_state_dict_suits_layers_whose_zero_points_are_wide(ranges):
    layers = [OfIntegers(*each) for each in ranges]
    held = copy.deepcopy(dict(layers[1].named_buffers()))
    x = torch.randn(2, K, dtype=bf16)
    with torch.no_grad():
        for layer in layers:
            assert inductor_quant.prepack_(nn.Sequential(layer), x) == ["0"]
            assert (layer.prepacked.qzeros is None) == (-50 in layer.zeros)
        want, before = layers[1](x), layers[0](x)
        assert not torch.equal(want, before)
        layers[0].load_state_dict(layers[1].state_dict())
        assert torch.equal(layers[0](x), want)
        assert torch.equal(copy.deepcopy(layers[0])(x), want)
        for name, tensor in held.items():
            assert torch.equal(getattr(layers[0], name), tensor)


@pytest.mark.compiles
def test_wide_zero_points_are_not_loaded_without_what_is_added_to_them():
    layers = [OfIntegers(0, 9), OfIntegers(10, 20)]
    for layer in layers:
        inductor_quant.prepack_(nn.Sequential(layer), torch.randn(2, K, dtype=bf16))
    state = layers[1].state_dict()
    del state["prepacked.zero"]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="qzeros without prepacked"):
            layers[0].load_state_dict(state, strict=strict)


@pytest.mark.compiles
def test_hooks_and_other_names_of_a_module_stay():
    shared = HqqLike()
    shared.register_forward_hook(lambda module, inputs, out: out * 2)
    model = nn.Sequential(shared, shared)
    x = torch.randn(2, K, dtype=bf16)
    with torch.no_grad():
        want = model(x)
        assert inductor_quant.prepack_(model, x) == ["0"]
        assert model[1] is shared
        assert (model(x) - want).float().norm() <= 1e-2 * want.float().norm()


@pytest.mark.compiles
def test_a_tensor_with_two_owners_is_not_doubled():
    model = nn.Sequential(HqqLike(), HqqLike())
    model[1].halves = model[0].halves
    assert inductor_quant.prepack_(model, torch.randn(2, K, dtype=bf16)) == []


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize("name", ["awq_autoawq_g64", "gptq_4b_act_order"])
def test_a_prepacked_layer_is_read_by_the_kernels_for_packed_weights(name):
    prepacked = nn.Sequential(model_of([name])[0].half())
    with torch.no_grad():
        inductor_quant.prepack_(prepacked, torch.randn(2, K).half())
    layer = prepacked[0].prepacked
    names, state = zip(*layer.state_dict().items(), strict=True)
    order = () if layer.order is None else ("order",)
    assert names == ("qdata", "qzeros", "scales", "bias", *order)

    def fn(x, *state):
        return torch.func.functional_call(layer, dict(zip(names, state, strict=True)), x)

    def make(rows, device):
        x = torch.empty(rows, K, dtype=torch.float16, device=device)
        return x, *(torch.empty(t.shape, dtype=t.dtype, device=device) for t in state)

    for rows, kernel in ((3, "weight_only_direct"), (600, "weight_only_mm_sm90")):
        with collect() as report:
            generated = generate(fn, functools.partial(make, rows))
        assert report.kernels[0].chosen.startswith(kernel)
        assert len(generated.kernels) == 1 + len(order)  # x is gathered once
