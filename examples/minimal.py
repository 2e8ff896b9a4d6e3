"""An int8 MLP, quantized by ten lines of plain PyTorch, compiled and explained.

python examples/minimal.py     # without a GPU it compiles for a virtual H100"""

import contextlib

import torch
from torch import nn
from torch._subclasses import FakeTensorMode  # noqa: TID251

import inductor_quant
from inductor_quant import simulate


class Int8Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.abs().amax(1) / 127
        self.weight = (linear.weight / self.scale[:, None]).round().to(torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        q = (x / scale).round().to(torch.int8)
        return (torch._int_mm(q, self.weight.t()) * scale.float() * self.scale.float()).to(x.dtype)


with contextlib.ExitStack() as stack:
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        stack.enter_context(simulate.virtual_gpu(arch=90))
        stack.enter_context(FakeTensorMode())
    with torch.device("cuda"), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        up, down, head = nn.Linear(4096, 14336), nn.Linear(14336, 4096), nn.Linear(4096, 1000)
        model = nn.Sequential(Int8Linear(up), nn.SiLU(), Int8Linear(down), head)
        x = torch.randn(16, 4096)
        print(inductor_quant.explain(model, x, timings=has_gpu, verbose=False))
