"""``prepack_``: repack quantized weights, once, into the layout that our kernels read fastest
(``ops/repack.py``)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from inductor_quant import patterns
from inductor_quant._compat import inductor as compat
from inductor_quant.ops import repack
from inductor_quant.patterns import fx_utils
from inductor_quant.patterns.graph_pass import SLOT
from inductor_quant.patterns.match import RecognizedGemm
from inductor_quant.patterns.rewrite import rewrite
from inductor_quant.prepack.layer import PrepackedLinear, Source, prepacked_class
from inductor_quant.spec.weight_format import Field, WeightFormat
from inductor_quant.tables import constant_buffers

aten = fx_utils.aten
CAST = torch.ops.prims.convert_element_type.default
_VIEWS = (*fx_utils.RESHAPES, aten.squeeze.dim, aten.unsqueeze.default)


def prepack_(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Repack, in place, each module of ``model`` that is one linear layer with a packed weight in a
    slower layout: ``module.prepacked`` is then a ``PrepackedLinear`` of the same function. Returns
    their names. A module called with more than one tensor stays.

    ``model(*args, **kwargs)`` is called once, to see the input of each module. The graph of each
    module, for one row and for any number, tells what it computes, so every producer works. Calls
    of another kind (dtype, dimensions, keywords, ``train()``, autocast) run the module's own
    ``forward``, slowly. The model takes no more memory afterwards: tensors of the module are freed,
    and computed again when they are read. The state dict then has the buffers of ``prepacked``.

    Call this before ``torch.compile``: a compiled model must be compiled again.
    """
    seen: dict[str, torch.Tensor | None] = {}  # None: not called with one tensor
    candidates = {
        name: module
        for name, module in model.named_modules()
        if not list(module.children()) and _has_packed(module) and "forward" not in vars(module)
    }

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = inputs[0] if len(inputs) == 1 and not named else None
            if not isinstance(x, torch.Tensor) or x.dim() < 2:
                seen[name] = None
            elif name not in seen:
                seen[name] = x.detach()[(*(slice(1) for _ in x.shape[:-1]), slice(None))].clone()

        return hook

    handles = [
        module.register_forward_pre_hook(watch(name), with_kwargs=True)
        for name, module in candidates.items()
    ]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    owners = Counter(t.data_ptr() for m in model.modules() for t in _tensors(m).values())
    found = []
    for name, x in seen.items():
        module = candidates[name]
        if x is not None and _repack(module, x, owners):
            found.append(name)
    return found


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


def _repack(module: nn.Module, x: torch.Tensor, owners: Counter[int]) -> bool:
    """Give ``module`` a PrepackedLinear, if it is a linear layer that gains by one."""
    linear = _read(module, x, is_dynamic=False)
    # Groups that repeat, k % groups, are read from a list as a rule, and are sorted as a list.
    has_list = linear is not None and linear.has_short_groups and _has_list(module, x.shape[-1])
    if has_list:
        linear = _read(module, x, is_dynamic=False, keeps_lists=True)
    packed = None if linear is None else linear.prepacked()
    if linear is None or packed is None:
        return False
    many = x.repeat(*(3 + 2 * i for i in range(x.dim() - 1)), 1)
    general = _read(module, many, is_dynamic=True, keeps_lists=has_list)
    if general is None or not linear.is_same(general):
        return False
    held = _tensors(module)
    sources: dict[str, Source] = {}
    for name, tensor in held.items():
        source = linear.source_of(tensor, packed) if owners[tensor.data_ptr()] == 1 else None
        if source is not None and torch.equal(source.restored(packed), tensor):
            sources[name] = source
    freed = sum(held[name].nbytes for name in sources)
    if sum(buffer.nbytes for buffer in packed.buffers()) > freed:
        return False
    kept = tuple(sources)
    for name in kept:
        delattr(module, name)
    module.prepacked = packed.train(module.training)
    module.prepacked_for = (x.dtype, x.dim(), module.training)  # type: ignore[assignment]
    module.prepacked_from = sources  # type: ignore[assignment]
    kind: Any = type(module)
    module.__class__ = prepacked_class(kind, kept)
    return True


