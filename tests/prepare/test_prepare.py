"""``prepare_``: what is replaced, what stays, what the report says, and the way back."""

from __future__ import annotations

import copy
import io
import sys
import types
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize

import inductor_quant
from inductor_quant.prepare import compressed_tensors
from inductor_quant.prepare.plain import PlainLinear
from inductor_quant.prepare.sparse_bsr import MANUAL
from inductor_quant.report import advice
from inductor_quant.spec.decisions import Rejection, RejectionCode
from tests.support.checkpoints import stand_ins
from tests.support.checkpoints.models import Distance
from tests.support.graphs.post_grad import capture
from tests.support.producers.registry import need_package

K, N = 256, 128
SLOW = pytest.mark.slow


def packed(kind: str = "gptq", bias: bool = True, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = nn.Linear(K, N, bias=bias, dtype=torch.bfloat16)
    return stand_ins.packed(kind, linear.requires_grad_(False), **options)


def x() -> torch.Tensor:
    return torch.randn(3, 4, K, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("gptq", 2), ("gptq", 4), ("gptq", 8), ("awq", 4), pytest.param("gptq", 3, marks=SLOW)],
)
def test_a_layer_is_replaced_by_one_of_the_same_tensors_and_results(kind: str, bits: int) -> None:
    model = nn.Sequential(packed(kind, bits=bits))
    wanted, memory = model(x()), model[0].qweight.data_ptr()
    result = inductor_quant.prepare_(model)
    layer = {"gptq": "TorchLinear", "awq": "AwqTorchLinear"}[kind]
    assert str(result.lines[0]) == f"done  0 ({layer}): computes the same, bit for bit"
    assert isinstance(model[0], PlainLinear)
    assert model[0].qweight.data_ptr() == memory
    assert torch.equal(model(x()), wanted)
    _, [rewrite] = capture(model, [x()], read_tables=False)
    [match] = rewrite.report.matches
    assert f"u{bits}/128x1" in str(match.spec)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("gptq", {"act_order": True}), ("awq", {}), pytest.param("gptq", {"bits": 3}, marks=SLOW)],
)
def test_the_default_device_does_not_matter(kind: str, options: dict[str, Any]) -> None:
    """Of a user who calls ``torch.set_default_device``; up to torch 2.13 ``unflatten`` would break
    the graph there."""
    model = nn.Sequential(packed(kind, **options))
    wanted = model(x())
    with torch.device("meta"):
        result = inductor_quant.prepare_(model)
    assert str(result.lines[0]).endswith("computes the same, bit for bit")
    with torch.device("cpu"):
        got, [rewrite] = capture(model, [x()], read_tables=False)
    assert len(rewrite.report.matches) == 1
    assert Distance.of(got, wanted).rms < 1e-2


