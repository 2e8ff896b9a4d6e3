"""Constant buffers: each change of one is detected, in this process and in a warm cache.

The rewritten graph runs eagerly here, so a result shows what was compiled, on any machine.
"""

from __future__ import annotations

import copy
import ctypes
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.patterns.fx_utils import aten
from inductor_quant.tables import constant_buffers
from tests.support.forks import Program
from tests.support.graphs.post_grad import calls
from tests.support.sampling import sampled
from tests.support.tables import WEIGHT_ONLY, K, compiled, formats, gptq, has_data, is_right, x_of

pytestmark = pytest.mark.compiles


def reversed_groups(module):
    return module.g_idx.flip(0)


def in_place_copy(module):
    module.g_idx.copy_(reversed_groups(module))


def in_place_arithmetic(module):
    module.g_idx.mul_(-1).add_(3)


def by_item(module):
    module.g_idx[:64] = 2


def through_a_view(module):
    module.g_idx.view(-1)[128:].zero_()


def state_dict(module):
    module.load_state_dict({**module.state_dict(), "g_idx": reversed_groups(module)})


def state_dict_assigned(module):
    state = {**module.state_dict(), "g_idx": reversed_groups(module)}
    module.load_state_dict(state, assign=True)


def another_buffer(module):
    module.g_idx = reversed_groups(module)


def another_memory(module):
    module.g_idx.data = reversed_groups(module)


def in_inference_mode(module):
    with torch.inference_mode():
        module.g_idx.copy_(reversed_groups(module))


def by_a_compiled_function(module):
    torch.compile(lambda buffer: buffer.mul_(-1).add_(3), backend="aot_eager")(module.g_idx)


def set_(module):
    module.g_idx.set_(reversed_groups(module))


def by_a_collective(module):
    """A broadcast, which writes without counting a version."""
    store, tables = dist.HashStore(), [reversed_groups(module), module.g_idx]

    def take_part(rank):
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        group.broadcast(tables[rank], 0).wait()

    version = module.g_idx._version
    with ThreadPoolExecutor() as pool:
        list(pool.map(take_part, range(2)))
    assert module.g_idx._version == version


def through_data(module):
    module.g_idx.data.copy_(reversed_groups(module))


def through_dlpack(module):
    torch.from_dlpack(module.g_idx).copy_(reversed_groups(module))


def through_numpy(module):
    module.g_idx.numpy()[:] = reversed_groups(module).numpy()


def through_memory(module):
    new = reversed_groups(module)
    ctypes.memmove(module.g_idx.data_ptr(), new.data_ptr(), new.nbytes)