def _has_packed(module: nn.Module) -> bool:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(t.dim() > 1 and (not t.is_floating_point() or t.itemsize == 1) for t in tensors)


def _has_list(module: nn.Module, k: int) -> bool:
    """Whether a tensor may list the group of each k."""
    return any(t.shape == (k,) and not t.is_floating_point() for t in _tensors(module).values())


# ------------------------------------------------------------------------------------------
# what a module computes


@dataclasses.dataclass
class _Linear:
    """What a module computes: x cast to ``dtype``, the canonical op with these arguments, ``+
    bias``, cast to the dtype of x."""

    dtype: torch.dtype
    format: WeightFormat
    weight: list[torch.Tensor]
    column_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def is_same(self, other: _Linear) -> bool:
        """Whether another graph of the module computes the same from the same tensors."""
        pairs = zip(
            (*self.weight, self.column_scale, self.bias),
            (*other.weight, other.column_scale, other.bias),
            strict=True,
        )
        return (self.dtype, self.format) == (other.dtype, other.format) and all(
            a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
        )

    @property
    def has_short_groups(self) -> bool:
        """Whether neighbours along K that share a scale or zero point are too few for a kernel."""
        operands = [o for o in repack.scaling(self.format) or () if isinstance(o, Field)]
        sizes = [self.format.block(operand)[0] for operand in operands]
        is_listed = repack.group_list(self.format) is not None
        return not is_listed and any(0 < size < repack.MIN_GROUP for size in sizes)

    def source_of(self, tensor: torch.Tensor, packed: PrepackedLinear) -> Source | None:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        subtract, multiply = repack.scaling(self.format) or (None, None)
        group = repack.group_list(self.format)
        fields = (self.format.element, subtract, multiply, group)
        for part, field in enumerate(fields):
            if not isinstance(field, Field) or {*field.nested} - {group}:
                continue
            source, low = self.weight[field.source], repack.lowest(self.format) if part < 2 else 0
            is_it = source.data_ptr() == tensor.data_ptr() and source.shape == tensor.shape
            is_alone = sum(isinstance(f, Field) and f.source == field.source for f in fields) == 1
            if is_it and is_alone and source.dtype == tensor.dtype:
                return Source(like, "", self.format, field, part, low, group)
        for name, buffer in packed.named_buffers():
            is_long = tensor.is_contiguous() and tensor.numel() == buffer.numel()
            if is_long and torch.equal(tensor.flatten(), buffer.flatten().to(tensor.dtype)):
                return Source(like, name)
        return None

    def prepacked(self) -> PrepackedLinear | None:
        """None if the layout is the fastest already, or if none fits."""
        found = repack.repacked(self.format, self.weight, self.column_scale)
        if found is None:
            return None
        return PrepackedLinear(dtype=self.dtype, bias=self.bias, **vars(found))


class _Stop(Exception):
    """The graph has been read; there is nothing to compile."""


class _Inspect(compat.CustomGraphPass):
    """Reads the graph of a module in the slot of our pass, and ends the compilation."""

    def __init__(self, inputs: Sequence[Any], x: torch.Tensor) -> None:
        self.inputs, self.x = inputs, x
        self.found: _Linear | None = None

    def uuid(self) -> None:
        return None

    def __call__(self, graph: fx.Graph) -> None:
        self.found = _linear_of(graph, self.inputs, self.x)
        raise _Stop


