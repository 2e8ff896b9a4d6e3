"""Layers of GPTQModel 7.7 whose forward asks tensors for their memory, or calls Triton kernels:
``TorchLinear`` (GPTQ v2) and ``AwqTorchLinear``. The tensors are those of the checkpoint."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from inductor_quant.prepare.plain import PlainLinear, Replacement, any_dtype, unpacked


def plain(module: Any) -> Replacement | str:
    if module.qweight.dtype != torch.int32:
        return f"it is packed in {module.qweight.dtype}"
    if getattr(module, "adapter", None):
        return "it has an adapter"
    rotates = ("online_full_had", "online_partial_had")
    if any(getattr(module, name, False) for name in rotates):
        return "it rotates its input"
    is_awq = getattr(module, "g_idx", None) is None
    if is_awq and module.bits not in (4, 8):
        return f"AWQ with {module.bits} bits is not known"
    if not is_awq:
        if module.bits not in (2, 3, 4, 8) or getattr(module, "planar", False):
            return f"planes of bits ({module.bits}) are not known"
        if len(module.g_idx) != module.in_features:
            return "it is several layers in one"
    layer = AWQLinear(module) if is_awq else GPTQLinear(module)
    dtype = any_dtype(module, "scales")
    if "Triton" in type(module).__name__:
        layer.dtype = torch.float16 if is_awq else None
        return Replacement(layer, module.forward, dtype)
    weight = _awq_weight if is_awq else _gptq_weight
    return Replacement(layer, functools.partial(_reference, module, weight), dtype)


def _reference(module: Any, weight: Any, x: torch.Tensor) -> torch.Tensor:
    out = x.flatten(0, -2) @ weight(module).to(x.dtype)
    out = out.reshape(*x.shape[:-1], out.shape[-1])
    return out if module.bias is None else out + module.bias.to(out.dtype)


def _gptq_weight(module: Any) -> torch.Tensor:
    """By the method of the first base class that is traced: the layer's own is compiled."""
    kind: Any = next(c for c in type(module).__mro__ if c.__name__ == "PackableQuantLinear")
    weight: torch.Tensor = kind.dequantize_weight(module)
    return weight


def _awq_weight(module: Any) -> torch.Tensor:
    packing = sys.modules["gptqmodel.quantization.awq.utils.packing_utils"]
    names = ("qweight", "qzeros", "scales", "bits", "group_size")
    weight: torch.Tensor = packing.dequantize_gemm(*(getattr(module, name) for name in names))
    return weight


class _GroupedLinear(PlainLinear):
    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    dtype: torch.dtype | None = None  # of the product; None: that of x

    def __init__(self, module: Any) -> None:
        super().__init__(module.out_features, module.in_features, module.bias)
        self.bits = module.bits
        self.hold(qweight=module.qweight, qzeros=module.qzeros, scales=module.scales)

    def weight_kn(self, dtype: torch.dtype) -> torch.Tensor:
        """[K, N]."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.to(self.dtype or x.dtype)
        out = given.reshape(-1, self.in_features) @ self.weight_kn(given.dtype)
        out = out.reshape(*x.shape[:-1], self.out_features)
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out.to(x.dtype)


class GPTQLinear(_GroupedLinear):
    """``W[k, n] = scales[g, n] * (q[k, n] - z[g, n])``, ``g = g_idx[k]``.

    qweight int32 [K * bits / 32, N], fields along K; qzeros int32 [groups, N * bits / 32], along N.
    ``g_idx`` is kept if it is not k // group: the act-order of GPTQ.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        groups = module.scales.shape[0]
        k = torch.arange(self.in_features, device=module.g_idx.device)
        is_ordered = torch.equal(module.g_idx.long(), k // (self.in_features // groups))
        is_ordered &= self.in_features % groups == 0
        self.hold(g_idx=None if is_ordered else module.g_idx)

    def weight_kn(self, dtype: torch.dtype) -> torch.Tensor:
        q = unpacked(self.qweight, self.bits, 0, self.in_features)
        z = unpacked(self.qzeros, self.bits, 1, self.out_features)
        if self.g_idx is not None:
            index: Any = self.g_idx.long()  # type: ignore[operator]
            return (self.scales[index] * (q - z[index])).to(dtype)
        q = q.reshape(self.scales.shape[0], -1, q.shape[1])
        w = self.scales.unsqueeze(1) * (q - z.unsqueeze(1))
        return w.flatten(0, 1).to(dtype)


class AWQLinear(_GroupedLinear):
    """``W[k, n] = scales[g, n] * (q[k, n] - z[g, n])``, ``g = k // group``.

    qweight int32 [K, N * bits / 32] and qzeros [groups, N * bits / 32]: fields along N in
    AutoAWQ's order.
    """

    def weight_kn(self, dtype: torch.dtype) -> torch.Tensor:
        q, z = self._in_order(self.qweight), self._in_order(self.qzeros)
        q = q.reshape(self.scales.shape[0], -1, q.shape[1])
        w = (q - z.unsqueeze(1)) * self.scales.to(dtype).unsqueeze(1)
        return w.flatten(0, 1)

    def _in_order(self, words: torch.Tensor) -> torch.Tensor:
        codes = unpacked(words, self.bits, 1, self.out_features)
        if self.bits == 4:
            codes = codes.reshape(len(codes), -1, 2, 4).transpose(2, 3).flatten(1)
        return codes
