"""Linear layers with a weight in blocks, in the spellings of plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

ROWS, COLUMNS, SIZE = 6, 4, 32  # of blocks; row 1 has none, row 2 all
N, K = ROWS * SIZE, COLUMNS * SIZE
f16 = torch.float16


class Sparse(nn.Module):
    """W [N, K] of ``blocks`` (n, k); ``forward`` builds it and multiplies."""

    def __init__(self, dtype: torch.dtype = f16, block: tuple[int, int] = (SIZE, SIZE)) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        mask = torch.rand(ROWS, COLUMNS, generator=draw) < 0.3
        mask[1], mask[2] = False, True
        row, col = mask.nonzero(as_tuple=True)
        self.grid, self.block = (ROWS, COLUMNS), block
        self.n, self.k = ROWS * block[0], COLUMNS * block[1]
        self.register_buffer("values", torch.randn(len(row), *block, generator=draw).to(dtype))
        self.register_buffer("row", row)
        self.register_buffer("col", col)
        self.register_buffer("crow", F.pad(mask.sum(1).cumsum(0), (1, 0)).int())
        self.register_buffer("flat", row * COLUMNS + col)
        self.register_buffer("mask", mask)
        table = torch.full(self.grid, len(row))
        table[row, col] = torch.arange(len(row))
        self.register_buffer("table", table)
        self.register_buffer("whole", torch.randn(self.n, self.k, generator=draw).to(dtype))
        self.register_buffer("bias", torch.randn(self.n, generator=draw).to(dtype))

    def dense(self) -> torch.Tensor:
        """W in fp64."""
        w = torch.zeros(*self.grid, *self.block, dtype=torch.float64)
        w[self.row, self.col] = self.values.double()
        return self.joined(w)

    def joined(self, w: torch.Tensor) -> torch.Tensor:
        return w.permute(0, 2, 1, 3).reshape(self.n, self.k)

    def zeros(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*self.grid, *self.block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.joined(self.weight(x)))

    def weight(self, x: torch.Tensor) -> torch.Tensor:
        return self.zeros(x).index_put((self.row, self.col), self.values)


class SetItem(Sparse):
    def weight(self, x):
        w = self.zeros(x)
        w[self.row, self.col] = self.values
        return w


class Bias(Sparse):
    def forward(self, x):
        return F.linear(x, self.joined(self.weight(x)), self.bias)


class Searched(Sparse):
    """The form of SparseLinear: rows from crow."""

    def weight(self, x):
        place = torch.arange(self.values.shape[0], device=x.device)
        row = torch.searchsorted(self.crow[1:], place, right=True)
        return self.zeros(x).index_put((row, self.col), self.values)


class Repeated(Sparse):
    def weight(self, x):
        rows = torch.arange(ROWS, device=x.device)
        count = self.crow[1:] - self.crow[:-1]
        row = torch.repeat_interleave(rows, count, output_size=len(self.values))
        return self.zeros(x).index_put((row, self.col), self.values)


class IndexCopy(Sparse):
    def weight(self, x):
        w = x.new_zeros(ROWS * COLUMNS, *self.block).index_copy(0, self.flat, self.values)
        return w.view(*self.grid, *self.block)


class Scatter(Sparse):
    def weight(self, x):
        size = self.block[0] * self.block[1]
        index = self.flat[:, None].expand(-1, size)
        source = self.values.view(-1, size)
        w = x.new_zeros(ROWS * COLUMNS, size).scatter(0, index, source)
        return w.view(*self.grid, *self.block)


class Gathered(Sparse):
    """A table of blocks, a zero block appended."""

    def weight(self, x):
        return torch.cat([self.values, self.values.new_zeros(1, *self.block)])[self.table]


class Shuffled(Sparse):
    """Blocks in another order than that of their rows."""

    def __init__(self, *args):
        super().__init__(*args)
        order = torch.randperm(len(self.row), generator=torch.Generator().manual_seed(1))
        self.values, self.row, self.col = self.values[order], self.row[order], self.col[order]


class Transposed(Sparse):
    """Blocks stored [K, N]."""

    def __init__(self, *args):
        super().__init__(*args)
        self.values = self.values.transpose(1, 2).contiguous()

    def weight(self, x):
        return self.zeros(x).index_put((self.row, self.col), self.values.transpose(1, 2))

    def dense(self):
        self.values = self.values.transpose(1, 2)
        found = super().dense()
        self.values = self.values.transpose(1, 2)
        return found


class Masked(Sparse):
    def spread(self, x):
        (n, k), mask = self.block, self.mask
        return mask.repeat_interleave(n, 0).repeat_interleave(k, 1)

    def dense(self):
        (n, k), mask = self.block, self.mask
        return self.whole.double() * mask.repeat_interleave(n, 0).repeat_interleave(k, 1)

    def forward(self, x):
        return F.linear(x, self.whole * self.spread(x))


class Kron(Masked):
    def spread(self, x):
        return torch.kron(self.mask.to(x.dtype), x.new_ones(*self.block))


class Where(Masked):
    def forward(self, x):
        w = self.whole.view(ROWS, self.block[0], COLUMNS, self.block[1])
        w = torch.where(self.mask[:, None, :, None], w, 0.0)
        return F.linear(x, w.view(self.n, self.k))


class Columns(Masked):
    """W stored [K, N]."""

    def __init__(self, *args):
        super().__init__(*args)
        self.whole = self.whole.t().contiguous()

    def dense(self):
        return (self.whole.t().double() * self.spread(None)).contiguous()

    def forward(self, x):
        return x @ (self.whole * self.spread(x).t())


class Summed(Sparse):
    """Blocks of x gathered by column, a product for each, added up by row."""

    def parts(self, x):
        x = x.reshape(-1, COLUMNS, self.block[1]).transpose(0, 1)
        return torch.bmm(x[self.col], self.values.transpose(1, 2))

    def base(self, x):
        return x.new_zeros(ROWS, x.shape[:-1].numel(), self.block[0])

    def forward(self, x):
        y = self.base(x).index_add(0, self.row, self.parts(x))
        return y.permute(1, 0, 2).reshape(*x.shape[:-1], self.n)


class Einsum(Summed):
    """The same by einsum, and ``index_put``; blocks in any order."""

    def __init__(self, *args):
        super().__init__(*args)
        order = torch.randperm(len(self.row), generator=torch.Generator().manual_seed(1))
        self.values, self.row, self.col = self.values[order], self.row[order], self.col[order]

    def parts(self, x):
        blocks = x.view(-1, COLUMNS, self.block[1])[:, self.col]
        return torch.einsum("mnk,nok->nmo", blocks, self.values)

    def forward(self, x):
        y = self.base(x).index_put((self.row,), self.parts(x), accumulate=True)
        return y.permute(1, 0, 2).reshape(*x.shape[:-1], self.n)


class Quantized(Sparse):
    """Blocks in int8 with a scale each, which multiplies them before they are placed."""

    stored = torch.int8

    def __init__(self, *args):
        super().__init__(*args)
        draw = torch.Generator().manual_seed(2)
        values = 20 * self.values.float()
        if self.stored == torch.int8:
            values = values.round().clamp(-128, 127)
        self.values = values.to(self.stored)
        self.register_buffer("scale", self.drawn(draw))

    def drawn(self, draw):
        return torch.rand(len(self.row), 1, 1, generator=draw) / 16 + 0.01

    def blocks(self, x):
        return (self.values.float() * self.scale).to(x.dtype)

    def weight(self, x):
        return self.zeros(x).index_put((self.row, self.col), self.blocks(x))

    def dense(self):
        """The weight as the graph rounds it."""
        x = torch.empty(1, dtype=f16)
        w = torch.zeros(*self.grid, *self.block, dtype=torch.float64)
        w[self.row, self.col] = self.blocks(x).double()
        return self.joined(w)


class RowsOfBlocks(Quantized):
    """FP8, a scale in x's dtype for each row of a block; another order."""

    stored = torch.float8_e4m3fn

    def drawn(self, draw):
        return (torch.rand(len(self.row), self.block[0], 1, generator=draw) + 0.1).to(f16)

    def blocks(self, x):
        return self.values.to(x.dtype) * self.scale


