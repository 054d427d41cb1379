"""Final values against those of the paper: ablations, block sizes, numbers of blocks."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnres_lit.experiments import paper
from attnres_lit.experiments.drawing import BASELINE, PAPER, panels

INTERVAL = "95% interval"


def ablations(
    table: pd.DataFrame, theirs: Mapping[str, float], metric: str, baseline: str, colours: Mapping[str, str]
) -> Figure:
    """Differences to the baseline with their pooled intervals, and the paper's beside them.

    Args:
        table: what `statistics.compare` says of every variant.
        theirs: differences of the paper, in nats per token, by variant; may be empty.
        metric: that was compared.
        baseline: of the differences.
        colours: of variants.
    """
    shown = table.drop(index=baseline).iloc[::-1]
    width, height = 4.2 if theirs else 6.0, 0.8 + 0.27 * len(shown)
    figure, grid = panels(2 if theirs else 1, 2, width, height, sharey=True)
    rows = range(len(shown))
    ours = grid[0]
    for row, (label, found) in zip(rows, shown.iterrows(), strict=True):
        _interval(ours, found["difference"], row, found["pooled"], colours[str(label)])
    ours.set(title=f"here: {metric}, difference to {baseline}", ylim=(-0.6, len(shown) - 0.4))
    ours.set_yticks(rows, [str(label) for label in shown.index])
    if theirs:
        for row, label in zip(rows, shown.index, strict=True):
            if label in theirs:
                grid[1].plot([theirs[str(label)]], [row], "D", color=PAPER)
        grid[1].set_title("the paper: loss, difference to PreNorm")
    for axes in grid:
        axes.axvline(0, color=BASELINE, linewidth=1)
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    return figure


def _interval(axes: Axes, x: float, y: float, half: float, colour: str) -> None:
    axes.errorbar([x], [y], xerr=None if np.isnan(half) else [half], fmt="o", color=colour, capsize=3)


def block_sizes(sizes: Sequence[int], table: pd.DataFrame, metric: str, baseline: str, with_paper: bool) -> Figure:
    """Differences to the baseline over sublayers per block, with the paper's for its model of 32 sublayers.

    Args:
        sizes: sublayers per block, of each row.
        table: of `statistics.compare`, a row for each size.
        metric: that was compared.
        baseline: of the differences.
        with_paper: draw the paper's too.
    """
    figure, (axes,) = panels(1, 1, 6.4, 3.2)
    axes.errorbar(
        sizes, table["difference"], table["pooled"], marker="o", capsize=3, label=f"here, {INTERVAL}", color="#0072b2"
    )
    theirs = {size: loss - paper.BASELINE for size, loss in paper.BLOCK_SIZES.items()} if with_paper else {}
    if theirs:
        axes.plot(list(theirs), list(theirs.values()), marker="D", color=PAPER, label="the paper, 32 sublayers")
    axes.axhline(0, color=BASELINE, linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = sorted({*sizes, *theirs})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="sublayers per block (1: Full AttnRes)", ylabel=f"{metric}, difference to {baseline}")
    axes.legend()
    return figure


def num_blocks(counts: Sequence[int], table: pd.DataFrame, held: Sequence[float], metric: str, baseline: str) -> Figure:
    """Differences to the baseline over the number of blocks, and what each block costs.

    Args:
        counts: blocks, of each row.
        table: of `statistics.compare`, a row for each count.
        held: bytes per token of the sources that the last site reads.
        metric: that was compared.
        baseline: of the differences.
    """
    figure, (quality, memory) = panels(2, 2, 4.2, 3.0)
    at = np.arange(len(counts))
    quality.errorbar(at, table["difference"], table["pooled"], fmt="o", capsize=3, color="#0072b2")
    quality.axhline(0, color=BASELINE, linewidth=1)
    quality.set(title=f"{metric}, difference to {baseline}, {INTERVAL}")
    memory.bar(at, np.asarray(held) / 1024, width=0.6, color="#0072b2")
    memory.set(title="sources that the exit reads, KiB per token")
    for axes in (quality, memory):
        axes.set_xticks(at, [str(count) for count in counts])
        axes.set_xlabel("blocks")
        axes.margins(x=0.1)
    return figure
