"""What happens along depth: sizes of outputs and gradients, and what each site reads (paper, Fig. 5 and 8)."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from attnres_lit.experiments.drawing import FEW, heat_map, panels
from attnres_lit.inference.pictures import TICKS, WEIGHT, source_names

NAMES = {"output_rms": "output RMS", "grad_norm": "gradient norm"}


def dynamics(found: Mapping[str, Mapping[str, pd.DataFrame]], colours: Mapping[str, str]) -> Figure:
    """Output RMS and gradient norm after each layer: means over seeds with the range of the seeds.

    Args:
        found: by name in the logs, then by variant: layers in rows, seeds in columns.
        colours: of variants.
    """
    if max(map(len, found.values())) > FEW:
        return _dynamics_map(found)
    figure, grid = panels(len(found), 2, 4.2, 3.0)
    for axes, (name, variants) in zip(grid, found.items(), strict=True):
        for label, layers in variants.items():
            mean = layers.mean(axis=1)
            axes.plot(mean.index, mean, color=colours[label], marker="o", markersize=3, label=label)
            low, high = layers.min(axis=1), layers.max(axis=1)
            axes.fill_between(mean.index, low, high, color=colours[label], alpha=0.15, linewidth=0)
        axes.set(title=f"{NAMES[name]} after each layer", xlabel="layer", ylim=(0, None))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _dynamics_map(found: Mapping[str, Mapping[str, pd.DataFrame]]) -> Figure:
    """The same of many variants, a row for each."""
    rows = max(map(len, found.values()))
    figure, grid = panels(len(found), 2, 4.8, 0.9 + 0.24 * rows, sharey=True)
    for axes, (name, variants) in zip(grid, found.items(), strict=True):
        table = np.log10(np.array([layers.mean(axis=1).to_numpy() for layers in variants.values()]))
        layers = next(iter(variants.values())).index
        image = heat_map(axes, table, [str(layer) for layer in layers], list(variants), cmap="viridis")
        axes.set(title=f"log10 of the {NAMES[name]}", xlabel="layer")
        axes.figure.colorbar(image, ax=axes)
    return figure


def depth_weights(label: str, table: np.ndarray, site_numbers: np.ndarray, entropy: np.ndarray) -> Figure:
    """What attention and MLP sublayers read, the exit below them, and beside each site how evenly it reads.

    Args:
        label: of the variant.
        table: mean weights `(sites + 1, sources)`, the exit last; NaN where a site does not read a source.
        site_numbers: of its rows.
        entropy: of every site, relative to reading all sources alike; the mean over seeds.
    """
    sites, sources = table.shape
    kinds = {"before attention": slice(0, sites - 1, 2), "before MLP": slice(1, sites - 1, 2)}
    height = 1.1 + 0.17 * (sites / 2 + 1)
    figure = Figure(figsize=(min(3.6 + 0.24 * 2 * sources, 11), height), layout="constrained")
    norm = PowerNorm(0.5, 0, 1)  # the root tells small weights apart
    grid = figure.subplots(1, 4, width_ratios=(4, 1, 4, 1))
    for (kind, chosen), axes, bars in zip(kinds.items(), grid[::2], grid[1::2], strict=True):
        at = np.r_[np.arange(sites)[chosen], sites - 1]
        names = [*(str(site // 2) for site in site_numbers[chosen]), "exit"]
        heat_map(axes, table[at], source_names(sources), names, cmap="viridis", norm=norm)
        axes.set(title=f"{label}, {kind}", xlabel="source", ylabel="layer")
        bars.barh(np.arange(len(at)), np.nan_to_num(entropy[at]), color="#31688e")
        bars.set(title="entropy", xlim=(0, 1), ylim=(len(at) - 0.5, -0.5), yticks=[], xticks=[0, 1])
        bars.grid(visible=False, axis="y")
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=grid[-1], ticks=TICKS, label=WEIGHT, fraction=0.3)
    return figure
