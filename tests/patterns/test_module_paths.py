"""The path of a module as the user writes it, whatever wraps the model; filters that match none."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from inductor_quant import fallback
from inductor_quant.options import Options
from inductor_quant.patterns.fx_utils import module_path
from tests.support.graphs.post_grad import capture

pytestmark = pytest.mark.compiles

DDP = "torch.nn.parallel.distributed.DistributedDataParallel"
PATHS = {
    "L['self'].layers.0.mlp.up": "layers.0.mlp.up",
    "L['self']": "",
    "G['model'].head": "head",
    "L['self'].__dict__['_modules']['a'].__dict__['_modules']['layers'].0.up": "a.layers.0.up",
    "L['self'].model._modules['layers']._modules['0'].up": "model.layers.0.up",
    'L["self"].__dict__["_modules"]["up"]': "up",
    "L['self']._orig_mod.layers.0.up": "layers.0.up",
    "L['self']._fsdp_wrapped_module.layers.0._fsdp_wrapped_module.up": "layers.0.up",
    "L['self'].layers.0._checkpoint_wrapped_module.up": "layers.0.up",
    "L['self'].module.up": "module.up",
    "L['self'].base_model.model.layers.0.up.base_layer": "base_model.model.layers.0.up.base_layer",
}


def path_of(path, outermost="Model"):
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"a": ("L['self']", outermost), "b": (path, "Linear")}
    return module_path(node)


@pytest.mark.parametrize("path", PATHS)
def test_wrappers_are_left_out(path):
    assert path_of(path) == PATHS[path]


def test_the_module_of_data_parallel_is_the_model():
    assert path_of("L['self'].module.up", DDP) == "up"
    assert path_of("L['self'].module.module.up", DDP) == "module.up"


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(32, 64, dtype=torch.int8))

    def forward(self, x):
        return x @ self.weight.float()


class Wrapped(nn.Module):
    """Its attributes come from the model inside."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(Quantized())

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, x):
        return self.model(x)


@pytest.mark.parametrize(
    ("options", "is_matched", "warns"),
    [
        ({"include_modules": ["model.0"]}, True, False),
        ({"exclude_modules": ["model.*"]}, False, False),
        ({"include_modules": ["layers.*"]}, False, True),
        ({"exclude_modules": ["layers.*"]}, True, True),
    ],
)
def test_filters_name_the_users_modules_and_warn_where_they_match_none(
    options, is_matched, warns, recwarn
):
    fallback.warn_once.cache_clear()
    with torch.no_grad():
        _, [rewrite] = capture(Wrapped(), [torch.randn(4, 32)], options=Options(**options))
    assert bool(rewrite.report.matches) == is_matched
    messages = [str(w.message) for w in recwarn if "matches no matrix product" in str(w.message)]
    assert bool(messages) == warns
    assert all("'model.0'" in message for message in messages)
