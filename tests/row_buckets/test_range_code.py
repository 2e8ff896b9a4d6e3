"""The machine code of a range of M is about that of a static compilation."""

from __future__ import annotations

import pytest
import torch

from examples.benchmarks.workers.quantizers import Int4Linear
from inductor_quant import simulate
from inductor_quant._compat import gluon
from tests.support.ranges import Attention

bf16 = torch.bfloat16

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]


def test_masks_of_rows_are_not_kept_as_bits():
    """Each row of the tile is compared with M where it is stored. LLVM otherwise shifts the results
    into words before the epilogue, whose values spill then."""

    def inputs(device):
        with torch.device(device):
            x = torch.zeros(4000, 4096, dtype=bf16)
            torch._dynamo.mark_dynamic(x, 0, min=2049, max=4064)
            return Int4Linear(torch.nn.Linear(4096, 4096, bias=False, dtype=bf16)), x

    made = simulate.generate(lambda model, x: model(x), inputs, backend="inductor_quant")
    [(name, source)] = [item for item in made.kernels.items() if "gl.warp_specialize" in item[1]]
    assert "weight_only_mm_sm90" in source
    assert "M = ks0" in source
    kernel = simulate.compile_kernel(name, source)
    assert kernel.spill_stores == 0
    assert "setp.ne.b64" not in kernel.ptx


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_dynamic", [True, False])
def test_a_symbolic_number_of_rows_is_padded_like_a_number(is_dynamic):
    def inputs(device):
        with torch.device(device):
            x = torch.zeros(40, 512, dtype=bf16)
            if is_dynamic:
                torch._dynamo.mark_dynamic(x, 0)
            return Attention(), x

    made = simulate.generate(lambda model, x: model(x), inputs, backend="inductor_quant")
    assert ("(40, 4, 1601)" in made.wrapper) != is_dynamic
    assert "(6656, 1664, 1), torch.bfloat16)" in made.wrapper
