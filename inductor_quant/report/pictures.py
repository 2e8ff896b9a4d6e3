"""Pictures of measured times, for ``explain(...).plot`` and the benchmarks; with matplotlib."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Points = Sequence[tuple[float, float]]
Target = str | os.PathLike[str]


@contextlib.contextmanager
def _axes(path: Target, size: tuple[float, float]) -> Iterator[Any]:
    """Axes that are written to ``path`` (its suffix is the format) without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    FigureCanvasAgg(figure)
    yield figure.add_subplot()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def roofline(
    path: Target,
    series: Mapping[str, Points],
    roofs: Mapping[str, tuple[float, float]],
    title: str = "",
) -> None:
    """Operations a second over operations per byte, both axes logarithmic.

    series  name -> a dot (operations per byte, TOP/s) for each GEMM
    roofs   name -> (TB/s of memory, TOP/s of the arithmetic)
    """
    found = [x for points in series.values() for x, _ in points]
    low, high = min(found) / 2, max(found) * 2
    with _axes(path, (9, 6)) as axes:
        for (name, (bandwidth, rate)), style in zip(roofs.items(), ("-", "--", ":"), strict=False):
            corners = sorted({low, min(max(rate / bandwidth, low), high), high})
            heights = [min(rate, bandwidth * x) for x in corners]
            axes.plot(corners, heights, style, color="black", label=name)
        for name, points in series.items():
            marker = "o" if name.startswith("ours") else "x"
            axes.scatter(*zip(*points, strict=True), label=name, marker=marker, alpha=0.8)
        axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TOP/s")
        axes.set_title(title)
        axes.grid(visible=True, which="both", alpha=0.2)
        axes.legend()


def heat_map(
    path: Target,
    ratios: Mapping[tuple[str, str], float],
    title: str,
    most: float = 4.0,
) -> None:
    """Ratios of times by (row, column), 1 in white, below in blue, above in red."""
    rows, columns = (list(dict.fromkeys(key[i] for key in ratios)) for i in range(2))
    cells = [[ratios.get((row, column), float("nan")) for column in columns] for row in rows]
    with _axes(path, (2 + len(columns), 1 + 0.4 * len(rows))) as axes:
        from matplotlib.colors import LogNorm

        axes.imshow(cells, cmap="RdBu_r", norm=LogNorm(1 / most, most), aspect="auto")
        axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
        axes.set_yticks(range(len(rows)), rows)
        for i, line in enumerate(cells):
            for j, value in enumerate(line):
                if value == value:  # no NaN: it was measured
                    axes.text(j, i, f"{value:.2f}", ha="center", va="center")
        axes.set_title(title)


def stacked_bars(
    path: Target,
    bars: Mapping[str, Mapping[str, float]],
    unit: str,
    title: str = "",
) -> None:
    """A horizontal bar for each name: its parts, in the order of the first bar that has them."""
    parts = dict.fromkeys(part for bar in bars.values() for part in bar)
    with _axes(path, (9, 1 + 0.45 * len(bars))) as axes:
        left = [0.0] * len(bars)
        for part in parts:
            widths = [bar.get(part, 0.0) for bar in bars.values()]
            axes.barh(list(bars), widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel=unit, title=title)
        axes.legend()
