"""The class of each match against what eager mode computes, and strict mode, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config

from inductor_quant.errors import OptionError
from inductor_quant.options import Options
from inductor_quant.simulate import generate
from inductor_quant.spec.decisions import RejectionCode
from inductor_quant.spec.exactness import Exactness
from tests.support.graphs.post_grad import W8A8, EagerBackend, calls, capture
from tests.support.producers.registry import GIVEN, PRODUCERS, need
from tests.support.spellings.quantizers import QUANTIZERS

pytestmark = pytest.mark.compiles

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
BIT_EXACT, SAME, FEWER, REASSOCIATED = Exactness
STRICT = Options(on_error="raise", numerics="strict")
M, N, K = 40, 48, 64


def operands(scale_dtype=f32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-127, 128, (M, K), generator=generator, dtype=torch.int8)
    b = torch.randint(-127, 128, (K, N), generator=generator, dtype=torch.int8)
    row = (torch.rand(M, 1, generator=generator) * 0.01 + 0.001).to(scale_dtype)
    column = (torch.rand(N, generator=generator) * 0.01 + 0.001).to(scale_dtype)
    bias = torch.randn(N, generator=generator)
    return a, b, row, column, bias


def mm(a, b):
    return torch._int_mm(a, b)


# (name, function of the operands, dtype of the scales, class, is the canonical op the whole of it)
CHAINS = [
    ("row", lambda a, b, r, c, z: mm(a, b) * r, f32, BIT_EXACT, True),
    ("column", lambda a, b, r, c, z: mm(a, b) * c, f32, BIT_EXACT, True),
    ("row, column", lambda a, b, r, c, z: mm(a, b) * r * c, f32, BIT_EXACT, True),
    ("float, row", lambda a, b, r, c, z: mm(a, b).float() * r * c, f32, BIT_EXACT, True),
    ("number", lambda a, b, r, c, z: mm(a, b) * 0.37 * r * c, f32, BIT_EXACT, True),
    ("expand", lambda a, b, r, c, z: mm(a, b) * r.expand(M, N) * c, f32, BIT_EXACT, True),
    ("bf16 scales", lambda a, b, r, c, z: mm(a, b).float() * r * c, bf16, BIT_EXACT, True),
    ("3-D", lambda a, b, r, c, z: (mm(a, b) * r).reshape(2, M // 2, N) * c, f32, BIT_EXACT, True),
    ("to bf16", lambda a, b, r, c, z: (mm(a, b) * r * c).to(bf16), f32, BIT_EXACT, False),
    ("bias", lambda a, b, r, c, z: mm(a, b) * r * c + z, f32, FEWER, True),
    ("f16 bias", lambda a, b, r, c, z: (mm(a, b) * r * c).half() + z.half(), f32, FEWER, False),
    ("bf16 between", lambda a, b, r, c, z: (mm(a, b) * r).to(bf16) * c, f32, FEWER, False),
    ("f16 between", lambda a, b, r, c, z: (mm(a, b) * r).half() * c.half(), f32, FEWER, False),
    ("column, row", lambda a, b, r, c, z: mm(a, b) * c * r, f32, REASSOCIATED, False),
    ("number last", lambda a, b, r, c, z: mm(a, b) * r * 0.37, f32, REASSOCIATED, False),
    ("two numbers", lambda a, b, r, c, z: mm(a, b) * 0.3 * 0.7 * r, f32, REASSOCIATED, False),
    ("product first", lambda a, b, r, c, z: mm(a, b) * (r * c), f32, REASSOCIATED, False),
]  # fmt: skip
NAMES = [chain[0] for chain in CHAINS]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chain", CHAINS, ids=NAMES)
def test_the_class_of_a_w8a8_chain(chain):
    _, fn, dtype, expected, _ = chain
    args = operands(dtype)
    result, [rewrite] = capture(fn, args)
    [match] = rewrite.report.matches
    assert match.exactness is expected
    if expected is BIT_EXACT:
        assert torch.equal(result, fn(*args))


def test_the_weaker_classes_are_needed():
    """Each of these differs from eager mode for some input."""
    for name, fn, dtype, expected, _ in CHAINS:
        if expected is BIT_EXACT or name in ("bias", "to bf16"):  # bias: a multiply-add, on a GPU
            continue
        compiled = torch.compile(fn, backend=EagerBackend())
        torch._dynamo.reset()
        seeds = (operands(dtype, seed) for seed in range(5))
        assert not all(torch.equal(compiled(*args), fn(*args)) for args in seeds), name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("chain", CHAINS, ids=NAMES)
def test_strict_is_bit_for_bit_what_eager_mode_computes(chain):
    name, fn, dtype, _, is_whole = chain
    backend = EagerBackend(STRICT)
    compiled = torch.compile(fn, backend=backend)
    with config.patch(emulate_precision_casts=True):
        for seed in range(3):
            args = operands(dtype, seed)
            assert torch.equal(compiled(*args), fn(*args))
    [rewrite] = backend.rewrites
    if name in ("column, row", "two numbers"):
        # the op takes one of the scales, the other stays
        return
    if name == "product first":
        assert [r.code for r in rewrite.report.rejections] == [RejectionCode.NUMERICS]
        return
    [call] = calls(rewrite.after)
    [match] = rewrite.report.matches
    assert match.exactness in (BIT_EXACT, FEWER)
    assert call.kwargs["out_dtype"] == f32
    rest = [n for n in rewrite.after.graph.nodes if n.op == "call_function"]
    arithmetic = [n for n in rest if n.target != W8A8 and "reshape" not in str(n.target)]
    assert (arithmetic == []) == is_whole


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q.__name__)
def test_strict_layers_equal_their_graph_run_eagerly(quantizer):
    """Runs the rewritten graph node by node, with the graph's own quantization."""
    torch.manual_seed(0)
    layer, x = quantizer(K, N), torch.randn(M, K, dtype=bf16)
    with config.patch(emulate_precision_casts=True), torch.no_grad():
        result, [rewrite] = capture(layer, [x], options=STRICT)
        before = rewrite.before(*rewrite.inputs)[0]
    assert torch.equal(result, before)
    if quantizer.__name__ != "TenLines":  # it multiplies its scales first
        assert len(rewrite.report.matches) == 1


