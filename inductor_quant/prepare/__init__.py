"""``prepare_``: replace layers that cannot be traced into one graph by plain modules of the same
tensors, and take away hooks that break the graph. What the model computes stays the same."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from inductor_quant.prepare import hooks, sparse_bsr
from inductor_quant.prepare.plain import Replacement, difference

# Class -> the module of this package whose ``plain(layer)`` has the rule. By path: nothing here
# imports a library. A subclass with a forward of its own is another layer.
RULES: dict[str, str] = {
    "torch.nn.modules.linear.Linear": "compressed_tensors",  # or sparse_bsr, see ``_of_linear``
    "gptqmodel.nn_modules.qlinear.torch.TorchLinear": "gptqmodel",
    "gptqmodel.nn_modules.qlinear.tritonv2.TritonV2Linear": "gptqmodel",
    "gptqmodel.nn_modules.qlinear.torch_awq.AwqTorchLinear": "gptqmodel",
    "gptqmodel.nn_modules.qlinear.gemm_awq_triton.AwqGEMMTritonLinear": "gptqmodel",
    "bitsandbytes.nn.modules.Linear4bit": "bitsandbytes",
    "bitsandbytes.nn.modules.Linear8bitLt": "bitsandbytes",
    "transformers.integrations.finegrained_fp8.FP8Linear": "finegrained_fp8",
    "transformers.integrations.finegrained_fp8.FP8Experts": "finegrained_fp8_experts",
    "transformers.integrations.bitnet.BitLinear": "bitnet",
    "optimum.quanto.nn.qlinear.QLinear": "quanto",
}
# Layers of these packages without a rule are reported, if they hold quantized tensors.
_LIBRARIES = ("gptqmodel.", "bitsandbytes.", "transformers.integrations.finegrained_fp8")
_USER_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS = (
    *_USER_HOOKS,
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    "_forward_hooks_always_called",
)


@dataclasses.dataclass(frozen=True)
class Line:
    """What became of one module. ``done``: it was replaced, or a hook taken away."""

    name: str
    kind: str
    done: bool
    detail: str

    def __str__(self) -> str:
        status, name = "done" if self.done else "left", self.name or "(model)"
        return f"{status}  {name} ({self.kind}): {self.detail}"


class Preparation:
    """What ``prepare_`` did: ``lines``, and ``undo()``. It keeps the replaced layers alive, without
    tensors of their own; ``prepack_`` afterwards frees memory only once it is gone."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._saved: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []

    @property
    def done(self) -> list[Line]:
        return [line for line in self.lines if line.done]

    @property
    def left(self) -> list[Line]:
        return [line for line in self.lines if not line.done]

    def undo(self) -> None:
        """Give every module back its class and state of before. Tensors that were moved or written
        since then are not moved back."""
        while self._saved:
            module, kind, state = self._saved.pop()
            module.__class__, module.__dict__ = kind, state

    def __str__(self) -> str:
        head = f"{len(self.done)} prepared, {len(self.left)} left as they are"
        return "\n".join([head, *map(str, self.lines)])

    def _save(self, module: nn.Module) -> None:
        self._saved.append((module, type(module), module.__dict__))
        module.__dict__ = dict(module.__dict__)

    def _become(self, module: nn.Module, new: Replacement) -> None:
        """The same object, so that every owner of ``module`` has the new layer; its hooks stay.
        Raises TypeError if a class has another layout in memory."""
        kind, old = type(module), module.__dict__
        module.__class__ = type(new.layer)
        self._saved.append((module, kind, old))
        state = {name: old[name] for name in _HOOKS if name in old}
        for name in _USER_HOOKS:
            held = state[name].items()
            state[name] = type(state[name])((k, v) for k, v in held if k not in new.dropped_hooks)
        module.__dict__ = {**new.layer.__dict__, **state}


