"""Values of ``block_sparse_mm``, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.block_sparse.mm import kernel
from inductor_quant.kernels.config import GemmConfig
from tests.support.gemms.block_sparse import Case, described, gemm, make_inputs, reference
from tests.support.gemms.generated import device, generate
from tests.support.gemms.weight_only import assert_close

pytestmark = pytest.mark.interp

f16, i8, e4m3, i64 = torch.float16, torch.int8, torch.float8_e4m3fn, torch.int64
WIDE, PART = GemmConfig(16, 16, 64, 4, 3), GemmConfig(32, 16, 32, 4, 3)
SPLIT = GemmConfig(16, 32, 64, 4, 3, split_k=3)
ROWS = f"block_sparse_mm_tma {GemmConfig(64, 128, 32, 4, 3)}"
SWAPPED = GemmConfig(256, 64, 64, 4, 5)
TMA = f"block_sparse_mm_tma {GemmConfig(64, 16, 32, 4, 3)}"

CASES = [
    # several blocks a step, and parts of one; M within a tile and beyond (None: the first choice
    # of block_sparse_mm)
    (Case(17, 96, 128, bias=True), None),
    (Case(40, 96, 128, values="placed", order=True, dtype=f16), WIDE),
    (Case(40, 192, 128, (64, 64), values="in_place", index_dtype=i64), PART),
    (Case(33, 96, 128, bias=True, order=True), SPLIT),
    (Case(70, 96, 128, bias=True, order=True, values="placed"), TMA),
    (Case(5, 96, 128, stored=i8, scale="blocks", values="placed", bias=True), None),
    (Case(5, 96, 128, stored=e4m3, scale="rows_of_blocks", order=True), WIDE),
    (Case(17, 192, 128, (64, 64), stored=i8, scale="rows", bias=True, dtype=f16), SPLIT),
    (Case(17, 96, 128, dtype=i8), WIDE),
]
slow = pytest.mark.slow
SLOW = [
    *((Case(m, 128, 256, bias=True), None) for m in (1, 70)),
    *((Case(20, 192, 128, (size, size), dtype=f16), WIDE) for size in (16, 32, 64)),
    *((Case(20, 256, 256, block), PART) for block in ((128, 128), (64, 32), (16, 64), (128, 16))),
    (Case(5, 128, 128, values="placed"), PART),
    (Case(5, 128, 128, values="in_place"), WIDE),
    *((Case(130, 128, 256, (32, 64), values=values), TMA) for values in ("listed", "in_place")),
    # all blocks, and one
    (Case(5, 128, 128, zeros=0.0), WIDE),
    (Case(5, 128, 128, zeros=0.94), WIDE),
    (Case(1, 128, 256, bias=True), SPLIT),
    # int8 and e4m3
    *(
        (Case(m, 128, 256, block, stored=dtype, scale=scale, values=values), config)
        for m, block, values, config in (
            (20, (64, 128), "placed", PART),
            (3, (16, 16), "listed", None),
            (130, (32, 64), "listed", TMA),
        )
        for dtype in (i8, e4m3)
        for scale in ("rows", "blocks", "rows_of_blocks")
    ),
    (Case(20, 128, 256, stored=i8, values="in_place"), WIDE),
    (Case(130, 128, 256, (64, 64), dtype=i8, values="placed"), None),
    # rows of W as those of the instruction
    (Case(300, 128, 128, (64, 64), stored=i8, scale="blocks", bias=True), SWAPPED),
    (Case(300, 384, 256, (128, 128), order=True), f"block_sparse_mm_tma {SWAPPED}"),
    # rows of blocks with one list of columns
    (
        Case(17, 256, 128, rows=2, values="placed", order=True, bias=True),
        GemmConfig(16, 64, 32, 4, 3),
    ),
    *(
        (Case(70, 256, 128, rows=4, values=values, stored=stored, scale=scale), ROWS)
        for values, stored, scale in (
            ("listed", None, ""),
            ("in_place", i8, "rows"),
            ("placed", i8, "blocks"),
            ("listed", e4m3, "rows_of_blocks"),
        )
    ),
    # strides of x
    *((Case(5, 128, 128, layout=layout), WIDE) for layout in ("columns", "every_second")),
]


@pytest.mark.parametrize(
    ("case", "config"), [*CASES, *(pytest.param(*case, marks=slow) for case in SLOW)], ids=str
)
def test_result_is_close_to_fp64(case, config, monkeypatch):
    if "_tma" in str(config):
        monkeypatch.setattr(kernel, "MIN_TMA_M", 1)
        monkeypatch.setattr(kernel, "MIN_TMA_TILES", {})
    if case.order:  # which few CTAs do not read
        monkeypatch.setattr(kernel, "MAX_WARPS", 0)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    spec, problem = described(case)
    mine = kernel.BLOCK_SPARSE_MM.configs(spec, problem, device(90))
    configs = [f"block_sparse_mm {mine[0]}"] if config is None else [config]
    generated = generate(gemm(case), lambda device: make_inputs(case, device), *configs)
    assert any("block_sparse" in name for name in generated.kernels)
    assert any("tl.load(ORDER" in text for text in generated.kernels.values()) == case.order
    got, want = simulate.interpret(generated, inputs), reference(case, inputs)
    if case.dtype == i8:
        assert torch.equal(got.double(), want)
    else:
        assert_close(got, want)


def test_what_is_not_stored_takes_no_part():
    """Neither a column that no block reads nor what lies behind the last block of a row."""
    case = Case(3, 96, 128, zeros=0.6, dtype=f16)
    inputs = make_inputs(case, "cpu")
    unread = {*range(4)} - {column for row, column in case.blocks if row == 0}
    assert 0 < len(unread) < 4
    for column in unread:
        inputs[0][:, 32 * column : 32 * column + 32] = float("inf")
    generated = generate(gemm(case), lambda device: make_inputs(case, device), WIDE)
    got = simulate.interpret(generated, inputs)
    assert got[:, :32].isfinite().all()
    assert (got[:, 32:64] == 0).all()  # a row without blocks


def test_without_blocks_the_result_is_the_bias():
    case = Case(3, 64, 64, zeros=1.0, bias=True)
    inputs = make_inputs(case, "cpu")
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    got = simulate.interpret(generated, inputs)
    assert torch.equal(got, inputs[-1].expand(3, 64))
