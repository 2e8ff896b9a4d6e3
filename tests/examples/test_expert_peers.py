"""Peers of the benchmark of experts: how their files are imported, how rows are aligned for them.
Their kernels are not part of this repository."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("transformers.integrations.moe")
pytest.importorskip("triton")

from examples.benchmarks.experts import Model
from examples.benchmarks.harness import NotMeasured
from examples.benchmarks.workers import expert_peers
from examples.benchmarks.workers.expert_layers import Experts

KERNELS = """
import vllm.envs as envs
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import _get_config_dtype_str
from vllm.model_executor.layers.fused_moe.lora_experts_mixin import LoRAExpertsMixin
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import direct_register_custom_op

logger = init_logger(__name__)
logger.info_once("loaded")
direct_register_custom_op(op_name="one", op_func=triton.jit)


class Both(LoRAExpertsMixin, mk.FusedMoEExpertsModular):
    pass


def chosen():
    from vllm.model_executor.layers.fused_moe import get_config

    is_cuda = current_platform.is_cuda() or envs.BATCH_INVARIANT or get_config()
    return bool(is_cuda), envs.VLLM_TUNED_CONFIG_FOLDER


def dtype():
    return _get_config_dtype_str(use_fp8_w8a8=False, use_int4_w4a16=True, dtype=None)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / expert_peers.FUSED_MOE
    path.parent.mkdir(parents=True)
    path.write_text(KERNELS)
    before, paths = set(sys.modules), list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = paths
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "vllm":
            del sys.modules[name]


def test_a_file_of_kernels_is_imported_without_its_package(folder):
    for _ in range(2):  # again for each layer
        module = expert_peers.load_fused_moe(folder)
        assert module.chosen() == (False, None)
        assert module.dtype() == "int4_w4a16"
        assert module.current_platform.fp8_dtype() is torch.float8_e4m3fn
    assert module.triton.jit
    assert sum(isinstance(finder, expert_peers._Absent) for finder in sys.meta_path) == 1


@pytest.mark.parametrize("name", expert_peers.PEERS)
def test_what_a_peer_cannot_do_or_lacks_is_not_measured(name, tmp_path):
    small = Model(2, 1, 128, 128)
    for layer in (
        Experts(small, "nvfp4"),
        Experts(Model(2, 1, 128, 128, is_gpt_oss=True), "mxfp4"),
        Experts(small, "int8"),
    ):
        with pytest.raises(NotMeasured):
            expert_peers.PEERS[name](layer, tmp_path)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (3, 2), (9, 5), (40, 3)])
def test_rows_are_padded_to_whole_blocks_of_one_expert(tokens, experts, size):
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, experts).topk(2).indices
    rows, of_blocks, total = expert_peers.aligned(ids, size, experts)
    flat, [end] = ids.flatten(), total.tolist()
    assert end % size == 0
    assert end <= len(rows) <= len(of_blocks) * size
    found = rows[:end].view(-1, size).tolist()
    placed = []
    for block, expert in zip(found, of_blocks.tolist(), strict=False):
        used = [row for row in block if row < len(flat)]
        assert used  # no block without a row
        assert all(flat[row] == expert for row in used)
        placed += used
    assert sorted(placed) == list(range(len(flat)))
    assert (rows[end:] == len(flat)).all()
