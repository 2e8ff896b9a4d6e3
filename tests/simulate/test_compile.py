"""Machine code of stock kernels: the matrix instruction of each card, registers, shared memory."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl

from inductor_quant import simulate

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
ONLY_TRITON = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}


def int8_linear(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (torch._int_mm(a, b).float() * scale).to(torch.bfloat16)


def int8_inputs(device: str) -> tuple[torch.Tensor, ...]:
    return (
        torch.empty(128, 256, dtype=torch.int8, device=device),
        torch.empty(512, 256, dtype=torch.int8, device=device).t(),
        torch.empty(512, device=device),
    )


def fp8_linear(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> torch.Tensor:
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)


def fp8_inputs(device: str) -> tuple[torch.Tensor, ...]:
    return (
        torch.empty(128, 256, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(512, 256, dtype=torch.float8_e4m3fn, device=device).t(),
        torch.empty(128, 1, device=device),
        torch.empty(1, 512, device=device),
    )


def tile_64(choice) -> float:
    """Cost by which 64x64 for four warps wins: it fits every card, and is one warpgroup's share."""
    fields = dict(item.split("=") for item in choice.description.split(", "))
    tile = ("BLOCK_M", 64), ("BLOCK_N", 64), ("num_warps", 4)
    return float(sum(abs(int(fields[name]) - value) for name, value in tile))


# Before Triton 3.8, int8 on sm_100 takes the path of sm_80.
INT8_SM100 = "tcgen05.mma.cta_group::1.kind::i8" if TRITON_VERSION >= (3, 8) else "mma.sync"


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("fn", "make_inputs", "arch", "instruction"),
    [
        (int8_linear, int8_inputs, 80, "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
        (int8_linear, int8_inputs, 89, "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
        (int8_linear, int8_inputs, 90, r"wgmma.mma_async.sync.aligned.m64n\d+k32.s32.s8.s8"),
        (int8_linear, int8_inputs, 100, INT8_SM100),
        pytest.param(
            *(fp8_linear, fp8_inputs, 89),
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
            marks=pytest.mark.slow,
        ),
        (fp8_linear, fp8_inputs, 90, r"wgmma.mma_async.sync.aligned.m64n\d+k32.f32.e4m3.e4m3"),
        pytest.param(
            *(fp8_linear, fp8_inputs, 100),
            "tcgen05.mma.cta_group::1.kind::f8f6f4",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_matrix_instruction_is_that_of_the_card(fn, make_inputs, arch, instruction):
    generated = simulate.generate(fn, make_inputs, arch=arch, config=ONLY_TRITON, pick=tile_64)
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.arch == arch
    assert compiled.name == name
    instructions = compiled.matrix_instructions()
    assert any(re.match(instruction, opcode) for opcode in instructions), instructions
    assert 16 <= compiled.registers <= 255
    assert compiled.spill_stores == compiled.spill_loads == 0
    limit = simulate.GPUS[arch].shared_memory_per_block_optin
    assert 0 < compiled.shared_bytes <= limit


@pytest.mark.compiles
def test_reduction_kernel_compiles_and_has_no_matrix_instruction():
    generated = simulate.generate(
        lambda x: torch.softmax(x[:, 3:40], -1),
        lambda device: (torch.empty(64, 48, device=device),),
    )
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.matrix_instructions() == {}
    assert ".target sm_90a" in compiled.ptx


@pytest.mark.compiles
def test_generated_kernel_compiles_twice():
    generated = simulate.generate(torch.relu, lambda device: (torch.empty(64, device=device),))
    [(name, source)] = generated.kernels.items()
    assert simulate.compile_kernel(name, source) == simulate.compile_kernel(name, source)


@triton.jit
def matmul_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.arange(0, BM)
    columns = tl.arange(0, BN)
    inner = tl.arange(0, BK)
    accumulator = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rows[:, None] * K + (k + inner)[None, :])
        y = tl.load(b + columns[None, :] * K + (k + inner)[:, None])
        accumulator = tl.dot(x, y, accumulator)
    tl.store(c + rows[:, None] * BN + columns[None, :], accumulator)


SIGNATURE = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "K": "i32"}


@pytest.mark.compiles
def test_divisibility_is_what_makes_loads_wide():
    tile = {"BM": 64, "BN": 64, "BK": 64}
    divisible = simulate.compile_jit(
        matmul_kernel, SIGNATURE, tile, arch=80, divisible_by_16=SIGNATURE
    )
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in divisible.matrix_instructions()
    unknown = simulate.compile_jit(matmul_kernel, SIGNATURE, tile, arch=80)
    assert "cp.async.cg.shared.global" in divisible.ptx
    assert "cp.async.cg.shared.global" not in unknown.ptx


@pytest.mark.compiles
def test_too_large_a_tile_is_seen_to_spill():
    tile = {"BM": 256, "BN": 256, "BK": 32}
    compiled = simulate.compile_jit(
        matmul_kernel, SIGNATURE, tile, arch=80, num_warps=4, divisible_by_16=SIGNATURE
    )
    assert compiled.registers == 255
    assert compiled.spill_stores > 0
    assert compiled.spill_loads > 0


@pytest.mark.compiles
def test_argument_without_type_is_named():
    with pytest.raises(ValueError, match=r"\['BM', 'c'\] of matmul_kernel"):
        simulate.compile_jit(
            matmul_kernel, {"a": "*bf16", "b": "*bf16", "K": "i32"}, {"BN": 16, "BK": 16}, arch=90
        )


@pytest.mark.interp
def test_compiling_in_the_interpreter_is_refused():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        simulate.compile_jit(matmul_kernel, SIGNATURE, {}, arch=90)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        simulate.compile_kernel("name", "source")
