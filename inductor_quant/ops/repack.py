"""A quantized weight in the layout that kernels read fastest: what ``prepack_`` and freezing make.

4 bits: packed int32 words of eight neighbours along K, as in GPTQ, with zero points packed along N.
Layouts that put halves of N in a byte take half as long again at M = 1. 8 bits: bytes [N, K].
K is sorted by group where a tensor lists the group of each k (GPTQ's act-order).
"""

from __future__ import annotations

import dataclasses
import fractions
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.ops.dequantize import Evaluator
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat

CHUNK = 1 << 23  # elements that are unpacked at once, at eight bytes each
MIN_GROUP = 32  # no kernel for packed weights or bytes takes a smaller group_size
COUNT = 8  # values of a word
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which torch does not index


class Rows(Evaluator):
    """Evaluates ``rows`` of W: positions, or a slice."""

    rows: slice | torch.Tensor

    def digit(self, name: str) -> Any:
        digit = super().digit(name)
        return digit[self.rows] if name[0] == "k" else digit

    def read(self, source: Any, index: list[Any]) -> Any:
        if source.dtype in _UNSIGNED or not index:
            return super().read(source, index)
        return super().read(source[tuple(index)], [])  # not the whole tensor as int64

    def assume(self, field: Field, value: torch.Tensor) -> None:
        """``field``, of which there is no tensor, has this value [rows, 1]."""
        self._fields[field] = value


