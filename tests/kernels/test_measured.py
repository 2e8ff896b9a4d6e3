"""Measured choices: where a row speaks, and that the lowering takes it before the rules."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from inductor_quant.kernels import measured
from inductor_quant.kernels.config import Device, Problem, Weight, WeightTensor
from inductor_quant.kernels.table import PROVENANCE
from inductor_quant.lowering import common
from inductor_quant.ops import w8a8
from inductor_quant.ops.weight_only import make_spec
from inductor_quant.options import Options
from inductor_quant.spec import ScaleSpec
from tests.support import formats

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
SPEC = w8a8.make_spec(
    a_scale=ScaleSpec(torch.float32, (1, -1)),
    b_scale=ScaleSpec(torch.float32, (-1, 1)),
    out_dtype=torch.bfloat16,
    bias=False,
)
KEY = "i8/token:f32 x i8/channel:f32"
# The second is among what the rules offer.
FIRST, SECOND = "w8a8_mm 32x64x128_w4_s4_g8", "w8a8_mm 32x128x128_w4_s4_g8"
SMALL = "w8a8_mm 32x32x128_w4_s4_g8"
RAW: dict[str, Any] = {
    "family": "w8a8",
    "arch": 90,
    "num_sms": 132,
    "measured": dict.fromkeys(PROVENANCE, "x"),
    "rows": [
        {
            "key": KEY,
            "m": 32,
            "n": 4096,
            "k": 4096,
            "choices": [FIRST, SECOND, SMALL],
            "us": [4.9, 5.0, 5.1],
            "rule_us": [6.0, 6.1, 6.2],
        }
    ],
}


@pytest.fixture
def with_row(monkeypatch):
    monkeypatch.setattr(measured, "load", lambda family, arch: measured.parse(RAW))


def candidates(problem, device=H200, **options):
    found = common._candidates("w8a8", SPEC, problem, device, Options(**options))
    return [f"{kernel.name} {config}" for kernel, config in found]


def test_there_is_no_file_without_rows():
    for family in ("w8a8", "weight_only", "fp8", "fp8_block"):
        found = measured.load(family, 90)
        assert found is None or found.rows


def test_a_row_comes_before_the_rules_and_they_follow(monkeypatch):
    problem = Problem(32, 4096, 4096, has_aligned_rows=True)
    by_rule = candidates(problem)
    monkeypatch.setattr(measured, "load", lambda family, arch: measured.parse(RAW))
    found = candidates(problem)
    assert found[:3] == [FIRST, SECOND, SMALL]
    assert SECOND in by_rule
    assert found[3:] == [text for text in by_rule if text not in found[:3]]
    assert candidates(problem, configs=(SECOND,)) == [SECOND]


@pytest.mark.parametrize(
    ("change", "speaks"),
    [
        ({"m": 25}, True),
        ({"m": 17}, True),
        ({"m": 16}, False),
        ({"m": 33}, False),
        ({"n": 4104}, False),
        ({"k": 4224}, False),
        ({"m_is_static": False}, False),
    ],
)
@pytest.mark.usefixtures("with_row")
def test_a_row_speaks_for_its_sizes_and_rows_nearby(change, speaks):
    problem = dataclasses.replace(Problem(32, 4096, 4096), **change)
    assert (candidates(problem)[0] == FIRST) == speaks


@pytest.mark.usefixtures("with_row")
def test_a_row_is_for_its_card_and_what_is_not_legal_is_passed_over():
    problem = Problem(32, 4096, 4096)
    assert FIRST not in candidates(problem, dataclasses.replace(H200, num_sms=114))[:1]
    small = dataclasses.replace(H200, shared_memory=48 * 1024)
    assert candidates(problem, small)[0] == SMALL


def test_the_key_tells_apart_how_a_weight_lies():
    keys = set()
    for name in ("gptq", "awq", "int8_channel", "nf4"):
        packed = formats.build(name, 256, 256)
        dtypes = [dtype for _, _, dtype in packed.tensors]
        spec = make_spec(
            packed.format,
            dtypes,
            x_dtype=torch.bfloat16,
            column_scale=None,
            out_dtype=torch.bfloat16,
            bias=False,
        )
        tensors = tuple(WeightTensor(dtype, shape) for _, shape, dtype in packed.tensors)
        problem = Problem(16, 256, 256, weight=Weight(packed.format, tensors))
        keys.add(measured.key(spec, problem))
        biased = dataclasses.replace(spec, bias=True, out_dtype=torch.float32)
        assert measured.key(biased, problem) in keys
    assert len(keys) == 4


@pytest.mark.parametrize("damage", ["provenance", "twice", "kernel", "config", "empty", "field"])
def test_a_malformed_file_is_refused(damage):
    raw = json.loads(json.dumps(RAW))
    [row] = raw["rows"]
    if damage == "provenance":
        raw["measured"]["gpu"] = ""
    elif damage == "twice":
        raw["rows"].append(row)
    elif damage == "kernel":
        row["choices"] = ["fp8_mm 32x64x128_w4_s4_g8"]
    elif damage == "config":
        row["choices"] = ["w8a8_mm 32x64"]
    elif damage == "empty":
        row["choices"] = []
    else:
        row["q"] = 1
    measured.parse(RAW)
    with pytest.raises((KeyError, TypeError, ValueError)):
        measured.parse(raw)
