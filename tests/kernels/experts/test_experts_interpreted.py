"""Numerics of the ``experts`` kernels in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from tests.support.gemms import formats
from tests.support.gemms.experts import Case, gemm, make_inputs, reference
from tests.support.gemms.formats import FORMATS
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import assert_close

pytestmark = pytest.mark.interp

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
MM, MM_16 = "experts_mm 32x16x32_w4_s2_g8", "experts_mm 16x32x32_w2_s4_g8"
DIRECT_8, DIRECT_16 = "experts_direct 8x32x256_w2_s1_g8", "experts_direct 16x64x128_w2_s1_g8"
# empty experts at both ends and between; more than a tile; one with all rows; one row each (fewer
# rows than tiles); none
COUNTS = ((0, 3, 0, 35, 1, 0), (0, 0, 40), (1, 1, 1, 1, 1), (0, 0))
# integers along K and N, a zero point, a table, a table of floats of 4 bits
DIRECT = ("gptq", "awq", "nibble_pairs", "int8_channel", "nf4", "mxfp4", "looked_up", "halves_of_k")


def run(case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generate(gemm(case), lambda device: make_inputs(case, device), config)
    assert ["experts" in name for name in generated.kernels] == [True] * (case.rows > 0)
    return simulate.interpret(generated, inputs), inputs


def check(case, config):
    got, inputs = run(case, config)
    used = sum(case.counts)
    if used:
        assert_close(got, reference(case, inputs), slack=4)  # W is rounded to x's dtype
    assert got.shape[0] == case.rows
    assert not got[used:].any() or not case.is_sorted


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_rows_find_their_expert(counts, is_sorted):
    check(Case("int8_group", counts, 40, 64, 3 * is_sorted, is_sorted), MM_16)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("of_offsets", [torch.int32, torch.int64])
def test_the_library_leaves_no_garbage_in_rows_without_an_expert(dtype, of_offsets, monkeypatch):
    """No kernel has the tile that is asked for."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.manual_seed(0)
    case = Case("int8_group", (0, 3, 0, 5, 1), 40, 64, 3, dtype=dtype)

    def make(device):
        x, offsets, *weight = make_inputs(case, device)
        return x, offsets.to(of_offsets), *weight

    inputs = make("cpu")
    generated = generate(gemm(case), make, "experts_mm 24x32x32_w2_s4_g8")
    torch.use_deterministic_algorithms(True)
    try:
        got = simulate.interpret(generated, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(got[:9], reference(case, inputs)[:9], slack=4)
    assert not got[9:].any()


GATHERED = ({"repeats": 2}, {"has_rows": True}, {"has_rows": True, "repeats": 3})


@pytest.mark.one_in(5)
@pytest.mark.parametrize("gather", GATHERED, ids=str)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("config", [MM_16, DIRECT_8])
def test_rows_of_x_are_read_where_they_are(config, is_sorted, gather, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    name, k = ("nibble_pairs", 256) if config == DIRECT_8 else ("int8_group", 128)
    check(Case(name, (0, 3, 0, 18, 1), 40, k, 2 * is_sorted, is_sorted, **gather), config)


@pytest.mark.parametrize(
    ("name", "config"), list(zip(FORMATS, itertools.cycle((MM, MM_16)), strict=False))
)
@pytest.mark.slow
def test_every_format(name, config):
    check(Case(name, (2, 0, 34), 40, 96, dtype=f32, is_sorted=config == MM), config)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["columns", "every_second"])
def test_strides(layout):
    check(Case("gptq", (2, 0, 17), 40, 96, dtype=f16, layout=layout), MM)


@pytest.mark.slow
@pytest.mark.parametrize("config", [DIRECT_8, DIRECT_16])
@pytest.mark.parametrize("name", DIRECT)
def test_direct(name, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    for is_sorted in (True, False):
        check(Case(name, (0, 3, 0, 18, 1), 72, 256, 2 * is_sorted, is_sorted), config)


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("name", "gather"), [("nibble_pairs", GATHERED[-1]), ("mxfp4", {})])
def test_few_of_16_rows(name, gather, monkeypatch):
    """Some CTAs have more than half a tile's rows, others do not."""
    monkeypatch.setattr(formats, "GROUP", 128)
    check(Case(name, (9, 3, 0, 8, 17), 72, 256, 2, **gather), DIRECT_16)


def test_one_compilation_serves_any_number_of_rows(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    torch.manual_seed(0)
    first = Case("nibble_pairs", (0, 3, 5), 72, 256)

    def make(device):
        x, offsets, *weight = make_inputs(first, device)
        torch._dynamo.mark_dynamic(x, 0)
        return x, offsets, *weight

    for config in (MM, MM_16):
        generated = generate(gemm(first), make, config)
        for counts, left_over in (((0, 0, 1), 0), ((9, 0, 30), 4), ((0, 0, 0), 2)):
            case = Case("nibble_pairs", counts, 72, 256, left_over)
            inputs = make_inputs(case, "cpu")
            got = simulate.interpret(generated, inputs)
            if any(counts):
                assert_close(got, reference(case, inputs), slack=4)
            assert not got[sum(counts) :].any()


@pytest.mark.parametrize("config", [MM_16, DIRECT_8])
@pytest.mark.parametrize("offsets", [(-5, 2, 900), (7, 3, 1), (2**31 - 1, -(2**31), 5)])
def test_arbitrary_offsets_leave_the_rows_they_miss(config, offsets, monkeypatch):
    """Autotuning runs on them: nothing beyond the tensors is read or written."""
    monkeypatch.setattr(formats, "GROUP", 128)
    case = Case("nibble_pairs", (2, 3, 5), 72, 256)
    x, _, *weight = make_inputs(case, "cpu")
    generated = generate(gemm(case), lambda device: make_inputs(case, device), config)
    wide = torch.full((30, 256), float("nan"), dtype=bf16)
    wide[10:20] = x
    route = torch.tensor(offsets, dtype=torch.int32)
    got = simulate.interpret(generated, (wide[10:20], route, *weight))
    assert got.shape == (10, 72)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
def test_loops_of_two_iterations_a_turn(iterations, is_sorted):
    """Also where x is scaled, as columns share what each k has."""
    if not gluon.available():
        pytest.skip("this Triton has no Gluon")
    for name in ("nibble_pairs", "groups_of_n"):
        case = Case(name, (0, 3, 0, 9, 1), 96, 128 * iterations, 2 * is_sorted, is_sorted)
        config = "experts_direct 8x32x128_w2_s1_g8"
        generated = generate(
            gemm(case), lambda device, case=case: make_inputs(case, device), config
        )
        scales_x = any("x_sums" in source for source in generated.kernels.values())
        assert scales_x == (name == "groups_of_n")
        check(case, config)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_stack_with_as_many_rows_of_each(tokens):
    """Where they end is a constant of the graph."""
    torch.manual_seed(0)
    q, s = torch.randint(-9, 9, (3, 64, 256), dtype=torch.int8), torch.rand(3, 64, 1).to(bf16)
    x = torch.randn(3, tokens, 256).to(bf16)

    def product(x, q, s):
        return torch.bmm(x, (q.to(bf16) * s).transpose(1, 2))

    def make(device):
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in (x, q, s))

    generated = generate(product, make)
    assert ["experts" in name for name in generated.kernels] == [True]
    assert_close(
        simulate.interpret(generated, (x, q, s)), x.double() @ (q * s.double()).mT, slack=4
    )
