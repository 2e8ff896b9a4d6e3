"""Statements that read a tile of words and unpack it, in any order of its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inductor_quant.kernels.config import Weight
from inductor_quant.kernels.weight_code import Hook
from inductor_quant.kernels.words import Base, Dim, Words, unpack


class WordTile:
    """The words of BLOCK_K x BLOCK_N numbers: ``of_k`` by ``of_n``, the contiguous axis last."""

    def __init__(self, weight: Weight, words: Words, block_k: int, block_n: int) -> None:
        self.words, self.source = words, weight.format.element.source
        self.contiguous = contiguous_axis(weight, words)
        along_k = words.axis == "k"
        self.of_k = block_k // (words.count if along_k else 1)
        self.of_n = block_n // (1 if along_k else words.count)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.of_k, self.of_n) if self.contiguous == "n" else (self.of_n, self.of_k)

    def steps(self, stride: Hook) -> list[str]:
        """Statements before the loop: where one step along k, and along n, leads in memory."""
        name = f"W{self.source}"
        step_k = _sum(
            f"{k} * {stride(name, d)}" for d, (k, _, _) in enumerate(self.words.steps) if k
        )
        step_n = _sum(
            f"{n} * {stride(name, d)}" for d, (_, n, _) in enumerate(self.words.steps) if n
        )
        return [f"word_k = {step_k}", f"word_n = {step_n}"]

    def corner(self, stride: Hook) -> str:
        """The address of the tile's first word at k = 0."""
        name = f"W{self.source}"
        const = _sum(
            f"{c} * {stride(name, d)}" for d, (_, _, c) in enumerate(self.words.steps) if c
        )
        return f"{name} + (pid_n * {self.of_n}).to(INDEX_DTYPE) * word_n + {const}"

    def offsets(self, stride: Hook) -> str:
        """Statements before the loop: where the words of the tile lie, counted from its corner."""
        rows, columns = ("k", "n") if self.contiguous == "n" else ("n", "k")
        spread = {
            "k": f"tl.arange(0, {self.of_k}) * word_k",
            "n": f"tl.arange(0, {self.of_n}) * word_n",
        }
        return "\n".join(
            [
                *self.steps(stride),
                f"words = ({spread[rows]})[:, None] + ({spread[columns]})[None, :]",
                f"corner = {self.corner(stride)}",
            ]
        )

    def unpacked(self, base: Base, x_type: str) -> tuple[list[str], list[str]]:
        """Statements inside the loop that read the words at k, and the variables that they leave:
        the first number of each word with its base, the second, ..."""
        count = self.words.count if self.words.axis == "k" else 1
        numbers = [f"u{i}" for i in range(self.words.count)]
        lines = [
            f"q = tl.load(corner + (k // {count}).to(INDEX_DTYPE) * word_k + words)",
            *unpack(self.words, base).call(numbers, ["q"], x_type),
        ]
        return lines, numbers


def join(values: Sequence[str]) -> tuple[list[str], str]:
    """Statements that lay equal tiles side by side, and the result: a dimension of two for each bit
    of a tile's number, the lowest first."""
    lines, values = [], list(values)
    while len(values) > 1:
        joined = []
        for low, high in zip(values[::2], values[1::2], strict=True):
            joined.append(f"{low}_")
            lines.append(f"{joined[-1]} = tl.join({low}, {high})")
        values = joined
    return lines, values[0]


def contiguous_axis(weight: Weight, words: Words) -> str:
    """The axis of W along which neighbouring words are neighbours in memory; n if it is not known:
    then only speed suffers."""
    tensor = weight.tensors[weight.format.element.source]
    strides = tensor.strides
    along_k = sum(k * s for (k, _, _), s in zip(words.steps, strides, strict=True) if s is not None)
    return "k" if along_k == 1 else "n"


def reordered(value: str, dims: Sequence[Dim], target: Sequence[Dim], shape: str) -> str:
    """``value``, whose elements count through ``dims``, as they count through ``target``."""
    dims = [dim for dim in dims if dim[1] > 1]
    target = [dim for dim in target if dim[1] > 1]
    if dims == target:
        return f"tl.reshape({value}, {shape})"
    order = [dims.index(dim) for dim in target]
    sizes = [size for _, size in dims]
    return f"tl.reshape(tl.permute(tl.reshape({value}, {sizes}), {order}), {shape})"


def _sum(terms: Iterable[str]) -> str:
    return " + ".join(terms) or "0"
