"""Sections on how runs trained and where they ended: curves, final values, and the list of runs."""

import pandas as pd

from attnres_lit.experiments import comparison_figures, curve_figures, paper
from attnres_lit.experiments.page import Picture, Section, Table, file_name
from attnres_lit.experiments.statistics import compare
from attnres_lit.experiments.study import LOSS, LeftOut, Study, number, with_interval
from attnres_lit.experiments.variants import Setting, labels

MANY = 3  # settings, above which a table has a row for each
PANELS = 9
POOLED = (
    "± is half of a 95% interval. Beside the difference it takes the noise from all rows of the table at once (variant "
    "+ seed + noise): read this one, for the two or three seeds of one variant say little of its noise. “Own ±” takes "
    "it from the differences of that variant to the baseline, seed by seed, and nothing else."
)


def curves(study: Study) -> Section:
    """The metric over steps, and its differences to the baseline."""
    if len(study.settings) > PANELS:
        raise LeftOut(f"there are {len(study.settings)} different models or budgets, too many for one figure")
    steps = {step for setting in study.settings for v in setting.variants.values() for step in v.steps}
    if len(steps) < 2:
        raise LeftOut(f"{study.metric} was logged at one step only")
    figure = curve_figures.curves(study.settings, study.metric, study.colours)
    parts: list = [
        f"{study.metric}: the mean over seeds; the band is one standard error. Dashed: runs that are not finished. If "
        "every variant has a panel, the baseline is dark and the others are pale.",
        Picture("curves", figure, f"{study.metric} over steps"),
    ]
    compared = [setting for setting in study.settings if setting.compared_to and len(setting.values()) > 1]
    if compared:
        figure = curve_figures.differences(compared, study.metric, study.colours)
        parts += [
            "The difference to the baseline's run of the same seed:",
            Picture("differences", figure, f"difference in {study.metric} over steps"),
        ]
    return Section("Curves", parts)


def final_values(study: Study) -> Section:
    """Means over seeds, and differences to the baseline."""
    filled = [setting for setting in study.settings if not setting.values().empty]
    if not filled:
        raise LeftOut("no run is finished")
    parts: list = []
    if len(filled) > MANY:
        parts.append(_by_setting(filled))
    else:
        for setting in filled:
            parts += [*([setting.label] if len(filled) > 1 else []), *_one(study, setting)]
    if any(setting.compared_to for setting in filled):
        parts.append(POOLED)
    return Section(f"Final {study.metric}", parts)


def _one(study: Study, setting: Setting) -> list[Table | Picture]:
    """The table of one setting and, of several variants, its figure."""
    table = compare(setting.values(), setting.compared_to)
    rows = {str(label): paper_row(setting, str(label)) for label in table.index}
    told = study.metric == LOSS and any(row and row.loss != paper.BASELINE for row in rows.values())
    head = ["variant", "parameters", "mean", "standard error", "seeds"]
    head += [f"difference to {setting.compared_to}", "own ±"] if setting.compared_to else []
    head += ["the paper's", "loss", "difference"] if told else []
    lines = []
    for label, found in table.iterrows():
        costs, row = setting.variants[str(label)].one.costs, rows[str(label)]
        line = [str(label), number(costs.parameters if costs else None, ",")]
        line += [number(found["mean"]), number(found["error"]), str(int(found["seeds"]))]
        if setting.compared_to:
            is_base = label == setting.compared_to
            line += (
                ["–", "–"] if is_base else [with_interval(found["difference"], found["pooled"]), number(found["own"])]
            )
        if told:
            line += [row.label, f"{row.loss:.3f}", f"{row.loss - paper.BASELINE:+.3f}"] if row else ["–"] * 3
        lines.append(line)
    parts: list[Table | Picture] = [Table(head, lines)]
    if setting.compared_to and len(table) > 2:
        base = setting.compared_to
        theirs = {each: row.loss - paper.BASELINE for each, row in rows.items() if row and told and each != base}
        figure = comparison_figures.ablations(table, theirs, study.metric, base, study.colours)
        parts.append(
            Picture(file_name("comparison", setting.label), figure, f"differences to {base} with their intervals")
        )
    return parts


def paper_row(setting: Setting, label: str) -> paper.Row | None:
    """The paper's row for a variant."""
    return paper.row_of(setting.variants[label].one.residual, setting.variants[label].one.options)


def _by_setting(filled: list[Setting]) -> Table:
    """A row for each setting; of every variant the mean and the difference to the baseline."""
    shown = labels(filled)
    lines = []
    for setting in filled:
        table = compare(setting.values(), setting.compared_to)
        line = [setting.label, number(setting.size, ",")]
        for label in shown:
            if label not in table.index:
                line.append("–")
            elif label == setting.compared_to or setting.compared_to is None:
                line.append(number(table["mean"][label]))
            else:
                difference = with_interval(table["difference"][label], table["pooled"][label])
                line.append(f"{table['mean'][label]:.4f} ({difference})")
        lines.append(line)
    return Table(["", "parameters of the sublayers", *shown], lines)


def runs(study: Study) -> Section:
    """Every run: how far it is, and what it took."""
    lines = []
    for setting in study.settings:
        for variant in setting.variants.values():
            for run in sorted(variant.runs, key=lambda run: run.seed):
                speed = run.curves.get("throughput/tokens_per_sec", pd.Series(dtype=float)).median()
                seconds = run.tokens / speed if run.tokens and speed > 0 else None
                minutes = number(None if seconds is None else seconds / 60, ".1f")
                line = [run.name, run.state(study.metric), f"{run.steps:,}", number(run.tokens, ",")]
                lines.append([*line, number(run.flops, ".2e"), number(speed, ",.0f"), minutes])
    head = ["run", "state", "steps", "tokens", "FLOPs", "tokens/s", "minutes"]
    note = (
        "FLOPs are those of matrix products, forward and backward, without the residual's. Tokens/s is the median; "
        "minutes are tokens by that speed: without start-up and validation, and the machine may have done other work."
    )
    return Section("Runs", [Table(head, lines), note])
