"""Is one defense's score different from another's? The Wilcoxon signed-rank test on values paired by record, and its daggers.

This file needs neither torch nor scipy, because the report uses it and must open at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["AGAINST_ALL", "AGAINST_BASELINE", "LEVEL", "SignedRank", "daggers", "signed_rank"]

MOST_EXACT = 50
"""Pairs up to which the probability is counted out; beyond, the normal approximation agrees to a few parts in a thousand."""

LEVEL = 0.05
"""Probability below which a difference gets a dagger, as in the shadow paper; not corrected for the number of comparisons."""

AGAINST_BASELINE, AGAINST_ALL = "†", "‡"


@dataclass(frozen=True)
class SignedRank:
    """The outcome of one test.

    Attributes:
        statistic: The smaller of the two sums of ranks.
        p: Two-sided probability of a sum as extreme without any difference.
        n: Pairs that differ; equal pairs say nothing and are left out.
    """

    statistic: float
    p: float
    n: int


def signed_rank(values: Sequence[float], baseline: Sequence[float]) -> SignedRank:
    """Test whether paired values differ, by the ranks of their differences (Wilcoxon 1945).

    Equal differences share the mean of their ranks. With at most 50 differing pairs the probability is exact: all 2ⁿ ways to sign
    the ranks at hand are counted. With more it is the normal approximation with the correction for ties. Records of one batch
    share an update, so their differences are not independent and p is too small; test one value per update where that matters.

    Args:
        values: One per record.
        baseline: One per record, in the same order.

    Returns:
        The outcome; p = 1 where no pair differs.

    Example:
        >>> signed_rank([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0] * 6).p
        0.03125
    """
    if len(values) != len(baseline) or not values:
        raise ValueError(f"{len(values)} values cannot be paired with {len(baseline)}; give one of each per record")
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    if not all(math.isfinite(each) for each in differences):
        raise ValueError("a signed-rank test needs finite values")
    moved = [each for each in differences if each != 0]
    if not moved:
        return SignedRank(0.0, 1.0, 0)
    doubled = _doubled_ranks([abs(each) for each in moved])
    positive = sum(rank for rank, each in zip(doubled, moved, strict=True) if each > 0)
    smaller = min(positive, sum(doubled) - positive)
    p = _exact(doubled, smaller) if len(moved) <= MOST_EXACT else _approximate(doubled, smaller)
    return SignedRank(smaller / 2, p, len(moved))


def _doubled_ranks(sizes: Sequence[float]) -> list[int]:
    """Return twice the rank of each size from 1; equal sizes share their mean rank, so doubling keeps whole numbers."""
    ordered = sorted(sizes)
    first = {size: place for place, size in reversed(list(enumerate(ordered, start=1)))}
    last = {size: place for place, size in enumerate(ordered, start=1)}
    return [first[size] + last[size] for size in sizes]


def _exact(doubled: Sequence[int], smaller: int) -> float:
    """Return twice the share of all signings whose positive ranks sum to at most ``smaller``."""
    ways = [1] + [0] * sum(doubled)
    for rank in doubled:
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    return min(1.0, 2.0 * sum(ways[: smaller + 1]) / float(2 ** len(doubled)))


def _approximate(doubled: Sequence[int], smaller: int) -> float:
    """Return the two-sided normal probability; signs are fair coins, so the variance is a quarter of the sum of squared ranks."""
    mean, variance = sum(doubled) / 2, sum(rank**2 for rank in doubled) / 4
    return min(1.0, math.erfc((mean - smaller) / math.sqrt(2 * variance)))


def daggers(columns: Mapping[str, Mapping[str, float]], baseline: str, *, level: float = LEVEL) -> dict[str, str]:
    """Return the mark of each method in a table: ``†`` where it differs from the baseline, ``‡`` where it does from all others.

    Args:
        columns: Method to its value per record, by record; records that two methods share are paired.
        baseline: The method the others are compared with.
        level: Probability below which a difference counts.

    Returns:
        Method to ``""``, ``"†"`` or ``"‡"``; the baseline has none. ``‡`` needs at least two methods beside the baseline, and
        implies ``†``.
    """
    marks = dict.fromkeys(columns, "")
    others = [name for name in columns if name != baseline]
    if baseline not in columns:
        return marks
    for name in others:
        if not _differ(columns[name], columns[baseline], level):
            continue
        rest = [other for other in others if other != name]
        everywhere = bool(rest) and all(_differ(columns[name], columns[other], level) for other in rest)
        marks[name] = AGAINST_ALL if everywhere else AGAINST_BASELINE
    return marks


def _differ(left: Mapping[str, float], right: Mapping[str, float], level: float) -> bool:
    shared = [record for record in left if record in right]
    if not shared:
        return False
    return signed_rank([left[record] for record in shared], [right[record] for record in shared]).p < level
