"""Quantization of an activation inside a ``w8a8`` kernel: the constant that its template gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from inductor_quant.spec import row_scale

_STATEMENTS = {
    "add": "scale + {!r}",
    "clamp_min": "gl.maximum(scale, {!r}, propagate_nan=tl.PropagateNan.ALL)",
    "div": "gl.div_rn(scale, {!r})",
    "mul": "scale * {!r}",
}
_GLUON_TYPES = {torch.bfloat16: "gl.bfloat16", torch.float16: "gl.float16"}


class RowQuantization:
    """The template constant ``QUANTIZATION``. ``str`` gives its bounds, for the generated kernel;
    ``repr`` gives all of it, for the keys of caches.

    scale_ops   how the scale derives from the absmax of a row; None: the scale is given
    is_dynamic  whether the kernel computes the scale
    low, high   bounds of the quantized values
    """

    def __init__(
        self, dtype: torch.dtype, scale_ops: Sequence[str] | None, low: int, high: int
    ) -> None:
        self.low, self.high, self.is_dynamic = low, high, scale_ops is not None
        self._dtype, self._scale_ops = dtype, tuple(scale_ops or ())

    def __str__(self) -> str:
        return repr((self.low, self.high))

    def __repr__(self) -> str:
        return repr((self.low, self.high, str(self._dtype), self.is_dynamic, self._scale_ops))

    def statements(self) -> Iterator[str]:
        """Gluon statements that turn ``scale``, a row's absmax, into its scale. All is fp32; an
        operation in another dtype rounds its result to that."""
        dtype = self._dtype
        for step in map(row_scale.parse, self._scale_ops):
            value = "scale"
            if step.kind == "to":
                dtype = step.dtype
            else:
                value = _STATEMENTS[step.kind].format(step.number)
            if dtype in _GLUON_TYPES:
                value = f"({value}).to({_GLUON_TYPES[dtype]}).to(gl.float32)"
            if value != "scale":
                yield f"scale = {value}"
