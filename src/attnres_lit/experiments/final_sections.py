"""Sections on how runs trained and where they ended: curves, final values, and the list of runs."""

import pandas as pd

from attnres_lit.experiments import comparison_figures, curve_figures, paper
from attnres_lit.experiments.bench import Bench, labels
from attnres_lit.experiments.page import Picture, Section, Table
from attnres_lit.experiments.statistics import compare
from attnres_lit.experiments.study import LOSS, LeftOut, Study, number, with_interval

MANY = 3  # benches, above which a table has a row for each
PANELS = 9
POOLED = (
    "The interval beside the difference is 95% by t, with the noise pooled over all rows of the table (a layout variant + "
    "seed): it is the one to read, for two or three seeds say too little about the noise of one variant. The last column "
    "is half of the interval from the paired differences of that variant alone."
)


def curves(study: Study) -> Section:
    """The metric over steps, and its differences to the baseline."""
    if len(study.benches) > PANELS:
        raise LeftOut(f"there are {len(study.benches)} different models or budgets, too many for one figure")
    steps = {step for bench in study.benches for v in bench.variants.values() for step in v.steps}
    if len(steps) < 2:
        raise LeftOut(f"{study.metric} was logged at one step only")
    figure = curve_figures.curves(study.benches, study.metric, study.colours)
    parts: list = [
        f"{study.metric}: the mean over seeds; the band is one standard error. Dashed: runs that are not finished.",
        Picture("curves", figure, f"{study.metric} over steps"),
    ]
    compared = [bench for bench in study.benches if bench.compared_to and len(bench.values()) > 1]
    if compared:
        figure = curve_figures.differences(compared, study.metric, study.colours)
        parts += [
            "The difference to the baseline's run of the same seed:",
            Picture("differences", figure, f"difference in {study.metric} over steps"),
        ]
    return Section("Curves", parts)


def final_values(study: Study) -> Section:
    """Means over seeds, and differences to the baseline."""
    filled = [bench for bench in study.benches if not bench.values().empty]
    if not filled:
        raise LeftOut("no run is finished")
    if len(filled) > MANY:
        return Section(f"Final {study.metric}", [_by_bench(study, filled)])
    parts: list = []
    for bench in filled:
        parts += [*([bench.label] if len(filled) > 1 else []), *_one(study, bench)]
    if any(bench.compared_to for bench in filled):
        parts.append(POOLED)
    return Section(f"Final {study.metric}", parts)


def _one(study: Study, bench: Bench) -> list[Table | Picture]:
    """The table of one bench and, of several variants, its figure."""
    table = compare(bench.values(), bench.compared_to)
    rows = {str(label): reported_row(bench, str(label)) for label in table.index}
    told = study.metric == LOSS and any(row and row.loss != paper.BASELINE for row in rows.values())
    head = ["variant", "parameters", "mean", "standard error", "seeds"]
    head += [f"difference to {bench.compared_to}", "its own ±"] if bench.compared_to else []
    head += ["report's row", "loss", "difference"] if told else []
    lines = []
    for label, found in table.iterrows():
        costs, row = bench.variants[str(label)].one.costs, rows[str(label)]
        line = [str(label), number(costs and costs.parameters, ",")]
        line += [number(found["mean"]), number(found["error"]), str(int(found["seeds"]))]
        if bench.compared_to:
            is_base = label == bench.compared_to
            line += (
                ["–", "–"] if is_base else [with_interval(found["difference"], found["pooled"]), number(found["own"])]
            )
        if told:
            line += [row.label, f"{row.loss:.3f}", f"{row.loss - paper.BASELINE:+.3f}"] if row else ["–"] * 3
        lines.append(line)
    parts: list[Table | Picture] = [Table(head, lines)]
    if bench.compared_to and len(table) > 2:
        base = bench.compared_to
        reported = {each: row.loss - paper.BASELINE for each, row in rows.items() if row and told and each != base}
        figure = comparison_figures.ablations(table, reported, study.metric, base, study.colours)
        name = "comparison" + (f"_{bench.label}" if bench.label else "")
        parts.append(Picture(name, figure, f"differences to {base} with their intervals"))
    return parts


def reported_row(bench: Bench, label: str) -> paper.Row | None:
    """The report's row for a variant."""
    return paper.row_of(bench.variants[label].one.residual, bench.variants[label].one.options)


def _by_bench(study: Study, filled: list[Bench]) -> Table:
    """A row for each bench; of every variant the mean and the difference to the baseline."""
    shown = labels(filled)
    lines = []
    for bench in filled:
        table = compare(bench.values(), bench.compared_to)
        line = [bench.label, number(bench.size, ",")]
        for label in shown:
            if label not in table.index:
                line.append("–")
            elif label == bench.compared_to or bench.compared_to is None:
                line.append(number(table["mean"][label]))
            else:
                line.append(f"{table['mean'][label]:.4f} ({table['difference'][label]:+.4f})")
        lines.append(line)
    return Table(["", "parameters of the sublayers", *shown], lines)


def runs(study: Study) -> Section:
    """Every run: how far it is, and what it took."""
    lines = []
    for bench in study.benches:
        for variant in bench.variants.values():
            for run in sorted(variant.runs, key=lambda run: run.seed):
                speed = run.curves.get("throughput/tokens_per_sec", pd.Series(dtype=float)).median()
                seconds = run.tokens / speed if run.tokens and speed > 0 else None
                minutes = number(None if seconds is None else seconds / 60, ".1f")
                line = [run.name, run.state(study.metric), f"{run.steps:,}", number(run.tokens, ",")]
                lines.append([*line, number(run.flops, ".2e"), number(speed, ",.0f"), minutes])
    head = ["run", "state", "steps", "tokens", "FLOPs", "tokens/s", "minutes"]
    note = (
        "FLOPs are those of matrix products, forward and backward, the residual's own left out. Tokens/s is the median; "
        "minutes are tokens by that speed, without start-up and validation, on a machine that other work may have shared."
    )
    return Section("Runs", [Table(head, lines), note])
