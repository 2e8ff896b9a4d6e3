"""Ops of quantizers that hide a product: replaced by a formula that the recognizers read.

An op is known by its whole schema, so one that has changed stays opaque. Its formula is plain
PyTorch (``spec/formulas.py``), traced into the graph in its place, and taken out again if nothing
matches.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.spec import formulas

from .. import fx_utils
from ..fx_utils import aten
from ..match import Constant
from ..rewrite import add_constant, erase_if_dead

# Arguments by name -> (a formula, its tensors: nodes, Constants or None); None: not this case.
Arguments = dict[str, Any]
Formula = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
Adapter = Callable[[Arguments], Formula | None]
_PRODUCTS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default),
    aten._int_mm.default,
    aten._scaled_mm.default,
)
_VIEWS = (*fx_utils.RESHAPES, aten.permute.default, aten.t.default, fx_utils.CAST)


def _gemm_4bit(given: Arguments) -> Formula | None:
    (n, k), size = given["shapeB"], given["blocksize"]
    table = _table(given["quant_type"])
    x, packed, absmax = given["A"], given["B"], given["absmax"]
    is_bytes = fx_utils.value(packed).dtype == torch.uint8
    is_in_order = fx_utils.same_size(fx_utils.value(x).shape[-1], k)  # not the weight [K, N]
    if table is None or k % size or not is_bytes or not is_in_order:
        return None
    nested = [given.get(f"absmax_{name}") for name in ("8bit", "code", "offset")]
    if nested[0] is not None and None in nested:
        return None

    def formula(x: Any, packed: Any, code: Any, absmax: Any, bias: Any, *nested: Any) -> Any:
        if nested[0] is not None:
            codes, values, offset = nested
            absmax = formulas.nested_absmax(codes, absmax, values, offset, 256)
        return formulas.gemm_4bit(x, packed, code, absmax, bias, n)

    return formula, (x, packed, table, absmax, given.get("bias"), *nested)


def _gemv_4bit(given: Arguments) -> Formula | None:
    (n, k), size = given["shapeB"], given["blocksize"]
    x, packed, code, absmax = (given[name] for name in ("A", "B", "code", "absmax"))
    is_bytes = fx_utils.value(packed).dtype == torch.uint8
    is_in_order = fx_utils.same_size(fx_utils.value(x).shape[-1], k)
    if k % size or not is_bytes or not is_in_order:
        return None

    def formula(x: Any, packed: Any, code: Any, absmax: Any) -> Any:
        return formulas.gemm_4bit(x, packed, code, absmax, None, n)

    return formula, (x, packed, code, absmax)


def _dequantize_4bit(given: Arguments) -> Formula | None:
    shape, table = given["shape"], _table(given["quant_type"])
    is_bytes = fx_utils.value(given["A"]).dtype == torch.uint8
    if table is None or len(shape) != 2 or shape[1] % given["blocksize"] or not is_bytes:
        return None

    def formula(packed: Any, code: Any, absmax: Any) -> Any:
        weight = formulas.codes_times_absmax(packed, code, absmax, shape)
        return weight.to(given["dtype"])

    return formula, (given["A"], table, given["absmax"])


def _table(kind: str) -> Constant | None:
    values = {"nf4": formulas.NF4, "fp4": formulas.FP4}.get(kind)
    return None if values is None else Constant(struct.pack("16f", *values), torch.float32)


def _int8_scaled_mm(given: Arguments) -> Formula | None:
    names = ("A", "B", "row_stats", "col_stats", "bias")
    dtype = given.get("dtype") or torch.float16
    formula = functools.partial(formulas.int8_scaled_mm, dtype=dtype)
    return formula, tuple(given.get(name) for name in names)


def _int4pack_mm(given: Arguments) -> Formula | None:
    x, words, group, scales = (
        given[name] for name in ("self", "mat2", "qGroupSize", "qScaleAndZeros")
    )
    is_cuda = fx_utils.value(words).device.type == "cuda" and torch.version.hip is None
    if not is_cuda or fx_utils.value(words).dim() != 4 or fx_utils.value(x).dtype != torch.bfloat16:
        return None  # other devices have other layouts in the same shape

    def formula(x: Any, words: Any, scales: Any) -> Any:
        return formulas.int4pack_mm(x, words, group, scales)

    return formula, (x, words, scales)


def _qbytes_mm(given: Arguments) -> Formula | None:
    tensors = tuple(given[name] for name in ("A", "B", "scales"))
    dtypes = {fx_utils.value(node).dtype for node in tensors[:2]}
    if dtypes not in ({torch.int8}, {torch.float8_e4m3fn}):
        return None  # a float activation has a reader: ``matmul_ops``
    return formulas.qbytes_mm, tensors


def _int_addmm(given: Arguments) -> Formula | None:
    names = ("crow_indices", "col_indices", "values", "A", "left_alpha", "right_alpha")
    return formulas.blocksparse_int_addmm, tuple(given[name] for name in names)


# Rows up to which ours are known to be no slower than a tuned kernel for the same operands.
_FEW_ROWS_INT4, _FEW_ROWS_FP8 = 16, 64


def _bf16i4bf16_rowwise(given: Arguments) -> Formula | None:
    tensors = tuple(given[name] for name in ("X", "W", "w_scale_group", "w_zero_group"))
    x, packed, scales, _ = map(fx_utils.value, tensors)
    is_known = packed.dtype == torch.int8 and packed.dim() == 2 and x.dtype == torch.bfloat16
    if not is_known or 2 * packed.shape[1] % len(scales) or not _are_few(x, _FEW_ROWS_INT4):
        return None
    return formulas.bf16i4bf16_rowwise, tensors


def _f8f8bf16_rowwise(given: Arguments) -> Formula | None:
    tensors = tuple(given[name] for name in ("XQ", "WQ", "x_scale", "w_scale"))
    a, b, *scales = map(fx_utils.value, tensors)
    bias = given.get("bias")
    is_known = {a.dtype, b.dtype} == {torch.float8_e4m3fn} and a.dim() == b.dim() == 2
    is_known &= {scale.dtype for scale in scales} == {torch.float32}
    is_known &= bias is None or fx_utils.value(bias).dtype == torch.bfloat16
    if not is_known or not _are_few(a, _FEW_ROWS_FP8):
        return None
    fast = given.get("use_fast_accum", True)
    return functools.partial(formulas.f8f8bf16_rowwise, fast_accum=fast), (*tensors, bias)


def _are_few(x: torch.Tensor, most: int) -> bool:
    rows = fx_utils.limit(math.prod(x.shape[:-1]))
    return rows is not None and rows <= most


def _mslk(schema: str, adapter: Adapter) -> dict[str, Adapter]:
    return {f"{package}::{schema} -> Tensor": adapter for package in ("mslk", "fbgemm")}


ADAPTERS: dict[str, Adapter] = {
    **_mslk("bf16i4bf16_rowwise(Tensor X, Tensor W, Tensor w_scale_group, Tensor w_zero_group)",
            _bf16i4bf16_rowwise),
    **_mslk("f8f8bf16_rowwise(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, "
            "Tensor? bias=None, bool use_fast_accum=True)", _f8f8bf16_rowwise),
    "bitsandbytes::gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, "
    "str quant_type, Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, "
    "Tensor? absmax_offset=None) -> Tensor": _gemm_4bit,
    "bitsandbytes::gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, "
    "int blocksize) -> Tensor": _gemv_4bit,
    "bitsandbytes::dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, "
    "int[] shape, ScalarType dtype) -> Tensor": _dequantize_4bit,
    "bitsandbytes::int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, "
    "Tensor? bias=None, ScalarType? dtype=None) -> Tensor": _int8_scaled_mm,
    "aten::_weight_int4pack_mm(Tensor self, Tensor mat2, int qGroupSize, Tensor qScaleAndZeros)"
    " -> Tensor": _int4pack_mm,
    "blocksparse::int_addmm(Tensor crow_indices, Tensor col_indices, Tensor values, Tensor A, "
    "Tensor left_alpha, Tensor right_alpha) -> Tensor": _int_addmm,
    "quanto::qbytes_mm(Tensor A, Tensor B, Tensor scales) -> Tensor": _qbytes_mm,
}  # fmt: skip


def _product_of(weight: fx.Node) -> fx.Node | None:
    """The only product that reads a weight."""
    user = fx_utils.single_user(weight)
    while user is not None and user.target in _VIEWS:
        user = fx_utils.single_user(user)
    return user if user is not None and user.target in _PRODUCTS else None


def is_known(node: fx.Node) -> bool:
    return _schema(node) in ADAPTERS


def _schema(node: fx.Node) -> str:
    return str(getattr(node.target, "_schema", ""))


def expanded(node: fx.Node) -> Expanded | None:
    """Put the formula of an op in its place; None if it has none."""
    schema: Any = getattr(node.target, "_schema", None)
    adapter = ADAPTERS.get(str(schema))
    if adapter is None:
        return None
    names = [argument.name for argument in schema.arguments]
    found = adapter({**dict(zip(names, node.args, strict=False)), **node.kwargs})
    return None if found is None else Expanded(node, *found)


class Expanded:
    """``formula(*tensors)`` in the place of ``node``, until ``undo`` or ``finish``.

    product  its matrix product, or the one that it is the weight of
    """

    def __init__(
        self, node: fx.Node, formula: Callable[..., Any], tensors: tuple[Any, ...]
    ) -> None:
        self._node, self._added = node, list[fx.Node]()
        with node.graph.inserting_before(node):
            self._result = self._insert(formula, tensors)
        products = [new for new in self._added if new.target in _PRODUCTS]
        products = products or list(filter(None, [_product_of(node)]))
        before, after = fx_utils.value(node), fx_utils.value(self._result)
        is_same = before.dtype == after.dtype and fx_utils.same_shape(before.shape, after.shape)
        self.product = products[0] if is_same and len(products) == 1 else None
        node.replace_all_uses_with(self._result)

    def _insert(self, formula: Callable[..., Any], tensors: tuple[Any, ...]) -> fx.Node:
        given = [self._constant(t) if isinstance(t, Constant) else t for t in tensors]
        present = [item for item in given if item is not None]

        def call(*values: Any) -> Any:
            rest = iter(values)
            return formula(*(None if item is None else next(rest) for item in given))

        graph = compat.traced(call, [fx_utils.value(item) for item in present]).graph
        places = dict(zip(graph.find_nodes(op="placeholder"), present, strict=True))
        for inner in graph.nodes:
            if inner.op == "output":
                result: fx.Node = places[inner.args[0]]
            elif inner.op != "placeholder":
                places[inner] = self._copy(inner, places)
        return result

    def _copy(self, inner: fx.Node, places: dict[fx.Node, fx.Node]) -> fx.Node:
        copy = self._node.graph.node_copy(inner, places.__getitem__)
        copy.meta = {**self._node.meta, "val": inner.meta["val"], "original_aten": copy.target}
        self._added.append(copy)
        return copy

    def _constant(self, constant: Constant) -> fx.Node:
        self._added.append(add_constant(self._node, constant))
        return self._added[-1]

    def undo(self) -> None:
        self._result.replace_all_uses_with(self._node)
        for node in reversed(self._added):
            node.graph.erase_node(node)

    def finish(self) -> None:
        """Erase the op."""
        erase_if_dead(self._node)
