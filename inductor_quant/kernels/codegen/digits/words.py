"""Bytes that are neighbours in memory as the fields of 32-bit words."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import torch

from inductor_quant.kernels.codegen.digits.order import is_linear, split
from inductor_quant.kernels.codegen.runs import WORD, parts_of, run_of
from inductor_quant.kernels.problem import Weight
from inductor_quant.spec.weight_format import AffineIndex, Field, WeightFormat

BYTES, BITS = 4, 8  # of a word, and of each of them
_FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_BYTE_TYPES = (torch.int8, torch.uint8, *_FLOAT8)


@dataclasses.dataclass(frozen=True)
class WordView:
    """``weight``, whose quantized values are read from 32-bit words. ``dim``: the dimension of
    their tensor along which ``BYTES`` bytes are one word; None: the tensor is read as it is.
    ``parts``: fields of the bytes of several such words, which are joined to the word that the
    code is read from; () if it is stored. ``run``: the digit of four numbers each, if the parts are
    the words of a run of numbers, and bytes of that word are four of them."""

    weight: Weight
    dim: int | None = None
    parts: tuple[Field, ...] = ()
    run: str = ""


@functools.lru_cache(maxsize=1024)  # asked for once a configuration
def as_words(weight: Weight) -> WordView:
    """The view, if quantized values are in bytes, the bytes of a word are neighbours along k or n,
    and words are aligned."""
    format, code = weight.format, weight.format.code
    tensor = weight.tensors[code.source]
    known = [stride for stride in tensor.strides if stride is not None]
    indices = (*code.index, code.offset)
    if (
        tensor.dtype not in _BYTE_TYPES
        or not tensor.is_aligned
        or code.wrap
        or code.minus
        or code.high
    ):
        return WordView(weight)
    if len(known) < len(code.index) or any(index.is_data for index in indices) or code.size:
        return WordView(weight)
    for dim, (index, stride) in enumerate(zip(code.index, known, strict=True)):
        for names in _digits_of_bytes(format, {name: c * stride for name, c in index.linear}):
            others = [
                c * s
                for i, s in zip(code.index, known, strict=True)
                for n, c in i.linear
                if n not in names
            ]
            others += [i.const * s for i, s in zip(code.index, known, strict=True)]
            others += [
                s for d, s in enumerate(known) if d != dim and code.index[d] != AffineIndex()
            ]
            is_plain = all(is_linear(format, name) for name in names)
            is_plain = is_plain and not any(i.tables for i in code.index)
            if is_plain and not any(other % BYTES for other in others):
                return WordView(_joined(weight, dim, names), dim)
    return WordView(weight)


@functools.lru_cache(maxsize=1024)
def joined_words(weight: Weight) -> WordView | None:
    """The view of a weight whose numbers are joined from fields of bytes, four neighbours from the
    words of each; None if these are no words."""
    format, code = weight.format, weight.format.code
    if format.element != code or code.wrap or code.size or code.minus:
        return None
    if code.total_width > BITS:
        return None  # the numbers of four neighbours would overlap
    views = []
    for part in parts_of(code):
        if any(index.tables for index in (*part.index, part.offset)):
            return None
        alone = dataclasses.replace(format, element=dataclasses.replace(part, high=None))
        views.append(as_words(Weight(alone, weight.tensors)))
    first, parts, tensors = views[0].weight.format, [], list(weight.tensors)
    for view in views:
        words, element = view.weight.format, view.weight.format.element
        if view.dim is None or (view.dim, words.k, words.n) != (views[0].dim, first.k, first.n):
            return None  # other bytes are neighbours there
        if len(words.k) + len(words.n) == len(format.k) + len(format.n):
            return None  # two digits count them
        of_part = element.offset.linear[:-1]  # without the byte
        offset = dataclasses.replace(element.offset, linear=of_part)
        parts.append(dataclasses.replace(element, offset=offset))
        tensors[element.source] = view.weight.tensors[element.source]
    joined = dataclasses.replace(
        parts[0],
        offset=AffineIndex(linear=first.element.offset.linear[-1:]),
        width=code.total_width,
    )
    format = dataclasses.replace(first, element=joined)
    return WordView(Weight(format, tuple(tensors)), views[0].dim, tuple(parts))


def _digits_of_bytes(format: WeightFormat, apart: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Digits that count the bytes of a word, of those ``apart`` bytes from their neighbour: one of
    bytes, or two that take two values each, those of single bytes and of pairs."""
    of_two = [name for name in apart if format.radix(name) == 2 and name[0] != "e"]
    for name, bytes_apart in apart.items():
        if bytes_apart != 1 or name[0] == "e":
            continue
        if format.radix(name) % BYTES == 0:
            yield (name,)
        if name in of_two:
            yield from ((name, pair) for pair in of_two if apart[pair] == 2)


