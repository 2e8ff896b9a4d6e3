"""The pass inside the ways a program runs a model: training, autocast, hooks, export, branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_quant import simulate
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.options import Options
from inductor_quant.report.events import collect
from tests.support.gemms.w8a8 import assert_close
from tests.support.graphs.post_grad import (
    INT_MM,
    W8A8,
    EagerBackend,
    Float64Epilogue,
    capture,
    count,
)
from tests.support.spellings.int8 import bf16, f32, gemm, integers, mm, scale
from tests.support.spellings.quantizers import GptFastLinear, TenLines, TorchaoLinear

WEIGHT_ONLY = torch.ops.inductor_quant.weight_only.default
ASSERTION = torch.ops.aten._assert_tensor_metadata.default
M, N, K = 6, 24, 40


class Model(nn.Module):
    """Two blocks of two layers; ``gate`` and ``up`` share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = TorchaoLinear(K, N)
        self.up = TorchaoLinear(K, N)
        self.down = TorchaoLinear(N, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.gate(x)) * torch.tanh(self.up(x)))


def assert_all_rewritten(before: Any, after: Any, gemms: int) -> None:
    assert count(before, INT_MM) == gemms
    assert (count(after, INT_MM), count(after, W8A8)) == (0, gemms)
    after.graph.lint()


PATHS = [f"layers.{i}.{name}" for i in (0, 1) for name in ("gate", "up", "down")]


# ------------------------------------------------------------------------------------------
# several GEMMs


def test_gemms_that_share_inputs_or_follow_each_other_are_all_rewritten() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(M, K, dtype=bf16)
    result, [rewrite] = capture(
        model, [x], options=Options(on_error="raise", horizontal_fusion=False)
    )
    assert_all_rewritten(rewrite.before, rewrite.after, 6)
    # A value at a rounding boundary may take the other side in the next quantization.
    difference = (result - model(x)).float()
    assert difference.square().mean().sqrt() < 0.05 * model(x).float().square().mean().sqrt()


def test_gemms_in_sequence_are_exact() -> None:
    """Powers of two: no rounding, so the second sees exactly what it saw before."""

    def fn(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = (mm(a, w) * s).clamp(-128, 127).to(torch.int8)
        return mm(y, v).float() * s.mean() * y.float().sum(-1, keepdim=True)

    s = torch.full((N,), 0.5)
    args = [integers(M, K, limit=3), integers(K, N, limit=3), integers(N, N), s]
    result, [rewrite] = capture(fn, args)
    assert_all_rewritten(rewrite.before, rewrite.after, 2)
    assert torch.equal(result, fn(*args))


def test_a_weight_used_twice_is_rewritten_twice() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return mm(a, w) * s - mm(b, w) * (2 * s)

    args = [integers(M, K), integers(M, K), integers(K, N), scale(N)]
    result, [rewrite] = capture(fn, args)
    assert_all_rewritten(rewrite.before, rewrite.after, 2)
    [exact] = Float64Epilogue(rewrite.before).run(*rewrite.inputs)
    assert_close(result, exact, f32, slack=4)


def test_tied_layers_are_rewritten_at_each_use() -> None:
    layer = TorchaoLinear(K, K)
    tied = nn.Sequential(layer, nn.Tanh(), layer)
    _, [rewrite] = capture(tied, [torch.randn(M, K, dtype=bf16)])
    assert_all_rewritten(rewrite.before, rewrite.after, 2)


# ------------------------------------------------------------------------------------------
# modules


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["module", "method", "argument", "global"])
def test_reports_name_modules_by_their_path(how: str) -> None:
    model, x = Model(), torch.randn(M, K, dtype=bf16)
    if how == "module":
        _, [rewrite] = capture(model, [x])
    elif how == "method":
        _, [rewrite] = capture(model.forward, [x])
    elif how == "argument":
        _, [rewrite] = capture(lambda net, x: net(x), [model, x])
    else:
        scope = {"the_model": model}
        exec("def call(x): return the_model(x)", scope)
        _, [rewrite] = capture(scope["call"], [x])
    assert [match.module for match in rewrite.report.matches] == PATHS


