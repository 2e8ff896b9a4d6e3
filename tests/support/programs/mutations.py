"""Near misses: programs with one change.

A mutation changes a graph in one place. Those of ``ALTERING`` may give another legitimate format,
those of ``LEAVING`` never do. Whether a mutant is a near miss at all is decided by execution: its W
differs from the original's.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import fx

from tests.support.programs.builder import CAST, aten, prims
from tests.support.programs.dequantization import Program, draw_program
from tests.support.programs.edits import (
    SCALAR_SHIFTS,
    SCATTERS,
    Mutation,
    Rewriter,
    Sites,
    and_then,
    changed,
    is_node,
    is_unsigned,
    on_codes,
    on_numbers,
    pick,
    same_bits,
)
from tests.support.programs.leaving import ELEMENTWISE, FUNCTIONS, LEAVING, TWO_FIELDS

ATTEMPTS = 12  # programs tried for one mutation


def _wider_or_narrower(mask: int, rng: random.Random) -> int:
    lowest = mask & -mask
    return rng.choice((mask << 1 | lowest, mask & ~lowest, (mask >> 1) & mask))


def _shift_table(sites: Sites, rng: random.Random) -> Any:
    """One entry of a constant table changed, or the start or step of an iota."""
    nodes = list(sites.program.module.graph.nodes)
    tables = [node for node in nodes if node.op == "get_attr"]
    iotas = [node for node in sites.calls if node.target is prims.iota.default]
    node = pick(rng, tables + iotas)
    if node is None:
        return None
    if node in iotas:
        name, change = rng.choice((("start", 1), ("step", 1), ("step", -1)))

        def moved(b: Rewriter, node: Any, args: Any, kwargs: Any) -> fx.Node:
            return b.call(node.target, *args, **{**kwargs, name: kwargs[name] + change})

        return node, moved
    value = sites.value(node).clone()
    at, other = rng.randrange(len(value)), rng.randrange(len(value))
    value[at] = rng.choice((value[other], value[at] + 1, value[at] - 1))
    return node, lambda b, node, args, kwargs: b.attribute(value)


def _cat_pieces(sites: Sites, rng: random.Random) -> Any:
    """Two pieces exchanged, or one replaced by another one, zeros, or a piece of another tensor."""
    node = pick(rng, sites.of(aten.cat.default))
    if node is None:
        return None
    what = rng.choice(("exchanged", "twice", "zeros", "other tensor"))

    def edit(b: Rewriter, node: Any, args: Any, kwargs: Any) -> fx.Node:
        parts, *rest = args
        parts = list(parts)
        i, j = rng.sample(range(len(parts)), 2)
        if what == "exchanged":
            parts[i], parts[j] = parts[j], parts[i]
        elif what == "twice":
            parts[i] = parts[j]
        elif what == "zeros":
            parts[i] = b.full(b.shape(parts[i]), 0, b.dtype(parts[i]))
        else:
            parts[i] = b.more(parts[i])
        return b.call(node.target, parts, *rest, **kwargs)

    return node, edit


def _scale_groups(sites: Sites, rng: random.Random) -> Any:
    """The scales or zeros of the next group."""
    inputs = sites.program.module.graph.find_nodes(op="placeholder")
    nodes = [node for node in inputs if node.target in ("scale", "zero", "scale2", "g_idx")]
    node = pick(rng, [n for n in nodes if any(size > 1 for size in sites.value(n).shape)])
    if node is None:
        return None
    dim = rng.choice([i for i, size in enumerate(sites.value(node).shape) if size > 1])
    return node, and_then(lambda b, x: b.rolled(x, dim))


def _narrow_cast(sites: Sites, rng: random.Random) -> Any:
    """Integers cast to a narrower type, and back."""
    node = pick(rng, sorted(sites.integers(), key=lambda node: node.name))
    narrow = rng.choice((torch.int8, torch.uint8, torch.int16))

    def wrap(b: Rewriter, x: fx.Node) -> fx.Node:
        return b.call(CAST, b.call(CAST, x, narrow), b.dtype(x))

    return node and (node, and_then(wrap))


def _byte_order(sites: Sites, rng: random.Random) -> Any:
    """The bytes of each word reversed."""
    nodes = [
        node
        for node in sites.of(aten.view.dtype)
        if sites.value(node).shape[-1] != sites.value(node.args[0]).shape[-1]
    ]
    node = pick(rng, nodes)
    if node is None:
        return None

    def wrap(b: Rewriter, x: fx.Node) -> fx.Node:
        *rest, last = b.shape(x)
        size = last // sites.value(node.args[0]).shape[-1]
        order = b.constant(torch.arange(size - 1, -1, -1))
        split = b.call(aten.reshape.default, x, [*rest, last // size, size])
        return b.call(aten.reshape.default, b.index(split, len(rest) + 1, order), [*rest, last])

    return node, and_then(wrap)


def _scatter_place(sites: Sites, rng: random.Random) -> Any:
    """A slot written to another one's place."""
    node = pick(rng, sites.of(*SCATTERS))
    if node is None:
        return None

    def edit(b: Rewriter, node: Any, args: Any, kwargs: Any) -> fx.Node:
        changed = list(args)
        step = rng.choice((1, -1))
        changed[3] += step
        return b.call(node.target, *changed, **kwargs)

    return node, edit


