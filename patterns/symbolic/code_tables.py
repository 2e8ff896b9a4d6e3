"""What a function of a field gives for all of its codes, as the memory of a tensor."""

from __future__ import annotations

import functools

import torch

from .expr import EXACT_IN_FP32, INTEGERS, limits

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(values: torch.Tensor) -> bytes:
    return values.view(_INTEGER_OF_SIZE[values.dtype.itemsize]).numpy().tobytes()


# The layers of a model ask for the same functions; the results below are never written.


@functools.lru_cache(1024)
def codes_of(count: int, low: int, width: int, is_signed: bool) -> torch.Tensor:
    """Bits ``low ... low + width - 1`` of the numbers below ``count``, int64."""
    codes = torch.arange(count) >> low & ((1 << width) - 1)
    return codes - (codes >> width - 1 << width) if is_signed else codes


@functools.lru_cache(1024)
def without_idle_bits(memory: bytes, size: int, is_fixed: bool) -> tuple[bytes, int]:
    """The entries of a table without the highest bits of its index that change nothing, and, with
    ``is_fixed``, without the lowest; the number of these."""
    half, low = len(memory) // 2, 0
    while half >= size and memory[:half] == memory[half:]:
        memory, half = memory[:half], half // 2
    while is_fixed and len(memory) > size:
        entries = [memory[at : at + size] for at in range(0, len(memory), size)]
        if entries[::2] != entries[1::2]:
            break
        memory, low = b"".join(entries[::2]), low + 1
    return memory, low


@functools.lru_cache(1024)
def sequence_of(memory: bytes, dtype: torch.dtype) -> tuple[bool, int] | None:
    """Whether the entries are those of a signed field, and what is added to it."""
    numbers = torch.frombuffer(bytearray(memory), dtype=dtype).double()
    whole = numbers.nan_to_num(0.5).to(torch.int64)
    is_whole = whole.double() == numbers
    if not is_whole.all() or whole.abs().max() > EXACT_IN_FP32 or (1 / numbers == -torch.inf).any():
        return None
    low, high = limits(dtype if dtype in INTEGERS else torch.int32)
    for is_signed in (False, True):
        codes = codes_of(len(numbers), 0, len(numbers).bit_length() - 1, is_signed)
        if not torch.equal(whole - whole[0], codes - codes[0]):
            continue
        number = int(whole[0] - codes[0])
        is_held = low <= min(number, int(codes.min())) and max(number, int(codes.max())) <= high
        return (is_signed, number) if is_held else None
    return None
