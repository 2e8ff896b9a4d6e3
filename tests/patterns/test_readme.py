"""patterns/README.md names files and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

PATTERNS = Path(__file__).parents[2] / "patterns"
TEXT = (PATTERNS / "README.md").read_text()


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 15
    assert [link for link in links if not (PATTERNS / link).exists()] == []


def test_every_function_of_the_table_is_defined_where_it_says() -> None:
    places = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", TEXT)
    assert len(places) > 12
    missing = []
    for name, functions in places:
        source = (PATTERNS / name).read_text()
        for function in re.findall(r"[\w.]+", functions):
            names = "|".join(function.split("."))
            found = set(re.findall(rf"(?:def |class |^)({names})\b", source, re.MULTILINE))
            if found != set(function.split(".")):
                missing.append(f"{name}: {function}")
    assert missing == []
