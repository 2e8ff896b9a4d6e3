"""The boundary: what it reports of a torch that differs, and its adapters."""

from __future__ import annotations

import ast
import importlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.choices import InductorChoices

from inductor_quant._compat import gluon, inductor, narrow_casts, symbols
from inductor_quant._compat import inductor as compat

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
    symbols.problems.cache_clear()
    yield symbols.problems
    symbols.problems.cache_clear()


# ------------------------------------------------------------------------------------------
# the table of symbols

NEEDED = {
    name: needed
    for name, needed in symbols.SYMBOLS.items()
    if not needed.since or symbols._version(needed.since) <= symbols._installed()
}


def test_the_installed_torch_has_everything(problems):
    assert problems() == ()


def test_the_installed_torch_is_one_of_the_supported():
    assert symbols._installed() in map(symbols._version, symbols.SUPPORTED)


def test_a_missing_symbol_is_reported_by_its_full_name(monkeypatch, problems):
    """Each in turn, in all of its spellings."""
    resolve = symbols._resolve
    # (read once, not once for each that is missing: it takes most of the time)
    lost_parameters = {
        name: symbols._lost_parameters(name, symbols.symbol(name), needed.parameters)
        for name, needed in NEEDED.items()
    }
    monkeypatch.setattr(symbols, "_lost_parameters", lambda name, *_: lost_parameters[name])
    for name, needed in NEEDED.items():

        def lost(spelling, spellings=needed.names):
            if spelling in spellings:
                raise AttributeError("gone")
            return resolve(spelling)

        monkeypatch.setattr(symbols, "_resolve", lost)
        problems.cache_clear()
        assert problems() == (f"{name} is missing (gone)",)
        assert problems(needed.part) == problems()
        assert problems("inductor") == (problems() if needed.part == "inductor" else ())


def test_a_missing_module_is_reported(monkeypatch, problems):
    gone = symbols.Symbol(("torch._inductor.no_such_module:x",), "inductor")
    monkeypatch.setitem(symbols.SYMBOLS, gone.names[0], gone)
    [problem] = problems()
    assert problem.startswith("torch._inductor.no_such_module:x is missing (No module")


def test_a_parameter_that_is_gone_is_reported(monkeypatch, problems):
    def narrower(first):
        pass

    resolve = symbols._resolve
    for name, needed in NEEDED.items():
        if needed.parameters:
            monkeypatch.setattr(
                symbols, "_resolve", lambda s, name=name: narrower if s == name else resolve(s)
            )
            problems.cache_clear()
            [problem] = problems()
            assert problem == f"{name} no longer takes {', '.join(needed.parameters)}"


def test_a_wrapper_that_takes_anything_is_no_problem(monkeypatch, problems):
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def wrapped(self, *args, **kwargs):
        pass

    monkeypatch.setattr(AlgorithmSelectorCache, "__call__", wrapped)
    assert problems() == ()


def test_a_symbol_of_a_later_torch_is_not_missed(monkeypatch, problems):
    later = symbols.Symbol(("torch._inductor.ir:NoSuchThing",), "inductor", since="9.0")
    monkeypatch.setitem(symbols.SYMBOLS, later.names[0], later)
    assert problems() == ()
    assert not symbols.has(later.names[0])


def test_a_name_that_is_not_in_the_table_is_an_error():
    with pytest.raises(KeyError):
        symbols.symbol("torch._inductor.ir:Reduction")


def test_the_program_says_what_is_missing(capsys, monkeypatch, problems):
    assert symbols.main() == 0
    assert "everything that inductor_quant needs is there" in capsys.readouterr().out
    gone = symbols.Symbol(("torch._inductor.ir:Gone",), "gluon")
    monkeypatch.setitem(symbols.SYMBOLS, gone.names[0], gone)
    problems.cache_clear()
    assert symbols.main() == 1
    out = capsys.readouterr().out
    assert "torch._inductor.ir:Gone is missing" in out
    assert "NOT USABLE" in out


