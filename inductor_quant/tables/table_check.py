"""Compares tensors on their device with the values that they had, in one launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

BLOCK = 2048
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def differs(tables, wanted, sizes, found, WORD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Set ``found`` if a word of a table is not the wanted one; grid (tables, blocks)."""
    number = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(sizes + number)
    table = tl.load(tables + number).to(tl.pointer_type(WORD))
    other = tl.load(wanted + number).to(tl.pointer_type(WORD))
    is_other = tl.load(table + at, inside, other=0) != tl.load(other + at, inside, other=0)
    if tl.max(is_other.to(tl.int32), 0) != 0:
        tl.store(found, 1)


class TableCheck:
    """``tables``, contiguous and of one CUDA device, against ``wanted`` of the same sizes.

    ``start()`` enqueues the comparison on the current stream and returns a function that waits for
    it: whether all are equal. More can be enqueued before the wait. In a CUDA graph under capture
    the comparison becomes a device-side assertion of each replay.
    """

    def __init__(self, tables: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        self._kept = (*tables, *wanted)
        self._device = tables[0].device
        sizes = [table.nbytes for table in tables]
        common = math.gcd(8, *sizes, *(tensor.data_ptr() for tensor in self._kept))
        self._word = _WORDS[common]
        self._grid = (len(tables), triton.cdiv(max(sizes) // common, BLOCK))
        self._arguments = [
            torch.tensor(values, dtype=torch.int64, device=self._device)
            for values in (
                [table.data_ptr() for table in tables],
                [table.data_ptr() for table in wanted],
                [size // common for size in sizes],
            )
        ]
        # The kernel writes to the host's memory. Never reset: concurrent calls share it.
        is_cuda = self._device.type == "cuda"
        self._found = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=is_cuda)

    def start(self) -> Callable[[], bool]:
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                found = torch.zeros(1, dtype=torch.int32, device=self._device)
                self.launch(found)
                torch.ops.aten._assert_async.msg(
                    found == 0, "a table inductor_quant read was written"
                )
                return lambda: True
            self.launch(self._found)
            event = torch.cuda.Event()
            event.record()

        def wait() -> bool:
            event.synchronize()
            return not self._found.item()

        return wait

    def launch(self, found: torch.Tensor) -> None:
        differs[self._grid](*self._arguments, found, WORD=self._word, BLOCK=BLOCK)
