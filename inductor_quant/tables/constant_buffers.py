"""Constant buffers: specialize on GPTQ's shift tables and ``g_idx``, and guard them on every call.

After AOTAutograd a buffer is an input without a value, so a kernel would have to load the shift
amounts and positions that such a table holds. Dynamo hands a backend the tensors themselves. So,
before tracing, such a table becomes a constant of the graph, and its content part of Inductor's
cache keys (``digest``); each call compares the tables with it (``Guarded``).

We read integer vectors owned by a module and used only as indices or shifts inside a weight, and
small matrices used as shifts. Their content must be a sum over digits of the position, such as
``k // group``, or short. The row order of act-order is not: the kernel looks it up. Tables that
place the blocks of a sparse weight may hold anything (``block_tables``).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.tables import block_tables
from inductor_quant.tables.dynamo_ops import PRODUCTS, name_of

if TYPE_CHECKING:
    from inductor_quant.tables.table_check import TableCheck

DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MAX_LENGTH = 1 << 17
MAX_MATRIX = 64  # elements; one with more is a weight
# Sets of buffers that one compiled graph remembers: a layer that is compiled by itself serves all
# layers of its kind, each with its own buffers.
MAX_STATES = 512

# By name, for functions, methods and operators. Ops whose result is a table again:
_DERIVES = (
    *("to", "long", "int", "short", "type", "view", "reshape", "flatten", "unsqueeze", "squeeze"),
    *(
        "expand",
        "expand_as",
        "repeat",
        "t",
        "permute",
        "transpose",
        "contiguous",
        "clone",
        "detach",
    ),
    *("getitem", "add", "sub", "mul", "floordiv", "floor_divide", "mod", "remainder"),
)
_CONSTANTS = ("arange", "tensor")  # of numbers
_SHIFTS = frozenset(
    ["rshift", "lshift", "__rshift__", "__lshift__", "bitwise_right_shift", "bitwise_left_shift"]
)
# name -> position and keyword of the index argument
_INDEXES = {
    "getitem": (1, "indices"),
    "index": (1, "indices"),
    "index_select": (2, "index"),
    "embedding": (0, "input"),
    "gather": (2, "index"),
}


@dataclasses.dataclass(frozen=True)
class ConstantBuffer:
    """``node`` is a placeholder, the argument at ``position``, or, with frozen parameters, a
    ``get_attr`` (None); ``value`` is a copy of its present value."""

    node: fx.Node
    position: int | None
    value: torch.Tensor


def find(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[ConstantBuffer]:
    """The constant buffers of a Dynamo graph, which stays as it is."""
    held = list(_tensors_of_modules(gm, example_inputs))
    weight_side = _weight_side(gm.graph, {buffer.node for buffer in held})
    tables = [buffer.node for buffer in held if _may_place_blocks(buffer.value)]
    of_blocks = block_tables.find(gm.graph, tables, weight_side)
    found = [
        buffer
        for buffer in held
        if buffer.node in of_blocks
        or (
            _is_table(buffer.value)
            and _decides_positions_alone(buffer, weight_side)
            and _has_form(buffer.value)
        )
    ]
    # This graph writes to none of them, but may write to a tensor that shares memory with one.
    known = {id(buffer.value) for buffer in found}
    others = {_address(t) for t in example_inputs if _is_real(t) and id(t) not in known}
    return [
        dataclasses.replace(buffer, value=buffer.value.detach().clone())
        for buffer in found
        if buffer.position is None or _address(buffer.value) not in others
    ]


def make_constant(gm: fx.GraphModule, buffers: Sequence[ConstantBuffer]) -> None:
    """Replace the nodes of the buffers by constants of the graph."""
    # all of them before the first is used: if one fails, the graph means what it did
    constants = [_constant(gm, number, buffer) for number, buffer in enumerate(buffers)]
    for buffer, constant in zip(buffers, constants, strict=True):
        buffer.node.replace_all_uses_with(constant)
    if constants:
        gm.recompile()


def _constant(gm: fx.GraphModule, number: int, buffer: ConstantBuffer) -> fx.Node:
    name = f"_inductor_quant_table{number}"
    # an attribute and no buffer: AOTAutograd makes inputs of buffers
    setattr(gm, name, buffer.value)
    with gm.graph.inserting_after(buffer.node):
        held = gm.graph.create_node("get_attr", name)  # get_attr() warns: it is no buffer
    with gm.graph.inserting_after(held):
        constant = gm.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (held,))
    constant.meta = {k: v for k, v in buffer.node.meta.items() if k != "grapharg"}
    return constant


def digest(buffers: Sequence[ConstantBuffer]) -> str:
    """SHA-256 of the dtypes, shapes and contents, in order; "" for none."""
    if not buffers:
        return ""
    parts = [(t.value.dtype, t.value.shape, compat.values_of(t.value)) for t in buffers]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph without the metadata of its nodes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.meta = {}
    return fx.GraphModule(gm, graph)


# ------------------------------------------------------------------------------------------
# candidates


def _tensors_of_modules(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Iterator[ConstantBuffer]:
    inputs = iter(enumerate(example_inputs))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            position, value = next(inputs, (0, None))
            if _is_real(value) and compat.is_of_module(node):
                yield ConstantBuffer(node, position, value)
        elif node.op == "get_attr":
            value = _attribute(gm, str(node.target))
            if _is_real(value):
                yield ConstantBuffer(node, None, value)


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _is_real(value: Any) -> TypeGuard[torch.Tensor]:
    """A plain strided tensor with values, whose writes through torch are counted."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not value.is_inference()
    )


