"""K in an order in which each lane of ``wgmma`` has all values of the words that it reads.

Of 16 of K a lane has two neighbours, and two 8 behind them, so the four lanes that share a row
share a word of eight values of 4 bits, too: each takes a byte, and moves its values apart. If the
word of a lane has what it multiplies, it reads a quarter, and two values take a shift, a mask and
nothing else. With 32 of K, word t of four, and value 4 h + c of eight:

    in memory   k = 8 t + 4 h + c
    in order    k = 8 c + 2 t + h

so x, viewed as [..., K / 32, 8, 4], is transposed. Two values that are looked up in a table at a
time are a byte, values 2 c + h. The order is for x that is written for the kernel in any case.
"""

from __future__ import annotations

import functools

from inductor_quant.kernels.codegen.digits.order import Order, divided
from inductor_quant.kernels.codegen.digits.tile import word_strides
from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.problem import Weight
from inductor_quant.spec.weight_format import Field

WIDTH, WORD, LANES = 4, 8, 4  # bits of a value, values of a word, lanes that share a row
COMPUTED, LOOKED_UP = WORD // 2, 1  # values apart are those that are dequantized together
BLOCK = WORD * LANES


@functools.lru_cache(maxsize=1024)
def lane_order(weight: Weight) -> Order | None:
    """That of a weight whose words have neighbours along K, and are such neighbours; None: it has
    others, or a number for fewer than 32 of K."""
    format = weight.format
    if not _are_words_of_k(as_words(weight).weight) or format.shape[0] % BLOCK:
        return None
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    sizes = [format.block(field)[0] for field in operands]
    if any(size > 0 and size % BLOCK for size in sizes):
        return None
    apart = COMPUTED if format.element == format.code else LOOKED_UP
    for part in (BLOCK, WORD, 2 * apart, apart):
        found = divided(format, "k", part)
        if found is None:
            return None
        format = found
    places = {name: format.weight_of(name) for name in format.digits("k")}
    blocks = [name for name, place in places.items() if place >= BLOCK]
    lanes = [name for name, place in places.items() if WORD <= place < BLOCK]
    others = [name for name, place in places.items() if place < WORD and place != apart]
    pairs = [name for name, place in places.items() if place == apart]
    return Order(format, (*blocks, *others, *lanes, *pairs))


def _are_words_of_k(weight: Weight) -> bool:
    """Whether word ``k // WORD`` of a column has the values of WORD neighbours along K in order."""
    format, code = weight.format, weight.format.code
    if code.width != WIDTH or code.high or code.minus:
        return False
    if weight.tensors[code.source].dtype.itemsize * 8 != WIDTH * WORD or code.offset.tables:
        return False
    strides, offsets = word_strides(weight, code), dict(code.offset.linear)

    def is_in_order(name: str) -> bool:
        place = format.weight_of(name)
        if place < WORD:
            return offsets.get(name) == WIDTH * place and strides.get(name) == 0
        return place >= BLOCK or strides.get(name) == place // WORD

    return all(map(is_in_order, format.digits("k"))) and set(offsets) <= set(format.digits("k"))