def prepare_(model: nn.Module) -> Preparation:
    """Make ``model`` traceable in place, as one graph, without a change to what it computes.

    1. Hooks of accelerate and compressed-tensors go, if all weights are on one device, and
       compressed-tensors does not decompress the model at its first call.
    2. Layers of ``RULES``, whose own forward breaks the graph or calls a kernel without a meaning,
       become plain modules that hold the same packed tensors. Each is compared with the layer that
       it replaces on random data, bit for bit or within a rounding, and dropped if it differs.

    Everything else is left as it is. Call it after loading and before the first call of the model.
    A second call does nothing. The result says line by line what was done and what was left, and
    why; ``undo()`` takes it all back. ``state_dict`` may have other names until then.
    """
    result = Preparation()
    refused = hooks.refusal(model)
    if refused:
        result.lines.append(Line("", type(model).__name__, False, refused))
        return result
    found: dict[nn.Module, tuple[str, Replacement]] = {}
    for name, module in model.named_modules():
        rule = _rule(module)
        if rule is None:
            continue
        new = _replacement(module, rule)
        if isinstance(new, str):
            if new:
                result.lines.append(Line(name, type(module).__name__, False, new))
        else:
            found[module] = (name, new)
    for module, (name, new) in found.items():
        line = Line(name, type(module).__name__, True, new.note)
        try:
            result._become(module, new)
        except TypeError as error:
            line = dataclasses.replace(line, done=False, detail=str(error))
        result.lines.append(line)
    for name, module in model.named_modules():
        if what := hooks.removable(module):
            result._save(module)
            hooks.remove(module)
            result.lines.append(Line(name, type(module).__name__, True, what))
    return result


def pending(model: nn.Module) -> Iterator[str]:
    """The kinds of the layers that ``prepare_`` would replace, without comparing them, and "hooks"
    if it would take some away."""
    if hooks.refusal(model):
        return
    for module in model.modules():
        if (rule := _rule(module)) and isinstance(_made(module, rule), Replacement):
            yield type(module).__name__ + (" (sparse_bsr)" if rule == "sparse_bsr" else "")
    if any(map(hooks.removable, model.modules())):
        yield "hooks"


def untraceable(model: nn.Module) -> Iterator[str]:
    """The names of sparse_bsr tensors that no rule replaces."""
    for prefix, module in model.named_modules():
        if _rule(module) == "sparse_bsr" and isinstance(_made(module, "sparse_bsr"), Replacement):
            continue
        held = (*module.named_parameters(prefix, False), *module.named_buffers(prefix, False))
        yield from (name for name, tensor in held if sparse_bsr.is_sparse_bsr(tensor))


def left(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(kind, reason) of the layers that ``prepare_`` would leave as they are, as far as their
    tensors tell."""
    for module in model.modules():
        if (rule := _rule(module)) and isinstance(why := _made(module, rule), str) and why:
            yield type(module).__name__, why


def _rule(module: nn.Module) -> str | None:
    """The name of the rule for a layer; "" if its library is known, and the layer is not."""
    for kind in type(module).__mro__:
        rule = RULES.get(f"{kind.__module__}.{kind.__qualname__}")
        is_other = type(module).forward is not getattr(kind, "forward", None)
        if rule == "compressed_tensors":
            rule = _of_linear(module)
        if rule is not None and not is_other:
            return rule
    held = (*module.parameters(False), *module.buffers(False))
    is_packed = any(t.dim() > 1 and (not t.is_floating_point() or t.itemsize == 1) for t in held)
    return "" if is_packed and type(module).__module__.startswith(_LIBRARIES) else None


def _of_linear(module: nn.Module) -> str | None:
    if sparse_bsr.is_sparse_bsr(getattr(module, "weight", None)):
        return "sparse_bsr"
    return "compressed_tensors" if hasattr(module, "quantization_scheme") else None


def _replacement(module: nn.Module, rule: str) -> Replacement | str:
    """What takes the place of a layer; otherwise why not, or "" if there is no need."""
    if not rule:
        return "no rule for this layer"
    made = _made(module, rule)
    if isinstance(made, str):
        return made
    made.layer.train(module.training)
    try:
        with torch.no_grad():
            return made.compared(difference(made, module))
    except Exception as error:
        return f"it cannot be compared here: {type(error).__name__}: {error}".splitlines()[0]


def _made(module: nn.Module, rule: str) -> Replacement | str:
    if "forward" in vars(module) and not hooks.owns_forward(module):
        return "its forward has been replaced"
    made = importlib.import_module(f"{__name__}.{rule}").plain
    try:
        result: Replacement | str = made(module)
    except Exception as error:
        return f"it is not as expected: {type(error).__name__}: {error}".splitlines()[0]
    return result
