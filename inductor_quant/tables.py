"""Small integer tables of the model, known by their values: GPTQ's shift tables and ``g_idx``.

After AOTAutograd a buffer is an input like any other, without a value, and a table that decides
where a weight is read, or by how much it is shifted, is data that the kernel has to look up. Dynamo
hands a backend the tensors themselves. So here, before anything is traced, such a table becomes a
constant of the graph, whose content is part of Inductor's cache keys (``digest``); and each call
first looks whether the tables are still what was compiled (``Guarded``).

Read are vectors of integers that are tensors of a module, are used for nothing but indices and
shift amounts, and there only in what a matrix product multiplies with: neither weights nor inputs
of the call. And of these only such as are a sum over digits of the position, as ``k // group`` is:
the order of rows in act-order is better looked up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from inductor_quant import _torch_compat as compat

DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MAX_LENGTH = 1 << 17
# Sets of tables that one compiled graph has met: a layer that is compiled by itself serves all of
# its kind, and each has tables of its own.
MAX_STATES = 512

# By the name of what is called, whether function, method or operator. What keeps a table a table:
_DERIVES = frozenset(
    [
        "to",
        "long",
        "int",
        "short",
        "type",
        "view",
        "reshape",
        "flatten",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "repeat",
        "t",
        "permute",
        "transpose",
        "contiguous",
        "clone",
        "detach",
        "getitem",
        "add",
        "sub",
        "mul",
        "floordiv",
        "floor_divide",
        "mod",
        "remainder",
    ]
)
_SHIFTS = frozenset(
    ["rshift", "lshift", "__rshift__", "__lshift__", "bitwise_right_shift", "bitwise_left_shift"]
)
# name -> where the index is among the arguments, and its keyword
_INDEXES = {
    "getitem": (1, "indices"),
    "index": (1, "indices"),
    "index_select": (2, "index"),
    "embedding": (0, "input"),
    "gather": (2, "index"),
}
_PRODUCTS = frozenset(
    ["linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "mv", "_int_mm", "_scaled_mm"]
)


@dataclasses.dataclass(frozen=True)
class Table:
    """``node``, a placeholder (``position``: the number of the argument) or, where parameters are
    frozen, a ``get_attr`` (None), and a copy of the value that it has now."""

    node: fx.Node
    position: int | None
    value: torch.Tensor


def find(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Table]:
    """The tables of a graph that Dynamo made. Changes nothing."""
    held = list(_tensors_of_modules(gm, example_inputs))
    weight_side = _weight_side(gm.graph, {table.node for table in held})
    found = [
        table
        for table in held
        if _is_short_vector(table.value)
        and _decides_positions_alone(table.node, weight_side)
        and _has_form(table.value)
    ]
    # Tables are not written to in this graph; what shares memory with one might be.
    known = {id(table.value) for table in found}
    others = {_address(t) for t in example_inputs if _is_real(t) and id(t) not in known}
    return [
        dataclasses.replace(table, value=table.value.detach().clone())
        for table in found
        if table.position is None or _address(table.value) not in others
    ]


def make_constant(gm: fx.GraphModule, tables: Sequence[Table]) -> None:
    """Put the tables into the graph as constants, instead of what held them."""
    if not tables:
        return
    for number, table in enumerate(tables):
        name = f"_inductor_quant_table{number}"
        # an attribute and no buffer: AOTAutograd makes inputs of buffers
        setattr(gm, name, table.value)
        with gm.graph.inserting_after(table.node):
            held = gm.graph.create_node("get_attr", name)  # get_attr() warns: it is no buffer
        with gm.graph.inserting_after(held):
            constant = gm.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (held,))
        constant.meta = {k: v for k, v in table.node.meta.items() if k != "grapharg"}
        table.node.replace_all_uses_with(constant)
    gm.recompile()


def digest(tables: Sequence[Table]) -> str:
    """The types, shapes and contents of tables, in order, as SHA-256; "" for none."""
    if not tables:
        return ""
    parts = [(t.value.dtype, t.value.shape, compat.values_of(t.value)) for t in tables]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph on its own, without what was noted at its nodes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.meta = {}
    return fx.GraphModule(gm, graph)


# ------------------------------------------------------------------------------------------
# which tensors


def _tensors_of_modules(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[Table]:
    inputs = iter(enumerate(example_inputs))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            position, value = next(inputs, (0, None))
            if _is_real(value) and compat.is_of_module(node):
                yield Table(node, position, value)
        elif node.op == "get_attr":
            value = _attribute(gm, str(node.target))
            if _is_real(value):
                yield Table(node, None, value)


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _is_real(value: Any) -> TypeGuard[torch.Tensor]:
    """A tensor of plain torch, with values, whose changes torch counts."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not value.is_inference()
    )


def _is_short_vector(value: torch.Tensor) -> bool:
    return (
        value.dtype in DTYPES
        and 0 < value.numel() <= MAX_LENGTH
        and sum(size > 1 for size in value.shape) <= 1
    )


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _has_form(value: torch.Tensor) -> bool:
    from inductor_quant.patterns.digits import Space, Unsupported

    space = Space()
    try:
        space.look_up(compat.values_of(value), space.variable("k", value.numel()))
    except Unsupported:
        return False
    return True


