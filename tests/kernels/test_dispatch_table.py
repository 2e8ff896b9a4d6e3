"""The dispatch table of ``kernels/README.md`` is that of ``KERNELS``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import inductor_quant.kernels
from inductor_quant.kernels import KERNELS
from inductor_quant.kernels.problem import DECODE_M, MEDIUM_M, SMALL_M

FOLDER = Path(inductor_quant.kernels.__file__).parent
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")
# (family, name, file)
ROWS = re.findall(
    r"^\| `(\w+)` \| [^|]+ \| `(\w+)` \| \[[\w/.]+\]\(([\w/.]+)\) \|$", TEXT, re.MULTILINE
)


def test_one_row_per_kernel_in_the_order_of_preference():
    assert len(ROWS) == TEXT.count("/kernel.py) |")  # no row that the pattern misses
    assert [(family, name) for family, name, _ in ROWS] == [(k.family, k.name) for k in KERNELS]
    assert all(name.startswith(family) for family, name, _ in ROWS)


def test_the_file_defines_the_class_and_stands_beside_the_template():
    for kernel, (_, name, file) in zip(KERNELS, ROWS, strict=True):
        defined_in = inspect.getsourcefile(type(kernel))
        assert defined_in is not None
        assert Path(defined_in) == FOLDER / file, name
        assert (FOLDER / f"{kernel.template}.py.jinja").is_file(), name
        # or beside that of another family, which it shares
        assert Path(kernel.template).parent.name == Path(file).parent.name, name


def test_every_kernel_file_is_in_the_table():
    found = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*/kernel.py")}
    assert {file for *_, file in ROWS} == found


def test_regimes_are_those_of_the_code():
    for name, most in (("decode", DECODE_M), ("small_m", SMALL_M), ("medium_m", MEDIUM_M)):
        assert f"| {name} | M <= {most} |" in TEXT
