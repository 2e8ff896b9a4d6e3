"""``prepack_``: bring packed weights, once, into the layout that our kernels read fastest.

Of 4 bits these are words of eight neighbours along K, as GPTQ's, zero points packed along N. On an
H200 one row by 28672 x 4096 takes 24 us with them and 36 with halves of N in a byte
(``bench_gemm.py --m 1 --family weight_only`` and ``weight_only_hqq``). Of 8 bits: bytes [N, K].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from inductor_quant import _torch_compat as compat
from inductor_quant import patterns, tables
from inductor_quant.kernels.byte_numbers import bytes_of
from inductor_quant.kernels.config import Weight, WeightTensor
from inductor_quant.kernels.words import words_of
from inductor_quant.ops.dequantize import Evaluator
from inductor_quant.patterns import graph as reading
from inductor_quant.patterns.canonicalize import rewrite
from inductor_quant.patterns.pattern import RecognizedGemm
from inductor_quant.patterns.pipeline import SLOT
from inductor_quant.weight_format import Field, Step, WeightFormat

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
# Of numbers that are unpacked at once, eight bytes each: what repacking takes beside the weight.
CHUNK = 1 << 23
# Scales of fewer rows are read one by one: no kernel for words or bytes takes them.
MIN_GROUP = 32
_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
)


class PrepackedLinear(nn.Module):
    """``x @ W + bias`` in ``dtype``, then in the type of x again.

    ``W[k, n] = (q[k, n] - z[g, n]) * scales[g, n]``, ``g = k // (K / groups)``.

    Buffers:
        qdata   [K / 8, N] int32: q[8 * i + j] in the four bits from 4 * j on of row i; or, of 8
                bits, [N, K] int8 or uint8
        qzeros  [groups, N / 8] int32: z less ``zero``, along N as qdata is along K; or None
        zeros   [groups, N]: z; or None. Without both z is ``zero``, one number
        scales  [groups, N], or None: 1
        bias    [N], or None
    W is computed in fp32 and rounded to ``dtype``, as the canonical op says.
    """

    qdata: torch.Tensor
    qzeros: torch.Tensor | None
    zeros: torch.Tensor | None
    scales: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        *,
        qdata: torch.Tensor,
        qzeros: torch.Tensor | None,
        zeros: torch.Tensor | None,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        zero: float,
    ) -> None:
        super().__init__()
        self.dtype, self.zero = dtype, zero
        buffers = {"qdata": qdata, "qzeros": qzeros, "zeros": zeros, "scales": scales, "bias": bias}
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

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
    """Replace each module of ``model`` that is one linear layer with a packed weight, and whose
    layout is not the fastest, by a ``PrepackedLinear`` of the same function; their names. Those
    with hooks, or that are called with more than one tensor, stay.

    ``model(*args, **kwargs)`` is called once, to see what each module is given. Which modules these
    are is read from the graph of each alone, so a producer need not be known. The packed tensors of
    a module are freed with it if nobody else holds them: afterwards the model takes no more memory
    than before. The state dict has the buffers of ``PrepackedLinear``: save the model before, or
    with them.

    A model that is compiled already must be compiled again: call this before ``torch.compile``.
    """
    seen: dict[str, torch.Tensor | None] = {}  # None: once called with something else
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
        packed = None if linear is None else linear.repacked()
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
    """Whether more happens in a call than ``forward`` says: it would be lost with the module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


# ------------------------------------------------------------------------------------------
# what a module computes


