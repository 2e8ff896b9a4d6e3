"""One compiled graph of a dynamic M, with the kernels of each range of M.

Dynamo and AOTAutograd run once. If the graph has GEMMs of ours whose rows are symbolic, each range
of rows (``spec/row_ranges.py``) that a call meets is compiled for itself, for the largest M of the
range: recognition, passes, kernels, fusion, and Inductor's own kernels. ``RowBuckets`` takes the
place of the compiled graph and picks by the sizes of the call. The general variant is what Inductor
compiles without ranges: with the kernels of the first call's size, for any size. It is compiled at
once with ``compile_buckets="ahead"`` and ``"background"``, else when a call needs it.

The rows of a GEMM are a function of the graph's symbols: M, 4 * M, batch * length, text + 576. All
symbols of the rows but the largest become numbers in a variant, and the range of that one is chosen
so that each GEMM's rows stay in their range. What no range covers (no rows, more variants than
MAX_VARIANTS, a variant that failed) runs the general variant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import fx

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant._compat import later_kernels, variants
from inductor_quant.errors import InductorQuantError
from inductor_quant.options import Options
from inductor_quant.report import events
from inductor_quant.spec import row_ranges

log = logging.getLogger(__name__)

MAX_VARIANTS = 64  # of one graph; more sizes run the general one
# Largest sizes of a range that guards of the program may exclude: 32 rows, say, where strides are
# those of 32 heads.
MAX_EXCLUDED = 8
MAX_SIZES = 1 << 16  # that a graph remembers the variant of
# Variants of one range that guards of Inductor keep from serving all of it.
MAX_OF_ONE_RANGE = 3
MAX_INT32 = (1 << 31) - 1  # what a bound of Inductor's 32-bit indices leaves open

_CAPTURED = (
    "sizes are met for the first time while a stream is captured, where nothing can be compiled: "
    "the graph runs op by op there. Call the function once with each size before the capture, or "
    "compile with the option inductor_quant.compile_buckets='ahead'"
)

Sizes = Mapping[sympy.Symbol, int]

# Within the compilation of a general variant.
_serves_any_size: ContextVar[bool] = ContextVar("inductor_quant_any_size", default=False)


def compile_graph(
    inner: Callable[..., Any], gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Inductor's compilation of a graph, ``inner(gm, inputs, **kwargs)``, with a variant for each
    range of rows if its GEMMs of ours have symbolic rows."""
    options = fallback.active_options()
    graph = None
    is_open = not (fallback.is_inside() or _serves_any_size.get())
    if options is not None and options.row_buckets and is_open:
        graph = _kept(gm, inputs, kwargs)
    if graph is None or options is None:
        return fallback.compile_graph(lambda: inner(gm, inputs, **kwargs), gm)
    if options.compile_buckets == "met" and not options.verify and not graph.reports_strides:
        rows = _recognized(graph, options)
        if rows.kinds:
            return RowBuckets(graph, None, rows, options)
    general = fallback.compile_graph(lambda: inner(gm, inputs, **kwargs), gm)
    rows = Rows.of(variants.notes_of(general), graph)
    return RowBuckets(graph, general, rows, options) if rows.kinds else general


def _recognized(graph: variants.Graph, options: Options) -> Rows:
    """The rows of the GEMMs that our pass finds in a copy of the graph. None if it has users'
    passes before it, or fails: the general variant's compilation deals with that."""
    rows, passes = Rows(), compat.active_passes(fallback.SLOT)
    if len(passes) == 1:
        with events.held(lambda _: bool(rows.kinds)):  # else it compiles, and decides, again
            rows = fallback.run(lambda: Rows.of(graph.notes(passes[0]), graph), Rows, options)
    return rows