def _is_table(value: torch.Tensor) -> bool:
    """A vector, or the few numbers of a table that says where fields are in several words."""
    return (
        value.dtype in DTYPES
        and 0 < value.numel() <= (MAX_LENGTH if _is_vector(value) else MAX_MATRIX)
        and value.is_contiguous()
    )


def _may_place_blocks(value: torch.Tensor) -> bool:
    is_index = value.dtype in (torch.int64, torch.int32, torch.bool)
    return is_index and 0 < value.numel() <= MAX_LENGTH and value.is_contiguous()


def _is_vector(value: torch.Tensor) -> bool:
    return sum(size > 1 for size in value.shape) <= 1


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _has_form(value: torch.Tensor) -> bool:
    from inductor_quant.patterns.symbolic.index import Space, Unsupported

    space = Space()
    try:
        space.look_up(compat.values_of(value), space.variable("k", value.numel()))
    except Unsupported:
        return False
    return True


# ------------------------------------------------------------------------------------------
# uses


def _weight_side(graph: fx.Graph, held: set[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed from tensors of modules and constants only."""
    found = set(held)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_known = bool(inputs) or name_of(node) in _CONSTANTS
        if node.op in ("call_function", "call_method") and is_known and found.issuperset(inputs):
            found.add(node)
    return found


def _decides_positions_alone(buffer: ConstantBuffer, weight_side: set[fx.Node]) -> bool:
    derived, todo = {buffer.node}, [buffer.node]
    deciding: list[fx.Node] = []
    while todo:
        node = todo.pop()
        for user in node.users:
            name = name_of(user)
            if user not in weight_side:
                return False
            if _decides(node, user, name) and (_is_vector(buffer.value) or name in _SHIFTS):
                deciding.append(user)
            elif name in _DERIVES and derived.issuperset(user.all_input_nodes):
                if user not in derived:
                    derived.add(user)
                    todo.append(user)
            else:
                return False
    return bool(deciding) and all(_is_multiplied_with(node, weight_side) for node in deciding)


def _decides(node: fx.Node, user: fx.Node, name: str) -> bool:
    """Whether ``node`` is only the index, or the shift amount, of ``user``."""
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
    """Whether all that is computed from ``node`` ends as a factor of matrix products."""
    todo, seen = [node], {node}
    is_factor = False
    while todo:
        for user in todo.pop().users:
            if user not in weight_side:
                if name_of(user) not in PRODUCTS:
                    return False
                is_factor = True
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return is_factor


# ------------------------------------------------------------------------------------------
# the guard

_address_of = torch.Tensor.data_ptr


class _State:
    """Tables of one call. They are kept alive, so that no later tensor has the same identity."""

    def __init__(self, tables: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        self.tables = list(tables)
        self.addresses = list(map(_address_of, tables))
        self._expected = expected
        self._on_device: TableCheck | None = None
        # Cleared for good: tables that were written to once are read at run time from then on.
        self.is_as_compiled = self._are_equal()
        devices = {table.device for table in (*tables, *expected)}
        if self.is_as_compiled and len(devices) == 1 and tables[0].is_cuda:
            from inductor_quant.tables.table_check import TableCheck

            self._on_device = TableCheck(tables, expected)

    def start(self) -> Callable[[], bool]:
        """Compare the contents as they are now; the function returned waits for the answer."""
        if self._on_device is not None:
            return self._on_device.start()
        equal = self._are_equal()
        return lambda: equal

    def _are_equal(self) -> bool:
        return all(map(torch.equal, self._expected, self.tables))


class Guarded:
    """Calls ``compiled`` while the buffers hold the values that it was compiled with, otherwise
    ``general()``, which reads them as data and is compiled when first needed.

    Each call compares the contents, whoever wrote them. On a GPU that is one small kernel, before
    those of the call. The host waits for its answer after it has enqueued the call, whose result it
    drops if a table was written; a call that must not run twice, because it writes to its
    arguments or ``has_effects``, waits first.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        buffers: Sequence[ConstantBuffer],
        general: Callable[[], Callable[..., Any]],
        *,
        has_effects: bool = False,
    ) -> None:
        positions = [buffer.position for buffer in buffers if buffer.position is not None]
        self._pick = operator.itemgetter(*positions, positions[0])  # always a tuple
        self._expected = [buffer.value for buffer in buffers if buffer.position is not None]
        self._call = compiled
        self._general = functools.cache(general)
        self._states: OrderedDict[tuple[int, ...], _State] = OrderedDict()
        # None: a first call shows whether it writes to its arguments
        self._may_run_twice = False if has_effects else None

    def __call__(self, *args: Any) -> Any:
        state = self._state(self._pick(args)[:-1])
        if state.is_as_compiled:
            are_equal = state.start()
            if self._may_run_twice:
                result = self._call(*args)
                if are_equal():
                    return result
            elif are_equal():
                return self._call(*args) if self._may_run_twice is False else self._watched(args)
            state.is_as_compiled = False
        return self._general()(*args)

    def _state(self, tables: tuple[torch.Tensor, ...]) -> _State:
        key = tuple(map(id, tables))
        state = self._states.get(key)
        if state is None or list(map(_address_of, tables)) != state.addresses:
            state = self._states[key] = _State(tables, self._expected)
            if len(self._states) > MAX_STATES:
                self._states.popitem(last=False)
        return state

    def _watched(self, args: tuple[Any, ...]) -> Any:
        before = _versions(args)
        result = self._call(*args)
        self._may_run_twice = before is not None and before == _versions(args)
        return result


def _versions(args: Sequence[Any]) -> list[int] | None:
    """How often each argument was written to; None if one does not count it."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return None if any(t.is_inference() for t in tensors) else [t._version for t in tensors]


def has_effects(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph may do more than compute results and write to its arguments: it has
    collectives, ops of other packages, or ops that run graphs."""
    for node in gm.graph.nodes:
        target = node.target
        namespace = getattr(target, "namespace", None)
        if isinstance(target, torch._ops.OpOverloadPacket):
            namespace = target._qualified_op_name.partition("::")[0]
        is_foreign = isinstance(namespace, str) and namespace not in ("aten", "prims")
        module = str(getattr(target, "__module__", ""))
        if node.op == "call_function" and (is_foreign or "distributed" in module):
            return True
    return False


def guarded(
    compiled: Callable[..., Any],
    buffers: Sequence[ConstantBuffer],
    general: Callable[[], Callable[..., Any]],
    *,
    has_effects: bool = False,
) -> Callable[..., Any]:
    """``Guarded`` as a plain function, which Dynamo requires of a backend."""
    guard = Guarded(compiled, buffers, general, has_effects=has_effects)

    def run(*args: Any) -> Any:
        return guard(*args)

    return run