def _turned(sites: Sites, rng: random.Random) -> Any:
    """A permute whose last two dimensions are exchanged, and the shape restored."""
    node = pick(rng, sites.of(aten.permute.default))
    if node is None:
        return None

    def edit(b: Rewriter, node: Any, args: Any, kwargs: Any) -> fx.Node:
        x, dims = args
        other = [*dims[:-2], dims[-1], dims[-2]]
        shape = b.shape(b.call(node.target, x, dims))
        return b.call(aten.reshape.default, b.call(node.target, x, other), shape)

    return node, edit


def _swapped_operands(sites: Sites, rng: random.Random) -> Any:
    nodes = [n for n in sites.of(aten.sub.Tensor, aten.div.Tensor) if all(map(is_node, n.args))]
    node = pick(rng, nodes)

    def edit(b: Rewriter, node: Any, args: Any, kwargs: Any) -> fx.Node:
        return b.call(node.target, args[1], args[0])

    return node and (node, edit)


def _dropped(sites: Sites, rng: random.Random) -> Any:
    """A mask, a shift, a sign fix or a step left out."""
    targets = (aten.bitwise_and.Scalar, aten.bitwise_xor.Scalar, aten.remainder.Scalar)
    steps = (aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.where.self)
    node = pick(rng, sites.of(*targets, *steps, *SCALAR_SHIFTS))
    if node is None or node.args[0] not in sites.computed:
        return None

    def edit(b: Rewriter, node: Any, args: Any, kwargs: Any) -> fx.Node:
        return b.call(CAST, args[0], sites.value(node).dtype)

    return node, edit


def _activation(sites: Sites, rng: random.Random) -> Any:
    """A scale that depends on another input, as if on the activation: halved or not."""
    nodes = sites.program.module.graph.find_nodes(op="placeholder")
    node = pick(rng, [n for n in nodes if n.target == "scale" and sites.axes.scale != "exp2"])

    def wrap(b: Rewriter, x: fx.Node) -> fx.Node:
        largest = b.call(aten.amax.default, b.more(x), [])
        is_positive = b.call(aten.relu.default, b.call(aten.sign.default, largest))
        return b.mul(x, b.call(aten.exp2.default, b.call(aten.neg.default, is_positive)))

    return node and (node, and_then(wrap))


def _halves(b: Rewriter, x: fx.Node) -> fx.Node:
    size = b.shape(x)[0]
    half = size // 3 or 1
    return b.cat([b.slice(x, 0, half), b.slice(x, 0, 0, half)], 0)


def _zeroed_row(b: Rewriter, x: fx.Node) -> fx.Node:
    row = b.slice(x, 0, 0, 1)
    zeros = b.full(b.shape(row), 0, b.dtype(row))
    return b.call(aten.slice_scatter.default, x, zeros, 0, 0, 1)


def _looked_up(b: Rewriter, x: fx.Node, sites: Sites) -> fx.Node:
    """Through a random look-up table, which may be a format again."""
    table = torch.from_numpy(b.numbers.integers(0, 1 << sites.axes.bits, 1 << sites.axes.bits))
    codes = b.cast(x, torch.int64)
    return b.cast(b.index(b.constant(table), 0, codes), b.dtype(x))


