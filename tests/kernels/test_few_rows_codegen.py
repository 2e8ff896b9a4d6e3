"""The weight_only kernel for few rows: what it takes, what it compiles to, how words lie."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.decisions import RejectionCode
from inductor_quant.kernels import few_rows, many_rows
from inductor_quant.kernels.config import GemmConfig, Weight, WeightTensor
from inductor_quant.kernels.words import NEIGHBOURS, tile_order, words_of
from inductor_quant.report import collect
from tests.support import formats
from tests.support.generated import device, generate
from tests.support.weight_only import Case, described, gemm, generate_case, make_inputs

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
TAKEN = ("gptq", "awq", "nibble_pairs", "int4_words", "uint2")


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def weight_of(name):
    packed = formats.build(name, 512, 256)
    tensors = tuple(WeightTensor(dtype, shape) for _, shape, dtype in packed.tensors)
    return Weight(packed.format, tensors)


def test_which_formats_are_words():
    assert {name for name in formats.FORMATS if words_of(weight_of(name))} == {*TAKEN, "act_order"}


def test_how_the_numbers_of_a_word_lie():
    gptq, awq = words_of(weight_of("gptq")), words_of(weight_of("awq"))
    assert gptq is not None
    assert awq is not None
    assert (gptq.axis, gptq.offsets, gptq.steps) == (
        "k",
        tuple(range(0, 32, 4)),
        ((1, 0, 0), (0, 1, 0)),
    )
    assert (awq.axis, awq.offsets) == ("n", (0, 16, 4, 20, 8, 24, 12, 28))
    signed = words_of(weight_of("int4_words"))
    assert signed is not None
    assert signed.signed


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("contiguous", ["k", "n"])
@pytest.mark.parametrize(("block_n", "warps"), [(128, 1), (128, 2), (256, 4), (64, 2)])
def test_every_order_is_one_of_all_positions(name, contiguous, block_n, warps):
    words = words_of(weight_of(name))
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
        (Case("gptq", 64, 512, 512), RejectionCode.NO_KERNEL),  # many rows
        (Case("gptq", 4, 512, 512, f32), RejectionCode.NO_KERNEL),  # no 16 bits
        (Case("hqq", 4, 512, 512), RejectionCode.NO_KERNEL),  # halves of N share a byte
        (Case("int8_group", 4, 512, 512), RejectionCode.NO_KERNEL),  # one number a word
    ],
    ids=str,
)
def test_what_it_does_not_take(case, code):
    spec, problem = described(case)
    rejection = few_rows.supports(spec, problem, device(90))
    assert rejection is not None
    assert rejection.code == code


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq", GemmConfig(8, 128, 256, 2, 3)),  # two groups in a block
        ("gptq", GemmConfig(8, 128, 128, 2, 3, split_k=8)),  # less than a block a part
        ("gptq", GemmConfig(8, 128, 32, 2, 3)),  # four words along K
        ("awq", GemmConfig(8, 32, 128, 2, 3)),  # four words along N
        ("gptq", GemmConfig(64, 256, 128, 2, 3)),  # too many sums
        ("act_order", GemmConfig(8, 128, 128, 2, 3)),  # the group changes at any k
    ],
    ids=str,
)
def test_what_is_not_legal(name, config):
    spec, problem = described(Case(name, 8, 512, 512))
    assert few_rows.is_legal(spec, problem, config, device(90)) is not None


def test_odd_sizes_are_left_to_the_kernel_for_all_formats():
    spec, problem = described(Case("gptq", 4, 200, 512))
    assert few_rows.configs(spec, problem, device(90)) == []


@pytest.mark.parametrize("m", [1, 8, 9, 16, 32])
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (6144, 4096), (4096, 14336), (256, 512)])
def test_configurations_are_legal_and_share_the_split(name, m, n, k):
    spec, problem = described(Case(name, m, n, k))
    found = few_rows.configs(spec, problem, device(90))
    assert len(set(found)) == len(found) >= 1
    assert len({config.split_k for config in found}) == 1
    for config in found:
        assert few_rows.is_legal(spec, problem, config, device(90)) is None


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("arch", "name", "rows"),
    [(80, "gptq", (16,)), (90, "gptq", (32,)), (90, "awq", (16,))],
)
def test_configurations_do_not_spill(arch, name, rows):
    for m in rows:
        case = Case(name, m, 1024, 2048)
        spec, problem = described(case)
        for config in few_rows.configs(spec, problem, device(arch)):
            generated = generate_case(case, f"weight_only_few_rows {config}", arch=arch)
            [source] = [s for s in generated.kernels.values() if "inline_asm" in s]
            [text] = [n for n, s in generated.kernels.items() if s is source]
            kernel = simulate.compile_kernel(text, source)
            assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
            # four warps are one warpgroup, which Triton 3.8 and newer give to wgmma on Hopper
            is_group = arch == 90 and config.num_warps == 4 and NEIGHBOURS == 2
            wanted = "wgmma" if is_group else "mma.sync"
            assert any(wanted in name for name in kernel.matrix_instructions()), config


@pytest.mark.compiles
def test_a_weight_costs_about_one_instruction():
    """One ``lop3`` a number, and as many shifts and ``prmt`` as words need: of the words nothing
    passes through shared memory a second time."""
    case = Case("gptq", 1, 1024, 2048)
    config = "weight_only_few_rows 8x128x128_w2_s3_g8"
    [(name, source)] = generate_case(case, config).kernels.items()
    ptx = simulate.compile_kernel(name, source).ptx
    numbers = 128 * 128 // 64
    assert ptx.count("lop3.b32") == numbers // 2
    assert ptx.count("0x5410") == numbers // 16
    # of the 8 x 128 sums on their way out, x_sum, and nothing of the 128 x 128 numbers
    assert ptx.count("st.shared") < 40


@pytest.mark.compiles
def test_parts_are_added_where_the_epilogue_is():
    """Two launches: the parts, and one kernel for sum, scales, bias and what the user adds."""
    case = Case("int4_words", 4, 1024, 4096, bias=True, column_scale="channel")

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
def test_k_is_not_split_where_m_is_symbolic(name, m):
    """The parts would be fp32 [split_k, M, N], whatever M becomes."""
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
    symbolic = dataclasses.replace(problem, m_is_static=False)
    for module in (few_rows, many_rows):
        if module.supports(spec, problem, device(90)) is None:
            config = dataclasses.replace(module.configs(spec, problem, device(90))[0], split_k=2)
            assert module.is_legal(spec, problem, config, device(90)) is None
            assert module.is_legal(spec, symbolic, config, device(90)) is not None
