"""The formulas behind certificates, against Monte Carlo, quadrature and cases that can be worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from gradveil.errors import UsageError
from gradveil.proofs.bounds import (
    _best_lambda,
    _draws,
    _excess,
    advantage_bound,
    gaussian_bound,
    mixed_bound,
    sampled_advantage,
    sampled_bound,
)
from gradveil.randomness import Seed

TRIALS = 200_000


def interval(share: float, n: int = TRIALS) -> float:
    """Four standard errors of a share: a true value outside has odds of 1 in 16,000."""
    return 4 * math.sqrt(share * (1 - share) / n) + 1e-9


@pytest.mark.parametrize(("sigma", "steps"), [(0.5, 1), (1.0, 1), (2.0, 5), (4.0, 40)])
def test_two_opposite_candidates_reach_the_bound_exactly(sigma: float, steps: int) -> None:
    """Means +1 and -1 are the worst case of κ = 1/2; the best attack reads off the sign of the sum over rounds."""
    draw = np.random.default_rng(1)
    sign = draw.choice([-1.0, 1.0], size=TRIALS)
    total = steps * sign + sigma * math.sqrt(steps) * draw.standard_normal(TRIALS)
    share = float((np.sign(total) == sign).mean())
    bound = gaussian_bound(0.5, noise_multiplier=sigma, steps=steps)
    assert bound == pytest.approx(share, abs=interval(share))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("count", [3, 10, 100])
def test_the_best_attack_on_orthogonal_candidates_stays_below_the_bound(sigma: float, count: int) -> None:
    draw = np.random.default_rng(2)
    scores = sigma * draw.standard_normal((20_000, count))
    scores[:, 0] += 1.0  # the true candidate; by symmetry it may always be the first
    share = float((scores.argmax(1) == 0).mean())
    bound = gaussian_bound(1 / count, noise_multiplier=sigma)
    assert share <= bound + interval(share, 20_000)
    assert share >= 1 / count - interval(share, 20_000)


def by_ranking(kappa: float, sigma: float, rate: float, steps: int, n: int) -> tuple[float, float]:
    """The formula of Hayes et al. in its own words, drawn from noise alone: 1 - E[r; r in its lowest 1 - κ]; and its error."""
    draw = np.random.default_rng(3)
    x = sigma * draw.standard_normal((n, steps))
    ratio = np.prod(1 - rate + rate * np.exp((2 * x - 1) / (2 * sigma**2)), axis=1)
    low = np.sort(ratio)[: round((1 - kappa) * n)]
    return 1 - float(low.sum()) / n, float(np.minimum(ratio, low[-1]).std()) / math.sqrt(n)


@pytest.mark.parametrize(
    ("kappa", "sigma", "rate", "steps"), [(0.01, 1.0, 0.1, 10), (0.1, 0.8, 0.3, 5), (0.004, 1.5, 0.5, 20), (0.5, 2.0, 0.2, 30)]
)
def test_sampled_releases_agree_with_the_ranking_formula(kappa: float, sigma: float, rate: float, steps: int) -> None:
    found = sampled_bound(kappa, noise_multiplier=sigma, sampling_rate=rate, steps=steps)
    expected, error = by_ranking(kappa, sigma, rate, steps, 100_000)
    assert found.estimate == pytest.approx(expected, abs=6 * error + 1e-3)
    assert found.bound > found.estimate
    assert found.bound <= gaussian_bound(kappa, noise_multiplier=sigma, steps=steps)
    assert (found.confidence, found.samples) == (0.999, 50_000)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(0.5, 0.5, 4), (0.7, 0.2, 10), (1.0, 0.5, 20), (2.0, 0.9, 30)])
def test_attacks_on_sampled_releases_stay_below_the_bound(sigma: float, rate: float, steps: int) -> None:
    """Orthogonal candidates: the sum of inner products, and the likelihood itself, which no attack with the list beats."""
    draw, n, count = np.random.default_rng(7), 4000, 32
    sums, likelihood = np.zeros((n, count)), np.zeros((n, count))
    for _ in range(steps):
        seen = sigma * draw.standard_normal((n, count))
        seen[:, 0] += draw.random(n) < rate  # the true candidate; by symmetry it may always be the first
        sums += seen
        likelihood += np.log(1 - rate + rate * np.exp((2 * seen - 1) / (2 * sigma**2)))
    bound = sampled_bound(1 / count, noise_multiplier=sigma, sampling_rate=rate, steps=steps, samples=20_000).bound
    shares = [float((scores.argmax(1) == 0).mean()) for scores in (sums, likelihood)]
    assert max(shares) <= bound + interval(bound, n)
    assert max(shares) > 0.6 * bound


@pytest.mark.parametrize("kappa", [0.004, 0.1, 0.5])
@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 0.5), (1.0, 0.1), (3.0, 0.9)])
def test_monte_carlo_agrees_with_the_exact_value_of_one_release(kappa: float, sigma: float, rate: float) -> None:
    exact = sampled_bound(kappa, noise_multiplier=sigma, sampling_rate=rate).bound
    assert exact == (1 - rate) * kappa + rate * float(norm.cdf(norm.ppf(kappa) + 1 / sigma))
    tuning, judging = _draws(sigma, rate, 1, 100_000, Seed(4))
    log_lambda = _best_lambda(tuning, kappa)
    mean, margin = _excess(judging, log_lambda, 0.999)
    estimate = kappa * math.exp(log_lambda) + mean
    assert estimate - margin <= exact <= estimate + margin
    assert margin < 0.01


def test_two_sampled_releases_agree_with_quadrature() -> None:
    kappa, sigma, rate = 0.05, 0.7, 0.4
    grid = np.linspace(-8 * sigma, 8 * sigma + 1, 1600)
    density = norm.pdf(grid, scale=sigma) * (grid[1] - grid[0])
    ratio = 1 - rate + rate * np.exp((2 * grid - 1) / (2 * sigma**2))
    mass, joint = np.outer(density, density).ravel(), np.outer(ratio, ratio).ravel()
    order = np.argsort(-joint)
    inside = np.cumsum(mass[order]) <= kappa
    exact = float((mass * joint)[order][inside].sum())
    found = sampled_bound(kappa, noise_multiplier=sigma, sampling_rate=rate, steps=2)
    assert found.estimate == pytest.approx(exact, abs=0.005)
    assert exact - 1e-3 <= found.bound <= exact + 0.02


def test_the_margin_covers_as_often_as_it_says() -> None:
    """At 90 % confidence, at most about 10 of 100 bounds may lie below the exact value; in fact fewer, the margin is generous."""
    exact = sampled_bound(0.1, noise_multiplier=1.0, sampling_rate=0.5).bound
    below = 0
    for seed in range(100):
        tuning, judging = _draws(1.0, 0.5, 1, 2000, Seed(seed))
        log_lambda = _best_lambda(tuning, 0.1)
        mean, margin = _excess(judging, log_lambda, 0.9)
        below += 0.1 * math.exp(log_lambda) + mean + margin < exact
    assert below <= 10


def test_knowing_the_label_is_not_covered_by_the_plain_bound() -> None:
    """One class of 1 and one of 99: who knows the label has the single one for certain, and the mean says so."""
    kappas, weights = (1.0, 1 / 99), (1, 99)
    aware = mixed_bound(kappas, weights, noise_multiplier=10.0)
    assert aware == pytest.approx(0.01 + 0.99 * gaussian_bound(1 / 99, noise_multiplier=10.0))
    assert aware > gaussian_bound(1 / 100, noise_multiplier=10.0)
    assert mixed_bound((0.2, 0.9), (1, 0), noise_multiplier=1.0) == gaussian_bound(0.2, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("kappa", "sigma", "steps", "expected"),
    [
        (0.3, 0.0, 1, 1.0),
        (0.0, 0.0, 1, 1.0),
        (0.3, 0.0, 0, 0.3),
        (0.3, 1.0, 0, 0.3),
        (1.0, 5.0, 3, 1.0),
        (0.0, 5.0, 3, 0.0),
        (0.3, 1e-300, 1, 1.0),
    ],
)
def test_edges_have_defined_answers(kappa: float, sigma: float, steps: int, expected: float) -> None:
    assert gaussian_bound(kappa, noise_multiplier=sigma, steps=steps) == expected
    assert sampled_bound(kappa, noise_multiplier=sigma, sampling_rate=1.0, steps=steps).bound == expected
    assert sampled_bound(kappa, noise_multiplier=sigma, sampling_rate=0.0, steps=steps).bound == kappa


def test_sampling_without_noise_hides_only_who_never_took_part() -> None:
    found = sampled_bound(0.1, noise_multiplier=0.0, sampling_rate=0.5, steps=2)
    assert found.bound == pytest.approx(0.25 * 0.1 + 0.75)
    assert sampled_advantage(noise_multiplier=0.0, sampling_rate=0.5, steps=2).bound == pytest.approx(0.75)


def test_many_steps_at_a_high_rate_stay_finite() -> None:
    found = sampled_bound(0.01, noise_multiplier=0.3, sampling_rate=0.9, steps=400, samples=2000)
    assert found.bound == 1.0
    assert 0.99 < sampled_advantage(noise_multiplier=0.3, sampling_rate=0.9, steps=400, samples=2000).bound <= 1.0


def test_the_advantage_is_the_largest_gap_of_the_bound() -> None:
    gaps = [gaussian_bound(k, noise_multiplier=1.3, steps=2) - k for k in np.linspace(0, 1, 2001)]
    assert advantage_bound(noise_multiplier=1.3, steps=2) == pytest.approx(max(gaps), abs=1e-6)
    assert advantage_bound(noise_multiplier=1.0, steps=0) == 0.0
    assert advantage_bound(noise_multiplier=0.0) == 1.0
    mu = 2 / 1.3
    assert advantage_bound(noise_multiplier=1.3, replaced=True, collision=0.25) == pytest.approx(
        0.75 * (2 * norm.cdf(mu / 2) - 1)
    )


def test_the_sampled_advantage_agrees_with_monte_carlo_from_the_other_side() -> None:
    sigma, rate, steps, n = 0.8, 0.3, 8, 100_000
    x = sigma * np.random.default_rng(5).standard_normal((n, steps))
    ratio = np.prod(1 - rate + rate * np.exp((2 * x - 1) / (2 * sigma**2)), axis=1)
    below = np.maximum(0, 1 - ratio)  # under noise alone; its mean is the same total variation
    found = sampled_advantage(noise_multiplier=sigma, sampling_rate=rate, steps=steps)
    assert found.estimate == pytest.approx(float(below.mean()), abs=0.01)
    assert below.mean() - 4 * below.std() / math.sqrt(n) < found.bound < advantage_bound(noise_multiplier=sigma, steps=steps)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gaussian_bound(1.5, noise_multiplier=1.0), "kappa is 1.5"),
        (lambda: gaussian_bound(math.nan, noise_multiplier=1.0), "kappa is nan"),
        (lambda: gaussian_bound(0.5, noise_multiplier=-1.0), "noise_multiplier is -1.0"),
        (lambda: gaussian_bound(0.5, noise_multiplier=math.nan), "noise_multiplier is nan"),
        (lambda: gaussian_bound(0.5, noise_multiplier=1.0, steps=-1), "steps is -1"),
        (lambda: mixed_bound((), (), noise_multiplier=1.0), "no group holds a candidate"),
        (lambda: mixed_bound((0.5,), (0.0,), noise_multiplier=1.0), "no group holds a candidate"),
        (lambda: mixed_bound((0.5,), (1.0, 1.0), noise_multiplier=1.0), "every kappa needs a weight"),
        (lambda: sampled_bound(0.5, noise_multiplier=1.0, sampling_rate=2.0), "sampling_rate is 2.0"),
        (lambda: sampled_bound(0.5, noise_multiplier=1.0, sampling_rate=0.5, steps=2, samples=10), "at least 1000 draws"),
        (lambda: sampled_bound(0.5, noise_multiplier=1.0, sampling_rate=0.5, steps=2, confidence=1.0), "confidence is 1.0"),
    ],
)
def test_senseless_numbers_get_one_sentence(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()