CHANGES = [
    in_place_copy,
    in_place_arithmetic,
    by_item,
    through_a_view,
    state_dict,
    state_dict_assigned,
    another_buffer,
    another_memory,
    in_inference_mode,
    by_a_compiled_function,
    set_,
    by_a_collective,
    through_data,
    through_dlpack,
    through_numpy,
    through_memory,
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", sampled(CHANGES), ids=lambda change: change.__name__)
def test_a_change_of_a_table_is_seen(rewrites, change):
    module, x = gptq(), x_of()
    f = compiled(module)
    assert is_right(module, f, x)
    original = copy.deepcopy(module)
    with torch.no_grad():
        change(module)
    assert not torch.equal(module.g_idx, original.g_idx)
    assert is_right(module, f, x)
    assert not is_right(original, f, x)
    with torch.no_grad():
        module.g_idx.copy_(original.g_idx)
    assert is_right(original, f, x)


@pytest.mark.parametrize("change", sampled(CHANGES, every=4), ids=lambda change: change.__name__)
def test_without_the_guard_a_change_is_not_seen(rewrites, monkeypatch, change):
    """Without the guard, the results above are wrong."""
    monkeypatch.setattr(constant_buffers, "guarded", lambda compiled, *_, **__: compiled)
    module, x = gptq(), x_of()
    f = compiled(module)
    assert is_right(module, f, x)
    with torch.no_grad():
        change(module)
    assert not is_right(module, f, x)


def test_a_change_through_flattened_buffers_is_seen(rewrites):
    """Two buffers that are parts of one tensor, each with a version counter of its own."""
    module, x = gptq(), x_of()
    flat = torch.cat([module.g_idx, module.g_idx])
    module.g_idx.data = flat[:K]
    f = compiled(module)
    assert is_right(module, f, x)
    flat[:K].copy_(reversed_groups(module))
    assert is_right(module, f, x)


def test_a_shift_table_that_changes_is_seen(rewrites):
    module, x = gptq(), x_of()
    f = compiled(module)
    with torch.no_grad():
        before = f(x)
        module.wf_column.copy_(module.wf_column.flip(1))
        assert not torch.equal(f(x), before)
        assert torch.allclose(f(x), module(x), rtol=1e-2, atol=1e-2)


def test_what_is_compared_with_is_what_was_compiled(rewrites, monkeypatch):
    """A table that is written to while Inductor compiles."""
    module, x = gptq(), x_of()
    compile_fx = compat.compile_fx

    def slow(*args, **kwargs):
        compiled = compile_fx(*args, **kwargs)
        module.g_idx.copy_(reversed_groups(module))
        return compiled

    monkeypatch.setattr(compat, "compile_fx", slow)
    f = compiled(module)
    with torch.no_grad():
        f(x)
    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    assert is_right(module, f, x)


@pytest.fixture
def late(monkeypatch):
    """Every comparison is asynchronous."""
    start = constant_buffers._State.start
    monkeypatch.setattr(constant_buffers._State, "start", lambda state: lambda: start(state)())


def counting(monkeypatch, calls):
    compile_fx = compat.compile_fx

    def counted(*args, **kwargs):
        run = compile_fx(*args, **kwargs)
        return lambda *args: calls.append(1) or run(*args)

    monkeypatch.setattr(compat, "compile_fx", counted)


def test_a_result_that_a_stale_table_gave_is_dropped(rewrites, monkeypatch, late):
    calls_made = []
    counting(monkeypatch, calls_made)
    module, x = gptq(), x_of()
    f = compiled(module)
    for change in (lambda _: None, lambda _: None, through_data):
        change(module)
        assert is_right(module, f, x)
    assert len(calls_made) == 4  # the third call ran on the old table, and then again


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = gptq()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.layer(x)


def test_what_writes_to_its_arguments_runs_once(rewrites, monkeypatch, late):
    module, x = Counts(), x_of()
    f = compiled(module)
    with torch.no_grad():
        for change in (lambda _: None, lambda _: None, through_data, lambda _: None):
            change(module.layer)
            assert is_right(module.layer, f, x)
    assert module.count == 4


def test_a_graph_with_effects_is_known():
    def traced(fn):
        return torch.fx.symbolic_trace(fn)

    collective = torch.ops._c10d_functional.all_reduce
    assert constant_buffers.has_effects(traced(lambda x: collective(x, "sum", "0")))
    assert constant_buffers.has_effects(traced(lambda x: collective.default(x, "sum", "0")))
    assert not constant_buffers.has_effects(traced(lambda x: torch.relu(x).add(1) @ x))


def test_tables_are_compared_in_each_call_and_rewritten_equal_stay_constants(rewrites):
    module, x = gptq(), x_of()
    f = compiled(module)
    for _ in range(3):
        assert is_right(module, f, x)
        module.g_idx.copy_(module.g_idx.clone())
    assert len(rewrites) == 1


def test_one_layer_compiled_serves_others_with_tables_of_their_own(rewrites):
    """Layers of one class share a compiled graph; a table does not leak from one to the next."""
    same, other = gptq(), gptq()
    other.g_idx = reversed_groups(other)
    x = x_of()

    def apply(module, x):
        return module(x)

    f = compiled(apply)
    for module in (same, other, gptq(), other, same):
        assert is_right(module, lambda x, module=module: f(module, x), x)
    assert len(rewrites) == 2  # by value, and for the others
    assert [has_data(format) for format in formats(rewrites)] == [False, True]


def test_many_layers_do_not_pile_up(rewrites, monkeypatch):
    monkeypatch.setattr(constant_buffers, "MAX_STATES", 2)
    modules, x = [gptq() for _ in range(4)], x_of()

    def apply(module, x):
        return module(x)

    f = compiled(apply)
    for module in modules * 2:
        assert is_right(module, lambda x, module=module: f(module, x), x)
    assert len(rewrites) == 1


def test_the_general_form_takes_any_number_of_rows(rewrites):
    module = gptq()
    f = torch.compile(module, backend="inductor_quant", dynamic=True)
    assert is_right(module, f, x_of(4))
    with torch.no_grad():
        module.g_idx.copy_(reversed_groups(module))
    for rows in (4, 7, 32, 5):
        assert is_right(module, f, x_of(rows))


def test_with_exclusions_the_general_form_is_left_as_it_was(rewrites):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.fused = gptq(), gptq()

        def forward(self, x):
            return self.kept(x), self.fused(x)

    model, x = Model(), x_of()
    f = compiled(model, exclude_modules=["kept"])
    with torch.no_grad():
        f(x)
        assert [len(calls(r.after, WEIGHT_ONLY)) for r in rewrites] == [2]
        model.fused.g_idx.copy_(reversed_groups(model.fused))
        for got, wanted in zip(f(x), model(x), strict=True):
            assert torch.allclose(got, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["find", "has_effects", "digest", "_constant"])
def test_a_failure_while_tables_are_read_leaves_them_in_the_graph(rewrites, monkeypatch, name):
    whole = getattr(constant_buffers, name)

    def fail(*args):
        whole(*args)  # some of its nodes are there when it fails
        raise ValueError("no")

    monkeypatch.setattr(constant_buffers, name, fail)
    fallback.warn_once.cache_clear()
    module = gptq()
    with pytest.warns(RuntimeWarning, match="left it as it was"):
        assert is_right(module, compiled(module), x_of())
    [format] = formats(rewrites)
    assert has_data(format)
    with pytest.raises(BackendCompilerFailed, match="inductor_quant failed"):
        compiled(module, on_error="raise")(x_of())


def test_gradients_of_the_input_are_those_of_the_module(rewrites):
    module = gptq()
    x = x_of().requires_grad_()
    f = torch.compile(module, backend=inductor_quant_backend)
    grads = [torch.autograd.grad(g(x).sum(), x)[0] for g in (f, module)]
    assert torch.allclose(*grads, rtol=1e-2, atol=1e-2)


def test_the_constant_is_removed_with_what_it_decided(rewrites):
    module = gptq()
    assert is_right(module, compiled(module), x_of())
    [rewrite] = rewrites
    targets = [node.target for node in rewrite.after.graph.nodes]
    assert aten.index.Tensor not in targets
    assert aten.lift_fresh_copy.default not in targets


PROGRAM = """
import json, sys, torch
from torch._dynamo.utils import counters
from torch._inductor import config
from inductor_quant.simulate import interpreted_cpu
from tests.support.producers.registry import PRODUCERS

results = []
for tables_of in sys.argv[1:]:
    torch._dynamo.reset()
    counters.clear()
    module = PRODUCERS["gptq_gm_4b_g64_base"].make(torch.float16)
    if tables_of == "other":
        module.g_idx = module.g_idx.flip(0).contiguous()
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).half()
    exact = x.double() @ module.dense().t() + module.bias.double()
    cached = config.patch(force_disable_caches=False, fx_graph_cache=True)
    with interpreted_cpu(), torch.no_grad(), cached:
        y = torch.compile(module, backend="inductor_quant")(x)
    results.append({
        "error": float((y.double() - exact).norm() / exact.norm()),
        "hits": counters["inductor"]["fxgraph_cache_hit"],
    })
print(json.dumps(results))
"""


def test_a_warm_cache_does_not_serve_another_table(tmp_path, interpreter_forks):
    """Nor does the same process; another process finds what this one left."""
    results = []
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for chosen in (("first", "other"), ("first",)):
        [line] = interpreter_forks.run(Program(PROGRAM, chosen, environment=caches))
        results += json.loads(line)
    assert [result["hits"] for result in results] == [0, 0, 1]
    assert all(result["error"] < 2e-3 for result in results)
