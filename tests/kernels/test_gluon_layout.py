"""Layouts of Gluon from named bits."""

from __future__ import annotations

from inductor_quant.kernels.codegen.gluon_layout import layout, positions


def test_a_layout_has_a_basis_vector_per_bit():
    tile = layout(
        ((("s", 2),), (("r", 2), ("t", 4)), (("g", 8), ("v0", 2))),
        lanes=(("t", 4), ("g", 8)),
        warps=(("w", 2), ("s", 2)),
    )
    assert tile.registers == ((0, 0, 1), (0, 4, 0))  # neighbours along the last axis first
    assert tile.lanes == ((0, 1, 0), (0, 2, 0), (0, 0, 2), (0, 0, 4), (0, 0, 8))
    assert tile.warps == ((0, 0, 0), (1, 0, 0))  # the tile has no w: both warps have the same
    assert tile.shape == (2, 8, 16)
    assert tile.coarser(4).lanes[2:] == ((0, 0, 0), (0, 0, 1), (0, 0, 2))
    assert tile.split(4).lanes[2:] == ((0, 0, 0, 2), (0, 0, 1, 0), (0, 0, 2, 0))
    assert positions("L", 3, 1, 8) == (
        "gl.expand_dims(gl.expand_dims("
        "gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L))), 0), 2)"
    )
