"""Pictures of what happens in depth (arXiv 2603.15031, Fig. 5 and 8), as uint8 `(height, width, 3)`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

WEIGHT = "depth-attention weight"
TICKS = [0, 0.02, 0.1, 0.25, 0.5, 1]


def as_table(rows: Mapping[int, Mapping[int, float]]) -> np.ndarray:
    """`{site: {source: weight}}` as float32 `(sites, sources)`, NaN where a site does not read a source."""
    table = np.full((len(rows), 1 + max(at for row in rows.values() for at in row)), np.nan, np.float32)
    for y, row in enumerate(rows.values()):
        for at, weight in row.items():
            table[y, at] = weight
    return table


def draw_weights(rows: Mapping[int, Mapping[int, float]]) -> np.ndarray:
    """A heat map of `{site: {source: weight}}`, the last site being the exit: uint8 `(height, width, 3)`."""
    table = as_table(rows)
    sources = table.shape[1]
    *sites, _ = rows
    width, height = min(2.6 + 0.26 * sources, 14), min(1.2 + 0.22 * len(rows), 12)  # inches
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = figure.subplots()
    # the root tells small weights apart: over n sources, a uniform row has 1 / n
    image = axes.imshow(table, norm=PowerNorm(0.5, 0, 1), cmap="viridis", aspect="auto", interpolation="none")
    _label(axes.set_yticks, [name_of(site) for site in sites] + ["exit"])
    _label(axes.set_xticks, source_names(sources))
    axes.set_xlabel("source")
    axes.set_ylabel("site")
    axes.set_title(f"mean {WEIGHT}", fontsize=9)
    figure.colorbar(image, ax=axes, ticks=TICKS)
    return _pixels(figure)


def draw_tokens(rows: Mapping[int, Mapping[int, np.ndarray]], tokens: Sequence[str]) -> np.ndarray:
    """A panel for each site, the exit last: sources down, the tokens of one text to the right.

    Args:
        rows: `{site: {source: weights (T,)}}`.
        tokens: T labels.
    """
    columns = min(4 if len(tokens) <= 24 else 2, len(rows))
    lines = math.ceil(len(rows) / columns)
    sources = 1 + max(at for row in rows.values() for at in row)
    width, height = min(1.2 + 0.1 * len(tokens), 7), 0.7 + 0.1 * sources  # inches, of a panel
    size = (columns * width + 1, min(lines * height + 0.5, 60))
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    *_, last = rows
    for axes, (site, row) in zip(grid, rows.items(), strict=False):
        table = np.full((sources, len(tokens)), np.nan)
        for at, weights in row.items():
            table[at] = weights
        image = axes.imshow(table, norm=PowerNorm(0.5, 0, 1), cmap="viridis", aspect="auto", interpolation="none")
        axes.set_title("exit" if site == last else name_of(site), fontsize=8)
        _label(axes.set_yticks, source_names(sources), 8)
        _label(axes.set_xticks, list(tokens), 80)
        axes.tick_params(labelsize=6)
        axes.tick_params(axis="x", rotation=90 if max(map(len, tokens)) > 2 else 0)
        if site == last:
            figure.colorbar(image, ax=grid.tolist(), ticks=TICKS, shrink=min(1.0, 3 / lines), label=WEIGHT)
    for axes in grid[len(rows) :]:
        axes.set_axis_off()
    return _pixels(figure)


def draw_rms(rms: Mapping[int, float]) -> np.ndarray:
    """The root mean square of what is written after each layer."""
    figure = Figure(figsize=(min(2.6 + 0.26 * len(rms), 14), 2.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.bar(list(rms), list(rms.values()), color="#31688e")
    _label(axes.set_xticks, [str(layer) for layer in rms])
    axes.set_xlabel("layer")
    axes.set_ylabel("RMS")
    axes.set_title("output after each layer", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return _pixels(figure)


def name_of(site: int) -> str:
    """Its number and what it is."""
    return f"{site} {'MLP' if site % 2 else 'attn'}"


def source_names(count: int) -> list[str]:
    """The embedding, then numbers."""
    return ["emb", *map(str, range(1, count))]


def _label(set_ticks: Any, labels: list[str], most: int = 40) -> None:
    every = math.ceil(len(labels) / most)
    shown = sorted({*range(0, len(labels), every), len(labels) - 1})
    set_ticks(shown, [labels[i] for i in shown], fontsize=7)


def _pixels(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
