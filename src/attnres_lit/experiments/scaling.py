"""Power laws of the loss over compute, L = A C^-alpha, and what compute an architecture saves (paper, Fig. 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PFLOPS_DAY = 8.64e19  # FLOPs of 1 PFLOP/s in a day: the unit of C
SIZES = 3  # at least, for a fit of two coefficients
SAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Fit:
    """L = A C^-alpha.

    Args:
        coefficient: A, the loss at 1 PFLOP/s-day.
        exponent: alpha.
        samples: (A, alpha) of bootstrap samples, `(n, 2)`; n is 0 where there was one seed of every size.
    """

    coefficient: float
    exponent: float
    samples: np.ndarray

    def loss(self, compute: float | np.ndarray) -> np.ndarray:
        """At a compute in PFLOP/s-days."""
        return self.coefficient * np.asarray(compute, float) ** -self.exponent

    def compute(self, loss: float) -> float:
        """At which it reaches a loss, in PFLOP/s-days."""
        return float((self.coefficient / loss) ** (1 / self.exponent))

    def resampled(self) -> list["Fit"]:
        """The fits of the bootstrap samples."""
        return [Fit(float(a), float(alpha), np.empty((0, 2))) for a, alpha in self.samples]

    def interval(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """95% of the samples: of A, and of alpha; NaN without samples."""
        if len(self.samples) == 0:
            return (np.nan, np.nan), (np.nan, np.nan)
        low, high = np.quantile(self.samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        return (float(low[0]), float(high[0])), (float(low[1]), float(high[1]))


def fit(name: str, computes: Sequence[float], losses: Sequence[Sequence[float]], samples: int = SAMPLES) -> Fit:
    """Least squares in logarithms over all runs.

    Bootstrap samples draw the seeds of every size again, with replacement. The draws are the same for every
    architecture with as many seeds, so that differences between two fits keep their pairing by seed.

    Args:
        name: of the architecture, for the message.
        computes: PFLOP/s-days of every size.
        losses: of every size, those of its seeds.
        samples: of the bootstrap.

    Raises:
        ValueError: fewer than three sizes.
    """
    if len(set(computes)) < SIZES:
        raise ValueError(f"a fit needs three or more sizes of model; {name} has {len(set(computes))}")
    x = np.log(np.repeat(computes, [len(seeds) for seeds in losses]))
    found = np.empty((0, 2))
    if all(len(seeds) > 1 for seeds in losses):
        generator = np.random.default_rng(0)
        drawn = [generator.choice(seeds, (samples, len(seeds))) for seeds in losses]
        found = _least_squares(x, np.concatenate(drawn, axis=1))
    ((coefficient, exponent),) = _least_squares(x, np.concatenate(losses)[None])
    return Fit(float(coefficient), float(exponent), found)


def _least_squares(log_compute: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """(A, alpha) of every row of losses `(n, points)`: `(n, 2)`."""
    slope, intercept = np.polyfit(log_compute, np.log(losses).T, 1)
    return np.stack([np.exp(intercept), -slope], axis=1)


def compute_advantage(baseline: Fit, other: Fit, compute: float) -> float:
    """How many times the compute of `other` the baseline takes to reach the loss of `other`.

    Args:
        baseline: its fit.
        other: the fit of what is compared to it.
        compute: of `other`, in PFLOP/s-days.
    """
    return baseline.compute(float(other.loss(compute))) / compute


def advantage_interval(baseline: Fit, other: Fit, loss: float) -> tuple[float, float]:
    """95% of the bootstrap samples of the advantage at a loss; NaN without samples."""
    pairs = zip(baseline.resampled(), other.resampled(), strict=False)
    ratios = [compute_advantage(one, two, two.compute(loss)) for one, two in pairs]
    if not ratios:
        return np.nan, np.nan
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
