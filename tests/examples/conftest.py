from __future__ import annotations

import pytest

from tests.support.benchmarks import WORKER


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path
