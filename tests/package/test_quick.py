"""``-m quick``: one GEMM of each kernel, generated here, and a test of each pass."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from inductor_quant._compat import gluon
from inductor_quant.kernels import KERNELS
from tests.support.gemms import each_kernel, formats
from tests.support.gemms.generated import generate

TESTS = Path(__file__).parents[1]
PATTERNS = TESTS.parent / "patterns"
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
    "fusion/repack_weights": (
        "backend/test_frozen_repack.py",
        "test_a_frozen_weight_in_a_slow_layout_is_repacked_as_by_prepack",
    ),
}


@pytest.mark.quick
@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")
@pytest.mark.parametrize("kernel", each_kernel.GEMMS)
def test_a_gemm_runs_in_the_kernel(kernel, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", each_kernel.GROUP)
    fn, make = each_kernel.parts(each_kernel.GEMMS[kernel])
    [chosen, *_] = [choices[0].name for choices in generate(fn, make).choices]
    assert re.fullmatch(rf".*inductor_quant_{kernel}_\d+", chosen)


@pytest.mark.quick
def test_every_kernel_has_a_gemm():
    assert set(each_kernel.GEMMS) == {kernel.name for kernel in KERNELS}


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
