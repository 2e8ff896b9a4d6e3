"""Values of ``block_sparse_direct``, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.block_sparse.mm import kernel as mm_kernel
from inductor_quant.kernels.config import GemmConfig
from tests.support.gemms.block_sparse import Case, gemm, make_inputs, reference
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import assert_close

pytestmark = pytest.mark.interp

f16, i8, e4m3, i64 = torch.float16, torch.int8, torch.float8_e4m3fn, torch.int64

CASES = [
    # one step, several, several units a warp; blocks of several units, parts of their rows
    (Case(5, 96, 128, bias=True, order=True), None),
    (Case(1, 96, 512, bias=True), GemmConfig(8, 32, 64, 2, 1)),
    (
        Case(13, 128, 256, (64, 64), bias=True, values="placed", dtype=f16),
        GemmConfig(16, 16, 256, 4, 1),
    ),
    (Case(5, 96, 128, stored=i8, scale="blocks", values="placed", bias=True), None),
    (
        Case(5, 128, 256, (64, 32), stored=i8, scale="rows_of_blocks", order=True),
        GemmConfig(8, 32, 128, 2, 1),
    ),
    (Case(9, 128, 256, (32, 128), stored=e4m3, scale="rows_of_blocks", values="placed"), None),
    (Case(9, 128, 256, (32, 128), stored=i8, scale="rows", dtype=f16, values="in_place"), None),
    (Case(1, 128, 256, (16, 64), stored=e4m3, scale="rows", dtype=f16), None),
    (Case(16, 128, 256, values="in_place", index_dtype=i64), GemmConfig(16, 32, 64, 1, 1)),
    (Case(16, 128, 128, zeros=0.0), None),
    # several tiles of rows, the last one in part
    (Case(40, 128, 256, bias=True, order=True), None),
    (Case(33, 128, 256, (64, 32), stored=i8, scale="rows_of_blocks"), None),
    (Case(2, 128, 128, zeros=0.94, stored=i8), None),
]


@pytest.mark.parametrize(("case", "config"), CASES, ids=str)
def test_result_is_close_to_fp64(case, config, monkeypatch):
    if case.order:  # which few CTAs do not read
        monkeypatch.setattr(mm_kernel, "MAX_WARPS", 0)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    configs = [] if config is None else [f"block_sparse_direct {config}"]
    generated = generate(gemm(case), lambda device: make_inputs(case, device), *configs)
    [source] = (text for text in generated.kernels.values() if "@gluon.jit" in text)
    assert ("gl.load(ORDER" in source) == case.order
    got = simulate.interpret(generated, inputs)
    assert_close(got, reference(case, inputs, rounds=False))


def test_what_is_not_stored_takes_no_part():
    """Neither a column that no block reads, nor columns beyond the blocks of a row."""
    case = Case(3, 96, 128, zeros=0.6, dtype=f16)
    inputs = make_inputs(case, "cpu")
    unread = {*range(4)} - {column for row, column in case.blocks if row == 0}
    assert 0 < len(unread) < 4
    for column in unread:
        inputs[0][:, 32 * column : 32 * column + 32] = float("inf")
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    got = simulate.interpret(generated, inputs)
    assert got[:, :32].isfinite().all()
    assert (got[:, 32:64] == 0).all()  # a row without blocks


def test_every_int8_and_every_e4m3_is_converted_exactly():
    """x is one in one column at a time."""
    for dtype, stored in ((torch.bfloat16, i8), (f16, i8), (torch.bfloat16, e4m3), (f16, e4m3)):
        case = Case(16, 32, 32, zeros=0.0, dtype=dtype, stored=stored)
        x, values, *others = make_inputs(case, "cpu")
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        codes = codes.clone() if stored == i8 else torch.where(codes % 128 == 127, 0, codes)
        values = codes.repeat(4).view(1, 32, 32).view(stored)
        x = torch.eye(32, dtype=dtype)[:16].contiguous()
        generated = generate(gemm(case), lambda device, case=case: make_inputs(case, device))
        got = simulate.interpret(generated, (x, values, *others))
        assert torch.equal(got.double(), values[0].double().t()[:16])
