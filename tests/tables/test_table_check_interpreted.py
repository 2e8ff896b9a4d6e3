"""The kernel that compares tables, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.tables.table_check import TableCheck

pytestmark = pytest.mark.interp


def is_equal(tables, wanted):
    check = TableCheck(tables, wanted)
    check.launch(check._found)
    return not check._found.item()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("size", [1, 7, 2048, 5000])
def test_a_difference_in_any_element_is_found(dtype, size):
    tables = [torch.arange(3), torch.randint(0, 99, (size,)).to(dtype)]
    wanted = [table.clone() for table in tables]
    assert is_equal(tables, wanted)
    for at in {0, size // 2, size - 1}:
        tables[1][at] += 1
        assert not is_equal(tables, wanted)
        tables[1][at] -= 1
    assert is_equal(tables, wanted)


def test_a_table_at_an_odd_address_is_compared():
    memory = torch.arange(9, dtype=torch.uint8)
    tables, wanted = [memory[1:]], [memory[1:].clone()]
    assert is_equal(tables, wanted)
    memory[8] = 0
    assert not is_equal(tables, wanted)
