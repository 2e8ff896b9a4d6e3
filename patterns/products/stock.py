"""What a card computes without us, from the quantized operands of a product."""

from __future__ import annotations

import torch
from torch import fx

from .. import fx_utils
from ..match import RecognizedGemm

aten = torch.ops.aten
TUNED = 90  # the one compute capability on which tiles were measured
# What ``aten._int_mm`` takes on CUDA (torch 2.11): more rows than this, N and K in multiples.
INT_MM_ROWS, INT_MM_MULTIPLE = 16, 8
SCALED_MM_ARCH = 89  # of ``aten._scaled_mm``; with scales of blocks sm_90 alone


def is_left_to_it(found: RecognizedGemm) -> bool:
    """Whether nothing was tuned for the card, and the library computes the product there, by the
    ops of the graph. Where it would fail, or multiplies a dense weight, ours is better."""
    device = fx_utils.value(found.anchor).device
    if device.type != "cuda":
        return False
    arch = _arch(device)
    if arch == TUNED:
        return False
    if found.family == "w8a8":
        return found.anchor.target == aten._int_mm.default and _takes(found.anchor)
    is_call = str(found.anchor.target).startswith("aten._scaled_mm")
    return found.family == "fp8" and is_call and arch >= SCALED_MM_ARCH


def takes_blocks(anchor: fx.Node) -> bool:
    """Whether ``aten._scaled_mm`` has scales of blocks on the card: cuBLASLt has them on one."""
    device = fx_utils.value(anchor).device
    return device.type != "cuda" or _arch(device) == TUNED


def is_tuned(anchor: fx.Node) -> bool:
    """Whether tiles were measured on the card."""
    device = fx_utils.value(anchor).device
    return device.type == "cuda" and _arch(device) == TUNED


def has_fp8(anchor: fx.Node) -> bool:
    """Whether the card multiplies FP8; on another one our kernels decode it to bf16."""
    device = fx_utils.value(anchor).device
    return device.type != "cuda" or _arch(device) >= SCALED_MM_ARCH


def _takes(anchor: fx.Node) -> bool:
    a, b = fx_utils.arguments(anchor, "self", "mat2")
    m, (k, n) = fx_utils.value(a).shape[0], fx_utils.value(b).shape
    are_multiples = not any(fx_utils.divisor(size) % INT_MM_MULTIPLE for size in (k, n))
    return are_multiples and fx_utils.least(m) > INT_MM_ROWS


def _arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
