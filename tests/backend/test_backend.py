"""The named backend: found by name, configured as Inductor is, and without effect on anything else.

Nothing here launches a kernel: compilations are for a virtual GPU, or stop at ``compile_fx``.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config

from inductor_quant import backend, collect
from inductor_quant._compat import inductor as compat
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.errors import OptionError, UnsupportedTorchError
from inductor_quant.patterns.graph_pass import SLOT, QuantGemmPass
from inductor_quant.simulate import generate
from inductor_quant.spec.decisions import RejectionCode
from tests.support.forks import Program

pytestmark = pytest.mark.compiles

NAME = "inductor_quant"


def scaled(a, b, a_scale, b_scale):
    return torch._int_mm(a, b) * a_scale * b_scale


def make_inputs(device, m=32):
    return (
        torch.zeros(m, 64, dtype=torch.int8, device=device),
        torch.zeros(64, 48, dtype=torch.int8, device=device),
        torch.ones(m, 1, device=device),
        torch.ones(1, 48, device=device),
    )


def is_ours(generated):
    return any("w8a8" in name for name in generated.kernels)


# ------------------------------------------------------------------------------------------
# by name (in a fresh process, from an installed wheel: tests/package/test_packaging.py)


def test_the_backend_is_listed_by_dynamo():
    from torch._dynamo.backends import registry

    assert NAME in registry.list_backends()
    assert registry.lookup_backend(NAME) is inductor_quant_backend


@pytest.mark.parametrize("how", [NAME, inductor_quant_backend], ids=["name", "function"])
def test_the_backend_rewrites_by_name_and_by_function(how):
    assert is_ours(generate(scaled, make_inputs, backend=how))


# ------------------------------------------------------------------------------------------
# configuration


@pytest.fixture
def seen(monkeypatch):
    """The config patches of every ``compile_fx``, which compiles nothing."""
    patches = []

    def compile_fx(gm, inputs, *args, config_patches=None, **kwargs):
        patches.append(dict(config_patches or {}))
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", compile_fx)  # first: it may yet have to look it up
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return patches


def config_of(seen, **arguments):
    torch._dynamo.reset()
    seen.clear()
    torch.compile(torch.sin, **arguments)(torch.ones(3))
    [patches] = seen
    return patches


MODES = [None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_expands_as_for_inductor(seen, mode):
    theirs = config_of(seen, backend="inductor", mode=mode)
    ours = config_of(seen, backend=NAME, mode=mode)
    [item] = compat.passes_in(ours.pop(SLOT))
    assert isinstance(item, QuantGemmPass)
    assert ours == theirs


@pytest.mark.parametrize(
    "options",
    [
        {"max_autotune": True},
        {"triton.unique_kernel_names": True, "epilogue_fusion": False},
        {"shape-padding": True},  # torch.compile takes hyphens
    ],
)
def test_options_expand_as_for_inductor(seen, options):
    theirs = config_of(seen, backend="inductor", options=options)
    ours = config_of(seen, backend=NAME, options={**options, "inductor_quant.max_choices": 3})
    [item] = compat.passes_in(ours.pop(SLOT))
    assert item.options.max_choices == 3
    assert ours == theirs


def refusal_of(kind, **arguments):
    """The message of ``kind`` that ``torch.compile(..., backend=NAME)`` fails with."""
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(torch.sin, backend=NAME, **arguments)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, kind)
    return str(caught.value)


def test_an_unknown_mode_is_refused_as_by_inductor():
    assert "Unrecognized mode=fastest" in refusal_of(RuntimeError, mode="fastest")


def test_an_unknown_option_of_inductor_is_refused_as_by_inductor():
    assert "no_such_option" in refusal_of(RuntimeError, options={"no_such_option": 1})


def test_an_unknown_option_of_ours_is_refused_with_a_suggestion():
    message = refusal_of(OptionError, options={"inductor_quant.familes": ()})
    assert "did you mean 'families'?" in message


@pytest.mark.parametrize("is_frozen", [True, False])
def test_freezing_in_options_is_refused_because_it_comes_too_late(seen, is_frozen):
    options = {"freezing": is_frozen}
    if is_frozen:
        assert "torch._inductor.config.freezing = True" in refusal_of(OptionError, options=options)
    else:
        assert config_of(seen, backend=NAME, options=options)["freezing"] is False


def test_equal_options_give_the_same_pass_object(seen):
    """Or each torch.compile with options would compile again."""
    options = {"inductor_quant.max_choices": 5}
    first = config_of(seen, backend=NAME, options=options)[SLOT]
    assert config_of(seen, backend=NAME, options=dict(options))[SLOT] is first


def test_reset_is_passed_on_to_inductor(monkeypatch):
    calls = []
    wrapper = torch._TorchCompileInductorWrapper
    monkeypatch.setattr(wrapper, "reset", lambda self: calls.append(self))
    torch._TorchCompileWrapper(NAME, None, None, None).reset()
    assert len(calls) == 1


def test_the_global_config_is_as_before():
    before = config.get_config_copy()
    generate(scaled, make_inputs, backend=NAME, options={"max_autotune": True})
    after = config.get_config_copy()
    assert {name: after[name] for name in after if after[name] != before[name]} == {}


def test_only_this_compilation_is_affected():
    assert is_ours(generate(scaled, make_inputs, backend=NAME))
    assert not is_ours(generate(scaled, make_inputs, backend="inductor"))


# ------------------------------------------------------------------------------------------
# shapes and graphs


def test_dynamic_rows_give_one_kernel_for_all_sizes():
    def fn(weight, a, a_scale, b_scale):
        return scaled(a, weight, a_scale, b_scale)

    def make(device):
        a, b, a_scale, b_scale = make_inputs(device)
        torch._dynamo.mark_dynamic(a, 0)
        torch._dynamo.mark_dynamic(a_scale, 0)
        return b, a, a_scale, b_scale

    generated = generate(fn, make, backend=NAME)
    assert is_ours(generated)
    assert ["ks0" in source for source in generated.kernels.values()] == [True]


def test_dynamic_true_reaches_the_backend_and_a_symbolic_k_is_left_alone():
    with collect() as report:
        generate(scaled, make_inputs, backend=NAME, dynamic=True)
    [rejection] = report.rejections
    assert rejection.code == RejectionCode.DYNAMIC_K


def test_fullgraph_compiles_a_graph_and_refuses_a_break(seen):
    def broken(x):
        torch._dynamo.graph_break()
        return x.sin()

    compiled = torch.compile(torch.sin, backend=NAME, fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, backend=NAME, fullgraph=True)(torch.ones(3))


def test_both_sides_of_a_graph_break_are_rewritten():
    def two(a, b, a_scale, b_scale):
        first = scaled(a, b, a_scale, b_scale)
        torch._dynamo.graph_break()
        return first, scaled(a, b, b_scale[:, :1], a_scale[:1])

    with collect() as report:
        generate(two, make_inputs, backend=NAME)
    assert len(report.matches) == 2


def test_freezing_set_globally_reaches_the_pass():
    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(64, 48, dtype=torch.int8))

        def forward(self, a):
            return torch._int_mm(a, self.weight)

    a = torch.ones(32, 64, dtype=torch.int8)
    frozen = config.patch(freezing=True, force_disable_caches=True)
    with frozen, torch.no_grad(), collect() as report:
        out = torch.compile(Linear().eval(), backend=NAME)(a)
    assert torch.equal(out, torch.full((32, 48), 64, dtype=torch.int32))
    assert len(report.rejections) == 1  # no scale: the candidate was seen


# ------------------------------------------------------------------------------------------
# switched off


def test_the_environment_switches_to_plain_inductor(monkeypatch):
    monkeypatch.setenv("INDUCTOR_QUANT_DISABLE", "1")
    with collect() as report:
        assert not is_ours(generate(scaled, make_inputs, backend=NAME))
        with backend.enabled():
            assert not is_ours(generate(scaled, make_inputs))
    assert report.matches == report.rejections == []


@pytest.fixture
def unknown_torch(monkeypatch):
    monkeypatch.setattr(backend, "problems", lambda part: ("torch._x.y is missing",))
    backend._warn_unsupported.cache_clear()
    yield
    backend._warn_unsupported.cache_clear()


def test_an_unknown_torch_compiles_with_plain_inductor_and_warns_once(unknown_torch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert not is_ours(generate(scaled, make_inputs, backend=NAME))
        backend.enable()
        with backend.enabled():
            assert not is_ours(generate(scaled, make_inputs))
    ours = [item for item in caught if "inductor_quant" in str(item.message)]
    assert len(ours) == 1
    assert issubclass(ours[0].category, RuntimeWarning)
    assert "torch._x.y is missing" in str(ours[0].message)


def test_an_unknown_torch_is_an_error_where_the_user_wants_one(unknown_torch):
    refusal_of(UnsupportedTorchError, options={"inductor_quant.on_error": "raise"})
    with pytest.raises(UnsupportedTorchError):
        backend.enable(on_error="raise")
    with pytest.raises(UnsupportedTorchError), backend.enabled(on_error="raise"):
        pass


# The symbol is back before Inductor needs it.
WITHOUT_A_SYMBOL = """
import torch, warnings
import torch._inductor.select_algorithm as module
grid = module.SymbolicGridFn
del module.SymbolicGridFn
from inductor_quant import backend
from inductor_quant._compat.symbols import problems
assert problems("inductor")
module.SymbolicGridFn = grid
x = torch.ones(8, 8, dtype=torch.int8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    out = torch.compile(torch._int_mm, backend="inductor_quant")(x, x)
assert out.eq(8).all()
assert sum("inductor_quant" in str(item.message) for item in caught) == 1
assert not hasattr(torch.ops.inductor_quant, "w8a8")
"""


def test_on_a_torch_without_our_symbols_the_backend_still_compiles(forks):
    forks.run(Program(WITHOUT_A_SYMBOL))
