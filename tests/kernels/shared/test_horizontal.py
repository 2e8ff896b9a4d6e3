"""Horizontal launches on virtual GPUs: generated code and machine code."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant.kernels.config import parse_config
from inductor_quant.kernels.shared.horizontal import together
from inductor_quant.kernels.weight_only.small_m.kernel import WEIGHT_ONLY_SMALL_M
from inductor_quant.report.events import collect
from inductor_quant.report.explain import _explanation as explanation_of
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms import w8a8, weight_only
from tests.support.gemms.generated import device, generate
from tests.support.gemms.horizontal import DecoderLayer, Integers, PackedLayout, words
from tests.support.sampling import sampled
from tests.support.spellings.quantizers import TorchaoLinear

pytestmark = pytest.mark.usefixtures("large_groups")

bf16 = torch.bfloat16


def reported(fn, make, *configs, **options):
    with collect() as report:
        return generate(fn, make, *configs, **options), report


def launches(generated):
    """(launches of GEMMs, of other kernels)"""
    names = re.findall(r"^\s*(triton_\w+)\.run\(", generated.wrapper, re.MULTILINE)
    gemms = [name for name in names if name.startswith("triton_tem")]
    return len(gemms), len(names) - len(gemms)


@pytest.mark.compiles
def test_a_decoder_layer_launches_four_gemms_instead_of_seven():
    """At most a kernel for the partials of a launch is added. The explanation names the GEMMs of a
    launch."""

    def make(device):
        with torch.device(device):
            return DecoderLayer(words, 512), torch.randn(16, 1, 512, dtype=bf16)

    apart, _ = reported(lambda m, x: m(x), make, horizontal_fusion=False)
    one, report = reported(lambda m, x: m(x), make)
    assert (launches(apart)[0], launches(one)[0]) == (7, 4)
    assert launches(one)[1] <= launches(apart)[1] + 2
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
def test_silu_of_gate_times_up_is_fused_with_row_quantization():
    """Two GEMM launches and two that quantize."""

    def make(device):
        with torch.device(device):
            layer = DecoderLayer(TorchaoLinear, 512)
            return layer.gate, layer.up, layer.down, torch.randn(16, 512, dtype=bf16)

    generated, report = reported(lambda g, u, d, x: d(F.silu(g(x)) * u(x)), make)
    assert launches(generated) == (2, 2)
    assert [choice.is_horizontal for choice in report.kernels] == [True, True, False]


def swiglu(gate, up):
    return F.silu(gate) * up


def activated(gate, up):
    return gate.tanh(), up.view(4, 4, -1).transpose(0, 1).sigmoid()


@pytest.mark.compiles
@pytest.mark.parametrize("follows", [swiglu, activated])
def test_epilogues_stay_fused_into_single_gemms(follows):
    """One launch would save none: the epilogue would become a kernel."""

    def fn(a, *weights):
        return follows(*((torch._int_mm(a, weight) * 0.01).to(bf16) for weight in weights))

    def make(device):
        sizes = (16, 64), (128, 64), (128, 64)
        a, *weights = (torch.zeros(size, dtype=torch.int8, device=device) for size in sizes)
        return a, *(weight.t() for weight in weights)

    generated, report = reported(fn, make)
    assert len(report.groups) == 1
    assert not any(choice.is_horizontal for choice in report.kernels)
    assert launches(generated) == (2, 0)


COLUMNS = (512, 256, 256)
LOADS = re.compile(r"cp\.async\.c[ag][^;]*?, (0x[0-9a-f]+)|\b((?:ld|ldmatrix)[\w.]*\.global[\w.]*)")


def loads(generated):
    """How many loads of each size the GEMM's kernel has; it must not spill."""
    [name] = {name for name in generated.kernels if name.startswith("triton_tem")}
    kernel = simulate.compile_kernel(name, generated.kernels[name])
    assert kernel.spill_stores == 0, kernel.registers
    return Counter(size or name for size, name in LOADS.findall(kernel.ptx))


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("group", "config", "arch"),
    sampled(
        [
            (
                PackedLayout(weight_only.Case("gptq", 16, 0, 2048), COLUMNS),
                "16x128x128_w2_s3_g8_k4",
                90,
            ),
            (
                PackedLayout(weight_only.Case("gptq", 1, 0, 2048), COLUMNS),
                "8x128x128_w2_s3_g8_k4",
                80,
            ),
            (Integers(w8a8.Case(16, 0, 1024), COLUMNS), "64x32x256_w4_s5_g8", 90),
        ]
    ),
    ids=str,
)
def test_a_horizontal_launch_loads_as_a_single_gemm(group, config, arch):
    """The same instructions of the same sizes, even if strides differ."""
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


def test_weights_of_different_layout_are_not_launched_together():
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
        found = WEIGHT_ONLY_SMALL_M.rejection(spec, together(members), device(90))
        assert (found and found.code) == code


@pytest.mark.parametrize(
    ("n", "meets", "config", "config_rejection"),
    [
        ((512, 256), False, "8x128x128_w2_s3_g8", True),
        ((512, 192), False, "8x128x128_w2_s3_g8", False),  # a tile would straddle two GEMMs
        ((512, 256), True, "8x128x128_w2_s3_g8", False),  # the epilogue would become a kernel
        ((512, 256), True, "8x128x128_w2_s3_g8_k2", True),
    ],
)
def test_configurations_of_a_horizontal_launch(n, meets, config, config_rejection):
    spec, _ = weight_only.described(weight_only.Case("gptq", 4, 512, 512))
    problem = together(problems("gptq", "gptq", n=n), lost_fusions=int(meets))
    refusal = WEIGHT_ONLY_SMALL_M.config_rejection(spec, problem, parse_config(config), device(90))
    assert (refusal is None) == config_rejection
    assert WEIGHT_ONLY_SMALL_M.configs(spec, problem, device(90))


@pytest.mark.compiles
def test_gemms_that_no_kernel_launches_together_are_launched_alone():
    group = Integers(w8a8.Case(5, 0, 64), (40, 24))
    generated, report = reported(group.grouped, group.make_inputs)
    assert launches(generated) == (2, 0)
    assert [choice.sizes for choice in report.kernels] == [(5, 40, 64), (5, 24, 64)]
    assert not any(choice.is_horizontal for choice in report.kernels)
