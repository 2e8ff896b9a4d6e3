"""Questions that recognisers ask of FX nodes. Reads only; adds no guard on symbolic sizes."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from inductor_quant import _torch_compat as compat

aten = torch.ops.aten

RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
# Left in exported graphs until after our slot; they read a tensor's metadata and compute nothing.
ASSERTIONS = (aten._assert_tensor_metadata.default,)


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that stands for the node's value."""
    return node.meta["val"]


def is_tensor_node(item: Any) -> bool:
    return isinstance(item, fx.Node) and isinstance(item.meta.get("val"), torch.Tensor)


def users(node: fx.Node) -> list[fx.Node]:
    """The nodes that compute with ``node``."""
    return [user for user in node.users if user.target not in ASSERTIONS]


def single_user(node: fx.Node) -> fx.Node | None:
    found = users(node)
    return found[0] if len(found) == 1 else None


def arguments(node: fx.Node, *names: str) -> tuple[Any, ...]:
    """The first arguments of a call, whether by position or under these names."""
    return tuple(
        node.args[i] if i < len(node.args) else node.kwargs.get(name)
        for i, name in enumerate(names)
    )


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are certainly equal: the same int or the same symbolic expression."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(a.node.expr == b.node.expr)


def is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def is_symbolic(size: int | torch.SymInt) -> bool:
    return not isinstance(size, int)


def as_monomial(size: torch.SymInt) -> tuple[int, dict[Any, int]] | None:
    """``(c, powers)`` where a symbolic size is c > 0 times powers of symbols; None where not."""
    factor, rest = size.node.expr.as_coeff_Mul()
    powers = dict(rest.as_powers_dict())
    is_monomial = all(s.is_Symbol and p.is_Integer and p > 0 for s, p in powers.items())
    if not is_monomial or not factor.is_Integer or factor <= 0:
        return None
    return int(factor), {symbol: int(power) for symbol, power in powers.items()}


def size_name(size: int | torch.SymInt) -> int | str:
    """A size for a report: the int, or the symbolic expression as text."""
    return size if isinstance(size, int) else str(size)


def size_hint(size: int | torch.SymInt) -> int | None:
    """A size; a symbolic one as it was in the call that is being compiled, if that is known."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return hint if isinstance(hint, int) else None


def base(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` is a view of, itself if it is none."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether the value may share memory with the first argument: by the op's schema."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target in RESHAPES or node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def is_mutated(node: fx.Node) -> bool:
    """Whether the memory behind ``node`` is written to anywhere in the graph."""
    todo, seen = [base(node)], set()
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
    """Whether the graph returns the memory of ``node``, as it is or as a view."""
    return any(user.op == "output" for user in _users_of_memory(node))


def are_strides_read(node: fx.Node) -> bool:
    """Whether something reads the memory of ``node`` by strides that were numbers when the graph
    was traced: as_strided, or a Triton kernel of the user, which takes them as arguments."""
    return any(
        user.target == aten.as_strided.default
        or str(user.target).startswith("triton_kernel_wrapper")
        for user in _users_of_memory(node)
    )


def _users_of_memory(node: fx.Node) -> Iterator[fx.Node]:
    """The users of ``node`` and of its views, these included."""
    for user in node.users:
        yield user
        if is_view(user) and user.args[0] is node:
            yield from _users_of_memory(user)


def _writes_to(user: fx.Node, node: fx.Node) -> bool:
    if str(user.target) == "triton_kernel_wrapper_mutation":
        return True  # which of its arguments it writes to is not looked at
    schema = getattr(user.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
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
    """The constant tensor that a ``get_attr`` node names; None where its values cannot be known:
    it is no plain tensor, or is written to."""
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    is_plain = type(found) in (torch.Tensor, torch.nn.Parameter)
    # Inductor's cache knows a frozen parameter by its shape alone: models may share an entry.
    is_frozen = getattr(found, "_is_frozen_param", False)
    return found if is_plain and not is_frozen and not is_mutated(node) else None


def is_literal(node: fx.Node) -> bool:
    """Whether a ``get_attr`` node names a tensor that the code itself writes down."""
    return str(node.target).startswith(("_tensor_constant", "lifted_tensor"))


def has_fixed_values(node: fx.Node) -> bool:
    """Whether the values of the tensor that a ``get_attr`` node names are those of every call.

    Where a model is exported, its parameters and buffers are such nodes too. Those of a package may
    be replaced where it is loaded (``load_constants``), unless they are frozen: what is computed of
    them is then part of the package, theirs or ours.
    """
    return is_literal(node) or (compat.is_exporting() and compat.is_freezing())


def is_stored(node: fx.Node) -> bool:
    """Whether the value lies in memory before the graph runs: an input or constant, or a view."""
    return base(node).op in ("placeholder", "get_attr")


def module_path(node: fx.Node) -> str:
    """The path of the module that ``node`` comes from ("layers.0.mlp.up"), "" where unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    # Dynamo begins it with the variable that holds the outermost module: L['self'], G['model'].
    return re.sub(r"^[LG]\['[^']*'\]\.?", "", path)
