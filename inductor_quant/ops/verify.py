"""``torch.ops.inductor_quant.verify``: compares a fused GEMM with its subgraph on the first call.

``Options.verify`` inserts it after each canonical op. This process holds the subgraph, so a graph
with the op is neither cached nor exported.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant.errors import VerificationError
from inductor_quant.ops.registration import define
from inductor_quant.report import events

log = logging.getLogger(__name__)

SCHEMA = "verify(Tensor result, Tensor[] operands, SymInt[] sizes, str key) -> Tensor"
# How much larger than the graph's our error may be.
SLACK = 1.02
# Relative error of an fp32 sum: 2**-24 * sqrt(K), K = 2**14.
SUM_ERROR = 2.0**-17

_ARITHMETIC = tuple(getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div"))

_waiting: dict[str, tuple[fx.GraphModule, str, bool]] = {}
_numbers = itertools.count()


def remember(subgraph: fx.GraphModule, name: str, *, raises: bool) -> str:
    """A key for the op, whose result is compared with ``subgraph(*operands, *sizes)``.

    ``raises``: a failure is a VerificationError, not a warning.
    """
    key = f"{name}#{next(_numbers)}"
    _waiting[key] = (subgraph, name, raises)
    return key


def reference(
    result: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int], key: str
) -> torch.Tensor:
    """A copy of ``result``; the first call with ``key`` also compares it.

    Raises VerificationError, or warns, if ``result`` has a larger error than the subgraph run op by
    op, both against the subgraph's arithmetic in fp64 on the same operands.
    """
    waiting = _waiting.pop(key, None)
    if waiting is not None:
        subgraph, name, raises = waiting
        with torch.no_grad():
            found = compare(subgraph, [*operands, *sizes], result, name)
        events.add(found)
        log.info("%s", found)
        if not found.is_good and raises:
            raise VerificationError(str(found))
        if not found.is_good:
            warnings.warn(f"inductor_quant: {found}", RuntimeWarning, stacklevel=2)
    return result.clone()


def compare(
    subgraph: fx.GraphModule, inputs: Sequence[Any], result: torch.Tensor, name: str
) -> events.Verification:
    """The errors of ``result`` and of the subgraph."""
    eager = fx.Interpreter(subgraph, garbage_collect_values=False)
    graphs = eager.run(*inputs).reshape(result.shape)
    try:
        exact = InFloat64(subgraph, eager.env).run(*inputs).reshape(result.shape)
    except Exception as error:  # an op without fp64, or an opaque one
        log.info("%s: compared with the graph itself: %r", name, error)
        exact = None
    target = graphs.double() if exact is None else exact
    scale = float(target.square().mean().sqrt()) or 1.0
    ours_rms, ours_max = _distance(result, target, scale)
    graph_rms, graph_max = _distance(graphs, target, scale)
    rounding = torch.finfo(result.dtype).eps
    limit = max(SLACK * graph_rms, rounding / 4, SUM_ERROR) if exact is not None else 4 * rounding
    return events.Verification(
        name, exact is not None, ours_rms, graph_rms, ours_max, graph_max, limit
    )


def _distance(value: torch.Tensor, target: torch.Tensor, scale: float) -> tuple[float, float]:
    """(RMS, maximum) of the difference, relative to ``scale``."""
    if not value.numel():
        return 0.0, 0.0
    error = (value.double() - target) / scale
    # infinity is right if the exact value is beyond the type
    overflows = ~(target.abs() <= torch.finfo(value.dtype).max)
    error = torch.where(overflows & (value.isinf() | value.isnan()), 0.0, error)
    error = torch.where(error.isnan(), float("inf"), error)
    return float(error.square().mean().sqrt()), float(error.abs().max())


class InFloat64(fx.Interpreter):
    """Runs a graph in fp64 on its own quantized values: integers and 8-bit floats are taken from
    ``values``, its run in its own types."""

    def __init__(self, module: fx.GraphModule, values: dict[fx.Node, Any]) -> None:
        super().__init__(module)
        self.values = values

    def run_node(self, node: fx.Node) -> Any:
        value = self.values[node] if node.op != "output" else None
        if node.op in ("placeholder", "get_attr") or not _is_wide_float(value):
            return super().run_node(node) if node.op == "output" else _widened(value)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        args, kwargs = fx.node.map_aggregate((args, kwargs), _widened)
        if node.target in _ARITHMETIC:  # an integer times a Python float is a float
            args = fx.node.map_aggregate(args, _as_float64)
        if node.target == torch.ops.prims.convert_element_type.default:
            return args[0].double()
        if node.target == torch.ops.aten.view.dtype:
            raise TypeError("bits read as a float")
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        if result.dtype != torch.float64:
            raise TypeError(f"{node.target} gives {result.dtype}")
        return result


def _is_wide_float(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype.itemsize > 1
    )


def _as_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) else value


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1:
        return torch.float64
    return value.double() if _is_wide_float(value) else value


def fake(
    result: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int], key: str
) -> torch.Tensor:
    return torch.empty_like(result)


op = define(SCHEMA, reference, fake)
