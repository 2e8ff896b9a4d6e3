"""On every card: default configurations fit; nothing untuned replaces what a library computes."""

from __future__ import annotations

import contextlib

import pytest
import torch

import inductor_quant
from inductor_quant import simulate
from inductor_quant.kernels.codegen.dialect import TRITON_VERSION
from tests.support.gemms import each_kernel, experts, formats, fp8, w8a8, weight_only
from tests.support.gemms.generated import generate

BLOCK = (128, 128)
# Bytes of spills of (format, rows, arch): weight_only_direct 8x32x512_w8, and experts_direct
# 8x64x128_w2 where the last tile of N is partial.
KNOWN = {
    ("shards", 3, 86): 16,
    ("mxfp4", 3, 86): 40,
    ("mxfp4", 3, 89): 40,
}
# Bytes read of spills, of (kernel, arch): on Triton 3.6 of FP8 blocks whose K is loaded in single
# bytes, on 3.9 16 words once a CTA, and a few a tile.
KNOWN_DEFAULTS = {("fp8_block_mm", 89): 4} if TRITON_VERSION < (3, 7) else {}
if TRITON_VERSION >= (3, 9):
    KNOWN_DEFAULTS = {("scaled_experts_large_m_sm90", 90): 292}
# Of two iterations a turn where the last tile of N is partial; of the second it is not known why.
KNOWN_DEFAULTS |= {("experts_direct", arch): 104 for arch in (86, 89)}
KNOWN_DEFAULTS[("weight_only_decode", 89)] = 8


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("case", "arch", "codes"),
    [
        (w8a8.Case(32, 64, 64), 90, []),
        (w8a8.Case(32, 64, 64), 80, ["untuned"]),
        (w8a8.Case(16, 64, 64), 80, []),  # the library takes more rows
        (w8a8.Case(32, 64, 60), 80, []),  # and K in multiples of 8
        (fp8.Case(32, 64, 64), 120, ["untuned"]),
        (fp8.Case(32, 64, 64), 86, []),  # it has no FP8
        (fp8.Case(256, 7168, 512, BLOCK, a_scales="m"), 90, ["many_rows"]),
        (fp8.Case(256, 7168, 512, BLOCK, a_scales="m"), 100, []),  # nor blocks, but on Hopper
    ],
    ids=str,
)
@pytest.mark.parametrize("untuned", [False, True])
def test_what_a_library_computes_stays_on_a_card_that_was_not_measured(case, arch, codes, untuned):
    def scaled(a, w, s, t, bias):
        t = t.t() if case.block else t
        return torch._scaled_mm(a, w.t(), s, t, out_dtype=torch.bfloat16)

    fn = w8a8.gemm(case) if isinstance(case, w8a8.Case) else scaled
    of = each_kernel.module_of(case)
    options = {"inductor_quant.untuned": untuned, "inductor_quant.on_error": "raise"}
    with inductor_quant.collect() as report, contextlib.suppress(Exception):
        # a library's call has no kernel on a virtual GPU
        simulate.generate(
            fn,
            lambda device: of.make_inputs(case, device),
            arch=arch,
            backend="inductor_quant",
            options=options,
        )
    expected = [code for code in codes if not (untuned and code == "untuned")]
    assert [rejection.code.value for rejection in report.rejections] == expected
    assert len(report.matches) == 1 - len(expected)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("arch", simulate.GPUS)
@pytest.mark.parametrize("gemm", each_kernel.GEMMS)
def test_the_default_configuration_fits_and_does_not_spill(gemm, arch, monkeypatch):
    if gemm == "fp8_decode_quantize" and arch < 89:
        pytest.skip("Inductor's quantization to e4m3 needs sm_89, with us or without")
    monkeypatch.setattr(formats, "GROUP", each_kernel.GROUP)
    most = KNOWN_DEFAULTS.get((gemm, arch), 0)
    assert_it_fits_and_does_not_spill(each_kernel.GEMMS[gemm], arch, most)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("arch", simulate.GPUS)
@pytest.mark.parametrize("rows", [3, 61])
@pytest.mark.parametrize(
    ("name", "group"),
    [("shards", 64), ("halves_of_k", 128), ("groups_of_n", 64), ("nvfp4", 16), ("mxfp4", 32)],
)
def test_formats_that_no_kernel_is_named_after_fit_and_do_not_spill(
    name, group, rows, arch, monkeypatch
):
    """Numbers of two fields, values and columns that are far apart, scales that are exponents or
    that a number divides."""
    monkeypatch.setattr(formats, "GROUP", group)
    most = KNOWN.get((name, rows, arch), 0)
    assert_it_fits_and_does_not_spill(weight_only.Case(name, rows, 4160, 1152), arch, most)
    counts = (rows, 0, rows + 2)
    assert_it_fits_and_does_not_spill(experts.Case(name, counts, 520, 1152), arch, most)


def assert_it_fits_and_does_not_spill(case, arch, most=0):
    fn, make = each_kernel.parts(case)
    generated = generate(fn, make, arch=arch)
    limit = simulate.GPUS[arch].shared_memory_per_block_optin
    for name, source in generated.kernels.items():
        compiled = simulate.compile_kernel(name, source)
        assert compiled.shared_bytes <= limit, name
        spilled = max(compiled.spill_stores, compiled.spill_loads)
        assert spilled <= most, (name, compiled.registers)
