"""MLPs of BERT-large or ViT-L, pruned to blocks by magnitude: compiled, dense, by torch's kernel.

    python -m examples.block_sparse                # BERT-large, blocks of 32, 80 % of them zero
    python -m examples.block_sparse --model vit-large --block 64 --zeros 0.9

Weights are random; what a block is worth is its norm. Each ``nn.Linear`` gets a ``sparse_bsr``
weight, which torch multiplies by ``bsr_dense_addmm`` and Dynamo does not trace; ``prepare_`` makes
plain tensors of it. Without a GPU it says what is recognized."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import inductor_quant
from examples.benchmarks.timing import Replay


@dataclasses.dataclass(frozen=True)
class Shape:
    """An encoder: how wide, how many layers, how many tokens a call has (a multiple of 16)."""

    width: int
    hidden: int
    layers: int
    tokens: int
    norm_first: bool = False


MODELS = {
    "bert-large": Shape(1024, 4096, 24, 8 * 128),
    "vit-large": Shape(1024, 4096, 24, 16 * 197, norm_first=True),
    "tiny": Shape(128, 256, 2, 32),
}


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)
        self.norm_first = shape.norm_first

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        y: Tensor = self.norm(x + self.down(nn.functional.gelu(self.up(x))))
        return y


def pruned(weight: Tensor, block: int, zeros: float) -> Tensor:
    """``weight`` [N, K] without its blocks of the least norm."""
    n, k = weight.shape
    tiles = weight.reshape(n // block, block, k // block, block)
    norms = tiles.float().square().sum((1, 3))
    kept = norms > norms.flatten().kthvalue(round(zeros * norms.numel())).values
    return (tiles * kept[:, None, :, None]).reshape(n, k)


def systems(
    shape: Shape, block: int, zeros: float, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """The pruned MLPs: "dense", "bsr" with sparse weights, "ours" prepared to be compiled."""
    torch.manual_seed(0)
    with torch.device(device):
        dense = nn.Sequential(*(Mlp(shape) for _ in range(shape.layers))).to(dtype)
    dense.requires_grad_(False)
    for layer in dense.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(pruned(layer.weight, block, zeros))
    bsr, ours = (with_sparse_weights(dense, block) for _ in range(2))
    inductor_quant.prepare_(ours)
    return {"dense": dense, "bsr": bsr, "ours": ours}


def with_sparse_weights(dense: nn.Module, block: int) -> nn.Module:
    model = copy.deepcopy(dense)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.to_sparse_bsr(block)
            layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


def tune(sparse: nn.Module, x: Tensor) -> None:
    """Let torch search the settings of its kernel for these layers, and remember them."""
    from torch.sparse._triton_ops_meta import tune_bsr_dense_addmm

    known = set()
    for layer in sparse.modules():
        if isinstance(layer, nn.Linear) and layer.weight.shape not in known:
            known.add(layer.weight.shape)
            n, k = layer.weight.shape
            out, columns = x.new_zeros(n, len(x)), x.new_zeros(k, len(x))
            for beta in (0, 1):
                tune_bsr_dense_addmm(out, layer.weight, columns, beta=beta, store=True)


def compiled(models: dict[str, Any]) -> dict[str, Any]:
    ours = torch.compile(models["ours"], backend="inductor_quant")
    return {"ours": ours, "dense": torch.compile(models["dense"]), "bsr": models["bsr"]}


def error(result: Tensor, wanted: Tensor) -> float:
    """Relative rms."""
    gap = (result.double() - wanted.double()).square().mean()
    return float((gap / wanted.double().square().mean()).sqrt())


def prepared(models: dict[str, Any], x: Tensor) -> tuple[dict[str, Replay], dict[str, float]]:
    """Each system as a CUDA graph, and how far its result is from the dense model in fp64."""
    exact = copy.deepcopy(models["dense"]).double()(x.double())
    replays, errors = {}, {}
    for name, model in compiled(models).items():
        errors[name] = error(model(x), exact)
        model(x)
        replays[name] = Replay([lambda model=model: model(x)], x.device.type)  # type: ignore[misc]
    return replays, errors


def timed(replays: dict[str, Replay], rounds: int) -> dict[str, float]:
    """Median times of interleaved rounds, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name].append(1e6 * replay.seconds())
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="bert-large")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--zeros", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tune", action="store_true", help="let torch tune its kernel: minutes")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse BSR")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = MODELS[options.model if device == "cuda" else "tiny"]
    with torch.no_grad():
        models = systems(shape, options.block, options.zeros, torch.float16, device)
        x = torch.randn(shape.tokens, shape.width, device=device).half()
        first = copy.deepcopy(models["ours"][0])
        print(inductor_quant.explain(first, x, verbose=False))
        if device == "cpu":
            return
        if options.tune:
            tune(models["bsr"], x)
        replays, errors = prepared(models, x)
        for name, us in timed(replays, options.rounds).items():
            print(f"{name:6}{us:10.1f} us   relative rms error {errors[name]:.1e}")


if __name__ == "__main__":
    main()