def test_excluded_modules_keep_their_graph() -> None:
    options = Options(on_error="raise", exclude_modules=("layers.0.*", "*.down"))
    _, [rewrite] = capture(Model(), [torch.randn(M, K, dtype=bf16)], options=options)
    assert [match.module for match in rewrite.report.matches] == PATHS[3:5]
    assert set(rewrite.codes) == {"module_excluded"}
    assert count(rewrite.after, INT_MM) == 4


def test_hooks_run_and_do_not_prevent_a_match() -> None:
    layer, x = TorchaoLinear(K, N), torch.randn(M, K, dtype=bf16)
    plain = layer(x)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, output: output - 7)
    result, [rewrite] = capture(nn.Sequential(layer), [x])
    assert_all_rewritten(rewrite.before, rewrite.after, 1)
    assert_close(result, layer(x).double(), slack=2)
    assert not torch.allclose(result, plain)


def test_values_loaded_after_compilation_are_used() -> None:
    layer, other, x = TorchaoLinear(K, N), TorchaoLinear(K, N), torch.randn(M, K, dtype=bf16)
    backend = EagerBackend()
    compiled = torch.compile(layer, backend=backend)
    assert_close(compiled(x), layer(x).double(), slack=2)
    layer.load_state_dict(other.state_dict())
    assert_close(compiled(x), other(x).double(), slack=2)
    assert len(backend.rewrites) == 1


# ------------------------------------------------------------------------------------------
# modes


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("layer", [TorchaoLinear, GptFastLinear, TenLines])
def test_grad_modes_do_not_matter_for_inference(layer: type[nn.Module], mode: Any) -> None:
    model, x = layer(K, N), torch.randn(M, K, dtype=bf16)
    with mode():
        result, [rewrite] = capture(model, [x])
    assert_all_rewritten(rewrite.before, rewrite.after, 1)
    assert_close(result, model(x).double(), slack=2)


@pytest.mark.parametrize("dtype", [bf16, torch.float16])
def test_autocast_around_a_layer(dtype: torch.dtype) -> None:
    model, x = TorchaoLinear(K, N, dtype=dtype), torch.randn(M, K)
    project = nn.Linear(K, K)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(project(x))

    with torch.no_grad():
        result, [rewrite] = capture(fn, [x])
        assert_all_rewritten(rewrite.before, rewrite.after, 1)
        assert result.dtype == dtype
        assert_close(result, fn(x).double(), slack=4)


def test_an_exported_program_with_assertions_is_matched() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = TorchaoLinear(K, N)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.to(bf16)).to(f32)

    model, x = Casting().eval(), torch.randn(M, K)
    exported = torch.export.export(model, (x,), strict=False).module()
    result, [rewrite] = capture(exported, [x])
    assert count(rewrite.before, ASSERTION) > 0
    assert_all_rewritten(rewrite.before, rewrite.after, 1)
    [match] = rewrite.report.matches
    assert match.module == "layer"
    assert str(match.spec) == "(a=i8/token:f32, b=i8/channel:f32, out=bf16+bias)"
    assert_close(result, model(x).double(), bf16, slack=2)


