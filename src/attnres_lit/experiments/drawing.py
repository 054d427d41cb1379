"""What all figures of a report share: their look, a colour for each variant, panels in a grid, and their files."""

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BASELINE = "#333333"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933", "#332288", "#44aa99")
PALE = "#cccccc"
PAPER = "#8a8a8a"  # what the paper on Attention Residuals found
FEW = 7  # lines that one panel may have; above that, each has a panel of its own
LOOK = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "attnres_lit",  # the same picture is the same file
    "svg.fonttype": "none",
}


def colours(labels: Sequence[str], baseline: str | None) -> dict[str, str]:
    """A colour for each variant, in all figures; the baseline's is dark grey."""
    others = [label for label in labels if label != baseline]
    found = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(others)}
    return found if baseline is None else {baseline: BASELINE, **found}


def panels(count: int, columns: int, width: float, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels of so many inches, in rows of at most `columns`."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared).flatten().tolist()
    for each in axes[count:]:
        each.remove()
    return figure, axes[:count]


def heat_map(axes: Axes, table: np.ndarray, columns: Sequence[str], rows: Sequence[str], **options: Any) -> Any:
    """An image of a table with its labels, of which so many are shown as there is room for; returns the image."""
    image = axes.imshow(table, aspect="auto", interpolation="none", **options)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for set_ticks, names, most in ((axes.set_xticks, columns, 13), (axes.set_yticks, rows, 40)):
        at = range(0, len(names), math.ceil(len(names) / most))
        set_ticks(list(at), [names[i] for i in at])
    return image


def files(figure: Figure) -> dict[str, bytes]:
    """The figure as PNG and SVG, by suffix."""
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", facecolor="white", dpi=160)
    figure.savefig(svg, format="svg", facecolor="white", metadata={"Date": None})
    return {".png": png.getvalue(), ".svg": svg.getvalue()}


def look() -> Any:
    """The context in which figures are drawn and written."""
    return matplotlib.rc_context(LOOK)
