"""Requirements on matrices, scales and bias; none of them may be mutated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from inductor_quant.spec.decisions import RejectionCode
from tests.support.graphs.handmade import Call, results, rewritten
from tests.support.graphs.post_grad import INT_MM, capture
from tests.support.spellings.int8 import gemm, i32, integers, mm, scale, scaled

aten = torch.ops.aten
M, N, K = 6, 24, 40
Fn = Callable[..., Any]


def refusal(fn: Fn, args: list[torch.Tensor]) -> RejectionCode:
    """The code of the one rejection; the graph must not have changed."""
    _, [rewrite] = capture(fn, args)
    assert rewrite.is_untouched
    assert not rewrite.report.matches
    [rejection] = rewrite.report.rejections
    return rejection.code


def test_unsigned_activations_are_refused() -> None:
    a = integers(M, K, limit=9).abs().to(torch.uint8)
    assert refusal(scaled, [a, integers(K, N), scale(N)]) == RejectionCode.DTYPE


def test_activations_that_were_unsigned_once_are_matched() -> None:
    def fn(a: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return mm((a.to(i32) - 128).to(torch.int8), w) * s

    a = torch.randint(0, 256, (M, K), dtype=torch.uint8)
    result, [rewrite] = capture(fn, [a, integers(K, N), scale(N)])
    assert len(rewrite.report.matches) == 1
    assert torch.equal(result, rewrite.before(*rewrite.inputs)[0])


@pytest.mark.parametrize(("k", "fits"), [(131071, True), (131072, False)])
def test_a_sum_that_can_overflow_int32_is_refused(k: int, fits: bool) -> None:
    a = torch.full((2, k), -128, dtype=torch.int8)
    result, [rewrite] = capture(scaled, [a, a[:1].t(), torch.full((1,), 0.5)])
    assert bool(rewrite.report.matches) is fits
    assert rewrite.codes == ([] if fits else ["k_too_long"])
    assert rewrite.is_untouched is not fits
    assert torch.equal(result, rewrite.before(*rewrite.inputs)[0])
    assert not fits or result[0, 0] == 0.5 * 2**14 * k  # fits fp32


def test_a_dynamic_k_is_refused() -> None:
    args = [*gemm(), scale(N)]
    torch._dynamo.mark_dynamic(args[0], 1)
    torch._dynamo.mark_dynamic(args[1], 0)
    assert refusal(scaled, args) == RejectionCode.DYNAMIC_K


def test_a_scale_of_unknown_length_is_refused() -> None:
    """Tracing gives a product of sizes one symbol; a pass may leave two."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    unknown = mode.from_tensor(scale(M, 1), symbolic_context=context)

    def body(call: Call, *x: torch.fx.Node) -> torch.fx.Node:
        y = call(aten.mul.Tensor, call(INT_MM, x[0], x[1]), x[2])
        x[2].meta["val"] = unknown
        return y

    rewrite = rewritten(body, [*gemm(), scale(M, 1)])
    assert rewrite.codes == ["scale_dynamic_shape"]
    assert rewrite.is_untouched


# ------------------------------------------------------------------------------------------
# writes


def test_a_weight_that_the_program_writes_to_is_refused() -> None:
    def fn(a: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = mm(a, w) * s
        w.add_(1)
        return y

    assert refusal(fn, [*gemm(), scale(N)]) == RejectionCode.MUTATED_OPERAND


def test_a_weight_written_through_a_view_is_refused() -> None:
    def fn(a: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = mm(a, w.t()[:, 1:]) * s
        w[0].zero_()
        return y

    args = [integers(M, K), integers(N + 1, K), scale(N)]
    assert refusal(fn, args) == RejectionCode.MUTATED_OPERAND


WRITES: dict[str, tuple[int, Fn]] = {
    "the weight": (1, lambda call, x: call(aten.copy_.default, x, call(aten.mul.Tensor, x, 2))),
    "a view of the weight": (
        1,
        lambda call, x: call(aten.fill_.Scalar, call(aten.permute.default, x, [1, 0]), 1),
    ),
    "a strided view of the weight": (
        1,
        lambda call, x: call(aten.fill_.Scalar, call(aten.as_strided.default, x, [3], [1], 5), 1),
    ),
    "the weight as bytes": (
        1,
        lambda call, x: call(aten.fill_.Scalar, call(aten.view.dtype, x, torch.uint8), 1),
    ),
    "the activation": (0, lambda call, x: call(aten.fill_.Scalar, x, 3)),
    "the row scale": (2, lambda call, x: call(aten.mul_.Tensor, x, 3.0)),
    "a view of the row scale": (
        2,
        lambda call, x: call(aten.mul_.Tensor, call(aten.reshape.default, x, [-1]), 3.0),
    ),
    "the column scale": (3, lambda call, x: call(aten.mul_.Tensor, x, 3.0)),
    "the bias": (4, lambda call, x: call(aten.add_.Tensor, x, 3.0)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_read_moves_across_a_write(name: str, place: int) -> None:
    """The op reads all operands at the position of its last node."""
    position, write = WRITES[name]

    def body(call: Call, *x: torch.fx.Node) -> torch.fx.Node:
        y = call(aten.mul.Tensor, call(INT_MM, x[0], x[1]), x[2])
        for step, op in enumerate((aten.mul.Tensor, aten.add.Tensor)):
            if step == place:
                write(call, x[position])
            y = call(op, y, x[3 + step])
        if place == 2:
            write(call, x[position])
        return y

    rewrite = rewritten(body, [*gemm(), scale(M, 1), scale(N), scale(N)])
    assert rewrite.codes == ["mutated_operand"]
    assert rewrite.is_untouched
    before, after = results(rewrite)
    assert torch.equal(before, after)


def test_writes_to_other_tensors_do_not_matter() -> None:
    def body(call: Call, *x: torch.fx.Node) -> torch.fx.Node:
        y = call(aten.mul.Tensor, call(INT_MM, x[0], x[1]), x[2])
        call(aten.copy_.default, x[3], call(aten.neg.default, x[2]))  # reads a scale
        return call(aten.mul.Tensor, y, 2.0)

    rewrite = rewritten(body, [*gemm(), scale(M, 1), scale(M, 1)])
    assert len(rewrite.report.matches) == 1
    before, after = results(rewrite)
    assert torch.equal(before, after)


def test_arguments_by_name_are_read() -> None:
    def body(call: Call, *x: torch.fx.Node) -> torch.fx.Node:
        y = call(INT_MM, x[0], mat2=x[1])
        return call(aten.add.Tensor, call(aten.mul.Tensor, x[2], other=y), other=x[3])

    rewrite = rewritten(body, [*gemm(), scale(M, 1), scale(N)])
    assert len(rewrite.report.matches) == 1
    before, after = results(rewrite)
    assert torch.equal(before, after)