def test_branches_of_a_condition_are_rewritten() -> None:
    layer, x = TorchaoLinear(K, N), torch.randn(M, K, dtype=bf16)

    def fn(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return torch.cond(which, lambda x: layer(x), lambda x: layer(x + 1) - 3, (x,))

    backend = EagerBackend()
    compiled = torch.compile(fn, backend=backend)
    for which in (torch.tensor(True), torch.tensor(False)):
        assert_close(compiled(x, which), fn(x, which).double(), slack=2)
    *branches, outer = backend.rewrites
    assert [len(branch.report.matches) for branch in branches] == [1, 1]
    assert not outer.report.matches


# ------------------------------------------------------------------------------------------
# training


def loss(
    a: torch.Tensor, w: torch.Tensor, sx: torch.Tensor, sw: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return (mm(a, w).float() * sx * sw + b).square().mean()


@pytest.mark.parametrize("trained", [(2, 3, 4), (2,), (3,), (4,), ()], ids=str)
def test_gradients_of_scales_and_bias_are_right(trained: tuple[int, ...]) -> None:
    """What the backward pass needs is saved, so the GEMM may have to stay as it is."""
    args = [*gemm(), scale(M, 1), scale(N), scale(N)]
    for position in trained:
        args[position].requires_grad_()
    backend = EagerBackend()
    got = torch.compile(loss, backend=backend)(*args)
    want = loss(*args)
    torch.testing.assert_close(got, want)
    wanted = [args[position] for position in trained]
    if wanted:
        pairs = zip(
            torch.autograd.grad(got, wanted), torch.autograd.grad(want, wanted), strict=True
        )
        for ours, eager in pairs:
            torch.testing.assert_close(ours, eager)
    [forward, *backward] = backend.rewrites
    assert len(forward.report.matches) + len(forward.codes) == 1
    assert forward.is_untouched or count(forward.after, W8A8) == 1
    assert all(rewrite.is_untouched and rewrite.is_backward for rewrite in backward)
    assert bool(forward.report.matches) or trained


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        sx = x.abs().amax(-1, keepdim=True) / 127
        ctx.save_for_backward(w, sw)
        return mm((x / sx).round().to(torch.int8), w) * sx * sw

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        w, sw = ctx.saved_tensors
        return (grad * sw) @ w.t().float(), None, None


def test_a_straight_through_gemm_is_matched_in_training() -> None:
    x = torch.randn(M, K, requires_grad=True)
    args = [x, integers(K, N), scale(N)]
    backend = EagerBackend()
    result = torch.compile(lambda *args: StraightThrough.apply(*args), backend=backend)(*args)
    [ours] = torch.autograd.grad(result.square().sum(), x)
    [eager] = torch.autograd.grad(StraightThrough.apply(*args).square().sum(), x)
    torch.testing.assert_close(ours, eager)
    forward, backward = backend.rewrites
    assert_all_rewritten(forward.before, forward.after, 1)
    assert backward.is_backward
    # the gradient is a product with the int8 weight as well
    [match] = backward.report.matches
    assert (match.family, match.n, match.k) == ("weight_only", K, N)
    assert count(backward.after, WEIGHT_ONLY) == 1


# ------------------------------------------------------------------------------------------
# recompilation


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("dynamic", "marked", "graphs"), [(None, True, 2), (True, False, 2), (None, False, 3)]
)
def test_few_graphs_serve_all_numbers_of_rows(
    dynamic: bool | None, marked: bool, graphs: int
) -> None:
    """One for M = 1 and one for the rest, and the first size seen if nobody said it varies."""
    counter = CompileCounterWithBackend(inductor_quant_backend)
    with (
        simulate.virtual_gpu(90),
        FakeTensorMode(),
        torch.no_grad(),
        torch._inductor.config.patch(force_disable_caches=True),
        torch.device("cuda"),
        collect() as report,
    ):
        model = GptFastLinear(64, 48)
        compiled = torch.compile(model, backend=counter, dynamic=dynamic)
        for m in (16, 2, 1, 7, 128, 1000, 4096):
            x = torch.randn(m, 64, dtype=bf16)
            if marked and m > 1:
                torch._dynamo.mark_dynamic(x, 0)
            assert compiled(x).shape == (m, 48)
    static = [kernel for kernel in report.kernels if not kernel.rows]
    assert counter.frame_count == len(report.matches) == len(static) + 1 <= graphs
    assert len(report.kernels) == len(static) + len(report.buckets)
    assert not report.rejections
