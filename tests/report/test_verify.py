"""``verify``: each fused GEMM against its graph and fp64, on the first real inputs."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch

from inductor_quant.errors import OptionError, VerificationError
from inductor_quant.ops import verify
from inductor_quant.options import Options
from inductor_quant.patterns import graph_pass
from inductor_quant.patterns.graph_pass import for_options
from inductor_quant.report import events
from tests.support.forks import Program
from tests.support.graphs.post_grad import capture
from tests.support.producers.activation import PRODUCERS
from tests.support.producers.registry import GIVEN, need, need_package
from tests.support.sampling import sampled
from tests.support.spellings.quantizers import QUANTIZERS, GptFastLinear

pytestmark = pytest.mark.compiles

VERIFY = Options(on_error="raise", verify=True)
bf16 = torch.bfloat16


def verified(fn, args, options=VERIFY, **kwargs):
    with torch.no_grad(), events.collect() as found:
        result, rewrites = capture(fn, args, options=options, **kwargs)
    return result, rewrites, found.verifications


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", sampled([1, 32]))
@pytest.mark.parametrize("producer", GIVEN, ids=str)
def test_every_given_weight_only_producer_is_as_near_to_fp64_as_eager_mode(producer, rows):
    need(producer)
    if producer.max_rows is not None and rows > producer.max_rows:
        pytest.skip("this form is for few rows")
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
    _, _, [found] = verified(producer.make(), [x.to(producer.dtypes[0])])
    assert found.is_exact or producer.name == "quanto_qint8_wo"  # an opaque op
    assert found.is_good
    # (one row has as many samples of the last rounding as columns: 128)
    assert found.ours_rms <= (1.02 if rows > 1 else 1.10) * found.graph_rms + 1e-6


@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q.__name__)
def test_every_w8a8_quantizer_is_as_near_to_fp64_as_eager_mode(quantizer, dtype):
    torch.manual_seed(0)
    layer, x = quantizer(256, 128, dtype=dtype), torch.randn(2, 20, 256, dtype=dtype)
    x = x if quantizer is not GptFastLinear else x.flatten(0, 1)  # that one is 2-D
    _, _, [found] = verified(layer, [x])
    assert found.is_exact
    assert found.is_good
    assert found.ours_rms <= 1.02 * found.graph_rms


COMPARED = ("compressed_dyn_token", "compressed_static", "fake_bytes", "static_asymmetric")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPARED)
def test_what_is_exact_begins_at_the_numbers_that_the_op_reads(name):
    """Behind them the graph rounds the activation to bf16 once more: no error of the op's."""
    [producer] = [producer for producer in PRODUCERS if producer.name == name]
    need_package(producer.needs)
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).to(producer.dtype)
    _, _, [found] = verified(producer.make(x), [x])
    assert found.is_exact
    assert found.ours_rms <= 1.8e-3  # of the last rounding alone
    assert found.ours_rms <= 1.02 * found.graph_rms


def torchao_layer():
    """It rounds to fp16 between its two scales; the exact result is within fp16."""
    layer = QUANTIZERS[0](2048, 64, dtype=torch.float16, bias=False)
    layer.scale.mul_(0.02)
    return layer


def gpt_fast_layer():
    """It multiplies with the integers, in fp16, and scales behind that."""
    w = torch.randint(-127, 128, (64, 2048), dtype=torch.int8)
    scale = (torch.rand(64) * 2e-4).half()
    return lambda x: torch.nn.functional.linear(x, w.to(x.dtype)) * scale


@pytest.mark.parametrize("make", [torchao_layer, gpt_fast_layer])
def test_what_overflows_fp16_in_eager_mode_is_finite(make):
    torch.manual_seed(0)
    layer, x = make(), 300 * torch.randn(8, 2048, dtype=torch.float16)
    result, [rewrite], [found] = verified(layer, [x])
    with torch.no_grad():
        graph = rewrite.before(*rewrite.inputs)[0]
    assert not graph.isfinite().all()
    assert result.isfinite().all()
    assert found.is_good
    assert found.graph_rms == float("inf")


