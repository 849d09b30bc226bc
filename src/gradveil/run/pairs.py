"""Means over seeds with their intervals, and differences between trainings that share a seed.

Two trainings of one seed see the same first weights, the same split and the same clients, so their difference says more than the
difference of two means: what the seed decides cancels out. The interval is Student's t over the seeds. It tells how much another
seed would change the result on data of this size; it does not tell how other data would.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from scipy.special import stdtrit

from gradveil.study.measures import Estimate

__all__ = ["pair_up", "t_interval"]


def t_interval(values: Sequence[float], *, least: float | None = None, most: float | None = None) -> Estimate:
    """Return the mean of a few values and its 95 % t interval, cut at what the value can be at all.

    >>> t_interval([0.5, 0.6, 0.7]).low is not None
    True
    >>> t_interval([0.5])
    Estimate(value=0.5, low=None, high=None, n=1, per_seed=(0.5,))
    """
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Estimate(value=mean, n=n, per_seed=tuple(values))
    half = float(stdtrit(n - 1, 0.975)) * statistics.stdev(values) / n**0.5
    low, high = mean - half, mean + half
    low = low if least is None else max(least, low)
    high = high if most is None else min(most, high)
    return Estimate(value=mean, low=low, high=high, n=n, per_seed=tuple(values))


def pair_up(defended: Mapping[int, float], undefended: Mapping[int, float]) -> dict[str, Estimate]:
    """Compare the accuracies of seeds that both sides have.

    Args:
        defended: Accuracy by seed.
        undefended: The same without the defense.

    Returns:
        ``accuracy`` and ``undefended``, the mean accuracies; ``difference``, defended minus undefended, paired; and ``pmm``,
        defended over undefended, paired, left out where an undefended accuracy is 0.

    Raises:
        ValueError: No seed is on both sides.
    """
    seeds = [seed for seed in defended if seed in undefended]
    if not seeds:
        raise ValueError("there is no seed with both a defended and an undefended training")
    pairs = [(defended[seed], undefended[seed]) for seed in seeds]
    found = {
        "accuracy": t_interval([a for a, _ in pairs], least=0.0, most=1.0),
        "undefended": t_interval([b for _, b in pairs], least=0.0, most=1.0),
        "difference": t_interval([a - b for a, b in pairs], least=-1.0, most=1.0),
    }
    if all(b > 0 for _, b in pairs):
        found["pmm"] = t_interval([a / b for a, b in pairs], least=0.0)
    return found
