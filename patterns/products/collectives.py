"""Products that Inductor splits to overlap with a collective (``_micro_pipeline_tp``).

It fuses ``all_gather -> mm`` and ``mm -> reduce_scatter``, for ``mm`` and ``_scaled_mm``, after our
pass and by the ops' names. Only views, casts and scales stand between the product and the
collective, so those are followed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from torch import fx

from inductor_quant._compat import inductor as compat

from .. import fx_utils
from ..fx_utils import aten

_PRODUCTS = (aten.mm.default, aten._scaled_mm.default)
_BETWEEN = (
    *(*fx_utils.RESHAPES, fx_utils.CAST, operator.getitem, aten.cat.default, aten.split.Tensor),
    *(aten.permute.default, aten.slice.Tensor, aten.mul.Tensor, aten.add.Tensor),
    "_c10d_functional.wait_tensor.default",
)


def is_overlapped(product: fx.Node) -> bool:
    """Whether Inductor may fuse ``product`` with the collective before or after it."""
    return (
        product.target in _PRODUCTS
        and compat.overlaps_collectives()
        and (
            _reaches(product, "all_gather_into_tensor", lambda node: node.all_input_nodes)
            or _reaches(product, "reduce_scatter_tensor", lambda node: node.users)
        )
    )


def _reaches(start: fx.Node, name: str, next_of: Callable[[fx.Node], Iterable[fx.Node]]) -> bool:
    todo, seen = [start], {start}
    while todo:
        for node in next_of(todo.pop()):
            if str(node.target) == f"_c10d_functional.{name}.default":
                return True
            if node not in seen and (node.target in _BETWEEN or str(node.target) in _BETWEEN):
                seen.add(node)
                todo.append(node)
    return False
