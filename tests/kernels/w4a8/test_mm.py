"""What ``w4a8_mm`` takes, when it is preferred, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels import dispatch
from inductor_quant.kernels.codegen.halves import halves_of
from inductor_quant.kernels.config import RESERVED_SHARED_MEMORY, GemmConfig
from inductor_quant.kernels.w4a8.mm.kernel import CONFIGS, SMALL_CONFIGS, W4A8_MM
from inductor_quant.ops import w4a8
from inductor_quant.report.events import collect
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms import formats
from tests.support.gemms.generated import device, generate, hardest
from tests.support.gemms.w4a8 import NAMES, Case, described, gemm, generate_case, make_inputs

E4M3 = w4a8.E4M3
ARCHS = tuple(simulate.GPUS)
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def chosen_at(arch, **case):
    """The numbers of rows at which the kernel is the first choice."""
    found = []
    for m in (1, 16, 17, 64, 128, 129, 256, 512, 513, 1024, 1025, 4096):
        spec, problem = described(Case(m=m, n=4096, k=4096, **case))
        kernels = [k for k, _ in dispatch.candidates("w4a8", spec, problem, device(arch))]
        found += [m] if kernels and kernels[0] is W4A8_MM else []
    return (found[0], found[-1]) if found else None


@pytest.mark.parametrize(
    ("arch", "case", "rows"),
    [
        # up to 16 rows w4a8_direct
        (80, {"name": "nibble_pairs", "groups": False}, (17, 1024)),
        (80, {"name": "shift_table"}, (17, 1024)),  # few rows as weight_only, of x in bf16
        (89, {"name": "nibble_pairs", "groups": False, "zero": "int", "sums": True}, (129, 1024)),
        # a zero point that is no integer is inexact in bf16
        (89, {"name": "shift_table", "zero": "float", "sums": True}, (1, 1024)),
        (86, {"name": "nibble_pairs"}, (129, 1024)),  # fewer rows as weight_only
        (80, {"name": "gptq"}, (129, 1024)),
        (80, {"name": "nibble_pairs", "to_int8": "round"}, (17, 512)),
        (80, {"name": "nibble_pairs", "a_dtype": E4M3}, (129, 4096)),  # both ways decode it
        (89, {"name": "nibble_pairs", "a_dtype": E4M3, "groups": False}, (129, 1024)),
        (100, {"name": "nibble_pairs", "groups": False}, (17, 128)),
        (100, {"name": "nibble_pairs"}, None),
        (120, {"name": "awq", "to_int8": "round"}, (1, 512)),
        # Hopper: w4a8_mm_sm90 and weight_only are faster
        (90, {"name": "nibble_pairs", "groups": False}, None),
        (90, {"name": "nibble_pairs"}, None),
        (90, {"name": "nibble_pairs", "a_dtype": E4M3}, None),
        (90, {"name": "shift_table", "to_int8": "round"}, (1, 16)),
        (90, {"name": "nibble_pairs", "to_int8": "round"}, (512, 512)),
    ],
    ids=str,
)
def test_it_is_preferred_where_a_dense_weight_would_be_written(arch, case, rows):
    assert chosen_at(arch, **case) == rows


def test_an_exact_product_of_many_terms_is_not_left_to_bf16():
    """fp32 sums of x in bf16 would not be those of the integers."""
    for k, is_exact in ((1 << 14, True), (1 << 15, False)):
        spec, problem = described(Case("shift_table", 8, 512, k))
        assert (W4A8_MM.configs(spec, problem, device(80)) == []) == is_exact


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_form_has_legal_configurations(name, arch):
    for m, k, options in (
        *((1, 4096, {}), (33, 1152, {"groups": False}), (200, 4096, {"to_int8": "round"})),
        *((5000, 4096, {"to_int8": "wrap"}), (300, 4096, {"a_dtype": E4M3})),
    ):
        if options.get("to_int8") and name == "int4_words":
            continue
        spec, problem = described(Case(name, m, 520, k, **options))
        assert W4A8_MM.rejection(spec, problem, device(arch)) is None
        found = W4A8_MM.ranked(spec, problem, device(arch))
        assert len(found) >= 2
        assert len(set(found)) == len(found)
        for config in found:
            assert W4A8_MM.config_rejection(spec, problem, config, device(arch)) is None


def test_what_it_rejects(monkeypatch):
    def refused(case, config=None, **changes):
        spec, problem = described(case)
        problem = dataclasses.replace(problem, **changes)
        if config is None:
            return W4A8_MM.rejection(spec, problem, device(75 if changes else 80))
        return W4A8_MM.config_rejection(spec, problem, config, device(80))

    groups = Case("nibble_pairs", 64, 1024, 4096)
    integers = dataclasses.replace(groups, groups=False)
    assert refused(groups, GemmConfig(16, 16, 128, 4, 3)) is None
    assert refused(groups, GemmConfig(16, 16, 256, 4, 3)).code == RejectionCode.BLOCK_SHAPE
    assert refused(integers, GemmConfig(16, 16, 256, 4, 3)) is None
    assert refused(integers, GemmConfig(64, 128, 64, 4, 3)) is None
    assert refused(groups, GemmConfig(64, 128, 64, 4, 3)) is not None  # sums of groups
    assert refused(integers, GemmConfig(16, 128, 128, 4, 3)).code == RejectionCode.REGISTERS
    assert refused(integers, GemmConfig(64, 64, 64, 4, 3, split_k=2)) is None
    assert refused(
        dataclasses.replace(integers, k=1 << 15), GemmConfig(64, 64, 64, 4, 3, split_k=2)
    )
    assert refused(integers, GemmConfig(64, 64, 64, 4, 3, split_k=2), m_is_bounded=False)
    monkeypatch.setattr(formats, "GROUP", 16)
    assert refused(groups).code == RejectionCode.BLOCK_SHAPE


@pytest.mark.parametrize("name", NAMES)
def test_nibbles_are_halves_of_bytes(name):
    found = halves_of(described(Case(name, 16, 512, 1024))[1].weight)
    axis = {"gptq": "k", "awq": "n", "nibble_pairs": "k", "int4_words": "k", "shift_table": None}
    assert (found.axis if found else None) == axis[name]
    if found:
        # order within AWQ's words: 0, 16, 4, 20, ... bits
        assert found.below == (2 if name == "awq" else 1)
        k, n = found.format.shape
        assert k * n * 2 == 512 * 1024


# every way of unpacking, for every kind of card
COMPILED = [
    (80, Case("nibble_pairs", 0, 512, 1024)),
    (80, Case("gptq", 0, 512, 1024, to_int8="wrap")),
    (80, Case("nibble_pairs", 0, 512, 1024, a_dtype=E4M3)),
    (86, Case("awq", 0, 512, 1024, groups=False)),
    (89, Case("nibble_pairs", 0, 512, 1024, a_dtype=E4M3)),
    (89, Case("nibble_pairs", 0, 512, 1024, groups=False, zero="float", sums=True)),
    (90, Case("nibble_pairs", 0, 512, 1024, to_int8="round")),
    (100, Case("nibble_pairs", 0, 512, 1024, a_dtype=E4M3)),
    (120, Case("shift_table", 0, 512, 1024)),
]


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("arch", "case"),
    [each if i % 3 == 0 else pytest.param(*each, marks=slow) for i, each in enumerate(COMPILED)],
    ids=str,
)
def test_configurations_use_the_matrix_unit_and_do_not_spill(arch, case):
    spec, problem = described(dataclasses.replace(case, m=512))
    legal = [
        config
        for config in (*CONFIGS, *SMALL_CONFIGS)
        if W4A8_MM.config_rejection(spec, problem, config, device(arch)) is None
    ]
    for config in hardest(legal, 2):
        this = dataclasses.replace(case, m=2 * config.block_m)
        generated = generate_case(this, f"{W4A8_MM.name} {config}", arch=arch)
        [(name, source)] = generated.kernels.items()
        kernel = simulate.compile_kernel(name, source)
        assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
        assert kernel.shared_bytes <= device(arch).shared_memory - RESERVED_SHARED_MEMORY
        instructions = " ".join(kernel.matrix_instructions())
        # Triton converts e4m3 to fp16 where a tile is too small for sm_100's own unit.
        of_floats = {80: "bf16", 100: "f16"}.get(arch, "e4m3")
        kind = of_floats if case.a_dtype == E4M3 else "s8"
        assert kind in instructions or "tcgen05" in instructions, (config, instructions)


@pytest.mark.compiles
def test_nibbles_go_from_words_to_the_operand_in_registers():
    """By single bytes through shared memory a weight took ten instructions, here two to five."""
    case = Case("nibble_pairs", 256, 512, 1024, groups=False)
    generated = generate_case(case, f"{W4A8_MM.name} 64x128x64_w4_s4_g8", arch=80)
    [(name, source)] = generated.kernels.items()
    ptx = simulate.compile_kernel(name, source).ptx
    assert "ld.shared.b8" not in ptx
    assert "st.shared.b8" not in ptx


@pytest.mark.compiles
@pytest.mark.parametrize("split", [False, True])
def test_what_follows_is_in_its_kernel(split):
    case = Case("nibble_pairs", 40, 512, 1024, groups=False, zero="int", sums=True)
    config = f"{W4A8_MM.name} 64x64x64_w4_s4_g8{'_k2' if split else ''}"

    def fn(residual, *inputs):
        return torch.nn.functional.gelu(gemm(case)(*inputs)) + residual

    def make(device):
        residual = torch.empty(case.m, 512, dtype=torch.bfloat16, device=device)
        return residual, *make_inputs(case, device)

    kernels = generate(fn, make, config, arch=89).kernels
    assert len(kernels) == 1 + split
    assert sum("libdevice.erf" in source for source in kernels.values()) == 1


@pytest.mark.compiles
def test_a_sum_after_a_product_is_not_contracted_before_it_is_rounded():
    """fp32 rounds the product, then the sum; a multiply-add would round once."""
    case = Case("nibble_pairs", 20, 64, 128, to_int8="round")
    *ops, last = case.format.dequant_ops
    shifted = (*ops, w4a8.DequantOp("add", 0.25), last)
    format = dataclasses.replace(case.format, dequant_ops=shifted)

    def fn(a, *weight):
        options = {"format": format.encode(), "out_dtype": torch.float32}
        return w4a8.op(a, list(weight), None, None, None, **options)

    def make(device):
        a, *_, words, scales = make_inputs(case, device)
        return a, words, scales

    [(name, source)] = generate(
        fn, make, f"{W4A8_MM.name} 32x32x64_w4_s3_g8", arch=80
    ).kernels.items()
    loop = simulate.compile_kernel(name, source).ptx
    assert "fma.rn.f32" not in loop


@pytest.mark.compiles
@pytest.mark.parametrize("numerics", ["default", "strict"])
def test_below_sm89_e4m3_is_read_as_bytes(numerics):
    case = Case("nibble_pairs", 200, 64, 128, a_dtype=E4M3)
    options = {"inductor_quant.numerics": numerics, "inductor_quant.on_error": "raise"}
    generated = simulate.generate(
        gemm(case),
        lambda device: make_inputs(case, device),
        arch=80,
        backend="inductor_quant",
        options=options,
    )
    [(name, source)] = generated.kernels.items()
    assert f"inductor_quant_{W4A8_MM.name}_" in generated.choices[0][0].name
    assert "'arg_A': '*u8'" in source
    assert ("'enable_fp_fusion': False" in source) == (numerics == "strict")
    simulate.compile_kernel(name, source)


@pytest.mark.compiles
def test_it_is_reported_and_serves_a_dynamic_m():
    case = Case("nibble_pairs", 200, 512, 1024)

    def make(device):
        inputs = make_inputs(case, device)
        torch._dynamo.mark_dynamic(inputs[0], 0)
        return (inputs[0], None, *inputs[2:])

    with collect() as report:
        generated = generate(gemm(case), make, arch=89)
    assert [choice.chosen.split()[0] for choice in report.kernels] == [W4A8_MM.name]
    [source] = generated.kernels.values()
    assert "M = ks0" in source
    assert "N : tl.constexpr = 512" in source
