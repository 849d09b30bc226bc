"""The plausible counts of classes in a batch, around an estimate that is off by a known spread."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from gradveil.attacks.engine.labels import largest_remainders

__all__ = ["plausible_counts"]

LEAST_SURE = 12
"""How many of the classes whose count is least sure are tried one up and one down."""
LEAST_SPREAD = 1e-3


def plausible_counts(expected: Tensor, spread: float, count: int, sure: float, most: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest counts and their probabilities, given ``expected = counts + N(0, spread²)``, class by class.

    Tried are the rounded estimate and everything one swap or two away from it that moves the classes that are least sure.

    Args:
        expected: (C,) estimates.
        spread: Their standard deviation.
        count: What counts sum to.
        sure: The smallest set that holds this probability is returned.
        most: Or no more than this many.

    Returns:
        (H, C) counts, the likeliest first, and (H,) probabilities among all that were tried.
    """
    expected = expected.double()
    first = largest_remainders(expected.clamp_min(0), count)
    tried = {tuple(first.tolist()): first}
    for _ in range(2):
        for start in list(tried.values())[:most]:
            for swapped in _swaps(start, expected):
                tried.setdefault(tuple(swapped.tolist()), swapped)
    counts = torch.stack(list(tried.values()))
    energies = (counts - expected).square().sum(1) / (2 * max(spread, LEAST_SPREAD) ** 2)
    ordered = (-energies).log_softmax(0).exp().sort(descending=True, stable=True)
    kept = min(int((ordered.values.cumsum(0) < sure).sum()) + 1, most, len(counts))
    return counts[ordered.indices[:kept]], ordered.values[:kept]


def _swaps(counts: Tensor, expected: Tensor) -> list[Tensor]:
    """Return the counts with one example moved from a class that looks too full to one that looks too empty."""
    excess = counts - expected
    full = [c for c in excess.argsort(descending=True).tolist() if counts[c] > 0][:LEAST_SURE]
    empty = excess.argsort().tolist()[:LEAST_SURE]
    found = []
    for giver, taker in itertools.product(full, empty):
        if giver != taker:
            swapped = counts.clone()
            swapped[giver] -= 1
            swapped[taker] += 1
            found.append(swapped)
    return found
