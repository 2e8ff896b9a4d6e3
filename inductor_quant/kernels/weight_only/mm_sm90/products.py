"""Gluon statements of ``weight_only_mm_sm90``: the products of a tile, and which rows they have.

Rows of a power of two are one product. A tile of 96 rows has a product of its first 64, whose sums
are ``acc``, and one of those that are left, ``more``: both take the same W from registers. Of a
tile that ``has_halves`` and no more than ``few_rows`` these alone are multiplied.
"""

from __future__ import annotations

import torch


def products_of(block_m: int) -> tuple[int, int]:
    """The rows of a tile's first product, a power of two, and those that are left."""
    first = 1 << (block_m.bit_length() - 1)
    return first, block_m - first


def few_rows(block_m: int) -> int:
    """The first rows of a tile, which are multiplied alone if it has no more."""
    first, more = products_of(block_m)
    return first if more else block_m // 2


class Products:
    block_m: int
    first_m: int
    more_m: int
    x_dtype: torch.dtype
    warps: int
    has_halves: bool

    @property
    def x_bytes(self) -> int:
        return self.x_dtype.itemsize

    @property
    def few_m(self) -> int:
        return few_rows(self.block_m)

    def layouts_of_products(self) -> dict[str, str]:
        found = self._layouts("MMA", self.first_m)
        if self.more_m:
            found |= self._layouts("MORE_MMA", self.more_m)
        elif self.has_halves:
            found |= self._layouts("HALF_MMA", self.few_m)
        return found

    def _layouts(self, name: str, rows: int) -> dict[str, str]:
        """Those of sums, which is ``name``, and of W, of products with so many ``rows``."""
        sizes = f"[3, 0], [{self.warps}, 1], [16, {rows}, {32 // self.x_bytes}]"
        return {
            name: f"gl.NVMMADistributedLayout({sizes})",
            f"W_{name}": f"gl.DotOperandLayout(0, {name}, {4 // self.x_bytes})",
        }

    @property
    def names_of_sums(self) -> tuple[str, ...]:
        """Those of each product of a tile."""
        return ("acc", "more") if self.more_m else ("acc",)

    def sums(self) -> str:
        """Statements before the loop."""
        code = f"acc = gl.zeros([BLOCK_N, {self.first_m}], gl.float32, MMA)"
        more = f"more = gl.zeros([BLOCK_N, {self.more_m}], gl.float32, MORE_MMA)"
        return f"{code}\n{more}" if self.more_m else code

    def x_of(self, stage: str) -> str:
        return f"x_stages.index({stage}).permute((1, 0))"

    def multiplied(self, stage: str, i: int, count: int) -> str:
        """Statements that start the product of ``w`` with x of a stage, the ``i``-th of ``count``
        in the loop's body, and wait for the one before."""
        x = self.x_of(stage)
        if not self.more_m:
            return _started("acc", x)
        more = f"x_more.index({stage}).permute((1, 0))"
        w = "gl.convert_layout(w, W_MORE_MMA, assert_trivial=True)"
        return "\n".join(
            [
                f"acc = warpgroup_mma(w, {x}, acc, is_async=True)",
                f"more = warpgroup_mma({w}, {more}, more, is_async=True)",
                "acc, more = warpgroup_mma_wait(2, deps=(acc, more))",
            ]
        )

    def waited(self) -> str:
        """The statement that waits for all products of ``sums``."""
        names = ", ".join(self.names_of_sums)
        return f"{names} = warpgroup_mma_wait(0, deps=({names},))"

    def sums_of_few(self) -> str:
        """``sums`` of a tile's first rows; the others are 0."""
        if self.more_m:
            return self.sums()
        return f"half = gl.zeros([BLOCK_N, {self.few_m}], gl.float32, HALF_MMA)"

    def multiplied_few(self, stage: str) -> str:
        """``multiplied``, with the first rows alone."""
        if self.more_m:
            return _started("acc", self.x_of(stage))
        x = f"x_stages.index({stage}).slice(0, {self.few_m}).permute((1, 0))"
        w = "w = gl.convert_layout(w, W_HALF_MMA, assert_trivial=True)"
        return f"{w}\n{_started('half', x)}"

    def whole_sums(self) -> str:
        """Statements that wait for the last product of the first rows, and leave in ``acc`` the
        sums of a tile."""
        if self.more_m:
            return "acc = warpgroup_mma_wait(0, deps=(acc,))"
        none = f"gl.zeros([BLOCK_N, {self.few_m}], gl.float32, HALF_MMA)"
        both = f"gl.permute(gl.join(half, {none}), (0, 2, 1))"
        return "\n".join(
            [
                "half = warpgroup_mma_wait(0, deps=(half,))",
                f"acc = gl.reshape({both}, [BLOCK_N, BLOCK_M])",
                "acc = gl.convert_layout(acc, MMA, assert_trivial=True)",
            ]
        )

    def strips_of_products(self) -> str:
        """Statements that leave in ``strip<i>`` the sums of as many rows as ``more`` has each."""
        assert 2 * self.more_m == self.first_m
        apart = f"gl.permute(gl.reshape(acc, [BLOCK_N, 2, {self.more_m}]), (0, 2, 1))"
        strips = ", ".join(f"strip{i}" for i in range(2))
        return "\n".join(
            [
                f"{strips} = gl.split({apart})",
                *(
                    f"strip{i} = gl.convert_layout(strip{i}, MORE_MMA, assert_trivial=True)"
                    for i in range(2)
                ),
                "strip2 = more",
            ]
        )


def _started(sums: str, x: str) -> str:
    start = f"{sums} = warpgroup_mma(w, {x}, {sums}, is_async=True)"
    return f"{start}\n{sums} = warpgroup_mma_wait(1, deps=({sums},))"
