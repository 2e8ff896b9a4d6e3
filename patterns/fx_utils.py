"""Read-only queries on FX nodes. None of them adds a guard on a symbolic size."""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
DEVICE_PUT = torch.ops.prims.device_put.default

RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
SQUEEZES = (
    *(aten.unsqueeze.default, aten.squeeze.default),
    *(aten.squeeze.dim, aten.squeeze.dims),
)
# Exported graphs keep them until after our slot. They read metadata and compute nothing.
ASSERTIONS = (aten._assert_tensor_metadata.default,)


# Larger upper bounds, and sums of them, are those that torch gives sizes of which it knows none.
_NO_BOUND = sys.maxsize // 2
# What torch's wrappers call the module inside: torch.compile, FSDP, activation checkpoints.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor of the node's value."""
    return node.meta["val"]


def described(source: Any) -> Any:
    """What has the dtype and shape of ``source``, a node or a tensor that the rewrite adds."""
    return value(source) if isinstance(source, fx.Node) else source


def is_tensor_node(item: Any) -> bool:
    return isinstance(item, fx.Node) and isinstance(item.meta.get("val"), torch.Tensor)


def users(node: fx.Node) -> list[fx.Node]:
    """The users of ``node`` that compute something."""
    return [user for user in node.users if user.target not in ASSERTIONS]


def single_user(node: fx.Node) -> fx.Node | None:
    found = users(node)
    return found[0] if len(found) == 1 else None


def has_epilogue(node: fx.Node) -> bool:
    """Whether something elementwise follows, also after views, which Inductor fuses into a GEMM."""
    return any(
        has_epilogue(user)
        if user.target in (*RESHAPES, aten.permute.default)
        else user.target == CAST or torch.Tag.pointwise in getattr(user.target, "tags", ())
        for user in users(node)
    )


def arguments(node: fx.Node, *names: str) -> tuple[Any, ...]:
    """The first arguments of a call, given by position or by these names."""
    args, kwargs = node.args, node.kwargs
    return (*args[: len(names)], *[kwargs.get(name) for name in names[len(args) :]])


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are provably equal: the same int or the same symbolic expression."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(a.node.expr == b.node.expr)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def is_single(node: fx.Node) -> bool:
    """Whether the tensor has one element."""
    return all(map(is_one, value(node).shape))


def is_symbolic(size: int | torch.SymInt) -> bool:
    return not isinstance(size, int)


def factors(size: torch.SymInt) -> tuple[int, dict[Any, int]] | None:
    """``(c, powers)`` if a symbolic size is c > 0 times powers of symbols and of sums, else None. A
    sum, such as of rows that several processes send, is a factor as a whole."""
    constant, rest = size.node.expr.as_content_primitive()
    powers = dict(rest.as_powers_dict())
    if not all(
        (base.is_Symbol or base.is_Add) and power.is_Integer and power > 0
        for base, power in powers.items()
    ):
        return None
    if not constant.is_Integer or constant <= 0:
        return None
    return int(constant), {base: int(power) for base, power in powers.items()}


def divisor(size: int | torch.SymInt) -> int:
    """A number that divides the size in any call."""
    if isinstance(size, int):
        return size
    factor = size.node.expr.as_content_primitive()[0]
    return int(factor) if factor.is_Integer else 1


def least(size: int | torch.SymInt) -> int:
    """A lower bound of the size that holds in every call."""
    if isinstance(size, int):
        return size
    lower = size.node.shape_env.bound_sympy(size.node.expr).lower
    return int(lower) if lower.is_Integer else 0


def most(size: int | torch.SymInt) -> int | None:
    """An upper bound of the size that holds in every call; None: unknown."""
    if isinstance(size, int):
        return size
    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(upper) if upper.is_Integer and upper < _NO_BOUND else None


def size_name(size: int | torch.SymInt) -> int | str:
    """A size for a report: the int, or the text of the symbolic expression."""
    return size if isinstance(size, int) else str(size)


def size_hint(size: int | torch.SymInt) -> int | None:
    """The size, or its value in the call that triggered the compilation; None if unknown."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return hint if isinstance(hint, int) else None


def limit(size: int | torch.SymInt) -> int | None:
    """The largest value of a size, if the compilation is for that value; None: unknown."""
    return compat.limit(size)


def base(node: fx.Node) -> fx.Node:
    """The node that owns the memory of ``node``: ``node`` itself if it is no view."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether the value may share memory with the first argument, according to the op's schema."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return node.target is operator.getitem or _is_view_op(node.target)


