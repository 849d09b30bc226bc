"""The defended client as the attacker runs it on its own list, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import with_prefix
from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.affordable import seconds_of
from gradveil.attacks.listing.hypotheses import Hypotheses
from gradveil.errors import MissingKnowledge
from gradveil.records import Observation
from gradveil.tensors import Named

__all__ = ["ListClient", "joined"]


def joined(observation: Observation) -> Named:
    """Return the releases of all rounds as one set of tensors."""
    found: Named = {}
    for index, update in enumerate(observation.updates):
        found |= with_prefix(update.weights, f"{index}|")
    return found


@dataclass(frozen=True)
class ListClient:
    """Sends candidates through the client's own code.

    Attributes:
        seen: One of the releases under attack, for what all of them share: the client's training and what the attacker knows.
        hypotheses: The list.
        context: With the client's code.
    """

    seen: Observation
    hypotheses: Hypotheses
    context: AttackContext

    def observe(self, index: int, draw: int) -> Observation:
        """Return what the attacker would have seen had the client held a candidate; a draw is one set of random numbers."""
        if self.context.observe is None:
            raise MissingKnowledge("an attacker with a list runs the client on it; grant the defense in the threat model")
        return self.context.observe(*self._batch(index, draw), draw)

    def raw(self, index: int, draw: int) -> Named:
        """Return what the client would have sent without a defense."""
        inputs, labels = self._batch(index, draw)
        found: Named = {}
        for place, learner in enumerate(self.seen.learners):
            found |= with_prefix({n: v.detach() for n, v in learner.update(inputs, labels).items()}, f"{place}|")
        return found

    def _batch(self, index: int, draw: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self.hypotheses.batch(index, draw)
        device = self.seen.learner.device
        return inputs.to(device), labels.to(device)

    def varies(self) -> bool:
        """Whether the same candidate gives another release in another draw."""
        if self.context.random_defense or self.hypotheses.varies:
            return True
        first, second = (joined(self.observe(0, draw)) for draw in (0, 1))
        return any(not torch.equal(value, second[name]) for name, value in first.items())

    def seconds(self) -> float:
        """Return how long one release takes, measured on the second of two."""
        return seconds_of(lambda draw: self.observe(0, draw))
