"""All weight-only producers: what their layers compute, and the graphs they give.

The recognizer is tested on the same registry. Here it is the registry that is tested: ``dense`` is
right, the graphs are those of the producers' real modules, and nothing of it is skipped in CI.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._inductor import config

from tests.support.producers.microscaling import MICROSCALING
from tests.support.producers.registry import (
    BY_INDEX,
    GIVEN,
    PARTS,
    PRODUCERS,
    REQUIRED_VARIABLE,
    Producer,
    anchors,
    capture,
    need,
    signature,
)
from tests.support.sampling import sampled

bf16, f16 = torch.bfloat16, torch.float16
ROOT = Path(__file__).parents[3]
K, N = 256, 128
# Relative, root of the mean square: eager rounds the weight and the result to 16 bits, some twice.
TOLERANCE = {bf16: 5e-3, f16: 1e-3}

pytestmark = pytest.mark.filterwarnings("ignore")

# The calls of the graph for 32 rows and a bias: op:dtype, or op where that is the last dtype.
# They are those of the package's own module on torch 2.13, op by op.
GRAPHS = {
    "torchao_int8_wo_row": """
        permute:i8 cvt:bf16 mm cvt reshape mul add
    """,
    "torchao_int8_wo_group64": """
        reshape:i8 cvt:bf16 reshape:i8 cvt:bf16 sub reshape:f32 mul reshape cvt:bf16 permute
        mm add
    """,
    "torchao_fp8_wo_row": """
        permute:f8_e4m3fn cvt:f32 permute mul cvt:bf16 mm add
    """,
    "torchao_intx4_wo_g32_sym": """
        reshape:i8 cvt:bf16 reshape:i8 cvt:bf16 sub reshape mul reshape permute addmm
    """,
    "torchao_intx4_wo_g32_asym": """
        reshape:i8 cvt:bf16 reshape:i8 cvt:bf16 sub reshape mul reshape permute addmm
    """,
    "hqq_4b_g64_ax1_fwd": """
        empty:bf16 slice bitwise_and:u8 __rshift__ copy:bf16 slice_scatter slice
        bitwise_and:u8 copy:bf16 slice_scatter sub mul reshape permute mm add
    """,
    "hqq_8b_g64_ax1_fwd": """
        cvt:bf16 sub mul reshape permute mm add
    """,
    "ct_pack_int4_g64_sym": """
        view:u8 bitwise_and unsqueeze __rshift__ unsqueeze cat view:i8 reshape sub reshape
        cvt:bf16 unsqueeze mul reshape permute addmm
    """,
    "ct_int8_chan_wo": """
        cvt:bf16 mul permute addmm
    """,
    "quanto_qint8_wo": """
        quanto.qbytes_mm:bf16 add
    """,
    "gptq_gm_4b_g64_base": """
        cvt:i64 index:f16 unsqueeze:i32 expand bitwise_right_shift cvt:i8 bitwise_and
        reshape unsqueeze:i32 expand bitwise_right_shift cvt:i8 bitwise_and reshape cvt:i64
        index:i8 sub mul:f16 mm add
    """,
    "gptq_gm_8b_g64_base": """
        cvt:i64 index:f16 unsqueeze:i32 expand bitwise_right_shift cvt:i16 bitwise_and
        reshape unsqueeze:i32 expand bitwise_right_shift cvt:i16 bitwise_and reshape cvt:i64
        index:i16 sub mul:f16 mm add
    """,
    "awq_autoawq_g64": """
        const:i64 unsqueeze:i32 iota:i64 unsqueeze unsqueeze bitwise_right_shift cvt:i8
        reshape iota:i32 reshape lift_fresh_copy:i64 index:i32 reshape index:i8 bitwise_and
        unsqueeze:i32 unsqueeze:i64 unsqueeze bitwise_right_shift cvt:i8 reshape index
        bitwise_and unsqueeze expand clone reshape sub unsqueeze:f16 expand clone reshape
        mul mm add unsqueeze reshape
    """,
    "gptfast_woq_int8": """
        cvt:bf16 permute mm mul add
    """,
    "gptfast_woq_int8_mul_sum": """
        cvt:f32 unsqueeze cvt:bf16 permute cvt:f32 unsqueeze mul sum cvt:bf16 mul add
    """,
    "fp8_block_wo_dequant_view": """
        cvt:f32 reshape unsqueeze unsqueeze mul cvt:bf16 reshape permute addmm
    """,
    "gptfast_int4_k32_arange": """
        unsqueeze:i32 iota unsqueeze unsqueeze __rshift__ bitwise_and bitwise_xor sub
        reshape cvt:bf16 unsqueeze mul permute addmm
    """,
    "gptfast_int4_u8_group_stack": """
        bitwise_and:u8 unsqueeze __rshift__ unsqueeze cat reshape cvt:bf16 sub mul reshape
        permute addmm
    """,
}

given = pytest.mark.parametrize("producer", GIVEN, ids=str)


def inputs(producer: Producer, dtype: torch.dtype, *lead: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*lead, K).to(dtype)


def expected(producer: Producer, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layer in fp64."""
    weight = producer.dense(module)
    assert weight.shape == (N, K)
    assert weight.dtype == torch.float64
    y = x.double() @ weight.T
    found = getattr(module, "bias", None)
    if found is None and isinstance(module, torch.nn.Sequential):
        found = module[0].bias
    return y if found is None else y + found.double()


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return ((y.double() - reference).norm() / reference.norm()).item()


def leads(producer: Producer) -> list[tuple[int, ...]]:
    return [(1,)] if producer.max_rows == 1 else [(1,), (32,), (2, 16)]


# ------------------------------------------------------------------------------------------
# what the layers compute


