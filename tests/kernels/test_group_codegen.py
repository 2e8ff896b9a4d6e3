"""What is generated for GEMMs of one activation on virtual GPUs, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant.decisions import RejectionCode
from inductor_quant.explanation import _explanation as explanation_of
from inductor_quant.kernels import few_rows
from inductor_quant.kernels.config import parse_config
from inductor_quant.kernels.group import together
from inductor_quant.report import collect
from tests.support import formats, numerics, weight_only
from tests.support.generated import device, generate
from tests.support.group import DecoderLayer, Integers, Words, words
from tests.support.quantizers import TorchaoLinear

bf16 = torch.bfloat16


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def reported(fn, make, *configs, **options):
    with collect() as report:
        return generate(fn, make, *configs, **options), report


def launches(generated):
    """(of GEMMs, of other kernels)"""
    names = re.findall(r"^\s*(triton_\w+)\.run\(", generated.wrapper, re.MULTILINE)
    gemms = [name for name in names if name.startswith("triton_tem")]
    return len(gemms), len(names) - len(gemms)


@pytest.mark.compiles
def test_a_decoder_layer_launches_four_gemms_instead_of_seven():
    """And no other kernel more: what adds up the parts of K is fused with what follows, as before.
    An explanation says what is launched together."""

    def make(device):
        with torch.device(device):
            return DecoderLayer(words, 512), torch.randn(16, 1, 512, dtype=bf16)

    apart, _ = reported(lambda m, x: m(x), make, group_gemms=False)
    one, report = reported(lambda m, x: m(x), make)
    assert (launches(apart)[0], launches(one)[0]) == (7, 4)
    assert launches(apart)[1] == launches(one)[1]
    assert len(report.matches) == len(report.kernels) == 7
    explanation = explanation_of(report, None, timings=False)
    matched = [row for row in explanation.rows if row.launched_with or row.kernel]
    rows = {row.site.module.split(".")[-1]: row for row in matched}
    others = {name: [m.split(".")[-1] for m in row.launched_with] for name, row in rows.items()}
    assert others == {
        "q": ["k", "v"],
        "k": ["q", "v"],
        "v": ["q", "k"],
        "o": [],
        "down": [],
        "gate": ["up"],
        "up": ["gate"],
    }
    assert [rows[name].kernel.sizes for name in "qko"] == [(16, n, 512) for n in (512, 256, 512)]
    assert " in one launch with " in rows["k"].reason
    assert rows["k"].to_dict()["launched_with"] == list(rows["k"].launched_with)


@pytest.mark.compiles
def test_silu_of_gate_times_up_is_computed_where_its_rows_are_quantized():
    """Two GEMMs, and two kernels that quantize."""

    def make(device):
        with torch.device(device):
            layer = DecoderLayer(TorchaoLinear, 512)
            return layer.gate, layer.up, layer.down, torch.randn(16, 512, dtype=bf16)

    generated, report = reported(lambda g, u, d, x: d(F.silu(g(x)) * u(x)), make)
    assert launches(generated) == (2, 2)
    assert [choice.is_grouped for choice in report.kernels] == [True, True, False]


def swiglu(gate, up):
    return F.silu(gate) * up


def activated(gate, up):
    return gate.tanh(), up.view(4, 4, -1).transpose(0, 1).sigmoid()


@pytest.mark.compiles
@pytest.mark.parametrize("follows", [swiglu, activated])
def test_what_is_fused_into_kernels_of_gemms_alone_stays_there(follows):
    """One launch would save none: what follows would be a kernel of its own."""

    def fn(a, *weights):
        return follows(*((torch._int_mm(a, weight) * 0.01).to(bf16) for weight in weights))

    def make(device):
        sizes = (16, 64), (128, 64), (128, 64)
        a, *weights = (torch.zeros(size, dtype=torch.int8, device=device) for size in sizes)
        return a, *(weight.t() for weight in weights)

    generated, report = reported(fn, make)
    assert len(report.groups) == 1
    assert not any(choice.is_grouped for choice in report.kernels)
    assert launches(generated) == (2, 0)


COLUMNS = (512, 256, 256)
LOADS = re.compile(r"cp\.async\.c[ag][^;]*?, (0x[0-9a-f]+)|\b((?:ld|ldmatrix)[\w.]*\.global[\w.]*)")


def loads(generated):
    """How many loads of each size the GEMM's kernel has; it spills nothing."""
    [name] = {name for name in generated.kernels if name.startswith("triton_tem")}
    kernel = simulate.compile_kernel(name, generated.kernels[name])
    assert kernel.spill_stores == 0, kernel.registers
    return Counter(size or name for size, name in LOADS.findall(kernel.ptx))


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("group", "config", "arch"),
    [
        (Words(weight_only.Case("gptq", 1, 0, 2048), COLUMNS), "8x128x128_w2_s3_g8_k4", 80),
        (Words(weight_only.Case("gptq", 16, 0, 2048), COLUMNS), "16x128x128_w2_s3_g8_k4", 90),
        (Integers(numerics.Case(16, 0, 1024), COLUMNS), "64x32x256_w4_s5_g8", 90),
    ],
    ids=str,
)
def test_a_program_loads_as_that_of_one_gemm(group, config, arch):
    """By as many instructions of as many bytes each, also where strides differ."""
    one, _ = reported(group.grouped, group.make_inputs, config, arch=arch)
    alone = dataclasses.replace(group, columns=group.columns[:1])
    each, _ = reported(alone.alone, alone.make_inputs, config, arch=arch)
    assert launches(one)[0] == 1
    assert loads(one) == loads(each) != Counter()


