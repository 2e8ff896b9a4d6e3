"""Mutations that leave the family of formats, and functions of one element.

What is no affine function of bit fields (a product of codes, a clamp, a wrap, overlapping bits) is
a table if it depends on the codes alone, and else no format. Uninitialized memory and sums along an
axis never are one.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import fx

from tests.support.programs.axes import TABLES
from tests.support.programs.builder import EMPTY, aten
from tests.support.programs.edits import (
    SCATTERS,
    Mutation,
    Rewriter,
    Sites,
    is_unsigned,
    on_codes,
    on_numbers,
    pick,
)


def _clamped(b: Rewriter, x: fx.Node) -> fx.Node:
    value = b.values[x].double()
    finite = value[value.isfinite()]
    middle = float(finite.median()) if finite.numel() else 0.0
    op = b.rng.choice((aten.clamp_min.default, aten.clamp_max.default))
    return b.call(op, x, middle)


def _thresholded(b: Rewriter, x: fx.Node) -> fx.Node:
    zero = b.full([], 0.0, b.dtype(x))
    return b.call(aten.where.self, b.call(aten.gt.Scalar, x, 0.0), x, zero)


def _unwritten(b: Rewriter, x: fx.Node) -> fx.Node:
    """All but the last row or column of ``x``, written into an ``empty``."""
    dim = b.rng.randrange(len(b.shape(x)))
    target = b.empty(b.shape(x), b.dtype(x))
    last = b.shape(x)[dim] - 1
    part = b.slice(x, dim, 0, last)
    return b.call(aten.slice_scatter.default, target, part, dim, 0, last)


def _not_written(sites: Sites, rng: random.Random) -> Any:
    """One of the writes into an ``empty`` left out."""
    nodes = []
    for node in sites.of(*SCATTERS):
        target = node.args[0]
        while target.target in SCATTERS:
            target = target.args[0]
        if target.target is EMPTY:
            nodes.append(node)
    node = pick(rng, nodes)
    return node and (node, lambda b, node, args, kwargs: args[0])


def _scattered_mask(b: Rewriter, x: fx.Node, sites: Sites) -> fx.Node:
    bits = sites.axes.bits
    masks = [m for m in range(1, 1 << bits) if "101" in bin(m) or "1001" in bin(m)]
    return b.mask(x, b.rng.choice(masks))


def _flipped_bit(b: Rewriter, x: fx.Node, sites: Sites) -> fx.Node:
    return b.call(aten.bitwise_xor.Scalar, x, 1 << b.rng.randrange(sites.axes.bits - 1))


def _overlapping(b: Rewriter, x: fx.Node, sites: Sites) -> fx.Node:
    return b.call(aten.bitwise_or.Tensor, x, b.shr(x, 1))


def _of_two_words(b: Rewriter, x: fx.Node, sites: Sites) -> fx.Node:
    """The top bit comes from another word, as in 3-bit packs that cross words."""
    top = sites.axes.bits - 1
    other = b.rolled(x, b.rng.randrange(2))
    low = b.mask(x, (1 << top) - 1)
    return b.call(aten.bitwise_or.Tensor, low, b.shl(b.mask(other, 1), top))


def _wrapping_product(b: Rewriter, x: fx.Node, sites: Sites) -> fx.Node:
    return b.cast(b.mul(b.cast(x, torch.int8), 59), b.dtype(x))


def _wrapping_difference(b: Rewriter, x: fx.Node, sites: Sites) -> fx.Node:
    number = b.rng.randrange(1, 1 << sites.axes.bits)
    return b.sub(b.cast(x, torch.uint8), number)


def _is_three_bits(sites: Sites) -> bool:
    return sites.axes.bits >= 3


def _is_cast_at_once(sites: Sites) -> bool:
    """A later cast to int8 would undo a wrap in uint8."""
    is_integer = sites.axes.zero in ("constant", "integer") or sites.axes.zero.startswith("pack")
    is_direct = sites.axes.cast == "before" or (sites.axes.cast == "promoted" and not is_integer)
    return is_unsigned(sites) and is_direct and sites.axes.element not in TABLES


def _is_no_index(sites: Sites) -> bool:
    return sites.axes.element not in TABLES


def _is_unsigned_of_three(sites: Sites) -> bool:
    return is_unsigned(sites) and _is_three_bits(sites)


LEAVING: tuple[tuple[str, Mutation], ...] = (
    ("tanh", on_numbers(lambda b, x: b.call(aten.tanh.default, x))),
    ("running sum", on_numbers(lambda b, x: b.call(aten.cumsum.default, x, 0))),
    ("uninitialized", on_numbers(_unwritten)),
    ("a write left out", _not_written),
    ("a write left out", _not_written),
)

# Of each element by itself: of codes they are tables, of scaled numbers they are no format.
ELEMENTWISE: tuple[tuple[str, Mutation], ...] = (
    ("square", on_numbers(lambda b, x: b.mul(x, x))),
    ("absolute value", on_numbers(lambda b, x: b.call(aten.abs.default, x))),
    ("clamp", on_numbers(_clamped)),
    ("round", on_numbers(lambda b, x: b.call(aten.round.default, x))),
    ("floor", on_numbers(lambda b, x: b.call(aten.floor.default, x))),
    ("relu", on_numbers(lambda b, x: b.call(aten.relu.default, x))),
    ("threshold", on_numbers(_thresholded)),
    ("sign", on_numbers(lambda b, x: b.call(aten.sign.default, x))),
)

FUNCTIONS: tuple[tuple[str, Mutation], ...] = (
    ("square of codes", on_codes(lambda b, x, sites: b.mul(x, x), _is_no_index)),
    ("absolute codes", on_codes(lambda b, x, sites: b.call(aten.abs.default, x), _is_no_index)),
    ("bits left out", on_codes(_scattered_mask, _is_three_bits)),
    ("a bit flipped", on_codes(_flipped_bit, _is_three_bits)),
    ("overlapping or", on_codes(_overlapping, _is_unsigned_of_three)),
    ("wrapping product", on_codes(_wrapping_product, _is_no_index)),
    ("wrapping difference", on_codes(_wrapping_difference, _is_cast_at_once)),
    ("remainder by 3", on_codes(lambda b, x, sites: b.call(aten.remainder.Scalar, x, 3))),
)

# A number of two fields: a format if the other word is at an affine position.
TWO_FIELDS: Mutation = on_codes(_of_two_words, is_unsigned)
