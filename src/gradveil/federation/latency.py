"""Normalised on-device latency: what one client's round costs with the defense, over what it costs without."""

from __future__ import annotations

import time

import torch

from gradveil.client.local_training import LocalTraining
from gradveil.client.update import run_client
from gradveil.defenses import Defense
from gradveil.federation.setup import Federation, build_federation
from gradveil.study.training_result import Latency
from gradveil.tensors import Named

__all__ = ["measure_latency"]

MOST_PAIRS = 30


def measure_latency(federation: Federation, *, seconds: float = 3.0) -> Latency:
    """Time one client of middle size at the first weights, with the defense and without, in turns.

    Each side's best time counts, so that a busy moment of the machine harms neither. What a defense prepares once in a client's
    life is not counted; what it does every round is.

    Args:
        federation: What is trained.
        seconds: Stop after about this long; at least one pair is timed after a round of each to warm up.
    """
    plain = build_federation(federation.settings.replace(defense="none"), federation.train, federation.test)
    if federation.defense == plain.defense:
        # Without a defense the two are one measurement, and noise must not make them differ.
        best = min(_time(plain, {})[0] for _ in range(3))
        return Latency(defended_ms=round(best, 3), undefended_ms=round(best, 3))
    kept = [_time(side, None)[1] for side in (federation, plain)]
    times: list[list[float]] = [[], []]
    begun = time.perf_counter()
    for _ in range(MOST_PAIRS):
        for number, side in enumerate((federation, plain)):
            times[number].append(_time(side, kept[number])[0])
        if time.perf_counter() - begun > seconds:
            break
    return Latency(defended_ms=round(min(times[0]), 3), undefended_ms=round(min(times[1]), 3))


def _time(federation: Federation, state: Named | None) -> tuple[float, Named]:
    """Return the milliseconds of one client's round, and what its defense keeps."""
    by_size = sorted(range(len(federation.parts)), key=lambda client: len(federation.parts[client]))
    client = by_size[len(by_size) // 2]
    batch = federation.batch(client, 0)
    learner = federation.local_learner(federation.learner.weights, len(batch))
    local = LocalTraining(buffers={name: federation.evaluator.buffers[name] for name in federation.tracked})
    defense: Defense = federation.defense
    _wait(federation)
    begun = time.perf_counter()
    seed = federation.seed.child("latency")
    result = run_client(learner, batch, defense, seed, state=state, public=federation.public, local=local)
    _wait(federation)
    return 1000 * (time.perf_counter() - begun), result.state


def _wait(federation: Federation) -> None:
    if federation.inputs.is_cuda:
        torch.cuda.synchronize(federation.inputs.device)
