"""Every producer's layer becomes one ``weight_only`` GEMM with the weight that is stored."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import fx

from inductor_quant.ops.weight_only import dequantize
from inductor_quant.spec.gemm import GATHERED
from inductor_quant.spec.weight_format import Field, WeightFormat
from tests.support.graphs.post_grad import Rewrite, calls, capture
from tests.support.producers.registry import BY_INDEX, PRODUCERS, Producer, anchors, need
from tests.support.sampling import sampled

bf16, f16 = torch.bfloat16, torch.float16
OP = torch.ops.inductor_quant.weight_only.default
K = N = 256
# Of eager's error. The canonical op rounds less often, or as often. A single row is a small sample:
# two results of equal quality differ by more there.
MAX_ERROR = {True: 1.1, False: 1.02}
# Relative, root of the mean square: eager rounds the weight and the result to 16 bits, some twice.
TOLERANCE = {bf16: 5e-3, f16: 1e-3}

pytestmark = pytest.mark.filterwarnings("ignore")


def cases(producer: Producer) -> list[tuple[torch.dtype, tuple[int, ...], bool]]:
    """(dtype, leading sizes of x, bias): one, or for ``given`` producers each value once."""
    first, last = producer.dtypes[0], producer.dtypes[-1]
    if not producer.given:
        return [(first, (32,), True)]
    if producer.max_rows == 1:
        return [(first, (1,), True), (last, (1,), False)]
    return [(first, (32,), True), (last, (1,), False), (last, (2, 16), True)]


ALL = [(producer, *case) for producer in PRODUCERS.values() for case in cases(producer)]
MATCHED = [producer for producer in PRODUCERS.values() if producer.expected_matches]
every = pytest.mark.parametrize(
    ("producer", "dtype", "lead", "bias"),
    ALL,
    ids=lambda item: str(item).removeprefix("torch."),
)


def is_dynamic(lead: tuple[int, ...], bias: bool) -> bool:
    return len(lead) > 1 and bias


# Their fields cross words: read where the shift table is known, as behind the backend.
CROSS_WORDS = {"gptq_3b_g64"}


def rewritten(
    producer: Producer, dtype: torch.dtype, lead: tuple[int, ...] = (32,), bias: bool = True
) -> tuple[Any, torch.Tensor, torch.Tensor, Rewrite]:
    """The layer, an input, the result of its rewritten graph, and the graph. M is symbolic for 3-D
    inputs with a bias."""
    return _rewritten(producer, dtype, lead, bias)


@functools.cache
def _rewritten(
    producer: Producer, dtype: torch.dtype, lead: tuple[int, ...], bias: bool
) -> tuple[Any, torch.Tensor, torch.Tensor, Rewrite]:
    need(producer)
    torch.manual_seed(1)
    torch._dynamo.reset()
    module, x = producer.make(dtype, K, N, bias), torch.randn(*lead, K).to(dtype)
    if is_dynamic(lead, bias):
        torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        result, [rewrite] = capture(module, [x], read_tables=producer.name in CROSS_WORDS)
    return module, x, result, rewrite


def exact(producer: Producer, module: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer in fp64."""
    bias = getattr(module, "bias", None)
    if bias is None and isinstance(module, torch.nn.Sequential):
        bias = module[0].bias
    y = x.double() @ producer.dense(module).T
    return y if bias is None else y + bias.double()


class Values(fx.Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)


def decoded(rewrite: Rewrite) -> tuple[WeightFormat, fx.Node, dict[fx.Node, Any]]:
    """The format of the one canonical op, its node, and the values of all nodes."""
    [node] = calls(rewrite.after, OP)
    run = Values(rewrite.after)
    run.run(*rewrite.inputs)
    return WeightFormat.decode(node.kwargs["format"]), node, run.env


# ------------------------------------------------------------------------------------------
# what is computed


