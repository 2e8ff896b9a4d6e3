"""Layers with constant tables, their graphs rewritten and run eagerly."""

from __future__ import annotations

import torch

from inductor_quant.spec.weight_format import WeightFormat
from tests.support.graphs.post_grad import calls
from tests.support.producers.registry import PRODUCERS

WEIGHT_ONLY = torch.ops.inductor_quant.weight_only.default
K = 256


def compiled(module, **options):
    options = {f"inductor_quant.{name}": value for name, value in options.items()}
    return torch.compile(module, backend="inductor_quant", options=options or None)


def formats(rewrites):
    return [
        WeightFormat.decode(call.kwargs["format"])
        for rewrite in rewrites
        for call in calls(rewrite.after, WEIGHT_ONLY)
    ]


def has_data(format):
    """Whether a position or an offset is read from a tensor at run time."""
    return any(field.nested for field in format.fields())


def gptq(name="gptq_gm_4b_g64_base"):
    return PRODUCERS[name].make()


def x_of(rows=4, dtype=torch.float16):
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)


def is_right(module, f, x):
    """Whether ``f(x)`` is what the module computes now, except for rounding."""
    exact = x.double() @ module.dense().t() + module.bias.double()
    with torch.no_grad():
        return (f(x).double() - exact).norm() <= 2e-3 * exact.norm()
