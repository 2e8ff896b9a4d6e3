"""Any function of ours may raise: the compiled model still computes what it should, with one
warning."""

from __future__ import annotations

import functools
import json
import re
import warnings

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import fallback, simulate
from inductor_quant.options import Options
from inductor_quant.simulate.capture import GeneratedKernel
from tests.support import faults
from tests.support.forks import Program
from tests.support.graphs.post_grad import capture, rewrite_graph, snapshot
from tests.support.producers import blocks

i8, f32, e4m3 = torch.int8, torch.float32, torch.float8_e4m3fn
M, N, K = 3, 64, 256


def quantized(x):
    scale = torch.maximum(-x.amin(-1, True).clamp(max=0), x.amax(-1, True).clamp(min=0)) / 127
    return (x / scale).round().clamp(-128, 127).to(i8), scale


def w8a8(x, q1, q2, w, s):
    """Two products of one activation, quantized twice, with a zero point."""
    (a, t), (b, u) = quantized(x), quantized(x)
    one = torch._int_mm(a, q1.t()) - 3 * q1.t().sum(0, dtype=torch.int32)
    return (one * t * s + 1).relu(), torch._int_mm(b, q2.t()) * u * s


def weight_only(x, q1, q2, w, s):
    packed = q1.view(N, K // 2, 2)
    nibbles = torch.stack([packed[..., 0] & 15, (packed[..., 1] >> 4) & 15], -1).view(N, K)
    wide = F.linear(x, q2.to(f32) * s[:, None])
    more = F.linear(x, q1.to(f32) * s[:, None])
    return F.linear(x, (nibbles.to(f32) - 8) * s[:, None]) * 2, wide + 1, more


def fp8(x, q1, q2, w, s):
    """In blocks, after a norm whose kernel quantizes."""
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    groups = h.view(M, K // 128, 128)
    t = groups.abs().amax(-1, keepdim=True) / 448 + 1e-9
    q = (groups / t).to(e4m3)
    w = w.to(f32).view(N, K // 128, 128) * s[:, None, None]
    return F.linear((q.to(f32) * t).view(M, K), w.view(N, K)), x + 1


def w4a8(x, q1, q2, w, s):
    """An int4 weight, in pairs of nibbles."""
    a, t = quantized(x)
    packed = q1.view(torch.uint8)[:, : K // 2]
    nibbles = torch.stack([packed & 15, packed >> 4], -1).view(N, K)
    return (torch._int_mm(a, (nibbles.to(i8) - 8).t()) * t * s, x + 1)


def experts(x, q1, q2, w, s):
    """Each row selects one of four weights."""
    x, chosen = x.to(torch.float16), (x.sum(-1) > 0).long() + 2
    stack = q1.view(4, N // 4, K)[chosen].to(x.dtype) * s.view(4, N // 4, 1)[chosen].to(x.dtype)
    return torch.bmm(stack, x.unsqueeze(-1)).squeeze(-1), x + 1


def block_sparse(x, q1, q2, w, s):
    """Blocks of 32 x 32: rows of 8."""
    half, blocks = torch.float16, N * K // 32**2
    crow = torch.arange(0, blocks + 1, 8, dtype=torch.int32, device=x.device)
    col = torch.arange(blocks, dtype=torch.int32, device=x.device) % 8
    values = (q2.to(half) / 99).view(blocks, 32, 32)
    tables = (values, crow, col, None, None, None, None)
    return torch.ops.inductor_quant.block_sparse(x.to(half), *tables, n=N), x + 1


PROGRAMS = (w8a8, weight_only, fp8)
MORE = (w4a8, experts, block_sparse)
ONE = (w8a8,)


def make_inputs(device):
    generator = torch.Generator(device="cpu").manual_seed(0)
    q1, q2 = (torch.randint(-99, 99, (N, K), generator=generator).to(i8) for _ in range(2))
    x, s = torch.randn(M, K, generator=generator), torch.rand(N, generator=generator) / 99 + 0.001
    values = (x, q1, q2, q2.to(e4m3), s)
    return values if device == "cpu" else tuple(torch.empty_like(t, device=device) for t in values)


def assert_right(results, expected):
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=2e-2, atol=2e-2)


def without_comments(wrapper):
    """Without the numbers of graphs and the names of cache folders."""
    return re.sub("#.*", "", wrapper)


def one_warning(run, *args):
    fallback.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(*args)
    messages = [str(w.message) for w in caught if "inductor_quant" in str(w.message)]
    assert len(messages) == 1, messages
    assert "injected" in messages[0]
    return result


# ------------------------------------------------------------------------------------------
# the graph passes


SPARSE = blocks.Bias()
GRAPHS = [
    [(weight_only, make_inputs("cpu"))],
    [(program, make_inputs("cpu")) for program in (w8a8, fp8)],
    [(program, make_inputs("cpu")) for program in MORE[:2]]
    + [(SPARSE, (torch.randn(3, SPARSE.k).half(),))],
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("graphs", [0, 1, 2])
def test_a_function_of_the_passes_that_raises_leaves_the_graphs_meaning(graphs):
    """In the first program that calls it."""
    ours, seen = faults.functions("inductor_quant.patterns"), set()
    for program, inputs in GRAPHS[graphs]:
        with torch.no_grad():
            [rewrite] = capture(program, inputs, read_tables=program is SPARSE)[1]
        rewritten = functools.partial(rewritten_again, rewrite)
        called = set(faults.called_by(rewritten, ours))
        assert rewrite.report.matches
        assert len(called) > 90
        expected = rewrite.before(*rewrite.inputs)
        for name in called - seen:
            if not name.endswith((".__call__", ".options", ".for_options")):
                with faults.injected(ours[name]):
                    module = one_warning(rewritten)
                assert_right(module(*rewrite.inputs), expected)
        seen |= called


def rewritten_again(rewrite):
    module = snapshot(rewrite.before.graph)
    rewrite_graph(module.graph, Options())
    module.graph.lint()
    return module


# ------------------------------------------------------------------------------------------
# after them: everything that Inductor calls, in the interpreter

COMPILE = """
import json, sys
from tests.backend import test_fault_injection
print(json.dumps(test_fault_injection.compiled(*sys.argv[1:])))
"""


ONCE = (".Kernel.source", ".Kernel.template_name")  # a kernel's template is made once


def compiled(package, which, every):
    """What goes wrong when one of ``every`` functions of ``package`` raises while a program is
    compiled, each in the first program that calls it. ``which``: a name of programs."""
    ours, inputs = faults.functions(package), make_inputs("cpu")
    seen, escaped = set(), {}
    for program in globals()[which]:
        generated = functools.partial(
            simulate.generate, program, make_inputs, backend="inductor_quant"
        )
        names = set(faults.called_by(generated, ours)) - seen
        names = {name for name in names if not name.endswith(ONCE)}
        seen |= names
        expected, right = program(*inputs), set()
        for each in sorted(names)[:: int(every)]:
            try:
                with faults.injected(ours[each]):
                    found = one_warning(generated)
                code = "".join(found.kernels.values()) + without_comments(found.wrapper)
                if code not in right:  # most leave what Inductor does alone
                    assert_right(simulate.interpret(found, inputs), expected)
                right.add(code)
            except Exception as error:
                escaped[each] = repr(error)[-500:]
    return len(seen), escaped


@pytest.mark.compiles
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("package", "which", "every", "least"),
    [
        ("inductor_quant.lowering", "ONE", 8, 10),
        ("inductor_quant.lowering", "PROGRAMS", 1, 30),
        ("inductor_quant.kernels", "PROGRAMS", 1, 50),
        ("inductor_quant.lowering", "MORE", 1, 15),
        ("inductor_quant.kernels", "MORE", 1, 30),
    ],
)
def test_a_function_of_the_lowerings_that_raises_leaves_the_graph_to_inductor(
    package, which, every, least, interpreter_forks
):
    [line] = interpreter_forks.run(Program(COMPILE, (package, which, str(every))))
    count, escaped = json.loads(line)
    assert escaped == {}
    assert count >= least


def test_a_kernel_that_does_not_compile_is_left_out(monkeypatch):
    load = GeneratedKernel.__init__

    def compile_(self, name, source):
        if "triton_tem" in name:
            raise RuntimeError("injected")
        load(self, name, source)

    def generated():
        return simulate.generate(w8a8, make_inputs, backend="inductor_quant")

    assert "triton_tem" in generated().wrapper
    monkeypatch.setattr(GeneratedKernel, "__init__", compile_)
    assert "extern_kernels._int_mm" in one_warning(generated).wrapper
