"""Layers of FP8 by torchao, and after DeepSeek-V3; torchao's ops and Triton kernels of FP8 blocks;
transformers' layer of FP8 blocks.

The kernels are DeepSeek-V3's act_quant, fp8_gemm and weight_dequant, with few changes.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import fx, nn
from torch.library import triton_op, wrap_triton

from inductor_quant.ops.fusion import quantized_linear
from inductor_quant.patterns.recognizers import fp8_custom_ops
from inductor_quant.report.events import Report, collect
from tests.support.gemms.fp8 import Case, e4m3, make_inputs, reference
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import assert_close
from tests.support.graphs.handmade import rewritten
from tests.support.graphs.post_grad import EagerBackend
from tests.support.producers.fp8 import BLOCKS, LAYERS, K, N, torchao
from tests.support.producers.registry import need_package
from tests.support.sampling import sampled

need_package("torchao")

M = 48
CASE = Case(M, N, K, block=(128, 128), bias=False)
bf16 = torch.bfloat16
Tensor = torch.Tensor


def training() -> Any:
    return importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")


def compiled(fn: Any, make: Any) -> tuple[Any, Report]:
    with collect() as report, torch.no_grad():
        generated = generate(fn, make)
    return generated, report


def operands(device: str) -> tuple[Tensor, ...]:
    a, w, a_scale, w_scale, _ = make_inputs(CASE, device)
    return a, a_scale, w, w_scale


def activation_and_weight(device: str) -> tuple[Tensor, ...]:
    return torch.empty(M, K, device=device, dtype=bf16), *operands(device)[2:]


# ------------------------------------------------------------------------------------------
# layers


class _Exact(fx.Interpreter):
    """Runs a rewritten graph, its FP8 product in fp64."""

    def run_node(self, node: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.target == quantized_linear.op:
            x, b, a_scale, b_scale, bias = args
            a, scale = quantized_linear.quantized(x, a_scale, kwargs["scale_ops"], 0, 0, e4m3)
            out = (a.double() * scale.double()) @ (b.double() * b_scale.double())
            return out if bias is None else out + bias.double()
        if str(node.target).startswith("inductor_quant.fp8"):
            a, b, a_scale, b_scale, bias = args
            k, (_, n) = a.shape[1], b.shape
            a_scale, b_scale = a_scale.double(), b_scale.double()
            if "block_k" in kwargs:
                a_scale = a_scale.repeat_interleave(kwargs["block_k"], 1)[:, :k]
                b_scale = b_scale.repeat_interleave(kwargs["block_k"], 0)[:k]
                b_scale = b_scale.repeat_interleave(kwargs["block_n"], 1)[:, :n]
            out = (a.double() * a_scale) @ (b.double() * b_scale)
            return out if bias is None else out + bias.double()
        if node.target == torch.ops.prims.convert_element_type.default:
            value = args[0]
            if value.dtype == torch.float64:  # what follows the product stays in fp64
                return value
        return super().run_node(node)


# Leading sizes of the activation, and which of them are dynamic.
SHAPES = [((32,), ()), ((1,), ()), ((2, 16), (0, 1))]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("lead", "dynamic"), SHAPES, ids=str)
@pytest.mark.parametrize("name", sampled(LAYERS))
def test_a_layer_is_matched_and_no_farther_from_fp64_than_eager(
    name: str, lead: tuple[int, ...], dynamic: tuple[int, ...]
) -> None:
    make, spec = LAYERS[name]
    torch.manual_seed(0)
    backend = EagerBackend()
    with torch.no_grad():
        x = torch.randn(*lead, K).to(bf16)
        for dim in dynamic:
            torch._dynamo.mark_dynamic(x, dim)
        got = torch.compile(make(), backend=backend)(x)
    [rewrite] = backend.rewrites
    # compressed-tensors takes one scale for all of a matrix
    is_one = lead == (1,) or (name == "compressed token" and len(lead) == 1)
    spec = spec.replace("/token", "/tensor") if is_one else spec
    assert [str(match.spec) for match in rewrite.report.matches] == [spec]
    assert rewrite.codes == []
    [exact] = _Exact(rewrite.after).run(*rewrite.inputs)
    assert exact.dtype == torch.float64
    if name == "torchao blocks":  # its op runs on a GPU alone
        assert_close(got, exact, slack=2)
        return
    [eager] = rewrite.before(*rewrite.inputs)
    ours, theirs = ((y.double() - exact).square().mean().sqrt() for y in (got, eager))
    assert ours <= (1.1 if lead == (1,) else 1.02) * theirs


# ------------------------------------------------------------------------------------------
# ops of torchao's


@pytest.mark.compiles
def test_its_call_of_cublaslt_is_matched_as_that_is() -> None:
    ops = training()

    def fn(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        return ops.blockwise_scaled_mm(a, w.t(), a_scale, 4, w_scale.t(), 5, bf16)

    _, report = compiled(fn, operands)
    assert [str(match.spec) for match in report.matches] == [BLOCKS]
    large = Case(512, 2112, K, block=(128, 128), bias=False)

    def many(device: str) -> tuple[Tensor, ...]:
        a, w, a_scale, w_scale, _ = make_inputs(large, device)
        return a, a_scale, w, w_scale

    _, report = compiled(fn, many)
    assert [rejection.code.value for rejection in report.rejections] == ["many_rows"]


@pytest.mark.interp
def test_its_product_is_what_we_take_it_for() -> None:
    """Its own kernel, against the canonical op's formula; sizes that blocks do not divide."""
    case = Case(5, 200, 320, block=(128, 128), bias=False)
    torch.manual_seed(0)
    a, w, a_scale, w_scale, _ = inputs = make_inputs(case, "cpu")
    impls = torchao()._get_triton_impls()
    body = impls.gemm._init_fn
    kernel = dict(zip(body.__code__.co_freevars, body.__closure__, strict=True))
    tuner = kernel["blockwise_fp8_gemm_kernel"].cell_contents
    with mock.patch.object(tuner, "configs", tuner.configs[:1]):  # nothing to time
        got = body(a, a_scale.contiguous(), w, w_scale)
    assert_close(got, reference(case, inputs), slack=2)


