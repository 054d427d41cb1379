"""Intervals against formulas written out for a complete table, and what is missing is left out."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from attnres_lit.experiments.statistics import compare

VALUES = pd.DataFrame(
    [[1.50, 1.52, 1.51], [1.47, 1.50, 1.48], [1.49, 1.50, 1.50]], index=["PreNorm", "Full", "Block"], columns=[0, 1, 2]
)


def test_a_complete_table():
    found = compare(VALUES, "PreNorm")
    x = VALUES.to_numpy()
    noise = x - x.mean(1, keepdims=True) - x.mean(0, keepdims=True) + x.mean()
    variance = (noise**2).sum() / 4  # (3 - 1) (3 - 1) degrees of freedom
    assert found.loc["Full", "mean"] == pytest.approx(1.48333, abs=1e-5)
    assert found.loc["Full", "error"] == pytest.approx(x[1].std(ddof=1) / 3**0.5)
    assert found.loc["Full", "difference"] == pytest.approx((-0.03 - 0.02 - 0.03) / 3)
    assert found.loc["Full", "pooled"] == pytest.approx(2.776445 * (variance * 2 / 3) ** 0.5, rel=1e-5)
    assert found.loc["Full", "own"] == pytest.approx(4.302653 * (x[1] - x[0]).std(ddof=1) / 3**0.5, rel=1e-5)
    assert found.loc["PreNorm", "difference"] == 0
    assert list(found["seeds"]) == [3, 3, 3]


def test_a_seed_that_shifts_all_variants_changes_no_difference():
    shifted = compare(VALUES + np.array([0.0, 0.3, -0.2]), "PreNorm")
    columns = ["difference", "pooled", "own"]
    pd.testing.assert_frame_equal(shifted[columns], compare(VALUES, "PreNorm")[columns])


def test_a_missing_run_does_not_shift_the_difference_by_its_seed():
    values = VALUES + np.array([0.0, 0.5, 0.0])
    values.loc["Full", 1] = np.nan
    found = compare(values, "PreNorm")
    assert found.loc["Full", "difference"] == pytest.approx(-0.03, abs=0.003)
    assert found.loc["Full", "pooled"] < 0.02
    welch = stats.ttest_ind([1.47, 1.48], [1.50, 2.02, 1.51], equal_var=False).confidence_interval()
    assert found.loc["Full", "own"] == pytest.approx((welch.high - welch.low) / 2)


def test_the_pooled_interval_covers_the_truth_19_times_in_20():
    generator, inside, rounds = np.random.default_rng(0), 0, 200
    for _ in range(rounds):
        noise = generator.normal(0, 0.01, (4, 3)) + generator.normal(0, 0.1, 3)
        found = compare(pd.DataFrame(noise + np.arange(4)[:, None]), 0).loc[3]
        inside += abs(found["difference"] - 3) <= found["pooled"]
    assert 0.91 <= inside / rounds <= 0.99


def test_one_seed_has_a_difference_and_no_interval():
    found = compare(VALUES[[0]], "PreNorm").loc["Full"]
    assert found["difference"] == pytest.approx(-0.03)
    assert np.isnan(found[["error", "pooled", "own"]].to_numpy(dtype=float)).all()


def test_runs_that_share_no_seed_are_compared_by_their_means():
    values = pd.DataFrame([[1.5, 1.6, np.nan, np.nan], [np.nan, np.nan, 1.3, 1.4]], index=["a", "b"])
    found = compare(values, "a").loc["b"]
    assert found["difference"] == pytest.approx(-0.2)
    assert np.isnan(found["pooled"])
    assert np.isfinite(found["own"])
