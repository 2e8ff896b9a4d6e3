"""How CTAs of ``weight_only_mm_sm90``, and the consumers of one, divide tiles and K, in Triton's
interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.simulate.interpreter import gluon as interpreter
from inductor_quant.simulate.interpreter import signals
from tests.support.gemms.generated import generated_by
from tests.support.gemms.weight_only import Case, assert_close, gemm, make_inputs, reference

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

f16 = torch.float16
MM = "weight_only_mm_sm90"


@pytest.mark.parametrize(
    ("case", "config", "count"),
    [
        (Case("nibble_pairs", 20, 128, 512), "32x128x64_w8_s4_g8", 4),
        (Case("nibble_pairs", 20, 160, 512), "32x128x64_w8_s4_g8", 0),  # a tile ends beyond N
        (Case("gptq", 20, 64, 512, f16), "32x64x64_w4_s8_g8", 4),
        (Case("gptq", 20, 64, 128, f16), "32x64x64_w4_s4_g8", 2),  # all there is
    ],
    ids=["along_k", "partial", "along_n", "short"],
)
def test_consumers_copy_the_first_tiles(case, config, count, monkeypatch):
    copied = []
    copy = interpreter._copy
    monkeypatch.setattr(
        interpreter, "_copy", lambda to, *given, **how: (copied.append(to), copy(to, *given, **how))
    )
    inputs = make_inputs(case, "cpu")
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))
    assert len(copied) == 2 * count  # of x and of W


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("name", "ctas"), [("gptq", 2), ("gptq", 3), ("gptq", 5), ("gptq", 16), ("nf4", 2), ("nf4", 5)]
)
def test_ctas_that_share_tiles_add_what_others_leave_them(name, ctas, monkeypatch):
    """6 tiles of 4 turns: a CTA has one or two for itself, or a tile has up to four CTAs. It leaves
    its sums of its last tile before it awaits those of its first one."""
    kernel, constants = type(WEIGHT_ONLY_MM_SM90), WEIGHT_ONLY_MM_SM90.own_constants
    monkeypatch.setattr(kernel, "shares_tiles", lambda *_: True)
    monkeypatch.setattr(kernel, "scratch", lambda *_: ctas * (32 * 64 + 4 * 2))
    monkeypatch.setattr(
        kernel, "own_constants", lambda _, *given: constants(*given) | {"NUM_CTAS": ctas}
    )
    torch.manual_seed(0)
    case = Case(name, 40, 192, 1024, f16, bias=True)
    inputs = make_inputs(case, "cpu")
    config = "32x64x64_w4_s4_g8"
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    events = []
    for each in ("_sent", "_missing"):
        monkeypatch.setattr(signals, each, Recorded(events, each))
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))
    if ctas == 5:
        assert events[:3] == ["_sent", "_sent", "_missing"]


class Recorded(set):
    """A set that appends its ``name`` to ``events`` when it is updated."""

    def __init__(self, events, name):
        super().__init__()
        self.events, self.name = events, name

    def update(self, *others):
        self.events.append(self.name)
        super().update(*others)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "m", "k", "config"),
    [
        ("gptq", 40, 1024, "64x64x64_w8_s8_g8"),
        ("nibble_pairs", 120, 1152, "128x64x64_w8_s8_g8"),  # nine turns
        ("awq", 120, 1536, "128x64x64_w8_s8_g8_k2"),  # CTAs exchange sums
        ("nibble_pairs", 40, 1536, "64x64x64_w8_s8_g8_k3"),
        ("int8_group", 33, 1088, "64x64x64_w8_s8_g8"),  # the last turn ends beyond K
        ("awq", 33, 256, "64x64x64_w8_s8_g8"),  # one turn of each
    ],
)
def test_two_consumers_take_turns_along_k(name, m, k, config):
    torch.manual_seed(0)
    case = Case(name, m, 128, k, f16, bias=True)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))
