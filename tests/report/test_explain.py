"""``explain``: a row for each matrix product, near misses first, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

import jsonschema
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import inductor_quant
from inductor_quant import simulate
from inductor_quant.report import roofline
from inductor_quant.report.explain import Explanation, Row
from inductor_quant.spec.decisions import Match, Rejection, RejectionCode, Site
from inductor_quant.spec.gemm import OperandSpec, QuantGemmSpec
from tests.support.producers.experts import Experts, route

SCHEMA = json.loads(
    (resources.files("inductor_quant.report") / "explain.schema.json").read_text(encoding="utf-8")
)


class Int8Linear(nn.Module):
    """Dynamic W8A8 in ten lines. ``scale_axis="k"`` spoils it: a scale along no axis we know."""

    def __init__(self, n: int, k: int, scale_axis: str = "n") -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (n, k), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(n))
        self.scale_axis = scale_axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a_scale = x.float().abs().amax(-1, keepdim=True) / 127
        a = (x / a_scale).round().to(torch.int8)
        out = torch._int_mm(a, self.weight.t()).float()
        if self.scale_axis == "k":
            out = out * x.float()  # M x K, which happens to have the result's shape
        return (out * a_scale * self.scale).to(x.dtype)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(32, 64, dtype=torch.bfloat16)
        self.good = Int8Linear(64, 64)
        self.spoilt = Int8Linear(64, 64, scale_axis="k")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.spoilt(self.good(self.plain(x)))


@pytest.fixture(scope="module")
def on_a_gpu():
    """The explanation of Model on a virtual sm_90."""
    with simulate.virtual_gpu(90), FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model, x = Model().eval(), torch.empty(20, 32, dtype=torch.bfloat16)
        return inductor_quant.explain(
            model, x, timings=False, verbose=False, options={"inductor_quant.on_error": "raise"}
        )


@pytest.mark.compiles
class TestRows:
    def test_there_is_one_for_each_matrix_product(self, on_a_gpu):
        assert [row.site.module for row in on_a_gpu.rows] == ["spoilt", "good", "plain"]

    def test_the_near_miss_comes_first_and_names_the_node_that_stopped_it(self, on_a_gpu):
        row = on_a_gpu.rows[0]
        assert row.is_near_miss
        assert row.decision.code == RejectionCode.SCALE_AXIS
        assert row.decision.node in row.reason
        assert row.decision.node.startswith(("mul", "convert_element_type"))

    def test_a_match_shows_spec_sizes_and_kernel(self, on_a_gpu):
        row = on_a_gpu.rows[1].to_dict()
        assert row["matched"]
        assert row["spec"] == "(a=i8/token:f32, b=i8/channel:f32, out=bf16)"
        assert row["activation"].startswith("dynamic per_token int8 symmetric, amax/127")
        assert (row["m"], row["n"], row["k"]) == (20, 64, 64)
        assert row["bytes"] == 20 * 64 + 64 * 64 + 2 * 20 * 64 + 4 * (20 + 64)
        assert row["operations"] == 2 * 20 * 64 * 64
        assert row["kernel"].startswith("w8a8_mm ")

    def test_a_product_without_quantized_data_is_no_near_miss(self, on_a_gpu):
        row = on_a_gpu.rows[2]
        assert not row.is_near_miss
        assert row.decision.code == RejectionCode.NOT_QUANTIZED


class Broken(Model):
    """A weight is dequantized before a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.good.weight.float() * self.good.scale[:, None]
        torch._dynamo.graph_break()
        return self.plain(x) @ weight.t()


@pytest.mark.compiles
def test_a_weight_of_an_earlier_graph_is_named_but_no_parameter():
    with torch.no_grad():
        found = inductor_quant.explain(
            Broken().float(), torch.randn(4, 32), timings=False, verbose=False
        )
    hints = {row.site.op: "dequantized before a graph break" in row.reason for row in found.rows}
    assert hints == {"aten.addmm": False, "aten.mm": True}


