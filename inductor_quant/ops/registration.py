"""Registers the canonical ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("inductor_quant", "FRAGMENT")


def define(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    *,
    flexible_layout: bool = False,
) -> Any:
    """The op of ``schema``, which runs ``reference`` on every device. ``fake`` gives the result on
    fake tensors (default: ``reference`` too). ``flexible_layout``: inputs may have any strides."""
    name = schema.partition("(")[0]
    layout = (torch.Tag.flexible_layout,) if flexible_layout else ()
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *layout))
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"inductor_quant::{name}", fake or reference, lib=_LIBRARY)
    return getattr(torch.ops.inductor_quant, name).default
