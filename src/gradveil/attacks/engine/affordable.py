"""How much of a defended client an attacker can afford: one run is timed, and what is asked of it halved until it fits."""

from __future__ import annotations

import time
from collections.abc import Callable

from gradveil.recording import wait_for_gpu

__all__ = ["halved", "seconds_of"]


def seconds_of(run: Callable[[int], object]) -> float:
    """Return how long one run takes, measured on the second of two; it is told which.

    Of the clock and the processor's time the smaller counts, or who else uses the machine would decide how much is learned. A GPU
    is waited for, since what it was told to do is not done yet; the processor waits at work.
    """
    run(0)
    wait_for_gpu()
    clock, worked = time.perf_counter(), time.process_time()
    run(1)
    wait_for_gpu()
    return min(time.perf_counter() - clock, time.process_time() - worked)


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
