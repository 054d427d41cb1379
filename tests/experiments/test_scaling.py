"""Fits recover what their points were made of; the paper's two fits give its compute advantage."""

import numpy as np
import pytest

from attnres_lit.experiments import paper
from attnres_lit.experiments.scaling import Fit, advantage_interval, compute_advantage, fit

NONE = np.empty((0, 2))
COMPUTES = [0.3, 0.6, 1.2, 2.4, 4.8]


def test_the_papers_advantage():
    baseline, block = (Fit(*paper.FITS[name], NONE) for name in ("PreNorm", "Block"))
    assert compute_advantage(baseline, block, 5.6) == pytest.approx(1.254, abs=5e-4)
    assert round(compute_advantage(baseline, block, 5.6), 2) == paper.ADVANTAGE
    assert compute_advantage(baseline, baseline, 5.6) == pytest.approx(1)


def test_exact_points_give_their_coefficients():
    found = fit("a", COMPUTES, [[1.891 * c**-0.057] for c in COMPUTES])
    assert (found.coefficient, found.exponent) == pytest.approx((1.891, 0.057))
    assert found.compute(float(found.loss(3.0))) == pytest.approx(3.0)
    assert np.isnan(found.interval()).all()  # one seed of each size


def noisy(coefficient, exponent, generator, seeds=5):
    return [coefficient * c**-exponent * np.exp(generator.normal(0, 0.004, seeds)) for c in COMPUTES]


def test_noisy_points_give_them_within_the_interval():
    inside = 0
    for seed in range(40):
        (a_low, a_high), (low, high) = fit(
            "a", COMPUTES, noisy(1.891, 0.057, np.random.default_rng(seed)), 300
        ).interval()
        inside += (a_low <= 1.891 <= a_high) + (low <= 0.057 <= high)
    assert inside >= 0.8 * 80  # a bootstrap of five seeds is a little narrow


def test_noise_that_two_fits_share_leaves_their_advantage_alone():
    shared = np.exp(np.random.default_rng(1).normal(0, 0.05, (len(COMPUTES), 3)))
    one, two = (fit(n, COMPUTES, [a * c**-0.057 * row for c, row in zip(COMPUTES, shared, strict=True)])
                for n, a in (("a", 1.9), ("b", 1.88)))  # fmt: skip
    low, high = advantage_interval(one, two, 1.8)
    exact = (1.9 / 1.88) ** (1 / one.exponent)
    assert low <= exact <= high
    assert high - low < 0.1 * exact
    assert one.interval()[0][1] - one.interval()[0][0] > 0.02


def test_a_fit_is_the_same_each_time():
    losses = noisy(1.9, 0.05, np.random.default_rng(0))
    np.testing.assert_array_equal(fit("a", COMPUTES, losses).samples, fit("a", COMPUTES, losses).samples)


def test_two_sizes_are_too_few():
    with pytest.raises(ValueError, match="a fit needs three or more sizes of model; PreNorm has 2"):
        fit("PreNorm", [1.0, 2.0], [[1.9], [1.8]])