@dataclasses.dataclass
class _Linear:
    """What a module is: x in ``dtype``, the canonical op with these arguments, in ``dtype`` too,
    then plus ``bias`` and in the type of x."""

    dtype: torch.dtype
    format: WeightFormat
    weight: list[torch.Tensor]
    column_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def repacked(self) -> PrepackedLinear | None:
        """None: it is in the fastest layout, or we have none for it."""
        element, scaling = self.format.element, _scaling(self.format.steps)
        if self._is_fast() or scaling is None or element != self.format.code or element.float8:
            return None
        subtract, multiply = scaling
        k, n = self.format.shape
        source = self.weight[element.source]
        is_words = 0 < element.width <= 4 and k % 8 == 0
        low = element.add - (1 << element.width - 1 if element.signed else 0)
        is_bytes = not element.width and not low and source.dtype in (torch.int8, torch.uint8)
        if not is_words and not is_bytes:
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
                qzeros, zeros = _words((zeros - int(zero)).t()).t().contiguous(), None
            else:
                zeros, zero = zeros.to(torch.int32), 0.0
        elif zeros is not None:
            zeros, zero = zeros - low, 0.0
        return PrepackedLinear(
            qdata=self._packed(is_words, low),
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
        words, found = words_of(weight), bytes_of(weight)
        is_bytes = found is not None and found[1].count == 1
        return is_bytes or (words is not None and words.axis == "k")

    def _grouped(self, operand: Field | float | None, group: int) -> torch.Tensor | None:
        """[K / group, N], integers as int64."""
        if not isinstance(operand, Field):
            return None
        k, n = self.format.shape
        value: torch.Tensor = Evaluator(self.format, self.weight, self.weight[0].device).field(
            operand
        )
        return value.expand(k, n)[::group].contiguous()

    def _packed(self, is_words: bool, low: int) -> torch.Tensor:
        k, n = self.format.shape
        source = self.weight[self.format.element.source]
        shape = (k // 8, n) if is_words else (n, k)
        dtype = torch.int32 if is_words else source.dtype
        qdata = torch.empty(shape, dtype=dtype, device=source.device)
        step = 8 * max(1, CHUNK // (8 * n))
        for first in range(0, k, step):
            last = min(k, first + step)
            rows = _Rows(self.format, self.weight, source.device, first, last)
            numbers = rows.field(self.format.element).expand(-1, n)
            if is_words:
                qdata[first // 8 : last // 8] = _words(numbers - low)
            else:
                qdata[:, first:last] = numbers.t()
        return qdata


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Eight neighbours of the first dimension in an int32, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, device=numbers.device)
    return (numbers.unflatten(0, (-1, 8)) << shifts[:, None]).sum(1).to(torch.int32)


def _scaling(steps: Sequence[Step]) -> tuple[Field | float | None, Field | float | None] | None:
    """(what is subtracted, what is multiplied by) of steps that are at most that; None: others."""
    kinds = [step.kind for step in steps]
    if kinds not in ([], ["sub"], ["mul"], ["sub", "mul"]):
        return None
    operands = {step.kind: step.operand for step in steps}
    if isinstance(operands.get("mul"), (int, float)):
        return None
    return operands.get("sub"), operands.get("mul")


class _Rows(Evaluator):
    """The rows from ``first`` to ``last`` of W."""

    def __init__(
        self,
        format: WeightFormat,
        weight: Sequence[torch.Tensor],
        device: torch.device,
        first: int,
        last: int,
    ) -> None:
        super().__init__(format, weight, device)
        self.rows = slice(first, last)

    def digit(self, name: str) -> Any:
        digit = super().digit(name)
        return digit[self.rows] if name[0] == "k" else digit


class _Stop(Exception):
    """The graph has been read: nothing is to be compiled."""


class _Inspect(compat.CustomGraphPass):
    """Reads the graph of a module where our pass would, and ends the compilation."""

    def __init__(self, inputs: Sequence[Any], x: torch.Tensor) -> None:
        self.inputs, self.x = inputs, x
        self.found: _Linear | None = None

    def uuid(self) -> None:
        return None

    def __call__(self, graph: fx.Graph) -> None:
        self.found = _linear_of(graph, self.inputs, self.x)
        raise _Stop


def _read(module: nn.Module, x: torch.Tensor) -> _Linear | None:
    """The one linear layer that ``module(x)`` is; None: it is something else."""
    passes: list[_Inspect] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        tables.make_constant(gm, tables.find(gm, inputs))
        passes.append(_Inspect(inputs, x))
        # Else a benchmark decides whether a GPU's two rows are made eight: another graph each time.
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

    # from the result back to the op: a cast to the type of x, a bias; from there to x: a cast
    [output] = [node for node in graph.nodes if node.op == "output"]
    [result] = output.all_input_nodes
    node = _behind(result, x.dtype)
    _, weight, column_scale, bias = call.args
    if node is not call:
        if bias is not None or node.target is not aten.add.Tensor or node.kwargs:
            return None
        node, bias = node.args
        if _behind(node) is not call or not isinstance(bias, fx.Node):
            return None
    format, dtype = WeightFormat.decode(str(call.kwargs["format"])), reading.value(call).dtype
    given = _behind(call.args[0], dtype)
    uses_x = {given}
    for other in graph.nodes:
        if uses_x & set(other.all_input_nodes):
            uses_x.add(other)
    held = [*weight, column_scale, bias]  # type: ignore[misc]
    if (
        values.get(given) is None
        or values[given].data_ptr() != x.data_ptr()
        or uses_x & set(held)
        or reading.value(call.args[0]).dtype != dtype
        or reading.value(result).dtype != x.dtype
        or tuple(reading.value(result).shape) != (*x.shape[:-1], format.shape[1])
        or format.shape[0] != x.shape[-1]
    ):
        return None
    bias = value(bias)
    if bias is not None:
        if bias.numel() != format.shape[1] or bias.dtype != dtype:
            return None
        bias = bias.reshape(-1)
    return _Linear(
        dtype,
        format,
        [value(w) for w in weight],  # type: ignore[union-attr]
        value(column_scale),
        bias,
    )


def _recognized(node: fx.Node) -> list[RecognizedGemm]:
    if node.op != "call_function":
        return []
    found = [p.recognize(node) for p in patterns.patterns() if node.target in p.anchors]
    return [gemm for gemm in found if isinstance(gemm, RecognizedGemm)][:1]


def _behind(node: Any, dtype: torch.dtype | None = None) -> Any:
    """What ``node`` is a view of, or a cast to ``dtype`` of."""
    while isinstance(node, fx.Node) and (
        node.target in _VIEWS or (node.target is CAST and node.args[1] == dtype)
    ):
        node = node.args[0]
    return node
