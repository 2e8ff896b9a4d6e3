"""Ranges that are compiled ahead: their kernels are compiled beside each other."""

from __future__ import annotations

import pytest
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture

from inductor_quant._compat import variants
from inductor_quant.simulate.gpu import RecordedKernel
from tests.support.ranges import rows, session

pytestmark = pytest.mark.compiles

RANGES = (8, 100)


@pytest.fixture
def events(monkeypatch):
    """What happens, in order: the largest M of a range whose code is generated, "wait" for each
    kernel. Kernels are compiled in a pool, as it were."""
    found, compile_ = [], variants.Graph.compile

    class Pending(CodeCacheFuture):
        fails = False

        def __init__(self, source):
            self.source = source

        def result(self, timeout=None):
            found.append("wait")
            if self.fails:
                type(self).fails = False
                raise RuntimeError("ptxas failed")
            return RecordedKernel("", self.source)

    def compiled(self, numbers, ranges, hints):
        found.append(next(iter(hints.values())))
        return compile_(self, numbers, ranges, hints)

    def install():
        started = {}
        monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda *_: False)
        monkeypatch.setattr(
            AsyncCompile,
            "triton",
            lambda _, name, source, **__: started.setdefault(source, Pending(source)),
        )

    monkeypatch.setattr(variants.Graph, "compile", compiled)
    return found, install, Pending


def test_no_range_waits_for_the_kernels_of_another(events):
    found, install, _ = events
    with session(row_buckets=RANGES, compile_buckets="ahead") as run:
        install()
        with config.patch(compile_threads=2):
            assert rows(run[16]) == ["1..8", "9..100", "101.."]
            assert rows(run[3]) == rows(run[300]) == []
    generated = [each for each in found if each != "wait"]
    # the general variant waits for its own kernels, and then every range is generated
    after = found[found.index(generated[0]) :]
    assert after[: len(generated)] == generated == [8, 100, 200]
    assert after.count("wait") >= 3


def test_a_range_whose_kernel_fails_is_compiled_by_itself(events, monkeypatch):
    found, install, pending = events
    with session(row_buckets=RANGES, compile_buckets="ahead") as run:
        install()
        compiled = variants.Graph.compile

        def failing(*args):
            made = compiled(*args)
            pending.fails = found[-1] == 200  # the first that is waited for
            return made

        monkeypatch.setattr(variants.Graph, "compile", failing)
        with config.patch(compile_threads=2):
            assert rows(run[16]) == ["1..8", "9..100", "101..", "1..8"]
            assert rows(run[3]) == rows(run[300]) == []
    assert [each for each in found if each != "wait"] == [8, 100, 200, 8]


def test_a_range_that_is_met_waits_for_its_kernels(events):
    found, install, _ = events
    with session() as run:
        install()
        with config.patch(compile_threads=2):
            run[16]
            run[3]
    assert found[:2] == [16, "wait"]
    assert found[-1] == "wait"
