"""The serving trace: what is drawn, and the script without a GPU."""

from __future__ import annotations

import json
import threading
import time

import pytest

from examples.benchmarks import dynamic_llama, serving
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


@pytest.mark.compiles
@pytest.mark.slow
def test_each_size_is_compared_with_a_static_compilation(monkeypatch, capsys, tmp_path):
    """Without Inductor: prompts, and batches of tokens."""
    monkeypatch.setattr(serving, "SYSTEMS", dict.fromkeys(serving.SYSTEMS, "eager"))
    path = tmp_path / "sizes.jsonl"
    arguments = ("--tiny", "--formats", "gptq", "--rounds", 1, "--m", 1, 5, 16, "--batches", 2)
    run_main(monkeypatch, dynamic_llama, *arguments, "--lock", tmp_path / "lock", "--json", path)
    _, *lines, last = map(json.loads, path.read_text().splitlines())
    assert [(line.get("m"), line.get("batch")) for line in lines] == [
        *((1, None), (5, None), (16, None), (None, 2))
    ]
    assert all(line["ratio"] > 0 and line["called_ratio"] > 0 for line in lines)
    assert all(len(line["compile_s"]) == 2 for line in lines)
    assert last["worst"] == max(line["ratio"] for line in lines)
    run_main(
        monkeypatch, dynamic_llama, "--tiny", "--formats", "gptq", "--m", 5, "--compile", "ours"
    )
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made.keys() == {"format", "m", "compile_s", "rows"}
    assert len(made["compile_s"]) == 1


def test_each_is_timed_alone_when_all_have_compiled(tmp_path):
    """Threads: a lock belongs to an open file, not to a process."""
    both_compile, events = threading.Barrier(2), []

    def run(name, seconds):
        with dynamic_llama.alone(tmp_path / "lock") as wait:
            both_compile.wait(60)
            time.sleep(seconds)
            events.append("compiled")
            wait()
            events.append(name)
            time.sleep(0.2)
            events.append(name)

    threads = [threading.Thread(target=run, args=each) for each in (("a", 0), ("b", 0.5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events in (["compiled"] * 2 + order for order in (list("aabb"), list("bbaa")))
