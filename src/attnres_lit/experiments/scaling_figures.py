"""Power laws of the loss over compute, and deep against wide models (paper, Fig. 4 and 7)."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from attnres_lit.experiments import paper
from attnres_lit.experiments.drawing import heat_map, panels
from attnres_lit.experiments.scaling import Fit

Points = Mapping[float, list[float]]  # losses of the seeds of a size, by its compute
Advantages = Mapping[str, tuple[float, tuple[float, float]]]  # of a variant, with its interval


def scaling(
    points: Mapping[str, Points],
    fits: Mapping[str, Fit],
    advantages: Advantages,
    at_loss: float,
    baseline: str | None,
    metric: str,
    colours: Mapping[str, str],
) -> Figure:
    """Every run, the fits with their 95% bands, and the compute at which each reaches one loss.

    Args:
        points: of every variant.
        fits: of every variant.
        advantages: compute of the baseline over that of a variant, at the loss.
        at_loss: where they are compared.
        baseline: of the advantages; None: there is none.
        metric: the loss.
        colours: of variants.
    """
    figure, (axes,) = panels(1, 1, 7.4, 4.0)
    every = [compute for sizes in points.values() for compute in sizes]
    grid = np.geomspace(0.8 * min(every), 1.25 * max(every), 60)
    for label, fit in fits.items():
        for compute, losses in points[label].items():
            axes.plot([compute] * len(losses), losses, "o", color=colours[label], markersize=3.5, alpha=0.7)
        name = f"{label}: {fit.coefficient:.3g} · C$^{{{-fit.exponent:.3f}}}$"
        axes.plot(grid, fit.loss(grid), color=colours[label], label=name)
        if len(fit.samples):
            band = np.quantile([each.loss(grid) for each in fit.resampled()], [0.025, 0.975], axis=0)
            axes.fill_between(grid, *band, color=colours[label], alpha=0.12, linewidth=0)
    if baseline and advantages:
        axes.axhline(at_loss, color="#999999", linewidth=0.8, linestyle=":")
        for label in (baseline, *advantages):
            axes.plot([fits[label].compute(at_loss)], [at_loss], "|", color=colours[label], markersize=14)
        said = "\n".join(f"{label}: {ratio:.2f}x{_between(span)}" for label, (ratio, span) in advantages.items())
        text = f"compute advantage over {baseline}\nat {metric} {at_loss:.3f}\n{said}"
        axes.text(0.02, 0.03, text, transform=axes.transAxes, va="bottom", fontsize=8, backgroundcolor="white")
    axes.set(xscale="log", yscale="log", xlabel="compute C of training, PFLOP/s-days", ylabel=metric)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend()
    return figure


def _between(span: tuple[float, float]) -> str:
    return "" if np.isnan(span[0]) else f" ({span[0]:.2f} to {span[1]:.2f})"


def architectures(
    found: Mapping[str, np.ndarray], columns: Sequence[float], rows: Sequence[float], metric: str, with_paper: bool
) -> Figure:
    """Heat maps over width and heads per layer, the best cell framed.

    Args:
        found: `(rows, columns)` of each variant; NaN where there is no run.
        columns: d_model / L.
        rows: H / L.
        metric: in the cells.
        with_paper: the paper's maps below them.
    """
    low, high = float(np.nanmin(list(found.values()))), float(np.nanmax(list(found.values())))
    maps = [(f"{label}: {metric}", values, columns, rows, (low, high)) for label, values in found.items()]
    if with_paper:
        of_paper = (paper.DIM_BY_LAYERS, paper.HEADS_BY_LAYERS, paper.ARCHITECTURE_LOSSES)
        maps += [(f"the paper, {label}: loss", theirs, *of_paper) for label, theirs in paper.ARCHITECTURES.items()]
    figure, grid = panels(len(maps), 2, 4.4, 2.7)
    for axes, each in zip(grid, maps, strict=True):
        _architecture(axes, *each)
    return figure


def _architecture(
    axes: Axes,
    title: str,
    values: np.ndarray,
    columns: Sequence[float],
    rows: Sequence[float],
    limits: tuple[float, float],
) -> None:
    low, high = limits
    names = [[f"{each:g}" for each in side] for side in (columns, rows)]
    heat_map(axes, values, *names, cmap="viridis_r", vmin=low, vmax=high)
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            dark = value - low > 0.5 * (high - low)
            axes.text(x, y, f"{value:.3f}", ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
    y, x = np.unravel_index(np.nanargmin(values), values.shape)
    axes.add_patch(Rectangle((float(x) - 0.5, float(y) - 0.5), 1, 1, fill=False, edgecolor="#d55e00", linewidth=2.5))
    axes.set(title=title, xlabel="d_model / L", ylabel="H / L")
