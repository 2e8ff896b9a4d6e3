"""A norm and the group quantization after it, on a real GPU: one kernel, every element."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.support.spellings import group_reduce as groups
from tests.support.spellings.group_reduce import GROUP, Case, exact_norm, exact_scale, returning

pytestmark = [pytest.mark.gpu, pytest.mark.sm89]

# of the sum over a row, the approximate root and the approximate quotient
SLACK = 2**-18
OPTIONS = {"inductor_quant.on_error": "raise"}


def compiled(fn):
    return torch.compile(fn, backend="inductor_quant", options=OPTIONS)


CASES = [
    Case("rms", "in_blocks", 1, 7168, residual=True),
    Case("llama", "in_blocks", 64, 4096),
    Case("deepseek", "power_of_two", 4096, 7168, residual=True, along_m=True),
    Case("layer", "repeated", 130, 8192, residual=True, dynamic=True),
    Case("rms", "of_both_ends", 4097, 512),
    Case("rms", "integers", 33, 1536, residual=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_and_every_scale(case):
    torch.manual_seed(0)
    inputs = [x.cuda() for x in groups.random_inputs(case)]
    if case.dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 0)
        torch._dynamo.mark_dynamic(inputs[1], 0)
    (a, scale, *_), codes = run_and_get_code(compiled(returning(case)), *inputs)
    assert all("group_reduce" in code for code in codes)  # one for each range of rows met
    y = exact_norm(case, *inputs[:3])
    wanted = exact_scale(case, y)
    assert ((scale.double() - wanted).abs() <= SLACK * wanted).all()
    quotient = (y.unflatten(1, (-1, GROUP)) / scale.double()[..., None]).flatten(1)
    assert groups.is_nearest(a, quotient, SLACK).all()


@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize("along_m", [False, True])
def test_the_product_reads_what_was_stored(m, along_m):
    case = Case("rms", "in_blocks", m, 7168, along_m=along_m, residual=True, gate=True)
    torch.manual_seed(0)
    inputs = [x.cuda() for x in groups.random_inputs(case)]
    (out, gated, residual), [code] = run_and_get_code(compiled(case.fn), *inputs)
    assert "group_reduce" in code
    y = exact_norm(case, *inputs[:3])
    scale = exact_scale(case, y)
    a = (y.unflatten(1, (-1, GROUP)) / scale[..., None]).float().to(groups.e4m3)
    a = (a.double() * scale[..., None]).flatten(1)
    wide = inputs[5].double().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    for got, wanted in (
        (out, a @ (inputs[4].double() * wide).t()),
        (gated, y @ inputs[3].double().t()),
    ):
        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()
    assert torch.equal(residual, inputs[0] + inputs[1])


def test_a_cuda_graph_gives_the_same_bits_twice():
    case = Case("rms", "in_blocks", 64, 7168, residual=True, along_m=True)
    torch.manual_seed(0)
    inputs = [x.cuda() for x in groups.random_inputs(case)]
    fn = compiled(case.fn)
    wanted = [out.clone() for out in fn(*inputs)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fn(*inputs)
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, found, wanted))
