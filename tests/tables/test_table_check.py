"""The kernel that compares tables compiles for each card."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.simulate.compile import compile_jit
from inductor_quant.tables.table_check import _WORDS, BLOCK, TableCheck, differs

pytestmark = pytest.mark.compiles


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_comparison_compiles_without_spills(arch):
    pointers = dict.fromkeys(("tables", "wanted", "sizes"), "*i64")
    for word in _WORDS.values():
        constants = {"WORD": word, "BLOCK": BLOCK}
        kernel = compile_jit(differs, pointers | {"found": "*i32"}, constants, arch=arch)
        assert kernel.spill_stores == kernel.spill_loads == 0


def test_what_the_kernel_finds_is_in_memory_of_the_host_whatever_the_default_device_is():
    table = torch.zeros(8)
    with torch.device("meta"):
        assert TableCheck([table], [table.clone()])._found.device.type == "cpu"
