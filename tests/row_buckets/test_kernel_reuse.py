"""Kernels that Triton compiles once though several graphs, or ranges of M, launch them."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch
from torch._inductor.utils import Placeholder

from inductor_quant import simulate
from inductor_quant._compat import kernel_names
from tests.support.forks import Program
from tests.support.producers.packed import Gptq

pytestmark = pytest.mark.compiles

bf16 = torch.bfloat16
layer = functools.partial(Gptq, bf16, 512, 384, False)


def prompt(model, x):
    return model(x)


def token(model, x):
    """Another graph around the same GEMM, in which it is the second kernel."""
    return model((x * 2).sum(1).to(bf16))


def make_inputs(*sizes, device):
    with torch.device(device):
        x = torch.zeros(*sizes, 512, dtype=bf16)
        torch._dynamo.mark_dynamic(x, 0)
        return layer().eval(), x


def gemms(fn, *sizes, m=40):
    """Inductor's name -> source of the GEMMs."""
    made = simulate.generate(
        fn, lambda device: make_inputs(m, *sizes, device=device), backend="inductor_quant"
    )
    return {name: text for name, text in made.kernels.items() if "_tem_" in name}


def function_of(source):
    """The function that Triton compiles."""
    return re.search(r"^def (.*?)^\S", source, re.M | re.S)[1]


def test_two_graphs_of_a_gemm_have_one_kernel():
    one, other = gemms(prompt), gemms(token, 3)
    assert not one.keys() & other.keys()
    [first], [second] = one.values(), other.values()
    assert function_of(first) == function_of(second)
    assert function_of(first).startswith("triton_tem_weight_only_")


def test_triton_compiles_it_once(fresh_triton_cache):
    hits = fresh_triton_cache
    for found in (gemms(prompt), gemms(token, 3), gemms(prompt, m=16)):
        for name, source in found.items():
            simulate.compile_kernel(name, source)
    assert hits == [False, True, False]


def test_another_kernel_has_another_name():
    functions = [function_of(*gemms(prompt, m=m).values()) for m in (16, 40)]
    names = {function.partition("(")[0] for function in functions}
    assert len(names) == 2


@pytest.fixture
def fresh_triton_cache(tmp_path, monkeypatch):
    """Whether Triton's cache had each kernel that is compiled."""
    from triton import knobs

    hits = []
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path)
        knobs.compilation.listener = lambda **how: hits.append(how["cache_hit"])
        yield hits


def test_a_source_without_the_placeholder_is_left_alone():
    assert kernel_names.named("def other(x):\n    pass\n", "w8a8_mm") == "def other(x):\n    pass\n"


def test_the_module_holds_the_function_under_both_names():
    name = str(Placeholder.KERNEL_NAME)
    source = kernel_names.named(f"def {name}(x):\n    return x + 1\n", "w8a8_mm")
    scope = {}
    exec(source.replace(name, "of_inductor"), scope)
    assert scope["of_inductor"](1) == 2
    assert scope["of_inductor"].__name__.startswith("triton_tem_w8a8_mm_")


PROGRAM = """
import json
from torch._dynamo.utils import counters
from triton import knobs
from inductor_quant import simulate
from tests.support.ranges import rows, session
from torch._inductor.async_compile import AsyncCompile

hits = []
knobs.compilation.listener = lambda **how: hits.append(how["cache_hit"])
with session(caches=True) as run:
    record = AsyncCompile.triton

    def compiled(self, name, source, **how):
        simulate.compile_kernel(name, source)
        return record(self, name, source, **how)

    AsyncCompile.triton = compiled
    found = [rows(run[m]) for m in (20, 40, 41, 70)]
    AsyncCompile.triton = record
print(json.dumps({
    "ranges": sum(found, []), "graphs": counters["inductor"]["fxgraph_cache_hit"],
    "known": sum(hits), "compiled": len(hits) - sum(hits),
}))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_anew(tmp_path, forks):
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    program = Program(PROGRAM, environment=caches)
    cold, warm = (json.loads(forks.run(program)[0]) for _ in range(2))
    ranges = ["17..22", "23..45", "65..90"]
    assert cold["ranges"] == warm["ranges"] == ranges
    assert (cold["graphs"], warm["graphs"]) == (0, 3)
    assert warm["compiled"] == 0
    assert warm["known"] == cold["compiled"] + cold["known"] >= 6
