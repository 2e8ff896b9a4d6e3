"""Triton statements of ``w4a8_mm``: those of ``weight_only_mm``, which end in 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from inductor_quant.kernels.codegen.base import Codegen, Hook, WeightTile
from inductor_quant.kernels.codegen.halves import HalvesCodegen
from inductor_quant.kernels.codegen.statements import Statements, Value
from inductor_quant.kernels.codegen.unpack_ptx import round_bytes, subtract_bytes, wrap_bytes
from inductor_quant.kernels.codegen.weight import WeightCodegen
from inductor_quant.kernels.w4a8.quads import MAGIC, MAGIC_BITS, SIGN, is_scaled_quad
from inductor_quant.ops import w4a8
from inductor_quant.spec.weight_format import DequantOp, Field, WeightFormat

CODES = 1 << w4a8.BITS


class W4A8MMCodegen(WeightCodegen):
    """Unpacks a tile of any format that the op takes to ``w``, exactly: int8, or for an activation
    of e4m3 that type, or bf16 if ``decodes``. A tile is within one group along K."""

    is_finite = True

    def __init__(self, tile: WeightTile, *, decodes: bool) -> None:
        super().__init__(tile)
        self._type = torch.bfloat16 if decodes else self.x_dtype
        self.times = 1  # a factor of the sums
        while self.is_integer and not self.format.to_int8 and self.loop_ops:
            *others, last = self.loop_ops
            if last.kind != "mul" or isinstance(last.operand, Field):
                break
            self.times, self.loop_ops = self.times * int(last.operand), tuple(others)
        self._halves = HalvesCodegen.of(tile)
        operands = [op.operand for op in self.format.dequant_ops if isinstance(op.operand, Field)]
        self._ahead = [each for each in operands if not any(index.is_data for index in each.index)]

    @property
    def x_type(self) -> str:
        return self.dialect.type(self._type)

    @property
    def has_halves_along_k(self) -> bool:
        """Whether nibbles are unpacked as the halves of bytes, which are neighbours along K."""
        return self._halves is not None and self._halves.halves.axis == "k"

    @property
    def is_integer(self) -> bool:
        return self.x_dtype == w4a8.INT8

    @property
    def has_groups(self) -> bool:
        return w4a8.split(self.format)[1] is not None

    # Triton loads asynchronously what is contiguous and feeds a product. Zero points and scales may
    # be neither: they are loaded one step ahead.

    def load_ahead(self, stride: Hook, size: Hook, *, is_first: bool = False) -> str:
        """Statements that load the operands at k, those that never change if ``is_first``."""
        out, lines = Statements(self, stride, size, tag="l"), []
        for i, field in enumerate(self._ahead):
            if is_first or self.format.block(field)[0] != -1:
                pointer, *_ = out.pointer(field)
                lines.append(f"ahead{i} = tl.load({pointer})")
        return "\n".join([*out.lines, *lines])

    def take_loaded(self) -> str:
        """Statements that take what was loaded for the step."""
        return "\n".join(f"now{i} = ahead{i}" for i in range(len(self._ahead)))

    def statements(self, stride: Hook, size: Hook, tag: str = "") -> Statements:
        return _Loaded(self, stride, size, {f: f"now{i}" for i, f in enumerate(self._ahead)}, tag)

    def value(self, out: Statements) -> Value:
        field, halves = self.format.element, self._halves
        if halves is None:
            return self._computed(out, *_shifted(out.field(field), self.loop_ops))
        bias = field.add - (SIGN if field.signed else 0)
        value, ops = _shifted(Value("", *self.shape, bias=bias, limit=CODES), self.loop_ops)
        if self.is_integer and not self.format.to_int8 and not ops:
            return Value(halves.nibbles(out, value.bias), *self.shape)
        value = dataclasses.replace(value, code=halves.nibbles(out))
        if self.is_integer:
            found = self._difference(out, value, ops) or self._as_int8(out, value, ops)
            if found is not None:
                return found
        code = out.assign("b", f"{value.code}.to(tl.int32)")
        return self._computed(out, dataclasses.replace(value, code=code), ops)

    def _computed(self, out: Statements, value: Value, ops: Sequence[DequantOp]) -> Value:
        """``ops`` applied to each weight by itself."""
        if self.is_integer and self.format.to_int8 != "round":
            return out.integers(value, ops)
        value = out.apply(out.to_float(value), ops)
        return _rounded(out, value) if self.is_integer else value

    def _difference(self, out: Statements, value: Value, ops: Sequence[DequantOp]) -> Value | None:
        """Nibbles less a zero point that is data, four at a time; None: something else is to be
        computed."""
        if [op.kind for op in ops] != ["sub"] or self.format.to_int8:
            return None
        least, most = w4a8.ends_of(ops[0].operand, self.dtypes) or (-129, -129)
        if least < value.bias or most > value.bias + 128:
            return None
        zero = out.field(_field(ops[0]))
        zero = dataclasses.replace(zero, bias=zero.bias - value.bias)
        code = self._of_each(out, zero.whole, "tl.int8")
        out.lines += self.dialect.inline_asm(
            subtract_bytes(), ["difference"], [value.code, code], torch.int8
        )
        return Value("difference", *self.shape)

    def _as_int8(self, out: Statements, value: Value, ops: Sequence[DequantOp]) -> Value | None:
        """Nibbles less a zero point and times a scale that are rounded, as fp16 does like fp32 (see
        ``quads``), or wrap around, four at a time; None: something else is to be computed."""
        if not self.format.to_int8 or not is_scaled_quad(self.format, self.dtypes):
            return None
        *zeros, last = ops
        if zeros and not isinstance(zeros[0].operand, Field):
            return None
        zero, scale = Value("0", 1, 1), out.field(_field(last))
        if zeros:
            zero = out.field(_field(zeros[0]))
        zero = dataclasses.replace(zero, bias=zero.bias - value.bias)
        if self.format.to_int8 == "round":
            zero = dataclasses.replace(zero, bias=zero.bias + 1024)
            pair, types = (zero.whole, scale), ("tl.float16", "tl.float16")
            assembly = round_bytes()
        else:
            scale = scale.whole
            rows, columns = max(zero.rows, scale.rows), max(zero.columns, scale.columns)
            zero, scale = (out.widen(each, rows, columns) for each in (zero.whole, scale))
            summand = Value(f"-({zero.code}) * {scale.code}", rows, columns)
            pair, types = (scale, summand), ("tl.int32", "tl.int32")
            assembly = wrap_bytes()
        codes = [self._of_each(out, each, type_) for each, type_ in zip(pair, types, strict=True)]
        out.lines += self.dialect.inline_asm(assembly, ["made"], [value.code, *codes], torch.int8)
        return Value("made", *self.shape)

    def _of_each(self, out: Statements, value: Value, type_: str) -> str:
        """``value`` as it is for each weight of the tile."""
        if value.rows * value.columns > 1:
            code = f"{value.code}.to({type_})"
        else:
            code = f"tl.full([1, 1], {value.code}, {type_})"
        value = out.widen(dataclasses.replace(value, code=out.assign("c", code)), *self.shape)
        return out.assign("c", f"tl.broadcast_to({value.code}, [BLOCK_K, BLOCK_N])")

    @property
    def shape(self) -> tuple[int, int]:
        return self.block_k, self.block_n

    def group_scale(self, stride: Hook, size: Hook) -> str:
        """Statements in the loop that leave in ``scale`` those of the group at k, [1, BLOCK_N]."""
        _, scale = w4a8.split(self.format)
        assert scale is not None
        out = self.statements(stride, size, tag="s")
        value = out.widen(out.to_float(out.field(scale)), 1, self.block_n)
        times = f" * {float(self.times)}" if self.times != 1 else ""
        return "\n".join([*out.lines, f"scale = {value.code}{times}"])

    def scaled(self, product: str) -> str:
        """The statement that adds ``product``, of a group, times ``scale`` to ``acc``."""
        if not self.is_integer:
            return f"acc += {product} * scale"
        return f"acc += ({product}.to(tl.float32, bitcast=True) - {MAGIC}) * scale"

    @property
    def start_of_sums(self) -> str:
        """What the int32 sums of a group begin with, see ``quads.MAGIC``."""
        return f"tl.full((BLOCK_M, BLOCK_N), {MAGIC_BITS}, tl.int32)"


class _Loaded(Statements):
    """Finds the words of some fields in variables."""

    def __init__(
        self, codegen: Codegen, stride: Hook, size: Hook, loaded: dict[Field, str], tag: str
    ) -> None:
        super().__init__(codegen, stride, size, tag=tag)
        self._loaded = loaded

    def read(self, field: Field) -> tuple[str, int, int]:
        if field not in self._loaded:
            return super().read(field)
        return self._loaded[field], *self.codegen.resolution(*field.index)


def loop_ops(format: WeightFormat) -> tuple[DequantOp, ...]:
    """The ops on each weight, without its rounding to int8 and the scale of a group."""
    ops, _ = w4a8.split(format)
    return ops[:-1] if format.to_int8 else ops


def _shifted(value: Value, ops: Sequence[DequantOp]) -> tuple[Value, Sequence[DequantOp]]:
    """``value`` with the integer constants that the first ops add; the other ops."""
    bias, count = value.bias, 0
    for op in ops:
        if isinstance(op.operand, Field) or op.kind not in ("add", "sub"):
            break
        if not float(op.operand).is_integer() or abs(op.operand) >= 1 << 20:
            break
        bias += int(op.operand) * (1 if op.kind == "add" else -1)
        count += 1
    return dataclasses.replace(value, bias=bias), ops[count:]


def _field(op: DequantOp) -> Field:
    assert isinstance(op.operand, Field)
    return op.operand


def _rounded(out: Statements, value: Value) -> Value:
    """``value`` clamped to int8 and rounded half to even: the lowest byte of its sum with MAGIC."""
    code = out.assign("f", f"tl.minimum(tl.maximum({value.code}, -128.0), 127.0)")
    code = out.assign("f", f"({code} + {MAGIC}).to(tl.int32, bitcast=True)")
    return Value(code, value.rows, value.columns)