@pytest.mark.parametrize("kind", ["gptq", "awq"])
@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 0, K), (2, 1, 3, K)])
def test_x_has_any_dimensions(kind: str, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(packed(kind))
    given = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    wanted = model(given)
    inductor_quant.prepare_(model)
    assert torch.equal(model(given), wanted)


def test_act_order_is_kept() -> None:
    model = nn.Sequential(packed(act_order=True))
    wanted = model(x())
    inductor_quant.prepare_(model)
    assert torch.equal(model(x()), wanted)
    assert model[0].g_idx is not None


def test_a_second_call_does_nothing_and_undo_takes_all_back() -> None:
    layer = packed()
    state, wanted = dict(vars(layer)), layer(x())
    first = inductor_quant.prepare_(layer)  # the root itself
    assert len(first.done) == 1
    assert not inductor_quant.prepare_(layer).lines
    first.undo()
    assert type(layer) is stand_ins.TorchLinear
    assert vars(layer).keys() == {*state, "key"}  # which its forward writes
    assert torch.equal(layer(x()), wanted)


def test_hooks_of_the_user_stay() -> None:
    layer, seen = packed(), []
    layer.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    inductor_quant.prepare_(layer)
    layer(x())
    assert len(seen) == 1
    assert issubclass(seen[0], PlainLinear)


def test_a_layer_with_two_owners_is_replaced_once() -> None:
    shared = packed()
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert len(inductor_quant.prepare_(model).done) == 1
    assert model["b"][0] is model["a"] is shared


def test_a_prepared_model_is_copied_and_saved() -> None:
    layer = packed()
    inductor_quant.prepare_(layer)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    for other in (copy.deepcopy(layer), torch.load(stored, weights_only=False)):
        assert torch.equal(other(x()), layer(x()))
    assert {"qweight", "qzeros", "scales", "bias"} <= {*layer.state_dict()}


def test_prepack_follows() -> None:
    model = nn.Sequential(packed("awq"))
    inductor_quant.prepare_(model)
    wanted = model(x())
    assert inductor_quant.prepack_(model, x()) == ["0"]
    assert Distance.of(model(x()), wanted).rms < 5e-3


# ------------------------------------------------------------------------------------------
# what stays


class OtherOrder(stand_ins.AwqTorchLinear):
    """A layout that the rule does not know, in a layer that it takes for another."""

    def dequantize_weight(self) -> torch.Tensor:
        return super().dequantize_weight().flip(1)


class OwnForward(stand_ins.TorchLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


for _kind in (OtherOrder, OwnForward):
    _kind.__module__ = "gptqmodel.nn_modules.qlinear.other"


def left(model: nn.Module) -> str:
    """The reason of the one module that stays; it computes what it did."""
    wanted = model(x())
    result = inductor_quant.prepare_(model)
    assert not result.done
    assert torch.equal(model(x()), wanted)
    [line] = result.left
    return line.detail


def test_a_layer_that_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = packed("awq")
    packing = sys.modules["gptqmodel.quantization.awq.utils.packing_utils"]
    monkeypatch.setattr(
        packing, "dequantize_gemm", lambda *a: stand_ins.dequantize_gemm(*a).flip(1)
    )
    assert "the plain layer would differ: relative rms difference 1" in left(layer)


def test_a_subclass_with_a_forward_of_its_own_stays() -> None:
    layer = packed()
    layer.__class__ = OwnForward
    assert left(layer) == "no rule for this layer"


def test_a_layer_whose_forward_was_replaced_stays() -> None:
    layer = packed()
    layer.forward = lambda x, old=layer.forward: old(x) * 2
    assert left(layer) == "its forward has been replaced"


def test_an_adapter_stays() -> None:
    layer = packed()
    layer.adapter = nn.Identity()
    assert left(layer) == "it has an adapter"


def test_models_without_values_are_refused() -> None:
    for made in (torch.device("meta"), FakeTensorMode()):
        with made:
            model = nn.Sequential(nn.Linear(8, 8))
        [line] = inductor_quant.prepare_(model).left
        assert "meta" in line.detail or "no values" in line.detail


# ------------------------------------------------------------------------------------------
# hooks


def test_hooks_of_accelerate_go_on_one_device() -> None:
    need_package("accelerate")
    from accelerate import hooks

    model = nn.Sequential(packed(), nn.ReLU())
    wanted = model(x())
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    result = inductor_quant.prepare_(model)
    assert len(result.done) == 3
    assert not any("_hf_hook" in vars(module) for module in model.modules())
    out, [rewrite] = capture(model, [x()])
    assert len(rewrite.report.matches) == 1
    assert Distance.of(out, wanted).rms < 5e-3
    result.undo()
    assert all("_hf_hook" in vars(module) for module in model.modules())
    assert torch.equal(model(x()), wanted)


def test_offloaded_models_are_refused() -> None:
    need_package("accelerate")
    from accelerate import cpu_offload

    model = nn.Sequential(nn.Linear(K, N))
    cpu_offload(model, execution_device=torch.device("cpu"))
    [line] = inductor_quant.prepare_(model).left
    assert "offload" in line.detail
    assert "_hf_hook" in vars(model[0])


# ------------------------------------------------------------------------------------------
# weights that are shared or wrapped need no call


class Int8(nn.Module):
    """Dequantizes, as a parametrization or for an embedding."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Buffer(scale)

    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.to(self.scale.dtype) * self.scale


class Tied(nn.Module):
    """An embedding and a head that share one int8 matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = nn.Buffer(torch.randint(-127, 128, (N, K), dtype=torch.int8))
        self.head, self.dequantize = nn.Linear(K, N, bias=False), Int8(torch.rand(N, 1).bfloat16())
        self.head.weight = nn.Parameter(self.stored, requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.stored[ids].bfloat16() * self.dequantize.scale[ids]
        return nn.functional.linear(rows, self.dequantize(self.head.weight))


def test_a_matrix_shared_by_embedding_and_head() -> None:
    model, ids = Tied(), torch.randint(0, N, (2, 8))
    out, [rewrite] = capture(model, [ids])
    assert len(rewrite.report.matches) == 1
    assert Distance.of(out, model(ids)).rms < 5e-3


def test_a_parametrized_weight() -> None:
    linear = nn.Linear(K, N, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(torch.randint(-127, 128, (N, K), dtype=torch.int8), False)
    dequantize = Int8(torch.rand(N, 1).bfloat16())
    parametrize.register_parametrization(linear, "weight", dequantize, unsafe=True)
    out, [rewrite] = capture(linear, [x()])
    assert len(rewrite.report.matches) == 1
    assert Distance.of(out, linear(x())).rms < 5e-3


# ------------------------------------------------------------------------------------------
# explain


def test_advice_names_the_layers_until_they_are_prepared() -> None:
    model = nn.Sequential(packed(), packed("awq"), nn.Linear(N, N))
    [line] = advice.of([], advice.pending(model), matched=0)
    assert line.startswith("inductor_quant.prepare_(model)")
    assert line.endswith(": 1 TorchLinear, 1 AwqTorchLinear")
    assert not advice.of([], advice.pending(model), matched=2)  # the graph was enough
    inductor_quant.prepare_(model)
    assert not advice.of([], advice.pending(model), matched=0)


def test_advice_says_why_a_layer_is_left() -> None:
    linear = packed()
    linear.bits = 5
    model = nn.Sequential(linear, packed())
    left = advice.left(model)
    [(kind, reason)] = left
    assert kind == "TorchLinear"
    assert reason == inductor_quant.prepare_(model).left[0].detail
    assert advice.of([], Counter(), 0, left) == (f"opaque (1 TorchLinear): {reason}",)
    assert not advice.of([], Counter(), 1, left)


def test_advice_for_codes() -> None:
    rejections = [Rejection(RejectionCode.NUMERICS)] * 2 + [Rejection(RejectionCode.NOT_QUANTIZED)]
    [line] = advice.of(rejections, advice.pending(None), matched=0)
    assert line == 'numerics (2): numerics="default" allows results of fewer roundings'


def sparse_linear(dtype: torch.dtype = torch.float16) -> nn.Linear:
    """1 x 1 blocks of 32 in each second row and column of blocks."""
    draw = torch.Generator().manual_seed(0)
    dense = torch.randn(4, 32, 8, 32, generator=draw)
    dense[::2, :, ::2] = 0
    dense[1::2, :, 1::2] = 0
    layer = nn.Linear(K, N, dtype=dtype).requires_grad_(False)
    weight = dense.view(N, K).to(dtype).to_sparse_bsr(32)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.filterwarnings("ignore:Sparse BSR")
def test_a_sparse_bsr_weight_becomes_blocks_and_tables() -> None:
    layer = sparse_linear()
    model, dense = nn.Sequential(layer), layer.weight.to_dense()
    given = x().half()
    wanted = nn.functional.linear(given.double(), dense.double(), layer.bias.double())
    assert advice.pending(model) == {"Linear (sparse_bsr)": 1}
    [line] = inductor_quant.prepare_(model).done
    assert line.kind == "Linear"
    result, [rewrite] = capture(model, [given], read_tables=True)
    [match] = rewrite.report.matches
    assert (match.family, match.format) == ("block_sparse", "bsr 32x32, 50% zero")
    torch.testing.assert_close(result.double(), wanted, rtol=2e-3, atol=2e-2)
    assert torch.equal(model(given), nn.functional.linear(given, dense, layer.bias))


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = sparse_linear().weight


@pytest.mark.filterwarnings("ignore:Sparse BSR")
def test_of_other_sparse_tensors_it_is_said_what_to_write() -> None:
    model = nn.Sequential(Product(), sparse_linear(torch.float32), sparse_linear())
    lines = advice.by_hand(model)
    assert [line.partition(":")[0] for line in lines] == ["0.weight", "1.weight"]
    assert "index_put((row, col), values)" in lines[0]
    [left] = inductor_quant.prepare_(model).left
    assert left.detail == "a sparse weight of torch.float32, 0 dimensions of batch"
    found = inductor_quant.explain(nn.Sequential(Called()), x().float(), verbose=False)
    assert found.advice == (f"0.weight: {MANUAL}",)


class Called(Product):
    def __init__(self) -> None:
        super().__init__()
        self.weight = sparse_linear(torch.float32).weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_an_activation_of_compressed_tensors_may_have_no_rows(is_symmetric: bool) -> None:
    """An expert without tokens; its range is measured over the whole matrix."""
    args = types.SimpleNamespace(
        strategy="token", group_size=None, dynamic=True, symmetric=is_symmetric, type="int",
        num_bits=8,
    )  # fmt: skip
    quantize = compressed_tensors._Activation(args)
    assert quantize(torch.zeros(0, 64), None, None).shape == (0, 64)
    x = torch.randn(5, 64)
    step = 2 * x.abs().max() / 255 if is_symmetric else (x.max() - x.min()) / 255
    assert 0 < (quantize(x, None, None) - x).abs().max() <= 1.01 * step
