"""Models of ``examples.benchmarks.models`` that transformers has no class for: the blocks of a
diffusion transformer, and the linear layers of a decoder without attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearLayers(nn.Module):
    """The seven linear layers of each decoder layer, one after the other.

    The gate is a sigmoid. SiLU would square the values in each layer, as there is no norm: after
    four they would be 1e20, whose squares are infinite, and errors would double in each.
    """

    def __init__(self, hidden: int, inner: int, kv: int, layers: int) -> None:
        super().__init__()
        sizes = {"q_proj": (hidden, hidden), "k_proj": (hidden, kv), "v_proj": (hidden, kv)}
        sizes |= {"o_proj": (hidden, hidden), "gate_proj": (hidden, inner)}
        sizes |= {"up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name, (k, n) in sizes.items()})
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (layer[f"{name}_proj"](x) for name in "qkv")
            x = layer["o_proj"](q + (k + v).repeat(1, q.shape[-1] // k.shape[-1]))
            x = layer["down_proj"](torch.sigmoid(layer["gate_proj"](x)) * layer["up_proj"](x))
        return x


# ------------------------------------------------------------------------------------------
# A diffusion transformer, as Flux and Stable Diffusion 3 have it: text and image attend to each
# other, and a vector (time step, prompt) scales, shifts and gates every step.


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class Modulation(nn.Module):
    """``count`` vectors [batch, 1, width] of a condition [batch, width]."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count, self.lin = count, nn.Linear(width, count * width)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        return self.lin(F.silu(condition))[:, None].chunk(self.count, -1)


class Heads(nn.Module):
    """q, k and v of one stream: [batch, heads, tokens, size], q and k with an RMS norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_norm, self.k_norm = (nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2))

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.q_norm(q), self.k_norm(k), v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Stream(nn.Module):
    """What image and text have each of its own in a block of two streams."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulation = Modulation(width, 6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = Heads(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def finished(self, x: Tensor, attended: Tensor, vectors: tuple[Tensor, ...]) -> Tensor:
        gate, shift, scale, last_gate = vectors
        x = x + gate * self.proj(attended)
        inner = F.gelu(self.fc1(modulated(x, shift, scale)), approximate="tanh")
        return x + last_gate * self.fc2(inner)


class DoubleBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.image, self.text = Stream(width, heads), Stream(width, heads)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        parts, rest = [], []
        for stream, x in ((self.text, text), (self.image, image)):
            shift, scale, *others = stream.modulation(condition)
            parts.append(stream.heads(stream.qkv(modulated(x, shift, scale))))
            rest.append(tuple(others))
        q, k, v = (torch.cat(both, 2) for both in zip(*parts, strict=True))
        out_text, out_image = attention(q, k, v).split([text.shape[1], image.shape[1]], 1)
        text = self.text.finished(text, out_text, rest[0])
        return self.image.finished(image, out_image, rest[1]), text


class SingleBlock(nn.Module):
    """Attention and MLP side by side: two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulation, self.heads = Modulation(width, 3), Heads(width, heads)
        self.linear1, self.linear2 = nn.Linear(width, 7 * width), nn.Linear(5 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition)
        inner = self.linear1(modulated(x, shift, scale))
        qkv, mlp = inner.split([3 * x.shape[-1], 4 * x.shape[-1]], -1)
        attended = attention(*self.heads(qkv))
        out = self.linear2(torch.cat([attended, F.gelu(mlp, approximate="tanh")], -1))
        return x + gate * out


class DiffusionBlocks(nn.Module):
    """``double`` blocks of two streams, then ``single`` blocks of one."""

    def __init__(self, width: int, heads: int, double: int, single: int) -> None:
        super().__init__()
        self.streams = nn.ModuleList(DoubleBlock(width, heads) for _ in range(double))
        self.joined = nn.ModuleList(SingleBlock(width, heads) for _ in range(single))

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> Tensor:
        for block in self.streams:
            image, text = block(image, text, condition)
        x = torch.cat([text, image], 1)
        for block in self.joined:
            x = block(x, condition)
        return x
