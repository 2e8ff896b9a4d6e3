"""No kernel touches the registers of a product in flight."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from tests.support import in_flight
from tests.support.gemms import each_kernel, experts, formats, w4a8
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import Case

slow = pytest.mark.slow
LOOP = [
    (0x10, "LDS.64 R8, [R3]"),
    (0x20, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
    (0x30, "IGMMA.64x64x32.S8.S8 R24, R8, gdesc[UR8], R24, gsb0"),
    (0x40, "@P0 BRA 0x10"),
]


def test_what_comes_round_before_the_wait_is_found():
    assert in_flight.overwritten(LOOP) == ["0x10 LDS.64 R8, [R3]"]
    assert (
        in_flight.overwritten([LOOP[1], (0x18, LOOP[0][1]), *LOOP[2:3], (0x40, "BRA 0x20")]) == []
    )


def test_sums_that_are_read_before_the_wait_are_found():
    early = (0x18, "F2FP.BF16.F32.PACK_AB R2, R25, R24")
    assert in_flight.read_early([LOOP[2], early, LOOP[1]]) == [f"{early[0]:#x} {early[1]}"]
    assert in_flight.read_early([LOOP[2], LOOP[1], early]) == []


def test_spills_count_in_the_shortest_loop_around_a_product():
    spill = (0x18, "LDL R8, [R1]")
    outside = [(0x4, "STL [R1], R8"), *LOOP, (0x50, "LDL R9, [R1]"), (0x60, "@P1 BRA 0x4")]
    assert in_flight.spilled_in_loops(outside) == []
    assert in_flight.spilled_in_loops([LOOP[0], spill, *LOOP[1:]]) == ["0x18 LDL R8, [R1]"]


def test_a_spill_that_waits_for_a_load_is_found():
    load, store = (0x10, "LDG.E.U16 R8, desc[UR4][R2.64]"), (0x20, "STL.S16 [R1+0x24], R8")
    assert in_flight.stored_as_loaded([load, store]) == ["0x20 STL.S16 [R1+0x24], R8"]
    assert in_flight.stored_as_loaded([load, (0x18, "MOV R8, R9"), store]) == []
    assert in_flight.stored_as_loaded([load, *LOOP[1:], store], apart=3) == []


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")
@pytest.mark.parametrize(
    "case",
    [
        each_kernel.GEMMS["w4a8_mm_sm90"],
        experts.Case("nibble_pairs", (129, 0, 200, 1), 416, 1024, left_over=50),
        *(
            pytest.param(case, marks=slow)
            for case in (
                each_kernel.GEMMS["weight_only_small_m_sm90"],
                *(Case("gptq", m, 6208, 4096, torch.float16) for m in (33, 515)),
                w4a8.Case("int4_words", 200, 4096, 4096),
                w4a8.Case("nibble_pairs", 61, 4100, 1152),  # an odd number of groups
                w4a8.Case("nibble_pairs", 61, 4096, 4096, a_dtype=torch.float8_e4m3fn),
                *(Case(name, 61, 8256, 1152) for name in ("awq", "int8_channel", "nf4", "fp8_row")),
                *(Case(name, 40, 8256, 4096) for name in ("awq", "gptq")),
            )
        ),
    ],
    ids=str,
)
def test_operands_and_sums_are_left_alone_until_the_product_is_done(case, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", each_kernel.GROUP)
    generated = generate(*each_kernel.parts(case))
    [(name, source)] = [each for each in generated.kernels.items() if "triton_tem" in each[0]]
    code = in_flight.machine_code(simulate.compile_kernel(name, source).ptx)
    assert in_flight.products(code) >= 8
    assert in_flight.overwritten(code) == []
    assert in_flight.read_early(code) == []
