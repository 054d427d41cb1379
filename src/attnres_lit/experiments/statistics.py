"""Means over seeds, and differences to a baseline with 95% confidence intervals.

Runs of one seed share their initial values and the order of their data, so seeds are blocks of a two-way layout:
value = variant + seed + noise. The *pooled* interval takes the variance of the noise from all variants at once; the
*own* interval takes it from one variant and the baseline, which with three seeds leaves two degrees of freedom and a
factor of 4.3 in front of the standard error. Pooling assumes that the noise of all variants is about the same.
"""

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.95


def compare(values: pd.DataFrame, baseline: str | None) -> pd.DataFrame:
    """Every variant by itself, and against the baseline.

    Args:
        values: variants in rows, seeds in columns; NaN where there is no run.
        baseline: a row of it; None: without differences.

    Returns:
        for each variant: `mean`, `error` (standard error of the mean), `seeds`, `difference` to the baseline, half of
        its `pooled` and of its `own` interval. NaN where there are too few seeds. If seeds are missing, the difference
        is that of the two-way layout and not of the means. The own interval is of paired differences if the two have
        the same seeds, else Welch's.
    """
    table = pd.DataFrame(
        {"mean": values.mean(axis=1), "error": values.sem(axis=1), "seeds": values.count(axis=1).astype(int)}
    )
    if baseline is not None:
        rows = [_against(values, each, baseline) for each in values.index]
        table[["difference", "pooled", "own"]] = np.array(rows).reshape(-1, 3)
    return table


def _against(values: pd.DataFrame, variant: str, baseline: str) -> tuple[float, float, float]:
    if variant == baseline:
        return 0.0, np.nan, np.nan
    difference, pooled = _two_way(values, variant, baseline)
    return difference, pooled, _own(values.loc[variant].dropna(), values.loc[baseline].dropna())


def _two_way(values: pd.DataFrame, variant: str, baseline: str) -> tuple[float, float]:
    """The difference of two rows of a layout variant + seed, by least squares, and half of its interval."""
    points = values.to_numpy(dtype=float)
    rows, columns = np.nonzero(np.isfinite(points))
    y = points[rows, columns]
    x = np.concatenate([np.eye(len(values))[rows], np.eye(points.shape[1])[columns]], axis=1)
    contrast = np.zeros(x.shape[1])
    contrast[values.index.get_loc(variant)], contrast[values.index.get_loc(baseline)] = 1, -1
    inverse = np.linalg.pinv(x.T @ x)
    coefficients = inverse @ x.T @ y
    free = len(y) - np.linalg.matrix_rank(x)
    noise = float(np.sum((y - x @ coefficients) ** 2) / free) if free > 0 else np.nan
    if not np.allclose(contrast @ inverse @ x.T @ x, contrast):  # no seed links the two
        return float(values.loc[variant].mean() - values.loc[baseline].mean()), np.nan
    error = np.sqrt(noise * (contrast @ inverse @ contrast))
    return float(contrast @ coefficients), float(stats.t.ppf((1 + LEVEL) / 2, free) * error) if free > 0 else np.nan


def _own(ours: pd.Series, theirs: pd.Series) -> float:
    """Half of the interval of a difference of means, from these two alone."""
    if min(len(ours), len(theirs)) < 2:
        return np.nan
    if set(ours.index) == set(theirs.index):
        difference = ours - theirs
        return float(stats.t.ppf((1 + LEVEL) / 2, len(difference) - 1) * difference.sem())
    interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(LEVEL)
    return float(interval.high - interval.low) / 2
