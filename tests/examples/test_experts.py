"""The benchmark of experts: its layers are recognized, and it prints a line of JSON a cell."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers.integrations.moe")

from examples.benchmarks import experts
from examples.benchmarks.workers import expert_layers
from tests.support.graphs.post_grad import capture
from tests.support.sampling import sampled

TINY = experts.Model(8, 2, 256, 128, is_gpt_oss=True)


@pytest.mark.parametrize(
    ("format", "tokens"),
    sampled(
        [
            ("fp8_block", 5),
            ("fp8_block", 1),
            ("int4", 5),
            ("mxfp4", 5),
            ("int8", 1),
            ("nvfp4", 5),
            ("w8a8", 5),
            ("w8a8", 1),
        ],
        8,
    ),
)
def test_every_layer_is_recognized(format, tokens):
    torch.manual_seed(0)
    layer = expert_layers.Experts(TINY, format)
    args = layer.draw(tokens)
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (layer, *args))
        want = layer.one_by_one(*args)
    family = "scaled_experts" if format in experts.OF_8_BIT_ROWS else "experts"
    assert [match.family for match in rewrite.report.matches] == [family] * 2
    assert (got - want).norm() <= 0.03 * want.norm()


def test_the_published_product_is_recognized_as_it_is_given():
    torch.manual_seed(0)
    layer = expert_layers.Product(4, 256, 128, "fp8_block")
    args = layer.draw(3)
    assert [t.dtype for t in args] == [torch.float8_e4m3fn, torch.float32, torch.int32]
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (layer, *args))
        want = layer.one_by_one(*args)
    assert [match.family for match in rewrite.report.matches] == ["scaled_experts"]
    assert (got - want).norm() <= 0.01 * want.norm()
    [(moved, operations)] = layer.least(12, 2)
    assert operations == 2 * 12 * 256 * 128
    assert moved == (256 * 128 + 2 * 4) * 2 + 12 * (128 + 256) * 2


def test_a_line_has_what_the_systems_say():
    least = [[8e6, 1e6], [1e6, 4e9]]
    sizes = {"weights_mb": 2.5, "dense_mb": 9.0, "peak_mb": 1.25}
    reply = {"difference": 0.0021, "hit": 3.0, "least": least, **sizes}
    found = {
        "systems": {
            "ours": reply | {"us": [9.0, 10.0, 11.0], "products_us": 8.04},
            "stock": reply | {"us": [39.0, 40.0, 41.0], "peak_mb": 12.0},
            "vllm": {"failed": "not measured: no"},
        },
        "ratios": {"ours/stock": [0.2, 0.25, 0.3]},
    }
    ceilings = {"16 bits": [4e12, 1e15], "8 bits": [4e12, 2e15]}
    request = {"model": "qwen3", "format": "int4", "tokens": 4}
    line = experts.line(request, found, ceilings)
    assert line == request | {
        "hit": 3.0,
        "weights_mb": 2.5,
        "dense_mb": 9.0,
        "floor_us": 6.0,
        "ours_us": 10.0,
        "ours_difference": 0.0021,
        "ours_products_us": 8.0,
        "of_floor": 1.33,
        "ours_peak_mb": 1.2,
        "stock_us": 40.0,
        "stock_difference": 0.0021,
        "stock_peak_mb": 12.0,
        "vllm_failed": "not measured: no",
        "of_stock": 0.25,
    }
    request = {"model": "4x8192", "format": "fp8_block", "tokens": 8192}
    line = experts.line(request, found, {})
    assert line["ours_tflops"] == pytest.approx(400.1)
    assert line["published_tflops"] == 1381
    assert "floor_us" not in line


@pytest.mark.slow
@pytest.mark.parametrize("which", ["layer", "product"])
def test_a_line_for_each_cell(which, capsys):
    layer = ["--models", "qwen3", "--formats", "int4", "--tokens", "1", "4"]
    tried = ["--tiny", "--device", "cpu", "--rounds", "2", "--systems", "bf16"]
    experts.main([*tried, *(layer if which == "layer" else ["--published"])])
    _, _, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    cells = [(line["model"], line["format"], line["tokens"]) for line in lines]
    if which == "layer":
        assert cells == [("qwen3", "int4", 1), ("qwen3", "int4", 4)]
    else:
        assert cells == [(name, "fp8_block", 16) for name in ("8x16", "16x16")] + [
            ("4x8192", "fp8_block", 32)
        ]
    assert all(line["ours_us"] > 0 and line["of_bf16"] > 0 for line in lines)
    assert all(line["ours_difference"] < 0.01 for line in lines)
