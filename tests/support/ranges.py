"""A compiled function of a dynamic M, on a virtual GPU."""

from __future__ import annotations

import contextlib
import time
import warnings

import torch
import torch._dynamo
from torch import nn
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config

from examples.benchmarks.workers.quantizers import Int4Linear
from inductor_quant import backend, collect
from inductor_quant.simulate import virtual_gpu
from inductor_quant.simulate.capture import GeneratedKernel

bf16 = torch.bfloat16
K, N = 512, 384


class Scaled(nn.Module):
    """One GEMM of an activation with a stored scale."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Buffer(torch.zeros(N, K, dtype=torch.int8))

    def forward(self, x):
        q = (x * 8).round().clamp(-128, 127).to(torch.int8).reshape(-1, K)
        return (torch._int_mm(q, self.weight.t()).float() * 0.125).reshape(*x.shape[:-1], N)


class Attention(nn.Module):
    """A quantized layer, and attention over 1601 stored positions: rows of weights that are not
    aligned."""

    def __init__(self):
        super().__init__()
        self.query = Int4Linear(nn.Linear(512, 512, bias=False, dtype=bf16))
        self.kv = nn.Buffer(torch.randn(1601, 128, dtype=bf16))

    def forward(self, x):
        kv = self.kv * x[:, :1, None]
        weights = (self.query(x).reshape(-1, 4, 128) @ kv.transpose(1, 2)).float().softmax(-1)
        return weights.to(bf16) @ kv


class Session:
    """Calls of one compiled function on a virtual H100."""

    def __init__(self, fn, k, how, options):
        self.graphs, self.k = 0, k
        given = {f"inductor_quant.{name}": value for name, value in options.items()}

        def counted(gm, inputs):
            self.graphs += 1
            return backend.inductor_quant_backend(gm, inputs, options=given)

        self.call = torch.compile(fn, backend=counted, dynamic=how)

    def __getitem__(self, sizes):
        """The report of a call with activations of these sizes."""
        sizes = sizes if isinstance(sizes, tuple) else (sizes,)
        x = torch.zeros(*sizes, self.k, dtype=bf16, device="cuda")
        with collect() as report:
            assert self.call(x).shape[:-1] == sizes
        return report


@contextlib.contextmanager
def session(make=Scaled, *, how=True, oblivious=True, caches=False, **options):
    torch._dynamo.reset()
    settings = {"force_disable_caches": not caches, "compile_threads": 1}
    with (
        virtual_gpu(90, run_kernel=GeneratedKernel),
        FakeTensorMode(),
        config.patch(settings),
        torch.no_grad(),
        warnings.catch_warnings(),
        fx_config.patch(backed_size_oblivious=oblivious),
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        library.impl("_scaled_mm.out", lambda *_, out, **__: out, "Meta")  # the GPU's library
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        with torch.device("cuda"):
            model = make().eval()
        yield Session(
            lambda *inputs: model(*inputs),
            getattr(model, "k", K),
            how,
            {"on_error": "raise", "row_buckets": True, **options},
        )
    torch._dynamo.reset()


def rows(report):
    return [bucket.rows for bucket in report.buckets]


def kernels(report, rows=None):
    return [k.chosen for k in report.kernels if rows is None or k.rows == rows]


def wait_for(found, count=1):
    """Until so many ranges are compiled in the background."""
    deadline = time.monotonic() + 60
    while len(found.buckets) < count and time.monotonic() < deadline:
        time.sleep(0.01)
