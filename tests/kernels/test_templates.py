"""Each template renders to valid Python for every combination of its options."""

from __future__ import annotations

import ast
import functools
import itertools

import jinja2
import pytest
import torch

from inductor_quant.kernels import KERNELS
from inductor_quant.kernels.codegen.weight import WeightCodegen
from inductor_quant.kernels.config import parse_config
from inductor_quant.kernels.problem import Problem, Weight, WeightTensor
from inductor_quant.kernels.scaled_mm.mm.kernel import W8A8_MM
from inductor_quant.kernels.scaled_mm.persistent.kernel import W8A8_PERSISTENT
from inductor_quant.kernels.weight_only.mm.kernel import WEIGHT_ONLY_MM
from inductor_quant.ops import weight_only
from tests.support.gemms import formats
from tests.support.gemms.formats import FORMATS

W8A8_FLAGS = (
    "HAS_A_SCALE",
    "A_SCALE_PER_TOKEN",
    "HAS_B_SCALE",
    "B_SCALE_PER_CHANNEL",
    "HAS_BIAS",
    "EVEN_K",
    "MASK_M",
)
# A zero point of a (constant or tensor) or of b; column sums given or not; exact or not.
ZEROS = [
    dict.fromkeys(
        (
            *("HAS_A_ZERO_POINT", "A_ZERO_PER_TOKEN", "EXACT_A_ZERO", "HAS_B_SUM", "SUM_B"),
            *("HAS_B_ZERO_POINT", "B_ZERO_PER_CHANNEL", "EXACT_B_ZERO"),
        ),
        False,
    )
    | dict.fromkeys(flags, True)
    for flags in (
        (),
        *(("HAS_B_SUM", f"EXACT_{x}_ZERO") for x in "AB"),
        *(("HAS_A_ZERO_POINT", "HAS_B_SUM", *more) for more in ((), ("EXACT_A_ZERO",))),
        *(("HAS_A_ZERO_POINT", "A_ZERO_PER_TOKEN", x) for x in ("HAS_B_SUM", "SUM_B")),
        *(("HAS_B_ZERO_POINT", *more) for more in ((), ("B_ZERO_PER_CHANNEL", "EXACT_B_ZERO"))),
        ("HAS_A_ZERO_POINT", "HAS_B_SUM", "HAS_B_ZERO_POINT"),
    )
]
WEIGHT_ONLY_FLAGS = ("HAS_COLUMN_SCALE", "COLUMN_SCALE_PER_CHANNEL", "HAS_BIAS", "MASK_M")


# Parses each template once, not for each combination.
template = functools.cache(functools.partial(jinja2.Template, undefined=jinja2.StrictUndefined))


def render(source: str, **constants: object) -> tuple[str, list[str]]:
    """The template rendered with stubs for Inductor's hooks, and the inputs that it declares."""
    declared: list[str] = []

    def def_kernel(*names: str) -> str:
        declared.extend(names)
        return f"def kernel({', '.join(names)}):"

    text = template(source).render(
        def_kernel=def_kernel,
        size=lambda name, dim: f"{name}_size{dim}",
        stride=lambda name, dim: f"{name}_stride{dim}",
        store_output=lambda indices, value, mask, **_: f"tl.store({value}, {mask})",
        **constants,
    )
    return text, declared


def combinations(flags: tuple[str, ...]) -> list[dict[str, bool]]:
    return [
        dict(zip(flags, values, strict=True))
        for values in itertools.product((False, True), repeat=len(flags))
    ]


def names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


