"""Each range of M has the kernels of a static compilation of its sizes."""

from __future__ import annotations

import functools

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples import tensor_parallel
from inductor_quant import simulate
from inductor_quant.options import FAMILIES
from inductor_quant.report import formats
from inductor_quant.spec import row_ranges
from tests.support.producers.experts import Experts
from tests.support.producers.packed import Gptq
from tests.support.ranges import K, N, kernels, rows, session
from tests.support.sampling import sampled
from tests.support.spellings.quantizers import TorchaoLinear

pytestmark = pytest.mark.compiles

bf16 = torch.bfloat16


def test_the_table_has_every_threshold_of_passes_and_ops():
    from inductor_quant.kernels import dispatch, problem
    from inductor_quant.kernels.experts.direct import kernel as direct
    from inductor_quant.kernels.experts.mm_sm90 import kernel as mm_sm90
    from inductor_quant.kernels.scaled_mm.decode import kernel as decode
    from inductor_quant.kernels.scaled_mm.two_block_sm90 import kernel as two_block
    from inductor_quant.ops import fp8
    from inductor_quant.ops.fusion import horizontal, quantized_linear
    from inductor_quant.patterns.fusion import duplicate_casts, weight_k_major

    tops = row_ranges.TOPS
    assert {horizontal.MAX_ROWS["w8a8"], quantized_linear.MAX_ROWS, decode.BLOCK_M} <= {
        *tops["w8a8"]
    }
    assert {dispatch.MAX_ROWS_WITH_SPARE, weight_k_major.MIN_M - 1} <= {*tops["w8a8"]}
    limits = {horizontal.MAX_ROWS["weight_only"], duplicate_casts.MAX_M, problem.DECODE_M}
    assert limits | {problem.SMALL_M, problem.MEDIUM_M} <= {*tops["weight_only"]}
    rows = {fp8.MAX_PROMOTED_ROWS, fp8.MAX_SPLIT_ROWS}
    assert rows | {quantized_linear.MAX_ROWS, fp8.MIN_GLUON_ROWS - 1} <= {*tops["fp8"]}
    assert rows | {decode.BLOCK_M} <= {*tops["fp8_block"]}
    assert {two_block.MAX_M, two_block.MAX_M - 1} <= {*tops["fp8_block"]}
    means = {direct.MAX_MEAN, direct.MAX_MEAN_WIDE}
    means |= {direct.MAX_MEAN_8, direct.MAX_MEAN_8_SLOW_16}
    assert means | {mm_sm90.MIN_MEAN, mm_sm90.MIN_MEAN_COMPUTED} <= {*tops["experts"]}
    assert tops.keys() == {*FAMILIES}


class Block(nn.Module):
    """Two GEMMs of one activation, and one whose activation a kernel computes."""

    layer = functools.partial(TorchaoLinear, bias=False)

    def __init__(self, k=K, n=N):
        super().__init__()
        self.k = k
        self.gate, self.up, self.down = (self.layer(*size) for size in ((k, n), (k, n), (n, k)))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def static(m, make):
    with session(make, how=False) as run:
        return kernels(run[m])


def kernels_of_ranges(make, sizes):
    """What a call of each size runs, all with one graph of Dynamo's."""
    found = {}
    with session(make) as run:
        for m in sizes:
            report = run[m]
            found |= {bucket: kernels(report, bucket) for bucket in rows(report)}
        ranges = [(name, bounds(name)) for name in found]
        assert run.graphs == 1
    return {m: next(found[name] for name, (low, high) in ranges if low <= m <= high) for m in sizes}


def bounds(name):
    low, _, high = name.partition("..")
    return int(low), int(high) if high else (1 << 31 if ".." in name else int(low))


def test_a_range_has_the_kernels_of_a_static_compilation():
    assert kernels_of_ranges(Block, [3])[3] == static(3, Block)


class Words(Block):
    layer = functools.partial(Gptq, bf16, bias=False)


class Bytes(Block):
    class layer(nn.Module):
        """FP8 by rows, as ``_scaled_mm``."""

        def __init__(self, k, n):
            super().__init__()
            self.weight = nn.Buffer(torch.zeros(n, k).to(torch.float8_e4m3fn))
            self.scale = nn.Buffer(torch.ones(n, 1))

        def forward(self, x):
            scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
            q = (x.float() / scale).to(torch.float8_e4m3fn)
            w = self.weight.t()
            return torch._scaled_mm(q, w, scale, self.scale.t(), out_dtype=bf16)


