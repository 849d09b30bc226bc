"""Attackers who know a defense without trusting its author: every defense is judged by them, beside the attacker it brings.

* plain: ignores the defense.
* straight_through: applies the defense's own code to the dummy update and treats it as the identity in the backward pass; the
  difference is an offset renewed every few steps.
* averaged: the same over many draws of a random defense (expectation over transformation, Athalye et al. 2018).
* zero_mask: compares only where what was seen is not exactly zero, which undoes every kind of pruning without knowing which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.adversary import MASK, OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.attacks.base import AttackContext
from gradveil.errors import UsageError, suggest
from gradveil.learning.learner import Learner
from gradveil.records import AdversaryModel, Comparison, Knowledge, Observation
from gradveil.tensors import Named, stack

__all__ = ["STANCES", "StraightThrough", "ZeroMask", "adversary_for", "stances_for"]

STANCES = ("plain", "informed", "straight_through", "averaged", "zero_mask")
OFFSET = "offset/"
DRAWS = 4
REFRESH_EVERY = 25
MOST_ENTRIES = 16_000_000


@dataclass(frozen=True)
class ZeroMask(OpenAdversary):
    """Compares only entries that were not seen as exactly zero."""

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update and the mask of its entries that are not zero."""
        seen = observation.updates[round_index].weights
        return with_prefix(seen, OBSERVED) | with_prefix({n: (v != 0).to(v) for n, v in seen.items()}, MASK)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Mask the simulation."""
        mask = prefixed(evidence, MASK)
        return Comparison({n: v * mask[n] for n, v in simulated.items()}, prefixed(evidence, OBSERVED))


@dataclass(frozen=True)
class StraightThrough(OpenAdversary):
    """Adds to the dummy update what the defense's own code last did to it, as a constant."""

    draws: int = 1

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update and a zero offset, renewed by `refresh` while the attack runs."""
        seen = observation.updates[round_index].weights
        return with_prefix(seen, OBSERVED) | with_prefix({n: torch.zeros_like(v) for n, v in seen.items()}, OFFSET)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Shift the simulation by the offset."""
        offset = prefixed(evidence, OFFSET)
        return Comparison({n: v + offset[n] for n, v in simulated.items()}, prefixed(evidence, OBSERVED))

    def offsets(
        self, learners: tuple[Learner, ...], inputs: Tensor, targets: Tensor, context: AttackContext, step: int
    ) -> list[Named]:
        """Return, per round and candidate (leading axis), the mean over draws of defended minus raw update of its dummies."""
        if context.simulate is None:
            return [{} for _ in learners]
        total = [{n: -v for n, v in _raw_updates(learner, inputs, targets).items()} for learner in learners]
        for draw in range(self.draws):
            # The client's own code is not made for vmap, so it runs candidate by candidate.
            rows = [context.simulate(x, y, step * self.draws + draw) for x, y in zip(inputs, targets, strict=True)]
            for index, so_far in enumerate(total):
                defended = stack([row[index] for row in rows])
                total[index] = {n: v + defended[n] / self.draws for n, v in so_far.items()}
        return [{n: v.detach() for n, v in each.items()} for each in total]


def _raw_updates(learner: Learner, inputs: Tensor, targets: Tensor) -> Named:
    """Return the undefended updates of all candidates, a few at a time: each holds a gradient as large as the model."""
    few = max(1, MOST_ENTRIES // max(1, learner.parameters))
    return dict(vmap(learner.update, chunk_size=few)(inputs, targets))


def adversary_for(stance: str, observation: Observation) -> AdversaryModel:
    """Return the adversary model behind a stance."""
    if stance == "informed":
        return observation.adversary
    if stance == "zero_mask":
        return ZeroMask()
    if stance in ("straight_through", "averaged"):
        return StraightThrough(draws=DRAWS if stance == "averaged" else 1)
    if stance == "plain":
        return OpenAdversary()
    raise UsageError(f"there is no stance called {stance!r}{suggest(stance, STANCES)}")


def stances_for(observation: Observation, context: AttackContext) -> tuple[str, ...]:
    """Return the stances worth running against this observation, plain first."""
    stances = ["plain"]
    known = Knowledge.DEFENSE in observation.threat.knows
    if known and type(observation.adversary) is not OpenAdversary:
        stances.append("informed")
    if known and context.simulate is not None:
        stances.append("averaged" if context.random_defense else "straight_through")
    if context.simulate is not None and _zero_share(observation) > 0.01:
        stances.append("zero_mask")
    return tuple(stances)


def _zero_share(observation: Observation) -> float:
    values = observation.update.weights.values()
    return float(sum((v == 0).sum() for v in values)) / max(1, sum(v.numel() for v in values))
