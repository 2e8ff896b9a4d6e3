"""Horizontal launches of int8 GEMMs with many rows, on virtual GPUs: when, and what ptxas makes of
them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.problem import Problem
from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel as large_m_sm90
from inductor_quant.kernels.scaled_mm.persistent.kernel import W8A8_PERSISTENT
from inductor_quant.kernels.shared.horizontal import together
from inductor_quant.ops.w8a8 import make_spec
from inductor_quant.report.events import collect
from tests.support.gemms import w8a8
from tests.support.gemms.generated import device, generate
from tests.support.gemms.horizontal import Integers
from tests.support.ranges import rows, session
from tests.support.sampling import sampled
from tests.support.spellings.quantizers import TorchaoLinear

bf16 = torch.bfloat16
PERSISTENT = "w8a8_persistent 128x128x128_w4_s3_g4"
needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


class Attention(nn.Module):
    """q, k and v of ``hidden`` features, k and v of ``kv``."""

    def __init__(self, hidden: int, kv: int, follows) -> None:
        super().__init__()
        self.hidden, self.follows = hidden, follows
        self.layers = nn.ModuleList(TorchaoLinear(hidden, n) for n in (hidden, kv, kv))

    def forward(self, x):
        return self.follows(*(layer(x) for layer in self.layers))


def attention(q, k, v):
    """As SDPA calls it on a GPU; only the simulator has no fused attention."""
    heads = (t.view(16, -1, t.shape[-1] // 64, 64).transpose(1, 2) for t in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(*heads)[0]


def activated(q, k, v):
    """With few rows one launch would save more than the kernel of SiLU."""
    return F.silu(q), k.softmax(-1), v.softmax(-1)


def generated(m, hidden, kv, follows, **options):
    """The generated code, and (kernel, whether horizontal) of each GEMM."""

    def make(device):
        with torch.device(device):
            return Attention(hidden, kv, follows), torch.randn(m, hidden, dtype=bf16)

    with collect() as report:
        found = generate(lambda model, x: model(x), make, **options)
    chosen = [(each.chosen.split()[0], each.is_horizontal) for each in report.kernels]
    return found, chosen


@pytest.mark.one_in(2)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("m", "hidden", "kv", "kernel"),
    sampled(
        [
            (8192, 1024, 1024, "w8a8_large_m_sm90"),  # BERT-large
            (16400, 1280, 1280, "w8a8_persistent"),  # M ends within a tile
            (2048, 4096, 1024, "w8a8_large_m_sm90"),
            (304, 2048, 512, "w8a8_mm"),
        ]
    ),
)
def test_q_k_and_v_are_one_kernel(m, hidden, kv, kernel):
    """And one that quantizes. Nothing spills."""
    found, chosen = generated(m, hidden, kv, attention)
    assert chosen == [(kernel, True)] * 3
    assert len(found.kernels) == 2
    for name, source in found.kernels.items():
        assert simulate.compile_kernel(name, source).spill_stores == 0


@pytest.mark.one_in(4)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("m", "hidden", "kv", "follows"),
    [
        (8192, 1024, 1024, activated),  # a fusion would be lost
        (65536, 1280, 1280, attention),  # long
        (8192, 1024, 960, attention),  # k and v are no whole tiles
    ],
)
def test_elsewhere_the_kernels_are_those_of_single_gemms(m, hidden, kv, follows):
    one, chosen = generated(m, hidden, kv, follows)
    alone, _ = generated(m, hidden, kv, follows, horizontal_fusion=False)
    assert not any(is_horizontal for _, is_horizontal in chosen)
    assert bodies(one) == bodies(alone)


def bodies(found):
    """The kernels' code. Names of fused kernels have those of the graph's ops."""
    return sorted(
        source.split("@triton.jit")[-1].split(":\n", 1)[1].rsplit("\n\n", 1)[0]
        for source in found.kernels.values()
    )


def compiled(group, fn, config):
    with collect() as report:
        found = generate(fn, group.make_inputs, config)
    assert [choice.chosen for choice in report.kernels] == [config] * len(report.kernels)
    [(name, source)] = found.kernels.items()
    return simulate.compile_kernel(name, source)


def tiles_of(kernel):
    """TMA and matrix instructions."""
    return kernel.ptx.count("cp.async.bulk.tensor"), len(kernel.matrix_instructions())


@pytest.mark.one_in(4)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    "config",
    sampled(
        [
            PERSISTENT,
            *(f"w8a8_large_m_sm90 {large_m_sm90.tile(n, 8)}" for n in large_m_sm90.ELEMENT_COST),
        ]
    ),
)
def test_the_loop_is_that_of_a_single_gemm(config):
    """For eight GEMMs too: as many loads and products, no spills, as much shared memory."""
    case = w8a8.Case(4000, 0, 4096)
    each = 768
    group = Integers(case, (each,) * 8)
    one = compiled(group, group.grouped, config)
    group = Integers(case, (8 * each,))
    alone = compiled(group, group.alone, config)
    assert tiles_of(one) == tiles_of(alone)
    assert one.spill_stores == alone.spill_stores == 0
    assert one.shared_bytes == alone.shared_bytes


def test_a_tile_belongs_to_one_gemm_and_all_have_aligned_rows():
    spec = make_spec(a_scale=None, b_scale=None, out_dtype=bf16, bias=False)
    member = Problem(8192, 1024, 4096, has_aligned_rows=True)
    for kernel in (W8A8_PERSISTENT, large_m_sm90.W8A8_LARGE_M_SM90):

        def is_taken(*members, kernel=kernel):
            problem = together(members)
            if kernel.rejection(spec, problem, device(90)) is not None:
                return False
            configs = kernel.configs(spec, problem, device(90))
            found = [kernel.config_rejection(spec, problem, each, device(90)) for each in configs]
            return None in found

        assert is_taken(member, member)
        assert not is_taken(member, dataclasses.replace(member, n=1000))
        unaligned = dataclasses.replace(member, n=512, has_aligned_rows=False)
        assert not is_taken(member, unaligned)


class OfAnyLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 512
        self.layers = nn.ModuleList(TorchaoLinear(512, n) for n in (512, 256))

    def forward(self, x):
        q, k = (layer(x) for layer in self.layers)
        return (q.reshape(-1, 8, 64) @ k.reshape(-1, 4, 64).transpose(1, 2)).softmax(-1).flatten(1)


@pytest.mark.compiles
@pytest.mark.slow
def test_ranges_of_a_dynamic_m_are_launched_together_up_to_the_last():
    """That one has no largest M."""
    with session(OfAnyLength) as run:
        for m, name, is_horizontal in (
            (100, "91..128", True),
            (150, "129..181", True),
            (1500, "1025..1536", True),
            (3000, "2049..", False),
        ):
            report = run[m]
            assert rows(report) == [name]
            assert [each.is_horizontal for each in report.kernels] == [is_horizontal] * 2
        assert run.graphs == 1