class Routed(nn.Module):
    """One of eight experts for each row, int4."""

    def __init__(self, k=K, n=K):
        super().__init__()
        self.k, self.experts = k, Experts("int4_words", "grouped", 8, k, n)

    def forward(self, x):
        weights, ids = x[:, :8].float().topk(1)
        return self.experts(x, ids, weights)


@pytest.mark.slow
def test_experts_have_ranges_of_rows_an_expert():
    """Tiles of 8 rows, of 16, and from a mean of 64 on those of the largest mean."""
    found = kernels_of_ranges(Routed, [600, 16, 100])
    alone = {m: static(m, Routed) for m in found}
    assert (found[16], found[100]) == (alone[16], alone[100])
    assert found[16] != found[100]
    names = [[each.split()[0] for each in of[600]] for of in (found, alone)]
    assert names == [["experts_mm_sm90"] * 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Block, Words, Bytes])
def test_ten_sizes_have_the_kernels_of_static_compilations(kind):
    make = functools.partial(kind, 4096, 28672)
    sizes = [16, 64, 300, 4096, 3, 17, 20, 301, 510, 1000]
    assert kernels_of_ranges(make, sizes) == {m: static(m, make) for m in sizes}


class Blocks(nn.Module):
    """FP8 with scales of blocks, as the library takes them."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Buffer(torch.zeros(n, K).to(torch.float8_e4m3fn))
        self.scale = nn.Buffer(torch.ones(n // 128, K // 128))

    def forward(self, x):
        blocks = x.float().reshape(-1, K // 128, 128)
        scale = blocks.abs().amax(-1).clamp_min(1e-12) / 448
        q = (blocks / scale[..., None]).to(torch.float8_e4m3fn).reshape(-1, K)
        scale = scale.t().contiguous().t()
        return torch._scaled_mm(q, self.weight.t(), scale, self.scale.t(), out_dtype=bf16)


def test_multiples_of_four_rows_are_ranges_where_the_library_takes_no_others():
    """Beyond 64 rows cuBLASLt is faster with scales of blocks, for multiples of four."""
    with session(functools.partial(Blocks, 28672)) as run:
        reports = {m: run[m] for m in (16, 100, 101, 104, 127, 128, 300)}
    found = {m: (*rows(report), len(kernels(report))) for m, report in reports.items()}
    assert found == {
        16: ("9..16", 1),
        100: ("68..124 by 4", 0),
        101: ("65..127", 1),
        104: (0,),
        127: (0,),
        128: ("128", 0),
        300: ("260..312 by 4", 1),
    }


class Part(nn.Module):
    """What one process of two computes: its results are added up by an all-reduce."""

    k = 512

    def __init__(self):
        super().__init__()
        self.part = tensor_parallel.MLP("int4", self.k, 0, 2)

    def forward(self, x):
        return self.part(x)


@pytest.mark.slow
def test_tensor_parallel_parts_have_ranges():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        found = kernels_of_ranges(Part, [16, 3, 300])
        assert found == {m: static(m, Part) for m in (16, 3, 300)}
    finally:
        dist.destroy_process_group()
    assert all(len(each) == 3 for each in found.values())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("m", sampled([1, 3, 8, 16, 20, 48, 64, 100, 200, 300, 1000, 4096], 3))
@pytest.mark.parametrize("family", formats.FAMILIES)
def test_a_range_chooses_what_a_static_compilation_does(family, m):
    """Llama-3-8B: q, k and v; o; gate and up; down."""
    from inductor_quant.report.which import which

    _, high = row_ranges.range_of(m, row_ranges.tops([family]))
    step = row_ranges.step([family], m)
    if high is not None and m % step == 0:
        high -= high % step
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        of = [which(family, formats.Gemm(rows, n, k)) for rows in (m, high or 4096)]
        assert len({(str(d.kernel and d.kernel.name), d.notes) for d in of}) == 1
        # w4a8: partials grow with M, and a static M of 256 takes other tiles than a symbolic one
        assert family == "w4a8" or len({str(d.config) for d in of}) == 1


def test_the_strides_that_a_library_gets_are_those_of_the_range():
    """Inductor keeps them with the node, in sizes of the first compilation."""

    def fn(a, scale, w, t):
        return torch._scaled_mm(a, w.t(), scale, t.t(), out_dtype=bf16)

    def make(device):
        a, w = (torch.empty(m, K, device=device).to(torch.float8_e4m3fn) for m in (600, N))
        scale = torch.empty(1, 600, device=device).t()
        for tensor in (a, scale):
            torch._dynamo.mark_dynamic(tensor, 0)
        return a, scale, w, torch.empty(N, 1, device=device)

    with pytest.raises(Exception, match=r"CUDA|NVIDIA"):  # no library is there
        simulate.generate(fn, make, backend="inductor_quant")