def test_a_scale_of_another_size_is_refused() -> None:
    product = torchao()._get_triton_impls().gemm._opoverload
    a, a_scale, w, w_scale = operands("cpu")
    for given in ([a, a_scale[:, :3], w, w_scale], [a, a_scale, w, w_scale[:1]]):
        rewrite = rewritten(lambda call, *args: call(product, *args), given)
        assert rewrite.codes == ["scale_axis"]
        assert rewrite.is_untouched


def test_another_version_of_an_op_is_left() -> None:
    product = torchao()._get_triton_impls().gemm._opoverload
    with mock.patch.dict(fp8_custom_ops._READERS, clear=True):
        rewrite = rewritten(lambda call, *args: call(product, *args), list(operands("cpu")))
    assert rewrite.codes == ["opaque"]
    assert rewrite.is_untouched


# ------------------------------------------------------------------------------------------
# its kernels


@pytest.mark.compiles
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_kernel_that_quantizes_is_no_product(dynamic: bool) -> None:
    ops = torchao()

    def fn(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        q, scale = ops.fp8_blockwise_act_quant(x, 128, e4m3)
        return ops.blockwise_fp8_gemm(q, scale, w, w_scale)

    def make(device: str) -> tuple[Tensor, ...]:
        x, *weight = activation_and_weight(device)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        return x, *weight

    generated, report = compiled(fn, make)
    assert [str(match.spec) for match in report.matches] == [BLOCKS]
    assert report.rejections == []
    assert len(generated.kernels) == 2


@pytest.mark.compiles
def test_a_kernel_that_multiplies_is_opaque() -> None:
    ops = training()

    def fn(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        q, scale = ops.triton_fp8_blockwise_act_quant_lhs(x, 128)
        return ops.triton_fp8_gemm_1x128_128x128(q, w.t(), scale, w_scale.t(), 128, bf16)

    _, report = compiled(fn, activation_and_weight)
    assert report.matches == []
    [rejection] = report.rejections
    assert rejection.code.value == "opaque"
    assert rejection.detail == "the Triton kernel triton_fp8_gemm_1x128_128x128_kernel"
    assert rejection.site is not None
    assert (rejection.site.m, rejection.site.n, rejection.site.k) == (M, N, K)


@triton.jit
def w8a8_block_dynamic_fp8_matmul_kernel(A, B, C, Bs, M, N, K, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stands for the kernel of this name that transformers 4 loads from its hub."""
    tl.store(C + tl.program_id(0), tl.load(A) * tl.load(Bs))


@triton_op("test_finegrained_fp8::w8a8_block_dynamic_fp8_matmul", mutates_args=())
def _hub_op(
    A: Tensor, B: Tensor, Bs: Tensor, block_size: list[int], output_dtype: torch.dtype
) -> Tensor:
    C = A.new_empty(*A.shape[:-1], len(B), dtype=output_dtype)
    m, (n, k) = A.numel() // A.shape[-1], B.shape
    wrap_triton(w8a8_block_dynamic_fp8_matmul_kernel)[(m,)](A, B, C, Bs, m, n, k, block=128)
    return C


@pytest.mark.compiles
def test_the_kernel_of_the_hub_behind_a_layer_of_transformers_is_opaque() -> None:
    """It quantizes the activation itself; without a hub the package raises ImportError. Inductor
    decomposes the Triton op, so the graph does not show it."""
    pytest.importorskip("transformers")
    from transformers.integrations import finegrained_fp8 as fine

    def matmul(x: Tensor, w: Tensor, scale: Tensor, block: Any, dtype: Any, **_: Any) -> Tensor:
        return torch.ops.test_finegrained_fp8.w8a8_block_dynamic_fp8_matmul(
            x, w, scale, block, dtype
        )

    def make(device: str) -> tuple[Any, ...]:
        with torch.device(device):
            layer = fine.FP8Linear(K, N, block_size=(128, 128)).requires_grad_(False)
            return layer, torch.empty(2, M // 2, K, dtype=bf16)

    bundle = fine.FineGrainedFP8(matmul, matmul, matmul)
    with mock.patch.object(fine, "_FINEGRAINED_FP8", bundle):
        _, report = compiled(lambda layer, x: layer(x), make)
    assert report.matches == []
    [rejection] = report.rejections
    assert rejection.code.value == "opaque"
    assert rejection.detail == "the Triton kernel w8a8_block_dynamic_fp8_matmul_kernel"
    assert rejection.site is not None
    assert (rejection.site.batch, rejection.site.m, rejection.site.n, rejection.site.k) == (
        2, M // 2, N, K,
    )  # fmt: skip


@pytest.mark.compiles
def test_a_weight_that_a_kernel_dequantizes_is_not_read() -> None:
    ops = torchao()

    def fn(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        dense = ops.fp8_blockwise_weight_dequant(w, w_scale, 128)
        return nn.functional.linear(x, dense.to(bf16))

    _, report = compiled(fn, activation_and_weight)
    assert report.matches == []
    [rejection] = report.rejections
    assert rejection.code.value == "weight_form"
    assert rejection.site is not None
    assert rejection.site.source == "e4m3"
