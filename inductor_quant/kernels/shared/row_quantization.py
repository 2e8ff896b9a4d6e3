"""Quantization of an activation inside its GEMM's kernel: the constant that the template gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from inductor_quant.spec import row_scale

_STATEMENTS = {
    "add": "scale + {!r}",
    "clamp_min": "gl.maximum(scale, {!r}, propagate_nan=tl.PropagateNan.ALL)",
    "div": "gl.div_rn(scale, {!r})",
    "if_zero": "gl.where(scale == 0.0, {!r}, scale)",
    "mul": "scale * {!r}",
}
_ROUND_TO_INT8 = (
    'gl.inline_asm_elementwise("cvt.rni.sat.s8.f32 $0, $1;", "=r,r", [{}], dtype=gl.int32, '
    "is_pure=True, pack=1)"
)
_GLUON_TYPES = {torch.bfloat16: "gl.bfloat16", torch.float16: "gl.float16"}


class RowQuantization:
    """The template constant ``QUANTIZATION``. ``str`` gives its bounds, for the generated kernel;
    ``repr`` gives all of it, for the keys of caches.

    scale_ops    how the scale derives from the absmax of a row; None: the scale is given
    scale_dtype  the dtype of the scale
    is_dynamic   whether the kernel computes the scale
    dtype        of the quantized values: int8 or e4m3
    low, high    their bounds, if they are int8
    """

    def __init__(
        self,
        x_dtype: torch.dtype,
        scale_ops: Sequence[str] | None,
        low: int,
        high: int,
        dtype: torch.dtype,
        *,
        scale_dtype: torch.dtype | None = None,
    ) -> None:
        self.low, self.high, self.is_dynamic = low, high, scale_ops is not None
        self.dtype, self._x_dtype, self._scale_ops = dtype, x_dtype, tuple(scale_ops or ())
        casts = [step.dtype for step in map(row_scale.parse, self._scale_ops) if step.kind == "to"]
        self.scale_dtype = scale_dtype or [x_dtype, *casts][-1]

    def __str__(self) -> str:
        return repr((self.low, self.high))

    def __repr__(self) -> str:
        dtypes = (str(self.dtype), str(self._x_dtype), str(self.scale_dtype))
        return repr((self.low, self.high, dtypes, self.is_dynamic, self._scale_ops))

    def statements(self) -> Iterator[str]:
        """Gluon statements that turn ``scale``, a row's absmax, into its scale. All is fp32; an
        operation in another dtype rounds its result to that."""
        dtype = self._x_dtype
        for step in map(row_scale.parse, self._scale_ops):
            value = "scale"
            if step.kind == "to":
                dtype = step.dtype
            else:
                value = _STATEMENTS[step.kind].format(step.number)
            value = _rounded(value, dtype)
            if value != "scale":
                yield f"scale = {value}"

    @property
    def divides_by_product(self) -> bool:
        """Whether the division of ``quantized`` may be a product and its correction: to e4m3, of
        x in 16 bits, by a scale that the kernel has computed, so that it knows the absmax."""
        is_narrow = self._x_dtype in _GLUON_TYPES
        return self.dtype != torch.int8 and self.is_dynamic and is_narrow

    def quantized(self, x: str, *, by_product: bool = False) -> Iterator[str]:
        """Gluon statements that set ``x`` to the quantized values of the tensor ``x``. They read
        ``scale``, and its reciprocal, the column ``inv_scale``, for int8 or ``by_product``.

        ``by_product``: q = x * inv_scale, corrected to q + (x - q * scale) * inv_scale. This is the
        rounded quotient for every significand of x in bf16 and fp16 and every one of the scale (all
        were tried), if inv_scale is rounded to nearest and nothing leaves the range of fp32. A
        division is ten instructions and a branch, behind which no other one starts."""
        if self.dtype != torch.int8:
            quotient = f"gl.div_rn({x}.to(gl.float32), scale[:, None])"
            if by_product:
                yield f"real = {x}.to(gl.float32)"
                yield "near = real * inv_scale"
                quotient = "gl.fma(gl.fma(near, minus_scale, real), inv_scale, near)"
            yield f"x = {_rounded(quotient, torch.promote_types(self._x_dtype, self.scale_dtype))}"
            yield "x = x.to(gl.float8e4nv)"  # saturates, and keeps NaN
            return
        yield f"x = {_ROUND_TO_INT8.format(f'{x}.to(gl.float32) * inv_scale')}"
        if self.low > -128:
            yield f"x = gl.maximum(x, {self.low})"
        if self.high < 127:
            yield f"x = gl.minimum(x, {self.high})"
        yield "x = x.to(gl.int8)"


def _rounded(value: str, dtype: torch.dtype) -> str:
    """``value``, in fp32, rounded to ``dtype``."""
    if dtype not in _GLUON_TYPES:
        return value
    return f"({value}).to({_GLUON_TYPES[dtype]}).to(gl.float32)"
