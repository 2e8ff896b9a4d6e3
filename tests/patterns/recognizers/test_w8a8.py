"""Every spelling of a scaled int8 GEMM becomes one canonical op of the same value."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from inductor_quant.options import Options
from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import assert_close
from tests.support.graphs.post_grad import (
    CAST,
    INT_MM,
    W8A8,
    EagerBackend,
    Float64Epilogue,
    Rewrite,
    capture,
    count,
    printed,
)
from tests.support.producers.real import unchanged_inductor_config
from tests.support.sampling import sampled
from tests.support.spellings.int8 import SPELLINGS, Spelling, bf16, f32, integers, mm
from tests.support.spellings.quantizers import QUANTIZERS, GptFastLinear, Int8Linear, TorchaoLinear

aten = torch.ops.aten


def assert_one_op(rewrite: Rewrite) -> None:
    """One match and no other candidate; the nodes read are gone from the graph."""
    assert len(rewrite.report.matches) == 1
    assert not rewrite.report.rejections
    assert (count(rewrite.before, INT_MM), count(rewrite.before, W8A8)) == (1, 0)
    assert (count(rewrite.after, INT_MM), count(rewrite.after, W8A8)) == (0, 1)
    rewrite.after.graph.lint()


def assert_means_the_same(rewrite: Rewrite, result: torch.Tensor) -> None:
    """``result``: of the rewritten graph with ``rewrite.inputs``. Compared with fp64."""
    [before] = rewrite.before(*rewrite.inputs)
    assert (result.dtype, result.stride()) == (before.dtype, before.stride())
    [exact] = Float64Epilogue(rewrite.before).run(*rewrite.inputs)
    assert_close(result, exact)


@pytest.mark.parametrize("spelling", sampled(SPELLINGS, 2, str))
def test_a_spelling_becomes_one_op_of_the_same_value(spelling: Spelling) -> None:
    backend = EagerBackend()
    compiled = torch.compile(spelling.fn, backend=backend, dynamic=False)
    result = compiled(*spelling.inputs())
    [rewrite] = backend.rewrites
    assert_one_op(rewrite)
    [match] = rewrite.report.matches
    assert str(match.spec) == spelling.spec
    assert (match.m, match.n, match.k) == tuple(spelling.sizes[d] for d in "MNK")
    assert_means_the_same(rewrite, result)
    [before] = rewrite.before(*rewrite.inputs)
    assert torch.equal(result, before) or not spelling.exact
    # With powers of two nothing is ever rounded, in whatever order: every bit has to be there.
    result = compiled(*spelling.inputs(powers_of_two=True))
    assert len(backend.rewrites) == 1
    [before] = rewrite.before(*rewrite.inputs)
    assert torch.equal(result, before)


# What stays beside the op is seen above.
@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize("spelling", sampled(SPELLINGS, every=4), ids=str)
def test_a_spelling_is_one_kernel_on_a_gpu(spelling: Spelling) -> None:
    with collect() as report:
        generated = generate(spelling.fn, lambda device: tuple(spelling.inputs(device)))
    assert [str(match.spec) for match in report.matches] == [spelling.spec]
    assert not report.rejections
    # Nothing runs behind the GEMM; a cast of the scales may run before.
    assert [("w8a8" in name) for name in generated.kernels][-1:] == [True]
    assert sum("w8a8" in name for name in generated.kernels) == 1
    assert "extern_kernels" not in generated.wrapper.split("def call", 1)[1]


def test_the_graph_of_torchao_before_and_after() -> None:
    def fn(q: Any, weight: Any, token: Any, channel: Any, bias: Any) -> torch.Tensor:
        acc = mm(q.reshape(-1, 40), weight.t())
        y = (acc * token.reshape(-1, 1).expand(6, 24)).to(bf16) * channel.reshape(-1)
        return (y.reshape(2, 3, 24) + bias).to(bf16)

    channel, bias = torch.rand(24, 1), torch.rand(24).to(bf16)
    a = integers(6, 40).reshape(2, 3, 40)
    _, [rewrite] = capture(fn, [a, integers(24, 40), torch.rand(2, 3, 1), channel, bias])
    assert_expected_inline(
        printed(rewrite.before),
        """\
