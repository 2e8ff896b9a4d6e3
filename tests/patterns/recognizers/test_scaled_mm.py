"""FP8 GEMMs are recognized in every spelling, and nothing else is."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant.report.events import collect
from tests.support.gemms.fp8 import Case, e4m3, make_inputs
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import assert_close
from tests.support.graphs.handmade import rewritten
from tests.support.graphs.post_grad import EagerBackend, capture
from tests.support.sampling import sampled
from tests.support.spellings import group_reduce
from tests.support.spellings.fp8 import (
    BLOCKS,
    DEQUANTIZED,
    HAS_V2,
    LAID_OUT,
    SCALED_MM,
    STATIC,
    VERSION_2,
    VERSION_2_BLOCKS,
    Spelling,
    layer,
)

aten = torch.ops.aten
SPELLINGS = [*SCALED_MM, *BLOCKS, *(VERSION_2 if HAS_V2 else ()), *DEQUANTIZED]
# ... and those that lay out their scales first, in kernels of their own
ALL_SPELLINGS = [*SPELLINGS, *LAID_OUT, *(VERSION_2_BLOCKS if HAS_V2 else ())]
bf16 = torch.bfloat16


def compiled(fn, make):
    with collect() as report:
        generated = generate(fn, make)
    return generated, report


@pytest.mark.one_in(4)
@pytest.mark.compiles
@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_a_spelling_is_one_kernel_on_a_gpu(spelling: Spelling) -> None:
    generated, report = compiled(spelling.fn, spelling.inputs)
    assert [str(match.spec) for match in report.matches] == [spelling.spec]
    assert not report.rejections
    [name] = generated.kernels
    assert spelling.case.family in name
    assert "extern_kernels" not in generated.wrapper.split("def call", 1)[1]


@pytest.mark.interp
@pytest.mark.parametrize("spelling", sampled(ALL_SPELLINGS, every=3), ids=str)
def test_a_spelling_computes_what_it_says(spelling: Spelling) -> None:
    torch.manual_seed(0)
    inputs = spelling.inputs("cpu")
    generated, report = compiled(spelling.fn, spelling.inputs)
    assert [str(match.spec) for match in report.matches] == [spelling.spec]
    assert_close(simulate.interpret(generated, inputs), spelling.exact(inputs), slack=2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spelling", [*SCALED_MM, *DEQUANTIZED, STATIC], ids=str)
def test_the_rewritten_graph_means_the_same(spelling: Spelling) -> None:
    """On a CPU, where torch has these ops too."""
    torch.manual_seed(0)
    inputs = spelling.inputs("cpu")
    result, [rewrite] = capture(spelling.fn, inputs, dynamic=False)
    assert [str(match.spec) for match in rewrite.report.matches] == [spelling.spec]
    assert_close(result, spelling.exact(inputs), slack=2)


@pytest.mark.one_in(2)
@pytest.mark.quick
@pytest.mark.parametrize("spelling", [*DEQUANTIZED[:-1], STATIC], ids=str)
def test_operands_are_dequantized_for_any_number_of_rows(spelling: Spelling) -> None:
    torch.manual_seed(0)
    backend = EagerBackend()
    compiled = torch.compile(spelling.fn, backend=backend)
    for rows in (spelling.case.m, 7, 130):
        inputs = spelling.make(dataclasses.replace(spelling.case, m=rows), "cpu")
        for tensor in (inputs[0], inputs[2]):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert_close(compiled(*inputs), spelling.exact(inputs), slack=2)
    [rewrite] = backend.rewrites
    assert [str(match.spec) for match in rewrite.report.matches] == [spelling.spec]
    assert not isinstance(rewrite.report.matches[0].m, int)


BEFORE = {
    "memory": lambda x, more: x,
    "norm": lambda x, more: F.rms_norm(x + more, x.shape[-1:]),
    "layer_norm": lambda x, more: F.layer_norm(x + more, x.shape[-1:]),
    "gelu": lambda x, more: F.gelu(x),
    "silu_mul": lambda x, more: F.silu(x) * more,
}


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize(
    "before",
    [pytest.param(b, marks=[] if b in ("norm", "silu_mul") else pytest.mark.slow) for b in BEFORE],
)
def test_the_quantization_is_one_kernel_with_what_precedes_it(kind: str, before: str) -> None:
    """A norm with a residual, or SiLU * up; the largest value of a row or block; the division and
    the cast."""
    m, n, k = 64, 256, 512

    def model(x, more, w, scale):
        x = BEFORE[before](x, more)
        if kind == "row":
            return layer(kind)(x, w, scale)
        return group_reduce.product(*group_reduce.in_blocks(x), w, scale)

    def make(device):
        x = torch.empty(m, k, dtype=bf16, device=device)
        shape = (1, n) if kind == "row" else (n // 128, k // 128)
        w = torch.empty(n, k, device=device, dtype=torch.int8).view(e4m3)
        return x, torch.empty_like(x), w, torch.empty(shape, device=device)

    generated, _ = compiled(model, make)
    quantizing, product = generated.kernels
    assert "fp8" in product
    assert "for r0_offset" not in generated.kernels[quantizing]


# ------------------------------------------------------------------------------------------
# near misses

FNUZ = torch.float8_e4m3fnuz


def scaled_mm(*changes: object, **kwargs: object):
    def body(call, a, b, sa, sb, *more):
        given = {"out_dtype": bf16, **kwargs}
        bias = more[0] if more else None
        return call(aten._scaled_mm.default, a, b, sa, sb, bias, None, **given)

    return body


def operands(m=32, n=64, k=256, dtype=e4m3):
    a, b = torch.ones(m, k).to(dtype), torch.ones(n, k).to(dtype).t()
    return a, b


NEAR_MISSES = {
    "another exponent bias": ("dtype", [*operands(dtype=FNUZ), torch.ones(()), torch.ones(())], {}),
    "an fp8 result": ("dtype", [*operands(), torch.ones(()), torch.ones(())], {"out_dtype": e4m3}),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_refused_and_stays(name: str) -> None:
    code, args, options = NEAR_MISSES[name]
    rewrite = rewritten(scaled_mm(**options), args)
    assert rewrite.codes == [code]
    assert rewrite.is_untouched


@pytest.mark.compiles
@pytest.mark.parametrize("follows", [None, torch.nn.functional.silu])
@pytest.mark.parametrize(
    ("sizes", "block", "fast", "codes"),
    [
        ((128, 4096), (128, 128), False, []),  # half of the chip would be idle
        ((128, 24576), (128, 128), False, ["many_rows"]),
        ((256, 7168), (128, 128), False, ["many_rows"]),
        ((258, 7168), (128, 128), False, []),  # cuBLASLt refuses blocks of 258 rows
        ((256, 7168, 640), (128, 128), False, []),  # and misreads five scales a row
        ((4096, 4096), (128, 128), False, []),  # 3.9 rounds of tiles of 256 columns
        ((1024, 2112), (128, 128), False, []),  # two thirds of one, of 192
        ((513, 256), None, False, ["many_rows"]),
        ((4096, 4096), None, False, []),
        ((513, 256), None, True, []),
        ((513, 32768), None, True, ["many_rows"]),  # unless something is fused
        ((255, 65536), None, True, []),
    ],
)
def test_many_rows_are_left_to_cublaslt_where_it_is_faster(
    sizes, block, fast, codes, follows
) -> None:
    if follows and not fast:
        pytest.skip("whatever follows")
    codes = [] if follows else codes
    rows, columns, k = (*sizes, 512)[:3]
    case = Case(rows, columns, k, block=block, a_scales="m", bias=False)

    def fn(a, w, sa, sb):
        scales = sa, sb.t() if block else sb
        out = torch._scaled_mm(a, w.t(), *scales, out_dtype=bf16, use_fast_accum=fast)
        return follows(out.view(3, -1, columns)) if follows else out

    with collect() as report, contextlib.suppress(Exception):
        # stock's call of the library has no kernel on a virtual GPU
        generate(fn, lambda device: make_inputs(case, device)[:4])
    assert [rejection.code.value for rejection in report.rejections] == codes
    assert len(report.matches) == 1 - len(codes)


def test_a_scaled_result_is_refused() -> None:
    def body(call, a, b, sa, sb, sr):
        return call(aten._scaled_mm.default, a, b, sa, sb, None, sr, out_dtype=bf16)

    args = [*operands(), torch.ones(()), torch.ones(()), torch.ones(())]
    assert rewritten(body, args).codes == ["scale_dtype"]


def test_an_operand_that_is_written_to_is_refused() -> None:
    def body(call, a, b, sa, sb):
        call(aten.add_.Tensor, sa, 1.0)
        return call(aten._scaled_mm.default, a, b, sa, sb, out_dtype=bf16)

    args = [*operands(), torch.ones(()), torch.ones(())]
    assert rewritten(body, args).codes == ["mutated_operand"]


@pytest.mark.compiles
@pytest.mark.parametrize(("kind", "rows"), [("row", 48), ("block", 48), ("block", 600)])
def test_a_dynamic_number_of_rows_is_matched(kind: str, rows: int) -> None:
    """Blocks also of 600 rows, and a size: cuBLASLt would refuse three of four calls."""
    case = Case(rows, 256, 512, block=(128, 128) if kind == "block" else None, bias=False)

    def fn(a, w, sa, sb):
        return torch._scaled_mm(a, w.t(), sa, sb if kind == "row" else sb.t(), out_dtype=bf16)

    def make(device):
        a, w, sa, sb, _ = make_inputs(case, device)
        sa = sa if kind == "row" else sa.t().contiguous().t()
        torch._dynamo.mark_dynamic(a, 0)
        torch._dynamo.mark_dynamic(sa, 0)
        return a, w, sa, sb

    _, report = compiled(fn, make)
    assert [match.family for match in report.matches] == [case.family]


def test_only_rows_may_be_symbolic() -> None:
    """``a @ a.T`` has N = M."""
    a, scale = operands(m=16)[0], torch.rand(16, 1)
    torch._dynamo.mark_dynamic(a, 0)
    torch._dynamo.mark_dynamic(scale, 0)
    _, [rewrite] = capture(lambda a, s: (a.float() * s) @ (a.float() * s).t(), [a, scale])
    assert rewrite.is_untouched
    assert rewrite.codes == ["weight_form"]


def test_an_op_of_a_producers_own_is_reported_with_the_sizes_of_its_operands() -> None:
    """Such as those that transformers loads from its hub: two fp8 matrices with their scales.
    (torchao's own: ``test_fp8_custom_ops.py``.)"""
    library = torch.library.Library("test_fp8_producer", "DEF")
    library.define("block_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale) -> Tensor")

    def fake(a, a_scale, b, b_scale):
        return a.new_empty(a.shape[0], b.shape[0], dtype=bf16)

    torch.library.register_fake("test_fp8_producer::block_mm", fake, lib=library)
    product = torch.ops.test_fp8_producer.block_mm.default
    a, w, sa, sb, _ = make_inputs(Case(48, 256, 512, block=(128, 128)), "cpu")
    rewrite = rewritten(lambda call, *given: call(product, *given), [a, sa, w, sb])
    [rejection] = rewrite.report.rejections
    assert rejection.code.value == "opaque"
    assert rejection.site is not None
    assert (rejection.site.m, rejection.site.n, rejection.site.k) == (48, 256, 512)
    assert rejection.site.source == "e4m3"


OTHER_ROWS = {
    "of the transposed": lambda scale: scale.transpose(0, 1).reshape(scale.shape),
    "of the first of a batch": lambda scale: scale[:, :1].expand(scale.shape),
    "of the first of all": lambda scale: scale[:1].expand(scale.shape),
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_scales_of_other_rows_stay_theirs_for_any_batch_and_sequence(name):
    torch.manual_seed(0)
    w, sb = torch.randint(-8, 9, (128, 256)).float().to(e4m3), torch.rand(1, 2) + 0.5

    def fn(x):
        scale = x.unflatten(2, (2, 128)).abs().amax(-1) / 8
        a = (x / scale.repeat_interleave(128, 2)).to(e4m3).float().unflatten(2, (2, 128))
        a = (a * OTHER_ROWS[name](scale)[..., None]).reshape(-1, 256)
        return a @ (w.float().reshape(128, 2, 128) * sb[..., None]).reshape(128, 256).t()

    backend = EagerBackend()
    run = torch.compile(fn, backend=backend)
    for batch, sequence in ((3, 5), (4, 7)):
        x = torch.randn(batch, sequence, 256)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(run(x), fn(x), rtol=1e-5, atol=1e-4)
    [rewrite] = backend.rewrites
    assert len(rewrite.report.matches) == 1


def looped(scale_of=lambda i: i, slices=(0, 1, 2), column_of=lambda i: i):
    """DeepSeek's formula with a mistake: ``scale_of`` gives the scale of slice i."""

    def fn(a, w, sa, sb):
        out = 0.0
        for i in slices:
            part = slice(128 * i, 128 * i + 128)
            product = a[:, part].float() @ w[:, part].float().t()
            j, columns = scale_of(i), sb.repeat_interleave(128, 0)
            out = out + product * sa[:, j : j + 1] * columns[:, column_of(i)]
        return out.to(bf16)

    return fn


def transposed(a, w, sa, sb):
    """Einsum's batched product, square, summed as [N, M]."""
    x = w.float().view(256, 3, 128)
    parts = torch.einsum("mgk,ngk->gmn", x, x) * x.abs().amax(-1).t()[..., None]
    return (parts * sb.repeat_interleave(128, 0).t()[:, None]).permute(0, 2, 1).sum(0)


def repeated(a, w, sa, sb):
    """The sum starts with zeros that have one more dimension."""
    out = torch.zeros(2, 48, 256)
    for i in range(3):
        part = slice(128 * i, 128 * i + 128)
        product = a[:, part].float() @ w[:, part].float().t()
        out = out + product * sa[:, i : i + 1] * sb.repeat_interleave(128, 0)[:, i]
    return out


def batched_over_rows(a, w, sa, sb):
    """A batch that does not slice K: the sum of 3 products of 16 rows."""
    x = (a.float() * sa.repeat_interleave(128, 1)).view(3, 16, 384)
    return torch.bmm(x, w.float().t().expand(3, -1, -1)).sum(0) * sb[0, 0]


def shifted(a, w, sa, sb):
    x = a.float() * sa.roll(1, 0).repeat_interleave(128, 1)
    return x @ (w.float() * sb.repeat_interleave(128, 0).repeat_interleave(128, 1)).t()


def turned(a, w, sa, sb):
    """The same elements in another order, in a shape that fits."""
    x = a.float() * sa.repeat_interleave(128, 1)
    x = x.t().reshape(-1, 384)
    return x @ (w.float() * sb.repeat_interleave(128, 0).repeat_interleave(128, 1)).t()


def blocks_of_columns(a, w, sa, sb):
    return a.float() @ (w.float() * sb[:, :1].repeat_interleave(128, 0)).t()


def parts_of_blocks(length, first=0):
    """``a`` as the weight, 48 columns: too few for the ``256 / length`` blocks of its scales."""

    def fn(a, w, sa, sb):
        tokens = w.float().view(256, 3, 128).abs().amax(-1)
        scales = w.float().view(-1, length, 3, 128).abs().amax((1, 3)) / 64
        columns = scales.repeat_interleave(length, 0)[first : first + 48]
        x = w.float() * tokens.repeat_interleave(128, 1)
        return x @ (a.float() * columns.repeat_interleave(128, 1)).t()

    return fn


NO_BLOCKS = {
    "scales in another order": looped(scale_of=lambda i: 2 - i),
    "columns' scales in another order": looped(column_of=lambda i: 2 - i),
    "one scale for all slices": looped(scale_of=lambda i: 0),
    "a slice twice": looped(slices=(0, 1, 1)),
    "a slice left out": looped(slices=(0, 2)),
    "a batch of rows": batched_over_rows,
    "repeated": repeated,
    "transposed": transposed,
    "scales of other rows": shifted,
    "rows read as columns": turned,
    "blocks that begin elsewhere": parts_of_blocks(32, first=8),
    "more blocks than columns": parts_of_blocks(32),
    "blocks of columns alone": blocks_of_columns,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "dynamic"), [(name, position % 2 == 0) for position, name in enumerate(NO_BLOCKS)]
)
def test_a_sum_that_is_no_product_of_blocks_keeps_its_value(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    inputs = make_inputs(Case(48, 256, 384, block=(128, 128)), "cpu")[:4]
    for tensor in (inputs[0], inputs[2]) if dynamic else ():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    result, [rewrite] = capture(NO_BLOCKS[name], inputs, dynamic=None if dynamic else False)
    assert "fp8_block" not in {match.family for match in rewrite.report.matches}
    [before] = rewrite.before(*rewrite.inputs)
    torch.testing.assert_close(result, before, rtol=2e-2, atol=2e-2)
