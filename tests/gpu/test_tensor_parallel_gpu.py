"""Two GPUs: Inductor overlaps an FP8 product with its collective, with this package as without."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.distributed import _functional_collectives as collectives
from torch.distributed import _symmetric_memory

import inductor_quant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

M, N, K = 512, 1024, 2048


def scattered(q, a_scales, weight, b_scales):
    """Each process has a part of K: its sums are a part of every row's."""
    y = torch._scaled_mm(
        q, weight.t(), a_scales, b_scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return collectives.reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD)


def gathered(q, a_scales, weight, b_scales):
    """Each process has some rows of the activation, and all scales."""
    whole = collectives.all_gather_tensor(q, 0, dist.group.WORLD)
    return torch._scaled_mm(
        whole, weight.t(), a_scales, b_scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def make_inputs(rank, fn):
    """What process ``rank`` has."""
    generator = torch.Generator("cuda").manual_seed(rank)
    rows = M // 2 if fn is gathered else M
    q, weight = (
        torch.randn(n, K, device="cuda", generator=generator).to(torch.float8_e4m3fn)
        for n in (rows, N)
    )
    generator.manual_seed(9)
    a_scales = torch.rand(M, 1, device="cuda", generator=generator) + 0.5
    b_scales = torch.rand(1, N, device="cuda", generator=generator) + 0.5
    return q, a_scales, weight, b_scales


def exact(rank, fn):
    """The part of process ``rank``, and the largest that an element's sum of magnitudes is."""
    (q, a_scales, weight, b_scales), other = (make_inputs(each, fn) for each in (rank, 1 - rank))
    scales = a_scales.double() * b_scales.double()
    if fn is gathered:
        whole = torch.cat([q, other[0]] if rank == 0 else [other[0], q]).double()
        return (
            whole @ weight.double().t() * scales,
            whole.abs() @ weight.double().abs().t() * scales,
        )
    pairs = [(each.double(), w.double()) for each, w in ((q, weight), (other[0], other[2]))]
    y, magnitude = (
        sum(change(a) @ change(b).t() for a, b in pairs) * scales
        for change in (torch.Tensor.clone, torch.abs)
    )
    half = slice(rank * M // 2, (rank + 1) * M // 2)
    return y[half], magnitude[half]


def compare(rank):
    for fn, op in ((scattered, "matmul_reduce_scatter"), (gathered, "all_gather_scaled_matmul")):
        inputs = make_inputs(rank, fn)
        right, magnitude = exact(rank, fn)
        for backend in ("inductor", "inductor_quant"):
            torch.compiler.reset()
            with (
                config.patch(_micro_pipeline_tp=True, force_disable_caches=True),
                inductor_quant.collect() as report,
            ):
                compiled = torch.compile(fn, backend=backend, fullgraph=True)
                y, code = run_and_get_code(compiled, *inputs)
            assert any(op in text for text in code), f"{backend} does not overlap {fn.__name__}"
            if backend == "inductor_quant":
                assert [str(each.code) for each in report.rejections] == ["collective"]
            # bf16 twice: a part and the sum. Hopper's fast accumulation keeps 14 bits.
            bound = 2**-7 * right.abs() + 2**-10 * magnitude
            assert ((y.double() - right).abs() <= bound).all(), f"{backend} {fn.__name__}"


def run(rank, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # later versions do this themselves
            _symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        compare(rank)
    finally:
        dist.destroy_process_group()


def test_the_product_is_fused_with_its_collective(tmp_path):
    torch.multiprocessing.spawn(run, (str(tmp_path / "rendezvous"),), nprocs=2)
