"""Decisions as values: every code means something, and each prints as one greppable line."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch

from inductor_quant.ops import w8a8
from inductor_quant.spec.decisions import MEANINGS, Match, Rejection, RejectionCode
from inductor_quant.spec.gemm import ScaleSpec

ROOT = Path(__file__).parents[2]
SPEC = w8a8.make_spec(
    a_scale=ScaleSpec(torch.float32, (1, -1)), b_scale=None, out_dtype=torch.bfloat16, bias=False
)


def test_every_code_has_a_meaning_and_no_meaning_is_left_over():
    assert set(MEANINGS) == set(RejectionCode)


@pytest.mark.parametrize("code", RejectionCode)
def test_a_meaning_is_one_clause_of_its_own(code):
    meaning = MEANINGS[code]
    assert meaning == meaning.strip()
    assert "\n" not in meaning
    assert not meaning.endswith(".")
    assert list(MEANINGS.values()).count(meaning) == 1


@pytest.mark.parametrize("code", RejectionCode)
def test_a_code_is_its_name_in_lower_case(code):
    assert code.value == code.name.lower()
    assert re.fullmatch(r"[a-z][a-z_]*", code.value)


def test_every_code_is_used_by_the_package():
    used = set()
    for folder in ("inductor_quant", "patterns"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "decisions.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    used |= {node.attr} if node.value.id == "RejectionCode" else set()
    assert used == {code.name for code in RejectionCode}


def test_a_rejection_prints_code_node_and_detail():
    rejection = Rejection(RejectionCode.K_TOO_LONG, "K=200000", "_int_mm")
    assert str(rejection) == "k_too_long at _int_mm: K=200000"


def test_a_rejection_without_detail_prints_the_meaning():
    rejection = Rejection(RejectionCode.NO_SCALE)
    assert str(rejection) == f"no_scale: {MEANINGS[RejectionCode.NO_SCALE]}"


def test_a_match_prints_family_spec_sizes_and_node():
    match = Match("w8a8", SPEC, "s0", 48, 64, "_int_mm")
    assert str(match) == "w8a8 (a=i8/token:f32, b=i8, out=bf16) s0x48x64 at _int_mm"


@pytest.mark.parametrize(
    "decision", [Rejection(RejectionCode.NO_SCALE), Match("w8a8", SPEC, 1, 2, 3, "n")]
)
def test_decisions_are_frozen_and_hashable(decision):
    hash(decision)
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.node = "another"
