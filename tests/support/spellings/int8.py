"""Spellings of scaled int8 GEMMs, as data: each states the expected match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
f64, i32, i64 = torch.float64, torch.int32, torch.int64
mm = torch._int_mm

# All sizes differ; B * S = M for a 3-D activation.
SIZES = {"M": 6, "N": 24, "K": 40, "B": 2, "S": 3}


def sizes(m: int, n: int, k: int) -> dict[str, int]:
    return {"M": m, "N": n, "K": k, "B": 1, "S": m}


Dims = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A function ``fn(a, w, sx, sw, bias)`` and its inputs.

    a      int8 [M, K]; w: int8 [K, N] as ``weight`` lays it out
    sx, sw, bias
           shape of sizes and letters of SIZES, and dtype: (("M", 1), float32)
    spec   what the report has to say
    exact  no rounding is dropped and the order of factors is the op's: the result keeps its bits
    limit  largest absolute value of ``a`` and ``w``; fp16 overflows with more
    """

    name: str
    fn: Callable[..., torch.Tensor]
    spec: str
    sx: tuple[Dims, torch.dtype] = (("M", 1), f32)
    sw: tuple[Dims, torch.dtype] = (("N",), f32)
    bias: tuple[Dims, torch.dtype] = (("N",), f32)
    exact: bool = False
    limit: int = 127
    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: SIZES)
    weight: Callable[[int, int, str], torch.Tensor] | None = None

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def inputs(self, device: str = "cpu", *, powers_of_two: bool = False) -> list[torch.Tensor]:
        """Arguments for ``fn``: all scales different, or powers of two, with which products are
        exact in every dtype (the sums must then be small: ``a`` and ``w`` are -1, 0 and 1).
        """
        k, n = self.sizes["K"], self.sizes["N"]
        limit = 1 if powers_of_two else self.limit
        a = integers(self.sizes["M"], k, device, limit)
        w = integers(k, n, device, limit)
        if self.weight is not None:
            w = self.weight(k, n, device)
            w.view(torch.int8).clamp_(-limit, limit)

        def floats(shape: Dims, dtype: torch.dtype) -> torch.Tensor:
            dims = [self.sizes[d] if isinstance(d, str) else d for d in shape]
            if powers_of_two:
                return torch.exp2(torch.randint(-4, 4, dims, device=device).float()).to(dtype)
            return (torch.rand(dims, device=device) * 0.02 + 0.001).to(dtype)

        return [a, w, floats(*self.sx), floats(*self.sw), floats(*self.bias)]


def integers(rows: int, cols: int, device: str = "cpu", limit: int = 127) -> torch.Tensor:
    return torch.randint(-limit, limit + 1, (rows, cols), dtype=torch.int8, device=device)


