"""The only writer of graphs: replaces a recognized subgraph by one canonical op."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from inductor_quant import fallback
from inductor_quant._compat import freezing
from inductor_quant._compat import inductor as compat
from inductor_quant.ops import verify

from . import fx_utils
from .match import Constant, Derived, Operand, RecognizedGemm

# Metadata that tells a user or a profiler where a node comes from.
_PROVENANCE = (
    *("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "seq_nr", "custom"),
    fallback.ANCHOR,
)
_FROZEN = "_inductor_quant_repacked_"


def rewrite(found: RecognizedGemm, verify_args: tuple[Any, ...] | None = None) -> fx.Node:
    """Replace ``found.end`` by the canonical op; returns the op's node.

    ``verify_args``: insert ``inductor_quant::verify`` after the op, with these arguments after the
    op's result.

    New nodes are inserted at ``end``, so every operand is defined and nothing moves across a
    mutation.
    """
    owner = found.end.graph

    def build(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        return add_node(found.end, target, args, kwargs or {})

    def argument(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return [argument(part) for part in item]
        if isinstance(item, Constant):
            return add_constant(found.end, item)
        if isinstance(item, Derived):
            return build(item.target, tuple(map(argument, item.args)), dict(item.kwargs))
        if not isinstance(item, Operand):
            return item
        node = argument(item.node)
        if _is_already(fx_utils.value(node).shape, item.shape):
            return node
        return build(fx_utils.aten.reshape.default, (node, list(item.shape)))

    with owner.inserting_before(found.end):
        call = build(found.op, tuple(map(argument, found.args)), found.kwargs)
        result = call if verify_args is None else build(verify.op, (call, *verify_args))
        if found.shape is not None:
            result = build(fx_utils.aten.reshape.default, (result, argument(found.shape)))
    _check_same_value(found.end, result)
    found.end.replace_all_uses_with(result)
    for node in reversed(found.interior):
        erase_if_dead(node)
    return call


def add_node(like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Insert a call at the graph's insertion point, with the provenance of ``like``."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta.update({k: like.meta[k] for k in _PROVENANCE if k in like.meta})
    node.meta["original_aten"] = node.target  # names the kernel in Inductor
    node.meta["val"] = _evaluate(node)
    return node


def replace_call(call: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Replace ``call`` by one of the same op, with all that is known about it, at the insertion
    point."""
    new = add_node(call, call.target, args, kwargs)
    _check_same_value(call, new)
    new.meta = {**call.meta, "val": new.meta["val"]}
    call.replace_all_uses_with(new)
    call.graph.erase_node(call)
    return new


def add_constant(like: fx.Node, constant: Constant) -> fx.Node:
    """A tensor of the module, on the device of ``like``; equal ones are shared."""
    module, device = like.graph.owning_module, fx_utils.value(like).device
    digest = hashlib.sha256(constant.values).hexdigest()[:12]
    dtype = str(constant.dtype).rpartition(".")[2]
    name = f"_inductor_quant_{dtype}_{device.type}{device.index or 0}_{digest}"
    if not hasattr(module, name):
        with compat.real_tensors():
            setattr(module, name, compat.on_device(constant.tensor(), device))
    node = like.graph.create_node("get_attr", name)  # get_attr() warns: it is no buffer
    with compat.fake_mode_of([fx_utils.value(like)]):
        node.meta["val"] = torch.empty(constant.shape, dtype=constant.dtype, device=device)
    return node


def add_tensor(like: fx.Node, tensor: torch.Tensor) -> fx.Node:
    """A tensor of the module, which Inductor treats as a frozen parameter: its caches key it by its
    shape, and a cached graph gets that of the module."""
    module = like.graph.owning_module
    number = sum(name.startswith(_FROZEN) for name in vars(module))
    setattr(module, f"{_FROZEN}{number}", freezing.frozen(tensor))
    node = like.graph.create_node("get_attr", f"{_FROZEN}{number}")
    with compat.fake_mode_of([fx_utils.value(like)]):
        node.meta["val"] = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    return node