def problems(*names, n=(512, 256), k=512):
    return [
        weight_only.described(weight_only.Case(name, 4, size, k))[1]
        for name, size in zip(names, n, strict=True)
    ]


def test_weights_that_lie_otherwise_have_launches_of_their_own():
    spec, _ = weight_only.described(weight_only.Case("gptq", 4, 512, 512))
    alike = problems("gptq", "gptq")
    turned = dataclasses.replace(alike[1].weight.tensors[0], stride=(1, 64))
    tensors = (turned, *alike[1].weight.tensors[1:])
    columns = dataclasses.replace(
        alike[1], weight=dataclasses.replace(alike[1].weight, tensors=tensors)
    )
    for members, code in (
        (alike, None),
        (problems("gptq", "awq"), RejectionCode.NO_KERNEL),
        ([alike[0], columns], RejectionCode.NO_KERNEL),
    ):
        found = few_rows.supports(spec, together(members), device(90))
        assert (found and found.code) == code


@pytest.mark.parametrize(
    ("n", "meets", "config", "is_legal"),
    [
        ((512, 256), False, "8x128x128_w2_s3_g8", True),
        ((512, 192), False, "8x128x128_w2_s3_g8", False),  # no whole tiles
        ((512, 256), True, "8x128x128_w2_s3_g8", False),  # one more kernel for what follows
        ((512, 256), True, "8x128x128_w2_s3_g8_k2", True),
    ],
)
def test_which_configurations_a_group_takes(n, meets, config, is_legal):
    spec, _ = weight_only.described(weight_only.Case("gptq", 4, 512, 512))
    problem = together(problems("gptq", "gptq", n=n), lost_fusions=int(meets))
    refusal = few_rows.is_legal(spec, problem, parse_config(config), device(90))
    assert (refusal is None) == is_legal
    assert few_rows.configs(spec, problem, device(90))


@pytest.mark.compiles
def test_a_group_that_no_kernel_takes_is_computed_one_by_one():
    group = Integers(numerics.Case(5, 0, 64), (40, 24))
    generated, report = reported(group.grouped, group.make_inputs)
    assert launches(generated) == (2, 0)
    assert [choice.sizes for choice in report.kernels] == [(5, 40, 64), (5, 24, 64)]
    assert not any(choice.is_grouped for choice in report.kernels)
