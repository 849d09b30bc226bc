"""How sure is a share, and is one number different from another? Intervals of shares, McNemar's test, signed ranks and daggers.

This file needs neither torch nor scipy, because verdict and report use it and must open at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

__all__ = [
    "AGAINST_ALL",
    "AGAINST_BASELINE",
    "CONFIDENCE",
    "LEVEL",
    "SignedRank",
    "daggers",
    "effective_number",
    "exact_upper",
    "fewest_to_show",
    "mcnemar",
    "signed_rank",
    "wilson",
]

CONFIDENCE = 0.95
MOST_RECORDS = 1_000_000
"""Nobody audits more to show that a share is just below a limit."""

MOST_EXACT = 50
"""Pairs up to which the probability is counted out; beyond, the normal approximation agrees to a few parts in a thousand."""

LEVEL = 0.05
"""Probability below which a difference gets a dagger, as in the shadow paper; not corrected for the number of comparisons."""

AGAINST_BASELINE, AGAINST_ALL = "†", "‡"


def wilson(count: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Wilson score interval of a share (Wilson 1927).

    With z the normal quantile and p = count / n: centre (p + z²/2n) / (1 + z²/n), half width z √(p(1 - p)/n + z²/4n²) / (1 +
    z²/n). Unlike the textbook interval it stays inside [0, 1] and does not collapse to a point when none or all of few records
    are hit.

    Args:
        count: Number of hits; no whole number where ``n`` is an effective number.
        n: Number of records.
        confidence: Probability the interval aims to cover.

    Raises:
        ValueError: There is no such share.

    >>> [round(limit, 4) for limit in wilson(0, 20)]
    [0.0, 0.1611]
    """
    if not (n > 0 and 0 <= count <= n and 0.0 < confidence < 1.0):
        raise ValueError(f"no share to estimate from {count} of {n} at confidence {confidence}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, scale = count / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # None and all are exact ends, not ends up to rounding.
    return 0.0 if count == 0 else min(share, max(0.0, centre - half)), 1.0 if count == n else max(share, min(1.0, centre + half))


def exact_upper(count: float, n: float, confidence: float = CONFIDENCE) -> float:
    """Return the exact one-sided upper end of a share (Clopper and Pearson 1934): beyond it, so few hits are too rare.

    It solves Σ_{i ≤ count} C(n, i) p^i (1 - p)^(n - i) = 1 - confidence by bisection. Numbers that are not whole, as effective
    ones, are rounded to fewer records and more hits, so the end errs to the high side.

    >>> round(exact_upper(0, 59), 4), round(exact_upper(0, 58), 4)
    (0.0495, 0.0503)
    """
    if not (n > 0 and 0 <= count <= n and 0.0 < confidence < 1.0):
        raise ValueError(f"no share to bound from {count} of {n} at confidence {confidence}")
    whole = max(1, math.floor(n + 1e-9))
    hits = min(whole, math.ceil(count / n * whole - 1e-9))
    if hits == whole:
        return 1.0
    low, high = hits / whole, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(hits, whole, middle) > 1 - confidence else (low, middle)
    return high


def _at_most(count: int, n: int, share: float) -> float:
    """Return how likely at most ``count`` of ``n`` are hit."""
    if share <= 0 or share >= 1:
        return float(share <= 0)
    log_hit, log_miss, whole = math.log(share), math.log1p(-share), math.lgamma(n + 1)
    terms = (whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_hit + (n - i) * log_miss for i in range(count + 1))
    return math.fsum(math.exp(term) for term in terms)


def fewest_to_show(limit: float, share: float = 0.0, confidence: float = CONFIDENCE) -> int | None:
    """Return of how many records at least a share shows that the true one is at most ``limit``; None where no number does.

    Without hits that is ln(1 - confidence) / ln(1 - limit).

    >>> fewest_to_show(0.05), fewest_to_show(0.05, 0.02), fewest_to_show(0.05, 0.06)
    (59, 181, None)
    """
    if not (0 < limit < 1 and share < limit):
        return None
    if share <= 0:
        return math.ceil(math.log(1 - confidence) / math.log1p(-limit) - 1e-9)

    # Hits are whole, so 33 records can show less than 29; the most records with so many hits show more the more hits there are.
    hits = _first(lambda hits: exact_upper(hits, math.floor(hits / share + 1e-9), confidence) <= limit, MOST_RECORDS * share)
    return hits and _first(lambda n: n >= hits and exact_upper(hits, n, confidence) <= limit, MOST_RECORDS)


def _first(holds: Callable[[int], bool], most: float) -> int | None:
    """Return the first number from 1 on for which something holds that holds for all larger ones, too; None beyond ``most``."""
    high = 1
    while not holds(high):
        high *= 2
        if high > most:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def effective_number(hits: Sequence[float], *clusters: Sequence[Hashable]) -> float:
    """Return how many independent records these are worth, since records of one update, owner or model share their luck.

    The design effect of Kish (1965) and Rao and Scott (1992): with y hits among m records in each of C clusters, v = C/(C - 1)
    Σ(y - p m)² / n² is the variance of the share, and n v / (p(1 - p)) of n records make one. Where all or none were hit there is
    no variance to see, and clusters are counted; where few or nearly all were, as many as make the far end of the interval no
    nearer than it would be then, because one hit more shows no less of a leak. Clusters make no record worth more than it is.

    Args:
        hits: 0 or 1 per record.
        clusters: Ways to group the records, each a name per record; the one that leaves least counts.

    >>> effective_number([1, 1, 0, 0], [0, 0, 1, 1]), effective_number([1, 0, 1, 0], "abcd"), effective_number([0] * 4, "aabb")
    (1.0, 4.0, 2.0)
    """
    return min((_effective(hits, names) for names in clusters), default=float(len(hits)))


def _effective(hits: Sequence[float], names: Sequence[Hashable]) -> float:
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for name, hit in zip(names, hits, strict=True):
        groups[name].append(hit)
    n, many, share = len(hits), len(groups), sum(hits) / len(hits)
    if many == n or many == 1 or share in (0.0, 1.0):
        return float(many)
    variance = many / (many - 1) * sum((sum(own) - share * len(own)) ** 2 for own in groups.values()) / n**2
    return _no_surer_than_none(min(share, 1 - share), many, max(1.0, n / max(1.0, variance * n / (share * (1 - share)))))


def _no_surer_than_none(share: float, many: int, worth: float) -> float:
    """Return how many records a small share is worth, so that its upper end is not below that of no hit in so many clusters."""
    least = wilson(0, many)[1]
    low, high = min(float(many), worth), worth
    if wilson(share * high, high)[1] >= least:
        return high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if wilson(share * middle, middle)[1] >= least else (low, middle)
    return low


def mcnemar(first: Sequence[bool], second: Sequence[bool], clusters: Sequence[Hashable] | None = None) -> float:
    """Return the two-sided probability of records hit by one of two attackers alone, if both were equally good (McNemar 1947).

    Exact: of the records hit by one alone, each is either's with probability one half. With clusters, each cluster counts once,
    for the attacker who hit more of it, because its records share their luck.

    >>> round(mcnemar([True] * 6 + [False], [False] * 7), 5)
    0.03125
    """
    groups: dict[Hashable, int] = defaultdict(int)
    for name, left, right in zip(clusters or range(len(first)), first, second, strict=True):
        groups[name] += int(left) - int(right)
    ahead, behind = (sum(sign * each > 0 for each in groups.values()) for sign in (1, -1))
    return min(1.0, 2 * _at_most(min(ahead, behind), ahead + behind, 0.5)) if ahead + behind else 1.0


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
