"""Tables of weights: the values of a function of codes, and what a table is indexed by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.ops.dequantize import EXPONENTS
from inductor_quant.spec.weight_format import E2M1, Field

from .. import fx_utils
from ..match import Constant, Derived
from ..symbolic import Reader
from ..symbolic.bits import dense_parts
from ..symbolic.expr import E8M0, Bits, Expr, Load, Lookup, Op, is_position, whole
from ..symbolic.functions import as_function
from ..symbolic.index import Unsupported

Source = fx.Node | Constant | Derived
_HOLDING = (torch.bfloat16, torch.float32, torch.float64)  # all of e8m0
TABLE_DTYPES = (torch.float16, torch.bfloat16)  # of a table whose values they hold; else fp32


def table_of(expr: Lookup, preferred: torch.dtype) -> Constant | Derived | str:
    """The values as a table, of the ``preferred`` dtype if that holds them; the kind of float8 if
    they are its floats."""
    if isinstance(expr.values, Derived):
        return expr.values
    with compat.real_tensors():
        exact = Constant(expr.values, expr.dtype).tensor()
        values = exact.float()
        is_wide = exact.dtype == torch.float64
        if is_wide and not torch.equal(values.isfinite(), exact.isfinite()):
            raise Unsupported("a table of numbers beyond fp32")
        if kind := _float8_of(values):
            return kind
        types = sorted(TABLE_DTYPES, key=lambda dtype: dtype != preferred)
        narrow = [t for t in types if torch.equal(values.to(t).float(), values)]
        values = values.to((*narrow, torch.float32)[0])
        return Constant(values.view(torch.uint8).numpy().tobytes(), values.dtype)


def exponents_of(reader: Reader, expr: Expr) -> tuple[Bits, str] | None:
    """(the stored code, the kind of ``EXPONENTS``) of a scale that is such a function of it."""
    inner = expr
    while isinstance(inner, Op) and inner.name == "cast" and inner.dtype in _HOLDING:
        (inner,) = inner.args
    if isinstance(inner, Load) and inner.dtype == E8M0:
        return whole(inner.node, inner.index, torch.uint8), "e8m0"
    if not isinstance(inner, Lookup):
        return None
    try:
        found = as_function(reader, expr)
    except Unsupported:
        return None
    if not isinstance(found, Lookup) or not isinstance(found.values, bytes):
        return None
    if not isinstance(found.code, Bits) or len(found.values) != 256 * found.dtype.itemsize:
        return None
    with compat.real_tensors():
        values = Constant(found.values, found.dtype).tensor().double()
        powers = torch.arange(-127.0, 129.0, dtype=torch.float64).exp2()
        for kind, (first, last) in EXPONENTS.items():
            powers[0], powers[-1] = first, last
            if torch.allclose(values, powers, rtol=0, atol=0, equal_nan=True):
                return found.code, kind
        return None


def known_entries(element: Field, sources: Sequence[Source]) -> Field:
    """``element`` with the name of its table's entries, if their values are known."""
    table, tensor = sources[element.source], None
    if isinstance(table, fx.Node) and table.op == "get_attr" and fx_utils.is_literal(table):
        tensor = fx_utils.attribute(table)
    with compat.real_tensors():
        tensor = table.tensor() if isinstance(table, Constant) else tensor
        if tensor is None or tensor.numel() != len(E2M1):
            return element
        e2m1 = torch.tensor(E2M1, dtype=torch.float32, device="cpu")
        is_e2m1 = torch.equal(*(each.view(torch.int32) for each in (tensor.float().cpu(), e2m1)))
    return dataclasses.replace(element, entries="e2m1") if is_e2m1 else element


def entries(table: Constant | Derived, stored: fx.Node) -> Derived:
    """The entry of each code in ``stored``, int8 or uint8, as ops that the rewrite adds."""
    codes: Any = Derived(fx_utils.CAST, (stored, torch.int64))
    if fx_utils.value(stored).dtype == torch.int8:
        codes = Derived(fx_utils.aten.bitwise_and.Scalar, (codes, 255))
    shape = tuple(fx_utils.value(stored).shape)
    target = fx_utils.aten.index.Tensor
    return Derived(target, (table, (codes,)), dtype=table.dtype, shape=shape)


def stored_bytes(stored: fx.Node) -> fx.Node | Derived:
    """``stored``; of e8m0, which kernels do not load, its bytes."""
    value = fx_utils.value(stored)
    if value.dtype != E8M0:
        return stored
    args, shape = (stored, torch.uint8), tuple(value.shape)
    return Derived(fx_utils.aten.view.dtype, args, dtype=torch.uint8, shape=shape)


def _float8_of(values: torch.Tensor) -> str:
    """The kind of float whose bits are the positions of ``values``, "" if there is none."""
    if len(values) == 256:
        codes = torch.arange(256, dtype=torch.uint8)
        for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
            bits = codes.view(dtype).float().view(torch.int32)
            if torch.equal(values.view(torch.int32), bits):
                return kind
    return ""


def data_of(expr: Bits | Load) -> list[Expr]:
    """The integers in tensors that select the element."""
    data = [datum.expr for index in expr.index for datum, _ in index.data]
    return [expr for expr in data if not is_position(expr)]


def is_index(expr: Expr) -> bool:
    """Whether ``_Decoder._field`` has a form for it."""
    while isinstance(expr, Op) and expr.name in ("add", "sub", "from_end", "wrap"):
        (expr, *_) = expr.args
    return isinstance(expr, Bits) or (isinstance(expr, Op) and bool(dense_parts(expr)))


def code_of(expr: Expr) -> Bits | Load:
    """The stored element that an index is computed from."""
    while isinstance(expr, Op):
        expr = expr.args[0]
    if not isinstance(expr, (Bits, Load)):
        raise Unsupported("an index that is not stored")
    return expr
