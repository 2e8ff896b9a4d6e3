"""What CI takes of a long list of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], every: int = 2, ids: Any = None) -> list[Any]:
    """The first of each ``every`` values; the others are marked ``slow``. A tuple is several
    parameters. ``ids``: value -> its id."""
    return [
        pytest.param(
            *(value if type(value) is tuple else (value,)),
            marks=() if i % every == 0 else pytest.mark.slow,
            **({} if ids is None else {"id": ids(value)}),
        )
        for i, value in enumerate(values)
    ]
