"""The tensor-parallel example: two processes with rewritten graphs against fp64 and one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from examples import tensor_parallel as example
from tests.support.forks import Program
from tests.support.graphs.post_grad import EagerBackend

FAMILIES = {"int8": "w8a8", "int4": "weight_only", "fp8": "fp8"}
MLP, ATTENTION = example.MLP, example.Attention
CASES = ((MLP, "int8", 3), (MLP, "int4", 3), (ATTENTION, "fp8", 4))
HIDDEN = 256


def run(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        compare(rank)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def compare(rank):
    x = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    for layer, kind, count in CASES:
        backend = EagerBackend()
        one, part = (example.make(layer, kind, HIDDEN, *at) for at in ((0, 1), (rank, 2)))
        with torch.no_grad():
            result = torch.compile(part, backend=backend, fullgraph=True)(x)
            same_parts, one_process = (example.exact(each, x) for each in (part, one))
        assert example.difference(result, same_parts) < example.ROUNDED[kind]
        assert example.difference(result, one_process) < example.TOLERANCE[kind]
        [rewrite] = backend.rewrites
        assert [match.family for match in rewrite.report.matches] == [FAMILIES[kind]] * count


@pytest.mark.compiles
def test_two_processes_compute_what_one_does_and_every_product_is_matched(tmp_path, forks):
    path = str(tmp_path / "rendezvous")
    other = Program(f"from {__name__} import run; run(1, {path!r})")
    with ThreadPoolExecutor() as pool:
        done = pool.submit(forks.run, other)
        try:
            run(0, path)
        finally:
            done.result()