def scale(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    """Small positive values, no two equal."""
    return (torch.rand(shape) * 0.02 + 0.001).to(dtype)


def gemm() -> list[torch.Tensor]:
    """Two matrices of SIZES."""
    return [integers(SIZES["M"], SIZES["K"]), integers(SIZES["K"], SIZES["N"])]


def scaled(a: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """The shortest GEMM that is matched."""
    return mm(a, w) * s


def _spec(a: str = "/token:f32", b: str = "/channel:f32", out: str = "f32") -> str:
    return f"(a=i8{a}, b=i8{b}, out={out})"


def _sliced(k: int, n: int, device: str) -> torch.Tensor:
    return integers(k + 3, n + 5, device)[3:, 2 : n + 2]


def _every_second(k: int, n: int, device: str) -> torch.Tensor:
    return integers(2 * k, 2 * n, device)[::2, 1::2]


def _rows_of_stack(k: int, n: int, device: str) -> torch.Tensor:
    return integers(3 * n, k, device)[n : 2 * n].t()


def to_3d(y: torch.Tensor) -> torch.Tensor:
    return y.reshape(SIZES["B"], SIZES["S"], SIZES["N"])


TOKEN_3D = (("B", "S", 1), f32)

FACTORS = [
    Spelling("row, column", lambda a, w, x, y, b: mm(a, w).float() * x * y, _spec(), exact=True),
    Spelling("column, row", lambda a, w, x, y, b: mm(a, w).float() * y * x, _spec()),
    Spelling("int times float", lambda a, w, x, y, b: mm(a, w) * x * y, _spec(), exact=True),
    Spelling("scale first", lambda a, w, x, y, b: y * (x * mm(a, w)), _spec(), exact=True),
    Spelling("outer product", lambda a, w, x, y, b: mm(a, w) * (x * y), _spec()),
    Spelling("outer product swapped", lambda a, w, x, y, b: (y * x) * mm(a, w), _spec()),
    Spelling("row only", lambda a, w, x, y, b: mm(a, w) * x, _spec(b=""), exact=True),
    Spelling("column only", lambda a, w, x, y, b: mm(a, w) * y, _spec(a=""), exact=True),
    Spelling("number only", lambda a, w, x, y, b: mm(a, w) * 0.3, _spec("", ""), exact=True),
    Spelling("number first", lambda a, w, x, y, b: mm(a, w).float() * 0.3 * x * y, _spec(),
             exact=True),
    Spelling("number last", lambda a, w, x, y, b: mm(a, w) * x * y * 2, _spec(), exact=True),
    Spelling("numbers around", lambda a, w, x, y, b: 0.5 * mm(a, w) * y * -0.25, _spec(a=""),
             exact=True),
    Spelling("expanded", lambda a, w, x, y, b: mm(a, w) * x.expand(-1, 24) * y.expand(6, 24),
             _spec(), exact=True),
    Spelling("column as [1, N]", lambda a, w, x, y, b: mm(a, w) * x * y, _spec(),
             sw=((1, "N"), f32), exact=True),
    Spelling("column as [N, 1]", lambda a, w, x, y, b: mm(a, w) * x * y.t(), _spec(),
             sw=(("N", 1), f32), exact=True),
    Spelling("row as [M]", lambda a, w, x, y, b: mm(a, w) * x[:, None] * y[None], _spec(),
             sx=(("M",), f32), exact=True),
]  # fmt: skip

QUOTIENTS = [
    Spelling("divided by the row", lambda a, w, x, y, b: mm(a, w) / x * y, _spec()),
    Spelling("divided by the column", lambda a, w, x, y, b: mm(a, w).float() / y * x, _spec()),
    Spelling("divided by a tensor", lambda a, w, x, y, b: mm(a, w) / x * y,
             _spec(a="/tensor:f32"), sx=((1,), f32)),
    Spelling("divided by bf16", lambda a, w, x, y, b: mm(a, w) / x * y, _spec(out="f32"),
             sx=(("M", 1), bf16)),
    Spelling("divided by a number", lambda a, w, x, y, b: mm(a, w) / 0.25 * x * y, _spec()),
    Spelling("divided by what multiplies", lambda a, w, x, y, b: mm(a, w) / x * x,
             _spec(a="/tensor:f32", b=""), sx=((1,), f32)),
    Spelling("divided and biased", lambda a, w, x, y, b: mm(a, w) / x + b,
             _spec(b="", out="f32+bias")),
]  # fmt: skip

PER_TENSOR = [
    Spelling("static activation scale", lambda a, w, x, y, b: mm(a, w) * x * y,
             _spec(a="/tensor:f32"), sx=((), f32), exact=True),
    Spelling("activation scale [1]", lambda a, w, x, y, b: mm(a, w).float() * x * y,
             _spec(a="/tensor:f32"), sx=((1,), f32), exact=True),
    Spelling("activation scale [1, 1]", lambda a, w, x, y, b: mm(a, w).float() * x * y,
             _spec(a="/tensor:f32"), sx=((1, 1), f32), exact=True),
    Spelling("weight scale []", lambda a, w, x, y, b: mm(a, w).float() * x * y,
             _spec(b="/tensor:f32"), sw=((), f32), exact=True),
    Spelling("weight scale [1] first", lambda a, w, x, y, b: mm(a, w).float() * y * x,
             _spec(b="/tensor:f32"), sw=((1,), f32)),
    Spelling("both per tensor", lambda a, w, x, y, b: mm(a, w).float() * x * y,
             _spec("/tensor:f32", "/tensor:f32"), sx=((), f32), sw=((1, 1), f32), exact=True),
]  # fmt: skip

CASTS = [
    Spelling("output bf16", lambda a, w, x, y, b: (mm(a, w).float() * x * y).to(bf16),
             _spec(out="bf16"), exact=True),
    Spelling("output f16", lambda a, w, x, y, b: (mm(a, w).float() * x * y).to(f16),
             _spec(out="f16"), exact=True),
    Spelling("bf16 between", lambda a, w, x, y, b: (mm(a, w) * x).to(bf16) * y, _spec()),
    Spelling("bf16 between, bf16 out",
             lambda a, w, x, y, b: ((mm(a, w) * x).to(bf16).float() * y).to(bf16),
             _spec(out="bf16")),
    Spelling("int32 to bf16 first", lambda a, w, x, y, b: mm(a, w).to(bf16) * x * y,
             _spec("/token:bf16", "/channel:bf16", "bf16"),
             sx=(("M", 1), bf16), sw=(("N",), bf16)),
    Spelling("int32 to f16 first", lambda a, w, x, y, b: mm(a, w).to(f16) * x * y,
             _spec("/token:f16", "/channel:f16", "f16"),
             sx=(("M", 1), f16), sw=(("N",), f16), limit=7),
    Spelling("int32 times bf16", lambda a, w, x, y, b: mm(a, w) * x * y,
             _spec("/token:bf16", "/channel:bf16", "bf16"),
             sx=(("M", 1), bf16), sw=(("N",), bf16)),
    Spelling("scales of two dtypes", lambda a, w, x, y, b: mm(a, w).float() * x * y,
             _spec("/token:bf16", "/channel:f16"), sx=(("M", 1), bf16), sw=(("N",), f16),
             exact=True),
    Spelling("bf16 outer product", lambda a, w, x, y, b: mm(a, w) * (x * y),
             _spec("/token:bf16", "/channel:bf16", "bf16"),
             sx=(("M", 1), bf16), sw=(("N",), bf16)),
    Spelling("scale cast in the graph", lambda a, w, x, y, b: mm(a, w) * x.float() * y.float(),
             _spec("/token:bf16", "/channel:bf16"), sx=(("M", 1), bf16), sw=(("N",), bf16),
             exact=True),
]  # fmt: skip

RESHAPES = [
    Spelling("scales before the reshape", lambda a, w, x, y, b: to_3d(mm(a, w) * x * y), _spec(),
             exact=True),
    Spelling("column after the reshape", lambda a, w, x, y, b: to_3d(mm(a, w) * x) * y, _spec(),
             exact=True),
    Spelling("scales after the reshape", lambda a, w, x, y, b: to_3d(mm(a, w)) * x * y, _spec(),
             sx=TOKEN_3D, exact=True),
    Spelling("row flattened", lambda a, w, x, y, b: mm(a, w) * x.reshape(-1, 1) * y, _spec(),
             sx=TOKEN_3D, exact=True),
    Spelling("3-D column", lambda a, w, x, y, b: to_3d(mm(a, w)) * x * y, _spec(),
             sx=TOKEN_3D, sw=((1, 1, "N"), f32), exact=True),
    Spelling("there and back", lambda a, w, x, y, b: to_3d(mm(a, w) * y).reshape(6, 24) * x,
             _spec()),
    Spelling("3-D outer product", lambda a, w, x, y, b: to_3d(mm(a, w)) * (x * y), _spec(),
             sx=TOKEN_3D),
]  # fmt: skip

BIASES = [
    Spelling("bias", lambda a, w, x, y, b: mm(a, w) * x * y + b, _spec(out="f32+bias"),
             exact=True),
    Spelling("bias on the left", lambda a, w, x, y, b: b + mm(a, w) * x * y,
             _spec(out="f32+bias"), exact=True),
    Spelling("bias bf16", lambda a, w, x, y, b: (mm(a, w).float() * x * y + b).to(bf16),
             _spec(out="bf16+bias"), bias=(("N",), bf16), exact=True),
    Spelling("bias behind the cast", lambda a, w, x, y, b: (mm(a, w) * x * y).to(bf16) + b,
             _spec(out="bf16+bias"), bias=(("N",), bf16)),
    Spelling("f32 bias on bf16", lambda a, w, x, y, b: (mm(a, w) * x * y).to(bf16) + b,
             _spec(out="f32+bias")),
    Spelling("bias f16", lambda a, w, x, y, b: (mm(a, w) * x * y).to(f16) + b,
             _spec(out="f16+bias"), bias=(("N",), f16)),
    Spelling("bias [1, N]", lambda a, w, x, y, b: mm(a, w) * x + b, _spec(b="", out="f32+bias"),
             bias=((1, "N"), f32), exact=True),
    Spelling("bias expanded", lambda a, w, x, y, b: mm(a, w) * y + b.expand(6, 24),
             _spec(a="", out="f32+bias"), bias=((1, "N"), f32), exact=True),
    Spelling("bias before the reshape", lambda a, w, x, y, b: to_3d(mm(a, w) * x * y + b),
             _spec(out="f32+bias"), exact=True),
    Spelling("bias after the reshape", lambda a, w, x, y, b: to_3d(mm(a, w) * x * y) + b,
             _spec(out="f32+bias"), exact=True),
]  # fmt: skip


def _plain(a, w, x, y, b):  # type: ignore[no-untyped-def]
    return (mm(a, w).float() * x * y + b).to(bf16)


SHAPES = [
    Spelling("M = 1", _plain, _spec("/tensor:f32", out="bf16+bias"), sizes=sizes(1, 24, 40),
             exact=True),
    Spelling("M = 7", _plain, _spec(out="bf16+bias"), sizes=sizes(7, 24, 40), exact=True),
    Spelling("M = 32", _plain, _spec(out="bf16+bias"), sizes=sizes(32, 24, 40), exact=True),
    Spelling("N = 1", lambda a, w, x, y, b: mm(a, w) * x * y, _spec(b="/tensor:f32"),
             sizes=sizes(7, 1, 40), exact=True),
    Spelling("K = 1", _plain, _spec(out="bf16+bias"), sizes=sizes(7, 24, 1), exact=True),
    Spelling("M = N = K", _plain, _spec(out="bf16+bias"), sizes=sizes(16, 16, 16), exact=True),
    Spelling("M = N = K, outer product", lambda a, w, x, y, b: mm(a, w) * (x * y), _spec(),
             sizes=sizes(16, 16, 16)),
    Spelling("M = N = K, column first", lambda a, w, x, y, b: mm(a, w) * y * x + b,
             _spec(out="f32+bias"), sizes=sizes(16, 16, 16)),
    Spelling("M = N = K, column alone", lambda a, w, x, y, b: mm(a, w) * y, _spec(a=""),
             sizes=sizes(16, 16, 16), exact=True),
    Spelling("weight rows", lambda a, w, x, y, b: _plain(a, w.t(), x, y, b),
             _spec(out="bf16+bias"), weight=lambda k, n, device: integers(n, k, device),
             exact=True),
    Spelling("weight sliced", _plain, _spec(out="bf16+bias"), weight=_sliced, exact=True),
    Spelling("weight strided", _plain, _spec(out="bf16+bias"), weight=_every_second, exact=True),
    Spelling("weight in a stack", _plain, _spec(out="bf16+bias"), weight=_rows_of_stack,
             exact=True),
    Spelling("weight of bytes", lambda a, w, x, y, b: mm(a, w.view(torch.int8)) * x, _spec(b=""),
             weight=lambda k, n, device: integers(k, n, device).view(torch.uint8), exact=True),
]  # fmt: skip

SPELLINGS = [*FACTORS, *QUOTIENTS, *PER_TENSOR, *CASTS, *RESHAPES, *BIASES, *SHAPES]
