"""The user's own custom passes: all of them run, in their order, whatever slot they are in."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config, custom_graph_pass

from inductor_quant import backend, collect
from inductor_quant._compat import inductor as compat
from inductor_quant.options import Options
from inductor_quant.patterns.graph_pass import SLOT, QuantGemmPass, for_options
from inductor_quant.simulate import generate

pytestmark = pytest.mark.compiles

NAME = "inductor_quant"
SLOTS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
TAKES_SEQUENCES = hasattr(custom_graph_pass, "get_custom_graph_passes")
needs_sequences = pytest.mark.skipif(
    not TAKES_SEQUENCES, reason="slots of this torch take a single pass"
)


class Recorder(custom_graph_pass.CustomGraphPass):
    """A user's pass: notes its name, and which GEMMs and which of our passes it meets."""

    def __init__(self, name: str, log: list[tuple[str, set[str]]]) -> None:
        self.name = name
        self.log = log

    def __call__(self, graph: torch.fx.Graph) -> None:
        gemms = {
            getattr(node.target, "__name__", str(node.target)).split(".")[0]
            for node in graph.nodes
            if "int_mm" in str(node.target) or "w8a8" in str(node.target)
        }
        self.log.append((self.name, gemms))

    def uuid(self) -> str:
        return self.name

    def __deepcopy__(self, memo):
        return self


def scaled(a, b, a_scale):
    return torch._int_mm(a, b) * a_scale


def make_inputs(device):
    return (
        torch.zeros(32, 64, dtype=torch.int8, device=device),
        torch.zeros(64, 48, dtype=torch.int8, device=device),
        torch.ones(32, 1, device=device),
    )


def compile_with(how, values, backend=NAME):
    """Compile with ``values`` (slot -> passes) set in the way ``how``."""
    if how == "options":
        return generate(scaled, make_inputs, backend=backend, options=values)
    return generate(scaled, make_inputs, backend=backend, config=values)


def is_ours(generated):
    return any("w8a8" in name for name in generated.kernels)


HOW = pytest.mark.parametrize("how", ["options", "global config"])


@HOW
def test_a_pass_in_every_slot_runs_as_with_inductor(how):
    logs = {}
    for name in ("inductor", NAME):
        log = logs[name] = []
        generated = compile_with(how, {slot: Recorder(slot, log) for slot in SLOTS}, name)
        assert is_ours(generated) == (name == NAME)
    order = [name for name, _ in logs[NAME]]
    assert order == [name for name, _ in logs["inductor"]]
    assert set(order) == set(SLOTS)


@pytest.mark.one_in(3)
@HOW
@pytest.mark.parametrize("slot", SLOTS)
def test_our_rewrite_comes_behind_the_users_pass_in_our_slot(how, slot):
    log = []
    assert is_ours(compile_with(how, {slot: Recorder(slot, log)}))
    [(_, gemms)] = log
    assert gemms == ({"w8a8"} if slot == "post_grad_custom_post_pass" else {"_int_mm"})


@pytest.mark.one_in(3)
@needs_sequences
@HOW
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("slot", SLOTS)
def test_several_passes_in_a_slot_keep_their_order(how, kind, slot):
    log = []
    value = kind(Recorder(name, log) for name in ("first", "second", "third"))
    assert is_ours(compile_with(how, {slot: value}))
    assert [name for name, _ in log] == ["first", "second", "third"]


@HOW
def test_a_plain_function_is_a_pass_as_well(how):
    calls = []

    def function(graph):
        calls.append(graph)

    assert is_ours(compile_with(how, {SLOT: function}))
    assert len(calls) == 1


@HOW
@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"),
    reason="this torch has no passes that are told of inference",
)
@pytest.mark.parametrize("slot", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_a_pass_that_is_told_of_inference_is_told(how, slot):
    told = []

    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):
        def __call__(self, graph, is_inference):
            told.append(is_inference)

        def uuid(self):
            return "aware"

        def __deepcopy__(self, memo):
            return self

    assert is_ours(compile_with(how, {slot: [Recorder("before", []), Aware()]}))
    assert told == [True]


def test_options_take_the_place_of_the_global_value_as_for_inductor():
    logs = {}
    for name in ("inductor", NAME):
        log = logs[name] = []
        with config.patch({SLOT: Recorder("global", log)}):
            compile_with("options", {SLOT: Recorder("options", log)}, name)
    assert [name for name, _ in logs[NAME]] == [name for name, _ in logs["inductor"]] == ["options"]


# ------------------------------------------------------------------------------------------
# ours


class Spy(Recorder):
    """Notes what is in our slot while a compilation runs."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.log.append(compat.active_passes(SLOT))


def passes_while_compiling(*others, **arguments):
    log = []
    value = compat.slot_value([Spy("spy", log), *others])
    with collect() as report:
        compile_with("options" if arguments.pop("in_options", True) else "global", {SLOT: value})
    assert len(report.matches) == 1
    [passes] = log
    return passes


def ours_in(passes):
    return [item for item in passes if isinstance(item, QuantGemmPass)]


@pytest.mark.parametrize("in_options", [True, False])
def test_our_pass_is_there_once_and_last(in_options):
    passes = passes_while_compiling(in_options=in_options)
    assert ours_in(passes) == [passes[-1]]
    assert len(passes) == 2


def test_our_pass_is_there_once_when_the_user_has_put_it_there_too():
    mine = for_options(Options(max_choices=2))
    assert ours_in(passes_while_compiling(mine)) == [for_options(Options())]


def test_our_pass_is_there_once_when_enabled_as_well():
    with backend.enabled(max_choices=2):
        log = []
        with collect() as report, config.patch(force_disable_caches=True):
            generate(scaled, make_inputs, backend=NAME, options={SLOT: Spy("spy", log)})
            generate(scaled, make_inputs, backend=NAME)
    [passes] = log
    assert ours_in(passes) == [for_options(Options())]
    assert len(report.matches) == 2


def test_the_users_slot_is_left_as_it_was():
    for value in (Recorder("a", []), (Recorder("a", []), Recorder("b", []))):
        if isinstance(value, tuple) and not TAKES_SEQUENCES:
            continue
        with config.patch({SLOT: value}):
            generate(scaled, make_inputs, backend=NAME)
            assert getattr(config, SLOT) is value
