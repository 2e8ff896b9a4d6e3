"""The serving trace: what is drawn, and the script without a GPU."""

from __future__ import annotations

import json

import pytest

from examples.benchmarks import serving
from tests.support.benchmarks import run_main


def test_a_trace_serves_each_request_once():
    trace = serving.Trace.draw(23, 200, 4000, 8, 64, 64)
    assert trace == serving.Trace.draw(23, 200, 4000, 8, 64, 64)
    assert trace != serving.Trace.draw(24, 200, 4000, 8, 64, 64)
    assert len(trace.prompts) == sum(trace.batches) == 200
    assert (min(trace.prompts), max(trace.prompts), max(trace.batches)) == (8, 4000, 64)
    assert len(set(trace.prompts)) == 8


@pytest.mark.compiles
@pytest.mark.slow
def test_every_system_computes_the_same_tokens(monkeypatch, capsys, tmp_path):
    """Without Inductor. One graph for prompts, two for tokens; the oracle one for each size."""
    monkeypatch.setattr(serving, "SYSTEMS", dict.fromkeys(serving.SYSTEMS, "eager"))
    path = tmp_path / "serving.jsonl"
    run_main(monkeypatch, serving, "--quick", "--formats", "gptq", "--rounds", 1, "--json", path)
    head, *lines = map(json.loads, path.read_text().splitlines())
    sizes = len({*head["prompts"]}) + len({*head["batches"]})
    graphs = {line["system"]: line["graphs"] for line in lines if "graphs" in line}
    assert graphs == {"ours": 3, "oracle": sizes, "stock": 3}
    assert [line["tokens_like_ours"] for line in lines if "seconds" in line] == [1.0] * 3
    assert [line["ours_of"] for line in lines if "ratio" in line] == ["oracle", "stock"]
    assert "ours_of" in capsys.readouterr().out
