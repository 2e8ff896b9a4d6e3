"""Hooks and wrappers that move tensors, of accelerate and compressed-tensors. They are removed
where there is nothing to move, and decompression at the first call."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

DECOMPRESS = "ct_decompress_hook"
_WRAPPED = "_original_forward_func"  # of compressed-tensors' offload


def refusal(model: nn.Module) -> str:
    """Why nothing may be done to ``model``; "" if it may."""
    devices, has_hooks = set[str](), False
    for name, module in model.named_modules():
        for held in _held(module):
            if held.device.type == "meta":
                return f"{name} is on the meta device: load it, or offload nothing"
            if not _has_values(held):
                return "its tensors have no values to compare: prepare the model before"
            devices.add(str(held.device))
        for hook in _accelerate_hooks(module):
            has_hooks = True
            if getattr(hook, "offload", False) or type(hook).__name__.endswith("Offload"):
                return f"{name} is offloaded: load the model on one device"
        cache = vars(module)["_parameters"]
        if _is_cache(cache) and str(cache.onload_device) != str(cache.offload_device):
            return f"{name} is offloaded to {cache.offload_device}: load the model on one device"
    if has_hooks and len(devices) > 1:
        return f"hooks move x between {', '.join(sorted(devices))}: load the model on one device"
    return ""


def owns_forward(module: nn.Module) -> bool:
    """Whether the instance's own ``forward`` is a wrapper of these libraries."""
    own: Any = vars(module)["forward"]
    function = getattr(own, "__func__", own)
    is_theirs = str(getattr(function, "__module__", "")).startswith("torch.nn")  # functools.wraps
    return is_theirs or bool({"_hf_hook", _WRAPPED, "quantization_scheme"} & {*vars(module)})


def removable(module: nn.Module) -> str:
    """What ``remove`` would take away; "" for nothing."""
    found = []
    if DECOMPRESS in vars(module) and not any(map(_is_compressed, module.modules())):
        found.append("compressed-tensors' decompression at the first call")
    if _is_cache(vars(module)["_parameters"]):
        found.append("compressed-tensors' cache of offloaded tensors")
    hooks = _accelerate_hooks(module)
    if hooks and all(type(hook).__name__ == "AlignDevicesHook" for hook in hooks):
        found.append("accelerate's AlignDevicesHook")
    return ", ".join(found)


def remove(module: nn.Module) -> None:
    """Writes to ``vars(module)`` alone, and to no object in it."""
    state: Any = module.__dict__
    if (handle := state.get(DECOMPRESS)) and not any(map(_is_compressed, module.modules())):
        pre_hooks = state["_forward_pre_hooks"]
        kept = ((key, value) for key, value in pre_hooks.items() if key != handle.id)
        state["_forward_pre_hooks"] = type(pre_hooks)(kept)
        del state[DECOMPRESS]
    if _is_cache(state["_parameters"]):
        for name in ("_parameters", "_buffers"):
            state[name] = dict(state[name].offloaded_values)
        function = state.pop(_WRAPPED, None)
        if function is not None:
            state["forward"] = types.MethodType(function, module)
            if function is type(module).forward:
                del state["forward"]
    if "_hf_hook" in state:
        del state["_hf_hook"]
        old = state.pop("_old_forward", None)
        state.pop("forward", None)
        if old is not None and getattr(old, "__func__", None) is not type(module).forward:
            state["forward"] = old


def _held(module: nn.Module) -> list[torch.Tensor]:
    held = [vars(module)["_parameters"], vars(module)["_buffers"]]
    tensors = [t for h in held for t in getattr(h, "offloaded_values", h).values()]
    return [t for t in tensors if t is not None]


def _has_values(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ != "FakeTensor" and type(tensor.data).__name__ != "FakeTensor"


def _is_cache(held: Any) -> bool:
    return hasattr(held, "offloaded_values")


def _is_compressed(module: nn.Module) -> bool:
    status = getattr(module, "quantization_status", None)
    return getattr(status, "value", "") == "compressed"


def _accelerate_hooks(module: nn.Module) -> list[Any]:
    hook = vars(module).get("_hf_hook")
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))
