"""torch.export and AOTInductor: a package runs in a process that knows nothing of us."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.exported import export

pytestmark = pytest.mark.gpu


def test_packages_run_without_the_plugin_and_give_what_torch_compile_gives(tmp_path):
    matched = export(tmp_path, (16, 2048), "cuda")
    assert {name: n for name, n in matched.items() if "2048" not in name} == {
        "w8a8_16": 2,
        "gptq_16": 2,
        "act_order_16": 1,
    }
    assert matched["w8a8_2048"] == 2
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert [line for line in lines if not line.endswith("equal")] == []
