"""Code of choices is written, and imported only to be timed."""

from __future__ import annotations

import pytest
from torch._inductor.codecache import PyCodeCache

from inductor_quant import simulate
from tests.support.gemms import w8a8
from tests.support.gemms.generated import generate

pytestmark = pytest.mark.compiles


@pytest.fixture
def imported(monkeypatch):
    """Paths of the modules that are imported."""
    found, load = [], PyCodeCache.load_by_key_path

    def recorded(key, path, *args, **kwargs):
        found.append(path)
        return load(key, path, *args, **kwargs)

    monkeypatch.setattr(PyCodeCache, "load_by_key_path", recorded)
    return found


def test_a_choice_is_not_imported_before_it_is_timed(imported):
    case = w8a8.Case(16, 256, 512)
    made = generate(w8a8.gemm(case), lambda device: w8a8.make_inputs(case, device))
    [[choice]] = made.choices
    path, key = choice.bmreq.module_path, choice.bmreq.module_cache_key
    assert imported
    assert path not in imported
    with simulate.compile.without_driver():
        module = PyCodeCache.load_by_key_path(key, path)
    assert callable(getattr(module, choice.bmreq.kernel_name).run)
