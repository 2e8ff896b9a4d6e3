"""One graph of a dynamic M: which ranges are compiled, when, and what they choose."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import threading
import time
import warnings

import pytest
import sympy
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples import tensor_parallel
from inductor_quant import backend, collect, row_buckets, simulate
from inductor_quant._compat import inductor, variants
from inductor_quant.errors import InductorQuantError, OptionError
from inductor_quant.options import FAMILIES, Options
from inductor_quant.report import formats
from inductor_quant.simulate import virtual_gpu
from inductor_quant.simulate.capture import GeneratedKernel
from inductor_quant.spec import row_ranges
from tests.support.forks import Program
from tests.support.producers.experts import Experts
from tests.support.producers.packed import Gptq
from tests.support.sampling import sampled
from tests.support.spellings.quantizers import TorchaoLinear

pytestmark = pytest.mark.compiles

bf16 = torch.bfloat16
K, N = 512, 384


class Block(nn.Module):
    """Two GEMMs of one activation, and one whose activation a kernel computes."""

    layer = functools.partial(TorchaoLinear, bias=False)

    def __init__(self, k=K, n=N):
        super().__init__()
        self.k = k
        self.gate, self.up, self.down = (self.layer(*size) for size in ((k, n), (k, n), (n, k)))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Scaled(nn.Module):
    """One GEMM of an activation with a stored scale."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Buffer(torch.zeros(N, K, dtype=torch.int8))

    def forward(self, x):
        q = (x * 8).round().clamp(-128, 127).to(torch.int8).reshape(-1, K)
        return (torch._int_mm(q, self.weight.t()).float() * 0.125).reshape(*x.shape[:-1], N)


class Added(Scaled):
    def forward(self, x, number=0):
        return super().forward(x) + number


class Session:
    """Calls of one compiled function on a virtual H100."""

    def __init__(self, fn, k, how, options):
        self.graphs, self.k = 0, k
        given = {f"inductor_quant.{name}": value for name, value in options.items()}

        def counted(gm, inputs):
            self.graphs += 1
            return backend.inductor_quant_backend(gm, inputs, options=given)

        self.call = torch.compile(fn, backend=counted, dynamic=how)

    def __getitem__(self, sizes):
        """The report of a call with activations of these sizes."""
        sizes = sizes if isinstance(sizes, tuple) else (sizes,)
        x = torch.zeros(*sizes, self.k, dtype=bf16, device="cuda")
        with collect() as report:
            assert self.call(x).shape[:-1] == sizes
        return report


@contextlib.contextmanager
def session(make=Scaled, *, how=True, oblivious=True, caches=False, **options):
    torch._dynamo.reset()
    settings = {"force_disable_caches": not caches, "compile_threads": 1}
    with (
        virtual_gpu(90, run_kernel=GeneratedKernel),
        FakeTensorMode(),
        config.patch(settings),
        torch.no_grad(),
        warnings.catch_warnings(),
        fx_config.patch(backed_size_oblivious=oblivious),
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        library.impl("_scaled_mm.out", lambda *_, out, **__: out, "Meta")  # the GPU's library
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        with torch.device("cuda"):
            model = make().eval()
        yield Session(
            lambda *inputs: model(*inputs),
            getattr(model, "k", K),
            how,
            {"on_error": "raise", "row_buckets": True, **options},
        )
    torch._dynamo.reset()


def rows(report):
    return [bucket.rows for bucket in report.buckets]


def kernels(report, rows=None):
    return [k.chosen for k in report.kernels if rows is None or k.rows == rows]


def static(m, make):
    with session(make, how=False) as run:
        return kernels(run[m])


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


def test_a_dynamic_number_without_bounds():
    with session(make=Added) as run, collect() as report:
        for number in (5, -3):
            run.call(torch.zeros(16, K, dtype=bf16, device="cuda"), number)
    assert rows(report) == ["9..16"]


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
    """Tiles of 8 rows, tiles of 16, and the library beyond a mean of 64."""
    found = kernels_of_ranges(Routed, [600, 16, 100])
    assert found == {m: static(m, Routed) for m in (600, 16, 100)}
    assert (len(found[600]), len(found[16]), len(found[100])) == (0, 2, 2)
    assert found[16] != found[100]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Block, Words, Bytes])
def test_ten_sizes_have_the_kernels_of_static_compilations(kind):
    make = functools.partial(kind, 4096, 28672)
    sizes = [16, 64, 300, 4096, 3, 17, 20, 301, 510, 1000]
    assert kernels_of_ranges(make, sizes) == {m: static(m, make) for m in sizes}


def test_without_ranges_the_kernels_of_the_first_call_serve_all():
    with session(row_buckets=False) as run:
        assert len(kernels(run[16])) == 1
        assert kernels(run[300]) == []


def test_ranges_of_the_user():
    with session(row_buckets=(8, 100)) as run:
        found = [rows(run[m]) for m in (5, 1, 60, 500, 5000)]
    assert found == [["1..8"], [], ["9..100"], ["101.."], []]


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


def wait_for(found, count=1):
    """Until so many ranges are compiled in the background."""
    deadline = time.monotonic() + 60
    while len(found.buckets) < count and time.monotonic() < deadline:
        time.sleep(0.01)


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


# ------------------------------------------------------------------------------------------
# the table


def test_the_table_has_every_threshold_of_passes_and_ops():
    from inductor_quant.kernels import dispatch, problem
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
    assert tops.keys() == {*FAMILIES}


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
        assert len({(str(d.kernel and d.kernel.name), str(d.config), d.notes) for d in of}) == 1


# ------------------------------------------------------------------------------------------
# caches, between processes

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
