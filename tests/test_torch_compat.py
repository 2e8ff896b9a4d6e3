"""The boundary: what it reports of a torch that differs, and its adapters."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.choices import InductorChoices

from inductor_quant import _torch_compat as compat

SLOT = "post_grad_custom_pre_pass"


class Recorder(custom_graph_pass.CustomGraphPass):
    """A user's pass: writes its name into a list."""

    def __init__(self, name: str, log: list[str], uuid: str | None = "") -> None:
        self.name = name
        self.log = log
        self.id = name if uuid == "" else uuid

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.log.append(self.name)

    def uuid(self) -> str | None:
        return self.id


@pytest.fixture
def problems():
    """``problems`` without its memory of an earlier answer."""
    compat.problems.cache_clear()
    yield compat.problems
    compat.problems.cache_clear()


# ------------------------------------------------------------------------------------------
# the check


def test_the_installed_torch_has_everything(problems):
    assert problems() == ()


def test_the_installed_torch_is_one_of_the_supported():
    assert ".".join(torch.__version__.split(".")[:2]) in compat.SUPPORTED


def run_module(code: str | None = None) -> subprocess.CompletedProcess[str]:
    arguments = ["-c", code] if code else ["-m", "inductor_quant._torch_compat"]
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def test_the_module_as_a_program_says_so_and_exits_with_zero():
    done = run_module()
    assert done.returncode == 0, done.stderr
    assert f"torch {torch.__version__}" in done.stdout
    assert "everything that inductor_quant needs is there" in done.stdout


def test_the_program_lists_what_is_missing_and_exits_with_one():
    done = run_module(
        "import torch._inductor.select_algorithm as module\n"
        "del module.SymbolicGridFn\n"
        "from inductor_quant import _torch_compat\n"
        "raise SystemExit(_torch_compat.main())"
    )
    assert done.returncode == 1, done.stderr
    assert "torch._inductor.select_algorithm.SymbolicGridFn is missing" in done.stdout
    assert "NOT USABLE" in done.stdout


@pytest.mark.parametrize("name", sorted(compat._EXPORTS))
def test_a_missing_symbol_is_reported_by_its_full_name(monkeypatch, problems, name):
    module = compat._EXPORTS[name]
    monkeypatch.delattr(f"{module}.{name}")
    assert any(problem.startswith(f"{module}.{name} is missing") for problem in problems())


def test_a_missing_module_is_reported(monkeypatch, problems):
    monkeypatch.setitem(compat._EXPORTS, "Anything", "torch._inductor.no_such_module")
    [problem] = problems()
    assert problem.startswith("torch._inductor.no_such_module.Anything is missing (No module")


@pytest.mark.parametrize("name", sorted(compat._PARAMETERS))
def test_a_parameter_that_is_gone_is_reported(monkeypatch, problems, name):
    def narrower(first):
        pass

    monkeypatch.setattr(f"{compat._EXPORTS[name]}.{name}", narrower)
    [problem] = problems()
    assert problem.startswith(f"{compat._EXPORTS[name]}.{name} no longer takes ")
    assert all(parameter in problem for parameter in compat._PARAMETERS[name])


def test_a_changed_selection_is_reported(monkeypatch, problems):
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def call(self, name, choices, input_nodes, layout):
        pass

    monkeypatch.setattr(AlgorithmSelectorCache, "__call__", call)
    [problem] = problems()
    assert problem.endswith("AlgorithmSelectorCache no longer takes return_multi_template")


def test_a_wrapper_that_takes_anything_is_no_problem(monkeypatch, problems):
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def wrapped(self, *args, **kwargs):
        pass

    monkeypatch.setattr(AlgorithmSelectorCache, "__call__", wrapped)
    assert problems() == ()


@pytest.mark.parametrize("change", ["missing", "changed"])
def test_torch_compiles_own_wrapper_is_checked(monkeypatch, problems, change):
    def changed(mode):
        pass

    if change == "missing":
        monkeypatch.delattr(torch, "_TorchCompileInductorWrapper")
    else:
        monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", changed)
    assert problems() == ("torch._TorchCompileInductorWrapper is missing or changed",)


def test_a_config_entry_that_is_gone_is_reported(monkeypatch, problems):
    monkeypatch.setattr(compat, "_CONFIG", (*compat._CONFIG, "no_such_entry"))
    assert problems() == ("torch._inductor.config.no_such_entry is missing",)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = compat.no_such_name


@pytest.mark.parametrize("name", sorted(compat._EXPORTS))
def test_a_reexport_is_the_symbol_itself(name):
    module = importlib.import_module(compat._EXPORTS[name])
    assert getattr(compat, name) is getattr(module, name)


# ------------------------------------------------------------------------------------------
# slots

HAS_SEQUENCES = hasattr(custom_graph_pass, "get_custom_graph_passes")