class Channels(Quantized):
    """A scale for each row of W, after int8 blocks are placed."""

    def drawn(self, draw):
        return (torch.rand(self.n, 1, generator=draw) / 16 + 0.01).to(f16)

    def forward(self, x):
        w = torch.zeros(*self.grid, *self.block, dtype=torch.int8, device=x.device)
        w = self.joined(w.index_put((self.row, self.col), self.values))
        return F.linear(x, w.to(x.dtype) * self.scale)

    def dense(self):
        w = torch.zeros(*self.grid, *self.block, dtype=torch.float64)
        w[self.row, self.col] = self.values.double()
        return self.joined(w) * self.scale.double()


class OneScale(Channels):
    """One scale of an FP8 tensor."""

    stored = torch.float8_e4m3fn

    def drawn(self, draw):
        return torch.tensor(0.03)

    def forward(self, x):
        return F.linear(x, self.joined(self.weight(x)))


class MaskedInt8(Channels):
    """A dense int8 weight, masked."""

    def __init__(self, *args):
        super().__init__(*args)
        self.whole = (20 * self.whole.float()).round().clamp(-128, 127).to(torch.int8)

    def forward(self, x):
        (n, k), mask = self.block, self.mask
        spread = mask.repeat_interleave(n, 0).repeat_interleave(k, 1)
        return F.linear(x, (self.whole * spread).to(x.dtype) * self.scale)

    def dense(self):
        (n, k), mask = self.block, self.mask
        spread = mask.repeat_interleave(n, 0).repeat_interleave(k, 1)
        return self.whole.double() * spread * self.scale.double()


class SummedInt8(Quantized, Summed):
    """int8 blocks in a sum of gathered products."""

    def parts(self, x):
        x = x.reshape(-1, COLUMNS, self.block[1]).transpose(0, 1)
        return torch.bmm(x[self.col], self.blocks(x).transpose(1, 2))

    forward = Summed.forward


class OfGrid(Channels):
    """A scale for each place of the grid, stored or not: the op has none such."""

    def drawn(self, draw):
        return torch.rand(ROWS, 1, COLUMNS, 1, generator=draw)

    def forward(self, x):
        w = torch.zeros(*self.grid, *self.block, dtype=torch.int8, device=x.device)
        w = self.joined(w.index_put((self.row, self.col), self.values)).float()
        w = w.view(ROWS, self.block[0], COLUMNS, self.block[1]) * self.scale
        return F.linear(x, w.view(self.n, self.k).to(x.dtype))


class AlongK(Quantized):
    """A scale for each column of a block."""

    def drawn(self, draw):
        return torch.rand(len(self.row), 1, self.block[1], generator=draw)


class IntMM(Quantized):
    """int8 x and int8 blocks; scales behind the product."""

    def drawn(self, draw):
        return torch.rand(self.n, generator=draw) / 100

    def forward(self, x):
        s = x.abs().amax(-1, keepdim=True).float() / 127
        q = (x.float() / s).round().clamp(-128, 127).to(torch.int8)
        w = torch.zeros(*self.grid, *self.block, dtype=torch.int8, device=x.device)
        w = self.joined(w.index_put((self.row, self.col), self.values))
        return (torch._int_mm(q, w.t()).float() * s * self.scale).to(x.dtype)
