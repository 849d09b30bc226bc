"""How long a client works with its defense and without: the best of several runs, in turns, so that load harms both alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from gradveil.recording import wait_for_gpu
from gradveil.study.training_result import Latency

__all__ = ["best_seconds", "measure_latency_of", "run_seconds", "work_seconds"]

MOST_TURNS = 30
FEW_TURNS = 3
"""Enough where there is nothing to compare with."""
SECONDS = 3.0
Work = Callable[[], object]


def run_seconds(work: Work, device: torch.device | str) -> float:
    """Return how long one run takes, what a GPU still has to do included."""
    device = torch.device(device)
    wait_for_gpu(device)
    begun = time.perf_counter()
    work()
    wait_for_gpu(device)
    return time.perf_counter() - begun


def work_seconds(work: Work, device: torch.device | str) -> float:
    """Return what one run costs by itself: on a CPU the time of this process alone, whatever else the machine does meanwhile."""
    if torch.device(device).type != "cpu":
        return run_seconds(work, device)
    begun = time.process_time()
    work()
    return time.process_time() - begun


def best_seconds(
    works: Sequence[Work], device: torch.device | str, *, seconds: float = SECONDS, most: float = MOST_TURNS
) -> list[float]:
    """Return the shortest run of each of several works, taken in turns.

    Args:
        works: What to run; what must not be counted, such as what is prepared once, is done before.
        device: Where it runs.
        seconds: Begin no further turn after about this long; one is always taken.
        most: Most turns.
    """
    best, turns, begun = [math.inf] * len(works), 0, time.perf_counter()
    while not turns or (turns < most and time.perf_counter() - begun <= seconds):
        best = [min(least, run_seconds(work, device)) for least, work in zip(best, works, strict=True)]
        turns += 1
    return best


def measure_latency_of(
    defended: Work, undefended: Work | None, device: torch.device | str, *, seconds: float = SECONDS
) -> Latency:
    """Time a client's work with its defense and without.

    Args:
        defended: The work with the defense.
        undefended: The same without; None where there is no defense. Then the two are one measurement, and noise must not make
            them differ.
        device: Where it runs.
        seconds: Stop after about this long.
    """
    works, most = ([defended], FEW_TURNS) if undefended is None else ([defended, undefended], MOST_TURNS)
    best = [1000 * each for each in best_seconds(works, device, seconds=seconds, most=most)]
    return Latency(defended_ms=round(best[0], 6), undefended_ms=round(best[-1], 6))  # to the nanosecond, never to 0
