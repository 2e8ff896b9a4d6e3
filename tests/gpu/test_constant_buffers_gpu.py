"""GPTQ with constant buffers on a GPU: right, guarded, and under CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch

from inductor_quant.report.events import collect
from inductor_quant.tables.table_check import TableCheck
from tests.support.producers.registry import PRODUCERS

pytestmark = pytest.mark.gpu

OPTIONS = {"inductor_quant.on_error": "raise"}
NAMES = ("gptq_gm_4b_g64_base", "gptq_gm_8b_g64_base", "gptq_4b_act_order", "gptq_4b_autogptq")
K, N = 1024, 512


def make(name):
    module = PRODUCERS[name].make(torch.float16, K, N)
    dense = module.dense().cuda()
    return module.cuda(), dense


def error(module, dense, f, x):
    exact = x.double() @ dense.t() + module.bias.double()
    with torch.no_grad():
        return float((f(x).double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_gptq_is_right(name, rows):
    module, dense = make(name)
    x = torch.randn(rows, K, device="cuda").half()
    with collect() as report:
        f = torch.compile(module, backend="inductor_quant", options=OPTIONS)
        ours = error(module, dense, f, x)
    [match] = report.matches
    assert ("gathered" in str(match.spec)) == (name == "gptq_4b_act_order")
    assert ours <= 1.05 * error(module, dense, module, x)


def in_place(table):
    table.copy_(table.flip(0))


def uncounted(table):
    table.data.copy_(table.flip(0))


@pytest.mark.parametrize("change", [in_place, uncounted], ids=lambda change: change.__name__)
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_change_is_seen(mode, change):
    module, dense = make(NAMES[0])
    x = torch.randn(16, K, device="cuda").half()
    f = torch.compile(module, backend="inductor_quant", mode=mode)
    for _ in range(3):
        assert error(module, dense, f, x) < 1e-3
    original = copy.deepcopy(module)
    with torch.no_grad():
        change(module.g_idx)
        after = copy.deepcopy(module).cpu().dense().cuda()
        for _ in range(3):
            assert error(module, dense, f, x) > 0.1
            assert error(module, after, f, x) < 1e-3
        module.load_state_dict(original.state_dict())
    for _ in range(3):
        assert error(module, dense, f, x) < 1e-3


def test_a_captured_graph_replays_the_comparison():
    module, dense = make(NAMES[0])
    x = torch.randn(16, K, device="cuda").half()
    f = torch.compile(module, backend="inductor_quant", options=OPTIONS)
    with torch.no_grad():
        for _ in range(2):
            f(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = f(x)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert error(module, dense, lambda _: y, x) < 1e-3


def test_the_comparison_sees_what_is_enqueued_before_it():
    table = torch.arange(5000, device="cuda", dtype=torch.int32)
    check = TableCheck([table], [table.clone()])
    torch.cuda._sleep(1_000_000)
    assert check.start()()
    torch.cuda._sleep(1_000_000)
    table[4999] = 0
    wait = check.start()
    table[4999] = 4999
    assert not wait()


def test_layers_share_what_was_compiled():
    modules = [make(NAMES[0]) for _ in range(4)]
    modules[2][0].g_idx.copy_(modules[2][0].g_idx.flip(0))
    modules[2] = (modules[2][0], copy.deepcopy(modules[2][0]).cpu().dense().cuda())
    x = torch.randn(16, K, device="cuda").half()

    def apply(module, x):
        return module(x)

    f = torch.compile(apply, backend="inductor_quant", options=OPTIONS)
    for module, dense in modules * 2:
        assert error(module, dense, lambda x, module=module: f(module, x), x) < 1e-3
