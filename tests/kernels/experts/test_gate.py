"""Gates in the epilogues of ``experts`` kernels: launches of whole layers, registers, columns."""

from __future__ import annotations

import itertools

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.codegen.digits.order import paired
from inductor_quant.kernels.experts.gate import GateCode
from inductor_quant.ops.dequantize import dequantize
from inductor_quant.report.events import collect
from tests.support import in_flight
from tests.support.gemms.experts import GATES, Case, gemm, make_inputs, packed_of
from tests.support.gemms.generated import generate
from tests.support.producers import experts
from tests.support.producers.experts import Experts, GptOssExperts, bf16

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.fixture(autouse=True)
def _groups(large_groups, monkeypatch):
    """Of 128."""
    monkeypatch.setattr(experts, "GROUP", 128)


# ------------------------------------------------------------------------------------------
# columns


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("name", ["gptq", "awq", "nf4", "int8_channel", "hqq", "act_order"])
def test_pairs_are_the_same_columns_in_another_order(name, is_interleaved):
    packed = packed_of(name, 128, 64)
    weight, n = packed.make("cpu"), packed.format.shape[1]
    found = paired(packed.format, is_interleaved=is_interleaved)
    if found is None:  # a word has both columns of a pair, in an order of its own
        assert (name, is_interleaved) == ("awq", True)
        return
    assert found.radix(found.digits("n")[-1]) == 2
    order = torch.arange(n)
    order = order if is_interleaved else order.view(2, -1).t().flatten()
    assert torch.equal(dequantize(found, weight), dequantize(packed.format, weight)[:, order])


@pytest.mark.parametrize(("n", "is_interleaved"), [(33, False), (33, True)])
def test_an_odd_number_of_columns_has_no_pairs(n, is_interleaved):
    assert paired(packed_of("int8_channel", 128, n).format, is_interleaved=is_interleaved) is None


# ------------------------------------------------------------------------------------------
# whole layers


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("form", "tokens"),
    [("transformers_grouped", 16), ("transformers_grouped", 256), ("transformers_batched", 1)],
)
@pytest.mark.parametrize("kind", [Experts, GptOssExperts])
def test_a_layer_has_no_kernel_for_its_activation(kind, form, tokens):
    """But one with a bias of sorted rows. Nor for the routing weights, or the bias of the second
    product: they are in the kernel that adds up the experts of a token."""
    pytest.importorskip("transformers.integrations.moe")

    def make(device):
        with torch.device(device):
            model = kind("int4_words", form, e=16, h=512, i=256)
            weights, ids = torch.randn(tokens, 16).softmax(-1).topk(4, -1)
            return model, torch.randn(tokens, 512, dtype=bf16), ids, weights.to(bf16)

    with collect() as report:
        generated = simulate.generate(lambda m, *a: m(*a), make, backend="inductor_quant")
    is_gated = kind is Experts or form == "transformers_batched"
    name = "silu" if kind is Experts else "clamped"
    assert [kernel.gate for kernel in report.kernels] == [str(GATES[name][0]) * is_gated, ""]
    kernels = list(generated.kernels)
    first, second = (i for i, kernel in enumerate(kernels) if "_tem_" in kernel)
    assert second == first + (1 if is_gated else 2)
    combining = [kernel for kernel in kernels[second + 1 :] if "index_put" not in kernel]
    assert len(combining) == 1
    assert {"mul", "sum"} <= {*combining[0].split("_")}


@pytest.mark.parametrize("name", [*GATES][::-1])
def test_every_op_of_a_gate_is_lowered_where_no_kernel_has_it(name):
    """And a constant that comes first."""
    case = Case("nibble_pairs", (40, 0, 7), 256, 512, gate=name)

    def make(device):
        return make_inputs(case, device)

    kernels = generate(gemm(case), make, "experts_mm_sm90 512x64x64_w4_s8_g8").kernels
    assert kernels
    assert not any("_tem_" in kernel for kernel in kernels)


def test_what_follows_a_row_is_in_the_kernel_of_the_product():
    """The routing weight, a bias and a cast, where nothing adds up rows."""
    case = Case("nibble_pairs", (3, 5), 512, 1024)

    def fn(weight, bias, *inputs):
        return (gemm(case)(*inputs) * weight[:, None] + bias).to(torch.float32)

    def make(device):
        rows = torch.randn(case.rows, device=device).to(bf16)
        return rows, torch.randn(512, device=device).to(bf16), *make_inputs(case, device)

    generated = generate(fn, make)
    assert len(generated.kernels) == 1


# ------------------------------------------------------------------------------------------
# machine code


def compiled(case):
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    [(kernel, source)] = generated.kernels.items()
    return simulate.compile_kernel(kernel, source), source


CASES = [
    *itertools.product(("nibble_pairs", "gptq"), (2, 8, 64, 600)),
    *itertools.product(("mxfp4", "int8_channel", "nf4", "fp8_row", "awq"), (2, 8, 64)),
]


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mean"), CASES)
@pytest.mark.parametrize("gate", [{"gate": "silu"}, {"gate": "clamped", "has_bias": True}], ids=str)
def test_a_gate_takes_no_registers_from_the_loop(name, mean, gate):
    is_apart = name == "awq" and (mean > 8 or gate["gate"] == "clamped")
    if is_apart or (mean == 600 and "has_bias" in gate):
        pytest.skip("is a kernel of its own")
    without, _ = compiled(Case(name, (mean,) * 8, 1024, 2048))
    found, source = compiled(Case(name, (mean,) * 8, 1024, 2048, **gate))
    most = 192 if (name, mean) == ("nf4", 8) else 32  # beside the loops, with NF4's planes
    assert found.spill_stores <= without.spill_stores + most
    assert found.registers <= max(without.registers + 6, 128)
    codes = [in_flight.machine_code(kernel.ptx) for kernel in (without, found)]
    before, after = (len(in_flight.spilled_in_loops(code)) for code in codes)
    assert after <= before + 4
    _, code = codes
    if "gl.warp_specialize" in source:
        assert in_flight.products(code) >= 8
        assert in_flight.overwritten(code) == []


def test_tiles_of_256_rows_have_no_gate_with_a_bias():
    """It would spill a thousand bytes."""
    case = Case("nibble_pairs", (600,) * 8, 1024, 2048, gate="clamped", has_bias=True)
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    products = [text for text in generated.kernels.values() if "gl.warp_specialize" in text]
    assert len(products) == 1
    assert len(generated.kernels) > 1
    assert "sigmoid" not in products[0]


def test_the_text_of_a_gate_is_part_of_its_kernel():
    """Of keys of caches too."""
    gate, _ = GATES["silu"]
    assert str(GateCode(gate, 8)) == repr(gate.encode())
