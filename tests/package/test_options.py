"""Options: what is accepted, what is refused and how, and which modules they select."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from inductor_quant.errors import InductorQuantError, OptionError
from inductor_quant.kernels.config import GemmConfig, parse_config
from inductor_quant.options import (
    DISABLE_VARIABLE,
    FAMILIES,
    PREFIX,
    Options,
    is_disabled_by_environment,
)


def refusal(**values: object) -> str:
    """The message with which ``values`` are refused."""
    with pytest.raises(OptionError) as caught:
        Options.make(values)
    return str(caught.value)


def test_defaults_rewrite_every_family_in_every_module():
    options = Options()
    assert options.families == FAMILIES
    assert options.selects("")
    assert options.selects("layers.0.mlp.up")
    assert options.on_error == "fallback"


def test_make_without_values_is_the_default():
    assert Options.make({}) == Options()


def test_options_are_hashable_and_equal_by_value():
    assert hash(Options(families=("w8a8",))) == hash(Options(families=["w8a8"]))
    assert Options(max_choices=3) != Options(max_choices=4)


def test_options_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().max_choices = 3


def test_repr_names_every_field_because_it_is_part_of_the_cache_key():
    text = repr(Options())
    assert all(field.name in text for field in dataclasses.fields(Options))


def test_options_survive_pickling():
    options = Options(exclude_modules=("lm_head",), max_choices=2)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("name", ["families", "include_modules", "exclude_modules"])
def test_a_list_becomes_a_tuple(name):
    value = ["w8a8"]
    assert getattr(Options.make({name: value}), name) == ("w8a8",)


# ------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize("name", ["families", "include_modules", "exclude_modules", "configs"])
@pytest.mark.parametrize("value", ["w8a8", (1,), [None]])
def test_a_string_or_a_sequence_of_others_is_refused(name, value):
    message = refusal(**{name: value})
    assert f"{name}={value!r}" in message
    assert "sequence of strings" in message


@pytest.mark.parametrize("name", ["families", "include_modules", "exclude_modules", "configs"])
@pytest.mark.parametrize("value", [None, 3, {"w8a8"}, (name for name in ("w8a8",))])
def test_what_is_no_sequence_at_all_is_refused(name, value):
    assert "sequence of strings" in refusal(**{name: value})


def test_an_unknown_family_is_named_beside_those_that_exist():
    message = refusal(families=("w8a8", "w7a9"))
    assert "w7a9" in message
    assert all(family in message for family in FAMILIES)


@pytest.mark.parametrize("value", ["ignore", None, True, ["raise"]])
def test_on_error_takes_two_values(value):
    message = refusal(on_error=value)
    assert repr(value) in message
    assert '"fallback"' in message
    assert '"raise"' in message


@pytest.mark.parametrize("value", [True, 1.0, "3", None])
def test_max_choices_must_be_an_integer(value):
    message = refusal(max_choices=value)
    assert repr(value) in message
    assert "integer" in message


@pytest.mark.parametrize("value", [0, -1])
def test_max_choices_must_be_at_least_one(value):
    message = refusal(max_choices=value)
    assert str(value) in message
    assert "at least 1" in message


@pytest.mark.parametrize(
    "text", ["64x64x64", "64x64x64_w4_s3", "64x64x64_w4_s3_g8_k0", "axbxc_w4_s3_g8", "", " "]
)
def test_a_configuration_that_cannot_be_read_is_refused_at_once(text):
    message = refusal(configs=("64x64x64_w4_s3_g8", text))
    assert f"{text!r} is not a configuration" in message
    assert "128x128x64_w4_s3_g8" in message


def test_the_configurations_that_options_take_are_those_that_the_kernels_read():
    config = GemmConfig(32, 64, 128, num_warps=4, num_stages=3, group_m=2)
    assert Options(configs=[str(config)]).configs == (str(config),)
    assert parse_config(str(config)) == config


def test_an_unknown_name_is_refused_with_a_suggestion_and_the_list():
    message = refusal(familes=("w8a8",))
    assert "'familes'" in message
    assert "did you mean 'families'?" in message
    assert all(field.name in message for field in dataclasses.fields(Options))


def test_an_unknown_name_like_none_is_refused_without_a_suggestion():
    message = refusal(zzz=1)
    assert "'zzz'" in message
    assert "did you mean" not in message


def test_every_unknown_name_is_listed():
    message = refusal(familes=(), on_eror="raise")
    assert "'familes'" in message
    assert "'on_eror'" in message


def test_an_option_error_is_a_value_error_and_one_of_ours():
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, InductorQuantError)


# ------------------------------------------------------------------------------------------
# from torch.compile's options


def test_split_takes_ours_by_prefix_and_leaves_the_rest():
    ours, inductors = Options.split(
        {f"{PREFIX}families": ("w8a8",), "max_autotune": True, "triton.cudagraphs": False}
    )
    assert ours == {"families": ("w8a8",)}
    assert inductors == {"max_autotune": True, "triton.cudagraphs": False}


@pytest.mark.parametrize("options", [None, {}])
def test_split_of_nothing_is_nothing(options):
    assert Options.split(options) == ({}, {})


def test_split_keeps_a_name_without_our_dot():
    ours, inductors = Options.split({"inductor_quantum": 1, "inductor_quant": 2})
    assert ours == {}
    assert inductors == {"inductor_quantum": 1, "inductor_quant": 2}


def test_split_leaves_its_argument_alone():
    options = {f"{PREFIX}max_choices": 1, "max_autotune": True}
    Options.split(options)
    assert options == {f"{PREFIX}max_choices": 1, "max_autotune": True}


# ------------------------------------------------------------------------------------------
# modules


@pytest.mark.parametrize(
    ("include", "exclude", "module", "selected"),
    [
        ((), (), "", True),
        ((), (), "layers.0.mlp", True),
        (("layers.*.mlp.*",), (), "layers.0.mlp.up", True),
        (("layers.*.mlp.*",), (), "layers.0.attention.q", False),
        (("layers.*.mlp.*",), (), "", False),
        (("layers.[01].*",), (), "layers.1.up", True),
        (("layers.[01].*",), (), "layers.2.up", False),
        (("a.*", "b.*"), (), "b.x", True),
        ((), ("lm_head",), "lm_head", False),
        ((), ("lm_head",), "model.lm_head", True),
        ((), ("*lm_head",), "model.lm_head", False),
        ((), ("lm_head",), "", True),
        (("layers.*",), ("*.up",), "layers.0.up", False),
        (("layers.*",), ("*.up",), "layers.0.down", True),
        (("Layers.*",), (), "layers.0", False),
    ],
)
def test_globs_select_modules_and_exclude_wins(include, exclude, module, selected):
    options = Options(include_modules=include, exclude_modules=exclude)
    assert options.selects(module) is selected


# ------------------------------------------------------------------------------------------
# the environment


@pytest.mark.parametrize(
    ("value", "disabled"), [(None, False), ("", False), ("0", False), ("1", True), ("true", True)]
)
def test_the_variable_disables_unless_empty_or_zero(monkeypatch, value, disabled):
    if value is None:
        monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(DISABLE_VARIABLE, value)
    assert is_disabled_by_environment() is disabled


def test_the_variable_has_the_documented_name():
    assert DISABLE_VARIABLE == "INDUCTOR_QUANT_DISABLE"