@pytest.mark.one_in(4)
@every
def test_a_layer_becomes_one_gemm_that_is_as_exact(
    producer: Producer, dtype: torch.dtype, lead: tuple[int, ...], bias: bool
) -> None:
    module, x, result, rewrite = rewritten(producer, dtype, lead, bias)
    assert len(rewrite.report.matches) == producer.expected_matches
    assert len(calls(rewrite.after, OP)) == producer.expected_matches
    if not producer.expected_matches:
        assert rewrite.is_untouched
        return
    assert not rewrite.report.rejections
    [match] = rewrite.report.matches
    assert (match.family, match.n, match.k) == ("weight_only", N, K)
    assert isinstance(match.m, str) == is_dynamic(lead, bias)
    assert is_dynamic(lead, bias) or match.m == torch.Size(lead).numel()
    rewrite.after.graph.lint()
    with torch.no_grad():
        eager = module(x)
    assert (result.dtype, result.shape, result.stride()) == (dtype, eager.shape, eager.stride())
    want = exact(producer, module, x)
    limit = MAX_ERROR[match.m == 1]
    assert (result.double() - want).norm() <= limit * (eager.double() - want).norm()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("producer", sampled(PRODUCERS.values(), 2, str))
def test_the_graph_has_one_product_and_its_bias_where_it_should_be(producer: Producer) -> None:
    """Of the registry: the graph that the tests above are about is that of the layer."""
    dtype, lead, bias = cases(producer)[0]
    module, x, result, rewrite = rewritten(producer, dtype, lead, bias)
    if producer.expected_matches:  # else nothing was rewritten
        [result] = rewrite.before(*rewrite.inputs)
    want = exact(producer, module, x)
    assert (result.double() - want).norm() < TOLERANCE[dtype] * want.norm()
    [anchor] = anchors(rewrite.before, producer)
    assert (str(anchor.target) == "aten.addmm.default") == (producer.bias == "addmm")
    added = [node for node in rewrite.before.graph.nodes if str(node.target) == "aten.add.Tensor"]
    after = [node for node in added if node > anchor]
    assert len(after) == (producer.bias == "add")


