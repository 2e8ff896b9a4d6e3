"""Random dequantizations: the weight of each class against the graph's, run op by op.

same_for       W of the canonical op, in fp32 and rounded once, is the graph's bit for bit
in order       W in fp64 is the graph's in fp64: only roundings differ
is_reordered   they differ by less than fp64 resolves
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_quant.ops.dequantize import dequantize
from inductor_quant.patterns.weights.decode import Weight
from tests.support.graphs.reading import read_weight, tensors_of
from tests.support.sampling import sampled

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CAST = torch.ops.prims.convert_element_type.default
ARITHMETIC = [getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div")]
K, N, G = 16, 8, 4
OPERANDS = ("number", "power", "whole", "integer", "scale", "product", "quotient", "reciprocal")


def rows(value):
    return value[:, None].expand(-1, G, -1).reshape(K, N)


def draw(rng):
    """(function of the inputs that computes a weight, the inputs)"""
    x_dtype = rng.choice((f32, bf16, f16))
    narrow = rng.choice((f32, f32, x_dtype, f16, bf16))
    low, high, stored = rng.choice(
        ((-128, 128, torch.int8), (0, 256, torch.uint8), (0, 16, torch.uint8))
    )
    integer = rng.choice((None, None, "field", "constant", "zero"))
    casts = [rng.choice((f32, x_dtype, bf16, f16, f64, narrow)) for _ in range(3)]
    steps = [
        (rng.choice(("add", "sub", "mul", "mul", "div")), rng.choice(OPERANDS), rng.choice(casts))
        for _ in range(rng.randint(0, 3))
    ]
    is_cast = rng.random() < 0.8
    number, offset = rng.choice((0.1, 3.0, 0.7)), rng.choice((8, 100, 1000, 4000))

    def operand(kind, s, t, z, dtype):
        return {
            "number": lambda: number,
            "power": lambda: 0.25,
            "whole": lambda: 8.0,
            "integer": lambda: rows(z).to(dtype),
            "scale": lambda: rows(s),
            "product": lambda: rows(s) * rows(t),
            "quotient": lambda: rows(s / t),
            "reciprocal": lambda: rows(1 / s),
        }[kind]()

    def weight(q, s, t, z):
        if integer == "field":
            q = q & 15
        if integer == "constant":
            q = q.to(torch.int32) + offset
        if integer == "zero":
            q = q.to(torch.int32) - rows(z).to(torch.int32)
        w = q.to(casts[0]) if is_cast else q
        for name, kind, dtype in steps:
            w = getattr(torch, name)(w, operand(kind, s, t, z, dtype)).to(dtype)
        return w.to(x_dtype)

    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    q = torch.randint(low, high, (K, N), generator=generator).to(stored)
    s, t = ((torch.rand(K // G, N, generator=generator) + 0.5).to(narrow) for _ in range(2))
    span = rng.choice((16, 200, 30000))
    z = torch.randint(0, span, (K // G, N), generator=generator)
    return weight, (q, s, t, z.to(torch.int16 if span > 127 else torch.int8)), x_dtype


class InFloat64(Interpreter):
    """The graph with all arithmetic in fp64 (integers are small)."""

    def call_function(self, target, args, kwargs):
        if target == CAST and args[1].is_floating_point:
            args = (args[0], f64)
        elif target in ARITHMETIC:  # an integer times a number is fp32
            args = tuple(a.double() if isinstance(a, torch.Tensor) else a for a in args)
        return super().call_function(target, args, kwargs)


def check(seed):
    rng = random.Random(seed)
    function, inputs, x_dtype = draw(rng)
    graph = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)
    [output] = graph.graph.output_node().all_input_nodes
    found = read_weight(output)
    if not isinstance(found, Weight):
        return "rejected"
    values = {}

    class Kept(Interpreter):
        def run_node(self, node):
            values[node] = super().run_node(node)
            return values[node]

    want = Kept(graph).run(*inputs)
    sources = tensors_of(found, values)
    is_read = all(s.op == "placeholder" for s in found.sources if isinstance(s, fx.Node))
    if x_dtype in found.same_for:
        got = dequantize(found.format, sources).to(x_dtype)
        assert torch.equal(got.nan_to_num(), want.nan_to_num()), (
            f"seed {seed}: {found.format}\n{graph.code}"
        )
        return "same"
    if is_read:
        got = dequantize(found.format, sources, f64)
        want = InFloat64(graph).run(*(v.double() if v.is_floating_point() else v for v in inputs))
        limit = 1e-12 if found.is_reordered else 1e-15
        torch.testing.assert_close(
            got, want, rtol=limit, atol=1e-9 if found.is_reordered else 0, equal_nan=True
        )
    return "reordered" if found.is_reordered else "fewer"


@pytest.mark.parametrize("part", sampled(range(8), every=8))
def test_a_weight_is_the_graphs_as_its_class_says(part):
    outcomes = Counter(check(seed) for seed in range(part * 125, part * 125 + 125))
    assert all(outcomes[name] > 5 for name in ("same", "fewer", "reordered")), outcomes
