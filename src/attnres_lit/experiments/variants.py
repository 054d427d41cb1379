"""Runs side by side: variants, which differ in the seed alone, and settings, within which variants may be compared."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from attnres_lit.checks import nearest
from attnres_lit.experiments import paper
from attnres_lit.experiments.records import Run, last

ALIKE = 1.25  # budgets that are within this factor of one another are one


@dataclass(frozen=True)
class Variant:
    """Runs that differ in the seed alone.

    Args:
        label: as figures and tables call it.
        runs: all of them.
        metric: that the report compares.
    """

    label: str
    runs: tuple[Run, ...]
    metric: str

    @property
    def finished(self) -> list[Run]:
        """Those with a final value."""
        return [run for run in self.runs if run.state(self.metric) == "finished"]

    @property
    def unfinished(self) -> list[Run]:
        """Those that are drawn dashed: they have values, but not the final one."""
        return [run for run in self.runs if run.state(self.metric) != "finished" and self.metric in run.curves]

    @property
    def one(self) -> Run:
        """Any run, for what all have in common."""
        return self.runs[0]

    @property
    def steps(self) -> set[int]:
        """At which any run logged the metric."""
        return {int(step) for run in self.runs if self.metric in run.curves for step in run.curves[self.metric].index}

    def curves(self) -> pd.DataFrame:
        """The metric of finished runs: steps in rows, seeds in columns."""
        return pd.DataFrame({run.seed: run.curves[self.metric] for run in self.finished})


@dataclass(frozen=True)
class Setting:
    """Variants that may be compared: with one network but for its residual, one text, and one number of tokens.

    Args:
        label: what sets it apart from other settings; "" if there is one only.
        variants: by label, the baseline first.
        baseline: a label; None: there is none in this setting.
    """

    label: str
    variants: dict[str, Variant]
    baseline: str | None

    def values(self) -> pd.DataFrame:
        """Final values: variants with finished runs in rows, seeds in columns."""
        rows = {
            label: {run.seed: last(run, variant.metric) for run in variant.finished}
            for label, variant in self.variants.items()
            if variant.finished
        }
        return pd.DataFrame.from_dict(rows, orient="index").sort_index(axis=1)

    @property
    def compared_to(self) -> str | None:
        """The baseline, if it has finished runs."""
        return self.baseline if self.baseline and self.variants[self.baseline].finished else None

    @property
    def flops(self) -> float | None:
        """Of a training run, of any variant: the residual's own are not counted."""
        return next((run.flops for variant in self.variants.values() for run in variant.finished if run.flops), None)

    @property
    def size(self) -> int | None:
        """Parameters of the sublayers."""
        costs = (variant.one.costs for variant in self.variants.values())
        return next((each.sublayers for each in costs if each), None)


def settings(runs: Sequence[Run], metric: str, baseline: str | None) -> list[Setting]:
    """The settings of all runs, small ones first.

    A label is the name of a variant; with several settings, without the words (between dashes) that all variants of its
    setting have in common and no other setting has: those are the setting's own.

    Args:
        runs: at least one.
        metric: to compare.
        baseline: a label, or a variant's whole name; None: PreNorm, or else the first run.

    Raises:
        ValueError: no variant is called like the baseline.
    """
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        groups.setdefault(run.setting(), {}).setdefault(run.variant, []).append(run)
    others = len(groups) > 1
    words = [[set(name.split("-")) for name in group] for group in groups.values()]
    found = []
    for i, group in enumerate(groups.values()):
        elsewhere = {word for j, other in enumerate(words) if j != i for name in other for word in name}
        own = set.intersection(*words[i]) - elsewhere if others else set()
        labels = {name: "-".join(word for word in name.split("-") if word not in own) or name for name in group}
        if len(set(labels.values())) < len(labels):
            labels = {name: name for name in group}
        first = next(iter(group))
        label = (
            ("-".join(word for word in first.split("-") if word in own) or _shape(group[first][0])) if others else ""
        )
        found.append(
            (label, {labels[name]: Variant(labels[name], tuple(each), metric) for name, each in group.items()})
        )
    known = list(dict.fromkeys(label for _, variants in found for label in variants))
    if baseline is not None and baseline not in known:
        raise ValueError(f"--baseline {baseline}: there is {', '.join(known)}{nearest(baseline, known)}")
    made = [_setting(label, variants, baseline, known[0]) for label, variants in found]
    work = [setting.flops or math.inf for setting in made]
    differ = max(work) > ALIKE * min(work)
    return sorted(made, key=lambda setting: (differ and (setting.flops or math.inf), _natural(setting.label)))


def _setting(label: str, variants: dict[str, Variant], asked: str | None, first: str) -> Setting:
    prenorm = [name for name, variant in variants.items() if variant.one.residual == "PreNorm"]
    chosen = next((each for each in ([asked] if asked else [*prenorm, first]) if each in variants), None)
    order = sorted(variants, key=lambda name: (name != chosen, *_rank(variants[name])))
    return Setting(label, {name: variants[name] for name in order}, chosen)


def _shape(run: Run) -> str:
    """What a setting is called if the names of its runs do not say."""
    dim, layers = run.of("model", "config", "dim"), run.of("model", "config", "num_layers")
    return f"D={dim} layers={layers} steps={run.max_steps}"


def _rank(variant: Variant) -> tuple[int, list[tuple[int, str]]]:
    """In the order of the paper's Table 4, then by name."""
    row = paper.row_of(variant.one.residual, variant.one.options)
    return paper.TABLE_4.index(row) if row else len(paper.TABLE_4), _natural(variant.label)


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in a name by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def labels(found: Sequence[Setting]) -> list[str]:
    """All labels, each once, the baseline first."""
    return list(dict.fromkeys(label for setting in found for label in setting.variants))
