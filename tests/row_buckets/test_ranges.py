"""One graph of a dynamic M: which ranges are compiled, and when."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings

import pytest
import sympy
import torch
import torch._dynamo
from torch import nn
from torch._inductor import config

from inductor_quant import backend, collect, row_buckets
from inductor_quant._compat import inductor, variants
from inductor_quant.errors import OptionError
from inductor_quant.options import Options
from tests.support.forks import Program
from tests.support.ranges import K, Scaled, kernels, rows, session, wait_for

pytestmark = pytest.mark.compiles

bf16 = torch.bfloat16


class Added(Scaled):
    def forward(self, x, number=0):
        return super().forward(x) + number


def test_each_range_is_compiled_when_it_is_met():
    with session() as run:
        found = [rows(report) for report in (run[16], run[3], run[10], run[2], run[16])]
        assert run.graphs == 1
    assert found == [["9..16"], ["2..4"], [], [], []]


def test_the_general_variant_is_compiled_when_a_call_needs_it(monkeypatch):
    compile_, served = variants.Graph.compile, []

    def guarded(self, numbers, ranges, hints):
        served.append("a range" if ranges else "these sizes" if numbers else "any size")
        variant = compile_(self, numbers, ranges, hints)
        never = variants.Computed(sympy.Eq(next(iter(self.positions)), -1))
        return dataclasses.replace(variant, guards=() if numbers else (never,))

    monkeypatch.setattr(variants.Graph, "compile", guarded)
    with session() as run:
        report = run[16]
        assert len(report.matches) == 1
        assert [kernel.rows for kernel in report.kernels] == ["9..16"]
        assert served == ["a range"]
        report = run[0]
        assert report.matches == []
        assert next(kernel.sizes[0] for kernel in report.kernels if not kernel.rows) == 16
        assert run[0].kernels == []
    assert served == ["a range", "any size", "these sizes"]


def test_nothing_is_compiled_while_a_stream_is_captured(monkeypatch):
    with session() as run:
        run[16]
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert rows(run[12]) == []
            with pytest.warns(RuntimeWarning, match="before the capture"):
                report = run[300]
            assert report.kernels == []
        assert rows(run[300]) == ["256..312"]


def test_what_runs_op_by_op_is_the_graph(monkeypatch):
    """On the CPU, outside of the fake tensors."""
    found = []
    run_eagerly = variants.Graph.run_eagerly
    monkeypatch.setattr(
        variants.Graph, "run_eagerly", lambda *args: found.append(args[0]) or run_eagerly(*args)
    )
    with session() as run, monkeypatch.context() as patch:
        run[16]
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        warnings.simplefilter("ignore")
        run[300]
    x, model = torch.randn(300, K, dtype=bf16), Scaled()
    model.weight.random_(-9, 9)
    stored = {torch.Size([16, K]): x, model.weight.shape: model.weight}
    values = [
        300 if isinstance(value, torch.SymInt) else stored[torch.Size(map(int, value.shape))]
        for value in found[0]._inputs
    ]
    [result] = run_eagerly(found[0], values)
    assert values == []
    assert torch.equal(result, model(x))


def test_a_dynamic_number_without_bounds():
    with session(make=Added) as run, collect() as report:
        for number in (5, -3):
            run.call(torch.zeros(16, K, dtype=bf16, device="cuda"), number)
    assert rows(report) == ["9..16"]


def test_without_ranges_the_kernels_of_the_first_call_serve_all():
    with session(row_buckets=False) as run:
        assert len(kernels(run[16])) == 1
        assert kernels(run[300]) == []


def test_ranges_of_the_user():
    with session(row_buckets=(8, 100)) as run:
        found = [rows(run[m]) for m in (5, 1, 60, 500, 5000)]
    assert found == [["1..8"], [], ["9..100"], ["101.."], []]


def test_all_ranges_are_compiled_ahead():
    with session(row_buckets=(1, 8, 100), compile_buckets="ahead") as run:
        assert rows(run[16]) == ["1", "2..8", "9..100", "101.."]
        assert [rows(run[m]) for m in (1, 3, 64, 4096)] == [[], [], [], []]


def test_while_a_range_is_compiled_in_the_background_the_first_kernels_serve():
    with session(row_buckets=(8, 100), compile_buckets="background") as run, collect() as all_:
        assert kernels(run[16])
        wait_for(all_)
        assert rows(all_) == ["9..100"]
        assert rows(run[16]) == []


@pytest.mark.slow
def test_batch_and_length_are_dynamic():
    with session() as run:
        found = [rows(run[sizes]) for sizes in ((2, 20), (2, 22), (4, 100), (7, 1))]
        assert run.graphs == 1
    assert found == [["24..44"], [], ["388..512"], ["5..8"]]


def test_a_dynamic_dimension_that_is_met_second():
    with session(how=None, oblivious=False) as run:
        assert rows(run[16]) == []
        assert rows(run[20]) == ["17..22"]
        assert rows(run[300]) == ["256..312"]
        assert run.graphs == 2
        assert rows(run[1]) == []  # a graph of its own
        assert run.graphs == 3


def test_bounds_that_the_user_gave_are_kept():
    with session(how=None) as run:
        x = torch.zeros(95, K, dtype=bf16, device="cuda")
        torch._dynamo.mark_dynamic(x, 0, min=93, max=100)
        with collect() as report:
            run.call(x)
    assert rows(report) == ["93..100"]
    assert [k.sizes[0] for k in report.kernels if k.rows] == [100]


class Attending(Scaled):
    """One query of each sequence, whatever its length."""

    def forward(self, x):
        return super().forward(nn.functional.scaled_dot_product_attention(x[:, -1:], x, x))


@pytest.mark.slow
class Sixteen(Scaled):
    """Another program for 16 rows, as where strides of 16 heads are those of 16 tokens."""

    def forward(self, x):
        out = super().forward(x)
        return 2 * out if x.shape[0] == 16 else out


def test_a_range_ends_below_the_size_that_a_guard_excludes():
    with session(Sixteen) as run:
        report = run[10]
        assert rows(report) == ["9..15"]
        assert [kernel.sizes[0] for kernel in report.kernels] == [15]
        assert rows(run[15]) == []
        assert run.graphs == 1
        run[16]
        assert run.graphs == 2


def test_a_length_that_is_in_no_rows_stays_symbolic():
    with session(Attending) as run:
        found = []
        for sizes in ((20, 30), (22, 50), (40, 50), (41, 7)):
            with collect() as report:
                run.call(torch.zeros(*sizes, K, dtype=bf16, device="cuda"))
            found.append(rows(report))
        assert run.graphs == 1
    assert found == [["17..22"], [], ["23..45"], []]


@pytest.mark.parametrize("setting", ["cpp_wrapper", "triton.autotune_at_compile_time"])
def test_what_is_saved_as_one_piece_has_no_ranges(monkeypatch, setting):
    """An AOTInductor package, and what ``standalone_compile`` returns, set one of these."""
    is_saved_whole = inductor.is_saved_whole
    assert not is_saved_whole()
    with config.patch({setting: True}):
        assert is_saved_whole()
    monkeypatch.setattr(inductor, "is_saved_whole", lambda: True)
    with session() as run:
        report = run[16]
    assert (rows(report), len(kernels(report))) == ([], 1)


@pytest.mark.slow
def test_a_reset_drops_all_ranges():
    with session() as run:
        assert rows(run[16]) == ["9..16"]
        torch.compiler.reset()
        assert rows(run[16]) == ["9..16"]
        assert run.graphs == 2


def test_variants_share_tensors():
    table = torch.arange(4)
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    gm.register_buffer("table", table)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.get_attr("table")
    assert variants._copied(gm).table is table


class Head(Scaled):
    """The second GEMM computes one row for each sequence."""

    def forward(self, x):
        return super().forward(torch.cat([super().forward(x)[:, -1:]] * 2, -1)[..., :K].to(bf16))


@pytest.mark.slow
def test_gemms_with_other_rows_stay_in_their_own_range():
    with session(Head, oblivious=False) as run:
        run.call(torch.zeros(2, 40, K, dtype=bf16, device="cuda"))
        with collect() as report:
            run.call(torch.zeros(2, 20, K, dtype=bf16, device="cuda"))
    [name] = rows(report)
    assert name == "24..44"
    assert {k.sizes[0] for k in report.kernels} == {2, 44}


@pytest.mark.slow
def test_no_rows_and_rows_that_are_known_at_run_time_only():
    with session() as run:
        assert rows(run[16]) == ["9..16"]
        assert rows(run[0]) == []

    class Chosen(Scaled):
        def forward(self, x):
            return super().forward(x[x[:, 0] > 0])

    torch._dynamo.reset()
    with session(Chosen) as run, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_buckets, "RowBuckets", lambda *_: compiled.append(1))
            with contextlib.suppress(Exception):
                run[16]  # fake tensors have no such sizes
    assert compiled == []


@pytest.mark.slow
def test_what_the_caller_has_set_does_not_reach_the_compilation():
    with session() as run:
        run[16]
        with torch.device("cuda"):
            assert rows(run[3]) == ["2..4"]
        with config.patch(max_autotune=True):
            assert len(run[300].kernels[0].offered) == 1


def test_enabled_compilations_have_ranges():
    with session() as run, backend.enabled(row_buckets=True):
        with torch.device("cuda"):
            run.call = torch.compile(Scaled(), backend="inductor", dynamic=True)
        assert rows(run[16]) == ["9..16"]
        assert rows(run[300]) == ["256..312"]


@pytest.mark.parametrize("value", [(), (8, 4), (0, 4), 8, "8", (True,)])
def test_illegal_ranges(value):
    with pytest.raises(OptionError, match="row_buckets"):
        Options(row_buckets=value)


def test_illegal_time_of_compilation():
    with pytest.raises(OptionError, match="compile_buckets"):
        Options(compile_buckets="later")


def test_ranges_are_part_of_the_cache_key():
    from inductor_quant.patterns.graph_pass import for_options

    assert len({for_options(Options(row_buckets=v)).uuid() for v in (True, False, (1, 8))}) == 3


PROGRAM = """
import json, torch
from torch._dynamo.utils import counters
from torch._inductor import config
from inductor_quant import collect
from inductor_quant.simulate import interpreted_cpu

