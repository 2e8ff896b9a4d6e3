"""Each template renders to valid Python for every combination of its options."""

from __future__ import annotations

import ast
import itertools

import jinja2
import pytest

from inductor_quant.kernels import KERNELS

FLAGS = (
    "HAS_A_SCALE",
    "A_SCALE_PER_TOKEN",
    "HAS_B_SCALE",
    "B_SCALE_PER_CHANNEL",
    "HAS_BIAS",
    "EVEN_K",
    "FEW_ROWS",
)


def render(source: str, **constants: object) -> tuple[str, list[str]]:
    """The template with stubs for Inductor's hooks; and the inputs that it declared."""
    declared: list[str] = []

    def def_kernel(*names: str) -> str:
        declared.extend(names)
        return f"def kernel({', '.join(names)}):"

    text = jinja2.Template(source, undefined=jinja2.StrictUndefined).render(
        def_kernel=def_kernel,
        size=lambda name, dim: f"{name}_size{dim}",
        stride=lambda name, dim: f"{name}_stride{dim}",
        store_output=lambda indices, value, mask, **_: f"tl.store({value}, {mask})",
        **constants,
    )
    return text, declared


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_every_combination_parses_and_uses_what_it_declares(kernel, alpha):
    for values in itertools.product((False, True), repeat=len(FLAGS)):
        text, declared = render(
            kernel.source(), ALPHA=alpha, **dict(zip(FLAGS, values, strict=True))
        )
        tree = ast.parse(text)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert set(declared) <= names
        assert ("ALPHA" in names) == (alpha != 1.0)
        assert ("BIAS" in declared) == values[FLAGS.index("HAS_BIAS")]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_template_begins_with_its_formula(kernel):
    head = kernel.source().split("-#}")[0]
    assert head.startswith("{#- out[m, n] = ")
