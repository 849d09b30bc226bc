"""The floor under the mean error, against attackers whose error is known or measured."""

from __future__ import annotations

import numpy as np
import pytest

from gradveil.errors import UsageError
from gradveil.risk.mean_error import mean_error_bound, mean_error_from_spectra, smoothed_score


def test_the_best_attacker_on_a_linear_release_meets_the_floor() -> None:
    """x ~ N(0, τ²), y = A x + noise: the posterior mean is optimal, and its measured error is the floor itself."""
    draw = np.random.default_rng(0)
    matrix, std, tau, n = draw.standard_normal((12, 6)), 0.7, 0.4, 100_000
    floor = mean_error_bound([matrix.T @ matrix] * 2, noise_std=std, score=smoothed_score(6, tau))
    x = tau * draw.standard_normal((n, 6))
    y = x @ matrix.T + std * draw.standard_normal((n, 12))
    gain = np.linalg.solve(matrix.T @ matrix / std**2 + np.eye(6) / tau**2, matrix.T / std**2)
    errors = np.square(y @ gain.T - x).mean(1)
    assert floor.value == pytest.approx(errors.mean(), abs=4 * errors.std() / np.sqrt(n))
    assert floor.low == pytest.approx(floor.value) == floor.high  # every input has the same information
    assert floor.psnr == pytest.approx(-10 * np.log10(floor.value))
    spectrum = np.linalg.svd(matrix, compute_uv=False)
    loose = mean_error_from_spectra([spectrum], dimension=6, noise_std=std, score_trace=6 / tau**2)
    assert 0 < loose.value <= floor.value


@pytest.mark.parametrize("std", [0.05, 0.3, 2.0])
def test_the_best_attacker_on_a_bent_release_stays_above_the_floor(std: float) -> None:
    """One entry, y = sin(2 x) + noise, x ~ N(0, 1): the posterior mean by quadrature is the best there is."""
    draw = np.random.default_rng(1)
    grid = np.linspace(-5, 5, 2001)
    x = draw.standard_normal(2000)
    y = np.sin(2 * x) + std * draw.standard_normal(2000)
    log_weight = -(grid**2) / 2 - np.square(y[:, None] - np.sin(2 * grid)) / (2 * std**2)
    weight = np.exp(log_weight - log_weight.max(1, keepdims=True))
    errors = np.square((weight @ grid) / weight.sum(1) - x)
    slopes = 2 * np.cos(2 * x)
    grams = [np.array([[slope**2]]) for slope in slopes]
    for floor in (
        mean_error_bound(grams, noise_std=std, score=np.eye(1)),
        mean_error_from_spectra([[slope] for slope in slopes], dimension=1, noise_std=std, score_trace=1.0),
    ):
        assert floor.low is not None and floor.high is not None
        assert floor.low <= floor.value <= floor.high
        assert floor.low <= errors.mean() + 4 * errors.std() / np.sqrt(len(errors))


def test_the_interval_covers_the_mean_of_all_inputs() -> None:
    draw = np.random.default_rng(2)
    everything = [np.outer(v, v) * draw.exponential() for v in draw.standard_normal((3000, 3))]
    score = smoothed_score(3, 0.8)
    truth = mean_error_bound(everything, noise_std=1.0, score=score).value
    covered = 0
    for _ in range(100):
        sample = [everything[i] for i in draw.integers(len(everything), size=60)]
        found = mean_error_bound(sample, noise_std=1.0, score=score)
        assert found.low is not None and found.high is not None
        covered += found.low <= truth <= found.high
    assert covered >= 85  # 95 is the aim; sixty heavy-tailed inputs miss it a little more often


def test_releases_add_up() -> None:
    gram = np.diag([1.0, 2.0])
    once = mean_error_bound([gram], noise_std=1.0, score=np.eye(2), steps=4)
    assert once == mean_error_bound([gram], noise_std=0.5, score=np.eye(2))
    assert once.value == pytest.approx((1 / 5 + 1 / 9) / 2)
    assert mean_error_bound([gram], noise_std=1.0, score=np.eye(2), steps=0).value == 1.0  # the prior alone


def test_edges_have_defined_answers() -> None:
    gram = np.eye(2)
    bare = mean_error_bound([gram], noise_std=0.0, score=np.eye(2))
    assert (bare.value, bare.low, bare.psnr) == (0.0, 0.0, None)
    assert mean_error_from_spectra([[1.0]], dimension=2, noise_std=0.0, score_trace=1.0).value == 0.0
    single = mean_error_bound([gram], noise_std=1.0, score=np.eye(2))
    assert (single.n, single.low, single.high) == (1, None, None)
    dead = mean_error_bound([np.zeros((2, 2))] * 3, noise_std=1.0, score=smoothed_score(2, 0.1))
    assert dead.value == pytest.approx(0.01) == dead.low


@pytest.mark.parametrize(
    ("grams", "settings", "words"),
    [
        ([], {}, "at least one matrix"),
        ([np.eye(3)], {}, "at least one matrix"),
        ([np.full((2, 2), np.nan)], {}, "not finite"),
        ([np.zeros((2, 2))], {"score": np.zeros((2, 2))}, "neither prior nor information"),
        ([np.diag([1.0, 0.0])], {"score": np.zeros((2, 2))}, "neither prior nor information"),
        ([np.eye(2)], {"noise_std": -1.0}, "noise_std is -1.0"),
        ([np.eye(2)], {"steps": -1}, "steps is -1"),
        ([np.eye(2)], {"confidence": 1.0}, "confidence is 1.0"),
    ],
)
def test_senseless_input_gets_one_sentence(grams: list[np.ndarray], settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mean_error_bound(grams, **{"noise_std": 1.0, "score": np.eye(2), **settings})  # type: ignore[arg-type]


def test_a_prior_without_score_is_refused() -> None:
    with pytest.raises(UsageError, match="smoothing is 0"):
        smoothed_score(2, 0.0)
    with pytest.raises(UsageError, match="score_trace is 0"):
        mean_error_from_spectra([[1.0]], dimension=1, noise_std=1.0, score_trace=0.0)
    with pytest.raises(UsageError, match="finite singular values"):
        mean_error_from_spectra([], dimension=1, noise_std=1.0, score_trace=1.0)
