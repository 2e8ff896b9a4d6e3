"""``weight_only_medium_m``: which GEMMs it takes, and the machine code."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.weight_only.medium_m.kernel import WEIGHT_ONLY_MEDIUM_M
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms.generated import device, hardest
from tests.support.gemms.weight_only import Case, described, generate_case

pytestmark = pytest.mark.usefixtures("large_groups")

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("case", "is_taken"),
    [
        (Case("gptq", 64, 512, 512, f16), True),
        (Case("awq", 128, 512, 512, f16), True),
        (Case("nibble_pairs", 64, 512, 512, bf16), True),
        (Case("int4_words", 64, 512, 512, bf16), True),  # no scale in the loop
        (Case("gptq", 64, 512, 512, bf16), False),  # fp16 scales: would be rounded twice
        (Case("gptq", 64, 512, 512, f32), False),
        (Case("gptq", 129, 512, 512, f16), False),
        (Case("gptq", 256, 16384, 512, f16), False),
        (Case("hqq", 64, 512, 512, bf16), False),
    ],
    ids=str,
)
def test_what_it_takes(case, is_taken):
    spec, problem = described(case)
    rejection = WEIGHT_ONLY_MEDIUM_M.rejection(spec, problem, device(90))
    assert (rejection is None) == is_taken
    assert rejection is None or rejection.code == RejectionCode.NO_KERNEL


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(64, 128, 256, 8, 3),  # two groups in a block
        GemmConfig(64, 96, 128, 4, 3),
        GemmConfig(64, 128, 128, 8, 3, split_k=8),  # less than a block per split
        GemmConfig(64, 256, 128, 4, 3),  # too many values per thread
        GemmConfig(256, 128, 64, 8, 3),  # wrong on a GPU
    ],
    ids=str,
)
def test_rejected_configurations(config):
    spec, problem = described(Case("gptq", 64, 512, 512, f16))
    assert WEIGHT_ONLY_MEDIUM_M.config_rejection(spec, problem, config, device(90)) is not None


def test_groups_in_any_order_are_left_to_the_general_kernel():
    spec, problem = described(Case("act_order", 64, 512, 512, f16))
    assert WEIGHT_ONLY_MEDIUM_M.configs(spec, problem, device(90)) == []


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize(("name", "arch"), [("gptq", 80), ("gptq", 90), ("awq", 90)])
def test_configurations_do_not_spill(name, arch):
    compiled = set()
    for m in (64, 128):
        case = Case(name, m, 1024, 2048, f16)
        spec, problem = described(case)
        found = WEIGHT_ONLY_MEDIUM_M.configs(spec, problem, device(arch))
        assert found
        for config in hardest(found, 1):
            if config in compiled:  # M = 128 has some of the same
                continue
            compiled.add(config)
            generated = generate_case(case, f"weight_only_medium_m {config}", arch=arch)
            [text] = [name for name, s in generated.kernels.items() if "inline_asm" in s]
            kernel = simulate.compile_kernel(text, generated.kernels[text])
            assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
            instructions = " ".join(kernel.matrix_instructions())
            assert ("wgmma" if arch == 90 else "mma.sync") in instructions, config
