"""The weight_only kernel for words and more rows: what it takes, and what it compiles to."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.decisions import RejectionCode
from inductor_quant.kernels import many_rows
from inductor_quant.kernels.config import GemmConfig
from tests.support import formats
from tests.support.generated import device
from tests.support.weight_only import Case, described, generate_case

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


@pytest.mark.parametrize(
    ("case", "is_taken"),
    [
        (Case("gptq", 64, 512, 512, f16), True),
        (Case("awq", 128, 512, 512, f16), True),
        (Case("nibble_pairs", 64, 512, 512, bf16), True),
        (Case("int4_words", 64, 512, 512, bf16), True),  # no scale in the loop
        (Case("gptq", 64, 512, 512, bf16), False),  # fp16 scales: a product would be rounded twice
        (Case("gptq", 64, 512, 512, f32), False),
        (Case("gptq", 129, 512, 512, f16), False),
        (Case("gptq", 256, 16384, 512, f16), True),
        (Case("hqq", 64, 512, 512, bf16), False),
    ],
    ids=str,
)
def test_what_it_takes(case, is_taken):
    spec, problem = described(case)
    rejection = many_rows.supports(spec, problem, device(90))
    assert (rejection is None) == is_taken
    assert rejection is None or rejection.code == RejectionCode.NO_KERNEL


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(64, 128, 256, 8, 3),  # two groups in a block
        GemmConfig(64, 96, 128, 4, 3),
        GemmConfig(64, 128, 128, 8, 3, split_k=8),  # less than a block a part
        GemmConfig(64, 256, 128, 4, 3),  # numbers a thread
    ],
    ids=str,
)
def test_what_is_not_legal(config):
    spec, problem = described(Case("gptq", 64, 512, 512, f16))
    assert many_rows.is_legal(spec, problem, config, device(90)) is not None


def test_a_group_that_changes_at_any_k_is_left_to_the_kernel_for_all_formats():
    spec, problem = described(Case("act_order", 64, 512, 512, f16))
    assert many_rows.configs(spec, problem, device(90)) == []


@pytest.mark.compiles
@pytest.mark.parametrize(("name", "arch"), [("gptq", 80), ("gptq", 90), ("awq", 90)])
def test_configurations_do_not_spill(name, arch):
    compiled = set()
    for m in (64, 128):
        case = Case(name, m, 1024, 2048, f16)
        spec, problem = described(case)
        found = many_rows.configs(spec, problem, device(arch))
        assert found
        for config in found:
            if config in compiled:  # with 128 rows there are more programs of the same
                continue
            compiled.add(config)
            generated = generate_case(case, f"weight_only_words {config}", arch=arch)
            [text] = [name for name, s in generated.kernels.items() if "inline_asm" in s]
            kernel = simulate.compile_kernel(text, generated.kernels[text])
            assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
            instructions = " ".join(kernel.matrix_instructions())
            assert ("wgmma" if arch == 90 else "mma.sync") in instructions, config