def test_strict_declines_a_sum_of_floats():
    [producer] = [p for p in GIVEN if p.name == "gptq_gm_4b_g64_base"]
    module, x = producer.make(), torch.randn(4, 256).half()
    with config.patch(emulate_precision_casts=True), torch.no_grad():
        result, [rewrite] = capture(module, [x], options=STRICT)
    assert rewrite.is_untouched
    assert rewrite.codes == [RejectionCode.NUMERICS.value]
    assert torch.equal(result, module(x))


def fake_quantized(x, b, row, column, bias):
    """The graph multiplies floats, so the scales are applied before the sum."""
    a = torch.clamp(torch.round(x / 0.03), -128, 127) * 0.03
    return a @ (b.float() * column)


def with_zero_point(a, b, row, column, bias):
    return (mm(a, b) - 7 * b.sum(0)).float() * row * column


@pytest.mark.parametrize("fn", [fake_quantized, with_zero_point], ids=lambda fn: fn.__name__)
def test_what_is_read_otherwise_is_in_the_weakest_class_and_no_match_of_strict(fn):
    args = list(operands())
    if fn is fake_quantized:
        args[0] = torch.randn(M, K)
    _, [rewrite] = capture(fn, args)
    assert [match.exactness for match in rewrite.report.matches] == [REASSOCIATED]
    torch._dynamo.reset()
    with config.patch(emulate_precision_casts=True):
        result, [rewrite] = capture(fn, args, options=STRICT)
    assert rewrite.is_untouched
    assert torch.equal(result, rewrite.before(*rewrite.inputs)[0])


def test_strict_needs_inductors_roundings():
    """Otherwise Inductor would fuse the rest of the graph without its roundings."""
    _, [rewrite] = capture(CHAINS[0][1], operands(), options=STRICT)
    assert rewrite.is_untouched
    assert rewrite.codes == [RejectionCode.NUMERICS.value]
    assert "emulate_precision_casts" in rewrite.report.rejections[0].detail


@pytest.mark.parametrize("numerics", ["default", "strict"])
def test_strict_kernels_fuse_no_multiply_add(numerics):
    def make(device):
        return tuple(torch.zeros_like(t, device=device) for t in operands())

    def scaled(a, b, row, column, bias):
        return torch._int_mm(a, b) * row * column + bias

    options = {"inductor_quant.numerics": numerics, "inductor_quant.on_error": "raise"}
    generated = generate(scaled, make, backend="inductor_quant", options=options)
    sources = [source for name, source in generated.kernels.items() if "w8a8" in name]
    assert len(sources) == 1
    assert ("'enable_fp_fusion': False" in str(sources)) == (numerics == "strict")


def test_an_unknown_kind_of_numerics_is_refused():
    with pytest.raises(OptionError, match="numerics='exact'"):
        Options(numerics="exact")


# ------------------------------------------------------------------------------------------
# weight_only

EXPECTED = {
    "torchao_int8_wo_row": FEWER,  # its scale and bias follow the product, which rounds before
    "torchao_intx4_wo_g32_sym": SAME,
    "gptq_gm_4b_g64_base": SAME,
    "gptq_gm_8b_g64_base": SAME,
    "ct_pack_int4_g64_sym": SAME,
    "hqq_4b_g64_ax1_fwd": FEWER,
    "gptfast_woq_int8": FEWER,
}
ADDED = ("gptq_gm_4b_g64_base", "gptq_gm_8b_g64_base")  # product + bias; not addmm


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", EXPECTED)
def test_the_class_of_a_weight_only_layer(name, bias):
    """The op takes a bias that is added after the product, and does not round the product."""
    producer = PRODUCERS[name]
    need(producer)
    module, x = producer.make(bias=bias), torch.randn(4, 256).to(producer.dtypes[0])
    with torch.no_grad():
        _, [rewrite] = capture(module, [x])
    [match] = rewrite.report.matches
    assert match.spec.bias == bias
    assert match.exactness is (FEWER if bias and name in ADDED else EXPECTED[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("producer", GIVEN, ids=str)
def test_a_weight_of_the_same_rounding_is_the_graphs_bit_for_bit(producer):
    """One-hot rows without bias show W itself."""
    need(producer)
    module = producer.make(bias=False)
    rows = 1 if producer.max_rows == 1 else 256
    x = torch.eye(256, dtype=producer.dtypes[0])[:rows]
    with torch.no_grad():
        result, [rewrite] = capture(module, [x])
        before = rewrite.before(*rewrite.inputs)[0]
    if not rewrite.report.matches:
        pytest.skip("so many rows are left to the graph")
    if rewrite.report.matches[0].exactness is SAME:
        assert torch.equal(result, before.reshape(result.shape))
