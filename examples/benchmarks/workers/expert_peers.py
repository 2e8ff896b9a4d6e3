"""Peers of the experts' kernels that are written in Triton, for ``workers.experts``.

They are imported from a folder that contains ``vllm``, as an unpacked wheel does: only the files of
the kernels, so nothing of vLLM has to be installed. What vLLM has in CUDA (the gate, the
quantization of rows, the sum over experts) is compiled by Inductor here; its alignment of rows to
blocks is done in ``planned``, before anything is timed. Written for vLLM 0.20.0, which requires
torch 2.11."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.benchmarks.harness import NotMeasured
from examples.benchmarks.timing import Replay
from examples.benchmarks.workers.expert_layers import BLOCK, GROUP, Experts, Product, by_block

FUSED_MOE = Path("vllm/model_executor/layers/fused_moe/fused_moe.py")
TRITON_KERNELS = Path("vllm/third_party/triton_kernels")
# format -> vLLM's name, and its blocks [N, K] of a scale
DTYPES: dict[str, tuple[str, list[int] | None]] = {
    "int4": ("int4_w4a16", [0, GROUP]),
    "int8": ("int8_w8a16", None),
    "fp8_block": ("fp8_w8a8", [BLOCK, BLOCK]),
}
Call = Callable[[], Tensor]


# ------------------------------------------------------------------------------------------
# what a file of vLLM imports


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Meta(name, (_Nothing,), {})

    def __bool__(cls) -> bool:
        return False


class _Nothing(metaclass=_Meta):
    """Any name of a module that is not there. It can be called and be a base class; it is false, as
    are its attributes and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(_Nothing, name)

    def __bool__(self) -> bool:
        return False


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of ``package``: its names are those given, others ``_Nothing``."""

    def __init__(self, package: str, names: dict[str, dict[str, Any]]) -> None:
        self.package, self.names = package, names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        given = self.names.get(module.__name__, {})
        module.__dict__.update(given)
        module.__getattr__ = functools.partial(_Meta.__getattr__, _Nothing)


def load_fused_moe(folder: Path) -> types.ModuleType:
    """vLLM's file of kernels of experts, with its choice of their configurations."""
    import triton
    import triton.language as tl

    path = folder / FUSED_MOE
    spec = importlib.util.spec_from_file_location("fused_moe", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise NotMeasured(f"there is no {path}")
    given = {
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.model_executor.layers.fused_moe.config": {"_get_config_dtype_str": _config_dtype},
    }
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Absent("vllm", given))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Platform(_Nothing):
    """Not "cuda", so that no kernel but Triton's is chosen."""

    def get_device_name(self) -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn


def _config_dtype(**uses: Any) -> str | None:
    return next((name[4:] for name, use in uses.items() if name.startswith("use_") and use), None)


# ------------------------------------------------------------------------------------------
# vLLM


