"""W8A8 GEMMs with zero points: inputs of full range, and the exact result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from inductor_quant.ops import w8a8

f32, bf16, i8 = torch.float32, torch.bfloat16, torch.int8


@dataclasses.dataclass(frozen=True)
class Zeros:
    """One GEMM. ``a`` and ``b``: no zero point (""), a literal ("const") or a tensor of that dtype,
    of one element if ``*_tensor``. ``sums``: the dtype of column sums that are given."""

    m: int
    n: int = 50
    k: int = 72
    a: Any = i8
    b: Any = ""
    a_tensor: bool = False
    b_tensor: bool = False
    sums: torch.dtype | None = None
    config: str = ""
    out_dtype: torch.dtype = f32

    def __str__(self) -> str:
        given = [f"{self.m}x{self.n}x{self.k}", f"a={self.a}", f"b={self.b}"]
        given += ["tensor"] * (self.a_tensor + self.b_tensor) + [self.config] * bool(self.config)
        return "-".join([*given, f"sums={self.sums}"]).replace("torch.", "")

    def inputs(self, device: str) -> tuple[torch.Tensor | None, ...]:
        is_empty = device != "cpu" and not torch.cuda.is_available()

        def integers(*shape: int, limit: int = 128) -> torch.Tensor:
            if is_empty:
                return torch.empty(shape, dtype=i8, device=device)
            return torch.randint(-limit, limit, shape, dtype=torch.int8, device=device)

        def zero(dtype: Any, *shape: int) -> torch.Tensor | None:
            return integers(*shape).to(dtype) if isinstance(dtype, torch.dtype) else None

        a, w = integers(self.m, self.k), integers(self.n, self.k)
        a_zero = zero(self.a, 1 if self.a_tensor else self.m, 1)
        b_zero = zero(self.b, 1, 1 if self.b_tensor else self.n)
        sums = None
        if self.sums is not None:
            sums = torch.empty(1, self.n, dtype=self.sums, device=device)
            if not is_empty:
                sums.copy_(w.sum(1)[None])
        return a, w, a_zero, b_zero, sums

    @property
    def number(self) -> int:
        return -77 if self.a == "const" else 0

    def call(self) -> Callable[..., torch.Tensor]:
        def run(a: Any, w: Any, a_zero: Any, b_zero: Any, sums: Any) -> torch.Tensor:
            zeros = (a_zero, b_zero, sums)
            factors: dict[str, Any] = {"alpha": 0.5, "a_zero": number}
            result: torch.Tensor = w8a8.op(
                a, w.t(), None, None, None, *zeros, **factors, out_dtype=out_dtype
            )
            return result

        number, out_dtype = self.number, self.out_dtype
        return run


def meaning(case: Zeros, inputs: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    """The result in fp64, in which every integer is exact."""
    a, w, a_zero, b_zero, _ = inputs
    assert a is not None
    assert w is not None
    left = a.double() - (case.number if a_zero is None else a_zero.double())
    right = w.double() - (0 if b_zero is None else b_zero.double().t())
    return 0.5 * (left @ right.t())
