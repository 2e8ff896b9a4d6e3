"""Index arithmetic in mixed radix, compared with plain integers at all positions."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_quant.patterns.symbolic.index import (
    MAX_CASES,
    ZERO,
    Datum,
    IndexExpr,
    Space,
    SplitConflict,
    Unsupported,
    Whole,
    from_values,
    merge,
    tabulate,
)

AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def value(space: Space, index: IndexExpr, **at: int) -> int:
    """The value of the index where each axis has this value."""
    digits = {}
    for axis, number in at.items():
        for digit in reversed(space.axes[axis]):
            number, digits[digit] = divmod(number, digit.radix)
        assert number == 0
    total = index.const
    for digit, term in space.leaves(index).terms:
        total += term[digits[digit]] if isinstance(term, tuple) else term * digits[digit]
    return total + space.leaves(index).const - index.const


def values(space: Space, index: IndexExpr, **sizes: int) -> list[int]:
    """The index at all positions, the last axis fastest."""
    positions = itertools.product(*map(range, sizes.values()))
    return [value(space, index, **dict(zip(sizes, at, strict=True))) for at in positions]


def variables(**sizes: int) -> tuple[Any, ...]:
    """A space, and the variable of each axis."""
    space = Space()
    return space, *(space.variable(axis, size) for axis, size in sizes.items())


# ------------------------------------------------------------------------------------------
# variables and digits


def test_a_variable_takes_every_value() -> None:
    space, k = variables(k=12)
    assert values(space, k, k=12) == list(range(12))
    assert k.bounds() == (0, 11)


def test_a_variable_of_one_value_has_no_digit() -> None:
    _, k = variables(k=1)
    assert k == ZERO


def test_an_index_from_before_a_split_means_the_same_after_it() -> None:
    space, k = variables(k=24)
    line, table = k * 5 + 3, space.look_up([v // 6 * 100 + v % 6 for v in range(24)], k)
    [digit] = [digit for digit in space.axes["k"] if digit.radix == 6]
    space.split(digit, 3)
    assert values(space, line, k=24) == [5 * v + 3 for v in range(24)]
    assert values(space, table, k=24) == [v // 6 * 100 + v % 6 for v in range(24)]


def test_a_table_stands_a_split_only_if_it_is_a_sum_over_the_parts() -> None:
    for table, is_sum in (((0, 1, 10, 11), True), ((0, 1, 10, 12), False)):
        space, _ = variables(k=4)
        [digit] = space.axes["k"]
        index = IndexExpr(7, ((digit, table),))
        space.split(digit, 2)
        if is_sum:
            assert values(space, index, k=4) == [7 + v for v in table]
        else:
            with pytest.raises(SplitConflict):
                space.leaves(index)


def test_a_digit_is_split_once_into_parts_that_fit() -> None:
    space, _ = variables(k=12)
    [digit] = space.axes["k"]
    for low in (1, 5, 12, 24):
        with pytest.raises(Unsupported):
            space.split(digit, low)
    space.split(digit, 4)
    assert [part.radix for part in space.axes["k"]] == [3, 4]
    with pytest.raises(Unsupported):
        space.split(digit, 4)


@pytest.mark.parametrize("is_lowest", [False, True])
def test_a_digit_that_is_whole_is_never_split(is_lowest: bool) -> None:
    space = Space(Whole("k", 8, is_lowest))
    k = space.variable("k", 32)
    assert values(space, k, k=32) == list(range(32))
    digit = space.axes["k"][is_lowest]
    assert digit.radix == 8
    with pytest.raises(Unsupported):
        space.split(digit, 2)
    for size in (8, 2 if is_lowest else 16):
        quotient, rest = space.divmod(k, size)
        assert values(space, quotient, k=32) == [v // size for v in range(32)]
        assert values(space, rest, k=32) == [v % size for v in range(32)]
    with pytest.raises(Unsupported):
        Space(Whole("n", 5, is_lowest)).variable("n", 12)


def test_no_table_is_made_of_indices_that_are_data() -> None:
    with pytest.raises(Unsupported):
        tabulate(lambda x, y: x << y, IndexExpr(1), IndexExpr(data=((Datum(None, 0, 7), 1),)))


def test_equal_sums_are_equal() -> None:
    _, k, n = variables(k=6, n=4)
    assert k * 4 + n == n + k * 4
    assert k - k == ZERO
    assert k * 3 - k * 2 == k
    assert (k * 4 + n + 5) - n == k * 4 + 5


def test_the_terms_of_a_digit_that_is_fixed_become_a_constant() -> None:
    space, k, n = variables(k=6, n=4)
    index = k * 4 + n + 1
    [digit] = space.axes["k"]
    assert index.at(digit, 5) == n + 21
    assert from_values(k, [3, 1, 4, 1, 5, 9]).at(digit, 2) == IndexExpr(4)


# ------------------------------------------------------------------------------------------
# division


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12, 24, 48])
def test_quotient_and_remainder(size: int) -> None:
    space, k = variables(k=24)
    quotient, rest = space.divmod(k, size)
    assert values(space, quotient, k=24) == [v // size for v in range(24)]
    assert values(space, rest, k=24) == [v % size for v in range(24)]


@pytest.mark.parametrize("size", [5, 7, 16, 0])
def test_what_does_not_divide_is_unsupported(size: int) -> None:
    space, k = variables(k=24)
    with pytest.raises(Unsupported):
        space.divmod(k, size)


def test_a_sum_divides_if_its_parts_do_not_carry() -> None:
    space, k, n = variables(k=6, n=4)
    quotient, rest = space.divmod(k * 4 + n, 4)
    assert (quotient, rest) == (k, n)
    with pytest.raises(Unsupported):
        space.divmod(k * 4 + n + 1, 4)


def test_negative_numbers_are_rounded_down() -> None:
    space, k = variables(k=8)
    for index, want in ((k - IndexExpr(8), range(-8, 0)), (k * -1 + 7, range(7, -1, -1))):
        quotient, rest = space.divmod(index, 4)
        assert values(space, quotient, k=8) == [v // 4 for v in want]
        assert values(space, rest, k=8) == [v % 4 for v in want]


def test_a_number_in_a_tensor_divides_by_what_bounds_it() -> None:
    space, k = variables(k=8)
    group = IndexExpr(data=((Datum("g", 0, 7), 1),))
    assert space.divmod(k + group * 8, 8) == (group, k)
    with pytest.raises(Unsupported):  # 8 would carry
        space.divmod(k * 8 + IndexExpr(data=((Datum("g", 0, 8), 1),)), 8)
    with pytest.raises(Unsupported):
        space.divmod(k * 8 + IndexExpr(data=((Datum("g", -1, 7), 1),)), 8)


@pytest.mark.parametrize("shape", [(24, 10), (240,), (2, 12, 5, 2), (6, 4, 10), (1, 240, 1)])
def test_a_position_in_another_shape(shape: Sequence[int]) -> None:
    space, k, n = variables(k=24, n=10)
    found = space.unflatten(k * 10 + n, shape)
    flat = ZERO
    for size, index in zip(shape, found, strict=True):
        assert all(0 <= v < size for v in values(space, index, k=24, n=10))
        flat = flat * size + index
    assert values(space, flat, k=24, n=10) == list(range(240))


def test_a_position_in_a_scalar() -> None:
    assert Space().unflatten(ZERO, ()) == ()


# ------------------------------------------------------------------------------------------
# tables


@pytest.mark.parametrize(
    "table",
    [
        [3] * 16,
        [2 * v + 1 for v in range(16)],
        [v // 4 for v in range(16)],
        [v // 4 * 8 + v % 4 for v in range(16)],
        [v // 8 * 8 + AWQ[v % 8] for v in range(16)],
        [15 - v for v in range(16)],
        [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3],
    ],
    ids=str,
)
def test_a_table_of_positions(table: list[int]) -> None:
    space, k = variables(k=16)
    assert values(space, space.look_up(table, k), k=16) == table
    space, k, n = variables(k=2, n=8)
    if table[8] - table[0] == table[15] - table[7] and table[0] != 3:
        assert values(space, space.look_up(table, k * 8 + n), k=2, n=8) == table


def test_a_long_table_needs_structure() -> None:
    size = 2 * MAX_CASES
    space, k = variables(k=size)
    with pytest.raises(Unsupported):
        space.look_up([v * v % 251 for v in range(size)], k)
    groups = [v // 16 * 3 for v in range(size)]
    assert values(space, space.look_up(groups, k), k=size) == groups


def test_a_table_of_two_variables_must_be_a_sum() -> None:
    for function, is_sum in ((operator.add, True), (operator.mul, False), (operator.xor, False)):
        space, k, n = variables(k=4, n=4)
        table = [function(a, b) for a in range(4) for b in range(4)]
        if is_sum:
            assert values(space, space.look_up(table, k * 4 + n), k=4, n=4) == table
        else:
            with pytest.raises(Unsupported):
                space.look_up(table, k * 4 + n)


def test_a_table_is_not_read_beyond_its_ends() -> None:
    space, k = variables(k=8)
    for index in (k + 1, k - IndexExpr(1), k * 2, k + IndexExpr(data=((Datum("g", 0, 0), 1),))):
        with pytest.raises(Unsupported):
            space.look_up(list(range(8)), index)


def test_values_over_the_digits_of_an_index() -> None:
    space, k, n = variables(k=3, n=4)
    joint = k * 4 + n
    squares = [a * a - 2 * b for a in range(3) for b in range(4)]
    assert values(space, from_values(joint, squares), k=3, n=4) == squares
    with pytest.raises(SplitConflict):
        from_values(joint, [a * b for a in range(3) for b in range(4)])
    assert from_values(IndexExpr(5), [7]) == IndexExpr(7)


@pytest.mark.parametrize("function", [operator.add, operator.sub, max, operator.mul])
def test_a_function_of_two_indices_if_it_is_a_sum(function: Callable[[int, int], int]) -> None:
    space, k, n = variables(k=4, n=4)
    a, b = k * 3 + 1, n * 2
    want = [function(3 * x + 1, 2 * y) for x in range(4) for y in range(4)]
    if function in (operator.add, operator.sub):
        assert values(space, tabulate(function, a, b), k=4, n=4) == want
    else:
        with pytest.raises(Unsupported):
            tabulate(function, a, b)
    # of one variable, any function is one
    same = tabulate(function, a, k)
    assert values(space, same, k=4) == [function(3 * x + 1, x) for x in range(4)]


def test_a_function_of_too_many_values_is_not_tabulated() -> None:
    _, k, n = variables(k=MAX_CASES // 2, n=4)
    with pytest.raises(Unsupported):
        tabulate(operator.add, k, n)


def test_cases_with_a_common_form() -> None:
    space, k, n = variables(k=3, n=4)
    [digit] = space.axes["k"]
    group = IndexExpr(data=((Datum("g", 0, 7), 1),))
    merged = merge(digit, [n * 2 + 5, n * 2 + 1, n * 2 + 9])
    assert merged is not None
    want = [2 * b + (5, 1, 9)[a] for a in range(3) for b in range(4)]
    assert values(space, merged, k=3, n=4) == want
    assert merge(digit, [n, n + 1, n + 2]) == n + k
    assert merge(digit, [group + 4, group, group + 2]) is not None
    assert merge(digit, [n, n * 2, n * 3]) is None
    assert merge(digit, [n, n, group]) is None
    assert merge(digit, [group, group, group * 2]) is None


def test_digits_that_are_few_enough_to_go_through() -> None:
    space, k, n = variables(k=8, n=8)
    assert len(space.cases(k * 8 + n)) == 2
    assert (k * 8 + n).values() == list(range(64))
    space, k = variables(k=MAX_CASES + 1)
    with pytest.raises(Unsupported):
        space.cases(k)
    with pytest.raises(Unsupported):
        k.values()


# ------------------------------------------------------------------------------------------
# any sequence of operations


SIZES = st.sampled_from([(4, 6), (8, 8), (16, 3), (1, 12), (24, 1), (7, 5), (32, 4)])
STEP = st.one_of(
    st.tuples(st.just("mul"), st.integers(-3, 9)),
    st.tuples(st.just("add"), st.integers(-9, 40)),
    st.tuples(st.just("quotient"), st.integers(1, 24)),
    st.tuples(st.just("rest"), st.integers(1, 24)),
    st.tuples(st.just("groups"), st.integers(1, 16)),
    st.tuples(st.just("order"), st.permutations(range(4))),
    st.tuples(st.just("plus k"), st.integers(1, 9)),
    st.tuples(st.just("at n"), st.integers(0, 0)),
)


@settings(max_examples=250, deadline=None)
@given(SIZES, st.lists(STEP, min_size=1, max_size=7))
def test_whatever_is_computed_is_right_at_every_position(
    sizes: tuple[int, int], steps: list[tuple[str, Any]]
) -> None:
    """Each step either gives an index that agrees with integers everywhere, or is unsupported. The
    indices from before stay right, whatever was split since."""
    space, k, n = variables(k=sizes[0], n=sizes[1])
    positions = list(itertools.product(*map(range, sizes)))
    index, want = k * sizes[1] + n, [a * sizes[1] + b for a, b in positions]
    known = [(index, want)]
    for name, argument in steps:
        try:
            index, want = _step(space, name, argument, index, want, k, positions)
        except Unsupported:
            continue
        known.append((index, want))
    for index, want in known:
        try:
            found = values(space, index, k=sizes[0], n=sizes[1])
        except SplitConflict:
            continue
        assert found == want
        low, high = space.leaves(index).bounds()
        assert (low, high) == (min(want), max(want))


def _step(
    space: Space,
    name: str,
    argument: Any,
    index: IndexExpr,
    want: list[int],
    k: IndexExpr,
    positions: list[tuple[int, int]],
) -> tuple[IndexExpr, list[int]]:
    if name == "mul":
        return index * argument, [v * argument for v in want]
    if name == "add":
        return index + argument, [v + argument for v in want]
    if name == "quotient":
        return space.divmod(index, argument)[0], [v // argument for v in want]
    if name == "rest":
        return space.divmod(index, argument)[1], [v % argument for v in want]
    if name == "plus k":
        both = zip(want, positions, strict=True)
        return index + k * argument, [v + a * argument for v, (a, _) in both]
    if name == "at n":  # expand: the same for all n
        return k, [a for a, _ in positions]
    size = max(want) + 1
    if name == "groups":
        table = [v // argument for v in range(size)]
    else:
        table = [v // 4 * 4 + argument[v % 4] for v in range(math.ceil(size / 4) * 4)]
    return space.look_up(table, index), [table[v] for v in want]
