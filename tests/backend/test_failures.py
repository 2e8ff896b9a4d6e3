"""A failure inside the plugin: the graph stays as it was, one warning, one line in the report."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from inductor_quant import collect, fallback, patterns
from inductor_quant.errors import InductorQuantError
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.options import Options
from inductor_quant.patterns import graph_pass, rewrite
from inductor_quant.patterns.graph_pass import for_options
from inductor_quant.simulate import generate
from inductor_quant.spec.decisions import RejectionCode

pytestmark = pytest.mark.compiles

RAISE = {"inductor_quant.on_error": "raise"}


class Broken(Exception):
    pass


def scaled(a, b, a_scale):
    return torch._int_mm(a, b) * a_scale


def make_inputs(device):
    return (
        torch.zeros(32, 64, dtype=torch.int8, device=device),
        torch.zeros(64, 48, dtype=torch.int8, device=device),
        torch.ones(32, 1, device=device),
    )


def compile_for_gpu(**arguments):
    return generate(scaled, make_inputs, **arguments)


@pytest.fixture(params=["read", "recognize", "evaluate", "check"])
def broken(request, monkeypatch):
    """The plugin with an exception at one of its stages, from reading the graph to writing it."""

    def fail(*args, **kwargs):
        raise Broken(request.param)

    fallback.warn_once.cache_clear()
    if request.param == "recognize":
        found = patterns.patterns()
        replaced = [dataclasses.replace(pattern, recognize=fail) for pattern in found]
        monkeypatch.setattr(patterns, "_patterns", replaced)
    elif request.param == "evaluate":
        monkeypatch.setattr(rewrite, "_evaluate", fail)
    elif request.param == "check":
        monkeypatch.setattr(rewrite, "_check_same_value", fail)
    else:
        monkeypatch.setattr(rewrite.fx_utils, "value", fail)
    yield request.param
    fallback.warn_once.cache_clear()


def without_comments(wrapper):
    """A generated module without its comments, which number the graphs and name cache folders."""
    return [line for line in wrapper.splitlines() if not line.lstrip().startswith("#")]


def caught_while(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(w.message) for w in caught if "inductor_quant" in str(w.message)]


def test_the_generated_code_is_that_of_plain_inductor(broken):
    plain = compile_for_gpu()
    fallback.warn_once.cache_clear()
    failed = compile_for_gpu(backend="inductor_quant")
    assert list(failed.kernels) == list(plain.kernels)
    assert without_comments(failed.wrapper) == without_comments(plain.wrapper)


def test_it_warns_once_however_often_it_fails(broken):
    def twice():
        compile_for_gpu(backend="inductor_quant")
        compile_for_gpu(backend="inductor_quant")

    _, messages = caught_while(twice)
    [message] = messages
    assert broken in message
    assert "left it as it was" in message


def test_the_report_has_it_as_an_internal_error_with_the_cause(broken):
    with collect() as report:
        compile_for_gpu(backend="inductor_quant")
    assert report.matches == []
    [rejection] = report.rejections
    assert rejection.code == RejectionCode.INTERNAL_ERROR
    assert broken in rejection.detail
    assert rejection.node == "_int_mm"


def test_it_is_raised_where_the_user_wants_that(broken):
    with pytest.raises(BackendCompilerFailed) as caught:
        compile_for_gpu(backend="inductor_quant", options=RAISE)
    error = caught.value
    while error is not None and not isinstance(error, InductorQuantError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert isinstance(error, InductorQuantError)
    assert "_int_mm" in str(error)
    assert isinstance(error.__cause__, Broken)


# ------------------------------------------------------------------------------------------
# the graph itself


def graph_of_a_scaled_gemm():
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch._subclasses.FakeTensorMode():
        return make_fx(scaled)(*make_inputs("cpu"))


def described(gm):
    return [(n.name, n.target, str(n.args), dict(n.meta)) for n in gm.graph.nodes]


def test_a_rewrite_that_fails_leaves_every_node_and_its_metadata(monkeypatch):
    def fail(*args):
        raise Broken

    gm = graph_of_a_scaled_gemm()
    before = described(gm)
    monkeypatch.setattr(graph_pass.compat, "runs_triton", lambda device: True)
    monkeypatch.setattr(rewrite, "_check_same_value", fail)
    fallback.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="Broken"):
        for_options(Options())(gm.graph)
    gm.graph.lint()
    assert described(gm) == before


def test_the_same_rewrite_without_the_failure_changes_the_graph(monkeypatch):
    """That is: the test above would see it."""
    gm = graph_of_a_scaled_gemm()
    monkeypatch.setattr(graph_pass.compat, "runs_triton", lambda device: True)
    for_options(Options())(gm.graph)
    assert any("w8a8" in str(node.target) for node in gm.graph.nodes)


def test_one_gemm_that_fails_does_not_keep_the_others_from_being_rewritten(monkeypatch):
    def two(a, b, a_scale):
        return torch._int_mm(a, b) * a_scale, torch._int_mm(b.t(), a.t()) * 2.0

    def fail_once(found, verify_args=None):
        calls.append(found)
        if len(calls) == 1:
            raise Broken
        return rewrite.rewrite(found, verify_args)

    calls: list[object] = []
    monkeypatch.setattr(graph_pass, "rewrite", fail_once)
    with collect() as report:
        generate(two, make_inputs, backend="inductor_quant")
    assert [item.code for item in report.rejections] == [RejectionCode.INTERNAL_ERROR]
    assert len(report.matches) == 1


# ------------------------------------------------------------------------------------------
# while lowering, when the graph has been rewritten already


def test_a_lowering_that_fails_warns_once_however_often_it_fails(monkeypatch):
    def fail(*args):
        raise Broken("table")

    monkeypatch.setattr(cost_model, "load", fail)
    fallback.warn_once.cache_clear()
    found = [caught_while(lambda: compile_for_gpu(backend="inductor_quant")) for _ in range(2)]
    fallback.warn_once.cache_clear()
    for generated, _ in found:
        assert "extern_kernels._int_mm" in generated.wrapper
    [[message], none] = [messages for _, messages in found]
    assert "Broken('table')" in message
    assert none == []


# ------------------------------------------------------------------------------------------
# the key in Inductor's caches, which is asked for outside its compilation too


def test_a_graph_without_a_key_is_compiled_and_not_cached(monkeypatch):
    def fail():
        raise Broken("unreadable file")

    monkeypatch.setattr(graph_pass, "source_hash", fail)
    key, [message] = caught_while(lambda: for_options(Options()).uuid())
    assert key is None
    assert "unreadable file" in message
    with pytest.raises(InductorQuantError, match="unreadable file"):
        for_options(Options(on_error="raise")).uuid()
