"""How far the truth stands above other candidates of a list, fitted to its ranks: the d' of signal detection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from gradveil.study.levels import Sensitivity

__all__ = ["SIZES", "first_among", "fit_sensitivity", "rank_probabilities"]

SIZES = (2, 10, 100, 1000, 10**6)
"""Sizes of lists that a fitted d' is told for."""
LOWEST, HIGHEST = -6.0, 40.0
REACH, STEP = 9.0, 0.02


def rank_probabilities(ranks: Sequence[int], sizes: Sequence[int], d: float) -> npt.NDArray[np.float64]:
    """Return the probability of each rank of the truth, from 1, among so many candidates.

    Scores of others are N(0, 1), that of the truth N(d, 1): ``C(N-1, r-1) ∫ φ(z-d) Φ(z)^(N-r) (1-Φ(z))^(r-1) dz``, by the
    trapezoidal rule, which is as good as exact for an integrand this smooth.

    >>> rank_probabilities([1, 1], [2, 10], 0.0).round(6).tolist()
    [0.5, 0.1]
    """
    z: npt.NDArray[np.float64] = np.arange(d - REACH, d + REACH, STEP)
    rank, size = (np.asarray(each, dtype=np.float64)[:, None] for each in (ranks, sizes))
    ways = special.gammaln(size) - special.gammaln(rank) - special.gammaln(size - rank + 1)
    logs = ways - 0.5 * (z - d) ** 2 + (size - rank) * special.log_ndtr(z) + (rank - 1) * special.log_ndtr(-z)
    found: npt.NDArray[np.float64] = np.exp(logs).sum(1) * STEP / np.sqrt(2 * np.pi)
    return np.minimum(found, 1.0)


def first_among(size: int, d: float) -> float:
    """Return how often the truth is first among ``size`` candidates."""
    return float(rank_probabilities([1], [size], d)[0])


def fit_sensitivity(
    ranks: Sequence[int], sizes: Sequence[int], confidence: float = 0.95, *, worth: float | None = None
) -> Sensitivity:
    """Fit d' to the ranks of the truth by maximum likelihood, with the interval of likelihoods that are not much lower.

    Where the truth was always first every larger d' is likelier, so there is a lower end only, and the shares at other sizes
    are those at that end. The model is one of equal variances and equally hard records; lists of records that are alike break it.

    Args:
        ranks: From 1, of every record.
        sizes: Of its list.
        confidence: Of the interval.
        worth: How many independent records these are worth, where they share updates or owners.
    """
    counted = Counter(zip(ranks, sizes, strict=True))
    kept_ranks, kept_sizes = zip(*counted, strict=True)
    counts = np.array(list(counted.values()), dtype=np.float64)
    counts *= worth / counts.sum() if worth else 1.0

    def loss(d: float) -> float:
        return -float(counts @ np.log(rank_probabilities(kept_ranks, kept_sizes, d).clip(1e-300)))

    slack = float(stats.chi2.ppf(confidence, 1)) / 2
    if all(rank == 1 for rank in kept_ranks):
        low = _crossing(loss, slack, LOWEST, HIGHEST)
        return Sensitivity(low=low, at=_at(low))
    grid = np.arange(LOWEST, HIGHEST)
    place = int(np.argmin([loss(float(each)) for each in grid]))
    around = float(grid[max(0, place - 1)]), float(grid[min(len(grid) - 1, place + 1)])
    best = float(optimize.minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 1e-4}).x)
    most = loss(best) + slack
    return Sensitivity(d=best, low=_crossing(loss, most, LOWEST, best), high=_crossing(loss, most, best, HIGHEST), at=_at(best))


def _crossing(loss: Callable[[float], float], level: float, left: float, right: float) -> float | None:
    """Return where the loss crosses a level, or None where it does not between two points."""
    if (loss(left) - level) * (loss(right) - level) > 0:
        return None
    return float(optimize.brentq(lambda d: loss(d) - level, left, right, xtol=1e-4))


def _at(d: float | None) -> dict[str, float]:
    return {} if d is None else {str(size): first_among(size, d) for size in SIZES}
