"""A graph that Inductor compiles again for other sizes: new symbols, new inputs, and what the first
compilation found around it.

A variant has a ``ShapeEnv`` of its own: the guards that it adds concern nobody else, and its ranges
and hints are read by all of Inductor. Inductor propagates all sizes from the inputs, and the graph
itself holds none, so only inputs are made anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from inductor_quant._compat import padding
from inductor_quant._compat.symbols import config_module, symbol

# Prefix of our entries among Inductor's counters. Its caches keep the counters of a graph.
_NOTE = "inductor_quant: "


def note(text: str) -> None:
    """Attach ``text`` to the graph that is being compiled, also when a cache serves it."""
    symbol("torch._dynamo.utils:counters")["inductor"][_NOTE + text] += 1


def notes_of(compiled: Any) -> list[str]:
    """What ``note`` attached to a compiled graph."""
    return _notes(getattr(compiled, "counter_deltas", None) or {})


def _notes(counted: Mapping[str, int]) -> list[str]:
    return [name.removeprefix(_NOTE) for name in counted if name.startswith(_NOTE)]


def is_multiple(size: int | torch.SymInt, factor: int) -> bool:
    """Whether a size is a multiple in any call that is compiled for. Adds no guard."""
    is_true = symbol("torch.fx.experimental.symbolic_shapes:statically_known_true")
    return bool(is_true(size % factor == 0))


def lock() -> Any:
    """Dynamo's lock, under which no other thread compiles."""
    return symbol("torch._dynamo.convert_frame:compile_lock")


class Computed:
    """A sympy expression as Python code: ``computed(sizes)`` is its value.

    Threads share what sympy knows of an expression while it finds it out, so only one at a time may
    ask it: the one that holds the lock. What runs in each call is computed without sympy.
    """

    def __init__(self, expr: Any) -> None:
        text = symbol("torch.utils._sympy.printers:PythonPrinter")().doprint(expr)
        self._code = compile(text, "<sizes>", "eval")
        self._names = [(str(each), each) for each in expr.free_symbols]
        self.symbols = {each for _, each in self._names}

    def __call__(self, sizes: Mapping[sympy.Symbol, int]) -> Any:
        values = {name: sizes[each] for name, each in self._names}
        return eval(self._code, {"math": math, "torch": torch}, values)