@pytest.mark.compiles
def test_a_symbolic_size_is_shown_with_what_it_was_in_the_call():
    """The size that a kernel is chosen for, and timed for where there is a GPU."""
    with simulate.virtual_gpu(90), FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model, x = Int8Linear(4096, 4096), torch.empty(20, 4096, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        explanation = inductor_quant.explain(
            model,
            x,
            dynamic=None,
            timings=False,
            verbose=False,
            options={"inductor_quant.row_buckets": (16, 64)},
        )
    row, *ranges = explanation.rows
    assert isinstance(row.site.m, str)
    assert row.shape == f"{row.site.m}=20x4096x4096"
    assert [each.shape for each in ranges] == [
        "2..16x4096x4096",
        "17..64x4096x4096",
        "65..x4096x4096",
    ]
    kernels = [each.kernel.chosen for each in ranges]
    assert len({*kernels}) == 3
    assert all(kernel in str(explanation) for kernel in kernels)
    assert explanation.summary.startswith("1 of 1 matrix products matched, 0 near misses, 0 not")
    raw = json.loads(explanation.to_json())
    jsonschema.validate(raw, SCHEMA)
    assert [row["compiled_sizes"][0] for row in raw["rows"]] == [20, 16, 64, 128]
    assert [row["rows"] for row in raw["rows"]] == ["", "2..16", "17..64", "65.."]


@pytest.mark.compiles
def test_gemms_that_share_a_launch_in_one_range_alone_are_told_apart():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = Int8Linear(4096, 4096), Int8Linear(1024, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(x).sum(-1) * self.up(x).sum(-1)

    with simulate.virtual_gpu(90), FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model, x = Pair(), torch.empty(20, 4096, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        options = {"inductor_quant.row_buckets": (64, 256)}
        explanation = inductor_quant.explain(
            model, x, dynamic=None, timings=False, verbose=False, options=options
        )
    together = {(r.site.module, r.site.rows): r.launched_with for r in explanation.rows}
    assert together["gate", "2..64"] == together["gate", "65..256"] == ("up",)
    assert together["gate", ""] == together["gate", "257.."] == ()


@pytest.mark.compiles
def test_experts_have_a_row_with_their_number():
    """Bytes are those of the experts that are hit: of 2 of 4 by 2 rows, at most."""
    with simulate.virtual_gpu(90), FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model, args = Experts("int8", "gather_first").eval(), route(1, 4)
        explanation = inductor_quant.explain(model, *args, timings=False, verbose=False)
    assert [row.status for row in explanation.rows] == ["matched experts"] * 2
    assert [row.shape for row in explanation.rows] == ["2x128x64 of 4", "2x64x64 of 4"]
    reasons = [row.reason for row in explanation.rows]
    assert all("experts_direct" in reason for reason in reasons)
    gate = ", stores (a / (exp(-a) + 1)) * b"
    assert [gate in reason for reason in reasons] == [True, False]
    raw = json.loads(explanation.to_json())
    jsonschema.validate(raw, SCHEMA)
    first = raw["rows"][0]
    assert first["experts"] == 4
    assert 128 * 64 < first["bytes"] < 2 * 128 * 64


@pytest.mark.compiles
def test_all_weights_of_a_stack_count_that_is_read_whole():
    """Not those that as many independent rows hit."""
    with simulate.virtual_gpu(90), FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            x = torch.empty(4, 1, 64, dtype=torch.bfloat16)
            q = torch.empty(4, 64, 128, dtype=torch.int8)
        explanation = inductor_quant.explain(
            lambda x, q: torch.bmm(x, q.to(x.dtype)), x, q, timings=False, verbose=False
        )
    [row] = explanation.rows
    assert (row.to_dict()["experts"], row.to_dict()["batch"]) == (4, 4)
    assert row.to_dict()["bytes"] == 4 * 64 * 128 + 2 * 4 * (64 + 128)


@pytest.mark.compiles
def test_the_json_is_what_the_schema_documents(on_a_gpu):
    raw = json.loads(on_a_gpu.to_json())
    jsonschema.validate(raw, SCHEMA)
    assert len(raw["rows"]) == 3
    raw["rows"][0]["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(raw, SCHEMA)


@pytest.mark.compiles
def test_the_text_has_a_line_a_row_with_and_without_rich(on_a_gpu, capsys, monkeypatch):
    text = str(on_a_gpu)
    assert text.splitlines()[0].startswith(
        "1 of 3 matrix products matched, 1 near miss, 1 not quantized"
    )
    assert len(text.splitlines()) == 2 + 3
    monkeypatch.setenv("COLUMNS", "160")
    on_a_gpu.print()
    assert "spoilt" in capsys.readouterr().out
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    on_a_gpu.print()
    assert capsys.readouterr().out.strip() == text.strip()


def test_on_a_cpu_the_graph_stays_and_the_reason_is_the_device():
    with torch.no_grad():
        explanation = inductor_quant.explain(Int8Linear(48, 64), torch.randn(20, 64), verbose=False)
    [row] = explanation.rows
    assert row.decision.code == RejectionCode.DEVICE
    assert "0 of 1 matrix products matched" in explanation.summary


def test_a_second_explanation_of_the_same_model_shows_the_same():
    """Neither dynamo's code cache nor Inductor's files may serve the second."""
    model, x = Int8Linear(48, 64), torch.randn(20, 64)
    with torch.no_grad():
        texts = [str(inductor_quant.explain(model, x, verbose=False)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert "_int_mm" in texts[0]


def test_products_inside_a_subgraph_are_listed():
    layer = Int8Linear(64, 64)

    def model(flag, x):
        return torch.cond(flag, layer, lambda x: (x @ x.t()) @ x, (x,))

    with torch.no_grad():
        explanation = inductor_quant.explain(
            model, torch.tensor(True), torch.randn(20, 64), verbose=False
        )
    assert sorted(row.site.op for row in explanation.rows) == ["aten._int_mm", "aten.mm", "aten.mm"]


def test_a_product_behind_a_quantized_one_is_no_near_miss():
    """What feeds it is the int8 product's real result. Nor is a dense layer that int8 data feed."""
    layer, dense = Int8Linear(64, 64), nn.Linear(64, 64)

    def model(x, table):
        x = layer(x)
        return x @ x.t(), dense(table * 0.5)

    args = torch.randn(20, 64), torch.ones(8, 64, dtype=torch.int8)
    with torch.no_grad():
        explanation = inductor_quant.explain(model, *args, verbose=False)
    assert [row.is_near_miss for row in explanation.rows] == [True, False, False]


def test_brackets_in_a_reason_are_printed(capsys):
    """rich would take them for markup."""
    site = Site("n", "aten._int_mm", 1, 1, 1, 1, "u8", "i8", "cpu", source="u8")
    rejection = Rejection(RejectionCode.DTYPE, "operands are [torch.uint8, torch.int8]", "n")
    Explanation((Row(site, rejection),), "cpu").print()
    assert "[torch.uint8, torch.int8]" in capsys.readouterr().out


def test_a_weight_that_is_dequantized_and_clamped_is_a_near_miss():
    weight = torch.randint(-128, 128, (48, 64), dtype=torch.int8)
    scale = torch.rand(48, 1)

    def model(x, weight, scale):
        return x @ (weight.to(x.dtype) * scale).clamp(-1, 1).t()

    explanation = inductor_quant.explain(model, torch.randn(20, 64), weight, scale, verbose=False)
    [row] = explanation.rows
    assert row.is_near_miss
    assert row.decision.code == RejectionCode.WEIGHT_FORM
    assert row.site.source == "i8"


def test_a_weight_that_is_dequantized_first_is_recognized():
    """On a CPU it stays as it is, and the device is why."""
    weight = torch.randint(-128, 128, (48, 64), dtype=torch.int8)
    scale = torch.rand(48, 1)

    def model(x, weight, scale):
        return x @ (weight.to(x.dtype) * scale).t()

    explanation = inductor_quant.explain(model, torch.randn(20, 64), weight, scale, verbose=False)
    [row] = explanation.rows
    assert row.decision.code == RejectionCode.DEVICE
    assert "weight_only" in row.reason


def test_an_op_of_another_package_that_takes_a_quantized_weight_is_opaque():
    @torch.library.custom_op("inductor_quant_tests::int8_linear", mutates_args=())
    def int8_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.to(x.dtype).t()

    @int8_linear.register_fake
    def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[0], weight.shape[0])

    weight = torch.randint(-128, 128, (48, 64), dtype=torch.int8)
    explanation = inductor_quant.explain(int8_linear, torch.randn(20, 64), weight, verbose=False)
    [row] = explanation.rows
    assert row.is_near_miss
    assert row.decision.code == RejectionCode.OPAQUE
    assert "int8_linear" in row.reason
    # without a quantized operand it is none of ours
    plain = inductor_quant.explain(
        int8_linear, torch.randn(20, 64), torch.randn(48, 64), verbose=False
    )
    assert not plain.rows


def test_a_weight_that_is_computed_in_each_call_is_told() -> None:
    site = Site("mm", "aten._int_mm", 1, 32, 64, 64, "i8", "i8", "cuda:0")
    spec = QuantGemmSpec(OperandSpec(torch.int8), OperandSpec(torch.int8), torch.float32)
    match = Match("w8a8", spec, 32, 64, 64, "mm", site=site)
    assert "each call" not in Row(site, match).reason
    computed = dataclasses.replace(match, computed="mul_2")
    assert Row(site, computed).reason.endswith("its weight is computed in each call (at mul_2)")


def test_a_roofline_is_drawn_of_what_was_timed(tmp_path):
    pytest.importorskip("matplotlib")
    with simulate.virtual_gpu(arch=90), FakeTensorMode(), torch.device("cuda"):
        model, x = Int8Linear(4096, 4096), torch.empty(20, 4096, dtype=torch.bfloat16)
        explanation = inductor_quant.explain(model, x, timings=False, verbose=False)
    path = tmp_path / "roofline.png"
    with pytest.raises(ValueError, match="no GEMM was timed"):
        explanation.plot(path)
    [row] = explanation.rows
    timed = dataclasses.replace(row, timing=roofline.Timing(10.0, 20.0, 0.4))
    dataclasses.replace(explanation, rows=(timed,), roofs={"8 bits": (4.0, 2000.0)}).plot(path)
    assert path.stat().st_size > 1000
