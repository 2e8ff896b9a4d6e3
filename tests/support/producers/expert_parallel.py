"""A layer of experts over processes: rows travel to the process of their expert, and back.

Each process has its own tokens and an equal part of the experts, in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from tests.support.producers.experts import Experts, route
from tests.support.producers.scaled_experts import QUANTIZERS, dequantized

FAMILIES = {"int4_words": "experts", "int8": "scaled_experts", "fp8_block": "scaled_experts"}


class ExpertParallel(Experts):
    """``forward(x [T, H], ids [T, k], weights [T, k])`` of process ``rank`` of ``size``.

    ``form``: a key of EXCHANGES; the same weights in every process. Rows are quantized if
    ``FAMILIES[format]`` says so.
    """

    def __init__(self, format: str, form: str, rank: int, size: int, **sizes: int) -> None:
        torch.manual_seed(0)
        super().__init__(format, "grouped", **sizes)
        self.rank, self.size, self.form = rank, size, EXCHANGES[form]
        self.quantize = QUANTIZERS[format] if FAMILIES[format] == "scaled_experts" else None
        self.num_experts //= size
        for name, stack in self.named_buffers():
            setattr(self, name, stack.chunk(size)[rank].clone())

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen, order = ids.flatten().sort(stable=True)
        y = _unsorted(self.form(self, x[order // ids.shape[1]], chosen), order)
        return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def local(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """``rows [S, H]``, sorted by the expert of this process that they have; any value for those
        of none, which come last."""
        experts = torch.arange(self.num_experts, device=chosen.device)
        offsets = torch.searchsorted(chosen, experts, right=True, out_int32=True)
        up = self._product(rows, "up", offsets)
        return self._product(self._apply_gate(up), "down", offsets)

    def _product(self, x: torch.Tensor, name: str, offsets: torch.Tensor) -> torch.Tensor:
        if self.quantize is not None:
            x = dequantized(*self.quantize(x))
        return torch._grouped_mm(x, self.stack(name).transpose(1, 2), offs=offsets)


def _unsorted(y: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Gathered, not written with ``index_copy``: torch 2.11 cannot lower that on a GPU where the
    rows of ``y`` are a sum of unbacked sizes and those of ``order`` a number."""
    places = torch.arange(len(order), device=order.device)
    return y[torch.empty_like(order).scatter(0, order, places)]


def _exchange(x: torch.Tensor, received: Any = None, sent: Any = None) -> torch.Tensor:
    """Rows of ``x`` for process 0 first; returns those from process 0 first. Lengths of the parts,
    None: equal ones."""
    y = collectives.all_to_all_single(x, received, sent, dist.group.WORLD)
    return collectives.wait_tensor(y)


def _of_one(self: ExpertParallel, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return self.local(rows, chosen)


def _exact(self: ExpertParallel, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """No row travels in vain: sizes follow from the routing."""
    ranks = torch.arange(self.size, device=chosen.device)
    counts = (chosen // self.num_experts == ranks.unsqueeze(1)).sum(1)
    sent, received = counts.tolist(), _exchange(counts).tolist()
    for count in (*sent, *received):
        torch._check(count >= 0)
        torch._check(count <= len(chosen))
    rows, chosen = (_exchange(part, received, sent) for part in (rows, chosen))
    chosen, order = (chosen - self.rank * self.num_experts).sort(stable=True)
    return _exchange(_unsorted(self.local(rows[order], chosen), order), sent, received)


def _padded(self: ExpertParallel, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Room for every row in each process: no size follows from the routing, nothing waits for the
    device. What is left of it has no expert."""
    count, width = chosen.numel(), rows.shape[1]
    owner = chosen // self.num_experts
    place = owner * count + torch.arange(count, device=chosen.device)
    room = rows.new_zeros(self.size * count, width).index_copy(0, place, rows)
    which = chosen.new_full((self.size * count,), self.num_experts)
    which = which.index_copy(0, place, chosen - owner * self.num_experts)
    which, order = _exchange(which).sort(stable=True)
    y = self.local(_exchange(room)[order], which)
    return _exchange(_unsorted(y, order))[place]


EXCHANGES: dict[str, Callable[..., torch.Tensor]] = {
    "of_one": _of_one,
    "exact": _exact,
    "padded": _padded,
}


def routings(rank: int, experts: int, width: int) -> list[tuple[torch.Tensor, ...]]:
    """x, ids and weights for process ``rank`` of 2: any; none to the experts of process 1; two
    experts of all."""
    torch.manual_seed(rank + 1)
    any_, one, two = (route(tokens, experts, h=width) for tokens in (6, 6, 6))
    one[1].remainder_(experts // 2)
    two[1][:] = torch.tensor([experts - 1, 0])
    return [any_, one, two]
