"""A zero point in a wide integer whose range is unknown: subtracted as the graph does, exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from inductor_quant.spec.decisions import RejectionCode
from inductor_quant.spec.exactness import Exactness
from tests.support.graphs.post_grad import CAST, calls, capture
from tests.support.sampling import sampled

pytestmark = pytest.mark.compiles

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
K, N, G = 64, 32, 16
WEIGHT_ONLY = torch.ops.inductor_quant.weight_only.default
ENDS = {32: 2**31, 64: 2**63}


def rows(value):
    return value[:, None].expand(-1, G, -1).reshape(K, N)


def inputs(stored, z_dtype):
    generator = torch.Generator().manual_seed(0)
    info, bits = torch.iinfo(stored), torch.iinfo(z_dtype).bits
    q = torch.randint(info.min, info.max + 1, (K, N), generator=generator).to(stored)
    z = torch.randint(-200, 200, (K // G, N), generator=generator)
    z[0] = torch.randint(-ENDS[bits], ENDS[bits] - 1, (N,), generator=generator)
    z[1, :8] = torch.arange(8) - ENDS[bits]  # where the difference wraps around
    z[1, 8:16] = ENDS[bits] - 1 - torch.arange(8)
    z[2, :8] = torch.arange(8) + 2**24
    s = torch.rand(K // G, N, generator=generator) + 0.5
    return q, z.to(z_dtype), s


WEIGHTS = {
    "in its dtype": lambda q, z, s: (q - rows(z)).float() * rows(s),
    "in int64": lambda q, z, s: (q.long() - rows(z)).float() * rows(s),
    "no scale": lambda q, z, s: (q - rows(z)).float(),
    "to bf16": lambda q, z, s: (q - rows(z)).to(bf16).float() * rows(s),
    "column": lambda q, z, s: (q - rows(z)).float() * s[0],
    "one zero point": lambda q, z, s: (q - z[1:2, :1]).float() * rows(s),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "stored", "z_dtype", "x_dtype"),
    sampled(
        itertools.product(
            WEIGHTS, (torch.int8, torch.uint8), (torch.int32, torch.int64), (f32, bf16)
        ),
        every=3,  # each weight, each pair of dtypes
    ),
    ids=str,
)
def test_the_difference_wraps_and_is_rounded_as_in_the_graph(name, stored, z_dtype, x_dtype):
    q, z, s = inputs(stored, z_dtype)
    x = torch.eye(K, dtype=x_dtype)
    with torch.no_grad():
        got, [rewrite] = capture(
            lambda x, q, z, s: x @ WEIGHTS[name](q, z, s).to(x.dtype), [x, q, z, s]
        )
        want = rewrite.before(*rewrite.inputs)[0]
    assert len(calls(rewrite.after, WEIGHT_ONLY)) == 1
    [match] = rewrite.report.matches
    is_same = match.exactness is Exactness.SAME_WEIGHT_ROUNDING
    casts = rewrite.before.graph.find_nodes(op="call_function", target=CAST)
    is_rounded = any(cast.args[0] in casts for cast in casts)  # torch 2.11 leaves it out
    assert is_same != (name == "to bf16" and is_rounded)
    assert not is_same or torch.equal(got, want)


def test_the_reason_of_a_rejection_names_the_zero_point():
    q, z, s = inputs(torch.int8, torch.int32)
    with torch.no_grad():
        _, [rewrite] = capture(
            lambda x, q, z, s: x @ ((q + rows(z)).float() * rows(s)), [torch.eye(K), q, z, s]
        )
    [rejection] = rewrite.report.rejections
    [zero] = [
        n
        for n in rewrite.before.graph.nodes
        if n.op == "placeholder" and n.meta["val"].dtype == z.dtype
    ]
    assert rejection.code == RejectionCode.WEIGHT_FORM
    assert f"the zero point {zero.name} has no known range" in rejection.detail
