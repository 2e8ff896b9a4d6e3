"""The benchmark of experts: its layers are recognized, and it prints a line of JSON a cell."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers.integrations.moe")

from examples.benchmarks import experts
from tests.support.graphs.post_grad import capture
from tests.support.sampling import sampled

TINY = experts.Model(8, 2, 256, 128, is_gpt_oss=True)


@pytest.mark.parametrize(
    ("format", "tokens"),
    sampled([("fp8_block", 5), ("fp8_block", 1), ("int4", 5), ("mxfp4", 5), ("int8", 1)], 5),
)
def test_every_layer_is_recognized(format, tokens):
    torch.manual_seed(0)
    layer, args = experts.Experts(TINY, format), experts.routing(TINY, tokens)
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (layer, *args))
        want = layer(*args)
    family = "scaled_experts" if format == "fp8_block" else "experts"
    assert [match.family for match in rewrite.report.matches] == [family] * 2
    assert (got - want).norm() <= 0.03 * want.norm()


@pytest.mark.slow
def test_a_line_for_each_cell(capsys):
    tried = ["--tiny", "--device", "cpu", "--rounds", "2", "--systems", "bf16"]
    experts.main([*tried, "--models", "qwen3", "--formats", "int4", "--tokens", "1", "4"])
    _, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(line["format"], line["tokens"]) for line in lines] == [("int4", 1), ("int4", 4)]
    assert all(line["ours_us"] > 0 and line["of_bf16"] > 0 for line in lines)
    assert all(line["difference"] < 0.01 for line in lines)
