"""Adding up the fp32 partials of a kernel, inside whatever kernel reads the result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from inductor_quant._compat import inductor as compat
from inductor_quant.lowering.select import lowering_of

aten = torch.ops.aten
# Up to so many bytes every reader sums the partials itself: about what L2 delivers in the
# microsecond that the shortest kernel takes.
MAX_BYTES_REREAD = 4 << 20


def sum_partials(partials: Any, finish: Callable[[Any], Any]) -> Any:
    """``finish`` of the sum of partials [split_k, M, N], as pointwise IR (a reduction would be a
    kernel of its own).

    Inductor would materialize a sum of more than four partials that has two readers, such as rotary
    embedding: q and k would take two launches each instead of one.

    A single partial is stored because of its ``column_order``: its neighbours are far apart in
    memory, so it is read once, by a kernel that readers are still fused with, or a reduction would
    be split in two.
    """
    count = compat.known_int(partials.get_size()[0])
    assert count is not None
    each = [lowering_of(aten.select.int)(partials, 0, i) for i in range(count)]
    result = finish(functools.reduce(lowering_of(aten.add.Tensor), each))
    if count == 1:
        result.realize()
        return result
    sizes = [compat.limit(size) for size in partials.get_size()]
    if None not in sizes and 4 * math.prod(filter(None, sizes)) <= MAX_BYTES_REREAD:
        compat.compute_at_each_reader(result)
    return result
