"""``prepack_``: repack quantized weights, once, into the layout that our kernels read fastest.

4 bits: packed int32 words of eight neighbours along K, as in GPTQ, with zero points packed along N.
Layouts that put halves of N in a byte take half as long again at M = 1. 8 bits: bytes [N, K].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from inductor_quant import constant_buffers, patterns
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.codegen.byte_layout import byte_layout_of
from inductor_quant.kernels.codegen.packed_layout import packed_layout_of
from inductor_quant.kernels.problem import Weight, WeightTensor
from inductor_quant.ops.dequantize import Evaluator
from inductor_quant.patterns import fx_utils
from inductor_quant.patterns.graph_pass import SLOT
from inductor_quant.patterns.match import RecognizedGemm
from inductor_quant.patterns.rewrite import rewrite
from inductor_quant.spec.weight_format import DequantOp, Field, WeightFormat

aten = fx_utils.aten
CAST = torch.ops.prims.convert_element_type.default
CHUNK = 1 << 23  # elements that are unpacked at once, at eight bytes each
MIN_GROUP = 32  # no kernel for packed weights or bytes takes a smaller group_size
_VIEWS = (*fx_utils.RESHAPES, aten.squeeze.dim, aten.unsqueeze.default)


class PrepackedLinear(nn.Module):
    """``x @ W + bias`` in ``dtype``, cast to the dtype of x.

    ``W[k, n] = (q[k, n] - z[g, n]) * scales[g, n]``, ``g = k // (K / groups)``, in fp32, rounded to
    ``dtype``, as in the canonical op.

    Buffers:
        qdata   4 bits: [K / 8, N] int32, q[8 * i + j] in bits 4 * j ... 4 * j + 3 of row i;
                8 bits: [N, K] int8 or uint8
        qzeros  [groups, N / 8] int32: z - ``zero``, packed along N as qdata along K; or None
        zeros   [groups, N]: z; or None. Without qzeros and zeros, z is ``zero``
        scales  [groups, N], or None: 1
        bias    [N], or None
    """

    qdata: torch.Tensor
    qzeros: torch.Tensor | None
    zeros: torch.Tensor | None
    scales: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, *, dtype: torch.dtype, zero: float, **buffers: torch.Tensor | None) -> None:
        super().__init__()
        self.dtype, self.zero = dtype, zero
        for name in ("qdata", "qzeros", "zeros", "scales", "bias"):
            self.register_buffer(name, buffers[name])

    @property
    def bits(self) -> int:
        return 4 if self.qdata.dtype == torch.int32 else 8

    def extra_repr(self) -> str:
        rows, columns = self.qdata.shape
        n, k = (columns, 8 * rows) if self.bits == 4 else (rows, columns)
        return f"in_features={k}, out_features={n}, bits={self.bits}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bits == 4:
            shifts = torch.arange(0, 32, 4, device=x.device, dtype=torch.int32)
            q = ((self.qdata[:, None] >> shifts[:, None]) & 15).flatten(0, 1)
        else:
            q = self.qdata.t()
        zeros = self.zeros
        if self.qzeros is not None:
            shifts = torch.arange(0, 32, 4, device=x.device, dtype=torch.int32)
            zeros = ((self.qzeros[:, :, None] >> shifts) & 15).flatten(1) + int(self.zero)
        w = q.to(torch.float32)
        grouped = self.scales if self.scales is not None else zeros
        if grouped is not None:
            w = w.unflatten(0, (len(grouped), -1))
        if zeros is not None:
            w = w - zeros[:, None]
        elif self.zero:
            w = w - self.zero
        if self.scales is not None:
            w = w * self.scales[:, None]
        out = x.to(self.dtype) @ w.reshape(q.shape).to(self.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype)


def prepack_(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Replace each module of ``model`` that is one linear layer with a packed weight in a slower
    layout by a ``PrepackedLinear`` of the same function. Returns their names. Modules with hooks,
    or called with more than one tensor, stay.

    ``model(*args, **kwargs)`` is called once, to see the input of each module. The graph of each
    module tells what it computes, so every producer works. The model takes no more memory
    afterwards: the packed tensors of a module are freed with it if nobody else holds them. The
    state dict then has the buffers of ``PrepackedLinear``.

    Call this before ``torch.compile``: a compiled model must be compiled again.
    """
    seen: dict[str, torch.Tensor | None] = {}  # None: not called with one tensor
    candidates = {
        name: module
        for name, module in model.named_modules()
        if name and not list(module.children()) and _has_packed(module) and not _has_hooks(module)
    }

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = inputs[0] if len(inputs) == 1 and not named else None
            if not isinstance(x, torch.Tensor) or x.dim() < 2:
                seen[name] = None
            elif name not in seen:
                few = (*(slice(1) for _ in x.shape[:-2]), slice(2))
                seen[name] = x.detach()[few].clone()

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
    found = []
    for name, x in seen.items():
        linear = None if x is None else _read(candidates[name], x)
        packed = None if linear is None else linear.prepacked()
        if packed is not None:
            packed.train(candidates[name].training)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, packed)
            del candidates[name]
            found.append(name)
        del linear
    return found


