"""A small Llama of each packed format: every linear is matched, and the logits are as exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.graphs.post_grad import EagerBackend
from tests.support.producers.registry import PRODUCERS, Producer, need, need_package

pytestmark = pytest.mark.filterwarnings("ignore")

# By producer, the format's name in ``explain``; "": it has no common name.
FORMATS = {
    "gguf_q8_0": "q8_0",
    "torchao_nvfp4_wo": "nvfp4",
    "torchao_mxfp4_dequantized": "mxfp4",
    "torchao_mxfp8_dequantized": "mxfp8",
    "ct_nvfp4_pack": "nvfp4",
    "ct_mxfp4_pack": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "gguf_q4_0_split": "q4_0",
    "gguf_q4_k": "q4_k",
    "gguf_q5_k": "q5_k",
    "gguf_q6_k": "q6_k",
    "gptq_3b_g64": "",
    "hqq_3b_g64_ax1_fwd": "",
    "hqq_1.58b_g64_ax1_fwd": "",
    "torchao_uint3_shards": "",
    "torchao_uint5_shards": "",
    "torchao_uint6_shards": "",
    "bitnet_packed": "bitnet",
    "ct_pack_int4_chan_sym": "",  # Gemma's int4
}
IN_CI = ("hqq_1.58b_g64_ax1_fwd",)
CASES = [
    pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow, id=name) for name in FORMATS
]
TOKENS, LINEARS = 24, 14


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**sizes, **more)).eval().requires_grad_(False)


def quantized(model: nn.Module, producer: Producer) -> tuple[nn.Module, nn.Module]:
    """The model with the producer's layers, and the same one in fp64 with what they mean."""
    exact, dtype = copy.deepcopy(model).double(), producer.dtypes[0]
    model = model.to(dtype)
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            layer = producer.make(dtype, linear.in_features, linear.out_features, bias=False)
            exact.get_submodule(name).weight.copy_(producer.dense(layer))
            model.set_submodule(name, layer)
    return model, exact


@pytest.mark.parametrize("name", CASES)
def test_every_linear_is_matched_and_the_logits_are_as_exact(name: str) -> None:
    need_package("transformers")
    producer = PRODUCERS[name]
    need(producer)
    torch._dynamo.reset()
    model, exact = quantized(llama(), producer)
    tokens = torch.arange(TOKENS)[None] * 7 % 64
    backend = EagerBackend(read_tables=bool(producer.reads) or name.startswith("gptq"))
    with torch.no_grad():
        want = exact(tokens, use_cache=False).logits
        eager = model(tokens, use_cache=False).logits
        got = torch.compile(model, backend=backend)(tokens, use_cache=False).logits
    matches = [match for rewrite in backend.rewrites for match in rewrite.report.matches]
    assert len(matches) == LINEARS
    assert {match.format for match in matches} == {FORMATS[name]}

    def error(logits: torch.Tensor) -> float:
        return float((logits.double() - want).norm() / want.norm())

    assert 0 < error(got) <= 1.1 * error(eager)
