"""A metric over training: the curves of all variants, and their differences to the baseline."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnres_lit.experiments.drawing import FEW, PALE, panels
from attnres_lit.experiments.variants import Setting, Variant, labels

Draw = Callable[[Axes, Setting, str, str], None]  # one variant of a setting, by its label and in a colour
SKIPPED = 0.4  # share of the training whose values may lie above the picture


def curves(settings: Sequence[Setting], metric: str, colours: Mapping[str, str]) -> Figure:
    """Means over seeds, with their standard errors; what is not finished is dashed."""
    figure = _figure(settings, colours, draw_curve)
    for axes in figure.axes:
        _cut(axes)
    figure.supylabel(metric, fontsize=9)
    return figure


def differences(settings: Sequence[Setting], metric: str, colours: Mapping[str, str]) -> Figure:
    """Means of the differences to the baseline's run of the same seed, with their standard errors."""
    with_baseline = [setting for setting in settings if setting.compared_to]
    figure = _figure(with_baseline, colours, draw_difference)
    for axes in figure.axes:
        axes.axhline(0, color=colours[with_baseline[0].compared_to or ""], linewidth=1)
    figure.supylabel(f"{metric}, difference to {with_baseline[0].compared_to}", fontsize=9)
    return figure


def draw_curve(axes: Axes, setting: Setting, label: str, colour: str) -> None:
    """One variant."""
    variant = setting.variants[label]
    _band(axes, variant.curves(), label, colour)
    for run in variant.unfinished:
        curve = run.curves[variant.metric]
        axes.plot(curve.index, curve, color=colour, linestyle="--", linewidth=1, label=label)


def draw_difference(axes: Axes, setting: Setting, label: str, colour: str) -> None:
    """One variant that is not the baseline; of runs that are not finished, nothing."""
    if label != setting.compared_to:
        base: Variant = setting.variants[setting.compared_to or ""]
        _band(axes, setting.variants[label].curves() - base.curves(), label, colour)


def _band(axes: Axes, by_seed: pd.DataFrame, label: str, colour: str) -> None:
    by_seed = by_seed.dropna(axis=1, how="all").dropna()
    if by_seed.empty:
        return
    mean, error = by_seed.mean(axis=1), by_seed.sem(axis=1).fillna(0.0)
    if colour == PALE:
        axes.plot(mean.index, mean, color=colour, linewidth=0.8)
        return
    axes.plot(mean.index, mean, color=colour, label=label, marker="o", markersize=2.5)
    axes.fill_between(mean.index, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)


def _figure(settings: Sequence[Setting], colours: Mapping[str, str], draw: Draw) -> Figure:
    """A panel for each setting; one setting of many variants: a panel for each variant, with the others behind it."""
    shown = labels(settings)
    if len(settings) == 1 and len(shown) > FEW:
        return _one_by_one(settings[0], colours, draw)
    single = len(settings) == 1
    figure, grid = panels(len(settings), 3, 6.4 if single else 3.2, 3.4 if single else 2.5)
    for axes, setting in zip(grid, settings, strict=True):
        for label in reversed(setting.variants):  # the baseline on top
            draw(axes, setting, label, colours[label])
        axes.set(title=setting.label, xlabel="step")
    drawn: dict[str, Artist] = {}
    for axes in grid:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            drawn.setdefault(label, line)
    figure.legend(
        [drawn[label] for label in shown if label in drawn],
        [label for label in shown if label in drawn],
        loc="outside right upper",
    )
    return figure


def _one_by_one(setting: Setting, colours: Mapping[str, str], draw: Draw) -> Figure:
    shown = [label for label in setting.variants if label != setting.baseline]
    figure, grid = panels(len(shown), 4, 2.5, 1.9, sharex=True, sharey=True)
    for axes, one in zip(grid, shown, strict=True):
        for label in shown:
            draw(axes, setting, label, PALE)
        for label in (setting.baseline, one):
            if label:
                draw(axes, setting, label, colours[label])
        axes.set_title(one)
    for axes in grid[-4:]:  # the last ones of their columns
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
    return figure


def _cut(axes: Axes) -> None:
    """Leave the beginning of training out of the range of y."""
    points = [line.get_xydata() for line in axes.get_lines() if len(np.asarray(line.get_xdata())) > 2]
    x, y = np.concatenate([np.empty((0, 2)), *points]).T
    late = y[(x >= SKIPPED * max(x, default=0)) & np.isfinite(y)]
    if len(set(late)) > 1:
        margin = 0.06 * (late.max() - late.min())
        axes.set_ylim(late.min() - margin, late.max() + margin)
