"""``weight_only_decode``: which GEMMs it takes, its configurations, the machine code."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.codegen.packed_layout import PackedLayout
from inductor_quant.kernels.codegen.unpack_ptx import SUBNORMALS, unpack_pair_shifted
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.shared.horizontal import together
from inductor_quant.kernels.weight_only.decode.kernel import WEIGHT_ONLY_DECODE, num_ctas
from inductor_quant.kernels.weight_only.direct.kernel import WEIGHT_ONLY_DIRECT
from inductor_quant.kernels.weight_only.rules import INT4_OFFSETS
from inductor_quant.simulate.interpreter import ptx
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import Case, described, generate_case
from tests.support.sampling import sampled

pytestmark = pytest.mark.usefixtures("large_groups")

bf16, f16 = torch.bfloat16, torch.float16
SIZES = [(28672, 4096), (6144, 4096), (4096, 14336), (4096, 11008), (1024, 2048)]


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (Case("gptq", 1, 4096, 4096), 100),
        (Case("gptq", 17, 4096, 4096), 90),
        (Case("awq", 1, 4096, 4096), 90),  # packed along N
        (Case("nibble_pairs", 1, 4096, 4096), 90),  # packed in 8 bits
        (Case("uint2", 1, 4096, 4096), 90),
        (Case("int4_words", 1, 4096, 4096), 90),  # scales of whole columns
        (Case("act_order", 1, 4096, 4096), 90),
    ],
    ids=str,
)
def test_rejected_gemms(case, arch):
    rejection = WEIGHT_ONLY_DECODE.rejection(*described(case), device(arch))
    assert rejection is not None
    assert rejection.code == RejectionCode.NO_KERNEL


def test_m_must_be_static():
    spec, problem = described(Case("gptq", 4, 4096, 4096))
    assert WEIGHT_ONLY_DECODE.rejection(spec, problem, device(90)) is None
    problem = dataclasses.replace(problem, m_is_static=False, m_is_bounded=False)
    assert WEIGHT_ONLY_DECODE.rejection(spec, problem, device(90)) is not None


def test_what_direct_computes_faster_is_left_to_it_unless_it_refuses_or_a_pin_says_so():
    spec, problem = described(Case("gptq", 1, 2048, 2048, bf16))
    aligned = dataclasses.replace(problem, has_aligned_rows=True)

    def chosen(problem, *pins):
        found = candidates("weight_only", spec, problem, device(90), pinned=pins)
        return next(found)[0]

    assert chosen(aligned) is WEIGHT_ONLY_DIRECT
    assert chosen(problem) is WEIGHT_ONLY_DECODE  # direct takes no such rows
    assert chosen(aligned, "weight_only_decode 8x32x1024_w8_s1_g8") is WEIGHT_ONLY_DECODE


@pytest.mark.parametrize("m", [1, 8, 9, 16])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_configurations_are_legal_and_share_the_split(m, n, k):
    spec, problem = described(Case("gptq", m, n, k))
    found = WEIGHT_ONLY_DECODE.configs(spec, problem, device(90))
    assert len(set(found)) == len(found) >= 1
    assert len({config.split_k for config in found}) == 1
    for config in found:
        assert WEIGHT_ONLY_DECODE.config_rejection(spec, problem, config, device(90)) is None


@pytest.mark.parametrize(("m", "columns"), [(1, (4096, 1024, 1024)), (16, (14336, 14336))])
def test_a_horizontal_launch_that_costs_fusions_splits_k(m, columns):
    """The kernel that adds the partials takes the fusions."""
    spec, _ = described(Case("gptq", m, 1024, 4096))
    members = [described(Case("gptq", m, n, 4096))[1] for n in columns]
    for lost, is_split in ((0, False), (2, True)):
        found = WEIGHT_ONLY_DECODE.configs(spec, together(members, lost_fusions=lost), device(90))
        assert found
        assert all((config.split_k > 1) == is_split for config in found)


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(16, 32, 64, 1, 1),  # less than a slice
        GemmConfig(32, 32, 512, 4, 1),  # more rows than the kernel supports
        GemmConfig(8, 32, 512, 4, 1),  # fewer rows than M
        GemmConfig(16, 16, 512, 4, 1),
        GemmConfig(16, 32, 256, 2, 1, split_k=8),  # less than a slice per split
        GemmConfig(16, 1024, 512, 4, 1),  # too many accumulators
    ],
    ids=str,
)
def test_rejected_configurations(config):
    spec, problem = described(Case("gptq", 9, 1024, 512))
    assert WEIGHT_ONLY_DECODE.config_rejection(spec, problem, config, device(90)) is not None


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (GemmConfig(8, 32, 2048, 8, 1, split_k=2), 256),  # 896 tiles per split: 7 for each of 128
        (GemmConfig(8, 32, 4096, 16, 1), 128),
        (GemmConfig(8, 32, 2048, 8, 1), 896),  # x is not resident
    ],
    ids=str,
)
def test_how_many_ctas_share_the_tiles(config, count):
    _, problem = described(Case("gptq", 1, 28672, 4096))
    assert num_ctas(problem, config, device(90)) == count


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_shifted_nibbles_are_exact(dtype, signed):
    """Every value at every position, with every 4-bit zero point and GPTQ's 16."""
    words = PackedLayout("k", 32, INT4_OFFSETS, 4, signed, 0, ())
    fields, zeros = torch.meshgrid(torch.arange(16), torch.arange(17), indexing="ij")
    fields, zeros = fields.flatten(), zeros.flatten()
    parts, bias = SUBNORMALS[dtype].divisor, words.bias()
    shifts = (-(zeros + bias).double() / parts).to(dtype)
    assert torch.equal(shifts.double() * parts, -(zeros + bias).double())
    expected = (fields ^ 8) - 8 - zeros if signed else fields - zeros
    for pair in range(4):
        # other bits in the other fields of the word, and in the second of the pair
        low, high = (fields << 4 * at for at in (pair, pair + 4))
        for word, place in ((low, 0), (high, 1)):
            word = word | (0xA5C3_965A & ~(0xF << 4 * (pair + 4 * place)))
            word = word.to(torch.uint32).numpy().repeat(2)
            twice = shifts.view(torch.uint16).numpy().repeat(2)
            assembly = unpack_pair_shifted(words, dtype, pair)
            [found] = ptx.run(assembly.text, [word, twice], [np.uint16], assembly.pack)
            found = torch.from_numpy(found.reshape(-1, 2)[:, place].copy()).view(dtype)
            assert torch.equal(found.double() * parts, expected.double())


needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.mark.one_in(2)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("m", "n", "k", "arch"),
    sampled(
        [(16, 28672, 4096, 90), (1, 28672, 4096, 90), (16, 6144, 4096, 80), (1, 4096, 11008, 90)]
    ),
)
def test_packed_weights_go_from_memory_to_registers(m, n, k, arch):
    case = Case("gptq", m, n, k)
    config, *_ = WEIGHT_ONLY_DECODE.configs(*described(case), device(arch))
    generated = generate_case(case, f"weight_only_decode {config}", arch=arch)
    [(name, source)] = [item for item in generated.kernels.items() if "mma_v2" in item[1]]
    kernel = simulate.compile_kernel(name, source)
    assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
    # only the accumulators of the warps, of two tiles
    assert kernel.shared_bytes <= 2 * config.num_warps * config.block_m * config.block_n * 4
    assert "mma.sync.aligned.m16n8k16" in "".join(kernel.matrix_instructions())
