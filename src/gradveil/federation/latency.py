"""Normalised on-device latency: what one client's round costs with the defense, over what it costs without."""

from __future__ import annotations

from collections.abc import Callable

from gradveil.client.local_training import LocalTraining
from gradveil.client.timing import SECONDS, measure_latency_of
from gradveil.client.update import run_client
from gradveil.federation.setup import Federation, build_federation
from gradveil.study.training_result import Latency
from gradveil.tensors import Named

__all__ = ["measure_latency"]


def measure_latency(federation: Federation, *, seconds: float = SECONDS) -> Latency:
    """Time one client of middle size at the first weights, with the defense and without, in turns.

    What a defense prepares once in a client's life is not counted, and neither is the first round of each side, which warms up;
    what the defense does every round is.

    Args:
        federation: What is trained.
        seconds: Stop after about this long; at least one pair is timed.
    """
    plain = build_federation(federation.settings.replace(defense="none"), federation.train, federation.test)
    other = None if federation.defense == plain.defense else _round(plain)
    return measure_latency_of(_round(federation), other, federation.inputs.device, seconds=seconds)


def _round(federation: Federation) -> Callable[[], Named]:
    """Return one client's round, after a first one that prepares the defense; what a round keeps is not handed on."""
    by_size = sorted(range(len(federation.parts)), key=lambda client: len(federation.parts[client]))
    batch = federation.batch(by_size[len(by_size) // 2], 0)
    learner = federation.local_learner(federation.learner.weights, len(batch))
    local = LocalTraining(buffers={name: federation.evaluator.buffers[name] for name in federation.tracked})
    seed = federation.seed.child("latency")

    def work(state: Named | None) -> Named:
        return run_client(learner, batch, federation.defense, seed, state=state, public=federation.public, local=local).state

    kept = work(None)
    return lambda: work(kept)
