"""Each message says what was given, what is needed and what to do; all have one base."""

from __future__ import annotations

import inspect

import pytest
import torch

from inductor_quant import errors
from inductor_quant.errors import (
    ConfigTableError,
    InductorQuantError,
    OptionError,
    SpecError,
    UnsupportedTorchError,
)
from inductor_quant.ops import w8a8

CLASSES = [
    item
    for _, item in inspect.getmembers(errors, inspect.isclass)
    if item.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_has_our_base_and_a_docstring(error):
    assert issubclass(error, InductorQuantError)
    assert error.__doc__


def test_our_base_is_a_runtime_error():
    assert issubclass(InductorQuantError, RuntimeError)


@pytest.mark.parametrize("error", [OptionError, SpecError])
def test_errors_about_a_value_are_value_errors(error):
    assert issubclass(error, ValueError)


def test_unsupported_torch_says_version_supported_problems_and_what_to_do():
    error = UnsupportedTorchError("9.9.0", "2.11, 2.13", ["a.b is missing", "c.d has changed"])
    message = str(error)
    assert "torch 9.9.0" in message
    assert "2.11, 2.13" in message
    assert "\n  a.b is missing\n  c.d has changed\n" in message
    assert "python -m inductor_quant._compat`" in message
    assert error.problems == ("a.b is missing", "c.d has changed")


def test_unknown_option_says_given_closest_and_all():
    message = str(OptionError.unknown(["on_eror", "zzz"], ["on_error", "families"]))
    assert message == (
        "unknown option 'on_eror' (did you mean 'on_error'?), 'zzz'; "
        "the options are families, on_error"
    )


# ------------------------------------------------------------------------------------------
# SpecError, from the canonical op


def gemm_inputs(**changes):
    values = {
        "a": torch.zeros(4, 8, dtype=torch.int8),
        "b": torch.zeros(8, 6, dtype=torch.int8),
        "a_scale": torch.ones(4, 1),
        "b_scale": torch.ones(1, 6),
        "bias": torch.ones(6),
        "out_dtype": torch.float32,
    }
    return {**values, **changes}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"a": torch.zeros(4, 8)}, ["int8", "torch.float32"]),
        ({"b": torch.zeros(7, 6, dtype=torch.int8)}, ["[M, K]", "[K, N]", "[4, 8]", "[7, 6]"]),
        ({"a_scale": torch.ones(1, 4)}, ["a_scale is [1, 4]", "[4, 1] or [1, 1]"]),
        ({"b_scale": torch.ones(6, 1)}, ["b_scale is [6, 1]", "[1, 6] or [1, 1]"]),
        ({"b_scale": torch.ones(1, 6).double()}, ["b_scale is torch.float64", "torch.float32"]),
        ({"bias": torch.ones(5)}, ["bias is [5]", "must be [6]"]),
    ],
)
def test_a_spec_error_names_what_was_given_and_what_is_needed(changes, parts):
    with pytest.raises(SpecError) as caught:
        w8a8.spec_of(**gemm_inputs(**changes))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_k_that_overflows_is_refused_with_the_limit_and_the_way_out():
    k = w8a8.max_k("", "") + 1
    a = torch.zeros(1, k, dtype=torch.int8, device="meta")
    b = torch.zeros(k, 1, dtype=torch.int8, device="meta")
    with pytest.raises(SpecError, match="split the sum") as caught:
        w8a8.spec_of(a, b, None, None, None, out_dtype=torch.float32)
    assert str(k) in str(caught.value)
    assert str(w8a8.max_k("", "")) in str(caught.value)


def test_a_broken_table_is_named_with_its_cause(monkeypatch):
    from inductor_quant.kernels.tuning import cost_model

    def broken(raw):
        raise KeyError("configs")

    monkeypatch.setattr(cost_model, "parse", broken)
    with pytest.raises(ConfigTableError, match=r"w8a8_mm_sm90\.json: KeyError\('configs'\)"):
        cost_model.load.__wrapped__("w8a8_mm", 90)