@dataclasses.dataclass
class Repacked:
    """``W[k, n] = (q[k, n] - z[g, n]) * scales[g, n]``, ``g = k // (K / groups)``. With ``order``
    row i of it is row order[i] of the weight.

    qdata   4 bits: [K / 8, N] int32, q[8 * i + j] in bits 4 * j ... 4 * j + 3 of row i;
            8 bits: [N, K] int8 or uint8
    qzeros  [groups, N / 8] int32: z - ``zero``, packed along N as qdata along K; or None
    zeros   [groups, N]: z; or None. Without qzeros and zeros, z is ``zero``
    scales  [groups, N], or None: 1
    order   [K] int32, or None

    stores_zero  whether ``zero`` follows from the values of zero points
    """

    qdata: torch.Tensor
    qzeros: torch.Tensor | None
    zeros: torch.Tensor | None
    scales: torch.Tensor | None
    order: torch.Tensor | None
    zero: float
    stores_zero: bool

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All but ``order``: the tensors of ``format``."""
        found = (self.qdata, self.qzeros, self.zeros, self.scales)
        return [tensor for tensor in found if tensor is not None]

    @property
    def is_readable(self) -> bool:
        """Whether there is a ``format``: words end where groups do."""
        return self.qdata.dtype != torch.int32 or self._group_size % COUNT == 0

    @property
    def _group_size(self) -> int:
        rows, columns = self.qdata.shape
        k = COUNT * rows if self.qdata.dtype == torch.int32 else columns
        grouped = next((t for t in (self.scales, self.zeros, self.qzeros) if t is not None), None)
        return k if grouped is None else k // len(grouped)

    @property
    def format(self) -> WeightFormat:
        is_packed = self.qdata.dtype == torch.int32
        rows, columns = self.qdata.shape
        k, n = (COUNT * rows, columns) if is_packed else (columns, rows)
        groups = k // self._group_size
        k_radices = [k // groups]
        if is_packed:
            k_radices = [k // groups // COUNT, COUNT]
        if groups > 1:
            k_radices.insert(0, groups)
        group = _linear(("k0", 1)) if groups > 1 else AffineIndex()
        first = len(k_radices) - 1 - is_packed  # the digit within a group
        row = _linear(*([("k0", k_radices[1])] if groups > 1 else []), (f"k{first}", 1))
        n_radices = (n,) if self.qzeros is None else (n // COUNT, COUNT)
        column = _linear(("n0", 1)) if self.qzeros is None else _linear(("n0", COUNT), ("n1", 1))
        if is_packed:
            element = Field(0, (row, column), _linear((f"k{first + 1}", 4)), 4)
        else:
            element = Field(0, (column, row))
        ops, source = [], 1
        if self.qzeros is not None:
            at = (group, _linear(("n0", 1)))
            zero = Field(source, at, _linear(("n1", 4)), 4, add=int(self.zero))
            ops.append(DequantOp("sub", zero))
        elif self.zeros is not None:
            ops.append(DequantOp("sub", Field(source, (group, column))))
        elif self.zero:
            ops.append(DequantOp("sub", self.zero))
        if self.scales is not None:
            source = len(self.buffers) - 1
            ops.append(DequantOp("mul", Field(source, (group, column))))
        return WeightFormat(tuple(k_radices), n_radices, element, tuple(ops))


def _linear(*terms: tuple[str, int]) -> AffineIndex:
    return AffineIndex(linear=terms)


def repacked(
    format: WeightFormat, weight: Sequence[torch.Tensor], column_scale: torch.Tensor | None = None
) -> Repacked | None:
    """The weight, times ``column_scale`` [1, N] or [1, 1]; None if its layout is the fastest
    already, or if none fits."""
    element, scales_of = format.element, scaling(format)
    if scales_of is None or any(index.is_data for index in element.index):
        return None
    listed = group_list(format)
    if listed is None and _is_fast(format, weight):
        return None
    if element.float8 or element.minus or element.high:
        return None
    subtract, multiply = scales_of
    k, n = format.shape
    source, low = weight[element.source], lowest(format)
    is_int4 = 0 < element.width <= 4 and k % COUNT == 0
    is_bytes = not element.width and not low and source.dtype in (torch.int8, torch.uint8)
    if not is_int4 and not is_bytes:
        return None
    rows = [format.block(o)[0] for o in (subtract, multiply) if isinstance(o, Field)]
    group = min([k if size == -1 else size for size in rows], default=k)
    order = None
    if listed is not None:
        group, order = _sorted(format, weight, listed)
    if group < MIN_GROUP or (column_scale is not None and multiply is not None):
        return None
    scales = _grouped(format, weight, multiply, group, order)
    if column_scale is not None:
        scales = column_scale.reshape(1, -1).expand(k // group, n).contiguous()
    zero = float(subtract) - low if isinstance(subtract, (int, float)) else float(-low)
    qzeros, zeros = None, _grouped(format, weight, subtract, group, order)
    is_integer = zeros is not None and not zeros.is_floating_point()
    if isinstance(subtract, Field) and zeros is not None and is_integer:
        zeros = zeros - low
        zero = float(max(0, _largest(subtract, zeros + low) - low - 15))
        if n % COUNT == 0 and int(zeros.min()) >= zero:
            qzeros, zeros = _packed_int4((zeros - int(zero)).t()).t().contiguous(), None
        else:
            zeros, zero = zeros.to(torch.int32), 0.0
    elif zeros is not None:
        exact, zero = zeros.double() - low, 0.0
        found = (exact.to(dtype) for dtype in (zeros.dtype, torch.float32))
        fitting = (
            each for each in found if torch.equal(each.double().nan_to_num(), exact.nan_to_num())
        )
        zeros = next(fitting, None)
        if zeros is None:
            return None
    return Repacked(
        qdata=_packed(format, weight, is_int4, low, order),
        qzeros=qzeros,
        zeros=zeros,
        scales=scales,
        order=None if order is None else order.to(torch.int32),
        zero=zero,
        stores_zero=isinstance(subtract, Field) and is_integer and not _is_narrow(subtract),
    )


def lowest(format: WeightFormat) -> int:
    """What is subtracted from q and z."""
    element = format.element
    if element.wrap:
        return 0
    return element.add - (1 << element.width - 1 if element.signed else 0)


def group_list(format: WeightFormat) -> Field | None:
    """The field that lists the group of each k, if the scales and zero points that vary with k are
    those of such groups."""
    operands = [o for o in scaling(format) or () if isinstance(o, Field)]
    of_k = [o for o in operands if format.block(o)[0] != -1]
    listed = {nested for operand in of_k for nested in operand.nested}
    if len(listed) != 1:
        return None
    [group] = listed
    by_group = AffineIndex(fields=((group, 1),))
    is_list = not (group.is_position or group.nested or any(d[0] == "n" for d in group.digits))
    for operand in of_k:
        others = [index for index in (*operand.index, operand.offset) if index != by_group]
        is_list &= by_group in operand.index and not operand.high
        is_list &= not any(name[0] == "k" for index in others for name in index.digits)
    return group if is_list else None


def scaling(format: WeightFormat) -> tuple[Field | float | None, Field | float | None] | None:
    """(subtrahend, factor) of at most one subtraction and one product; None for other ops."""
    ops = format.dequant_ops
    if [op.kind for op in ops] not in ([], ["sub"], ["mul"], ["sub", "mul"]):
        return None
    operands = {op.kind: op.operand for op in ops}
    if isinstance(operands.get("mul"), (int, float)):
        return None
    return operands.get("sub"), operands.get("mul")


def _is_fast(format: WeightFormat, weight: Sequence[torch.Tensor]) -> bool:
    """Whether bytes that are neighbours along K are neighbours in memory, or words of 32 or 8 bits
    pack neighbours along K, and positions are linear in k and n."""
    element, tensor = format.element, weight[format.element.source]
    indices = (*element.index, element.offset)
    if element != format.code or any(index.is_data for index in indices):
        return False
    if any(index.tables or index.const < 0 for index in element.index):
        return False
    if not element.width:
        steps = dict.fromkeys(format.digits("k") + format.digits("n"), 0)
        for index, stride in zip(element.index, tensor.stride(), strict=True):
            for name, coef in index.linear:
                steps[name] = steps.get(name, 0) + coef * stride
        is_along_k = all(steps[name] == format.weight_of(name) for name in format.digits("k"))
        return tensor.dtype.itemsize == 1 and is_along_k and _is_linear(format, steps, "n")
    digits = format.digits("k")
    chosen = {name for name in element.offset.digits if format.radix(name) > 1}
    offsets, bits = format.pack_order, 8 * tensor.dtype.itemsize
    is_in_halves = all(offset % 16 + element.width <= min(16, bits) for offset in offsets)
    return (
        tensor.dtype in (torch.int32, torch.uint8)
        and bool(chosen)
        and chosen == set(digits[-len(chosen) :])
        and not len(offsets) & len(offsets) - 1
        and is_in_halves
        and all(
            _is_linear(format, dict(index.linear), axis) for index in element.index for axis in "kn"
        )
    )


def _is_linear(format: WeightFormat, steps: dict[str, int], axis: str) -> bool:
    """Whether ``steps`` of the digits that choose no value of a word are those of one number."""
    names = [name for name in format.digits(axis) if name not in format.code.offset.digits]
    if any(steps.get(name, 0) < 0 for name in names):
        return False
    return (
        len({fractions.Fraction(steps.get(name, 0), format.weight_of(name)) for name in names}) <= 1
    )


def _sorted(
    format: WeightFormat, weight: Sequence[torch.Tensor], group: Field
) -> tuple[int, torch.Tensor | None]:
    """How many k each group has, and all k, those of one group after those of another; 0 if some
    groups have more than others."""
    k, _ = format.shape
    number = Evaluator(format, weight, weight[0].device).field(group).flatten()
    number, order = number.sort(stable=True)
    size = k // (int(number[-1]) + 1) if int(number[0]) == 0 else 0
    if not size or not torch.equal(number, torch.arange(k, device=number.device) // size):
        return 0, None
    return size, order


def _grouped(
    format: WeightFormat,
    weight: Sequence[torch.Tensor],
    operand: Field | float | None,
    group: int,
    order: torch.Tensor | None,
) -> torch.Tensor | None:
    """[K / group, N], integers as int64."""
    if not isinstance(operand, Field):
        return None
    first = Rows(format, weight, weight[0].device)
    first.rows = slice(None, None, group) if order is None else order[::group]
    value: torch.Tensor = first.field(operand)
    return value.expand(format.shape[0] // group, format.shape[1]).contiguous()


def _packed(
    format: WeightFormat,
    weight: Sequence[torch.Tensor],
    is_int4: bool,
    low: int,
    order: torch.Tensor | None,
) -> torch.Tensor:
    k, n = format.shape
    source = weight[format.element.source]
    shape = (k // COUNT, n) if is_int4 else (n, k)
    dtype = torch.int32 if is_int4 else source.dtype
    qdata = torch.empty(shape, dtype=dtype, device=source.device)
    step = COUNT * max(1, CHUNK // (COUNT * n))
    for first in range(0, k, step):
        last = min(k, first + step)
        rows = Rows(format, weight, source.device)
        rows.rows = slice(first, last) if order is None else order[first:last]
        q = rows.field(format.element).expand(-1, n)
        if is_int4:
            qdata[first // COUNT : last // COUNT] = _packed_int4(q - low)
        else:
            qdata[:, first:last] = q.t()
    return qdata


def _is_narrow(field: Field) -> bool:
    return 0 < field.total_width <= 4


def _largest(field: Field, values: torch.Tensor) -> int:
    """What a field of few bits can be, whatever its values are: then a state dict suits all layers
    of this kind, in which ``zero`` is not. Of another field the largest of its values."""
    if not _is_narrow(field):
        return int(values.max())
    if field.wrap:
        return (1 << field.width) - 1
    return (1 << field.width - field.signed) - 1 + field.add


def _packed_int4(q: torch.Tensor) -> torch.Tensor:
    """Packs eight neighbours of the first dimension in an int32, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, device=q.device)
    return (q.unflatten(0, (-1, COUNT)) << shifts[:, None]).sum(1).to(torch.int32)
