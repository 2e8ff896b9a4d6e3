"""Decodes W from a program's axes and inputs in numpy, independently of the graph."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.programs.axes import FLOATS, TABLES, WORDS, Axes
from tests.support.programs.data import FP8, Data


def decode(axes: Axes, data: Data, arrangements: dict[str, str]) -> torch.Tensor:
    """[K, N] in the output's dtype. Nothing rounds in fp64, nor, by choice of the data, after."""
    k, n = np.arange(axes.k)[:, None], np.arange(axes.n)[None, :]
    codes = _codes(axes, data, k, n)
    along_k, along_n = k // axes.block[0], n // axes.block[1]
    if "g_idx" in data.values:
        along_k = data.values["g_idx"].numpy()[:, None]
    grouped: dict[str, np.ndarray] = {
        name: _logical(axes, data.values[name], arrangements[name])[along_k, along_n]
        for name in ("scale", "zero")
        if name in data.values and not (name == "zero" and axes.zero.startswith("packed"))
    }
    scale = grouped["scale"]
    if axes.scale == "exp2":
        scale = 2.0**scale
    elif axes.scale in ("div", "reciprocal"):
        scale = 1 / scale
    if axes.zero == "q*s - t":
        result = codes * scale - grouped["zero"]
    elif axes.zero == "q*s + t":
        result = codes * scale + grouped["zero"]
    elif axes.zero == "none":
        result = codes * scale
    else:
        result = (codes - _zero(axes, data, arrangements, grouped, along_k, along_n)) * scale
    if axes.scale == "two factors":
        result = result * data.values["scale2"].double().numpy()
    return torch.from_numpy(result).to(getattr(torch, axes.output_dtype))


def _logical(axes: Axes, value: torch.Tensor, arrangement: str) -> np.ndarray:
    """[groups along K, groups along N] of a tensor stored in ``arrangement``."""
    numbers = value.double().numpy()
    k, n = axes.groups
    return numbers.reshape(n, k).T if arrangement == "NK" else numbers.reshape(k, n)


def _zero(
    axes: Axes,
    data: Data,
    arrangements: dict[str, str],
    grouped: dict[str, np.ndarray],
    along_k: np.ndarray,
    along_n: np.ndarray,
) -> np.ndarray | int:
    if axes.zero == "constant":
        return 3 if axes.is_signed else 1 << (axes.bits - 1)
    if "zero" in grouped:
        return grouped["zero"]
    words = data.values["zero"].numpy()
    if arrangements["zero"] == "NK":
        words = words.T
    if axes.group_axis == "K":  # packed along N
        word, field = np.divmod(along_n, axes.fields)
        zero = _field(axes, words[along_k, word], field)
    else:
        word, field = np.divmod(along_k, axes.fields)
        zero = _field(axes, words[word, along_n], field)
    if axes.zero != "packed":
        zero = zero + 1
    return zero % (1 << axes.bits) if axes.zero.endswith("wrapped") else zero


def _codes(axes: Axes, data: Data, k: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The quantized values [K, N]."""
    stored = data.values["words"]
    if axes.element in FLOATS:
        stored = stored.view(FP8[axes.element]).double()
    words = stored.numpy()
    if axes.stored == "NK":
        words = words.T
    elif axes.stored == "3-D":  # [groups, N, rows]: row = group * rows + rest
        words = np.concatenate([group.T for group in words], axis=0)
    rows, columns = words.shape
    if axes.pack == "-":
        numbers = words[k, n].astype(np.float64)
    elif axes.pack == "K":
        word, field = (k % rows, k // rows) if axes.layout == "split" else divmod(k, axes.fields)
        numbers = _field(axes, words[word, n], field)
    else:
        is_split = axes.layout == "split"
        word, field = (n % columns, n // columns) if is_split else divmod(n, axes.fields)
        numbers = _field(axes, words[k, word], field)
    if axes.element in TABLES:
        return data.values["lut"].double().numpy()[numbers.astype(np.int64)]
    return numbers.astype(np.float64)


def _field(axes: Axes, words: np.ndarray, field: np.ndarray) -> np.ndarray:
    """Field ``field`` of each word."""
    bits = axes.bits
    if axes.fields == 1:
        return words.astype(np.int64)
    raw = words.astype(np.int64) % (1 << WORDS[axes.word]) if axes.word != "int64" else words
    offset = bits * np.array(axes.slots)[field]
    numbers = (raw.astype(np.uint64) >> offset.astype(np.uint64)).astype(np.int64) % (1 << bits)
    if axes.is_signed:
        numbers = np.where(numbers >= 1 << (bits - 1), numbers - (1 << bits), numbers)
    return numbers
