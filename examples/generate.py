"""Serving in small: prompts of several lengths, then tokens in batches, all by one compiled model.

    python -m examples.generate                          # a small Llama with random weights
    python -m examples.generate --model FOLDER           # a checkpoint of transformers
    python -m examples.generate --quantizer fp8 --systems ours bf16

torchao quantizes the linear layers. Each workload is a batch of prompts of one length; they are
read at once, and then every sequence grows token by token, with a static cache. The number of rows
of a matrix product is batch * length, then batch: Dynamo compiles once for all lengths and once for
all batches of single tokens, and the plugin compiles each range of rows that it meets."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters  # noqa: TID251
from torch._subclasses import FakeTensorMode  # noqa: TID251
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerRow,
    quantize_,
)
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

import inductor_quant
from inductor_quant import simulate

# batch and length of the prompts
WORKLOADS = ((1, 9), (1, 700), (4, 33), (16, 128), (2, 300), (8, 20), (1, 9))
TINY_WORKLOADS = ((2, 9), (3, 40), (2, 20))
TOKENS = 32
QUANTIZERS: dict[str, Callable[[], Any]] = {
    "int8": Int8DynamicActivationInt8WeightConfig,
    "int8_weight_only": Int8WeightOnlyConfig,
    "fp8": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
}
SYSTEMS = {"ours": "inductor_quant", "stock": "inductor", "bf16": "inductor"}


def random_llama(*, is_tiny: bool) -> nn.Module:
    width = 128 if is_tiny else 2048
    config = LlamaConfig(
        vocab_size=512 if is_tiny else 32000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2 if is_tiny else 8,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 256, 1),
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def loaded(path: str | None, *, is_tiny: bool) -> nn.Module:
    if path is None:
        return random_llama(is_tiny=is_tiny)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def dynamic(tensor: Tensor, *dims: int) -> Tensor:
    """A copy whose sizes in ``dims`` Dynamo keeps symbolic; 1 has a graph of its own."""
    copied = tensor.clone()
    for dim in dims:
        if copied.shape[dim] > 1:
            torch._dynamo.mark_dynamic(copied, dim)  # noqa: TID251
    return copied


class Generator:
    """Greedy generation with one compiled step for prompts and tokens."""

    def __init__(self, model: nn.Module, backend: str, longest: int) -> None:
        self.model, self.longest = model, longest
        options = {"inductor_quant.row_buckets": True} if backend == "inductor_quant" else None
        self.step = torch.compile(self._step, backend=backend, options=options)

    def _step(self, ids: Tensor, cache: StaticCache) -> Tensor:
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def __call__(self, prompts: Tensor, count: int) -> tuple[Tensor, float, float]:
        """The new tokens, and the seconds that the prompts and the tokens took."""
        cache = self._cache(len(prompts))
        start = self._now()
        found = [self.step(dynamic(prompts, 0, 1), cache)]
        read = self._now()
        for _ in range(count - 1):
            found.append(self.step(dynamic(found[-1], 0), cache))
        return torch.cat(found, 1), read - start, self._now() - read

    def _cache(self, batch: int) -> StaticCache:
        cache = StaticCache(config=self.model.config, max_cache_len=self.longest)
        config = self.model.config
        size = config.hidden_size // config.num_attention_heads
        heads = config.num_key_value_heads
        cache.early_initialization(batch, heads, size, torch.bfloat16, "cuda")
        for layer in cache.layers:  # its tensors are marked: another batch would compile again
            layer.keys, layer.values = dynamic(layer.keys, 0), dynamic(layer.values, 0)
            layer.cumulative_length = layer.cumulative_length.clone()
        return cache

    def _now(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


class Idle:
    """A kernel of the virtual GPU."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        pass


def measure(system: str, options: argparse.Namespace) -> None:
    """Every workload twice: what it compiles, then tokens per second."""
    torch.compiler.reset()
    counters.clear()
    model = loaded(options.model, is_tiny=options.tiny)
    if system != "bf16":
        quantize_(model, QUANTIZERS[options.quantizer]())
    workloads = TINY_WORKLOADS if options.tiny else WORKLOADS
    longest = max(length for _, length in workloads) + options.tokens
    generate = Generator(model, SYSTEMS[system], longest)
    vocabulary = model.config.vocab_size
    torch.manual_seed(0)
    prompts = [torch.randint(vocabulary, size) for size in workloads]
    start = time.perf_counter()
    with inductor_quant.collect() as report:
        for each in prompts:
            generate(each, options.tokens)
    first = time.perf_counter() - start
    graphs, ranges = counters["stats"]["unique_graphs"], [b.rows for b in report.buckets]
    print(
        f"\n{system}: first round {first:.1f} s, {graphs} graphs of Dynamo's, "
        f"{len(ranges)} ranges of rows compiled: {', '.join(ranges) or '-'}"
    )
    print("  batch  prompt   prompt tokens/s   new tokens/s")
    for each in prompts:
        _, read, written = generate(each, options.tokens)
        batch, length = each.shape
        print(
            f"  {batch:5}  {length:6}  {batch * length / read:16.0f}"
            f"  {batch * (options.tokens - 1) / written:13.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a checkpoint; default: random weights")
    parser.add_argument("--quantizer", choices=QUANTIZERS, default="int8_weight_only")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--tiny", action="store_true", help="a smaller model, shorter prompts")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if not torch.cuda.is_available():
            print(
                "no GPU: what is compiled for a virtual H100; nothing runs, no time means anything"
            )
            stack.enter_context(simulate.virtual_gpu(90, run_kernel=lambda name, source: Idle()))
            stack.enter_context(FakeTensorMode())
            options.tokens, options.tiny = 3, True
        with torch.device("cuda"):
            for system in options.systems:
                measure(system, options)


if __name__ == "__main__":
    main()
