"""What every section of a report is made from, and how it writes numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnres_lit.experiments.records import Run
from attnres_lit.experiments.variants import Setting

LOSS = "val/loss"  # what the paper on Attention Residuals compares


class LeftOut(ValueError):
    """The runs do not hold what a section needs; the message says what that is."""


@dataclass(frozen=True)
class Study:
    """The runs, put side by side.

    Args:
        runs: all of them.
        settings: those that may be compared, small ones first.
        metric: that is compared.
        at_loss: where computes are compared; None: what the baseline reaches at its largest size.
        colours: of variants, by label.
    """

    runs: Sequence[Run]
    settings: Sequence[Setting]
    metric: str
    at_loss: float | None
    colours: Mapping[str, str]


def number(value: float | None, spec: str = ".4f") -> str:
    """Or a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else format(value, spec)


def with_interval(value: float, half: float) -> str:
    """A difference, and half of its interval."""
    return number(value, "+.4f") + ("" if math.isnan(half) else f" ± {half:.4f}")
