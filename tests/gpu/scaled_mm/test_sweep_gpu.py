"""Every number of rows: what calls a library that refuses some is computed all the same.

``python -m tests.support.gpu.sweep`` has every size."""

from __future__ import annotations

import pytest

from tests.support.gpu import sweep

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_each_m_through_one_graph_is_right(family):
    found = {what: why for what, why in sweep.every_m(family) if why}
    assert found == {}


@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_static_rows_of_two_layers_are_right(family):
    found = {what: why for what, why in sweep.at_sizes(family, [sweep.AT, (320, 7168)]) if why}
    assert found == {}
