"""Sums of parts of K: who adds them up."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from inductor_quant import simulate
from tests.support.gemms import formats
from tests.support.gemms.generated import generate
from tests.support.gemms.horizontal import words
from tests.support.gemms.weight_only import Case, assert_close, exact, gemm, make_inputs

PINNED = "weight_only_small_m 8x128x128_w2_s3_g8_k8"


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def rotated(x):
    """As rotary embedding does: each value is read at two places."""
    left, right = x.chunk(2, dim=-1)
    return x * 0.5 + torch.cat([-right, left], -1) * 0.25


def launches(case, config, consumer):
    def fn(*inputs):
        return consumer(gemm(case)(*inputs))

    return counted(generate(fn, lambda device: make_inputs(case, device), config))


def counted(generated):
    body = generated.wrapper.split("def call", 1)[1].split("def benchmark", 1)[0]
    return Counter(re.findall(r"(triton_[a-z]+)_\w+\.run\(", body))


def test_what_reads_a_result_at_two_places_adds_its_parts_up():
    case = Case("gptq", 1, 1024, 4096)
    found = launches(case, PINNED, lambda y: rotated(y.view(1, -1, 128)))
    assert found == {"triton_tem": 1, "triton_poi": 1}


def test_a_cast_that_is_read_at_two_places_is_no_reader():
    """Of a layer, whose graph is rewritten, in groups of 64."""

    def fn(layer, x):
        return rotated(layer(x).view(1, -1, 128).float())

    def make(device):
        with torch.device(device):
            return words(4096, 1024), torch.empty(1, 4096, dtype=torch.bfloat16)

    assert counted(generate(fn, make, PINNED.replace("x128_", "x64_"))) == {
        "triton_tem": 1,
        "triton_poi": 1,
    }


def test_large_parts_are_added_up_once():
    case = Case("gptq", 8, 28672, 4096)  # 7 MB
    found = launches(case, PINNED, lambda y: rotated(y.view(8, -1, 128)))
    assert found == {"triton_tem": 1, "triton_poi": 2}


@pytest.mark.interp
def test_every_reader_has_the_same_value():
    """Two that compute from it, one that needs it in memory, and the caller."""
    torch.manual_seed(0)
    case = Case("gptq", 5, 256, 1024, bias=True)
    inputs = make_inputs(case, "cpu")

    def fn(*inputs):
        y = gemm(case)(*inputs)
        return y, rotated(y.view(5, -1, 128)), y.t().contiguous(), y.cumsum(-1)

    generated = generate(fn, lambda device: make_inputs(case, device), PINNED)
    y, *others = simulate.interpret(generated, inputs)
    assert_close(y, exact(case, inputs))
    for got, want in zip(others, (rotated(y.view(5, -1, 128)), y.t(), y.cumsum(-1)), strict=True):
        assert (got - want).abs().max() <= 0.02 * want.abs().max()