x0: i8[2, 3, 40]
x1: i8[24, 40]
x2: f32[2, 3, 1]
x3: f32[24, 1]
x4: bf16[24]
v0: i8[6, 40] = reshape(x0, [-1, 40])
v1: i8[40, 24] = permute(x1, [1, 0])
v2: i32[6, 24] = _int_mm(v0, v1)
v3: f32[6, 1] = reshape(x2, [-1, 1])
v4: f32[6, 24] = expand(v3, [6, 24])
v5: f32[6, 24] = mul(v2, v4)
v6: bf16[6, 24] = prims.convert_element_type(v5, bf16)
v7: f32[24] = reshape(x3, [-1])
v8: f32[6, 24] = mul(v6, v7)
v9: f32[2, 3, 24] = reshape(v8, [2, 3, 24])
v10: f32[2, 3, 24] = add(v9, x4)
v11: bf16[2, 3, 24] = prims.convert_element_type(v10, bf16)
return [v11]""",
    )
    assert_expected_inline(
        printed(rewrite.after),
        """\
x0: i8[2, 3, 40]
x1: i8[24, 40]
x2: f32[2, 3, 1]
x3: f32[24, 1]
x4: bf16[24]
v0: i8[6, 40] = reshape(x0, [-1, 40])
v1: i8[40, 24] = permute(x1, [1, 0])
v2: f32[6, 1] = reshape(x2, [-1, 1])
v3: f32[24] = reshape(x3, [-1])
v4: f32[1, 24] = reshape(v3, [1, -1])
v5: bf16[6, 24] = inductor_quant.w8a8(v0, v1, v2, v4, x4, alpha=1.0, out_dtype=bf16)
v6: bf16[2, 3, 24] = reshape(v5, [2, 3, 24])
return [v6]""",
    )


# ------------------------------------------------------------------------------------------
# whole layers, with dynamic quantization of the activation


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(7,), (1,), (2, 9)], ids=str)
@pytest.mark.parametrize("layer", QUANTIZERS)
def test_a_quantized_layer_is_matched(
    layer: type[Int8Linear], lead: tuple[int, ...], bias: bool
) -> None:
    if layer is GptFastLinear and len(lead) > 1:
        lead = (18,)
    x = torch.randn(*lead, 40, dtype=bf16)
    apart = Options(on_error="raise", fuse_quantization=False)
    result, [rewrite] = capture(layer(40, 24, bias=bias), [x], options=apart)
    assert_one_op(rewrite)
    rows = x.numel() // 40
    a_scale = "/token:f32" if rows > 1 else "/tensor:f32"
    out = "bf16+bias" if bias else "bf16"
    [match] = rewrite.report.matches
    assert str(match.spec) == f"(a=i8{a_scale}, b=i8/channel:f32, out={out})"
    assert match.m == rows
    assert_means_the_same(rewrite, result)
    # The op's result is not computed again after it.
    nodes = [node.target for node in rewrite.after.graph.nodes]
    assert not {CAST, aten.mul.Tensor, aten.add.Tensor} & set(nodes[nodes.index(W8A8) :])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [bf16, torch.float16, f32], ids=str)
@pytest.mark.parametrize("layer", QUANTIZERS)
def test_a_layer_of_another_dtype_is_matched(layer: type[Int8Linear], dtype: torch.dtype) -> None:
    x = torch.randn(7, 40, dtype=dtype)
    result, [rewrite] = capture(layer(40, 24, dtype=dtype), [x])
    assert_one_op(rewrite)
    assert rewrite.report.matches[0].spec.out_dtype == dtype
    assert_means_the_same(rewrite, result)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(32, 256), (1, 256), (2, 16, 256), None], ids=str)
def test_torchao_itself_is_matched(shape: tuple[int, ...] | None) -> None:
    """None: on a CPU with VNNI and without AMX torchao multiplies u8 by s8, which is left alone."""
    from torchao import quantization

    linear = nn.Sequential(nn.Linear(256, 512, bias=True)).to(bf16)
    with unchanged_inductor_config():
        quantization.quantize_(linear, quantization.Int8DynamicActivationInt8WeightConfig())
    x = torch.randn(shape or (32, 256), dtype=bf16)
    with (
        mock.patch("torchao.kernel.intmm._cpu_is_amx_tile_supported", return_value=False),
        mock.patch("torchao.kernel.intmm._cpu_is_vnni_supported", return_value=shape is None),
    ):
        apart = Options(on_error="raise", fuse_quantization=False)
        result, [rewrite] = capture(linear, [x], options=apart)
    if shape is None:
        assert rewrite.codes == ["dtype"]
        assert rewrite.is_untouched
        return
    assert_one_op(rewrite)
    a_scale = "tensor" if x.numel() == 256 else "token"
    [match] = rewrite.report.matches
    assert str(match.spec) == f"(a=i8/{a_scale}:f32, b=i8/channel:f32, out=bf16+bias)"
    assert_means_the_same(rewrite, result)


# ------------------------------------------------------------------------------------------
# dynamic M


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", ["mark_dynamic", "dynamic=True"])
@pytest.mark.parametrize("lead", [(9,), (2, 9)], ids=str)
@pytest.mark.parametrize("layer", [TorchaoLinear, GptFastLinear])
def test_a_dynamic_number_of_rows_is_matched(
    layer: type[Int8Linear], lead: tuple[int, ...], how: str
) -> None:
    if layer is GptFastLinear:
        lead = (18,)
    backend = EagerBackend()
    compiled = torch.compile(layer(40, 24), backend=backend, dynamic=how == "dynamic=True" or None)
    x = torch.randn(*lead, 40, dtype=bf16)
    for dim in range(len(lead) if how == "mark_dynamic" else 0):
        torch._dynamo.mark_dynamic(x, dim)
    for rows in (lead[-1], 33, 2, 257):
        if rows != lead[-1]:
            x = torch.randn(*lead[:-1], rows, 40, dtype=bf16)
        result = compiled(x)
        [rewrite] = backend.rewrites  # one graph for all sizes
        assert_one_op(rewrite)
        assert isinstance(rewrite.report.matches[0].m, str)
        assert_means_the_same(rewrite, result)


def test_a_number_of_rows_known_only_at_run_time_is_matched() -> None:
    layer = TorchaoLinear(40, 24)

    def chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return layer(x[mask])

    x, mask = torch.randn(19, 40, dtype=bf16), torch.arange(19) % 3 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        result, [rewrite] = capture(chosen, [x, mask])
    assert_one_op(rewrite)
    assert_means_the_same(rewrite, result)


def test_a_dynamic_number_of_columns_is_matched() -> None:
    def fn(a: Any, w: Any, sx: Any, sw: Any) -> torch.Tensor:
        return mm(a, w) * sx * sw

    backend = EagerBackend()
    compiled = torch.compile(fn, backend=backend)
    for n in (24, 56):
        w = torch.randint(-9, 9, (40, n), dtype=torch.int8)
        torch._dynamo.mark_dynamic(w, 1)
        a = torch.randint(-9, 9, (7, 40), dtype=torch.int8)
        sw = torch.rand(n)
        torch._dynamo.mark_dynamic(sw, 0)
        result = compiled(a, w, torch.rand(7, 1), sw)
        [rewrite] = backend.rewrites
        assert_one_op(rewrite)
        assert_means_the_same(rewrite, result)
