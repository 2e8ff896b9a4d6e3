"""``tile_rejection`` knows the limits of a device, and the tables stay inside them."""

from __future__ import annotations

import dataclasses

import pytest

from inductor_quant.errors import OptionError
from inductor_quant.kernels import KERNELS
from inductor_quant.kernels.config import GemmConfig, parse_config, shared_memory, tile_rejection
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.spec.decisions import RejectionCode

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
L40S = Device(arch=89, num_sms=142, shared_memory=101376)
GOOD = GemmConfig(128, 128, 128, num_warps=8, num_stages=3)


def test_a_configuration_that_fits_is_legal():
    assert tile_rejection(GOOD, H200, element_bytes=1) is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"block_m": 96}, RejectionCode.BLOCK_SHAPE),
        ({"block_m": 8}, RejectionCode.BLOCK_SHAPE),
        ({"block_n": 8}, RejectionCode.BLOCK_SHAPE),
        ({"block_k": 16}, RejectionCode.BLOCK_SHAPE),
        ({"num_warps": 3}, RejectionCode.BLOCK_SHAPE),
        ({"num_stages": 0}, RejectionCode.BLOCK_SHAPE),
        ({"group_m": 0}, RejectionCode.BLOCK_SHAPE),
        ({"num_warps": 2}, RejectionCode.REGISTERS),
        ({"num_stages": 8}, RejectionCode.SHARED_MEMORY),
    ],
)
def test_what_cannot_run_is_rejected_with_its_code(change, code):
    rejection = tile_rejection(dataclasses.replace(GOOD, **change), H200, element_bytes=1)
    assert rejection is not None
    assert rejection.code == code
    assert str(dataclasses.replace(GOOD, **change)).split("_")[0] in rejection.detail


def test_the_limit_is_the_devices():
    deep = dataclasses.replace(GOOD, num_stages=4)
    assert shared_memory(deep, 1) == 4 * (128 + 128) * 128
    assert tile_rejection(deep, H200, element_bytes=1) is None
    assert tile_rejection(GOOD, L40S, element_bytes=1) is None
    rejection = tile_rejection(deep, L40S, element_bytes=1)
    assert rejection is not None
    assert rejection.code == RejectionCode.SHARED_MEMORY


def test_operands_in_registers_leave_room_for_fewer_accumulators():
    """128 accumulators per thread fit with wgmma and spill elsewhere."""
    half_the_warps = dataclasses.replace(GOOD, num_warps=4, num_stages=2)
    assert tile_rejection(half_the_warps, H200, element_bytes=1) is None
    rejection = tile_rejection(half_the_warps, L40S, element_bytes=1)
    assert rejection is not None
    assert rejection.code == RejectionCode.REGISTERS


def test_a_configuration_reads_back_from_its_text():
    assert parse_config(str(GOOD)) == GOOD
    with pytest.raises(OptionError, match="128x128x64_w4_s3_g8"):
        parse_config("128x128")


def test_a_symbolic_k_is_never_a_multiple_of_the_block():
    assert Problem(16, 16, 256).is_even_k(GOOD.block_k)
    assert not Problem(16, 16, 200).is_even_k(GOOD.block_k)
    assert not Problem(16, 16, 256, k_is_static=False).is_even_k(GOOD.block_k)


class TestTable:
    loaded = cost_model.load("w8a8_mm", 90)

    @pytest.mark.parametrize("entry", loaded.configs, ids=lambda c: str(c.config))
    def test_each_configuration_is_legal_where_it_was_measured(self, entry):
        assert tile_rejection(entry.config, H200, element_bytes=1) is None
        assert entry.fixed_us > 0
        assert entry.step_us + entry.step_us_per_cta > 0
        assert entry.ctas_per_sm >= 1
        if entry.config.block_m >= 64:  # with wgmma ``shared_memory`` is exact
            assert entry.ctas_per_sm * shared_memory(entry.config, 1) <= 228 * 1024

    def test_provenance_is_given(self):
        assert all(self.loaded.measured[name] for name in cost_model.PROVENANCE)

    def test_it_reads_back_what_it_writes(self):
        assert cost_model.parse(cost_model.to_json(self.loaded)) == self.loaded

    def test_a_measured_shape_gets_its_own_winner(self):
        for row in self.loaded.rows:
            ranked = self.loaded.rank(Problem(row.m, row.n, row.k), H200, element_bytes=1)
            assert ranked[0] == self.loaded.configs[row.config].config

    @pytest.mark.parametrize("m", [1, 2, 16, 100, 1000, 10**6])
    @pytest.mark.parametrize(("n", "k"), [(1, 1), (577, 859), (4096, 4096), (10**5, 64)])
    @pytest.mark.parametrize("device", [H200, L40S], ids=["h200", "l40s"])
    def test_every_shape_gets_several_legal_configurations(self, m, n, k, device):
        ranked = self.loaded.rank(Problem(m, n, k), device, element_bytes=1)
        assert len(ranked) >= 8
        assert len(set(ranked)) == len(ranked)
        assert all(tile_rejection(config, device, element_bytes=1) is None for config in ranked)

    def test_the_model_alone_is_near_the_measured_best(self):
        """Without the shape's own row, the model predicts the first guess to be about as fast as
        the measured winner."""
        no_rows = dataclasses.replace(self.loaded, rows=())
        by_config = {c.config: c for c in self.loaded.configs}
        ratios = []
        for row in self.loaded.rows:
            problem = Problem(row.m, row.n, row.k)
            first = no_rows.rank(problem, H200, element_bytes=1)[0]
            predicted = by_config[first].predict(problem, H200.num_sms)
            ratios.append(max(predicted, row.us) / min(predicted, row.us))
        assert sum(ratios) / len(ratios) < 1.2

    @pytest.mark.parametrize("damage", ["provenance", "duplicate", "index", "field"])
    def test_a_malformed_table_is_refused(self, damage):
        raw = cost_model.to_json(self.loaded)
        if damage == "provenance":
            raw["measured"] = {**raw["measured"], "gpu": ""}
        elif damage == "duplicate":
            raw["configs"].append(raw["configs"][0])
        elif damage == "index":
            raw["rows"][0]["config"] = len(raw["configs"])
        else:
            raw["configs"][0]["block_q"] = 1
        with pytest.raises((KeyError, TypeError, ValueError)):
            cost_model.parse(raw)


def test_kernels_have_distinct_names_that_inductor_can_register():
    names = [kernel.template_name for kernel in KERNELS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("inductor_quant_") for name in names)
