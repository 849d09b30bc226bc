"""How much of a defended client an attacker can afford: one run is timed, and what is asked of it halved until it fits."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["halved", "seconds_of"]


def seconds_of(run: Callable[[int], object]) -> float:
    """Return how long one run takes, measured on the second of two; it is told which."""
    run(0)
    begun = time.perf_counter()
    run(1)
    return time.perf_counter() - begun


def halved(size: int, least: int, each: float, seconds: float) -> int:
    """Return the size, halved until so many runs take no longer than they may, but not below the least.

    Args:
        size: Runs wanted.
        least: Runs without which there is no point; fewer are returned only where fewer were wanted.
        each: Seconds of one run.
        seconds: What all may take.

    >>> halved(256, 16, 1.0, 100.0), halved(256, 16, 60.0, 100.0), halved(8, 16, 60.0, 100.0)
    (64, 16, 8)
    """
    while size > least and size * each > seconds:
        size = max(least, size // 2)
    return size