@pytest.fixture(params=["as installed", "one pass only"])
def branch(request, monkeypatch):
    """Both kinds of torch: the installed, and 2.11, whose slots take a single object."""
    if request.param == "one pass only" and HAS_SEQUENCES:
        monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes")
    return request.param


@pytest.mark.parametrize("count", range(4))
def test_passes_come_out_of_a_slot_as_they_went_in(branch, count):
    passes = tuple(Recorder(str(i), []) for i in range(count))
    assert compat.passes_in(compat.slot_value(passes)) == passes


def test_a_single_pass_stays_itself_and_none_stays_none(branch):
    item = Recorder("a", [])
    assert compat.slot_value([item]) is item
    assert compat.slot_value([]) is None


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_users_sequence_is_read_in_order(kind):
    passes = [Recorder("a", []), print]
    assert compat.passes_in(kind(passes)) == tuple(passes)


def test_where_a_slot_takes_one_object_several_become_one_that_runs_them_in_order(monkeypatch):
    monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    log: list[str] = []
    value = compat.slot_value([Recorder("a", log), Recorder("b", log), Recorder("c", log)])
    assert isinstance(value, custom_graph_pass.CustomGraphPass)
    value(torch.fx.Graph())
    assert log == ["a", "b", "c"]
    assert value.uuid() == ("a", "b", "c")


@pytest.mark.parametrize("stranger", [Recorder("b", [], uuid=None), print])
def test_a_member_that_cannot_be_cached_makes_the_composite_uncacheable(monkeypatch, stranger):
    monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    assert compat.slot_value([Recorder("a", []), stranger]).uuid() is None


def in_fresh_thread(function):
    """``function()`` in a thread of its own, whose config is what it is for the process."""
    results: list[object] = []

    def run():
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def test_installing_twice_and_removing_twice_leaves_the_slot_as_it_was():
    def scenario():
        ours, before = Recorder("ours", []), getattr(config, SLOT)
        compat.install_globally(SLOT, ours)
        compat.install_globally(SLOT, ours)
        assert compat.active_passes(SLOT) == (ours,)
        compat.uninstall_globally(SLOT, ours)
        compat.uninstall_globally(SLOT, ours)
        assert getattr(config, SLOT) is before is None

    in_fresh_thread(scenario)


def test_ours_goes_behind_the_users_and_only_ours_is_removed():
    def scenario():
        ours, first, second = (Recorder(name, []) for name in ("ours", "first", "second"))
        with config.patch({SLOT: compat.slot_value([first, second])}):
            compat.install_globally(SLOT, ours)
            assert compat.active_passes(SLOT) == (first, second, ours)
            compat.uninstall_globally(SLOT, ours)
            assert compat.active_passes(SLOT) == (first, second)

    in_fresh_thread(scenario)


def test_what_is_installed_globally_is_seen_by_threads_that_run_and_that_start():
    def scenario():
        ours, ready, seen = Recorder("ours", []), threading.Event(), []

        def other():
            ready.wait(10)
            seen.append(compat.active_passes(SLOT))

        running = threading.Thread(target=other)
        running.start()
        compat.install_globally(SLOT, ours)
        ready.set()
        running.join()
        try:
            assert seen == [(ours,)]
            assert in_fresh_thread(lambda: compat.active_passes(SLOT)) == (ours,)
        finally:
            compat.uninstall_globally(SLOT, ours)
        assert in_fresh_thread(lambda: compat.active_passes(SLOT)) == ()

    in_fresh_thread(scenario)


def test_an_int_is_known_and_a_symbol_is_not():
    import sympy

    assert compat.known_int(3) == 3
    assert compat.known_int(sympy.Integer(4)) == 4
    assert compat.known_int(sympy.Symbol("s0")) is None


def test_the_choices_of_another_stay_behind_ours():
    """Inductor asks one object; ours answers for its own kernels and passes the rest on."""
    virtualized = compat.V

    class Theirs(InductorChoices):
        asked: ClassVar[list[object]] = []

        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction):
            Theirs.asked.append(features)
            return features.wanted

    def features(size, *targets, wanted=False):
        origins = [SimpleNamespace(target=target) for target in targets]
        nodes = [SimpleNamespace(node=SimpleNamespace(get_origins=lambda: origins))]
        return SimpleNamespace(reduction_numel=size, wanted=wanted, scheduler_nodes=lambda: nodes)

    theirs = Theirs()
    with virtualized.set_choices_handler(theirs):
        for _ in range(2):
            compat.keep_rows_in_registers("op", 100)
        ours = virtualized.choices
        assert isinstance(ours, Theirs)
        assert ours.row_ops == ("op",)
        decide = ours.should_use_persistent_reduction
        assert decide(features(100, "other", "op"), False)
        assert not decide(features(101, "op"), False)
        assert not decide(features(100, "other"), False)
        assert not decide(features(100, "op"), True)
        assert decide(features(10**6, "other", wanted=True), False)
        assert len(Theirs.asked) == 5
    assert virtualized.choices is not ours
