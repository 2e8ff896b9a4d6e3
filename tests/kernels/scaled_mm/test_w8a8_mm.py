"""The code that Inductor generates for virtual GPUs: fusion, and what ptxas makes of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton

from inductor_quant import simulate
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.errors import ConfigTableError
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import Problem
from inductor_quant.kernels.scaled_mm.mm.kernel import W8A8_MM
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.report.events import collect
from inductor_quant.spec.gemm import OperandSpec, QuantGemmSpec
from tests.support.gemms.generated import device, generate, hardest
from tests.support.gemms.w8a8 import Case, gemm, make_inputs

pytestmark = pytest.mark.compiles

ARCHS = (80, 89, 90, 100)
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

# The matrix instruction of an int8 dot. Before Triton 3.8, Blackwell runs that of Ampere.
INSTRUCTION = {
    80: "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
    89: "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
    90: ".s32.s8.s8",
    100: "tcgen05.mma" if TRITON >= (3, 8) else "mma.sync",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_gelu_and_residual_are_in_the_one_kernel(arch):
    case = Case(64, 512, 256)

    def fn(residual, *inputs):
        return F.gelu(gemm(case)(*inputs)) + residual

    def make(device):
        residual = torch.empty(64, 512, dtype=torch.bfloat16, device=device)
        return residual, *make_inputs(case, device)

    generated = generate(fn, make, arch=arch)
    [(name, source)] = generated.kernels.items()
    assert name.startswith("triton_tem_fused")
    assert "w8a8" in name
    assert "libdevice.erf" in source
    assert "extern_kernels._int_mm" not in generated.wrapper


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_silu_times_up_is_fused(arch):
    case = Case(64, 512, 256, bias=False)

    def fn(up, *inputs):
        return F.silu(gemm(case)(*inputs)) * up

    def make(device):
        return torch.empty(64, 512, dtype=torch.bfloat16, device=device), *make_inputs(case, device)

    assert len(generate(fn, make, arch=arch).kernels) == 1


def test_a_transposed_weight_is_not_copied():
    """Its strides go into the template."""
    for layout in ("rows", "columns", "sliced", "every_second"):
        case = Case(64, 128, 96, w_layout=layout)
        assert len(generate(gemm(case), lambda d, case=case: make_inputs(case, d)).kernels) == 1


def test_default_mode_offers_one_choice_and_autotune_at_most_its_limit():
    case = Case(64, 512, 256)
    with collect() as report:
        generate(gemm(case), lambda d: make_inputs(case, d))
        generate(gemm(case), lambda d: make_inputs(case, d), config={"max_autotune": True})
    assert [len(choice.offered) for choice in report.kernels] == [1, 12]


REST = ((80, 2), (89, 2), (90, 99), (100, 2))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arch", "count"),
    [(80, 1), (90, 3), (100, 1), *(pytest.param(*of, marks=pytest.mark.slow) for of in REST)],
)
def test_configurations_use_the_matrix_unit_and_do_not_spill(arch, count):
    """Legal tiles of the table, those with the largest tile per warp."""
    case = Case(300, 512, 1024)
    configs = hardest(
        (
            entry.config
            for entry in cost_model.load("w8a8_mm", 90).configs
            if tile_rejection(entry.config, device(arch), element_bytes=1) is None
        ),
        count,
    )
    found = {}
    for config in configs:
        generated = generate(gemm(case), lambda d: make_inputs(case, d), config, arch=arch)
        [(name, source)] = generated.kernels.items()
        kernel = simulate.compile_kernel(name, source)
        limit = simulate.GPUS[arch].shared_memory_per_block_optin
        assert kernel.shared_bytes <= limit, config
        assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
        instructions = kernel.matrix_instructions()
        # Blackwell's needs 64 rows; smaller tiles use that of Ampere
        is_small = arch == 100 and config.block_m < 64
        wanted = "mma.sync" if is_small else INSTRUCTION[arch]
        found[config] = any(wanted in opcode for opcode in instructions)
        if arch == 90 and config.block_m >= 64:
            assert any(opcode.startswith("wgmma") for opcode in instructions), config
    assert found
    assert all(found.values()), found


@pytest.mark.parametrize(("k", "is_refused"), [(4096, False), (4092, False), (4093, True)])
@pytest.mark.parametrize("arch", ARCHS)
def test_rows_that_begin_at_any_byte_have_small_tiles(k, is_refused, arch):
    """Their bytes take a register each."""
    problem, gpu = Problem(512, 512, k), device(arch)
    spec = QuantGemmSpec(OperandSpec(torch.int8), OperandSpec(torch.int8), torch.bfloat16)
    refused = {
        str(config): W8A8_MM.config_rejection(spec, problem, config, gpu)
        for config in (GemmConfig(64, 64, 128, 4, 4), GemmConfig(64, 32, 64, 4, 8))
    }
    large, small = refused.values()
    assert small is None
    assert (large is not None) == is_refused
    usable = [
        config
        for config in W8A8_MM.configs(spec, problem, gpu)
        if W8A8_MM.config_rejection(spec, problem, config, gpu) is None
    ]
    assert len(usable) >= 4
    assert usable[0].block_m * usable[0].block_n > 16 * 16  # the smallest loads bytes most often


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_value_is_rounded_once(out_dtype):
    """fp32 up to the store: no narrowing cast in the template's own code."""
    case = Case(64, 512, 256, out_dtype=out_dtype)
    generated = generate(gemm(case), lambda d: make_inputs(case, d))
    [source] = generated.kernels.values()
    body = source[source.index("acc = ") : source.index("mask = ")]
    assert "bfloat16" not in body
    assert "float16)" not in body