def scaled(a, b, scale):
    return torch._int_mm(a, b) * scale


def operands():
    a = torch.randint(-99, 99, (32, 64), dtype=torch.int8)
    b = torch.randint(-99, 99, (64, 48), dtype=torch.int8)
    return a, b, torch.rand(32, 1) + 0.1


@pytest.fixture
def wrong(monkeypatch):
    """Every rewritten GEMM is off by a thousandth."""
    rewrite = graph_pass.rewrite

    def spoilt(found, watch=None):
        kwargs = {**found.kwargs, "alpha": 1.001 * found.kwargs["alpha"]}
        return rewrite(dataclasses.replace(found, kwargs=kwargs), watch)

    monkeypatch.setattr(graph_pass, "rewrite", spoilt)


def test_a_wrong_result_is_raised_or_warned_of(wrong):
    with pytest.raises(VerificationError, match="NOT VERIFIED w8a8"):
        verified(scaled, operands())
    with pytest.warns(RuntimeWarning, match="NOT VERIFIED w8a8"):
        _, _, [found] = verified(scaled, operands(), Options(verify=True))
    assert found.ours_rms == pytest.approx(1e-3, rel=0.01)
    assert found.graph_rms < 1e-6


def test_without_the_option_nothing_is_compared(wrong):
    _, [rewrite], found = verified(scaled, operands(), Options(on_error="raise"))
    assert found == []
    assert not [n for n in rewrite.after.graph.nodes if n.target == verify.op]


def test_it_is_done_once():
    args = operands()
    with torch.no_grad(), events.collect() as found:
        _, [rewrite] = capture(scaled, args, options=VERIFY)
        for _ in range(3):
            rewrite.after(*rewrite.inputs)
    assert len(found.verifications) == 1


def test_symbolic_sizes_are_passed_on():
    def fn(x, b, scale):
        a = x.reshape(-1, 64)
        return (torch._int_mm(a, b) * scale.reshape(-1, 1)).reshape(x.shape[0], -1, 48)

    x = torch.randint(-99, 99, (4, 8, 64), dtype=torch.int8)
    _, _, [found] = verified(fn, [x, operands()[1], torch.rand(4, 8)], dynamic=True)
    assert found.is_good


def test_nothing_that_holds_a_subgraph_is_cached():
    assert for_options(VERIFY).uuid() is None
    assert for_options(Options()).uuid() is not None


def test_an_export_is_refused():
    import inductor_quant

    class Layer(torch.nn.Module):
        def forward(self, a, b, scale):
            return scaled(a, b, scale)

    program = torch.export.export(Layer(), operands())
    with warnings.catch_warnings(), inductor_quant.backend.enabled(verify=True):
        warnings.simplefilter("ignore")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("inductor_quant._compat.inductor.runs_triton", lambda device: True)
            with pytest.raises(Exception, match="leave it out of an export") as raised:
                torch._inductor.aoti_compile_and_package(program)
    assert OptionError.__name__ in repr(raised.value) or isinstance(raised.value, OptionError)


PROGRAM = """
import json, torch, inductor_quant
from inductor_quant.simulate import interpreted_cpu
from tests.support.producers.registry import PRODUCERS

module = PRODUCERS["gptq_gm_4b_g64_base"].make(torch.float16)
x = torch.randn(4, 256).half()
options = {"inductor_quant.verify": True, "inductor_quant.on_error": "raise"}
with interpreted_cpu(), torch.no_grad(), inductor_quant.collect() as report:
    f = torch.compile(module, backend="inductor_quant", options=options)
    f(x), f(x)
print(json.dumps([len(report.kernels), [v.is_good for v in report.verifications]]))
"""


def test_it_compares_what_the_kernel_computes(interpreter_forks):
    [line] = interpreter_forks.run(Program(PROGRAM))
    assert json.loads(line) == [1, [True]]
