"""Copy an int8 weight that is contiguous along N so that it is contiguous along K.

    w8a8(a, b, ...)    ->   w8a8(a, b.t().contiguous().t(), ...)     b [K, N], strides (N, 1)

int8 tensor cores take both operands along K, so a kernel would have to transpose each tile of such
a weight. Applies to weights that Inductor folds (one copy, which replaces the original), and to
M >= ``MIN_M`` (a copy on every call).
"""

from __future__ import annotations

import torch
from torch import fx

from inductor_quant.ops import w8a8

from .. import fx_utils
from ..fx_utils import aten
from ..rewrite import add_node

# An estimate, not measured: the copy moves two bytes per element of the weight, and the GEMM takes
# more than twice that time.
MIN_M = 1024


def make_weights_k_major(owner: fx.Graph, constants: set[fx.Node]) -> int:
    """Returns how many weights are copied. ``constants`` are the nodes that Inductor will fold."""
    copies: dict[fx.Node, fx.Node] = {}
    for call in owner.find_nodes(op="call_function", target=w8a8.op):
        b = call.args[1]
        assert isinstance(b, fx.Node)
        m = fx_utils.size_hint(fx_utils.value(call).shape[0])
        pays = (m is not None and m >= MIN_M) or fx_utils.base(b) in constants
        if not pays or not fx_utils.is_stored(b) or not _is_n_major(fx_utils.value(b)):
            continue
        if b not in copies:
            with owner.inserting_before(call):
                copies[b] = _copied(b)
        call.update_arg(1, copies[b])
    return len(copies)


def _is_n_major(weight: torch.Tensor) -> bool:
    along_k, along_n = weight.stride()
    is_known = isinstance(along_k, int) and isinstance(along_n, int)
    return is_known and along_n == 1 and along_k > 1


def _copied(b: fx.Node) -> fx.Node:
    transposed = add_node(b, aten.permute.default, (b, [1, 0]), {})
    contiguous = {"memory_format": torch.contiguous_format}
    copy = add_node(b, aten.clone.default, (transposed,), contiguous)
    return add_node(b, aten.permute.default, (copy, [1, 0]), {})