def _has_packed(module: nn.Module) -> bool:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(t.dim() > 1 and (not t.is_floating_point() or t.itemsize == 1) for t in tensors)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a call does more than ``forward``, which a replacement would lose."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


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

    def prepacked(self) -> PrepackedLinear | None:
        """None if the layout is the fastest already, or if none fits."""
        element, scaling = self.format.element, _scaling(self.format.dequant_ops)
        if self._is_fast() or scaling is None or element != self.format.code:
            return None
        if element.float8 or element.minus:
            return None
        subtract, multiply = scaling
        k, n = self.format.shape
        source = self.weight[element.source]
        is_int4 = 0 < element.width <= 4 and k % 8 == 0
        low = element.add - (1 << element.width - 1 if element.signed else 0)
        is_bytes = not element.width and not low and source.dtype in (torch.int8, torch.uint8)
        if not is_int4 and not is_bytes:
            return None
        rows = [self.format.block(o)[0] for o in (subtract, multiply) if isinstance(o, Field)]
        group = min([k if size == -1 else size for size in rows], default=k)
        if group < MIN_GROUP or (self.column_scale is not None and multiply is not None):
            return None
        scales = self._grouped(multiply, group)
        if self.column_scale is not None:
            scales = self.column_scale.reshape(1, -1).expand(k // group, n).contiguous()
        zero = float(subtract) - low if isinstance(subtract, (int, float)) else float(-low)
        qzeros, zeros = None, self._grouped(subtract, group)
        if zeros is not None and not zeros.is_floating_point():
            zeros = zeros - low
            zero = float(max(0, int(zeros.max()) - 15))
            if n % 8 == 0 and int(zeros.min()) >= zero:
                qzeros, zeros = _packed_int4((zeros - int(zero)).t()).t().contiguous(), None
            else:
                zeros, zero = zeros.to(torch.int32), 0.0
        elif zeros is not None:
            zeros, zero = zeros - low, 0.0
        return PrepackedLinear(
            qdata=self._packed(is_int4, low),
            qzeros=qzeros,
            zeros=zeros,
            scales=scales,
            bias=self.bias,
            dtype=self.dtype,
            zero=zero,
        )

    def _is_fast(self) -> bool:
        tensors = tuple(WeightTensor(t.dtype, tuple(t.shape), t.stride()) for t in self.weight)
        weight = Weight(self.format, tensors)
        packed, found = packed_layout_of(weight), byte_layout_of(weight)
        is_bytes = found is not None and found[1].count == 1
        return is_bytes or (packed is not None and packed.axis == "k")

    def _grouped(self, operand: Field | float | None, group: int) -> torch.Tensor | None:
        """[K / group, N], integers as int64."""
        if not isinstance(operand, Field):
            return None
        evaluator = Evaluator(self.format, self.weight, self.weight[0].device)
        value: torch.Tensor = evaluator.field(operand).expand(self.format.shape)
        return value[::group].contiguous()

    def _packed(self, is_int4: bool, low: int) -> torch.Tensor:
        k, n = self.format.shape
        source = self.weight[self.format.element.source]
        shape = (k // 8, n) if is_int4 else (n, k)
        dtype = torch.int32 if is_int4 else source.dtype
        qdata = torch.empty(shape, dtype=dtype, device=source.device)
        step = 8 * max(1, CHUNK // (8 * n))
        for first in range(0, k, step):
            last = min(k, first + step)
            rows = _Rows(self.format, self.weight, source.device)
            rows.rows = slice(first, last)
            q = rows.field(self.format.element).expand(-1, n)
            if is_int4:
                qdata[first // 8 : last // 8] = _packed_int4(q - low)
            else:
                qdata[:, first:last] = q.t()
        return qdata


def _packed_int4(q: torch.Tensor) -> torch.Tensor:
    """Packs eight neighbours of the first dimension in an int32, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, device=q.device)
    return (q.unflatten(0, (-1, 8)) << shifts[:, None]).sum(1).to(torch.int32)


def _scaling(ops: Sequence[DequantOp]) -> tuple[Field | float | None, Field | float | None] | None:
    """(subtrahend, factor) of at most one subtraction and one product; None for other ops."""
    if [op.kind for op in ops] not in ([], ["sub"], ["mul"], ["sub", "mul"]):
        return None
    operands = {op.kind: op.operand for op in ops}
    if isinstance(operands.get("mul"), (int, float)):
        return None
    return operands.get("sub"), operands.get("mul")


class _Rows(Evaluator):
    """Evaluates ``rows`` of W."""

    rows: slice

    def digit(self, name: str) -> Any:
        digit = super().digit(name)
        return digit[self.rows] if name[0] == "k" else digit


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


def _read(module: nn.Module, x: torch.Tensor) -> _Linear | None:
    """The linear layer that ``module(x)`` computes; None if it is something else."""
    passes: list[_Inspect] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        constant_buffers.make_constant(gm, constant_buffers.find(gm, inputs))
        passes.append(_Inspect(inputs, x))
        # Otherwise a benchmark decides whether two rows are padded to eight: the graph would vary.
        config = {SLOT: passes[-1], "shape_padding": False}
        return compat.compile_fx(gm, inputs, config_patches=config)

    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(module, backend=backend, dynamic=False, fullgraph=True)(x)
    except Exception:
        if not passes:
            return None  # the module cannot be traced
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
        or tuple(fx_utils.value(result).shape) != (*x.shape[:-1], format.shape[1])
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
