"""A short list, two rounds of a tiny client, and a context whose client adds noise of its draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext
from gradveil.attacks.listing import Hypotheses
from gradveil.randomness import Seed
from gradveil.records import Observation, Update
from tests.unit.attacks.scenes import CLASSES, SHAPE, drawn, make_batch, make_context, make_learner, observe

MLP = "mlp(hidden=2, activation='sigmoid')"


def listed(count: int = 6, size: int = 1, **changes: Any) -> Hypotheses:
    labels = torch.arange(count) % CLASSES
    return Hypotheses(inputs=drawn(count, *SHAPE, seed=7), labels=labels, size=size, seed=Seed(2), **changes)


def rounds(size: int = 1, **changes: Any) -> Observation:
    return observe(make_learner(MLP), make_batch(size), rounds=(make_learner(MLP, seed=1),), **changes)


def running(seen: Observation, noise: float, calls: list[Any] | None = None, **changes: Any) -> AttackContext:
    """Return a context whose client adds noise of its draw, and notes what it was asked for."""

    def watch(inputs: Tensor, labels: Tensor, draw: int) -> Observation:
        if calls is not None:
            calls.append((inputs, labels, draw))
        generator = torch.Generator().manual_seed(draw)
        updates = []
        for learner in seen.learners:
            sent = learner.update(inputs, labels)
            more = {n: noise * torch.randn(v.shape, generator=generator) for n, v in sent.items()}
            updates.append(Update({n: v + more[n] for n, v in sent.items()}, examples=len(inputs)))
        return seen.replace(updates=tuple(updates))

    return make_context(observe=watch, **changes)