@functools.cache
def _is_view_op(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    is_known = schema is not None and any(result.alias_info for result in schema.returns)
    return is_known or target in RESHAPES


def is_mutated(node: fx.Node) -> bool:
    """Whether the graph writes to the memory of ``node`` anywhere."""
    return mutated([node]) is not None


def mutated(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The first of ``nodes`` to whose memory the graph writes."""
    seen: set[fx.Node] = set()
    return next((node for node in nodes if _is_written(base(node), seen)), None)


def _is_written(owner: fx.Node, seen: set[fx.Node]) -> bool:
    """``seen``: nodes to which nobody writes, or that are looked at already."""
    todo = [owner]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        for user in current.users:
            if _writes_to(user, current):
                return True
            if is_view(user) and user.args[0] is current:
                todo.append(user)
    return False


def is_returned(node: fx.Node) -> bool:
    """Whether the graph returns ``node`` or a view of it."""
    return any(user.op == "output" for user in _users_of_memory(node))


def are_strides_read(node: fx.Node) -> bool:
    """Whether the strides of ``node`` were baked in when the graph was traced: as arguments of
    as_strided or of a Triton kernel."""
    return any(
        user.target == aten.as_strided.default
        or str(user.target).startswith("triton_kernel_wrapper")
        for user in _users_of_memory(node)
    )


def is_row_major(node: fx.Node) -> bool:
    """Whether a tensor provably has no gaps, its last dimension innermost."""
    expected: Any = 1
    for size, stride in zip(*map(reversed, (value(node).shape, value(node).stride())), strict=True):
        if not same_size(stride, expected):
            return False
        expected = expected * size
    return True


def has_fixed_strides(node: fx.Node) -> bool:
    """Whether an op of another library reads ``node``, for which Inductor copies a tensor that has
    other strides than when the graph was traced, unless the op says that it takes any."""
    return any(map(_takes_fixed_strides, _users_of_memory(node)))


def _takes_fixed_strides(user: fx.Node) -> bool:
    if not isinstance(user.target, torch._ops.OpOverload):
        return str(user.target).startswith("auto_functionalized")
    is_ours = user.target.namespace in ("aten", "prims", "inductor_quant")
    return not is_ours and torch.Tag.flexible_layout not in user.target.tags


def _users_of_memory(node: fx.Node) -> Iterator[fx.Node]:
    """The users of ``node`` and of its views; the views are among them."""
    for user in node.users:
        yield user
        if is_view(user) and user.args[0] is node:
            yield from _users_of_memory(user)


@functools.cache
def _may_write(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    is_mutable = schema is not None and schema.is_mutable
    return is_mutable or str(target) == "triton_kernel_wrapper_mutation"


def _writes_to(user: fx.Node, node: fx.Node) -> bool:
    if not _may_write(user.target):
        return False
    schema: Any = getattr(user.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return True  # a Triton kernel, which may write to any argument
    named = zip(schema.arguments, user.args, strict=False)
    written = [arg for spec, arg in named if spec.alias_info and spec.alias_info.is_write]
    written += [
        user.kwargs.get(spec.name)
        for spec in schema.arguments
        if spec.alias_info and spec.alias_info.is_write
    ]
    return any(
        node is item or (isinstance(item, (list, tuple)) and node in item) for item in written
    )


def attribute(node: fx.Node) -> torch.Tensor | None:
    """The constant tensor of a ``get_attr`` node; None if its values cannot be known, because it is
    no plain tensor or the graph writes to it."""
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    is_plain = type(found) in (torch.Tensor, torch.nn.Parameter)
    # Inductor's cache keys a frozen parameter by shape alone: two models may share an entry.
    is_frozen = getattr(found, "_is_frozen_param", False)
    return found if is_plain and not is_frozen and not is_mutated(node) else None


def is_literal(node: fx.Node) -> bool:
    """Whether a ``get_attr`` node is a tensor literal of the traced code."""
    return str(node.target).startswith(("_tensor_constant", "lifted_tensor"))


def has_fixed_values(node: fx.Node) -> bool:
    """Whether a ``get_attr`` tensor has the same values in every call.

    Parameters and buffers of an exported model are ``get_attr`` nodes too. ``load_constants`` may
    replace them in a package, unless they are frozen.
    """
    return is_literal(node) or (compat.is_exporting() and compat.is_freezing())


def is_stored(node: fx.Node) -> bool:
    """Whether the value is in memory before the graph runs: an input, a constant or a view; or a
    copy of such on another device, as of a table that was made on the CPU."""
    owner = base(node)
    while owner.target is DEVICE_PUT:
        owner = base(owner.args[0])  # type: ignore[arg-type]
    return owner.op in ("placeholder", "get_attr")


def is_of_wide_floats(node: fx.Node) -> bool:
    """Whether all tensors in memory that ``node`` is computed from, except single numbers, are of
    floats of 16 bits or more."""
    todo, seen = [node], {node}
    while todo:
        item = todo.pop()
        if item.op in ("placeholder", "get_attr") and is_tensor_node(item) and not is_single(item):
            dtype = value(item).dtype
            if not dtype.is_floating_point or dtype.itemsize == 1:
                return False
        todo += [origin for origin in item.all_input_nodes if origin not in seen]
        seen.update(item.all_input_nodes)
    return True


def module_path(node: fx.Node) -> str:
    """The path of the module that ``node`` comes from ("layers.0.mlp.up"), "" if unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    # Dynamo prefixes the variable of the outermost module: L['self'], G['model']. Where a wrapper
    # replaces __getattr__, it names a child as __dict__['_modules']['child'].
    path = re.sub(r"^[LG]\[['\"][^]]*['\"]\]", "", path)
    path = re.sub(
        r"(\.__dict__\[['\"]_modules['\"]\]|\._modules)\[['\"]([^]]*)['\"]\]", r".\2", path
    )
    names = [name for name in path.split(".") if name and name not in _WRAPPED]
    outermost = str(next(iter(stack.values()))[1])
    is_parallel = "DataParallel" in outermost.rpartition(".")[2] and names[:1] == ["module"]
    return ".".join(names[is_parallel:])


def spread_integers(node: fx.Node) -> list[fx.Node]:
    """The wide integers that an op of two tensors spreads over its elements: zero points."""
    found = []
    for origin in node.all_input_nodes:
        while origin.op == "call_function" and len(origin.all_input_nodes) == 1:  # a view, a cast
            (origin,) = origin.all_input_nodes
        if not is_tensor_node(origin) or len(node.all_input_nodes) != 2:
            continue
        held = value(origin)
        is_wide = held.dtype in (torch.int32, torch.int64)
        if is_wide and held.numel() < value(node).numel():
            found.append(origin)
    return found
