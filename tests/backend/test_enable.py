"""``enable``, ``disable`` and ``enabled``: whom they reach, and that they leave no trace."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from inductor_quant import backend, collect
from inductor_quant._compat import inductor as compat
from inductor_quant.errors import OptionError
from inductor_quant.patterns.graph_pass import EARLY_SLOT, SLOT
from inductor_quant.simulate import generate
from inductor_quant.spec.decisions import RejectionCode

pytestmark = pytest.mark.compiles


class Own(CustomGraphPass):
    """A pass of the user."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return "own"

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


def is_rewritten(**arguments):
    """Whether a ``backend="inductor"`` compilation of this thread gives our kernel."""
    generated = generate(scaled, make_inputs, **arguments)
    return any("w8a8" in name for name in generated.kernels)


def in_thread(function):
    """``function()`` in a thread of its own, whose config is what it is for the process."""
    result = []

    def run():
        try:
            result.append((function(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [(value, error)] = result
    if error is not None:
        raise error
    return value


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """After each test the slot is empty for every thread."""
    yield
    backend.disable()
    assert compat.active_passes(SLOT) == ()
    assert in_thread(lambda: getattr(config, SLOT)) is None
    assert backend._open_blocks == 0


def test_without_enable_inductor_is_plain():
    assert not is_rewritten()


def test_enable_acts_until_disable():
    backend.enable()
    assert is_rewritten()
    backend.disable()
    assert not is_rewritten()


def test_enable_twice_and_disable_once_is_off():
    backend.enable()
    backend.enable()
    assert len(compat.active_passes(SLOT)) == 1
    backend.disable()
    assert not is_rewritten()


def test_disable_twice_or_without_enable_does_nothing():
    backend.disable()
    backend.disable()
    assert not is_rewritten()


def test_a_second_enable_replaces_the_options():
    backend.enable(families=())
    with collect() as report:
        assert not is_rewritten()
    assert [item.code for item in report.rejections] == [RejectionCode.FAMILY_DISABLED]
    backend.enable()
    assert is_rewritten()


def test_a_refused_enable_changes_nothing():
    with pytest.raises(OptionError, match="did you mean 'families'"):
        backend.enable(familes=())
    assert not is_rewritten()
    backend.enable()
    with pytest.raises(OptionError):
        backend.enable(max_choices=0)
    assert is_rewritten()


def test_enabled_acts_inside_the_block_only():
    with backend.enabled():
        assert is_rewritten()
    assert not is_rewritten()


def test_enabled_ends_with_an_exception():
    with pytest.raises(KeyError), backend.enabled():
        raise KeyError
    assert not is_rewritten()


def test_blocks_nest_and_the_inner_options_hold():
    with backend.enabled():
        with backend.enabled(families=()):
            assert not is_rewritten()
        assert is_rewritten()
    assert not is_rewritten()


def test_a_block_inside_enable_takes_its_own_options_and_gives_them_back():
    backend.enable()
    with backend.enabled(families=()):
        assert not is_rewritten()
    assert is_rewritten()


def test_disable_inside_a_block_leaves_the_block_on():
    backend.enable()
    with backend.enabled():
        backend.disable()
        assert is_rewritten()
    assert not is_rewritten()


# ------------------------------------------------------------------------------------------
# threads


def test_enable_reaches_other_threads():
    backend.enable()
    assert in_thread(is_rewritten)
    backend.disable()
    assert not in_thread(is_rewritten)


def test_enable_in_a_thread_reaches_the_others():
    in_thread(backend.enable)
    assert in_thread(is_rewritten)
    in_thread(backend.disable)
    assert not in_thread(is_rewritten)


def test_a_block_does_not_reach_other_threads():
    with backend.enabled():
        assert not in_thread(is_rewritten)
        assert is_rewritten()


def test_blocks_of_two_threads_have_their_own_options():
    def other():
        with backend.enabled(families=()):
            return is_rewritten()

    with backend.enabled():
        assert in_thread(other) is False
        assert is_rewritten()


def test_a_block_that_closes_leaves_one_of_another_thread_open():
    opened, close = threading.Event(), threading.Event()
    result = []

    def other():
        with backend.enabled():
            opened.set()
            close.wait(60)
            result.append(is_rewritten())

    thread = threading.Thread(target=other)
    with backend.enabled():
        thread.start()
        opened.wait(60)
    close.set()
    thread.join()
    assert result == [True]


def test_a_block_that_closes_does_not_take_the_pass_from_one_that_opens_meanwhile(monkeypatch):
    closing, opened, closed = threading.Event(), threading.Event(), threading.Event()
    uninstall = compat.uninstall_globally
    seen = []

    def slow_uninstall(*args):
        closing.set()
        opened.wait(0.5)  # comes in time only if nothing keeps the other thread out
        uninstall(*args)

    def other():
        closing.wait(60)
        with backend.enabled():
            opened.set()
            closed.wait(60)
            seen.extend(compat.active_passes(SLOT))

    thread = threading.Thread(target=other)
    thread.start()
    monkeypatch.setattr(compat, "uninstall_globally", slow_uninstall)
    with backend.enabled():
        pass
    closed.set()
    thread.join()
    assert seen == [backend._ambient_pass()]


# ------------------------------------------------------------------------------------------
# passes of the user


def test_the_users_pass_runs_and_stays():
    own = Own()
    with config.patch({SLOT: own}):
        backend.enable()
        assert compat.active_passes(SLOT)[0] is own
        assert is_rewritten()
        assert own.calls == 1
        backend.disable()
        assert compat.active_passes(SLOT) == (own,)
        assert not is_rewritten()
        assert own.calls == 2


def test_a_block_keeps_the_users_pass_too():
    own = Own()
    with config.patch({SLOT: own}):
        with backend.enabled():
            assert is_rewritten()
        assert compat.active_passes(SLOT) == (own,)
    assert own.calls == 1


def test_enable_changes_no_other_entry_of_the_config():
    before = config.get_config_copy()
    backend.enable()
    during = config.get_config_copy()
    assert {name for name in during if during[name] != before[name]} == {EARLY_SLOT, SLOT}
    backend.disable()
    assert config.get_config_copy() == before


def test_a_disabled_plugin_is_not_enabled(monkeypatch):
    monkeypatch.setenv("INDUCTOR_QUANT_DISABLE", "1")
    backend.enable()
    with backend.enabled():
        assert compat.active_passes(SLOT) == ()
        assert not is_rewritten()


def test_the_variable_also_stops_one_that_is_enabled_already(monkeypatch):
    backend.enable()
    monkeypatch.setenv("INDUCTOR_QUANT_DISABLE", "1")
    assert not is_rewritten()