def _kept(
    gm: fx.GraphModule, inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> variants.Graph | None:
    """The graph for later compilations; None: the general variant serves all sizes. A training
    graph's backward is compiled once, and a package is one graph."""
    is_dynamic = any(isinstance(value, torch.SymInt) for value in inputs)
    if not is_dynamic or not kwargs.get("is_inference") or compat.is_saved_whole():
        return None
    graph = variants.Graph(gm, inputs, kwargs)
    return graph if graph.is_backed else None


@dataclasses.dataclass
class Rows:
    """``kinds``: the symbolic rows of GEMMs -> the kinds of these GEMMs (``row_ranges.tops``), if
    they have thresholds. ``depths``: symbols in K, which weights fix."""

    kinds: dict[sympy.Expr, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    depths: set[sympy.Symbol] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, notes: Sequence[str], graph: variants.Graph) -> Rows:
        found, symbols = cls(), {str(each): each for each in graph.positions}
        for note in notes:
            kind, *sizes = note.split("; ")
            if not row_ranges.tops([kind]):
                continue
            try:
                m, k = (sympy.sympify(size, locals=symbols) for size in sizes)
            except (sympy.SympifyError, TypeError, SyntaxError):
                continue
            if m.free_symbols and m.free_symbols | k.free_symbols <= graph.positions.keys():
                found.kinds[m] = (*found.kinds.get(m, ()), kind)
                found.depths |= k.free_symbols
        return found


class _Busy(Exception):
    """Another thread compiles, and this one may not wait."""


class _Gemms:
    """GEMMs with the same rows: ``rows(sizes)``, and the largest M of each of their ranges."""

    def __init__(
        self, rows: sympy.Expr, kinds: tuple[str, ...], given: bool | tuple[int, ...]
    ) -> None:
        self.expr, self.rows, self.kinds = rows, variants.Computed(rows), kinds
        self.tops = given if isinstance(given, tuple) else row_ranges.tops(kinds)

    def line(self, symbol: sympy.Symbol, numbers: Sizes) -> tuple[int, int] | None:
        """``(a, b)`` if the rows are a * symbol + b, a >= 0, with ``numbers`` for others."""
        rows = self.expr.xreplace({each: sympy.Integer(size) for each, size in numbers.items()})
        factor, rest = rows.coeff(symbol, 1), rows.coeff(symbol, 0)
        is_line = factor.is_Integer and rest.is_Integer and factor >= 0
        is_line = is_line and sympy.expand(rows - factor * symbol - rest) == 0
        return (int(factor), int(rest)) if is_line else None


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The sizes that a variant is compiled for: ``low`` to ``high`` (None: no bound) of a symbol,
    multiples of ``step``, for the value ``hint``, and the values of the other symbols of the
    rows."""

    symbol: sympy.Symbol
    low: int
    high: int | None
    step: int
    hint: int
    numbers: tuple[tuple[sympy.Symbol, int], ...]


class RowBuckets:
    """What AOTAutograd takes for the compiled graph."""

    _boxed_call = True

    def __init__(
        self,
        graph: variants.Graph,
        general: Callable[[list[Any]], Any] | None,
        rows: Rows,
        options: Options,
    ) -> None:
        self._graph, self._options = graph, options
        # The general variant (), and those for the sizes that its guards exclude.
        self._general: dict[tuple[int, ...], variants.Variant] = {}
        if general is not None:
            self._general[()] = variants.Variant(general, ())
        self._gemms = [
            _Gemms(expr, kinds, options.row_buckets) for expr, kinds in rows.kinds.items()
        ]
        of_rows = {symbol for expr in rows.kinds for symbol in expr.free_symbols}
        self._candidates = sorted(of_rows - rows.depths, key=str)
        bounds = {each: graph.bounds(each) for each in self._candidates}
        self._bounds = {each: (low or 0, high) for each, (low, high) in bounds.items()}
        self._guards = graph.guards()
        self._known_lines: dict[Any, list[tuple[int, int] | None]] = {}
        self._is_in_background = options.compile_buckets == "background"
        self._symbols = sorted(of_rows | rows.depths, key=str)
        self._positions = operator.itemgetter(*(graph.positions[s] for s in self._symbols))
        self._by_sizes: dict[Any, Callable[[list[Any]], Any]] = {}
        self._variants: dict[Bucket, variants.Variant | None] = {}  # None: it failed, or is pending
        self._pending: set[Bucket] = set()  # in the background
        self._pending_lock = threading.Lock()
        # Of the ranges that are compiled ahead, until all are.
        self._later: dict[Bucket, later_kernels.Later] | None = None
        if options.compile_buckets == "ahead":
            self._compile_ahead()

    def __call__(self, inputs: list[Any]) -> Any:
        call = self._by_sizes.get(self._positions(inputs))
        return (call or self._found(inputs))(inputs)

    def _found(self, inputs: list[Any]) -> Callable[[list[Any]], Any]:
        """What serves the sizes of a call that meets them for the first time."""
        sizes = {each: int(inputs[at]) for each, at in self._graph.positions.items()}
        try:
            call, is_final = self._choose(sizes)
        except _Busy:
            return self._general[()].call
        if is_final:
            if len(self._by_sizes) >= MAX_SIZES:
                self._by_sizes.clear()
            self._by_sizes[self._positions(inputs)] = call
        return call

    def _choose(self, sizes: Sizes) -> tuple[Callable[[list[Any]], Any], bool]:
        """What serves ``sizes``, and whether another call of these sizes need not ask again."""
        is_final = True
        for bucket in self._buckets(sizes):
            if bucket not in self._variants:
                of_range = self._of_range(bucket)
                if serving := [each for each in of_range if each.serves(sizes)]:
                    return serving[0].call, is_final and serving[0].symbols <= {*self._symbols}
                if len(self._variants) >= MAX_VARIANTS or len(of_range) >= MAX_OF_ONE_RANGE:
                    break
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    if self._general:
                        return self._any_size(sizes, is_final=False)
                    fallback.warn_once(_CAPTURED)
                    return self._graph.run_eagerly, False
                self._start(bucket)
            variant = self._variants[bucket]
            if variant is None:
                return self._any_size(sizes, is_final=bucket not in self._pending)
            is_final = is_final and variant.symbols <= {*self._symbols}
            if variant.serves(sizes):
                return variant.call, is_final
        return self._any_size(sizes, is_final=is_final)

    def _any_size(self, sizes: Sizes, *, is_final: bool) -> tuple[Callable[[list[Any]], Any], bool]:
        """The general variant, or where its guards exclude ``sizes`` one for them alone; as
        ``_choose``."""
        for numbers in ({}, sizes):
            key = tuple(numbers.values())
            if key not in self._general:
                with variants.lock():
                    if key not in self._general:  # another thread met it
                        self._general[key] = self._compiled_for_any_size(numbers)
            variant = self._general[key]
            is_final = is_final and variant.symbols <= {*self._symbols}
            if variant.serves(sizes):
                break
        return variant.call, is_final

    def _compiled_for_any_size(self, numbers: Sizes) -> variants.Variant:
        token = _serves_any_size.set(True)
        try:
            with events.held(lambda event: not events.is_decision(event)):  # ``_recognized`` did
                return self._graph.compile(numbers, {}, {})
        finally:
            _serves_any_size.reset(token)

    def _buckets(self, sizes: Sizes) -> Iterator[Bucket]:
        """The bucket of ``sizes``; after it, should its variant not serve them, one that is
        compiled for them."""
        if any(gemms.rows(sizes) <= 0 for gemms in self._gemms):
            return
        each, numbers, lines = self._free(sizes)
        if each is None:
            return
        (low, high), is_open, step = self._bounds[each], True, 1
        for (factor, rest), gemms in zip(lines, self._gemms, strict=True):
            if factor:
                rows = factor * sizes[each] + rest
                least, most = row_ranges.range_of(rows, gemms.tops)
                low = max(low, -(-(least - rest) // factor))
                if most is not None:
                    largest, is_open = (most - rest) // factor, False
                    high = largest if high is None else min(high, largest)
                multiple = row_ranges.step(gemms.kinds, rows)
                if factor % multiple and rest % multiple == 0:
                    step = max(step, multiple)
        largest = max(2 * (low - 1), 1) if is_open or high is None else high
        largest = largest if high is None else min(largest, high)
        # The largest size like this one that the program's guards admit. Multiples are compiled for
        # the largest multiple, other sizes likewise.
        is_multiple, is_bound = sizes[each] % step == 0, largest == high
        alike = (
            size
            for size in range(largest, (max(low, sizes[each]) if is_bound else low) - 1, -1)
            if (size % step == 0) == is_multiple
        )
        candidates = list(itertools.islice(alike, MAX_EXCLUDED + 1))
        admitted = (size for size in candidates if self._admits({**numbers, each: size}))
        hint = next(admitted, sizes[each])
        if is_bound and candidates:
            high = hint if hint in candidates else candidates[0]
        low, step = (low + -low % step, step) if is_multiple else (low, 1)
        hints = [hint, sizes[each]]
        for hint in dict.fromkeys(hints):
            yield Bucket(each, low, high, step, hint, tuple(numbers.items()))

    def _admits(self, sizes: Sizes) -> bool:
        """Whether the program's own guards on these sizes alone hold."""
        return all(guard(sizes) for guard in self._guards if guard.symbols <= sizes.keys())

    def _free(
        self, sizes: Sizes
    ) -> tuple[sympy.Symbol | None, dict[sympy.Symbol, int], list[tuple[int, int]]]:
        """The largest symbol in which all rows are linear (None: there is none), the values of the
        others, and the lines."""
        for each in sorted(self._candidates, key=lambda s: -sizes[s]):
            numbers = {s: sizes[s] for s in self._symbols if s is not each}
            lines = self._lines(each, numbers)
            found = [line for line in lines if line is not None]
            if len(found) == len(lines) and any(factor for factor, _ in found):
                return each, numbers, found
        return None, {}, []

    def _lines(self, each: sympy.Symbol, numbers: Sizes) -> list[tuple[int, int] | None]:
        """The rows as lines in a symbol. Sizes of a known variant do not wait for the lock."""
        key = (each, *numbers.values())
        if key not in self._known_lines:
            if not variants.lock().acquire(blocking=not self._is_in_background):
                raise _Busy
            try:
                found = [gemms.line(each, numbers) for gemms in self._gemms]
            finally:
                variants.lock().release()
            if len(self._known_lines) >= MAX_SIZES:
                self._known_lines.clear()
            self._known_lines[key] = found
        return self._known_lines[key]

    def _of_range(self, bucket: Bucket) -> list[variants.Variant]:
        """The variants of the same range, for other sizes."""
        known = list(self._variants.items())
        same = [v for b, v in known if dataclasses.replace(b, hint=bucket.hint) == bucket]
        return [variant for variant in same if variant is not None]

    def _start(self, bucket: Bucket) -> None:
        """Compile the bucket's variant, or have it compiled."""
        if self._is_in_background:
            with self._pending_lock:
                if bucket in self._variants:  # another thread met it
                    return
                self._pending.add(bucket)
                self._variants[bucket] = None
            _background().submit(self._compile, bucket)
        else:
            with variants.lock():
                if bucket not in self._variants:  # another thread met it
                    self._compile(bucket)

    def _compile(self, bucket: Bucket) -> None:
        start = time.perf_counter()
        each, low, high = bucket.symbol, bucket.low, bucket.high
        numbers, ranges = dict(bucket.numbers), {each: (low, high, bucket.step)}
        if low == high:
            numbers, ranges = numbers | {each: low}, {}
        name = self._name(bucket)
        try:
            with contextlib.ExitStack() as stack:
                if self._later is not None:
                    self._later[bucket] = stack.enter_context(later_kernels.later())
                stack.enter_context(fallback.once())
                stack.enter_context(events.bucket(name))
                compiled = self._graph.compile(numbers, ranges, {each: bucket.hint})
        except Exception as error:
            self._variants[bucket] = None
            if self._options.on_error == "raise" and bucket not in self._pending:
                raise InductorQuantError(
                    f"inductor_quant failed for M {name}: {error!r}"
                ) from error
            log.warning("failed for M %s", name, exc_info=True)
            fallback.warn_once(
                "inductor_quant failed on a range of M, which runs the kernels that were chosen "
                f"for the size of the first call: {error!r}"
            )
        else:
            self._variants[bucket] = compiled
            seconds = time.perf_counter() - start
            events.add(events.RowBucket(name, seconds))
            log.info("M %s is compiled, in %.1f s", name, seconds)
        finally:
            self._pending.discard(bucket)

    def _name(self, bucket: Bucket) -> str:
        """The range of rows, of the GEMMs with most of them: "17..32", "2049..", "1", "68..124 by
        4"."""

        def rows(value: int) -> int:
            sizes = dict(bucket.numbers) | {bucket.symbol: value}
            return max(gemms.rows(sizes) for gemms in self._gemms)

        low, high = bucket.low, bucket.high
        if low == high:
            return str(rows(low))
        name = f"{rows(low)}..{rows(high) if high is not None and high < MAX_INT32 else ''}"
        return name if bucket.step == 1 else f"{name} by {rows(low + bucket.step) - rows(low)}"

    def _compile_ahead(self) -> None:
        """All ranges that the largest symbol of the first call may have, the others as there.

        Their kernels are compiled beside each other, while code is generated for the next range. A
        range with a kernel that fails is compiled again, by itself."""
        kernels: dict[Bucket, later_kernels.Later] = {}
        self._later = kernels
        try:
            self._generate_ahead()
        finally:
            self._later = None
        known: dict[int, tuple[Any, Any]] = {}
        for bucket, later in kernels.items():
            try:
                later.wait(known)
            except Exception:
                log.info("a kernel failed for M %s", self._name(bucket), exc_info=True)
                self._compile(bucket)

    def _generate_ahead(self) -> None:
        sizes = self._graph.first
        each, _, _ = self._free(sizes)
        if each is None:
            return
        value, most = self._bounds[each]
        while most is None or value <= most:
            bucket = next(self._buckets({**sizes, each: value}), None)
            if bucket is None:
                value += 1  # no rows
                continue
            for other in range(value, value + row_ranges.LARGEST_STEP):
                if most is None or other <= most:
                    self._choose({**sizes, each: other})
            if bucket.high is None:
                break
            value = bucket.high + 1


@functools.cache
def _background() -> ThreadPoolExecutor:
    """One thread: compilations hold a lock."""
    return ThreadPoolExecutor(1, thread_name_prefix="inductor_quant")
