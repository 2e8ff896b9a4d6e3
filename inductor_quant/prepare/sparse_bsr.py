"""``nn.Linear`` with a ``torch.sparse_bsr`` weight, which Dynamo does not trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inductor_quant.prepare.plain import PlainLinear, Replacement

DTYPES = (torch.bfloat16, torch.float16)
MANUAL = (
    "a sparse_bsr tensor, which Dynamo does not trace: hold its values() and the row and column "
    "of each block as buffers, and write w = x.new_zeros(N // BN, K // BK, BN, BK).index_put((row, "
    "col), values).permute(0, 2, 1, 3).reshape(N, K)"
)


def is_sparse_bsr(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_bsr


def plain(module: Any) -> Replacement | str:
    weight = module.weight
    if weight.dtype not in DTYPES or weight.values().dim() != 3:
        return f"a sparse weight of {weight.dtype}, {weight.values().dim() - 3} dimensions of batch"

    def reference(x: torch.Tensor) -> torch.Tensor:  # the CPU multiplies no sparse fp16
        return nn.functional.linear(x, weight.to_dense(), module.bias)

    return Replacement(BlockSparseLinear(module), reference, weight.dtype)


class BlockSparseLinear(PlainLinear):
    """``x @ W.T + bias``, where W [N, K] is ``values[p]`` [BN, BK] in row ``rows[p]`` and column
    ``columns[p]`` of blocks, and 0 elsewhere."""

    values: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    def __init__(self, module: Any) -> None:
        weight = module.weight.detach()
        n, k = weight.shape
        super().__init__(n, k, module.bias)
        counts, columns = weight.crow_indices().diff(), weight.col_indices()
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        self.hold(values=weight.values(), rows=rows, columns=columns)

    def dequantized(self) -> torch.Tensor:
        _, block_n, block_k = self.values.shape
        n, k = self.out_features, self.in_features
        grid = self.values.new_zeros(n // block_n, k // block_k, block_n, block_k)
        placed = grid.index_put((self.rows, self.columns), self.values)
        return placed.permute(0, 2, 1, 3).reshape(n, k)
