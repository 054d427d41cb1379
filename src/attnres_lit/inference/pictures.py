"""Pictures of what happens in depth (arXiv 2603.15031, Fig. 5 and 8), as uint8 `(height, width, 3)`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure


def draw_weights(rows: Mapping[int, Mapping[int, float]]) -> np.ndarray:
    """A heat map of `{site: {source: weight}}`, the last site being the exit: uint8 `(height, width, 3)`."""
    sources = 1 + max(at for row in rows.values() for at in row)
    table = np.full((len(rows), sources), np.nan)
    for y, row in enumerate(rows.values()):
        for at, weight in row.items():
            table[y, at] = weight
    *sites, _ = rows
    width, height = min(2.6 + 0.26 * sources, 14), min(1.2 + 0.22 * len(rows), 12)  # inches
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = figure.subplots()
    # the root tells small weights apart: over n sources, a uniform row has 1 / n
    image = axes.imshow(table, norm=PowerNorm(0.5, 0, 1), cmap="viridis", aspect="auto", interpolation="none")
    _label(axes.set_yticks, [f"{site} {'MLP' if site % 2 else 'attn'}" for site in sites] + ["exit"])
    _label(axes.set_xticks, ["emb", *map(str, range(1, sources))])
    axes.set_xlabel("source")
    axes.set_ylabel("site")
    axes.set_title("mean depth-attention weight", fontsize=9)
    figure.colorbar(image, ax=axes, ticks=[0, 0.02, 0.1, 0.25, 0.5, 1])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _label(set_ticks: Any, labels: list[str]) -> None:
    every = math.ceil(len(labels) / 40)
    shown = sorted({*range(0, len(labels), every), len(labels) - 1})
    set_ticks(shown, [labels[i] for i in shown], fontsize=7)
