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
    table = pd.DataFrame({"mean": values.mean(axis=1), "error": values.sem(axis=1), "seeds": values.count(axis=1)})
    if baseline is not None:
        points, at = values.to_numpy(dtype=float), list(values.index).index(baseline)
        rows = [_against(points, row, at) for row in range(len(points))]
        table[["difference", "pooled", "own"]] = np.array(rows)
    return table


def _against(points: np.ndarray, row: int, baseline: int) -> tuple[float, float, float]:
    if row == baseline:
        return 0.0, np.nan, np.nan
    return *_two_way(points, row, baseline), _own(points[row], points[baseline])


def _two_way(points: np.ndarray, row: int, baseline: int) -> tuple[float, float]:
    """The difference of two rows of a layout variant + seed, by least squares, and half of its interval."""
    rows, columns = np.nonzero(np.isfinite(points))
    y = points[rows, columns]
    x = np.concatenate([np.eye(points.shape[0])[rows], np.eye(points.shape[1])[columns]], axis=1)
    contrast = np.zeros(x.shape[1])
    contrast[row], contrast[baseline] = 1, -1
    inverse = np.linalg.pinv(x.T @ x)
    if not np.allclose(contrast @ inverse @ x.T @ x, contrast):  # no seed links the two
        return float(np.nanmean(points[row]) - np.nanmean(points[baseline])), np.nan
    coefficients = inverse @ x.T @ y
    free = len(y) - np.linalg.matrix_rank(x)
    if free == 0:
        return float(contrast @ coefficients), np.nan
    noise = np.sum((y - x @ coefficients) ** 2) / free
    half = stats.t.ppf((1 + LEVEL) / 2, free) * np.sqrt(noise * (contrast @ inverse @ contrast))
    return float(contrast @ coefficients), float(half)


def _own(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Half of the interval of a difference of means, from these two alone."""
    has_ours, has_theirs = np.isfinite(ours), np.isfinite(theirs)
    if min(has_ours.sum(), has_theirs.sum()) < 2:
        return np.nan
    if np.array_equal(has_ours, has_theirs):
        differences = (ours - theirs)[has_ours]
        count = len(differences)
        return float(stats.t.ppf((1 + LEVEL) / 2, count - 1) * differences.std(ddof=1) / count**0.5)
    interval = stats.ttest_ind(ours[has_ours], theirs[has_theirs], equal_var=False).confidence_interval(LEVEL)
    return float(interval.high - interval.low) / 2
