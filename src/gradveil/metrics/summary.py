"""Summaries of per-record values: shares with a Wilson interval, others with median, worst and a bootstrap interval.

What is summarised are plain numbers, no NaN and no infinity, and n stands beside every value. Records of one batch share an
update, and those of one owner look alike: the intervals of shares count them as fewer, by
`gradveil.significance.effective_number`. The intervals of medians treat records as independent, and are a little too narrow for
batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gradveil import significance
from gradveil.errors import UsageError
from gradveil.metrics.base import METRICS, Unavailable
from gradveil.metrics.identification import IIP
from gradveil.randomness import Seed
from gradveil.significance import CONFIDENCE, effective_number
from gradveil.study.measures import Quality, Share, Spread

__all__ = ["SHARES", "Values", "bootstrap_median", "median", "share_of", "summarise", "wilson"]

Q = TypeVar("Q", bound=Quality)

Values = Tensor | npt.NDArray[Any] | Sequence[float] | Sequence[bool]

SHARES = ("identified", "label_accuracy", *(f"iip_{k}" for k in IIP))
"""Names whose values are yes or no for each record; all others are metrics."""

CHUNK_ENTRIES = 2**22


def wilson(count: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Wilson score interval of a share, as `gradveil.significance` computes it.

    Example:
        >>> [round(limit, 4) for limit in wilson(0, 20)]
        [0.0, 0.1611]
    """
    if not (n >= 1 and 0 <= count <= n and 0.0 < confidence < 1.0):
        raise UsageError(f"no share to estimate from {count} of {n} at confidence {confidence}")
    return significance.wilson(count, n, confidence)


def median(values: Values) -> float:
    """Return the median; of an even number of values, the mean of the two in the middle (`Tensor.median` takes the lower one).

    Example:
        >>> median([1.0, 2.0, 4.0, 9.0])
        3.0
    """
    return float(np.median(_array(values)))


def bootstrap_median(values: Values, seed: Seed, resamples: int = 2000, confidence: float = 0.95) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the median.

    Args:
        values: One finite value per record.
        seed: Where the resampling draws from; equal seeds give equal bits.
        resamples: Number of resamples.
        confidence: Probability the interval aims to cover.

    Returns:
        Lower and upper limit; both are the value itself when there is one record, which says nothing about its spread.
    """
    sample = _array(values)
    if sample.size == 0 or not bool(np.isfinite(sample).all()):
        raise UsageError("the interval of a median needs at least one value, all of them finite")
    generator = seed.numpy("bootstrap")
    step = max(1, CHUNK_ENTRIES // sample.size)
    medians = [
        np.median(sample[generator.integers(sample.size, size=(min(step, resamples - start), sample.size))], axis=1)
        for start in range(0, resamples, step)
    ]
    low, high = np.quantile(np.concatenate(medians), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def share_of(count: int, n: int, effective: float | None = None) -> Share:
    """Return a share with its Wilson interval; ``effective`` is how many independent records these are worth, where fewer."""
    if not (n >= 1 and 0 <= count <= n):
        raise UsageError(f"no share to estimate from {count} of {n}")
    return Share.of(count, n, effective=effective)


def summarise(
    per_record: Mapping[str, Values | Unavailable], seed: Seed, kind: type[Q], clusters: Sequence[Sequence[Hashable]] = ()
) -> Q:
    """Return the summary of one set of reconstructions.

    Args:
        per_record: For each metric or share its values, one per record in the same order, or why there are none.
        seed: Where the bootstrap draws from; each metric has its own stream, so that one more changes no other.
        kind: Which summary: `Summary`, or `Quality` where nobody was to be identified.
        clusters: Ways in which records belong together, by update or owner; each a name per record.
    """
    arrays = {name: values if isinstance(values, Unavailable) else _array(values) for name, values in per_record.items()}
    sizes = {name: int(values.size) for name, values in arrays.items() if not isinstance(values, Unavailable)}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise UsageError(
            f"a summary needs the same number of values, at least one, for each metric, not {sizes or 'none at all'}"
        )
    found: dict[str, Any] = {name: _measure(name, values, seed, clusters) for name, values in arrays.items()}
    lost = {name: each.reason for name, each in found.items() if isinstance(each, Unavailable)}
    told = {name: each for name, each in found.items() if name not in lost}
    return kind(n=next(iter(sizes.values())), unavailable=lost, **told)


def _measure(
    name: str, values: npt.NDArray[np.float64] | Unavailable, seed: Seed, clusters: Sequence[Sequence[Hashable]]
) -> Share | Spread | Unavailable:
    if isinstance(values, Unavailable):
        return values
    if name not in SHARES:
        return _spread(name, values, seed.child(name))
    if not bool(np.isin(values, (0.0, 1.0)).all()):
        raise UsageError(f"{name!r} is a share: each record's value is 0 or 1")
    return share_of(int(values.sum()), int(values.size), effective_number(values.tolist(), *clusters))


def _spread(name: str, values: npt.NDArray[np.float64], seed: Seed) -> Spread | Unavailable:
    """Return the median with its interval; ``worst`` is worst for the owner of the data: the value of the best reconstruction."""
    card, n = METRICS.card(name), int(values.size)
    lost = int((~np.isfinite(values)).sum())
    if lost:
        # Leaving them out would summarise only the records that went well.
        return Unavailable(f"{lost} of {n} values are not finite")
    low, high = bootstrap_median(values, seed)
    worst = values.max() if card.higher_is_better else values.min()
    return Spread(median=median(values), low=low, high=high, worst=float(worst), n=n)


def _array(values: Values) -> npt.NDArray[np.float64]:
    """Return one-dimensional double-precision values."""
    plain = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    array = np.asarray(plain, dtype=np.float64)
    if array.ndim != 1:
        raise UsageError(f"a summary takes one value per record, not shape {array.shape}")
    return array
