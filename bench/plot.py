"""A benchmark's cells as a picture: bars by model and batch size, or lines by the number of columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.contenders import is_call
from bench.zoo import geometric_mean

COLOURS = ("#9aa5b1", "#1f6feb", "#8250df", "#d4a72c", "#2da44e", "#cf222e")


def draw(cells: Sequence[Cell], names: Sequence[str], to: Path) -> list[Path]:
    """Writes `to`.png and `to`.svg: eager / contender of each model, and the geometric mean, by batch size.

    Args:
        cells: labels (model, batch size).
        names: the contenders to show, as far as a cell has them.
    """
    pyplot = _pyplot()
    names = [name for name in names if any(name in cell.timings for cell in cells)]
    batches = list(dict.fromkeys(cell.labels[1] for cell in cells))
    widest = max(sum(cell.labels[1] == batch for cell in cells) for batch in batches)
    size = (3 + 0.62 * widest, 0.6 + 2.3 * len(batches))
    figure, panels = pyplot.subplots(len(batches), 1, figsize=size, squeeze=False, layout="constrained")
    for panel, batch in zip(panels[:, 0], batches, strict=True):
        _panel(panel, [cell for cell in cells if cell.labels[1] == batch], names, batch)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), frameon=False, ncols=len(names), loc="outside upper center"
    )
    return _written(figure, to)


def draw_growth(cells: Sequence[Cell], seconds: Sequence[float], to: Path) -> list[Path]:
    """Writes `to`.png and `to`.svg: the time of a call and of optimize() by the number of columns, on log axes."""
    figure, panels = _pyplot().subplots(1, 2, figsize=(8, 3), layout="constrained")
    columns = [int(cell.labels[0]) for cell in cells]
    for name, colour in zip(cells[0].timings, COLOURS, strict=False):
        times = [1e3 * cell.timings[name].median for cell in cells]
        panels[0].plot(columns, times, marker="o", label=name, color=colour)
    panels[1].plot(columns, seconds, marker="o", label="optimize()", color=COLOURS[1])
    for axes, what in zip(panels, ("ms of a call at batch 1", "s"), strict=True):
        axes.set(xscale="log", yscale="log", xlabel="columns", ylabel=what)
        axes.grid(which="both", alpha=0.2)
        axes.legend(frameon=False)
    return _written(figure, to)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _written(figure: Any, to: Path) -> list[Path]:
    to.parent.mkdir(parents=True, exist_ok=True)
    paths = [to.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    _pyplot().close(figure)
    return paths


def _panel(axes: Any, cells: Sequence[Cell], names: Sequence[str], batch: str) -> None:
    width = 0.8 / len(names)
    for number, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        ratios = [cell.ratio(name) if name in cell.timings else 0.0 for cell in cells]
        mean = geometric_mean([ratio for ratio, cell in zip(ratios, cells, strict=True) if ratio and is_call(cell)])
        places = [i + (number - (len(names) - 1) / 2) * width for i in range(len(cells) + 1)]
        bars = axes.bar(places, [*ratios, mean], width, label=name, color=colour)
        axes.bar_label(bars, fmt="%.1f", fontsize=6)
    labels = [*(cell.labels[0].split("/")[-1] for cell in cells), "geomean"]
    axes.set_xticks(range(len(labels)), labels, rotation=20, ha="right", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel(f"batch {batch}\neager / this", fontsize=8)
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(0.5, axes.get_ylim()[0]), max(2, 1.2 * axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
