"""``python -m inductor_quant codes``: each rejection code with its meaning; CODES.md."""

from __future__ import annotations

from pathlib import Path

from inductor_quant.report import codes
from inductor_quant.spec.decisions import MEANINGS

ROOT = Path(__file__).parents[2]
FILE = ROOT / "inductor_quant" / "report" / "CODES.md"


def test_the_file_is_current():
    """If not: ``python -m inductor_quant codes --markdown > inductor_quant/report/CODES.md``."""
    assert FILE.read_text(encoding="utf-8") == codes.markdown()


def test_the_command_prints_a_line_for_each_code(forks):
    status, printed = forks.python("inductor_quant", "codes")
    assert status == 0
    lines = [line.split(maxsplit=1) for line in printed.splitlines()]
    meanings = [line for line in lines if line[0] != "->"]
    assert meanings == [[code.value, meaning] for code, meaning in MEANINGS.items()]
    assert ["->", "compile with dynamic=False"] in lines