def named_in(path: Path) -> tuple[set[str], set[str]]:
    """(names given to ``symbol`` and ``has``, private modules named otherwise) in a file. A name
    may be put together of constants of the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {}

    def text(node):
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.Name):
            return constants.get(node.id, "*")
        if isinstance(node, ast.FormattedValue):
            return text(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        return "*"

    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = text(node.value)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    found = {
        text(node.args[0])
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id in ("symbol", "has")
    }
    imported = {
        text(node.args[0])
        for node in calls
        if isinstance(node.func, ast.Attribute) and node.func.attr == "import_module"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    return found, {name for name in imported if name.startswith(("torch._", "triton."))}


BOUNDARY = sorted(Path(symbols.__file__).parent.glob("*.py"))


def test_the_boundary_reaches_private_symbols_through_the_table_alone():
    """But for the modules whose attributes it replaces, and the barriers, which are written in
    Triton's own decorators."""
    allowed = {
        "symbols": {"torch._inductor.config"},
        "gluon": {
            "torch._inductor.runtime.triton_heuristics",
            "triton.experimental.gluon.language._semantic",
        },
        "gluon_barriers": {"triton.experimental.gluon.language.nvidia.hopper", "triton.language"},
    }
    for path in BOUNDARY:
        _, imported = named_in(path)
        assert imported <= allowed.get(path.stem, set()), path


def test_every_symbol_of_the_table_is_used():
    named = {name for path in BOUNDARY for name in named_in(path)[0]}
    named |= set(inductor.EXPORTS.values()) | set(gluon._SYMBOLS.values())
    settings = {name for name in symbols.SYMBOLS if name.startswith("torch._inductor.config:")}
    text = "".join(path.read_text(encoding="utf-8") for path in BOUNDARY)
    for name, needed in symbols.SYMBOLS.items():
        last = name.rpartition(":")[2].rpartition(".")[2]
        is_member = "." in name.rpartition(":")[2] or needed.is_patched
        is_member |= f"{name.rpartition(':')[0]}:" in symbols.SYMBOLS
        assert (
            name in named
            or (name in settings and f'"{name.rpartition(":")[2]}"' in text)
            or (is_member and last in text)
        ), name


def test_the_readme_of_the_boundary_names_every_symbol():
    readme = (Path(symbols.__file__).parent / "README.md").read_text(encoding="utf-8")
    for needed in symbols.SYMBOLS.values():
        path = needed.names[0].rpartition(":")[2]
        newest = path.split("|")[0]
        assert not path or f"`{newest}`" in readme, needed.names[0]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = compat.no_such_name


@pytest.mark.parametrize("name", sorted(compat.EXPORTS))
def test_a_reexport_is_the_symbol_itself(name):
    assert getattr(compat, name) is symbols.symbol(compat.EXPORTS[name])


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
    virtualized = symbols.symbol("torch._inductor.virtualized:V")

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


# ------------------------------------------------------------------------------------------
# casts that narrow


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_cast_that_narrows_is_kept_where_that_is_wanted(is_wanted):
    ordinary = narrow_casts._checks_width(lambda match: True, lambda: is_wanted)

    def drops(inner, outer):
        return ordinary(SimpleNamespace(kwargs={"dtype1": inner, "dtype2": outer}))

    assert drops(torch.bfloat16, torch.float32) is not is_wanted
    assert drops(torch.float32, torch.bfloat16)
    assert drops(torch.bfloat16, torch.float16)
    assert not narrow_casts._checks_width(lambda match: False, lambda: False)(
        SimpleNamespace(kwargs={})
    )


def test_inductors_pattern_is_found():
    importlib.import_module("inductor_quant.backend")  # registers with Inductor
    [entry] = narrow_casts._entries()
    assert entry.extra_check.__module__ == narrow_casts.__name__