def subgraph_of(found: RecognizedGemm) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """The replaced subgraph as a module, and its inputs: tensors first, then sizes."""
    # It starts at the op's own inputs: an activation may be quantized and dequantized before them.
    sources = set(_nodes_in(found.args))
    inside = {*found.interior, *_dependents(sources, found.end)} - sources
    needed, todo = {found.end}, [found.end]
    while todo:
        for node in todo.pop().all_input_nodes:
            is_value = isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt, int))
            is_value &= node.op != "get_attr"  # Inductor's fallbacks take no constants
            if node not in needed and (node in inside or not is_value):
                needed.add(node)
                todo.append(node)
    inputs = {n: None for node in sorted(needed) for n in node.all_input_nodes if n not in needed}
    tensors = [node for node in inputs if fx_utils.is_tensor_node(node)]
    sizes = [node for node in inputs if node not in tensors]
    owner = fx.Graph()
    copies = {node: owner.placeholder(node.name) for node in (*tensors, *sizes)}
    for node in sorted(needed):
        copies[node] = owner.node_copy(node, copies.__getitem__)
    owner.output(copies[found.end])
    for node in owner.nodes:
        node.meta = {}
    root = found.end.graph.owning_module or torch.nn.Module()
    return fx.GraphModule(root, owner), tensors, sizes


def _nodes_in(item: Any) -> Iterator[fx.Node]:
    """The graph nodes that an argument of the rewritten call is made from."""
    if isinstance(item, fx.Node):
        yield item
    elif isinstance(item, Operand):
        yield from _nodes_in(item.node)
    elif isinstance(item, (Derived, list, tuple)):
        for part in item.args if isinstance(item, Derived) else item:
            yield from _nodes_in(part)


def _dependents(sources: set[fx.Node], end: fx.Node) -> set[fx.Node]:
    """The nodes that depend on ``sources``, without these."""
    found: set[fx.Node] = set()
    for node in end.graph.nodes:
        inputs = node.all_input_nodes
        if node not in sources and any(n in sources or n in found for n in inputs):
            found.add(node)
    return found


def _evaluate(node: fx.Node) -> Any:
    def fake(item: fx.Node) -> Any:
        return item.meta["val"]

    args, kwargs = fx.map_arg((node.args, node.kwargs), fake)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    with compat.fake_mode_of(tensors):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_already(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    """Whether a reshape from ``shape`` to ``wanted``, which may have a -1, changes nothing."""
    return len(shape) == len(wanted) and all(
        size == -1 or fx_utils.same_size(have, size)
        for have, size in zip(shape, wanted, strict=True)
    )


def _check_same_value(old: fx.Node, new: fx.Node) -> None:
    before, after = fx_utils.value(old), fx_utils.value(new)
    if before.dtype != after.dtype or not fx_utils.same_shape(before.shape, after.shape):
        raise AssertionError(
            f"{new.target} gives {after.dtype} {list(after.shape)}, but {old.name} is "
            f"{before.dtype} {list(before.shape)}"
        )


def erase_if_dead(node: fx.Node) -> None:
    """Erase ``node`` if it has no users, and then every pure node that only it used."""
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        if node in seen or node._erased:
            continue
        for user in list(node.users):
            if user.target in fx_utils.ASSERTIONS or (_is_pure(user) and not user.users):
                todo += filter(_is_pure, user.all_input_nodes)  # which may be dead then, too
                user.graph.erase_node(user)
        if not node.users:
            seen.add(node)
            inputs = node.all_input_nodes
            node.graph.erase_node(node)
            todo += filter(_is_pure, inputs)


def _is_pure(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return _is_pure_op(node.target)
    return node.op == "call_function" and not node.is_impure()


@functools.cache
def _is_pure_op(target: torch._ops.OpOverload) -> bool:
    return not fx.Graph().call_function(target).is_impure()
