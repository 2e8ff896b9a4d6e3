"""The error function of a GELU that is quantized."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.lowering.fusion.erf import ERF
from inductor_quant.ops.fusion import erf
from tests.patterns.fusion.test_row_quant import compiled, linear, make

SHORT = "ex2.approx.ftz.f32"


def gelu_linear(x, w, w_scale):
    return linear(F.gelu(x), w, w_scale)


def returned(x, w, w_scale):
    y = F.gelu(x)
    return linear(y, w, w_scale), y


def added(x, w, w_scale):
    """The residual sees GELU in 16 bits."""
    y = F.gelu(x)
    return linear(y, w, w_scale).sum(-1, keepdim=True) + y


def other_sum(x, w, w_scale):
    y = x.float()
    return linear((y * (2 + torch.erf(y))).to(x.dtype), w, w_scale)


def two_users(x, w, w_scale):
    y = torch.erf(x.float())
    return linear((y * (1 + y)).to(x.dtype), w, w_scale)


def plain(x, w, w_scale):
    return linear(x, w, w_scale), F.gelu(x.float())


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize("fn", [gelu_linear, returned, added, other_sum, two_users, plain])
def test_it_is_short_where_nothing_but_a_quantization_sees_it(fn):
    sources = "".join(compiled(fn, 64, 256).kernels.values())
    assert ("libdevice.erf" in sources, SHORT in sources) == (
        (False, True) if fn is gelu_linear else (True, False)
    )


@pytest.mark.compiles
def test_strict_numerics_keep_it():
    code = simulate.generate(
        *(gelu_linear, lambda device: make(64, 256, device)),
        arch=90,
        backend=inductor_quant_backend,
        options={"inductor_quant.numerics": "strict"},
    )
    assert "libdevice.erf" in "".join(code.kernels.values())


def test_its_error():
    from inductor_quant.simulate.interpreter import ptx

    finite = torch.arange(0, 0x7F800000, 4099, dtype=torch.int32).view(torch.float32)
    x = torch.cat([finite, -finite, torch.linspace(-6, 6, 100_001), torch.tensor([float("inf")])])
    [got] = ptx.run(ERF, [x.numpy()], [np.dtype(np.uint32)], 1)
    exact = torch.erf(x.double())
    error = (torch.from_numpy(got.view(np.float32).copy()).double() - exact).abs()
    assert 1.5e-7 < error.max() < 6e-7  # the formula's own is 1.5e-7, the rest are roundings
    [special] = ptx.run(ERF, [np.float32([np.nan, -np.inf])], [np.dtype(np.uint32)], 1)
    assert np.isnan(special.view(np.float32)[0])
    assert special.view(np.float32)[1] == -1


def test_the_op_is_erf():
    x = torch.randn(3, 5)
    assert torch.equal(erf.op(x), torch.erf(x))
    torch.library.opcheck(erf.op, (x,))
