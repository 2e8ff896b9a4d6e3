"""Tiny models of transformers with random weights, whole, and how they are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

import inductor_quant
from inductor_quant import simulate
from tests.support.graphs.post_grad import EagerBackend

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "use_cache": False,
}
TOKENS = 40


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and warnings of the libraries."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def tiny(architecture: str, **sizes: Any) -> nn.Module:
    """A causal language model of one layer, in bf16."""
    import transformers

    config = transformers.AutoConfig.for_model(architecture, **{**SIZES, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def reloaded(model: nn.Module, **options: Any) -> nn.Module:
    """``model`` saved, and loaded by ``from_pretrained(..., **options)``."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        kind = transformers.AutoModelForCausalLM
        loaded: nn.Module = kind.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return loaded.eval()


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, SIZES["vocab_size"], (1, TOKENS), generator=generator)


class Logits(nn.Module):
    """The logits of a model, as one call with one argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model(input_ids=ids, use_cache=False).logits


@dataclasses.dataclass(frozen=True)
class Distance:
    """Of logits: relative rms, mean KL divergence, share of tokens with the same first choice."""

    rms: float
    kl: float
    top1: float

    @staticmethod
    def of(ours: torch.Tensor, reference: torch.Tensor) -> Distance:
        a, b = ours.double().flatten(0, -2), reference.double().flatten(0, -2)
        rms = ((a - b).square().mean() / b.square().mean()).sqrt()
        p, q = b.log_softmax(-1), a.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean()
        top1 = (a.argmax(-1) == b.argmax(-1)).double().mean()
        return Distance(rms.item(), kl.item(), top1.item())


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the plugin made of a model on a CPU: its logits, how many GEMMs of which family,
    codes of near misses, graphs and graph breaks."""

    logits: torch.Tensor
    families: tuple[str, ...]
    codes: tuple[str, ...]
    graphs: int
    breaks: int


def compiled(model: nn.Module) -> Compiled:
    """The rewritten graphs run op by op, as for a device with Triton."""
    torch._dynamo.reset()
    counters.clear()
    backend = EagerBackend(read_tables=True)
    with torch.no_grad(), quiet():
        logits = torch.compile(Logits(model), backend=backend)(tokens())
    reports = [rewrite.report for rewrite in backend.rewrites]
    near = [r for report in reports for r in report.rejections if r.site and r.site.source]
    return Compiled(
        logits,
        tuple(match.family for report in reports for match in report.matches),
        tuple(sorted({rejection.code.value for rejection in near})),
        len(reports),
        sum(counters["graph_break"].values()),
    )


def eager(model: nn.Module) -> torch.Tensor:
    with torch.no_grad(), quiet():
        logits: torch.Tensor = Logits(model)(tokens())
    return logits


def explained(
    model: nn.Module, quantize: Callable[[nn.Module], Any] | None = None
) -> inductor_quant.Explanation:
    """``explain`` for a virtual H100. The model stays there, without values, and is quantized there
    if it has to be."""
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(simulate.virtual_gpu(arch=90))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.no_grad())
        _onto_card(model)
        ids = torch.zeros(1, TOKENS, dtype=torch.long, device="cuda")
        if quantize is not None:
            quantize(model)
        return inductor_quant.explain(Logits(model), ids, timings=False, verbose=False)


def _onto_card(model: nn.Module) -> None:
    """Tensors of the same shapes on the virtual card, shared as they were."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is not None:
                    if id(old) not in made:
                        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype,
                                                  device="cuda")  # fmt: skip
                        is_parameter = isinstance(old, nn.Parameter)
                        made[id(old)] = nn.Parameter(new, False) if is_parameter else new
                    held[name] = made[id(old)]  # type: ignore[assignment]
