"""The machine code of ``weight_only_mm_sm90`` where M is symbolic."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.backend import inductor_quant_backend
from tests.support.gemms.weight_only import Case, gemm, make_inputs
from tests.support.in_flight import machine_code

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.usefixtures("large_groups"),
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

bf16, f16 = torch.bfloat16, torch.float16
BESIDE_LOOP = 16  # bytes that may be spilled there


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "addends"), [("gptq", f16, 1), ("gptq", f16, 2), ("nibble_pairs", bf16, 2)]
)
def test_a_symbolic_m_costs_no_instructions_in_the_loop(name, dtype, addends):
    """LLVM kept comparisons of rows as bits, and ptxas spilled each value that an epilogue loads
    under a mask."""
    case, counts = Case(name, 4096, 4096, 4096, dtype), []
    options = {"inductor_quant.row_buckets": False, "inductor_quant.on_error": "raise"}
    for is_symbolic in (False, True):

        def make(device, is_symbolic=is_symbolic):
            x, *rest = make_inputs(case, device)
            added = torch.empty(addends, case.m, case.n, dtype=dtype, device=device).unbind()
            if is_symbolic:
                for rows in (x, *added):
                    torch._dynamo.mark_dynamic(rows, 0, min=2049, max=4097)
            return added, x, *rest

        generated = simulate.generate(
            lambda added, *inputs: gemm(case)(*inputs) + functools.reduce(operator.add, added),
            make,
            arch=90,
            backend=inductor_quant_backend,
            options=options,
        )
        [(kernel_name, source)] = generated.kernels.items()
        assert ("ks0" in source) == is_symbolic
        assert "weight_only_mm_sm90" in source
        kernel = simulate.compile_kernel(kernel_name, source)
        assert kernel.spill_stores <= BESIDE_LOOP
        code = [each for _, each in machine_code(kernel.ptx)]
        products = [i for i, each in enumerate(code) if "GMMA" in each]
        loop = code[products[0] : products[-1]]
        assert not [each for each in loop if "STL" in each or "LDL" in each]
        counts.append(products[-1] - products[0])
    assert counts[1] < 1.03 * counts[0]
