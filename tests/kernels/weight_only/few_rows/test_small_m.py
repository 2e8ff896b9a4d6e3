"""``weight_only_small_m``: which GEMMs it takes, packed layouts, machine code."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.codegen.packed_layout import packed_layout_of
from inductor_quant.kernels.codegen.packed_tile import NEIGHBOURS, tile_order
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Weight, WeightTensor
from inductor_quant.kernels.weight_only.medium_m.kernel import WEIGHT_ONLY_MEDIUM_M
from inductor_quant.kernels.weight_only.small_m.kernel import WEIGHT_ONLY_SMALL_M
from inductor_quant.report.events import collect
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms import formats
from tests.support.gemms.generated import device, generate, hardest
from tests.support.gemms.weight_only import Case, described, gemm, generate_case, make_inputs

pytestmark = pytest.mark.usefixtures("large_groups")

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
TAKEN = ("gptq", "awq", "nibble_pairs", "int4_words", "uint2")


def weight_of(name):
    packed = formats.build(name, 512, 256)
    tensors = tuple(WeightTensor(dtype, shape) for _, shape, dtype in packed.tensors)
    return Weight(packed.format, tensors)


def test_which_formats_are_packed():
    assert {name for name in formats.FORMATS if packed_layout_of(weight_of(name))} == {
        *TAKEN,
        "act_order",
    }


def test_offsets_within_a_packed_word():
    gptq, awq = packed_layout_of(weight_of("gptq")), packed_layout_of(weight_of("awq"))
    assert gptq is not None
    assert awq is not None
    assert (gptq.axis, gptq.offsets, gptq.strides) == (
        "k",
        tuple(range(0, 32, 4)),
        ((1, 0, 0), (0, 1, 0)),
    )
    assert (awq.axis, awq.offsets) == ("n", (0, 16, 4, 20, 8, 24, 12, 28))
    signed = packed_layout_of(weight_of("int4_words"))
    assert signed is not None
    assert signed.signed


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("contiguous", ["k", "n"])
@pytest.mark.parametrize(("block_n", "warps"), [(128, 1), (128, 2), (256, 4), (64, 2)])
def test_every_order_is_a_permutation(name, contiguous, block_n, warps):
    words = packed_layout_of(weight_of(name))
    order = tile_order(words, block_k=128, block_n=block_n, warps=warps, contiguous=contiguous)
    if order is None:
        pytest.skip("too small")
    assert sorted(order.k) == sorted(order.k_mma)
    assert sorted(order.n) == sorted(order.n_mma)
    assert sorted(order.unpacked) == sorted((*order.k, *order.n))
    assert order.k_mma[-1] == ("p0", 2)  # a register holds two neighbours along K


@pytest.mark.parametrize(
    ("case", "code"),
    [
        (Case("gptq", 64, 512, 512), RejectionCode.NO_KERNEL),  # large M
        (Case("gptq", 4, 512, 512, f32), RejectionCode.NO_KERNEL),  # not 16 bits
        (Case("hqq", 4, 512, 512), RejectionCode.NO_KERNEL),  # halves of N share a byte
        (Case("int8_group", 4, 512, 512), RejectionCode.NO_KERNEL),  # one value per byte
    ],
    ids=str,
)
def test_rejected_gemms(case, code):
    spec, problem = described(case)
    rejection = WEIGHT_ONLY_SMALL_M.rejection(spec, problem, device(90))
    assert rejection is not None
    assert rejection.code == code


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq", GemmConfig(8, 128, 256, 2, 3)),  # two groups in a block
        ("gptq", GemmConfig(8, 128, 128, 2, 3, split_k=8)),  # less than a block per split
        ("gptq", GemmConfig(8, 128, 32, 2, 3)),  # four packed words along K
        ("awq", GemmConfig(8, 32, 128, 2, 3)),  # four packed words along N
        ("gptq", GemmConfig(64, 256, 128, 2, 3)),  # too many accumulators
        ("act_order", GemmConfig(8, 128, 128, 2, 3)),  # the group changes at any k
    ],
    ids=str,
)
def test_rejected_configurations(name, config):
    spec, problem = described(Case(name, 8, 512, 512))
    assert WEIGHT_ONLY_SMALL_M.config_rejection(spec, problem, config, device(90)) is not None


def test_odd_sizes_are_left_to_the_general_kernel():
    spec, problem = described(Case("gptq", 4, 200, 512))
    assert WEIGHT_ONLY_SMALL_M.configs(spec, problem, device(90)) == []


@pytest.mark.parametrize("m", [1, 8, 9, 16, 32])
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (6144, 4096), (4096, 14336), (256, 512)])
def test_configurations_are_legal_and_share_the_split(name, m, n, k):
    spec, problem = described(Case(name, m, n, k))
    found = WEIGHT_ONLY_SMALL_M.configs(spec, problem, device(90))
    assert len(set(found)) == len(found) >= 1
    assert len({config.split_k for config in found}) == 1
    for config in found:
        assert WEIGHT_ONLY_SMALL_M.config_rejection(spec, problem, config, device(90)) is None


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("arch", "name", "rows"),
    [(80, "gptq", (16,)), (90, "gptq", (32,)), (90, "awq", (16,))],
)
def test_configurations_do_not_spill(arch, name, rows):
    for m in rows:
        case = Case(name, m, 1024, 2048)
        spec, problem = described(case)
        for config in hardest(WEIGHT_ONLY_SMALL_M.configs(spec, problem, device(arch)), 1):
            generated = generate_case(case, f"weight_only_small_m {config}", arch=arch)
            [source] = [s for s in generated.kernels.values() if "inline_asm" in s]
            [text] = [n for n, s in generated.kernels.items() if s is source]
            kernel = simulate.compile_kernel(text, source)
            assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
            # From 3.8 on Triton uses wgmma for one warpgroup of four warps
            is_group = arch == 90 and config.num_warps == 4 and NEIGHBOURS == 2
            wanted = "wgmma" if is_group else "mma.sync"
            assert any(wanted in name for name in kernel.matrix_instructions()), config


@pytest.mark.compiles
def test_unpacking_costs_about_one_instruction_per_value():
    """One ``lop3`` per value, and the shifts and ``prmt`` of the packed words; no packed weight
    passes through shared memory a second time."""
    case = Case("gptq", 1, 1024, 2048)
    config = "weight_only_small_m 8x128x128_w2_s3_g8"
    [(name, source)] = generate_case(case, config).kernels.items()
    ptx = simulate.compile_kernel(name, source).ptx
    numbers = 128 * 128 // 64
    assert ptx.count("lop3.b32") == numbers // 2
    assert ptx.count("0x5410") == numbers // 16
    # 8 x 128 accumulators on their way out and x_sum, nothing of the 128 x 128 values
    assert ptx.count("st.shared") < 40


@pytest.mark.compiles
def test_partials_are_added_in_the_epilogue_kernel():
    """Two launches: the partials; then sum, scales, bias and the user's epilogue."""
    case = Case("int4_words", 4, 1024, 16384, bias=True, column_scale="channel")

    def fn(residual, *inputs):
        return torch.nn.functional.silu(gemm(case)(*inputs)) + residual

    def make(device):
        return torch.empty(4, 1024, dtype=bf16, device=device), *make_inputs(case, device)

    with collect() as report:
        generated = generate(fn, make)
    assert "_k" in report.kernels[0].chosen
    assert [name.startswith("triton_tem") for name in generated.kernels] == [True, False]
    assert "tl.sum" not in list(generated.kernels.values())[1]


@pytest.mark.compiles
@pytest.mark.parametrize(("name", "m"), [("gptq", 4), ("awq", 64)])
def test_k_is_not_split_if_m_is_symbolic(name, m):
    """Partials would be fp32 [split_k, M, N] for any M."""
    case = Case(name, m, 1024, 4096, f16)

    def make(device):
        inputs = make_inputs(case, device)
        torch._dynamo.mark_dynamic(inputs[0], 0)
        return inputs

    with collect() as report:
        generated = generate(gemm(case), make)
    assert "_k" not in report.kernels[0].chosen
    [source] = generated.kernels.values()
    assert "inline_asm" in source
    spec, problem = described(case)
    symbolic = dataclasses.replace(problem, m_is_static=False, m_is_bounded=False)
    for kernel in (WEIGHT_ONLY_SMALL_M, WEIGHT_ONLY_MEDIUM_M):
        if kernel.rejection(spec, problem, device(90)) is None:
            config = dataclasses.replace(kernel.configs(spec, problem, device(90))[0], split_k=2)
            assert kernel.config_rejection(spec, problem, config, device(90)) is None
            assert kernel.config_rejection(spec, symbolic, config, device(90)) is not None
