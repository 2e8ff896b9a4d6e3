"""``-m quick``: one GEMM of each kernel, generated here, and a test of each pass."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from inductor_quant._compat import gluon
from inductor_quant.kernels import KERNELS
from tests.support.gemms import (
    block_sparse,
    experts,
    formats,
    fp8,
    quantizing,
    scaled_experts,
    w4a8,
    w8a8,
    weight_only,
)
from tests.support.gemms.generated import generate

TESTS = Path(__file__).parents[1]
PATTERNS = TESTS.parent / "patterns"
BLOCK, HALF = (128, 128), torch.float16

# A GEMM that sm_90 computes with the kernel.
GEMMS = {
    "w8a8_decode_quantize": quantizing.Case(1, 4096, 4096),
    "w8a8_decode": w8a8.Case(8, 6144, 4096),
    "w8a8_large_m_sm90": w8a8.Case(4096, 4096, 4096),
    "w8a8_persistent": w8a8.Case(4096, 4096, 256),
    "w8a8_mm": w8a8.Case(64, 512, 256),
    "w4a8_direct": w4a8.Case("nibble_pairs", 1, 4096, 4096),
    "w4a8_mm_sm90": w4a8.Case("nibble_pairs", 64, 4096, 4096),
    "weight_only_small_m_sm90": weight_only.Case("gptq", 16, 28672, 4096),
    "weight_only_large_m_sm90": weight_only.Case("gptq", 128, 14336, 3072, HALF),
    "weight_only_medium_m_sm90": weight_only.Case("gptq", 33, 6144, 2048, HALF),
    "weight_only_decode": weight_only.Case("gptq", 1, 4096, 4096),
    "weight_only_direct": weight_only.Case("awq", 1, 4096, 4096, HALF),
    "weight_only_small_m": weight_only.Case("nibble_pairs", 8, 4096, 4096, layout="every_second"),
    "weight_only_mm_sm90": weight_only.Case("awq", 64, 2048, 2048, HALF),
    "weight_only_medium_m": weight_only.Case("nibble_pairs", 64, 2048, 2048, layout="every_second"),
    "weight_only_bytes": weight_only.Case("int8_channel", 1, 4096, 4096),
    "weight_only_mm": weight_only.Case("act_order", 16, 2048, 1024, HALF),
    "weight_only_dequantize": weight_only.Case("nf4", 16384, 1024, 1024),
    "fp8_decode_quantize": quantizing.Case(1, 4096, 4096, element=quantizing.E4M3),
    "fp8_decode": fp8.Case(8, 6144, 4096),
    "fp8_split_k": fp8.Case(64, 512, 512),
    "fp8_large_m_sm90": fp8.Case(4096, 2112, 1536),
    "fp8_persistent": fp8.Case(4096, 4096, 256, fast_accum=True),
    "fp8_mm": fp8.Case(300, 512, 512),
    "fp8_block_decode": fp8.Case(1, 2176, 1024, BLOCK),
    "fp8_block_two_block_sm90": fp8.Case(128, 7168, 2048, BLOCK),
    "fp8_block_split_k": fp8.Case(16, 2176, 7168, BLOCK),
    "fp8_block_large_m_sm90": fp8.Case(4096, 2176, 1536, BLOCK),
    "fp8_block_persistent": fp8.Case(4096, 4096, 512, (64, 64)),
    "fp8_block_mm": fp8.Case(400, 512, 512, BLOCK),
    "block_sparse_mm_tma": block_sparse.Case(128, 512, 512),
    "block_sparse_mm": block_sparse.Case(16, 512, 512),
    "experts_direct": experts.Case("nibble_pairs", (3, 0, 5), 512, 1024),
    "experts_mm": experts.Case("act_order", (3, 0, 5), 512, 1024, dtype=HALF),
    "scaled_experts_mm": scaled_experts.Case((3, 0, 5), 512, 1024, block=BLOCK),
    "scaled_experts_int8_mm": scaled_experts.Case((3, 0, 5), 512, 1024, torch.int8),
}
# The first test of tests/patterns/<folder>/test_<pass>.py is quick (conftest.py). Passes without
# such a file have a test elsewhere, marked quick.
ELSEWHERE = {
    "recognizers/fp8_dequantized": (
        "patterns/recognizers/test_scaled_mm.py",
        "test_operands_are_dequantized_for_any_number_of_rows",
    ),
    "fusion/concat_weights": (
        "backend/test_freezing.py",
        "test_frozen_gemms_of_one_activation_are_one_with_few_rows",
    ),
}


@pytest.mark.quick
@pytest.mark.compiles
@pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")
@pytest.mark.parametrize("kernel", GEMMS)
def test_a_gemm_runs_in_the_kernel(kernel, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    case = GEMMS[kernel]
    if isinstance(case, quantizing.Case):
        fn, make = case.call(), case.inputs
    else:
        modules = (block_sparse, experts, fp8, scaled_experts, w4a8, w8a8, weight_only)
        [of] = [of for of in modules if isinstance(case, of.Case)]
        fn, make = of.gemm(case), lambda device: of.make_inputs(case, device)
    [chosen, *_] = [choices[0].name for choices in generate(fn, make).choices]
    assert re.fullmatch(rf".*inductor_quant_{kernel}_\d+", chosen)


@pytest.mark.quick
def test_every_kernel_has_a_gemm():
    assert set(GEMMS) == {kernel.name for kernel in KERNELS}


@pytest.mark.quick
def test_every_pass_has_a_quick_test():
    passes = {
        f"{folder}/{path.stem}"
        for folder in ("recognizers", "fusion")
        for path in (PATTERNS / folder).glob("[!_]*.py")
    }
    own = {
        name
        for name in passes
        if (TESTS / "patterns" / name).with_name(f"test_{name.partition('/')[2]}.py").is_file()
    }
    assert passes - own == set(ELSEWHERE)
    for file, name in ELSEWHERE.values():
        [test] = [
            node
            for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        assert "pytest.mark.quick" in map(ast.unparse, test.decorator_list), (file, name)
