"""A range that fails, a guard that a size breaks, and several threads."""

from __future__ import annotations

import dataclasses
import sys
import threading
import warnings

import pytest
import sympy
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_quant import collect
from inductor_quant._compat import variants
from inductor_quant.errors import InductorQuantError
from tests.support.ranges import K, rows, session, wait_for

pytestmark = pytest.mark.compiles

bf16 = torch.bfloat16


def test_a_range_that_fails_runs_the_first_kernels_and_warns_once(monkeypatch):
    compile_ = variants.Graph.compile

    def failing(self, numbers, ranges, hints):
        if 45 in hints.values():
            raise RuntimeError("no such range")
        return compile_(self, numbers, ranges, hints)

    monkeypatch.setattr(variants.Graph, "compile", failing)
    with session(on_error="fallback") as run:
        assert rows(run[16]) == ["9..16"]
        with pytest.warns(RuntimeWarning, match="no such range"):
            assert rows(run[40]) == []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert rows(run[40]) == rows(run[41]) == []
        assert rows(run[70]) == ["65..90"]
    with session() as run:
        run[16]
        with pytest.raises(InductorQuantError, match="no such range"):
            run[40]


def test_a_kernel_that_fails_in_a_range_fails_the_range(monkeypatch):
    from inductor_quant.lowering import w8a8

    lower = w8a8.describe_problem

    def failing(*args):
        problem = lower(*args)
        if problem.m == 45:
            raise RuntimeError("a bug")
        return problem

    monkeypatch.setattr(w8a8, "describe_problem", failing)
    with session(on_error="fallback") as run:
        run[16]
        with pytest.warns(RuntimeWarning, match=r"range of M.*a bug"):
            report = run[40]
        assert (rows(report), [k.sizes[0] for k in report.kernels]) == ([], [16])


def test_a_guard_of_a_variant_is_asked_for_every_size(monkeypatch):
    compile_ = variants.Graph.compile

    def guarded(self, numbers, ranges, hints):
        [(symbol, hint)] = hints.items()
        variant = compile_(self, numbers, ranges, hints)
        guard = variants.Computed(sympy.Eq(sympy.Mod(symbol, 5), 0))
        return dataclasses.replace(variant, guards=(guard,) if hint == 45 else ())

    monkeypatch.setattr(variants.Graph, "compile", guarded)
    with session() as run:
        run[16]
        assert [rows(run[m]) for m in (40, 35, 41, 42)] == [["23..45"], [], ["23..45"], []]


@pytest.mark.slow
def test_two_threads_meet_a_range_at_once():
    with session() as run, collect() as report:
        run[16]
        start, errors = threading.Barrier(2), []

        def work():
            try:
                with FakeTensorMode(), torch.no_grad():
                    start.wait(60)
                    run.call(torch.zeros(100, K, dtype=bf16, device="cuda"))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert rows(report).count("91..128") == 1


def test_only_one_thread_at_a_time_asks_sympy(monkeypatch):
    """Threads share what it knows of an expression, while it finds it out."""
    facts = sys.modules["sympy.core.assumptions"]
    ask, outside = facts._ask, []

    def asked(*args):
        if not variants.lock()._is_owned():
            outside.append(args)
        return ask(*args)

    monkeypatch.setattr(facts, "_ask", asked)
    with session() as run:
        assert [rows(run[sizes]) for sizes in ((2, 20), (2, 22))] == [["24..44"], []]
    assert outside == []


def test_a_call_waits_for_no_compilation_in_the_background():
    held, done = threading.Event(), threading.Event()

    def hold():
        with variants.lock():
            held.set()
            done.wait(60)

    with session(row_buckets=(8, 100), compile_buckets="background") as run, collect() as all_:
        run[16]
        wait_for(all_)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)
        assert [rows(run[m]) for m in (16, 20, 5)] == [[], [], []]
        done.set()
        thread.join()
        run[5]
        wait_for(all_, 2)
    assert [bucket.rows for bucket in all_.buckets] == ["9..100", "1..8"]
