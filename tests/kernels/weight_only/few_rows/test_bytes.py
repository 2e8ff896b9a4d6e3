"""``weight_only_bytes``: which GEMMs it takes, and the machine code."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.codegen.byte_layout import byte_layout_of
from inductor_quant.kernels.problem import Weight, WeightTensor
from inductor_quant.kernels.weight_only.bytes.kernel import WEIGHT_ONLY_BYTES
from inductor_quant.spec.weight_format import AffineIndex, Field, WeightFormat
from tests.support.gemms import formats
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import Case, described, generate_case

pytestmark = pytest.mark.usefixtures("large_groups")

bf16, f32 = torch.bfloat16, torch.float32
BYTES = {"int8_group", "int8_divisor", "int8_folded", "int8_channel"}
FLOATS = {"fp8_row", "fp8_block", "e5m2_group"}


def weight_of(name):
    packed = formats.build(name, 512, 256)
    tensors = tuple(WeightTensor(dtype, shape) for _, shape, dtype in packed.tensors)
    return Weight(packed.format, tensors)


def test_which_formats_are_bytes():
    assert {name for name in formats.FORMATS if byte_layout_of(weight_of(name))} == {
        *BYTES,
        *FLOATS,
        "hqq",
        "groups_of_n",
    }


def test_the_halves_of_a_byte_become_neighbours_along_n():
    found = byte_layout_of(weight_of("hqq"))
    assert found is not None
    weight, numbers = found
    assert (numbers.offsets, numbers.rows, numbers.stride_n) == ((4, 0), 128, 512)
    assert (weight.format.n, str(weight.format.element.offset)) == ((128, 2), "-4*n1+4")
    assert [eval(numbers.column(str(i))) for i in range(4)] == [0, 128, 1, 129]


def test_a_result_of_one_element_is_left_to_the_next_kernel():
    for m, n, is_taken in ((1, 1, False), (2, 1, True), (1, 2, True)):
        spec, problem = described(Case("int8_channel", m, n, 64))
        assert (WEIGHT_ONLY_BYTES.rejection(spec, problem, device(90)) is None) == is_taken


def test_indices_that_are_negative_or_not_linear_are_rejected():
    row, column = AffineIndex(linear=(("n0", 1),)), AffineIndex(linear=(("k0", 1),))

    def taken(k, n, *index, shape=(64, 256, 2)):
        weight = Weight(WeightFormat(k, n, Field(0, index)), (WeightTensor(torch.int8, shape),))
        return byte_layout_of(weight)

    # the last dimension is selected: neighbours along K are two bytes apart
    assert taken((256,), (64,), row, column, AffineIndex()) is None
    assert taken((256,), (64,), row, AffineIndex(const=-1), column, shape=(64, 2, 256)) is None
    found = taken((256,), (64,), row, AffineIndex(const=1), column, shape=(64, 2, 256))
    assert found is not None
    assert (found[1].stride_n, found[1].start) == (512, 256)
    # the two halves of K are swapped
    swapped = AffineIndex(tables=(("k0", (128, 0)),), linear=(("k1", 1),))
    assert taken((2, 128), (64,), row, swapped, shape=(64, 256)) is None


@pytest.mark.parametrize(("m", "split"), [(1, 4), (16, 4), (64, 4), (128, 8)])
def test_sizes_that_no_tile_divides_are_taken_if_scales_are_of_columns(m, split):
    """SigLIP's MLP: 4304 = 16 * 269."""
    spec, problem = described(Case("int8_channel", m, 1152, 4304))
    assert WEIGHT_ONLY_BYTES.rejection(spec, problem, device(90)) is None
    assert WEIGHT_ONLY_BYTES.configs(spec, problem, device(90))[0].split_k == split


@pytest.mark.parametrize(
    "case",
    [
        Case("int8_channel", 129, 512, 512),
        Case("int8_channel", 65, 16384, 512),
        Case("int8_channel", 4, 512, 512, f32),
        Case("int8_zero_channel", 4, 512, 512),  # [K, N]
        Case("hqq", 33, 512, 512),
        Case("gptq", 4, 512, 512),
    ],
    ids=str,
)
def test_rejected_gemms(case):
    spec, problem = described(case)
    assert WEIGHT_ONLY_BYTES.rejection(spec, problem, device(90)) is not None


@pytest.mark.parametrize("m", [1, 16, 32, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (6144, 4096), (4096, 14336), (256, 512)])
def test_configurations_are_legal_and_share_the_split(m, n, k):
    for name in ("int8_channel", "fp8_row", "hqq"):
        spec, problem = described(Case(name, m, n, k))
        if WEIGHT_ONLY_BYTES.rejection(spec, problem, device(90)) is not None:
            continue
        found = WEIGHT_ONLY_BYTES.configs(spec, problem, device(90))
        assert len(set(found)) == len(found) >= 1
        assert len({config.split_k for config in found}) == 1
    odd = described(Case("int8_group", 4, 200, 512))
    assert WEIGHT_ONLY_BYTES.configs(*odd, device(90)) == []


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "arch", "instruction", "each"),
    [
        ("int8_channel", 90, "fma.rn.bf16x2", 2),  # values per register
        ("fp8_row", 90, "cvt.rn.f16x2.e4m3x2", 2),
        ("hqq", 90, "lop3.b32", 2),
        ("int8_channel", 80, "fma.rn.bf16x2", 2),
    ],
)
def test_bytes_are_converted_where_they_are_multiplied(name, arch, instruction, each):
    """``ldmatrix`` brings four neighbours along K to each thread; only the accumulators go back to
    shared memory, on their way out; nothing spills."""
    case = Case(name, 16, 16384, 2048)
    spec, problem = described(case)
    config = WEIGHT_ONLY_BYTES.configs(spec, problem, device(arch))[0]
    kernels = generate_case(case, f"weight_only_bytes {config}", arch=arch).kernels
    [(text, source)] = [(n, s) for n, s in kernels.items() if "w_offsets = bytes_n" in s]
    kernel = simulate.compile_kernel(text, source)
    assert kernel.spill_stores == 0
    numbers = config.block_n * config.block_k // (32 * config.num_warps)
    assert kernel.ptx.count(instruction) == numbers // each
    assert kernel.ptx.count("ldmatrix") >= numbers // (32 if name == "hqq" else 16)
    assert kernel.ptx.count("st.shared") <= 16
    assert any("mma.sync" in name for name in kernel.matrix_instructions())