def _joined(weight: Weight, dim: int, names: tuple[str, ...]) -> Weight:
    """``weight`` read from words, whose bytes the digits ``names`` count; a digit of more bytes
    becomes two, the second of which chooses one."""
    old, format = weight.format.code, weight.format
    bits = {name: BITS << i for i, name in enumerate(names)}
    if len(names) == 1:
        [name] = names
        format = split(format, name, BYTES)
        bits = {f"{name[0]}{int(name[1:]) + 1}": BITS}
    tensor = weight.tensors[old.source]
    code = format.code
    whole = code.index[dim]
    words = AffineIndex(
        whole.const // BYTES,
        tuple((digit, coef // BYTES) for digit, coef in whole.linear if digit not in bits),
    )
    offset = dataclasses.replace(code.offset, linear=(*code.offset.linear, *bits.items()))
    is_integer = tensor.dtype.is_signed and not tensor.dtype.is_floating_point
    read = dataclasses.replace(
        code,
        index=tuple(words if d == dim else each for d, each in enumerate(code.index)),
        offset=offset,
        width=code.width or BITS,
        signed=code.signed if code.width else is_integer,
        float8=_FLOAT8.get(tensor.dtype, "") or code.float8,
    )
    stride = tuple(s if d == dim or s is None else s // BYTES for d, s in enumerate(tensor.strides))
    shape = tuple(
        size // BYTES if d == dim and size is not None else size
        for d, size in enumerate(tensor.shape)
    )
    tensors = list(weight.tensors)
    tensors[code.source] = dataclasses.replace(
        tensor, dtype=torch.int32, shape=shape, stride=stride
    )
    return Weight(
        dataclasses.replace(format, element=_replaced(format.element, code, read)), tuple(tensors)
    )


def _replaced(field: Field, old: Field, new: Field) -> Field:
    """``field`` with ``new`` for ``old``: itself, or what a table is indexed by."""
    if field == old:
        return new
    index = tuple(
        dataclasses.replace(
            each, fields=tuple((_replaced(part, old, new), coef) for part, coef in each.fields)
        )
        for each in field.index
    )
    return dataclasses.replace(field, index=index)


@functools.lru_cache(maxsize=1024)
def words_of_runs(weight: Weight) -> WordView | None:
    """The view of a weight whose numbers follow one another along K, four neighbours as the bytes
    of a word; None: it has others."""
    format, code = weight.format, weight.format.code
    run = run_of(format, code)
    if format.element != code or run is None or run.digit[0] != "k" or run.width > BITS:
        return None
    tensor = weight.tensors[code.source]
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    format = dataclasses.replace(format, element=run.first)
    if tensor.dtype != torch.int32 or not is_linear(format, run.digit):
        return None
    if any(run.digit in field.digits for field in operands):
        return None  # scales change within a run
    format = split(format, run.digit, BYTES)
    place = int(run.digit[1:]) + 1
    offset = AffineIndex(
        linear=((f"k{place}", BITS),), tables=((run.digit, (0,) * (WORD // BYTES)),)
    )
    element = dataclasses.replace(format.element, offset=offset, width=run.width, add=run.add)
    counted = dataclasses.replace(run, first=format.element)
    view = Weight(dataclasses.replace(format, element=element), weight.tensors)
    return WordView(view, parts=counted.words, run=run.digit)
