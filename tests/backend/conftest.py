"""What the tests of frozen graphs share."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import compile_fx as inductor

from inductor_quant._compat import inductor as compat


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that Inductor would lower."""
    found = []

    def inner_compile(gm, inputs, **kwargs):
        inductor.view_to_reshape(gm)
        inductor.fake_tensor_prop(gm, inputs, True)
        inductor._recursive_post_grad_passes(gm, is_inference=True)
        found.append(gm)

        def run(args):
            values = list(args)
            args.clear()
            with torch.no_grad():
                return gm(*values)

        run._boxed_call = True
        return run

    compile_fx = inductor.compile_fx

    def patched(gm, inputs, **kwargs):
        return compile_fx(gm, inputs, inner_compile=inner_compile, **kwargs)

    monkeypatch.setattr(compat, "compile_fx", patched)
    return found