# The least and the most that a symbol is, None: no bound, and what it is a multiple of.
Range = tuple[int | None, int | None, int]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A compiled graph, and the guards on sizes that its compilation added."""

    call: Callable[[list[Any]], Any]
    guards: tuple[Computed, ...]

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return {symbol for guard in self.guards for symbol in guard.symbols}

    def serves(self, sizes: Mapping[sympy.Symbol, int]) -> bool:
        return all(guard(sizes) for guard in self.guards)


class Graph:
    """A copy of a graph that Inductor is about to compile.

    ``positions``: the symbols that are inputs -> which. ``first``: their values in the first call.
    """

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._gm, self._inputs, self._kwargs = _copied(gm), list(inputs), dict(kwargs)
        self.positions: dict[sympy.Symbol, int] = {}
        self._env: Any = None
        for position, value in enumerate(inputs):
            if isinstance(value, torch.SymInt):
                self._env = value.node.shape_env
                if value.node.expr.is_Symbol:
                    self.positions.setdefault(value.node.expr, position)
        self._config = config_module().get_config_copy()
        tracing = symbol("torch._guards:TracingContext.try_get")()
        kept = ("params_flat", "params_flat_unwrap_subclasses", "fw_metadata", "fakify_first_call")
        self._tracing = {name: getattr(tracing, name, None) for name in kept}
        self._context = symbol("torch._guards:CompileContext.try_get")()
        self._choices = symbol("torch._inductor.virtualized:V").choices

    @property
    def reports_strides(self) -> bool:
        """Whether AOTAutograd needs the strides of the outputs before the first call."""
        return bool(self._tracing["fakify_first_call"])

    @property
    def first(self) -> dict[sympy.Symbol, int]:
        return {each: int(self._env.backed_var_to_val[each]) for each in self.positions}

    @property
    def is_backed(self) -> bool:
        """Whether all sizes are functions of inputs with values in the first call."""
        env, nodes = self._env, self._gm.graph.nodes
        return (
            env is not None
            and bool(self.positions)
            and all(each in env.backed_var_to_val for each in self._free_symbols())
            and not any(node.meta.get("unbacked_bindings") for node in nodes)
        )

    def notes(self, read: Callable[[fx.Graph], None]) -> list[str]:
        """What ``note`` attaches while ``read``, which may write, runs on a copy of the graph."""
        counted = symbol("torch._dynamo.utils:counters")["inductor"]
        before = counted.copy()
        try:
            read(_copied(self._gm).graph)
            return _notes(counted - before)
        finally:
            counted.clear()
            counted.update(before)

    def _free_symbols(self) -> set[sympy.Symbol]:
        found: set[sympy.Symbol] = set()
        for value in self._inputs:
            sizes: list[Any] = [value]
            if isinstance(value, torch.Tensor):
                sizes = [*value.shape, *value.stride(), value.storage_offset()]
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    found |= size.node.expr.free_symbols
        return found

    def bounds(self, each: sympy.Symbol) -> tuple[int | None, int | None]:
        """The range of a symbol in all calls; None: no bound."""
        found = self._env.var_to_range[each]
        lower, upper = (int(b) if b.is_Integer else None for b in (found.lower, found.upper))
        return lower, upper

    def run_eagerly(self, inputs: list[Any]) -> Any:
        """The graph op by op, uncompiled."""
        values = list(inputs)
        inputs.clear()
        return self._gm(*values)

    def guards(self) -> list[Computed]:
        """The program's own guards on sizes, now."""
        return [Computed(guard.expr) for guard in self._env.guards]

    def compile(
        self,
        numbers: Mapping[sympy.Symbol, int],
        ranges: Mapping[sympy.Symbol, Range],
        hints: Mapping[sympy.Symbol, int],
    ) -> Variant:
        """The graph compiled with ``numbers`` in place of symbols, and ``ranges`` and ``hints`` of
        others. Raises what Inductor does."""
        with lock():
            return self._compiled(numbers, ranges, hints)

    def _compiled(
        self,
        numbers: Mapping[sympy.Symbol, int],
        ranges: Mapping[sympy.Symbol, Range],
        hints: Mapping[sympy.Symbol, int],
    ) -> Variant:
        env = symbol("torch.fx.experimental.symbolic_shapes:ShapeEnv")()
        mode = symbol("torch._subclasses.fake_tensor:FakeTensorMode")(
            shape_env=env, allow_non_fake_inputs=True
        )
        values = self._new_symbols(env, numbers, ranges, hints)
        kwargs = dict(self._kwargs)
        if kwargs.get("cudagraphs") is not None:  # a variant may not switch them off for others
            kwargs["cudagraphs"] = type(kwargs["cudagraphs"])(kwargs["cudagraphs"].value)
        with self._surroundings(mode), padding.as_of_static_sizes():
            with mode:
                inputs = [_renewed(value, env, values) for value in self._inputs]
            gm = _copied(self._gm)
            with mode:
                for node in gm.graph.nodes:
                    _renew(node, lambda value: _renewed(value, env, values))
            compiled = symbol("torch._inductor.compile_fx:compile_fx_inner")(gm, inputs, **kwargs)
        of_old = {new: old for old, new in values.items() if new.is_Symbol}
        guards = tuple(Computed(guard.expr.xreplace(of_old)) for guard in env.guards)
        return Variant(compiled, guards)

    def _new_symbols(
        self,
        env: Any,
        numbers: Mapping[sympy.Symbol, int],
        ranges: Mapping[sympy.Symbol, Range],
        hints: Mapping[sympy.Symbol, int],
    ) -> dict[sympy.Symbol, sympy.Expr]:
        """Old symbol -> its number, or its symbol in ``env``."""
        found: dict[sympy.Symbol, sympy.Expr] = _numbers(numbers)
        value_ranges = symbol("torch.utils._sympy.value_ranges:ValueRanges")
        infinity = symbol("torch.utils._sympy.numbers:int_oo")
        for old in sorted(self._free_symbols() - found.keys(), key=str):
            hint = hints.get(old, int(self._env.backed_var_to_val[old]))
            source = symbol("torch._dynamo.source:ConstantSource")(f"variant_{old}")
            dynamic = symbol("torch.fx.experimental.symbolic_shapes:DimDynamic").DYNAMIC
            new = env.create_symbol(
                hint, source, dynamic_dim=dynamic, do_not_specialize_zero_one=True
            )
            low, high, step = ranges.get(old) or (*self.bounds(old), 1)
            env.var_to_range[new] = value_ranges(
                -infinity if low is None else low, infinity if high is None else high
            )
            env.var_to_hint_override[new] = hint  # part of the key of Inductor's cache
            if step > 1:
                is_multiple = env.create_symintnode(new, hint=hint) % step == 0
                assert is_multiple  # a guard of the variant
            found[old] = new
        return found

    @contextlib.contextmanager
    def _surroundings(self, mode: Any) -> Any:
        """What the first compilation found around it; of a later call it is no longer there."""
        context = symbol("torch._guards:TracingContext")(mode)
        for name, value in self._tracing.items():
            setattr(context, name, value)
        virtualized, config = symbol("torch._inductor.virtualized:V"), config_module()
        now = config.get_config_copy()
        changed = {key: value for key, value in self._config.items() if now.get(key) != value}
        with contextlib.ExitStack() as stack:
            stack.enter_context(config.patch(changed))
            stack.enter_context(symbol("torch._guards:tracing")(context))
            if symbol("torch._guards:CompileContext.try_get")() is None and self._context:
                stack.enter_context(symbol("torch._guards:compile_context")(self._context))
            stack.enter_context(virtualized.set_fake_mode(mode))
            stack.enter_context(virtualized.set_choices_handler(self._choices))
            # what a caller may have set for its own tensors
            stack.enter_context(symbol("torch.utils._python_dispatch:_disable_current_modes")())
            stack.enter_context(torch.device("cpu"))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            yield


