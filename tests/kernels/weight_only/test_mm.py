"""``weight_only_mm`` on virtual GPUs: configurations, generated code, machine code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.kernels.config import RESERVED_SHARED_MEMORY, GemmConfig
from inductor_quant.kernels.dispatch import DEQUANTIZE_THEN_MM
from inductor_quant.kernels.weight_only.mm.kernel import WEIGHT_ONLY_MM, WeightOnlyMM
from inductor_quant.report.events import collect
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms.formats import FORMATS
from tests.support.gemms.generated import device, generate, hardest
from tests.support.gemms.weight_only import Case, described, gemm, generate_case, make_inputs
from tests.support.sampling import sampled

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
ARCHS = (80, 89, 90, 100)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("m", [1, 16, 33, 64, 128])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gets_several_legal_configurations(name, arch, m):
    for k, n, dtype in ((4096, 16384, bf16), (96, 40, f16), (4096, 16384, f32)):
        spec, problem = described(Case(name, m, n, k, dtype))
        found = WEIGHT_ONLY_MM.configs(spec, problem, device(arch))
        if name == "ten_parts":  # places that are computed: W is written once, as the graph does
            assert not found
            continue
        if name in ("shards", "crossing") and m > 16:  # several fields: W is written once
            assert not found
            continue
        if arch == 90 and m > 16:  # where the library is faster, none
            assert WEIGHT_ONLY_MM.configs(spec, problem, device(80))
            continue
        # each bit of a number that crosses words is loaded: one tile fits into 99 KB
        assert len(found) >= (1 if (name, arch) == ("crossing", 89) else 2)
        assert len(set(found)) == len(found)
        for config in found:
            assert WEIGHT_ONLY_MM.config_rejection(spec, problem, config, device(arch)) is None


@pytest.mark.parametrize(
    ("name", "most"), [("gptq", 128), ("nf4", 128), ("int8_channel", 512), ("fp8_row", 512)]
)
def test_at_large_m_the_weight_is_dequantized_once(name, most):
    for m, has_kernel in ((most, True), (most + 1, False)):
        spec, problem = described(Case(name, m, 512, 1024))
        assert bool(WEIGHT_ONLY_MM.configs(spec, problem, device(80))) == has_kernel
    with collect() as report:
        generated = generate_case(Case(name, most + 1, 512, 1024), arch=80)
    assert [choice.chosen for choice in report.kernels] == [DEQUANTIZE_THEN_MM]
    assert "extern_kernels.mm" in generated.wrapper
    along_k = name in ("nf4", "int8_channel")  # as their bytes; the others are [K, N]
    assert f"((1024, 512), {(1, 1024) if along_k else (512, 1)}" in generated.wrapper
    assert not any("weight_only_mm" in source for source in generated.kernels.values())


@pytest.mark.compiles
def test_at_large_m_cublas_adds_the_bias():
    """A bias that the graph adds after the product, as GPTQ layers do."""

    def fn(x, w, scale, bias):
        dense = w.to(f16).view(-1, 64, 512) * scale[:, None]
        return x @ dense.view(-1, 512) + bias

    def make(device):
        w = torch.empty(1024, 512, dtype=torch.int8, device=device)
        shapes = (600, 1024), (16, 512), (512,)
        x, *scale_and_bias = (torch.empty(s, dtype=f16, device=device) for s in shapes)
        return x, w, *scale_and_bias

    generated = generate(fn, make, arch=80)
    assert "extern_kernels.addmm" in generated.wrapper
    assert len(generated.kernels) == 1, list(generated.kernels)


@pytest.mark.compiles
@pytest.mark.parametrize(("dtype", "product"), [(f16, "mm_dtype"), (bf16, "mm")])
def test_at_large_m_no_sum_is_rounded_to_fp16_before_its_scale(dtype, product):
    """gpt-fast's ``(x @ q) * scale``: the sums overflow where results are 11 or so."""

    def fn(x, w, scale):
        return (x @ w.to(dtype).t()) * scale

    def make(device):
        x, scale = (torch.empty(s, dtype=dtype, device=device) for s in ((1432, 1152), (6912,)))
        return x, torch.empty(6912, 1152, dtype=torch.int8, device=device), scale

    with collect() as report:
        generated = generate(fn, make, arch=80)
    assert [choice.chosen for choice in report.kernels] == [DEQUANTIZE_THEN_MM]
    assert f"extern_kernels.{product}(" in generated.wrapper


