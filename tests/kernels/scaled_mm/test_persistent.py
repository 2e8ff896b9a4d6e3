"""w8a8_persistent without a GPU: when it applies, what it compiles to, its numerics."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.persistent.kernel import W8A8_PERSISTENT, resident_ctas
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.lowering import select
from inductor_quant.ops.w8a8 import make_spec
from inductor_quant.report.events import collect
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import Case, assert_close, gemm, make_inputs, reference
from tests.support.sampling import sampled

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
A100 = Device(arch=80, num_sms=108, shared_memory=166912)
LARGE = Problem(4096, 4096, 4096, has_aligned_rows=True)
SPEC = make_spec(a_scale=None, b_scale=None, out_dtype=torch.bfloat16, bias=False)
WIDE = dataclasses.replace(LARGE, is_stored_narrow=False)
CONFIGS = [c.config for c in cost_model.load("w8a8_persistent", 90).configs]


def test_many_tiles_of_aligned_rows_on_sm_90():
    assert W8A8_PERSISTENT.rejection(SPEC, LARGE, H200) is None


@pytest.mark.parametrize(
    ("problem", "device", "says"),
    [
        (Problem(4096, 4096, 4096), H200, "contiguous along K"),
        (Problem(1024, 4096, 4096, has_aligned_rows=True), H200, "too few"),
        (LARGE, A100, "sm_80 has no tensor descriptors"),
        (WIDE, H200, "32 KiB"),
    ],
)
def test_other_problems_are_rejected_with_a_reason(problem, device, says):
    rejection = W8A8_PERSISTENT.rejection(SPEC, problem, device)
    assert rejection is not None
    assert rejection.code == RejectionCode.NO_KERNEL
    assert says in rejection.detail


def test_ctas_that_are_resident_at_once():
    """Limited by registers and by shared memory: 264 are two per SM of an H200."""
    assert resident_ctas(GemmConfig(128, 128, 128, 4, 3), H200) == 264
    assert resident_ctas(GemmConfig(128, 128, 128, 4, 4), H200) == 132
    assert resident_ctas(GemmConfig(128, 128, 128, 8, 3), H200) == 132


def chosen(case: Case, *configs: str, arch: int = 90) -> tuple[str, simulate.Generated]:
    with collect() as report:
        generated = generate(
            gemm(case), lambda device: make_inputs(case, device), *configs, arch=arch
        )
    return report.kernels[0].chosen, generated


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize("config", sampled(CONFIGS), ids=str)
def test_configurations_use_tma_and_wgmma_and_leave_room_for_other_ctas(config):
    pinned = f"w8a8_persistent {config}"
    kernel, generated = chosen(Case(4100, 4000, 272), pinned)
    assert kernel == pinned
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert "cp.async.bulk.tensor" in compiled.ptx
    assert all(opcode.startswith("wgmma") for opcode in compiled.matrix_instructions())
    assert compiled.spill_stores == 0
    per_sm = resident_ctas(config, H200) // H200.num_sms
    assert per_sm * (compiled.shared_bytes + 1024) <= 228 * 1024
    assert per_sm * compiled.registers * 32 * config.num_warps <= 65536


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize(
    "change",
    [
        {"a_layout": "columns"},
        {"a_layout": "every_second"},
        {"w_layout": "sliced"},
        {"out_dtype": torch.float32},
        {"k": 264},
        {"m": 1000},
    ],
    ids=str,
)
def test_operands_without_a_descriptor_go_to_the_general_kernel(change):
    kernel, _ = chosen(Case(**{"m": 4096, "n": 4096, "k": 256, **change}))
    assert kernel.startswith("w8a8_mm ")


@pytest.mark.compiles
@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_package_has_no_descriptors_if_torch_allocates_scratch_for_one_cta(monkeypatch, is_fixed):
    """The C++ wrapper of torch 2.11: all other CTAs would write out of bounds."""
    monkeypatch.setattr(compat, "uses_cpp_wrapper", lambda: True)
    monkeypatch.setattr(compat, "_cpp_scratch_is_of_the_grid", lambda: is_fixed)
    kernel, _ = chosen(Case(4096, 4096, 256))
    assert kernel.startswith("w8a8_persistent " if is_fixed else "w8a8_mm ")


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("epilogue", "kernel"),
    [
        (lambda out, residual: F.gelu(out).to(residual.dtype) + residual, "w8a8_persistent"),
        (lambda out, residual: F.gelu(out), "w8a8_mm"),
        (lambda out, residual: out.softmax(-1).to(residual.dtype), "w8a8_mm"),
    ],
)
def test_the_dtype_that_is_stored_counts(epilogue, kernel):
    """Even in bf16 models the op may return fp32: Inductor drops casts to bf16 and back."""
    case = Case(4096, 4096, 256, out_dtype=torch.float32)

    def make(device):
        residual = torch.empty(4096, 4096, dtype=torch.bfloat16, device=device)
        return residual, *make_inputs(case, device)

    with collect() as report:
        generated = generate(
            lambda residual, *inputs: epilogue(gemm(case)(*inputs), residual), make
        )
    assert report.kernels[0].chosen.startswith(f"{kernel} ")
    if kernel == "w8a8_persistent":
        [(name, source)] = generated.kernels.items()
        assert simulate.compile_kernel(name, source).shared_bytes + 1024 <= 114 * 1024


@pytest.mark.compiles
@pytest.mark.parametrize("arch", [80, 89, 100])
def test_other_architectures_take_the_general_kernel(arch):
    """sm_100 has descriptors, but not the accumulator registers that the measured tiles need."""
    assert chosen(Case(8192, 8192, 256), arch=arch)[0].startswith("w8a8_mm ")


@pytest.mark.compiles
def test_a_pin_may_name_its_kernel():
    config = "128x128x128_w4_s3_g8"
    for name in ("w8a8_mm", "w8a8_persistent"):
        pinned = f"{name} {config}"
        assert chosen(Case(4096, 4096, 256), pinned)[0] == pinned
    with pytest.raises(
        Exception, match="names no kernel; they are w8a8_decode_quantize, w8a8_decode, "
    ):
        chosen(Case(64, 64, 64), f"w8a8_nn {config}")


@pytest.mark.interp
@pytest.mark.parametrize(
    "case",
    [
        Case(300, 200, 144),
        Case(257, 140, 128),
        Case(300, 200, 32, bias=False, out_dtype=torch.float16),
        Case(300, 200, 144, a_scale="tensor", scale_dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_result_is_close_to_fp64(case, monkeypatch):
    """On a chip of one SM: two CTAs take three tiles and more each."""
    chip = Device(90, num_sms=1, shared_memory=232448)
    monkeypatch.setattr(select, "describe_device", lambda device: chip)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    with collect() as report:
        generated = generate(gemm(case), lambda device: make_inputs(case, device))
    assert report.kernels[0].chosen.startswith("w8a8_persistent ")
    assert_close(simulate.interpret(generated, inputs), reference(inputs))