def _by_one(number: int, rng: random.Random) -> int:
    return number + rng.choice((1, -1))


def _shift_by_one(amount: int, rng: random.Random) -> int:
    return max(0, _by_one(amount, rng))


def _other_modulus(number: int, rng: random.Random) -> int:
    return rng.choice((2 * number, number // 2, number + 1, number - 1))


ALTERING: tuple[tuple[str, Mutation], ...] = (
    (
        "shift off by one",
        changed(1, _shift_by_one, *SCALAR_SHIFTS),
    ),
    ("table changed", _shift_table),
    ("mask changed", changed(1, _wider_or_narrower, aten.bitwise_and.Scalar)),
    ("cat changed", _cat_pieces),
    ("next group", _scale_groups),
    ("number changed", changed(1, _by_one, aten.sub.Tensor)),
    ("number changed", changed(1, _by_one, aten.add.Tensor)),
    ("narrow cast", _narrow_cast),
    ("byte order", _byte_order),
    ("scatter moved", _scatter_place),
    (
        "remainder changed",
        changed(1, _other_modulus, aten.remainder.Scalar),
    ),
    (
        "division changed",
        changed(1, _other_modulus, aten.div.Tensor_mode),
    ),
    (
        "xor changed",
        changed(1, _other_modulus, aten.bitwise_xor.Scalar),
    ),
    (
        "threshold changed",
        changed(1, _by_one, aten.gt.Scalar, aten.ge.Scalar),
    ),
    ("dimensions exchanged", _turned),
    ("operands exchanged", _swapped_operands),
    ("step left out", _dropped),
    ("scale of an activation", _activation),
    ("rows moved", on_numbers(_halves)),
    ("row of zeros", on_numbers(_zeroed_row)),
    ("bits of two words", TWO_FIELDS),
    ("doubled code", on_codes(lambda b, x, sites: b.shl(x, 1), is_unsigned)),
    ("table of the program", on_codes(_looked_up, is_unsigned)),
)


# Near misses that are no format, that may be one again, and functions of a field, which are one.
OUTSIDE, OTHER, FUNCTION = "near misses outside the family", "other near misses", "functions"
KINDS = {OUTSIDE: LEAVING + ELEMENTWISE, OTHER: ALTERING, FUNCTION: FUNCTIONS}


def mutate(
    program: Program, rng: random.Random, kind: tuple[str, Mutation], group: str
) -> Program | None:
    """``program`` changed in one place; None if ``kind`` is not possible here, or W stays."""
    name, mutation = kind
    found = mutation(Sites(program), rng)
    if found is None or (kind in ELEMENTWISE and _is_of_codes(found[0])):
        return None
    try:
        mutant = Rewriter(program, rng).rewritten(*found)
    except (RuntimeError, IndexError):
        return None  # an invalid program: shapes that do not fit, an index out of range
    mutant.mutation, mutant.must_reject = f"{name} at {found[0].name}", group == OUTSIDE
    if mutant.values[mutant.output].shape != program.values[program.output].shape:
        return None
    return None if same_bits(mutant.weight, program.weight) else mutant


def _is_of_codes(node: fx.Node) -> bool:
    """Whether ``node`` depends on no input but the stored codes, tables and single numbers."""
    todo, seen = [node], {node}
    while todo:
        for item in todo.pop().all_input_nodes:
            if item not in seen:
                seen.add(item)
                todo.append(item)
    inputs = [item for item in seen if item.op == "placeholder"]
    return all(
        item.name.startswith(("words", "lut", "table")) or item.meta["val"].numel() == 1
        for item in inputs
    )


def near_miss(seed: object, group: str) -> Program:
    """The mutant of a seed and a group.

    The mutation is drawn first, so that those that few programs allow come up as well.
    """
    kinds = random.Random(f"{seed}/{group}")
    for attempt in range(100):
        kind = kinds.choice(KINDS[group])
        for draw in range(ATTEMPTS):
            rng = random.Random(f"{seed}/{group}/{attempt}/{draw}")
            mutant = mutate(draw_program(rng.random()), rng, kind, group)
            if mutant is not None:
                return mutant
    raise AssertionError(f"no near miss for seed {seed}")