def test_no_block_is_longer_than_four_groups():
    for name in ("gptq", "awq", "hqq", "int8_group"):
        spec, problem = described(Case(name, 16, 4096, 4096))
        assert max(c.block_k for c in WEIGHT_ONLY_MM.configs(spec, problem, device(90))) <= 128
    spec, problem = described(Case("int8_channel", 16, 4096, 4096))
    assert max(c.block_k for c in WEIGHT_ONLY_MM.configs(spec, problem, device(90))) == 256


def test_a_tile_that_dequantizes_too_much_is_rejected():
    spec, problem = described(Case("gptq", 16, 4096, 4096))
    rejection = WEIGHT_ONLY_MM.config_rejection(
        spec, problem, GemmConfig(16, 64, 128, 4, 2), device(90)
    )
    assert rejection is not None
    assert rejection.code == RejectionCode.REGISTERS
    rejection = WEIGHT_ONLY_MM.config_rejection(
        spec, problem, GemmConfig(64, 128, 128, 8, 9), device(90)
    )
    assert rejection is not None
    assert rejection.code == RejectionCode.SHARED_MEMORY


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize("arch", ARCHS)
def test_gelu_and_residual_are_in_the_one_kernel(arch):
    case = Case("gptq", 64, 512, 256, bias=True)

    def fn(residual, *inputs):
        return F.gelu(gemm(case)(*inputs)) + residual

    def make(device):
        residual = torch.empty(64, 512, dtype=bf16, device=device)
        return residual, *make_inputs(case, device)

    generated = generate(fn, make, arch=arch)
    [(name, source)] = generated.kernels.items()
    assert name.startswith("triton_tem_fused")
    assert "weight_only" in name
    assert "libdevice.erf" in source
    assert "extern_kernels.mm" not in generated.wrapper


@pytest.mark.one_in(8)
@pytest.mark.compiles
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", ["columns", "every_second"])
def test_strided_tensors_are_not_copied(name, layout):
    """Their strides go into the template."""
    if name == "ten_parts":
        pytest.skip("W is written once; the library copies x")
    assert len(generate_case(Case(name, 16, 64, 64, layout=layout)).kernels) == 1


# (compute capability, format): every way of unpacking at least once
COMPILED = [
    (80, "gptq"),
    (80, "int8_group"),
    (89, "awq"),
    (89, "fp8_block"),
    (90, "hqq"),
    (90, "act_order"),
    (100, "int8_channel"),
]


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize(("arch", "name"), sampled(COMPILED, 3))
def test_configurations_use_the_matrix_unit_and_do_not_spill(arch, name):
    """At small and large M."""
    for m in (16, 128):
        case = Case(name, m, 512, 1024)
        spec, problem = described(case)
        for config in hardest(WEIGHT_ONLY_MM.configs(spec, problem, device(arch)), 1):
            [(kernel_name, source)] = generate_case(case, config, arch=arch).kernels.items()
            kernel = simulate.compile_kernel(kernel_name, source)
            assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
            assert kernel.shared_bytes <= device(arch).shared_memory - RESERVED_SHARED_MEMORY
            instructions = " ".join(kernel.matrix_instructions())
            if arch == 90 and config.block_m >= 64:
                assert "wgmma" in instructions, config
            else:
                assert "bf16" in instructions or "tcgen05" in instructions, config


@pytest.mark.compiles
def test_shared_memory_holds_packed_weights():
    """GPTQ at M = 16: 8 values per int32, not 4 bytes per value."""
    config = GemmConfig(16, 64, 32, 4, 4)
    [(name, source)] = generate_case(Case("gptq", 16, 512, 1024), config).kernels.items()
    stage = 16 * 32 * 2 + 32 * 64 // 2 + 64 * 2 + 64 // 2
    unpacked = 32 * 64 * 4
    assert simulate.compile_kernel(name, source).shared_bytes <= 4 * stage + unpacked


@pytest.mark.compiles
@pytest.mark.parametrize("out_dtype", [bf16, f16, f32])
def test_the_sum_is_rounded_once(out_dtype):
    case = Case("gptq", 64, 512, 256, out_dtype=out_dtype, column_scale="channel", bias=True)
    [source] = generate_case(case, arch=80).kernels.values()
    body = source[source.index("out = acc") : source.index("mask = ")]
    assert "float16" not in body


@pytest.mark.compiles
def test_offsets_are_64_bit_only_where_the_tensors_need_it():
    for case, dtype in (
        (Case("gptq", 64, 512, 256), "tl.int32"),
        (Case("gptq", 128, 2**20, 2**14), "tl.int64"),
        (Case("int8_group", 33, 66000, 32768), "tl.int64"),
    ):
        [(name, source)] = generate_case(case, arch=80).kernels.items()
        assert f"INDEX_DTYPE : tl.constexpr = {dtype}" in source
        assert simulate.compile_kernel(name, source).spill_stores == 0