def scaled(a, b):
    return torch._int_mm(a, b) * 0.5

b = torch.arange(64 * 48).remainder(13).sub(6).reshape(64, 48).to(torch.int8)
compiled = torch.compile(
    scaled, backend="inductor_quant", options={"inductor_quant.row_buckets": True}
)
exact = []
cached = config.patch(force_disable_caches=False, fx_graph_cache=True)
with interpreted_cpu(), torch.no_grad(), cached, collect() as report:
    for m in (20, 40, 41, 70):
        a = torch.arange(m * 64).remainder(17).sub(8).reshape(m, 64).to(torch.int8)
        torch._dynamo.mark_dynamic(a, 0)
        exact.append(torch.equal(compiled(a, b).double(), a.double() @ b.double() * 0.5))
found = counters["inductor"]
print(json.dumps({
    "exact": all(exact), "ranges": [bucket.rows for bucket in report.buckets],
    "hits": found["fxgraph_cache_hit"], "misses": found["fxgraph_cache_miss"],
}))
"""


@pytest.mark.slow
def test_a_second_process_reads_every_range_from_the_cache(tmp_path, interpreter_forks):
    program = Program(PROGRAM, environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    cold, warm = (json.loads(interpreter_forks.run(program)[0]) for _ in range(2))
    ranges = ["17..22", "23..45", "65..90"]
    assert cold == {"exact": True, "ranges": ranges, "hits": 0, "misses": 3}
    assert warm == {"exact": True, "ranges": ranges, "hits": 3, "misses": 0}


def test_choosing_a_range_costs_little():
    from examples.benchmarks.dynamic_m import DISPATCH_US, dispatch_us

    assert dispatch_us(10_000) < 2 * DISPATCH_US  # other processes run beside the tests
