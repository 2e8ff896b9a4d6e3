"""Each kernel at odd sizes, and again a thousand times beside another stream's load.

``python -m tests.support.gpu.sanitize`` runs the same GEMMs under compute-sanitizer."""

from __future__ import annotations

import pytest

from tests.support.gemms import each_kernel, formats
from tests.support.gpu import sanitize

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.mark.parametrize("kernel", each_kernel.GEMMS)
def test_every_element_is_right_and_every_repetition_equal(kernel, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", each_kernel.GROUP)
    assert sanitize.check(kernel) == ""
