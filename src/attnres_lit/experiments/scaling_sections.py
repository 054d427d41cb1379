"""Sections on several models: power laws over compute, and deep against wide (paper, Table 2, Fig. 4 and 7)."""

import numpy as np

from attnres_lit.experiments import paper, scaling_figures
from attnres_lit.experiments.page import Picture, Section, Table
from attnres_lit.experiments.scaling import PFLOPS_DAY, Fit, advantage_interval, compute_advantage, fit
from attnres_lit.experiments.study import LOSS, LeftOut, Study, number
from attnres_lit.experiments.variants import ALIKE, Setting, labels


def scaling(study: Study) -> Section:
    """Power laws L = A C^-alpha, and the compute that a variant saves."""
    points = losses_by_compute(study)
    fits, reasons = {}, []
    for label, sizes in points.items():
        try:
            fits[label] = fit(label, list(sizes), list(sizes.values()))
        except ValueError as error:
            reasons.append(str(error))
    if not fits:
        raise LeftOut(reasons[0] if reasons else "no finished run says what it cost")
    computes = [compute for label in fits for compute in points[label]]
    if max(computes) < ALIKE * min(computes):
        raise LeftOut("all runs have about the same compute")
    base = next((each.baseline for each in study.settings if each.baseline in fits), None)
    at_loss = study.at_loss or (float(fits[base].loss(max(points[base]))) if base else 0.0)
    advantages = {
        label: (
            compute_advantage(fits[base], each, each.compute(at_loss)),
            advantage_interval(fits[base], each, at_loss),
        )
        for label, each in fits.items()
        if base and label != base
    }
    figure = scaling_figures.scaling(points, fits, advantages, at_loss, base, study.metric, study.colours)
    parts: list = [Picture("scaling", figure, "loss over compute with fits"), _fits(study, fits, advantages)]
    if base:
        inside = min(fits[base].loss(computes)) <= at_loss <= max(fits[base].loss(computes))
        parts.append(
            f"The compute advantage is what {base} takes to reach a {study.metric} of {at_loss:.4f}, over what the "
            f"variant takes, by their fits{'' if inside else ' (extrapolated: the loss is out of their range)'}. "
            "Intervals and bands are 95% of a bootstrap over the seeds of every size: too narrow if those are few, and "
            "silent on whether a power law holds."
        )
    if study.metric == LOSS:
        rows = [[f"{size}M", *(f"{losses[size]:.3f}" for losses in paper.SCALING.values())] for size in paper.SIZES]
        text = "The paper's losses (Table 2), by parameters that a token uses. There Block reaches PreNorm's loss with "
        parts += [f"{text}{paper.ADVANTAGE} times less compute at C = 5.6.", Table(["", *paper.SCALING], rows)]
    return Section("Scaling", [*parts, *(f"Left out: {reason}." for reason in reasons)])


def losses_by_compute(study: Study) -> dict[str, dict[float, list[float]]]:
    """Of every variant, the losses of all seeds, by PFLOP/s-days."""
    points: dict[str, dict[float, list[float]]] = {}
    for setting in study.settings:
        for label, row in setting.values().iterrows():
            if setting.flops:
                found = points.setdefault(str(label), {}).setdefault(setting.flops / PFLOPS_DAY, [])
                found += row.dropna().tolist()
    if any(loss <= 0 for sizes in points.values() for losses in sizes.values() for loss in losses):
        raise LeftOut(f"a power law takes positive values, and {study.metric} has others")
    return points


def _fits(study: Study, fits: dict[str, Fit], advantages: scaling_figures.Advantages) -> Table:
    lines = []
    for label in (label for label in labels(study.settings) if label in fits):
        found = fits[label]
        of_a, of_alpha = found.interval()
        ratio, span = advantages.get(label, (None, (np.nan, np.nan)))
        one = next(setting.variants[label] for setting in study.settings if label in setting.variants).one
        theirs = paper.FITS.get(paper.column_of(one.residual, one.options) or "") if study.metric == LOSS else None
        line = [label, number(found.coefficient), between(of_a), number(found.exponent), between(of_alpha)]
        line += [number(ratio, ".2f"), between(span, ".2f")]
        lines.append([*line, "{:.3f}, {:.3f}".format(*theirs) if theirs else "–"])
    head = ["variant", "A", "its 95%", "alpha", "its 95%", "compute advantage", "its 95%", "the paper's A, alpha"]
    return Table(head, lines)


def between(span: tuple[float, float], spec: str = ".4f") -> str:
    """The two ends of an interval."""
    return "–" if np.isnan(span[0]) else f"{span[0]:{spec}} to {span[1]:{spec}}"


def architecture(study: Study) -> Section:
    """Deep or wide, with few or many heads, at one compute."""
    placed = [(setting, at) for setting in study.settings if setting.flops and (at := shape(setting))]
    across, down = ({at[i] for _, at in placed} for i in (0, 1))
    if len(across) < 2 or len(down) < 2:
        raise LeftOut("it takes models of two or more widths per layer (d_model / L) and heads per layer (H / L)")
    flops = [setting.flops or 0.0 for setting, _ in placed]
    if max(flops) > ALIKE * min(flops):
        raise LeftOut("the models do not train on the same compute")
    columns, rows = tuple(sorted(across)), tuple(sorted(down, reverse=True))
    found: dict[str, np.ndarray] = {}
    for setting, (x, y) in placed:
        for label, value in setting.values().mean(axis=1).items():
            table = found.setdefault(str(label), np.full((len(rows), len(columns)), np.nan))
            table[rows.index(y), columns.index(x)] = value
    ordered = {label: found[label] for label in labels(study.settings) if label in found}
    figure = scaling_figures.architectures(ordered, columns, rows, study.metric, with_paper=study.metric == LOSS)
    lines = []
    for label, table in ordered.items():
        y, x = np.unravel_index(np.nanargmin(table), table.shape)
        lines.append([label, number(table[y, x]), f"{columns[x]:g}", f"{rows[y]:g}"])
    text = "L is the number of layers, d_model the width, H the heads. The best cell is framed."
    best = Table(["variant", f"best {study.metric}", "d_model / L", "H / L"], lines)
    return Section(
        "Deep or wide", [text, Picture("architecture", figure, "heat maps over d_model / L and H / L"), best]
    )


def shape(setting: Setting) -> tuple[float, float] | None:
    """d_model / L to two digits, and H / L to one decimal."""
    run = next(iter(setting.variants.values())).one
    dim, heads, layers = (run.of("model", "config", key) for key in ("dim", "num_heads", "num_layers"))
    return (float(f"{dim / layers:.2g}"), round(heads / layers, 1)) if dim and heads and layers else None
