"""A GEMM of odd sizes for each kernel of sm_90, whatever its family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.gemms import (
    block_sparse,
    experts,
    fp8,
    quantizing,
    scaled_experts,
    w4a8,
    w8a8,
    weight_only,
)

BLOCK, HALF = (128, 128), torch.float16
GROUP = 128  # of packed weights

# A GEMM that sm_90 computes with the kernel. No size is a multiple of a tile, unless it must be.
GEMMS: dict[str, Any] = {
    "w8a8_decode_quantize": quantizing.Case(3, 2053, 4224),
    "w8a8_decode": w8a8.Case(7, 6143, 1152),
    "w8a8_large_m_sm90": w8a8.Case(4095, 4001, 4112),
    "w8a8_group_large_m_sm90": w8a8.Case(4095, 4008, 1152, group=GROUP),
    "w8a8_persistent": w8a8.Case(4091, 4097, 272),
    "w8a8_swap_ab": w8a8.Case(61, 1149, 1028, a_layout="padded"),
    "w8a8_mm": w8a8.Case(61, 509, 253, a_layout="unaligned", w_layout="sliced"),
    "w4a8_direct": w4a8.Case("nibble_pairs", 3, 2051, 1024),
    "w4a8_mm_sm90": w4a8.Case("nibble_pairs", 61, 4100, 1280),
    "w4a8_mm": w4a8.Case("nibble_pairs", 13, 2051, 1152, to_int8="round", layout="every_second"),
    "weight_only_small_m_sm90": weight_only.Case("gptq", 15, 28736, 4096),
    "weight_only_decode": weight_only.Case("gptq", 3, 4160, 3968),
    "weight_only_direct": weight_only.Case("awq", 3, 4104, 1152, HALF),
    "weight_only_small_m": weight_only.Case("nibble_pairs", 7, 4160, 4096, layout="every_second"),
    "weight_only_mm_sm90": weight_only.Case("awq", 61, 4160, 1152, HALF),
    "weight_only_medium_m": weight_only.Case("nibble_pairs", 61, 2112, 2048, layout="every_second"),
    "weight_only_bytes": weight_only.Case("int8_channel", 3, 4128, 1168),
    "weight_only_mm": weight_only.Case("shift_table", 15, 2056, 1152, HALF),
    "weight_only_dequantize": weight_only.Case("nf4", 16381, 1030, 1152),
    "fp8_decode_quantize": quantizing.Case(3, 2053, 1152, element=quantizing.E4M3),
    "fp8_decode": fp8.Case(7, 6143, 1152),
    "fp8_split_k": fp8.Case(61, 509, 528),
    "fp8_large_m_sm90": fp8.Case(4095, 2111, 1552),
    "fp8_group_large_m_sm90": fp8.Case(4095, 4008, 1152, group=GROUP),
    "fp8_persistent": fp8.Case(4091, 4097, 272, fast_accum=True),
    "fp8_mm": fp8.Case(301, 509, 517, w_layout="unaligned"),
    "fp8_block_decode": fp8.Case(3, 2179, 1152, BLOCK),
    "fp8_block_two_block_sm90": fp8.Case(128, 7168, 2048, BLOCK),
    "fp8_block_split_k": fp8.Case(15, 2179, 7184, BLOCK),
    "fp8_block_large_m_sm90": fp8.Case(4095, 2111, 1552, BLOCK),
    "fp8_block_persistent": fp8.Case(4091, 4097, 528, (64, 64)),
    "fp8_block_mm": fp8.Case(401, 509, 517, BLOCK),
    "block_sparse_direct": block_sparse.Case(15, 512, 576, order=True, bias=True),
    "block_sparse_mm_tma": block_sparse.Case(299, 512, 640, (128, 128), bias=True),
    "block_sparse_mm": block_sparse.Case(15, 512, 576, values="placed", layout="every_second"),
    "experts_direct": experts.Case("nibble_pairs", (3, 0, 5), 515, 1152),
    "experts_mm_sm90": experts.Case("nibble_pairs", (67, 0, 40), 520, 1152, left_over=2),
    "experts_mm": experts.Case("act_order", (3, 0, 5), 520, 1152, left_over=2, dtype=HALF),
    "scaled_experts_large_m_sm90": scaled_experts.Case((901, 0, 797), 4104, 1152, block=BLOCK),
    "scaled_experts_int8_large_m_sm90": scaled_experts.Case((901, 0, 797), 4104, 1152, torch.int8),
    "scaled_experts_mm": scaled_experts.Case((3, 0, 5), 512, 1152, block=BLOCK),
    "scaled_experts_int8_mm": scaled_experts.Case((3, 0, 5), 520, 1152, torch.int8),
}


MODULES = (block_sparse, experts, fp8, scaled_experts, w4a8, w8a8, weight_only)


def module_of(case: Any) -> Any:
    """That with the case's ``gemm``, ``make_inputs`` and ``reference``."""
    return next(module for module in MODULES if isinstance(case, module.Case))


def parts(case: Any) -> tuple[Callable[..., torch.Tensor], Callable[[str], tuple[Any, ...]]]:
    """The GEMM, and what makes its inputs on a device."""
    if isinstance(case, quantizing.Case):
        return case.call(), case.inputs
    of = module_of(case)
    return of.gemm(case), lambda device: of.make_inputs(case, device)


def on_gpu(case: Any) -> tuple[Any, ...]:
    """Its inputs on a real GPU."""
    # Elements are written one by one, or "cuda" means fake tensors.
    if isinstance(case, experts.Case | scaled_experts.Case):
        inputs = module_of(case).make_inputs(case, "cpu")
        return tuple(t if t is None else t.cuda() for t in inputs)
    return parts(case)[1]("cuda")


def assert_right(got: torch.Tensor, case: Any, inputs: tuple[Any, ...]) -> None:
    """Every element against fp64."""
    if isinstance(case, quantizing.Case):
        w8a8.assert_close(got, case.meaning(inputs), slack=2)
    elif isinstance(case, weight_only.Case):
        weight_only.assert_right(got, case, inputs)
    elif isinstance(case, w8a8.Case):
        w8a8.assert_close(got, w8a8.reference(inputs))
    else:
        want = module_of(case).reference(case, inputs).cpu()
        weight_only.assert_close(got, want, slack=4 if isinstance(case, experts.Case) else 2)