def test_offsets_are_64_bit_only_where_the_tensors_need_it():
    for case, dtype in (
        (Case(64, 512, 256), "tl.int32"),
        (Case(66000, 32768, 32), "tl.int64"),
        (Case(33, 66000, 32768), "tl.int64"),
    ):
        generated = generate(gemm(case), lambda d, case=case: make_inputs(case, d))
        [(name, source)] = generated.kernels.items()
        assert f"INDEX_DTYPE : tl.constexpr = {dtype}" in source
        assert simulate.compile_kernel(name, source).spill_stores == 0


@pytest.mark.parametrize(
    ("m", "n", "is_masked"),
    [(1, 512, True), (15, 512, True), (16, 512, False), (100, 512, False), (1, 1, False)],
)
def test_rows_beyond_m_are_masked(m, n, is_masked):
    """Else all rows of a tile would read the same L2 lines. A 1x1 result is stored from the whole
    tile, which must hold one value, so there they are not."""
    case = Case(m, n, 512)
    config = GemmConfig(16, 64, 128, num_warps=4, num_stages=4)
    generated = generate(gemm(case), lambda d: make_inputs(case, d), f"w8a8_mm {config}")
    [source] = generated.kernels.values()
    load = source[source.index("a = tl.load(") : source.index("b = tl.load(")]
    assert ("rm[:, None] < M" in load) == is_masked


def test_an_empty_result_launches_no_gemm():
    for case in (Case(0, 64, 32), Case(8, 0, 32)):
        generated = generate(gemm(case), lambda d, case=case: make_inputs(case, d))
        assert "w8a8_mm" not in generated.wrapper


def test_a_dynamic_m_is_a_kernel_argument():
    case = Case(64, 512, 256)

    def make(device):
        inputs = make_inputs(case, device)
        for tensor in (inputs[0], inputs[2]):
            torch._dynamo.mark_dynamic(tensor, 0)
        return inputs

    [source] = generate(gemm(case), make).kernels.values()
    assert "M = ks0" in source
    assert "N = 512" in source


def test_the_second_device_is_used():
    case = Case(64, 512, 256)

    def make(device):
        return tuple(
            None
            if t is None
            else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:1")
            for t in make_inputs(case, "meta")
        )

    generated = generate(gemm(case), make)
    assert generated.output.device == torch.device("cuda:1")
    assert "_DeviceGuard(1)" in generated.wrapper


def test_a_failure_while_lowering_leaves_the_gemm(monkeypatch):
    """The model compiles as with stock Inductor, with one warning; ``on_error="raise"`` raises."""
    case = Case(64, 512, 256)

    def fail(*_):
        raise ConfigTableError("broken")

    monkeypatch.setattr(cost_model, "load", fail)

    def compile_with(on_error):
        return simulate.generate(
            gemm(case),
            lambda d: make_inputs(case, d),
            backend=inductor_quant_backend,
            options={"inductor_quant.on_error": on_error},
        )

    with pytest.warns(RuntimeWarning, match="left it as it was"):
        generated = compile_with("fallback")
    assert "extern_kernels._int_mm" in generated.wrapper
    with pytest.raises(Exception, match="broken"):
        compile_with("raise")
