"""The example and the benchmark of block-sparse weights, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from examples import block_sparse as example
from examples.benchmarks import block_sparse as benchmark
from tests.support.benchmarks import run_main


def test_the_blocks_of_the_least_norm_go() -> None:
    weight = torch.ones(4, 32, 2, 32) * torch.arange(1.0, 9.0).view(4, 1, 2, 1)
    kept = example.pruned(weight.reshape(128, 64), 32, 0.75).view(4, 32, 2, 32)
    assert kept[:, 0, :, 0].flatten().tolist() == [0] * 6 + [7, 8]


@pytest.mark.filterwarnings("ignore:Sparse BSR")
def test_both_forms_of_the_pruned_model_have_its_weights() -> None:
    with torch.no_grad():
        models = example.systems(example.MODELS["tiny"], 32, 0.75, torch.float16, "cpu")
        x = torch.randn(32, 128).half()
        assert torch.equal(models["ours"](x), models["dense"](x))
    pairs = zip(models["dense"].modules(), models["bsr"].modules(), strict=True)
    weights = [(a.weight, b.weight) for a, b in pairs if isinstance(a, torch.nn.Linear)]
    assert len(weights) == 4
    assert all(torch.equal(b.to_dense(), a) for a, b in weights)


def test_a_line_for_each_cell(monkeypatch, capsys, tmp_path) -> None:
    path = tmp_path / "lines"
    assert run_main(monkeypatch, benchmark, "--tiny", "--rounds", 2, "--json", path) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["stored"] for line in lines] == ["", "int8"]
    assert all(line["error"] < benchmark.MAX_ERROR for line in lines)
    assert {"ours_us", "dense_us", "blocks_us", "of_dense", "of_blocks"} <= lines[1].keys()
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    bars = list(benchmark.targets())
    assert len(bars) == len(set(bars)) == 48 + 20 + 4