UNGROUPED = {"QUANT_K": 0, "A_SCALE_GROUPED": False, "B_SCALE_GROUPED": False}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_every_combination_parses_and_uses_what_it_declares(alpha):
    for kernel, flags, zeros in [
        *((W8A8_MM, flags, ZEROS[0]) for flags in combinations(W8A8_FLAGS)),
        *itertools.product((W8A8_MM, W8A8_PERSISTENT), combinations(W8A8_FLAGS)[::21], ZEROS[1:]),
    ]:
        if kernel is W8A8_PERSISTENT and zeros["SUM_B"]:
            continue
        number = 3 if zeros["HAS_B_SUM"] or zeros["SUM_B"] else 0
        constants = {**flags, **zeros, **UNGROUPED, "ALPHA": alpha, "A_ZERO": number}
        constants["LOADS_EARLY"] = is_early = flags["EVEN_K"]
        constants["IS_INTEGER"] = True
        constants["SWAP_AB"] = swaps = flags["MASK_M"]
        text, declared = render(kernel.source(), **constants)
        names = names_in(text)
        assert set(declared) <= names
        assert ("b.T, a.T" in text) == (swaps and kernel is W8A8_MM)
        assert ("ALPHA" in names) == (alpha != 1.0)
        assert ("BIAS" in declared) == flags["HAS_BIAS"]
        assert ("B_SUM" in declared) == zeros["HAS_B_SUM"]
        if kernel is W8A8_MM and flags["HAS_BIAS"]:
            assert is_early == (text.index("load(BIAS") < text.index("tl.dot("))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("config", ["16x32x64_w4_s3_g8", "16x64x32_w4_s3_g8"])
def test_every_format_parses_and_uses_what_it_declares(name, config):
    for (k, n), flags in itertools.product(
        [(128, 128), (192, 80)], combinations(WEIGHT_ONLY_FLAGS)
    ):
        weight = code_of(formats.build(name, k, n), config)
        text, declared = render(WEIGHT_ONLY_MM.source(), CODEGEN=weight, **flags)
        assert declared[: len(weight.sources) + 1] == ["X", *weight.sources]
        assert set(declared) <= names_in(text)
        assert ("BIAS" in declared) == flags["HAS_BIAS"]
        is_uneven = weight.k % weight.block_k != 0
        assert ("mask=" in text) == (is_uneven or flags["MASK_M"])


def code_of(packed: formats.Packed, config: str) -> WeightCodegen:
    spec = weight_only.make_spec(
        packed.format,
        [dtype for _, _, dtype in packed.tensors],
        x_dtype=torch.bfloat16,
        column_scale=None,
        out_dtype=torch.bfloat16,
        bias=False,
    )
    tensors = tuple(WeightTensor(dtype, shape) for _, shape, dtype in packed.tensors)
    k, n = packed.format.shape
    problem = Problem(16, n, k, weight=Weight(packed.format, tensors))
    return WEIGHT_ONLY_MM.codegen(spec, problem, parse_config(config))


def test_a_packed_word_and_a_row_of_scales_are_loaded_once_per_tile():
    """GPTQ with 8 values per int32 and groups of 32: not once per value."""
    code = code_of(formats.build("gptq", 128, 128), "16x64x32_w4_s3_g8")
    words, zeros, scales = 32 // 8 * 64 * 4, 64 // 8 * 4, 64 * 2
    assert code.loaded_bytes() == words + zeros + scales
    long = code_of(formats.build("gptq", 128, 128), "16x64x128_w4_s3_g8")
    assert long.loaded_bytes() == 4 * (words + zeros + scales)


def test_per_channel_scales_are_applied_after_the_loop():
    code = code_of(formats.build("int8_zero_channel", 128, 128), "16x64x32_w4_s3_g8")
    hooks = (lambda name, dim: "1", lambda name, dim: "128")
    assert "W2" not in code.tile(*hooks)
    assert "W3" not in code.tile(*hooks)
    assert code.columns(*hooks).count("out = out * ") == 2


def test_indices_and_shifts_from_a_tensor_are_clamped():
    """Autotuning runs on random data, which must not load out of bounds or shift by 32 or more. A
    4-bit code cannot leave a table of 16."""
    hooks = (lambda name, dim: "1", lambda name, dim: "128")

    def tile(name: str) -> str:
        return code_of(formats.build(name, 128, 128), "16x64x32_w4_s3_g8").tile(*hooks)

    assert "tl.minimum(tl.maximum(" in tile("act_order")
    assert "> 31), 31, " in tile("shift_table")
    assert "tl.minimum" not in tile("nf4")


def test_as_a_constant_the_weight_reads_as_its_format():
    """A Python literal, so that it can be part of the kernel's text and of cache keys."""
    for name in FORMATS:
        packed = formats.build(name, 128, 128)
        code = code_of(packed, "16x64x32_w4_s3_g8")
        assert ast.literal_eval(f"{code}") == ast.literal_eval(repr(code)) == str(packed.format)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_template_begins_with_its_formula(kernel):
    head = kernel.source().split("-#}")[0]
    assert head.startswith(("{#- out[m, ", "{#- out[k, n] = "))
