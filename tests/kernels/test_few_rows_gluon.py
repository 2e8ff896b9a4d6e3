"""The Gluon kernel for few rows: what it takes, how it is shared out, what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from inductor_quant import _gluon_compat as gluon
from inductor_quant import simulate
from inductor_quant.decisions import RejectionCode
from inductor_quant.kernels import few_rows_gluon
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.group import together
from inductor_quant.kernels.words import TINY, Words, unpack_pair_shifted
from inductor_quant.simulate import _ptx
from tests.support import formats
from tests.support.generated import device
from tests.support.weight_only import Case, described, generate_case

bf16, f16 = torch.bfloat16, torch.float16
SIZES = [(28672, 4096), (6144, 4096), (4096, 14336), (4096, 11008), (1024, 2048)]


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (Case("gptq", 1, 4096, 4096), 100),
        (Case("gptq", 17, 4096, 4096), 90),
        (Case("awq", 1, 4096, 4096), 90),  # words along N
        (Case("nibble_pairs", 1, 4096, 4096), 90),  # words of 8 bits
        (Case("uint2", 1, 4096, 4096), 90),
        (Case("int4_words", 1, 4096, 4096), 90),  # scales of whole columns
        (Case("act_order", 1, 4096, 4096), 90),
    ],
    ids=str,
)
def test_what_is_for_the_other_kernels(case, arch):
    rejection = few_rows_gluon.supports(*described(case), device(arch))
    assert rejection is not None
    assert rejection.code == RejectionCode.NO_KERNEL


def test_rows_must_be_known():
    spec, problem = described(Case("gptq", 4, 4096, 4096))
    assert few_rows_gluon.supports(spec, problem, device(90)) is None
    problem = dataclasses.replace(problem, m_is_static=False)
    assert few_rows_gluon.supports(spec, problem, device(90)) is not None


@pytest.mark.parametrize("m", [1, 8, 9, 16])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_configurations_are_legal_and_share_the_split(m, n, k):
    spec, problem = described(Case("gptq", m, n, k))
    found = few_rows_gluon.configs(spec, problem, device(90))
    assert len(set(found)) == len(found) >= 1
    assert len({config.split_k for config in found}) == 1
    for config in found:
        assert few_rows_gluon.is_legal(spec, problem, config, device(90)) is None


@pytest.mark.parametrize(("m", "columns"), [(1, (4096, 1024, 1024)), (16, (14336, 14336))])
def test_gemms_whose_launch_costs_fusions_have_parts_of_k(m, columns):
    """They are added up where the fused kernels would have been."""
    spec, _ = described(Case("gptq", m, 1024, 4096))
    members = [described(Case("gptq", m, n, 4096))[1] for n in columns]
    for lost, is_split in ((0, False), (2, True)):
        found = few_rows_gluon.configs(spec, together(members, lost_fusions=lost), device(90))
        assert found
        assert all((config.split_k > 1) == is_split for config in found)


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(16, 32, 64, 1, 1),  # less than a slice
        GemmConfig(32, 32, 512, 4, 1),  # more rows than the kernel has
        GemmConfig(8, 32, 512, 4, 1),  # fewer than there are
        GemmConfig(16, 16, 512, 4, 1),
        GemmConfig(16, 32, 256, 2, 1, split_k=8),  # no slice is left for a part
        GemmConfig(16, 1024, 512, 4, 1),  # too many sums
    ],
    ids=str,
)
def test_what_is_not_legal(config):
    spec, problem = described(Case("gptq", 9, 1024, 512))
    assert few_rows_gluon.is_legal(spec, problem, config, device(90)) is not None


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (GemmConfig(8, 32, 2048, 8, 1, split_k=2), 256),  # 896 tiles a part: 7 for each of 128
        (GemmConfig(8, 32, 4096, 16, 1), 128),
        (GemmConfig(8, 32, 2048, 8, 1), 896),  # x is not kept
    ],
    ids=str,
)
def test_how_many_programs_share_the_tiles(config, count):
    _, problem = described(Case("gptq", 1, 28672, 4096))
    assert few_rows_gluon.programs(problem, config, device(90)) == count


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_shifted_nibbles_are_exact(dtype, signed):
    """Every field in every place, with every zero point of four bits and GPTQ's one more."""
    words = Words("k", 32, few_rows_gluon.OFFSETS, 4, signed, 0, ())
    fields, zeros = torch.meshgrid(torch.arange(16), torch.arange(17), indexing="ij")
    fields, zeros = fields.flatten(), zeros.flatten()
    parts, bias = TINY[dtype].parts, words.bias()
    shifts = (-(zeros + bias).double() / parts).to(dtype)
    assert torch.equal(shifts.double() * parts, -(zeros + bias).double())
    expected = (fields ^ 8) - 8 - zeros if signed else fields - zeros
    for pair in range(4):
        # the other fields of a word, and the second of the pair, have other bits
        low, high = (fields << 4 * at for at in (pair, pair + 4))
        for word, place in ((low, 0), (high, 1)):
            word = word | (0xA5C3_965A & ~(0xF << 4 * (pair + 4 * place)))
            word = word.to(torch.uint32).numpy().repeat(2)
            twice = shifts.view(torch.uint16).numpy().repeat(2)
            assembly = unpack_pair_shifted(words, dtype, pair)
            [found] = _ptx.run(assembly.text, [word, twice], [np.uint16], assembly.pack)
            found = torch.from_numpy(found.reshape(-1, 2)[:, place].copy()).view(dtype)
            assert torch.equal(found.double() * parts, expected.double())


needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("m", "n", "k", "arch"),
    [
        (1, 28672, 4096, 90),
        (16, 28672, 4096, 90),
        (1, 4096, 11008, 90),
        (16, 6144, 4096, 80),
    ],
)
def test_words_go_from_memory_to_registers(m, n, k, arch):
    case = Case("gptq", m, n, k)
    config, *_ = few_rows_gluon.configs(*described(case), device(arch))
    generated = generate_case(case, f"weight_only_few_rows_gluon {config}", arch=arch)
    [(name, source)] = [item for item in generated.kernels.items() if "mma_v2" in item[1]]
    kernel = simulate.compile_kernel(name, source)
    assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
    # all but the sums of the warps, one behind the other
    assert kernel.shared_bytes <= 2 * config.num_warps * config.block_m * config.block_n * 4
    assert "mma.sync.aligned.m16n8k16" in "".join(kernel.matrix_instructions())