def _numbers(values: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, sympy.Expr]:
    return {old: sympy.Integer(value) for old, value in values.items()}


def _renewed(value: Any, env: Any, values: Mapping[sympy.Symbol, sympy.Expr]) -> Any:
    """An input of the graph with the sizes of a variant."""

    def size(old: Any) -> Any:
        if not isinstance(old, torch.SymInt | torch.SymFloat):
            return old
        expr = old.node.expr.xreplace(values)
        is_int = isinstance(old, torch.SymInt)
        kind, create = (int, env.create_symintnode) if is_int else (float, env.create_symfloatnode)
        if expr.is_number:
            return kind(expr)
        return create(expr, hint=kind(expr.xreplace(env.backed_var_to_val)))

    if isinstance(value, torch.SymInt | torch.SymFloat):
        return size(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = [size(s) for s in value.shape], [size(s) for s in value.stride()]
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if offset := size(value.storage_offset()):  # decides what is aligned
        length = offset + sum((n - 1) * by for n, by in zip(shape, stride, strict=True)) + 1
        flat = torch.empty(length, dtype=value.dtype, device=value.device)
        made = flat.as_strided(shape, stride, offset).detach()
    return made.requires_grad_(value.requires_grad and value.is_leaf)


def _renew(node: fx.Node, renewed: Callable[[Any], Any]) -> None:
    """Renew what Inductor does not propagate: numbers, and the inputs whose strides an op needs."""
    if inputs := node.meta.get("eager_input_vals"):
        node.meta["eager_input_vals"] = fx.node.map_aggregate(inputs, renewed)
    if not isinstance(number := node.meta.get("val"), torch.SymInt | torch.SymFloat):
        return
    node.meta["val"] = number = renewed(number)
    # Computed of numbers alone, it is one, as in tracing: Inductor divides floats as if they were
    # sizes.
    if node.op != "call_function" or not isinstance(number, int | float):
        return
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg(
            (user.args, user.kwargs), lambda arg: number if arg is node else arg
        )
    node.graph.erase_node(node)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph and its subgraphs anew, with the same constants: Inductor edits what it gets."""
    graph = fx.Graph()
    out = graph.graph_copy(gm.graph, {})
    # among them: which outputs the user sees
    graph.output(out).meta = dict(gm.graph.output_node().meta)
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule) and hasattr(made, name):
            setattr(made, name, _copied(child))
    return made
