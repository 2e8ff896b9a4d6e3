"""``prepare_`` of a layer of experts in fine-grained FP8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import inductor_quant
from tests.support.checkpoints import models, stand_ins
from tests.support.graphs.post_grad import capture

pytest.importorskip("transformers")
EXPERTS, CHOICES = 4, 2


@pytest.fixture(autouse=True)
def _hub() -> Iterator[None]:
    where = "transformers.integrations.finegrained_fp8._FINEGRAINED_FP8"
    with torch.no_grad(), mock.patch(where, stand_ins.Hub):
        yield


def route(tokens: int, most: int = EXPERTS) -> tuple[torch.Tensor, ...]:
    """x, the ids of two experts for each token, below ``most``, and their factors."""
    generator = torch.Generator().manual_seed(tokens)
    factors, ids = torch.rand(tokens, most, generator=generator).topk(CHOICES)
    return torch.randn(tokens, 256, generator=generator).bfloat16(), ids, factors.bfloat16()


def check(layer: Any, tokens: int, *, most: int = EXPERTS, rms: float = 2e-3) -> None:
    inputs = route(tokens, most)
    wanted = layer(*inputs)
    result = inductor_quant.prepare_(layer)
    [line] = result.done
    assert "computes the same" in line.detail
    got, [rewrite] = capture(layer, inputs)
    assert [match.family for match in rewrite.report.matches] == ["scaled_experts"] * 2
    assert models.Distance.of(got, wanted).rms < rms
    assert (
        models.Distance.of(layer(*inputs), wanted).rms < 4e-2
    )  # a stack in bf16, and steps of e4m3
    result.undo()
    assert torch.equal(layer(*inputs), wanted)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("block", "scale_fmt"), [((128, 128), "float"), ((128, 128), "ue8m0"), (None, "float")]
)
def test_every_scale(block: Any, scale_fmt: str, tokens: int) -> None:
    form = "batched_mm" if tokens == 1 else "grouped_mm"
    check(stand_ins.fp8_experts(form, block, scale_fmt=scale_fmt), tokens)


@pytest.mark.parametrize(
    "gate", [{"swiglu_limit": 0.01}, {"swiglu_limit": 0.01, "swiglu_alpha": 1.7}], ids=str
)
def test_every_gate(gate: dict[str, float]) -> None:
    check(stand_ins.fp8_experts("batched_mm", **gate), 1)


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_default_device_does_not_matter(tokens: int) -> None:
    form = "batched_mm" if tokens == 1 else "grouped_mm"
    layer, inputs = stand_ins.fp8_experts(form), route(tokens)
    wanted = layer(*inputs)
    with torch.device("meta"):
        [line] = inductor_quant.prepare_(layer).done
    assert "computes the same" in line.detail
    with torch.device("cpu"):
        got, [rewrite] = capture(layer, inputs)
    assert len(rewrite.report.matches) == 2
    assert models.Distance.of(got, wanted).rms < 2e-3


def test_any_number_of_tokens() -> None:
    layer, inputs = stand_ins.fp8_experts("grouped_mm"), route(7)
    wanted = layer(*inputs)
    inductor_quant.prepare_(layer)
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 0, min=2, max=64)
    got, [rewrite] = capture(layer, inputs)
    assert [match.family for match in rewrite.report.matches] == ["scaled_experts"] * 2
    assert all(isinstance(match.m, str) for match in rewrite.report.matches)
    assert models.Distance.of(got, wanted).rms < 2e-3


@pytest.mark.parametrize("tokens", [1, 6])
def test_ids_without_an_expert_add_nothing(tokens: int) -> None:
    form = "batched_mm" if tokens == 1 else "grouped_mm"
    check(stand_ins.fp8_experts(form, is_parallel=True), tokens, most=2 * EXPERTS)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("block", "has_gate"), [(None, True), ((128, 128), True), (None, False)])
def test_static_scales(block: Any, has_gate: bool, tokens: int) -> None:
    """Without a gate the product is not rounded before the activation: other steps of e4m3."""
    layer = stand_ins.fp8_experts("eager", block, scheme="static", has_gate=has_gate)
    check(layer, tokens, rms=2e-3 if has_gate else 3e-2)


@pytest.mark.parametrize(("dtype", "rms"), [(torch.float16, 3e-2), (torch.float32, 1e-2)])
def test_rows_of_another_type_are_multiplied_in_bf16(dtype: torch.dtype, rms: float) -> None:
    """As ``_grouped_mm`` takes them while it is traced. The values are subnormal in fp16."""
    layer, (x, *route_) = stand_ins.fp8_experts("eager", scheme="static"), route(5)
    inputs = (x.to(dtype), *route_)
    wanted = layer(*inputs)
    inductor_quant.prepare_(layer)
    got, [rewrite] = capture(layer, inputs)
    assert [match.family for match in rewrite.report.matches] == ["scaled_experts"] * 2
    assert got.dtype == dtype
    assert models.Distance.of(got, wanted).rms < rms


def test_scales_of_other_blocks_stay() -> None:
    layer = stand_ins.fp8_experts("grouped_mm")
    layer.down_proj_scale_inv = torch.nn.Parameter(torch.ones(EXPERTS, 3, 1), False)
    [line] = inductor_quant.prepare_(layer).left
    assert line.detail == "down_proj of shape [4, 256, 128] with scales of shape [4, 3, 1]"


def test_an_exported_layer_takes_any_number_of_tokens() -> None:
    layer, inputs = stand_ins.fp8_experts("grouped_mm"), route(5)
    inductor_quant.prepare_(layer)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(layer, inputs, dynamic_shapes=[{0: tokens}] * 3)
    other = route(9)
    assert torch.equal(program.module()(*other), layer(*other))
