"""Compare runs: a metric over steps, its difference to the first run, and a table of final values.

    python scripts/compare_runs.py runs/PreNorm runs/BlockAttnRes --metric val/bpb --out comparison.png

Reads the CSV logs of run folders, those of resumed runs included.
"""

import argparse
import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure

COLOURS = ("#333333", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00") * 4


def read(run: Path, metric: str) -> dict[int, float]:
    """`{step: value}` of a run; a resumed run's later log wins."""
    if not run.is_dir():
        sys.exit(f"error: there is no run {run}")
    values: dict[int, float] = {}
    for log in sorted(run.glob("csv/version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1])):
        with open(log) as file:
            rows = [row for row in csv.DictReader(file) if row.get(metric)]
        values |= {int(row["step"]) + 1: float(row[metric]) for row in rows}
    if not values:
        sys.exit(f"error: {run} has no {metric} in csv/version_*/metrics.csv")
    return values


def draw(curves: dict[str, dict[int, float]], metric: str) -> Figure:
    """The curves, and beside them their differences to the first."""
    figure = Figure(figsize=(10, 3.8), dpi=110, layout="constrained")
    whole, difference = figure.subplots(1, 2)
    base_name, base = next(iter(curves.items()))
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        whole.plot(list(curve), list(curve.values()), label=name, color=colour, marker="o", markersize=3)
        common = [step for step in curve if step in base]
        difference.plot(common, [curve[s] - base[s] for s in common], color=colour, marker="o", markersize=3)
    whole.set(xlabel="step", ylabel=metric, title=metric)
    difference.set(xlabel="step", title=f"difference to {base_name}")
    whole.legend(frameon=False)
    for axes in (whole, difference):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders; the first is the base of the differences")
    parser.add_argument("--metric", default="val/bpb")
    parser.add_argument("--out", type=Path, default=Path("runs/comparison.png"))
    args = parser.parse_args()
    curves = {run.name: read(run, args.metric) for run in args.runs}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, args.metric).savefig(args.out)
    base = next(iter(curves.values()))
    print(f"| run | steps | {args.metric} | difference |\n|---|---|---|---|")
    for name, curve in curves.items():
        step = max(curve)
        print(f"| {name} | {step} | {curve[step]:.4f} | {curve[step] - base[max(base)]:+.4f} |")


if __name__ == "__main__":
    main()