# ------------------------------------------------------------------------------------------
# what they are used for


def _weight_side(graph: fx.Graph, held: set[fx.Node]) -> set[fx.Node]:
    """What is computed from tensors of modules alone."""
    found = set(held)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op in ("call_function", "call_method") and inputs and found.issuperset(inputs):
            found.add(node)
    return found


def _decides_positions_alone(table: fx.Node, weight_side: set[fx.Node]) -> bool:
    derived, todo = {table}, [table]
    deciding: list[fx.Node] = []
    while todo:
        node = todo.pop()
        for user in node.users:
            name = _name(user)
            if user not in weight_side:
                return False
            if _decides(node, user, name):
                deciding.append(user)
            elif name in _DERIVES and derived.issuperset(user.all_input_nodes):
                if user not in derived:
                    derived.add(user)
                    todo.append(user)
            else:
                return False
    return bool(deciding) and all(_is_multiplied_with(node, weight_side) for node in deciding)


def _decides(node: fx.Node, user: fx.Node, name: str) -> bool:
    """Whether ``node`` is what ``user`` indexes with, or shifts by, and nothing else of it."""
    if name in _SHIFTS:
        position, keyword = 1, "other"
    elif name in _INDEXES:
        position, keyword = _INDEXES[name]
    else:
        return False
    given = user.args[position] if position < len(user.args) else user.kwargs.get(keyword)
    inside: list[fx.Node] = []
    fx.map_arg(given, inside.append)
    everywhere: list[fx.Node] = []
    fx.map_arg((user.args, dict(user.kwargs)), everywhere.append)
    return node in inside and inside.count(node) == everywhere.count(node)


def _is_multiplied_with(node: fx.Node, weight_side: set[fx.Node]) -> bool:
    """Whether all that is made of ``node`` becomes a factor of matrix products."""
    todo, seen = [node], {node}
    is_factor = False
    while todo:
        for user in todo.pop().users:
            if user not in weight_side:
                if _name(user) not in _PRODUCTS:
                    return False
                is_factor = True
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return is_factor


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return str(name)


# ------------------------------------------------------------------------------------------
# the guard

_version = operator.attrgetter("_version")
_address_of = torch.Tensor.data_ptr


@dataclasses.dataclass(frozen=True)
class _State:
    """Tensors that were looked at, when they held (or not) what was compiled.

    They are kept, with their memory, so that none of another life has the identity or the address
    of one of them. ``counted``: one for each version counter, which views of a tensor share.
    """

    tensors: list[torch.Tensor]
    storages: list[Any]
    addresses: list[int]
    counted: list[torch.Tensor]
    versions: list[int]
    is_as_compiled: bool

    @property
    def is_unchanged(self) -> bool:
        return (
            list(map(_version, self.counted)) == self.versions
            and list(map(_address_of, self.tensors)) == self.addresses
        )


def _counted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    owners = {id(t if t._base is None else t._base): t for t in tensors}
    return list(owners.values())


class Guarded:
    """Calls ``compiled`` while the tables among the arguments hold the values it was compiled with,
    else ``general()``, which reads them as data and is made when it is first needed.

    Looked at on each call: that the tensors are the same objects, at the same addresses, with the
    same version, which every write that torch knows of counts up. Only if one is not, the contents
    are compared. Not counted is a write past torch: through ``.data``, numpy or a kernel of one's
    own. And a CUDA graph that the user captures replays what was compiled, without this look.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        tables: Sequence[Table],
        general: Callable[[], Callable[..., Any]],
    ) -> None:
        positions = [table.position for table in tables if table.position is not None]
        self._pick = operator.itemgetter(*positions, positions[0])  # always a tuple
        self._expected = [table.value for table in tables if table.position is not None]
        self._call = compiled
        self._make_general = general
        self._general: Callable[..., Any] | None = None
        self._states: OrderedDict[tuple[int, ...], _State] = OrderedDict()
        self._last: _State | None = None

    def __call__(self, *args: Any) -> Any:
        tensors = self._pick(args)[:-1]
        state = self._last
        if state is None or not all(map(operator.is_, tensors, state.tensors)):
            state = self._states.get(tuple(map(id, tensors)))
        if state is None or not state.is_unchanged:
            state = self._look_at(tensors)
        self._last = state
        if state.is_as_compiled:
            return self._call(*args)
        if self._general is None:
            self._general = self._make_general()
        return self._general(*args)

    def _look_at(self, tensors: tuple[torch.Tensor, ...]) -> _State:
        counted = _counted(tensors)
        # versions first: what is written meanwhile is seen in the next call
        versions = list(map(_version, counted))
        addresses = list(map(_address_of, tensors))
        storages = [tensor.untyped_storage() for tensor in tensors]
        equal = all(map(torch.equal, self._expected, tensors))
        state = _State(list(tensors), storages, addresses, counted, versions, equal)
        self._states[tuple(map(id, tensors))] = state
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        return state


def guarded(
    compiled: Callable[..., Any],
    tables: Sequence[Table],
    general: Callable[[], Callable[..., Any]],
) -> Callable[..., Any]:
    """``Guarded`` as the plain function that Dynamo expects of a backend."""
    guard = Guarded(compiled, tables, general)

    def run(*args: Any) -> Any:
        return guard(*args)

    return run