@pytest.mark.one_in(2)
@pytest.mark.parametrize("producer", sampled(PRODUCERS.values(), 3, str))
def test_the_eager_layer_multiplies_by_the_dense_weight(producer: Producer) -> None:
    need(producer)
    for dtype in producer.dtypes:
        for bias, lead in ((True, leads(producer)[-1]), (False, (1,))):
            module = producer.make(dtype, K, N, bias)
            x = inputs(producer, dtype, *lead)
            with torch.no_grad():
                y = module(x)
            assert y.shape == (*lead, N)
            assert y.dtype == dtype
            assert error(y, expected(producer, module, x)) < TOLERANCE[dtype], (bias, lead)


@pytest.mark.parametrize("producer", sampled(PRODUCERS.values(), 3, str))
def test_a_layer_is_the_same_each_time_and_has_scales_that_differ(producer: Producer) -> None:
    need(producer)
    state = torch.random.get_rng_state()
    module, again = producer.make(), producer.make()
    assert torch.equal(torch.random.get_rng_state(), state)
    weight = producer.dense(module)
    assert torch.equal(weight, producer.dense(again))
    if producer.expected_matches and producer.group_n == 1:
        least = 2 if producer in MICROSCALING else N // 2  # powers of two: few differ
        assert weight.abs().amax(1).unique().numel() > least


SMALL = [p for p in PRODUCERS.values() if p.bits <= 4 and p.group_size != BY_INDEX]


@pytest.mark.parametrize("producer", sampled(SMALL, 3, str))
def test_a_group_has_as_many_values_as_its_bits_can_tell_and_two_groups_more(
    producer: Producer,
) -> None:
    need(producer)
    weight = producer.dense(producer.make())
    size = producer.group_size or K

    def most_values(size: int) -> int:
        return max(len(group.unique()) for group in weight.reshape(-1, size)[:64])

    assert most_values(size) <= 2**producer.bits
    assert size == 1 or most_values(2 * size) > 2**producer.bits or producer.group_n is None


# ------------------------------------------------------------------------------------------
# the graphs (what they have in common: recognizers/test_weight_only.py)


@pytest.mark.one_in(4)
@given
def test_the_graph_is_that_of_the_producer_itself(producer: Producer) -> None:
    need(producer)
    x = inputs(producer, producer.dtypes[0], producer.max_rows or 32)
    assert signature(capture(producer.make(k=K, n=N), x)) == GRAPHS[producer.name].split()


@pytest.mark.one_in(6)
@given
def test_rows_and_dtype_change_no_op_of_the_weight(producer: Producer) -> None:
    """Except reshapes, and AWQ's casts of the activation."""
    need(producer)
    usual = ops(GRAPHS[producer.name].split())
    dtype = producer.dtypes[-1]
    for lead in leads(producer)[::2]:
        torch._dynamo.reset()
        graph = capture(producer.make(dtype, K, N), inputs(producer, dtype, *lead))
        assert len(anchors(graph, producer)) == 1
        assert ops(signature(graph)) == usual


@pytest.mark.one_in(6)
@given
def test_without_a_bias_nothing_is_added(producer: Producer) -> None:
    need(producer)
    x = inputs(producer, producer.dtypes[0], producer.max_rows or 32)
    graph = capture(producer.make(k=K, n=N, bias=False), x)
    found, usual = ops(signature(graph)), ops(GRAPHS[producer.name].split())
    if producer.bias == "addmm":
        usual = usual - Counter(["addmm"]) + Counter(["mm"])
    else:
        usual -= Counter(["add"])
    assert found == usual


def ops(calls: list[str]) -> Counter[str]:
    """How often each op is called, except reshapes and casts."""
    names = [re.sub(":.*", "", call) for call in calls]
    return Counter(name for name in names if name not in ("reshape", "unsqueeze", "cvt"))


# ------------------------------------------------------------------------------------------
# the registry


def test_every_near_miss_says_why() -> None:
    for producer in PRODUCERS.values():
        assert bool(producer.reason) == (producer.expected_matches == 0), producer


def test_the_listed_producers_are_there() -> None:
    assert set(GRAPHS) == {producer.name for producer in GIVEN}
    assert all(producer.expected_matches == 1 for producer in GIVEN)


def test_no_two_names_are_the_same() -> None:
    assert len(PRODUCERS) == sum(map(len, PARTS))


def test_shift_tables_and_groups_are_what_has_to_be_read() -> None:
    for producer in PRODUCERS.values():
        module = producer.make() if producer.reads else None
        for name in producer.reads:
            assert not getattr(module, name).is_floating_point()


def test_torchao_leaves_no_options_behind() -> None:
    producer = PRODUCERS["torchao_int8_wo_row"]
    need(producer)
    producer.make()
    assert not config.coordinate_descent_tuning
    assert not config.force_fuse_int_mm_with_mul


def test_ci_installs_every_package_at_one_version_and_requires_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(
        requirement.split("==")
        for requirement in extras["optional-dependencies"]["test"]
        if "==" in requirement
    )
    needed = {producer.needs for producer in PRODUCERS.values()} - {None}
    assert {str(name).replace("_", "-").replace(".", "-") for name in needed} <= set(pinned)
    assert f"export {REQUIRED_VARIABLE}=1" in (ROOT / ".ci" / "run").read_text()


def test_a_missing_package_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = dataclasses.replace(PRODUCERS["dense"], needs="no_such_quantizer")
    monkeypatch.delitem(os.environ, REQUIRED_VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no_such_quantizer"):
        need(missing)
    monkeypatch.setenv(REQUIRED_VARIABLE, "1")
    with pytest.raises(ModuleNotFoundError, match="no_such_quantizer"):
        need(missing)
