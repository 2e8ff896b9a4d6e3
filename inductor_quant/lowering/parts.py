"""What a kernel leaves of a GEMM whose K it splits: parts in fp32, which their reader adds up."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from inductor_quant import _torch_compat as compat
from inductor_quant.lowering.common import lowering_of

aten = torch.ops.aten
# Bytes of parts that are read again rather than stored as their sum: by arithmetic about what L2
# gives in the microsecond that the shortest kernel takes (``bench_models.py --profile``, H200).
MOST_READ_AGAIN = 4 << 20


def sum_of_parts(parts: Any, finish: Callable[[Any], Any]) -> Any:
    """``finish`` of parts [split_k, M, N] added up: written out, as a reduction it would be a
    kernel of its own.

    Each kernel that reads the result adds small parts up for itself. Inductor would store the sum
    of more than four parts that is read at two places, as rotary embedding does: q and k then take
    two launches each instead of one.
    """
    count = compat.known_int(parts.get_size()[0])
    assert count is not None
    each = [lowering_of(aten.select.int)(parts, 0, i) for i in range(count)]
    result = finish(functools.reduce(lowering_of(aten.add.Tensor), each))
    sizes = [compat.known_int(size) for size in parts.get_size()]
    if None not in sizes and 4 * math.prod(filter(None, sizes)) <= MOST_READ_AGAIN:
        compat.compute_at_each_reader(result)
    return result
