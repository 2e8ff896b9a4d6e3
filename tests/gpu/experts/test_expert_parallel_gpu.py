"""Experts over two GPUs: each compiles its own; rows are exchanged outside or inside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import config

import inductor_quant
from tests.support.producers import experts
from tests.support.producers.expert_parallel import FAMILIES, ExpertParallel, routings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SIZES = {"e": 16, "h": 512, "i": 256}


@torch.no_grad()
def compare(rank, format, form, is_inside):
    torch.compiler.reset()
    part, whole = (
        ExpertParallel(format, *at, **SIZES).cuda() for at in ((form, rank, 2), ("of_one", 0, 1))
    )
    options = {"inductor_quant.on_error": "raise"}
    compiled = torch.compile(
        part if is_inside else part.local,
        backend="inductor_quant",
        options=options,
        fullgraph=True,
    )
    if is_inside:
        run_part = compiled
    else:
        run_part, part.local = part, compiled
    with inductor_quant.collect() as report:
        for args in routings(rank, SIZES["e"], SIZES["h"]):
            args = [tensor.cuda() for tensor in args]
            got, want = run_part(*args), whole(*args)
            assert (got - want).norm() <= 0.03 * want.norm()
    # Outside, the number of rows is symbolic: not every number is ours.
    codes = {rejection.code.value for rejection in report.rejections}
    assert codes <= (set() if is_inside else {"many_rows"})
    # A process that is sent no rows at first has a graph without rows, which quantizes none.
    families = {match.family for match in report.matches}
    assert {FAMILIES[format]} <= families <= {FAMILIES[format], "experts"}
    assert {match.site.experts for match in report.matches} == {SIZES["e"] // 2}
    assert {kernel.chosen.partition("_")[0] for kernel in report.kernels} <= {"experts", "scaled"}


def explain(rank):
    """One row for each product, with the number of experts that the process has."""
    torch.compiler.reset()
    part = ExpertParallel("int4_words", "padded", rank, 2, **SIZES).cuda()
    args = [tensor.cuda() for tensor in routings(rank, SIZES["e"], SIZES["h"])[0]]
    with torch.no_grad():
        found = inductor_quant.explain(part, *args, timings=False, verbose=False)
    rows = [row for row in found.products if row.site.experts]
    assert [(row.status, row.site.experts) for row in rows] == [("matched experts", 8)] * 2


def run(rank, path, form, is_inside, format):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=2)
    experts.GROUP = 128
    try:
        with (
            config.patch(capture_scalar_outputs=True),
            torch.compiler.config.patch(force_disable_caches=True),
        ):
            if format is None:
                explain(rank)
            else:
                compare(rank, format, form, is_inside)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("format", FAMILIES)
@pytest.mark.parametrize(
    ("form", "is_inside"), [("exact", False), ("padded", True), ("exact", True)]
)
def test_two_gpus_compute_what_one_does_with_all_experts(form, is_inside, format, tmp_path):
    args = str(tmp_path / "rendezvous"), form, is_inside, format
    torch.multiprocessing.spawn(run, args, nprocs=2)


def test_each_process_explains_its_own(tmp_path):
    torch.multiprocessing.spawn(run, (str(tmp_path / "rendezvous"), "", False, None), nprocs=2)
