"""Experts over two processes: each compiles its own; rows are exchanged outside or inside."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import config

from tests.support.forks import Program
from tests.support.graphs.post_grad import EagerBackend
from tests.support.producers.expert_parallel import FAMILIES, ExpertParallel, routings

E, H = 4, 64
# (format, form, whether the exchange is compiled too)
CASES = (
    ("int4_words", "padded", False),
    ("int8", "exact", True),
    ("fp8_block", "padded", True),
)


def run(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        for case in CASES:
            compare(rank, *case)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@torch.no_grad()
@config.patch(capture_scalar_outputs=True)
def compare(rank, format, form, is_inside):
    torch._dynamo.reset()
    part, whole = (
        ExpertParallel(format, *at, e=E, h=H) for at in ((form, rank, 2), ("of_one", 0, 1))
    )
    backends = [EagerBackend() for _ in range(2)]
    compiled = [
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)
        for fn, backend in zip((part if is_inside else part.local, whole), backends, strict=True)
    ]
    if not is_inside:
        part.local = compiled[0]
    run_part = compiled[0] if is_inside else part
    for args in routings(rank, E, H):
        got, want, plain = run_part(*args), compiled[1](*args), whole(*args)
        assert torch.equal(got, want)
        assert (got - plain).norm() <= 0.03 * plain.norm()
    for backend, experts in zip(backends, (E // 2, E), strict=True):
        for rewrite in backend.rewrites:
            matches = rewrite.report.matches
            assert [match.family for match in matches] == [FAMILIES[format]] * 2, rewrite.codes
            assert [match.site.experts for match in matches] == [experts] * 2


@pytest.mark.compiles
def test_two_processes_compute_what_one_does_with_all_experts(tmp_path, forks):
    path = str(tmp_path / "rendezvous")
    other = Program(f"from {__name__} import run; run(1, {path!r})")
    with ThreadPoolExecutor() as pool:
        done = pool.submit(forks.run, other)
        try:
            run(0, path)
        finally:
            done.result()
