"""Inline PTX as in our kernels, run on numpy arrays.

Straight-line code on 32-bit registers, with results of 64 bits: ``prmt``, shifts, ``sub``, ``and``,
``xor``, ``lop3``, ``mov``, ``mul``, ``mad``, arithmetic on pairs of 16-bit floats and in fp32,
rounding to a signed byte, pairs of e4m3 to fp16, loads and stores of shared memory, of which there
are two allocations. Every lane has number 0. As in ``tl.inline_asm_elementwise``, a call takes
``pack`` elements at a time, narrow ones packed into a register. Triton leaves open which elements
those are; here they are neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl

from .floats import Array, decode, encode

Registers = dict[str, Array]
_SHARED = np.zeros(1 << 15, np.uint32)  # from address 0
_LOADS = ("ld.shared.b32", "ld.shared.v2.b32", "ld.shared.v4.b32")
_STORES = ("st.shared.b32", "st.shared.v4.b32")


def run(
    asm: str, inputs: Sequence[Array], outputs: Sequence[npt.DTypeLike], pack: int
) -> list[Array]:
    """One array for each type of ``outputs``, in the inputs' shape, as raw bits of that size.

    Raises NotImplementedError for any other instruction.
    """
    shape = inputs[0].shape if inputs else (1,)
    types = [np.dtype(f"u{np.dtype(output).itemsize}") for output in outputs]
    counts = [_registers(dtype, pack) for dtype in types]
    registers: Registers = {}
    for value in inputs:
        bits = np.ascontiguousarray(np.broadcast_to(value, shape)).view(f"u{value.dtype.itemsize}")
        for column in _pack(bits.reshape(-1, pack)).T:
            registers[f"${sum(counts) + len(registers)}"] = column
    for statement in re.sub(r"[{}]", "", asm).split(";"):
        name, _, operands = statement.strip().partition(" ")
        if not name or name in (".reg", ".shared"):
            continue
        parts = [part.strip() for part in operands.split(",")]
        if name in _LOADS:
            *targets, address = parts
            places = _words(registers, address, len(targets))
            registers.update((to, _SHARED[at]) for to, at in zip(targets, places, strict=True))
            continue
        if name in _STORES:
            address, *stored = parts
            places = _words(registers, address, len(stored))
            for at, source in zip(places, stored, strict=True):
                _SHARED[at] = _operand(registers, source)
            continue
        target, *sources = parts
        run_one = _INSTRUCTIONS.get(name)
        if run_one is None:
            raise NotImplementedError(f"no emulation of the PTX instruction {name}")
        registers[target] = run_one(*(_operand(registers, source) for source in sources))
    results, first = [], 0
    for dtype, count in zip(types, counts, strict=True):
        elements = np.prod(shape, dtype=int) // pack, count
        words = np.stack([np.atleast_1d(registers[f"${first + i}"]) for i in range(count)], 1)
        words = np.broadcast_to(words, elements)
        results.append(np.ascontiguousarray(words).view(dtype)[:, :pack].reshape(shape))
        first += count
    return results


def _words(registers: Registers, address: str, count: int) -> list[Array]:
    """Where ``count`` words from ``[register+offset]`` on lie in ``_SHARED``."""
    register, _, offset = address.strip("[]").partition("+")
    first = (_operand(registers, register) + np.uint32(int(offset or 0))) // np.uint32(4)
    return [first + np.uint32(i) for i in range(count)]


def _registers(dtype: np.dtype[Any], pack: int) -> int:
    """One of 64 bits for each element of as many."""
    return pack if dtype.itemsize == 8 else max(1, dtype.itemsize * pack // 4)


def _pack(bits: Array) -> Array:
    """[n, pack] elements as [n, registers] of 32 bits."""
    wide = 4 // bits.dtype.itemsize
    missing = -bits.shape[1] % wide
    padded = np.pad(bits, ((0, 0), (0, missing)))
    return np.ascontiguousarray(padded).view(np.uint32)


_OF_LANE_0 = {"%laneid": 0, "%lanemask_eq": 1, "%lanemask_lt": 0}
_SYMBOLS = {"entries": 0, "listed": 1 << 15}  # addresses


def _operand(registers: Registers, text: str) -> Array:
    if text in registers:
        return registers[text]
    for known in (_OF_LANE_0, _SYMBOLS):
        if text in known:
            return np.asarray(known[text], np.uint32)
    if text.startswith("0f"):  # the bits of a float
        return np.asarray(int(text[2:], 16), np.uint32)
    return np.asarray(int(text, 0) & 0xFFFFFFFF, dtype=np.uint32)


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for byte in range(4):
        nibble = (selector >> np.uint32(4 * byte)).astype(np.uint64)
        taken = both >> (np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(255)
        copied = np.where(taken & np.uint64(128), np.uint64(255), np.uint64(0))
        taken = np.where(nibble & np.uint64(8), copied, taken)  # of the sign, if it says so
        result |= taken.astype(np.uint32) << np.uint32(8 * byte)
    return result


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for case in range(8):
        if int(table) >> case & 1:
            bits = (term if case & mask else ~term for term, mask in ((a, 4), (b, 2), (c, 1)))
            result |= np.bitwise_and.reduce(np.broadcast_arrays(*bits))
    return result


def _halves(
    compute: Callable[..., Array], dtype: Any = tl.float16, storage: npt.DTypeLike = np.float16
) -> Callable[..., Array]:
    """Of both halves of registers, in fp64: exact for small integers and scales."""

    def run(*terms: Array) -> Array:
        wide = (
            decode(np.ascontiguousarray(term).view(storage), dtype).astype(np.float64)
            for term in np.broadcast_arrays(*map(np.atleast_1d, terms))
        )
        return encode(compute(*wide), dtype).view(np.uint32)

    return run


def _fp32(compute: Callable[..., Array]) -> Callable[..., Array]:
    """``compute`` in fp64, rounded to fp32: exact for a product or a sum of two values."""

    def run(*terms: Array) -> Array:
        wide = (np.ascontiguousarray(term).view(np.float32).astype(np.float64) for term in terms)
        with np.errstate(all="ignore"):
            return compute(*wide).astype(np.float32).view(np.uint32)

    return run


def _fma(x: Array, y: Array, z: Array) -> Array:
    return x * y + z


def _rounded_pair(dtype: Any) -> Callable[[Array, Array], Array]:
    """Two fp32 rounded to ``dtype``, the first one in the high half."""

    def run(high: Array, low: Array) -> Array:
        halves = (encode(np.ascontiguousarray(t).view(np.float32), dtype) for t in (high, low))
        first, second = (half.view(np.uint16).astype(np.uint32) for half in halves)
        return first << np.uint32(16) | second

    return run


def _round_to_s8(x: Array) -> Array:
    rounded = np.clip(np.rint(x.view(np.float32)), -128, 127)
    return np.nan_to_num(rounded, nan=0.0).astype(np.int32).view(np.uint32)


def _e4m3_pair(pair: Array) -> Array:
    found = np.ascontiguousarray(pair.astype(np.uint16)).view(np.uint8)
    halves = decode(found, tl.float8e4nv).astype(np.float16)
    return halves.view(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "abs.f32": _fp32(np.abs),
    "add.rn.f32": _fp32(np.add),
    "and.b32": np.bitwise_and,
    "copysign.f32": _fp32(lambda sign, x: np.copysign(x, sign)),
    "cvt.rn.bf16x2.f32": _rounded_pair(tl.bfloat16),
    "cvt.rn.f16x2.e4m3x2": _e4m3_pair,
    "cvt.rn.f16x2.f32": _rounded_pair(tl.float16),
    "cvt.rni.sat.s8.f32": _round_to_s8,
    "cvt.u16.u32": lambda word: word & np.uint32(0xFFFF),
    "ex2.approx.ftz.f32": _fp32(np.exp2),
    "fma.rn.bf16x2": _halves(_fma, tl.bfloat16, np.uint16),
    "fma.rn.f16x2": _halves(_fma),
    "fma.rn.f32": _fp32(_fma),
    "lop3.b32": _lop3,
    "mad.lo.u32": _fma,
    "max.f16x2": _halves(np.maximum),
    "min.f16x2": _halves(np.minimum),
    "mov.b32": np.positive,
    "mov.u32": np.positive,
    "mul.lo.u32": np.multiply,
    "mul.wide.u32": lambda a, b: a.astype(np.uint64) * b.astype(np.uint64),
    "mul.rn.f32": _fp32(np.multiply),
    "neg.f32": _fp32(np.negative),
    "prmt.b32": _prmt,
    "rcp.approx.ftz.f32": _fp32(np.reciprocal),
    "shl.b32": np.left_shift,
    "shr.b32": np.right_shift,
    "shr.u32": np.right_shift,
    "sub.rn.f16x2": _halves(np.subtract),
    "sub.u32": np.subtract,
    "xor.b32": np.bitwise_xor,
}
