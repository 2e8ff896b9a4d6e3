"""Public names are imported when they are used. (What importing the package brings in, and who may
import it: tests/package/test_layers.py.)"""

from __future__ import annotations

import pytest

from inductor_quant import simulate


def test_public_names_exist():
    assert all(hasattr(simulate, name) for name in simulate.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        simulate.missing  # noqa: B018
