"""The quantization of an activation inside a kernel of ``w8a8``: what its template is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from inductor_quant import scale_recipe

_CODE = {
    "add": "scale + {!r}",
    "clamp_min": "gl.maximum(scale, {!r}, propagate_nan=tl.PropagateNan.ALL)",
    "div": "gl.div_rn(scale, {!r})",
    "mul": "scale * {!r}",
}
_NAMES = {torch.bfloat16: "gl.bfloat16", torch.float16: "gl.float16"}


class RowQuantization:
    """A template's constant ``QUANTIZATION``, in Gluon; as a constant of the kernel it reads as its
    bounds. (``repr`` has all of it: of constants caches see that.)

    recipe      of the scale; None: it is given, and ``is_dynamic`` is False
    low, high   bounds of the integers
    """

    def __init__(
        self, dtype: torch.dtype, recipe: Sequence[str] | None, low: int, high: int
    ) -> None:
        self.low, self.high, self.is_dynamic = low, high, recipe is not None
        self._dtype, self._recipe = dtype, tuple(recipe or ())

    def __str__(self) -> str:
        return repr((self.low, self.high))

    def __repr__(self) -> str:
        return repr((self.low, self.high, str(self._dtype), self.is_dynamic, self._recipe))

    def statements(self) -> Iterator[str]:
        """They make the scale of ``scale``, a row's largest absolute value, in fp32 throughout:
        rounded where the recipe's type is another."""
        dtype = self._dtype
        for step in map(scale_recipe.parse, self._recipe):
            code = "scale"
            if step.kind == "to":
                dtype = step.dtype
            else:
                code = _CODE[step.kind].format(step.number)
            if dtype in _NAMES:
                code = f"({code}).to({_NAMES[dtype]}).to(gl.float32)"
            if code != "scale":
                yield f"scale = {code}"