def _read(
    module: nn.Module, x: torch.Tensor, *, is_dynamic: bool, keeps_lists: bool = False
) -> _Linear | None:
    """The linear layer that ``module(x)`` computes, with ``is_dynamic`` for any number of rows from
    two on; None if it is something else. ``keeps_lists``: no rule is read from a tensor of K
    numbers."""
    passes: list[_Inspect] = []
    if is_dynamic:
        for dim in range(x.dim() - 1):
            compat.mark_dynamic(x, dim)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        tables = constant_buffers.find(gm, inputs)
        if keeps_lists:
            tables = [table for table in tables if table.value.shape != x.shape[-1:]]
        constant_buffers.make_constant(gm, tables)
        passes.append(_Inspect(inputs, x))
        # Otherwise a benchmark decides whether two rows are padded to eight: the graph would vary.
        config = {SLOT: passes[-1], "shape_padding": False}
        try:
            compat.compile_fx(gm, inputs, config_patches=config)
        except Exception:
            if passes[-1].found is None:
                raise
        return gm.forward

    torch.compiler.reset()
    try:
        # forward alone: hooks are called with it as before
        with torch.no_grad():
            dynamic = None if is_dynamic else False
            torch.compile(module.forward, backend=backend, dynamic=dynamic, fullgraph=True)(x)
    except Exception:  # it cannot be traced, is no linear layer, or one for some rows only
        return None
    finally:
        torch.compiler.reset()
    return passes[0].found if len(passes) == 1 else None


def _linear_of(graph: fx.Graph, inputs: Sequence[Any], x: torch.Tensor) -> _Linear | None:
    found = [gemm for node in list(graph.nodes) for gemm in _recognized(node)]
    if len(found) != 1 or found[0].family != "weight_only":
        return None
    call = rewrite(found[0])
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        return None
    values = dict(zip(placeholders, inputs, strict=True))

    def value(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node not in values:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            if node.op == "get_attr":
                values[node] = getattr(graph.owning_module, str(node.target))
            else:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values[node]

    # from the result up to the op: a cast to the dtype of x, a bias; from the op up to x: a cast
    [output] = [node for node in graph.nodes if node.op == "output"]
    [result] = output.all_input_nodes
    node = _unwrapped(result, x.dtype)
    _, weight, column_scale, bias = call.args
    if node is not call:
        if bias is not None or node.target is not aten.add.Tensor or node.kwargs:
            return None
        node, bias = node.args
        if _unwrapped(node) is not call or not isinstance(bias, fx.Node):
            return None
    format, dtype = WeightFormat.decode(str(call.kwargs["format"])), fx_utils.value(call).dtype
    given = _unwrapped(call.args[0], dtype)
    given_shape = fx_utils.value(given).shape[:-1] if fx_utils.is_tensor_node(given) else ()
    uses_x = {given}
    for other in graph.nodes:
        if uses_x & set(other.all_input_nodes):
            uses_x.add(other)
    operands = [*weight, column_scale, bias]  # type: ignore[misc]
    if (
        values.get(given) is None
        or values[given].data_ptr() != x.data_ptr()
        or uses_x & set(operands)
        or fx_utils.value(call.args[0]).dtype != dtype
        or fx_utils.value(result).dtype != x.dtype
        or not fx_utils.same_shape(fx_utils.value(result).shape, (*given_shape, format.shape[1]))
        or format.shape[0] != x.shape[-1]
    ):
        return None
    bias = value(bias)
    if bias is not None:
        if bias.numel() != format.shape[1] or bias.dtype != dtype:
            return None
        bias = bias.reshape(-1)
    tensors = [value(w) for w in weight]  # type: ignore[union-attr]
    return _Linear(dtype, format, tensors, value(column_scale), bias)


def _recognized(node: fx.Node) -> list[RecognizedGemm]:
    if node.op != "call_function":
        return []
    found = [p.recognize(node) for p in patterns.patterns() if node.target in p.anchors]
    return [gemm for gemm in found if isinstance(gemm, RecognizedGemm)][:1]


def _unwrapped(node: Any, dtype: torch.dtype | None = None) -> Any:
    """``node`` without views, and without casts to ``dtype``."""
    while isinstance(node, fx.Node) and (
        node.target in _VIEWS or (node.target is CAST and node.args[1] == dtype)
    ):
        node = node.args[0]
    return node