class Vllm:
    """``fused_experts_impl``, and ``invoke_fused_moe_triton_kernel`` for one product."""

    tuned = False

    def __init__(self, layer: Experts | Product, folder: Path) -> None:
        if layer.format not in DTYPES:
            raise NotMeasured(f"it has no Triton kernel of {layer.format} for this card")
        self.layer, self.module = layer, load_fused_moe(folder)
        self.dtype, self.block = DTYPES[layer.format]
        self.uses = {f"use_{name}": name == self.dtype for name, _ in DTYPES.values()}
        self.config: dict[str, int] | None = None  # None: vLLM chooses
        self.used: dict[str, int] = {}
        self._replace_cuda()

    def _replace_cuda(self) -> None:
        module: Any = self.module
        self.own, assignment = module.try_get_optimal_moe_config, module._prepare_expert_assignment
        plans: dict[tuple[int, int], Any] = {}

        def configuration(*args: Any, **kwargs: Any) -> dict[str, int]:
            self.used = self.config or self.own(*args, **kwargs)
            return self.used

        def planned(ids: Tensor, config: dict[str, int], *args: Any, **kwargs: Any) -> Any:
            key = ids.data_ptr(), config["BLOCK_SIZE_M"]
            if key not in plans:  # in the first call, which is not timed
                plans[key] = assignment(ids.int(), config, *args, **kwargs)
            return plans[key]

        module.try_get_optimal_moe_config = configuration
        module._prepare_expert_assignment = planned
        module.moe_align_block_size = lambda ids, size, count, *_, **__: aligned(ids, size, count)
        module.apply_moe_activation = lambda kind, out, y: _gate(out, y)
        module.moe_kernel_quantize_input = lambda A, **_: (
            _quantized(A) if self.dtype == "fp8_w8a8" else (A, None)
        )
        module.ops = types.SimpleNamespace(moe_sum=_sum)
        half = types.SimpleNamespace(adjust_N_for_activation=lambda n, kind: n // 2)
        module.mk = types.SimpleNamespace(FusedMoEExpertsModular=half)

    def planned(self, *args: Tensor) -> Call:
        if isinstance(self.layer, Product):
            q, scale, ends = args
            ids = torch.arange(len(ends), device=ends.device)
            ids = ids.repeat_interleave(len(q) // len(ends)).unsqueeze(1)
            call = functools.partial(self._product, q, scale, ids)
        else:
            call = functools.partial(self._experts, *args)
        if self.tuned and self.config is None:
            self.config = self._fastest(call, args[0].device.type)
        call()
        return call

    @torch.no_grad()
    def _experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        (up, up_scale), (down, down_scale) = map(self._stored, ("up", "down"))
        scales: Any = {"w1_scale": up_scale, "w2_scale": down_scale, "block_shape": self.block}
        module: Any = self.module
        out: Tensor = module.fused_experts_impl(
            x, up, down, weights, ids, False, **self.uses, **scales
        )
        return out

    @torch.no_grad()
    def _product(self, q: Tensor, q_scale: Tensor, ids: Tensor) -> Tensor:
        (w, scale), module, rows = self._stored("up"), self.module, len(ids)
        config = module.try_get_optimal_moe_config(
            w.shape, w.shape, 1, self.dtype, rows, block_shape=self.block
        )
        blocks = module._prepare_expert_assignment(ids, config, rows, 1, len(w), None)
        out = torch.empty(rows, 1, w.shape[1], dtype=torch.bfloat16, device=w.device)
        module.invoke_fused_moe_triton_kernel(
            *(q, w, out, q_scale, scale, None, *blocks, False, 1, config, module.tl.bfloat16),
            **{"use_int8_w8a8": False, **self.uses},
            per_channel_quant=False,
            block_shape=self.block,
        )
        return out.squeeze(1)

    def _stored(self, name: str) -> tuple[Tensor, Tensor]:
        w, scale = self.layer.stored(name)
        if self.dtype == "int4_w4a16":
            return w.view(torch.uint8), scale
        return w, scale.squeeze(-1) if self.dtype == "int8_w8a16" else scale

    def _fastest(self, call: Call, device: str) -> dict[str, int]:
        """Of vLLM's configuration and some others."""
        call()
        times = []
        for config in (self.used, *configurations(self.dtype)):
            self.config = config
            try:
                call()
            except Exception:  # more shared memory than there is
                continue
            replay = Replay([call] * 4, device)
            times.append((min(replay.seconds() for _ in range(3)), config))
        return min(times, key=lambda each: each[0])[1]


class VllmTuned(Vllm):
    tuned = True


def configurations(dtype: str) -> list[dict[str, int]]:
    """Others than vLLM's."""
    tiles = [(16, 64, 64, 4, 4), (16, 128, 64, 4, 4), (16, 64, 128, 4, 3), (32, 128, 64, 4, 4)]
    tiles += [(64, 128, 64, 4, 3), (64, 128, 64, 8, 3), (128, 128, 64, 8, 3)]
    if dtype == "fp8_w8a8":  # a turn of the loop is a block of K
        tiles = [(m, 128, 128, 4, 4) for m in (16, 32, 64)] + [(128, 128, 128, 8, 3)]
    names = "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages"
    found = [dict(zip(names, tile, strict=True)) for tile in tiles]
    return [{**c, "GROUP_SIZE_M": 16 if c["BLOCK_SIZE_M"] > 64 else 1, "SPLIT_K": 1} for c in found]


def aligned(ids: Tensor, size: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """vLLM's ``moe_align_block_size``: rows sorted by expert, those of each padded to whole blocks
    of ``size``; the expert of each block; the padded number of rows."""
    flat, total = ids.flatten().long(), ids.numel()
    most = total + experts * (size - 1)
    most = min(most, total * size) if total < experts else most
    counts = torch.bincount(flat, minlength=experts)
    blocks = -(-counts // size)
    starts, firsts = counts.cumsum(0) - counts, (blocks.cumsum(0) - blocks) * size
    order = flat.argsort(stable=True)
    chosen = flat[order]
    place = firsts[chosen] + torch.arange(total, device=ids.device) - starts[chosen]
    rows = torch.full((most,), total, dtype=torch.int32, device=ids.device)
    rows[place] = order.int()
    of_blocks = torch.zeros(-(-most // size), dtype=torch.int32, device=ids.device)
    found = torch.arange(experts, device=ids.device).repeat_interleave(blocks)
    of_blocks[: len(found)] = found.int()
    return rows, of_blocks, (blocks.sum() * size).int().reshape(1)


@functools.partial(torch.compile, dynamic=False)
def _gate(out: Tensor, y: Tensor) -> None:
    gate, up = y.chunk(2, -1)
    out.copy_(F.silu(gate) * up)


@functools.partial(torch.compile, dynamic=False)
def _sum(y: Tensor, out: Tensor) -> None:
    out.copy_(y.float().sum(1))


_quantized = torch.compile(by_block, dynamic=False)


# ------------------------------------------------------------------------------------------
# triton_kernels


class TritonKernels:
    """``matmul_ogs`` of gpt-oss's layer: MXFP4 in its layout for the card, gate in the kernel."""

    def __init__(self, layer: Experts | Product, folder: Path) -> None:
        if isinstance(layer, Product) or not layer.model.is_gpt_oss:
            raise NotMeasured("it is timed on gpt-oss's layer alone")
        if not (folder / TRITON_KERNELS).is_dir():
            raise NotMeasured(f"there is no {folder / TRITON_KERNELS}")
        sys.path.insert(0, str((folder / TRITON_KERNELS).parent))
        from triton_kernels import matmul_ogs, numerics, swiglu, tensor
        from triton_kernels.tensor_details import layout

        self.layer, self.ogs, self.tensor = layer, matmul_ogs, tensor
        matmul_ogs.update_opt_flags_constraints({"split_k": 1})  # as vLLM does on sm_90
        swiglu_of = matmul_ogs.FnSpecs(
            "swiglu", swiglu.swiglu_fn, ("alpha", "limit"), reduction_n=2
        )
        self.gate = matmul_ogs.FusedActivation(swiglu_of, (1.702, 7.0))
        value, value_how = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        exponent, exponent_how = layout.make_default_matmul_mxfp4_w_scale_layout(
            mx_axis=1, num_warps=8
        )

        def stack(name: str) -> tuple[Any, Any]:
            codes, scale = layer.stored(name)
            w = tensor.wrap_torch_tensor(codes.flatten(-2).mT, dtype=tensor.FP4)
            s = tensor.wrap_torch_tensor(scale.mT)
            s = tensor.convert_layout(s, exponent, **exponent_how)
            flex = matmul_ogs.FlexCtx(rhs_data=numerics.InFlexData())
            how = matmul_ogs.PrecisionConfig(weight_scale=s, flex_ctx=flex)
            return tensor.convert_layout(w, value, **value_how), how

        self.up, self.down = stack("up"), stack("down")
        self.biases = layer.gate_up_proj_bias.float(), layer.down_proj_bias.float()

    def planned(self, x: Tensor, ids: Tensor, weights: Tensor) -> Call:
        flat, experts, top_k = ids.flatten(), self.layer.num_experts, ids.shape[1]
        order = flat.argsort(stable=True).int()
        inverse = torch.empty_like(order)
        inverse[order.long()] = torch.arange(len(order), dtype=torch.int32, device=ids.device)
        counts = torch.bincount(flat, minlength=experts).int()
        rows = self.tensor.make_ragged_tensor_metadata(counts, len(flat))
        sorted_weights = weights.flatten()[order.long()]
        routing = self.ogs.RoutingData(sorted_weights, counts, experts, top_k, rows)
        gather = self.ogs.GatherIndx(order, inverse)
        scatter = self.ogs.ScatterIndx(inverse, order)
        return functools.partial(self._experts, x, routing, gather, scatter)

    @torch.no_grad()
    def _experts(self, x: Tensor, routing: Any, gather: Any, scatter: Any) -> Tensor:
        (up, up_how), (down, down_how) = self.up, self.down
        y = self.ogs.matmul_ogs(
            *(x, up, self.biases[0], routing),
            gather_indx=gather,
            precision_config=up_how,
            fused_activation=self.gate,
        )
        out: Tensor = self.ogs.matmul_ogs(
            *(y, down, self.biases[1], routing),
            scatter_indx=scatter,
            precision_config=down_how,
            gammas=routing.gate_scal,
        )
        return out


PEERS: dict[str, Callable[[Any, Path], Any]] = {
    "vllm": Vllm,
    "vllm-tuned": VllmTuned,
    "triton_kernels": TritonKernels,
}