@pytest.mark.compiles
def test_default_mode_offers_one_choice_and_autotune_several():
    case = Case("awq", 64, 512, 256)
    with collect() as report:
        generate_case(case)
        generate_case(case, config={"max_autotune": True})
    first, second = (len(choice.offered) for choice in report.kernels)
    assert first == 1
    assert 4 <= second <= 12


@pytest.mark.parametrize("m", [1, 16])
def test_few_rows_of_a_table_are_written_once_where_no_other_kernel_takes_k(m):
    """NVFP4 1 x 1152 x 4304 took 85.8 us, stock 18.5 (H200)."""
    spec, problem = described(Case("nvfp4", m, 1152, 4304, torch.bfloat16))
    assert not WEIGHT_ONLY_MM.configs(spec, problem, device(90))
    spec, problem = described(Case("int8_channel", m, 1152, 4304, torch.bfloat16))
    assert WEIGHT_ONLY_MM.configs(spec, problem, device(90))


@pytest.mark.parametrize(
    ("m", "n", "is_taken"),
    [
        (16, 1152, True),
        (64, 1152, False),
        (128, 1152, False),
        (128, 16384, True),
        (512, 1152, False),
    ],
)
def test_few_tiles_are_left_to_a_weight_written_once(m, n, is_taken):
    """K is not split: 18 tiles took 43 us where stock takes 16 (128 x 1152 x 4304, H100)."""
    spec, problem = described(Case("int8_channel", m, n, 4304))
    assert bool(WEIGHT_ONLY_MM.configs(spec, problem, device(90))) == is_taken
    assert bool(WEIGHT_ONLY_MM.configs(spec, problem, device(80))) == (m < 128 or n > 1152)


def test_words_along_n_take_longer():
    """AWQ's 538 words a row have no TMA descriptor: 3.2 of bf16's time (128 rows, H100)."""
    for name, is_taken in (("awq", False), ("gptq", True)):
        spec, problem = described(Case(name, 128, 4304, 1152))
        assert bool(WEIGHT_ONLY_MM.configs(spec, problem, device(90))) == is_taken


@pytest.mark.compiles
def test_a_dynamic_m_is_a_kernel_argument():
    case = Case("gptq", 64, 512, 256)

    def make(device):
        inputs = make_inputs(case, device)
        torch._dynamo.mark_dynamic(inputs[0], 0)
        return inputs

    [source] = generate(gemm(case), make, arch=80).kernels.values()
    assert "M = ks0" in source
    assert "N : tl.constexpr = 512" in source


@pytest.mark.compiles
def test_an_empty_result_launches_no_gemm():
    names = generate_case(Case("gptq", 0, 64, 64)).kernels
    assert not any("weight_only" in name for name in names), names


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["fp8_row", "fp8_words"])
def test_e4m3_is_left_unfused_where_the_gpu_does_not_convert_it(name):
    case = Case(name, 16, 64, 64)
    spec, problem = described(case)
    rejection = WEIGHT_ONLY_MM.rejection(spec, problem, device(80))
    assert rejection is not None
    assert rejection.code == RejectionCode.DEVICE
    assert WEIGHT_ONLY_MM.rejection(spec, problem, device(89)) is None
    generated = generate_case(case, arch=80)
    assert "extern_kernels.mm" in generated.wrapper
    assert not any("weight_only_mm" in source for source in generated.kernels.values())


@pytest.mark.compiles
def test_fp32_is_multiplied_as_fp32():
    case = Case("int8_channel", 16, 64, 64, f32)
    [(name, source)] = generate_case(case).kernels.items()
    assert "tf32" not in simulate.compile_kernel(name, source).ptx
    assert 'PRECISION : tl.constexpr = "ieee"' in source


@pytest.mark.compiles
def test_a_failure_while_lowering_leaves_the_op(monkeypatch):
    case = Case("shift_table", 16, 64, 64)

    def fail(*_):
        raise ValueError("broken")

    monkeypatch.setattr(WeightOnlyMM, "codegen", fail)

    def compile_with(on_error):
        return simulate.generate(
            gemm(case),
            lambda d: make_inputs(case, d),
            arch=80,
            backend=inductor_quant_backend,
            options={"inductor_quant.on_error": on_error},
        )

    with pytest.warns(RuntimeWarning, match="left it as it was"):
        generated = compile_with("fallback")
    assert "torch.ops.inductor_quant.weight_only.default(" in generated.wrapper
    with pytest.raises(Exception, match="broken"):
        compile_with("raise")
