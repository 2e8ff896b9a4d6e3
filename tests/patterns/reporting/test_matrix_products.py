"""Products that nobody matched: their sizes, and whether quantized data feeds them."""

from __future__ import annotations

import torch
import torch._higher_order_ops.triton_kernel_wrap  # defines the op

from inductor_quant.patterns.reporting import matrix_products
from inductor_quant.spec.decisions import RejectionCode
from tests.support.graphs.post_grad import capture

aten = torch.ops.aten
M, K, N = 4, 32, 16


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int8)


def small(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def test_a_grouped_product_and_a_product_of_bytes_by_another_package_have_rows() -> None:
    graph = torch.fx.Graph()
    values = {"x": small(M, K), "w": small(2, K, N), "a": ints(M, K), "b": ints(N, K)}
    nodes = {name: graph.placeholder(name) for name in values}
    for name, value in values.items():
        nodes[name].meta["val"] = value
    grouped = graph.call_function(aten._grouped_mm.default, (nodes["x"], nodes["w"]))
    grouped.meta["val"] = small(M, N)
    site = matrix_products.describe(grouped)
    assert site is not None
    assert (site.m, site.n, site.k) == (M, N, K)
    assert matrix_products.decline(grouped, site).code == RejectionCode.NOT_QUANTIZED
    with torch.library._scoped_library("rows_of_bytes", "DEF") as library:
        library.define("int8_matmul(Tensor a, Tensor b) -> Tensor")
        op = torch.ops.rows_of_bytes.int8_matmul.default
        product = graph.call_function(op, (nodes["a"], nodes["b"]))
        assert matrix_products.is_matrix_product(product)
        assert matrix_products.decline(product, None).code == RejectionCode.OPAQUE


def test_a_weight_as_the_first_operand_is_said_to_be_one() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (w * 0.5) @ x.t()

    _, [rewrite] = capture(fn, (small(M, K), ints(N, K)))
    [rejection] = rewrite.report.rejections
    assert rejection.code is RejectionCode.NO_PATTERN
    assert "only the first operand is from i8 data" in rejection.detail


def test_a_dense_layer_behind_a_quantized_embedding_is_not_quantized() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", ints(8, K))
            self.linear = torch.nn.Linear(K, N)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.linear(self.table[ids] * 0.5)

    _, [rewrite] = capture(Model(), (torch.randint(0, 8, (M,)),))
    assert rewrite.report.rejections == []
    [decision] = rewrite.report.decisions
    assert decision.code is RejectionCode.NOT_QUANTIZED


def test_a_weight_that_a_kernel_has_repacked_is_opaque() -> None:
    graph = torch.fx.Graph()
    x, w, scales = (graph.placeholder(name) for name in ("x", "w", "scales"))
    product = graph.call_function(aten._weight_int4pack_mm.default, (x, w, 128, scales))
    assert matrix_products.is_matrix_product(product)
    assert matrix_products.decline(product, None).code == RejectionCode.OPAQUE


def test_a_kernel_of_the_users_that_takes_a_quantized_weight_is_opaque() -> None:
    graph = torch.fx.Graph()
    values = {"x": small(M, K), "w": ints(N, K), "out": small(M, N)}
    nodes = {name: graph.placeholder(name) for name in values}
    for name, value in values.items():
        nodes[name].meta["val"] = value
    target = torch.ops.higher_order.triton_kernel_wrapper_functional
    options = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [], "tma_descriptor_metadata": {}}
    call = graph.call_function(target, (), {**options, "kwargs": nodes})
    site = matrix_products.describe(call)
    assert site is not None
    assert (site.m, site.k, site.source) == (M, K, "i8")
    assert matrix_products.decline(call, site).code == RejectionCode.OPAQUE
    for clones, seen in ((["x", "out"], False), ([*nodes], True)):  # all: it is not known which
        other = {**options, "kwargs": nodes, "tensors_to_clone": clones}
        assert matrix_products.is_matrix_product(graph.call_function(target, (), other)) == seen
    plain = graph.call_function(target, (), {**options, "kwargs": {"x": nodes["x"]}})
    assert not matrix_products.is_matrix_product(plain)
