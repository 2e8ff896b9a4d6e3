"""Operands and scales of a recognized GEMM, as arguments of a canonical op."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec

from .. import fx_utils
from ..match import Derived, Operand, RecognizedGemm


@dataclasses.dataclass(frozen=True)
class Scale:
    """``node`` in the graph, ``argument`` of the call; ``block`` as in ``ScaleSpec``.

    ``dtype`` is that of the argument; None: that of the node.
    """

    node: fx.Node
    block: tuple[int, int]
    argument: Any
    dtype: torch.dtype | None = None

    @property
    def spec(self) -> ScaleSpec:
        return ScaleSpec(self.dtype or fx_utils.value(self.node).dtype, self.block)


def per_tensor(node: fx.Node) -> Scale:
    return Scale(node, (-1, -1), Operand(node, (1, 1)))


def per_token(node: fx.Node | None) -> Scale | None:
    """The scale of the rows of a; a single element is that of the tensor."""
    return _along(node, (1, -1), (-1, 1))


def per_channel(node: fx.Node | None) -> Scale | None:
    """The scale of the columns of b; a single element is that of the tensor."""
    return _along(node, (-1, 1), (1, -1))


def _along(node: fx.Node | None, block: tuple[int, int], shape: tuple[int, int]) -> Scale | None:
    if node is None:
        return None
    return (
        per_tensor(node) if fx_utils.is_single(node) else Scale(node, block, Operand(node, shape))
    )


@dataclasses.dataclass(frozen=True)
class ScaledMatmul:
    """``(a * a_scale) @ (b * b_scale) + bias`` in place of ``end``; a scale of None is 1.

    a, b   nodes, or what the rewrite makes of them
    sizes  (M, N, K)
    shape  as in ``RecognizedGemm``
    """

    anchor: fx.Node
    end: fx.Node
    a: Any
    b: Any
    sizes: tuple[Any, Any, Any]
    a_scale: Scale | None
    b_scale: Scale | None
    bias: fx.Node | None = None
    fast_accum: bool = False
    interior: tuple[fx.Node, ...] = ()
    shape: tuple[Any, ...] | None = None

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        a, b = (fx_utils.value(source_of(operand)).dtype for operand in (self.a, self.b))
        return a, b

    @property
    def out_dtype(self) -> torch.dtype:
        return fx_utils.value(self.end).dtype

    @property
    def scale_specs(self) -> tuple[ScaleSpec | None, ScaleSpec | None]:
        a, b = (None if s is None else s.spec for s in (self.a_scale, self.b_scale))
        return a, b

    @property
    def row_scale(self) -> fx.Node | None:
        """The scale of a, unless it varies along K. That of a single row is one of the tensor."""
        is_of_rows = self.a_scale is not None and self.a_scale.block in ((1, -1), (-1, -1))
        return self.a_scale.node if self.a_scale is not None and is_of_rows else None

    def gemm(
        self,
        family: str,
        spec: QuantGemmSpec,
        op: torch._ops.OpOverload,
        kwargs: dict[str, Any],
        zeros: tuple[Any, ...] = (),
        **options: Any,
    ) -> RecognizedGemm:
        """The call ``op(a, b, a_scale, b_scale, bias, *zeros, **kwargs)``; ``options``: further
        fields of ``RecognizedGemm``."""
        m, n, k = map(fx_utils.size_name, self.sizes)
        scales = (self.a_scale and self.a_scale.argument, self.b_scale and self.b_scale.argument)
        return RecognizedGemm(
            family=family,
            spec=spec,
            anchor=self.anchor,
            end=self.end,
            interior=self.interior,
            op=op,
            args=(self.a, self.b, *scales, self.bias and Operand(self.bias, (-1,)), *zeros),
            kwargs=kwargs,
            m=m,
            n=n,
            k=k,
            shape=self.shape,
            **{"row_scale": self.row_scale} | options,
        )


def source_of(operand: Any) -> fx.Node:
    """The node that an argument of the rewritten call is made from."""
    while not isinstance(operand, fx.Node):
        operand = operand.node if isinstance(operand, Operand) else operand.args[0]
    return operand


def transposed(node: Any) -> Derived:
    return Derived(fx_utils.aten.permute.default, (node, [1, 0]))


def reject_mutated(nodes: Iterable[fx.Node]) -> Rejection | None:
    """Rejects a node that the graph writes to: the op would read it at another time."""
    node = fx_utils.mutated(nodes)
    if node is None:
        return None
    return Rejection(RejectionCode.MUTATED_OPERAND, f"{node.name} is written to", node.name)


def reject_operands(nodes: Iterable[fx.Node | None], anchor: fx.Node) -> Rejection | None:
    """Rejects what the op cannot read: mutated, or on another device than ``anchor``."""
    for node in filter(None, nodes):
        if (rejection := reject_mutated([node])) is not None:
            return rejection
        device = fx_utils.value(node).device
        if device != fx_utils.value(anchor).device:
            return Rejection(RejectionCode.DEVICE, f"{node.name} is on {device}", node.name)
    return None