@pytest.mark.parametrize("producer", sampled(MATCHED, 3, str))
def test_nothing_of_the_dequantization_stays(producer: Producer) -> None:
    """The op reads graph inputs, or computed tensors as small as scales."""
    _, _, _, rewrite = rewritten(producer, producer.dtypes[0])
    [node] = calls(rewrite.after, OP)
    least = 16 if producer.group_size == 16 else 32
    for source in node.args[1]:
        is_stored = source.op in ("placeholder", "get_attr")
        assert is_stored or source.meta["val"].numel() <= K * N // least, source
    views = (torch.ops.aten.reshape.default, torch.ops.aten.split_with_sizes.default)
    computed = [n for n in rewrite.after.graph.nodes if n.op == "call_function" and n is not node]
    large = [
        n for n in computed if n.target not in views and isinstance(n.meta["val"], torch.Tensor)
    ]
    assert all(n.meta["val"].numel() <= K * N // 4 for n in large), large


# ------------------------------------------------------------------------------------------
# what is meant


@pytest.mark.one_in(3)
@pytest.mark.parametrize("producer", sampled(MATCHED, 2, str))
def test_the_format_is_what_the_producer_stored(producer: Producer) -> None:
    _, _, _, rewrite = rewritten(producer, producer.dtypes[0])
    format, node, env = decoded(rewrite)
    [match] = rewrite.report.matches
    assert str(format) == str(WeightFormat.decode(format.encode()))
    code, spec = format.code, match.spec.b
    stored = env[node.args[1][code.source]]
    assert (code.total_width or 8 * stored.dtype.itemsize) == producer.bits
    float8 = code.float8 or ("e4m3" if stored.dtype == torch.float8_e4m3fn else "e5m2")
    is_float8 = bool(code.float8) or stored.is_floating_point()
    element = "lut" if format.element != code else float8 if is_float8 else "int"
    assert element == ("lut" if producer.element == "e2m1" else producer.element)
    is_signed = code.signed if code.width else stored.dtype.is_signed
    assert is_signed == producer.signed
    assert _zeros(format, env, node) == _expected_zeros(producer)
    if spec.scale is None:  # a number
        assert (producer.group_size, producer.group_n) == (None, None)
        return
    rows, columns = (None if size == -1 else size for size in spec.scale.block)
    is_known = producer.name in CROSS_WORDS
    is_gathered = ("g_idx" in producer.reads and not is_known) or producer.group_size == BY_INDEX
    assert rows == (GATHERED if is_gathered else producer.group_size)
    assert columns == producer.group_n


def _zeros(format: WeightFormat, env: dict[fx.Node, Any], node: fx.Node) -> set[str]:
    """The kinds of the operands that are added or subtracted."""
    found, is_scaled = set(), False
    for step in format.dequant_ops:
        is_scaled |= step.kind in ("mul", "div")
        if step.kind not in ("add", "sub"):
            continue
        if is_scaled:
            found.add("folded")
        elif not isinstance(step.operand, Field):
            found.add("const")
        elif env[node.args[1][step.operand.source]].is_floating_point():
            found.add("float")
        else:
            found.add("packed" if step.operand.width else "int")
    return found | ({"const"} if format.element.add else set())


def _expected_zeros(producer: Producer) -> set[str]:
    if producer.name == "ct_pack_int4_g64_asym":  # (q - 8) - (z - 8)
        return {"packed", "const"}
    return set() if producer.zero == "none" else {producer.zero}


@pytest.mark.parametrize("producer", sampled(MATCHED, 3, str))
def test_the_decoded_weight_is_the_dense_one(producer: Producer) -> None:
    """Exact in fp64 (values are stored in fp32), unless the graph itself rounds a scale."""
    module, _, _, rewrite = rewritten(producer, producer.dtypes[0])
    format, node, env = decoded(rewrite)
    _, sources, column_scale, _ = node.args
    weight = dequantize(format, [env[source] for source in sources], torch.float64)
    if column_scale is not None:
        weight = weight * env[column_scale].double()
    dense = producer.dense(module).T
    if producer.name in DIVIDED:
        dense = dense * module.layer.weight_scale.double()
    inputs = [*sources, *([column_scale] if column_scale is not None else [])]
    is_stored = all(_is_stored(source) for source in inputs)
    assert is_stored or producer.name in ROUNDED
    tolerance = 1e-7 if is_stored else 2**-7 if producer.name in TWICE_ROUNDED else 2**-8
    assert (weight - dense).abs().max() <= tolerance * dense.abs().max()


# Their graphs divide the product by a scale, and this stays in the graph.
DIVIDED = {"bitnet_packed"}
# Their graphs compute in 16 bits what the canonical op is given.
ROUNDED = {
    "torchao_int8_wo_row",
    "int8_two_factors",
    "int4_folded",
    "torchao_mxfp8_dequantized",
    "gguf_q4_0_split",
    *("gguf_q8_0", "gguf_q4_k", "gguf_q4_k_split", "gguf_q5_k", "gguf_q6_k", "gguf_q6_k_split"),
    *("torchao_mxfp4_dequantized", "gpt_oss_mxfp4", "ct_nvfp4_pack", "ct_mxfp4_pack"),
}


TWICE_ROUNDED = {"gguf_q4_k_split", "gguf_q6_k_split"}  # the scale in fp16, and its product


def _is_stored(node: fx.Node) -> bool:
    moves = (torch.ops.aten.reshape.default, torch.ops.aten.permute.default)
    while node.target in moves:
        node = node.args[0]  # type: ignore[assignment]
    return node.op in ("placeholder", "get_attr")


NAMES = {
    "bitnet_packed": "bitnet",
    "torchao_nvfp4_wo": "nvfp4",
    "ct_nvfp4_pack": "nvfp4",
    "torchao_mxfp4_dequantized": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "torchao_mxfp8_dequantized": "mxfp8",
    "gptq_2b_g64": "",
    "lut4_u8": "",
    "gguf_q4_0_split": "q4_0",
    "gguf_q8_0": "q8_0",
    "gguf_q4_k": "q4_k",
    "gguf_q4_k_split": "q4_k",
    "gguf_q5_k": "q5_k",
    "gguf_q6_k": "q6_k",
}


def test_a_weight_that_is_rounded_in_the_graph_is_named_so() -> None:
    """Trained for int4 and not converted yet."""
    producer = PRODUCERS["torchao_qat_prepared"]
    need(producer)
    _, _, _, rewrite = rewritten(producer, producer.dtypes[0])
    assert rewrite.codes == ["computed_weight"]


@pytest.mark.parametrize(("name", "format"), NAMES.items())
def test_the_report_names_the_format(name: str, format: str) -> None:
    producer = PRODUCERS[name]
    _, _, _, rewrite = rewritten(producer, producer.dtypes[0])
    [match] = rewrite.report.matches
    assert match.format == format
