"""Sections on several models: power laws over compute, and deep against wide (report, Table 2, Fig. 4 and 7)."""

import numpy as np

from attnres_lit.experiments import paper, scaling_figures
from attnres_lit.experiments.bench import Bench, labels
from attnres_lit.experiments.page import Picture, Section, Table
from attnres_lit.experiments.scaling import PFLOPS_DAY, Fit, advantage_interval, compute_advantage, fit
from attnres_lit.experiments.study import LOSS, LeftOut, Study, number

ALIKE = 1.25  # budgets that are within this factor of one another are one


def scaling(study: Study) -> Section:
    """Power laws L = A C^-alpha, and the compute that a variant saves."""
    points: dict[str, dict[float, list[float]]] = {}
    for bench in study.benches:
        if bench.flops:
            for label, row in bench.values().iterrows():
                points.setdefault(str(label), {})[bench.flops / PFLOPS_DAY] = row.dropna().tolist()
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
    falling = {label: each for label, each in fits.items() if each.exponent > 0}
    base = next((bench.baseline for bench in study.benches if bench.baseline in falling), None)
    order = [label for label in labels(study.benches) if label in fits]
    parts: list = []
    advantages, at_loss = {}, study.at_loss
    if base is not None:
        at_loss = study.at_loss or float(falling[base].loss(max(points[base])))
        advantages = {
            label: compute_advantage(falling[base], falling[label], falling[label].compute(at_loss))
            for label in order
            if label in falling and label != base
        }
        parts.append(
            f"The compute advantage at a {study.metric} of {at_loss:.4f} is the compute that {base}'s fit takes to reach "
            "it, over that of the other fit. Bands and intervals are 95% of the bootstrap over seeds: they say nothing "
            "of whether a power law holds, nor of other data or learning rates."
        )
        if at_loss < min(falling[base].loss(computes)) or at_loss > max(falling[base].loss(computes)):
            parts.append("That loss is outside of what these runs reached: the advantage is extrapolated.")
    figure = scaling_figures.scaling(
        points, {x: fits[x] for x in order}, advantages, at_loss, base, study.metric, study.colours
    )
    parts.insert(0, Picture("scaling", figure, "loss over compute with fits"))
    lines = [_line(study, label, fits, advantages, base, at_loss) for label in order]
    head = ["variant", "A", "its 95%", "alpha", "its 95%", "compute advantage", "its 95%", "the report's fit"]
    parts.append(Table(head, lines))
    if study.metric == LOSS:
        parts.append(
            f"The report's: Table 2 and Fig. 4, models of 194M to 528M active parameters; there Block reaches {base or 'PreNorm'}'s "
            f"loss at {paper.ADVANTAGE} times less compute at C = 5.6."
        )
    return Section("Scaling", [*parts, *(f"Left out: {reason}." for reason in reasons)])


def _line(
    study: Study,
    label: str,
    fits: dict[str, Fit],
    advantages: dict[str, float],
    base: str | None,
    at_loss: float | None,
) -> list[str]:
    found = fits[label]
    of_a, of_alpha = found.interval()
    line = [label, number(found.coefficient), between(of_a), number(found.exponent), between(of_alpha)]
    if label in advantages and base is not None and at_loss is not None:
        span = advantage_interval(fits[base], found, at_loss)
        line += [f"{advantages[label]:.2f}", between(span, ".2f")]
    else:
        line += ["–", "–"]
    variant = next(bench.variants[label] for bench in study.benches if label in bench.variants)
    column = paper.column_of(variant.one.residual, variant.one.options) if study.metric == LOSS else None
    return [*line, "{} · C^-{}".format(*paper.FITS[column]) if column in paper.FITS else "–"]


def between(span: tuple[float, float], spec: str = ".4f") -> str:
    """The two ends of an interval."""
    return "–" if np.isnan(span[0]) else f"{span[0]:{spec}} to {span[1]:{spec}}"


def architecture(study: Study) -> Section:
    """Deep or wide, with few or many heads, at one compute."""
    placed = [(bench, at) for bench in study.benches if bench.flops and (at := shape(bench))]
    across, down = ({at[i] for _, at in placed} for i in (0, 1))
    if len(across) < 2 or len(down) < 2:
        raise LeftOut("it takes models of two or more widths per layer (d_model / L) and heads per layer (H / L)")
    flops = [bench.flops or 0.0 for bench, _ in placed]
    if max(flops) > ALIKE * min(flops):
        raise LeftOut("the models do not train on the same compute")
    columns, rows = tuple(sorted(across)), tuple(sorted(down, reverse=True))
    found: dict[str, np.ndarray] = {}
    for bench, (x, y) in placed:
        for label, value in bench.values().mean(axis=1).items():
            table = found.setdefault(str(label), np.full((len(rows), len(columns)), np.nan))
            table[rows.index(y), columns.index(x)] = value
    ordered = {label: found[label] for label in labels(study.benches) if label in found}
    figure = scaling_figures.architectures(ordered, columns, rows, study.metric, with_report=study.metric == LOSS)
    lines = []
    for label, table in ordered.items():
        y, x = np.unravel_index(np.nanargmin(table), table.shape)
        lines.append([label, number(table[y, x]), f"{columns[x]:g}", f"{rows[y]:g}"])
    text = "L is the number of layers, d_model the width, H the heads. The best cell is framed."
    best = Table(["variant", f"best {study.metric}", "d_model / L", "H / L"], lines)
    return Section(
        "Deep or wide", [text, Picture("architecture", figure, "heat maps over d_model / L and H / L"), best]
    )


def shape(bench: Bench) -> tuple[float, float] | None:
    """d_model / L to two digits, and H / L to one decimal."""
    run = next(iter(bench.variants.values())).one
    dim, heads, layers = (run.of("model", "config", key) for key in ("dim", "num_heads", "num_layers"))
    return (float(f"{dim / layers:.2g}"), round(heads / layers, 1)) if dim and heads and layers else None
