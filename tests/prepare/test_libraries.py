"""Quantized models as their libraries load them: a part of the compatibility matrix."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from torch import nn

import inductor_quant
from inductor_quant.prepare.plain import PlainLinear
from tests.support.checkpoints import matrix, models, stand_ins
from tests.support.checkpoints.libraries import CASES, Case, bitnet, linears, torchao
from tests.support.graphs.post_grad import capture
from tests.support.producers.registry import need_package

BY_NAME = {str(case): case for case in CASES}
IN_CI = ("compressed-tensors-W4A16", "gptqmodel-4_bits,_act-order")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if str(c) in IN_CI else pytest.mark.slow) for c in CASES],
    ids=str,
)
def test_every_linear_of_a_layer_is_matched_in_one_graph(case: Case) -> None:
    need_package(None if case.needs == "stand-in" else case.needs)
    result = matrix.run(case, "qwen3", explains=False)
    assert result.is_good, result
    assert result.distance.top1 > 0.9


def test_the_packed_bytes_of_a_checkpoint_are_kept() -> None:
    need_package("compressed_tensors")
    with models.quiet():
        model = BY_NAME["compressed-tensors-W4A16"].build(models.tiny("llama"))
        stored = {name: t.data_ptr() for name, t in model.state_dict().items()}
        result = inductor_quant.prepare_(model)
        before = {name: t.data_ptr() for name, t in model.state_dict().items()}
        models.eager(model)
    assert len(result.done) == 8  # seven layers, and the hook of the model
    assert before == stored
    after = {name: t.data_ptr() for name, t in model.state_dict().items()}
    assert after == stored
    layers = [m for m in model.modules() if isinstance(m, PlainLinear)]
    assert {layer.weight_packed.dtype for layer in layers} == {torch.int32}
    result.undo()
    assert hasattr(model, "ct_decompress_hook")
    assert len(list(linears(model))) == 7


@pytest.mark.slow
def test_a_model_that_was_called_before_is_one_graph_too() -> None:
    """Decompressed, with an offload cache on every module."""
    need_package("compressed_tensors")
    with models.quiet():
        model = BY_NAME["compressed-tensors-W4A16"].build(models.tiny("llama"))
        wanted = models.eager(model)
        result = inductor_quant.prepare_(model)
        found = models.compiled(model)
    assert (found.graphs, found.breaks) == (1, 0)
    assert "load the model again" in result.done[0].detail
    assert torch.equal(found.logits, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bitsandbytes-NF4,_double", "bitsandbytes-int8,_threshold_0"])
def test_the_graph_alone_is_enough_for_bitsandbytes(name: str) -> None:
    need_package("bitsandbytes")
    case = BY_NAME[name]
    with models.quiet():
        reference = models.eager(case.build(models.tiny("llama")))
        found = models.compiled(case.build(models.tiny("llama")))
    assert found.families == (case.family,) * 7
    assert (found.graphs, found.breaks) == (1, 0)
    assert models.Distance.of(found.logits, reference).rms < case.rms


def test_fine_grained_fp8_for_any_batch_and_sequence() -> None:
    need_package("transformers")
    linear = nn.Linear(256, 128, dtype=torch.bfloat16).requires_grad_(False)
    layer, x = stand_ins.fp8_linear(linear), torch.randn(2, 5, 256).bfloat16()
    where = "transformers.integrations.finegrained_fp8._FINEGRAINED_FP8"
    with torch.no_grad(), mock.patch(where, stand_ins.Hub):
        wanted = layer(x)
        inductor_quant.prepare_(layer)
        out, [rewrite] = capture(layer, [x], dynamic=True)
    assert [match.family for match in rewrite.report.matches] == ["fp8_block"]
    assert models.Distance.of(out, wanted).rms < 2e-3


@pytest.mark.parametrize(("is_fp4", "family"), [(True, "weight_only"), (False, "fp8_block")])
def test_mx_of_fine_grained_fp8(is_fp4: bool, family: str) -> None:
    """A row with magnitudes from 2^-40 to 2^9, and one of zeros."""
    need_package("transformers")
    linear = nn.Linear(256, 128, dtype=torch.bfloat16).requires_grad_(False)
    layer = stand_ins.mx_linear(linear, is_fp4)
    x = (torch.randn(4, 256) * torch.exp2(torch.arange(256.0) / 5 - 41)).bfloat16()
    x[3] = 0
    where = "transformers.integrations.finegrained_fp8._FINEGRAINED_FP8"
    with torch.no_grad(), mock.patch(where, stand_ins.Hub):
        wanted = layer(x)
        with torch.device("meta"):  # any default of a user
            [line] = inductor_quant.prepare_(layer).done
        out, [rewrite] = capture(layer, [x])
    assert "computes the same" in line.detail
    assert [match.family for match in rewrite.report.matches] == [family]
    assert models.Distance.of(out, wanted).rms < 2e-3
    assert torch.equal(out[3], linear.bias)


def test_mx_weights_with_other_scales_stay() -> None:
    need_package("transformers")
    layer = stand_ins.mx_linear(nn.Linear(256, 128, dtype=torch.bfloat16), is_fp4=True)
    layer.weight_scale_inv = nn.Parameter(torch.ones(128, 8), False)
    [line] = inductor_quant.prepare_(layer).left
    assert line.detail == "blocks of 1 x 32 are known with e8m0 scales of both sides"


def test_a_layer_of_bitnet_is_one_graph() -> None:
    """Without ``prepare_``, Dynamo fails at its helpers."""
    need_package("transformers")
    layer = nn.Sequential(nn.Linear(256, 128, dtype=torch.bfloat16))
    model = nn.Module()
    model.model = layer
    bitnet(model, use_rms_norm=True)
    [line] = inductor_quant.prepare_(model).done
    assert "bit for bit" in line.detail
    with torch.no_grad():
        result, [rewrite] = capture(layer, [torch.randn(2, 16, 256).bfloat16()])
        [before] = rewrite.before(*rewrite.inputs)
    assert torch.equal(result, before)
    assert [match.format for match in rewrite.report.matches] == ["bitnet"]


@pytest.mark.slow
def test_tile_packed_int4_of_torchao_needs_no_call() -> None:
    """It has no kernel for a CPU: on the virtual card alone."""
    need_package("torchao")
    quantize = functools.partial(
        torchao, "Int4WeightOnlyConfig", group_size=64, int4_packing_format="tile_packed_to_4d"
    )
    explanation = models.explained(models.tiny("llama"), quantize)
    ops = [match.site.op for match in explanation.matches if match.site is not None]
    assert ops == ["aten._weight_int4pack_mm"] * 7
    assert not explanation.near_misses
