"""Rounds restored one by one and put together: what a defense draws anew in every round averages out of finished pictures.

A joint search fits one input to all rounds. Where every round trained on other data made of the same record (noise, Refiner, a
shadow), no input fits them all. Each round by itself is explained by what was trained on in it; restoring that is what the
defense's attacker knows how to do, and errors of different rounds have little in common.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.attacks.base import AttackContext, Cost
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.records import Knowledge, Observation, Reconstruction

__all__ = ["ByRound", "by_round"]

ENOUGH_FOR_MEDIAN = 3


@dataclass(frozen=True, kw_only=True)
class ByRound(InvertingGradients):
    """`InvertingGradients` on each round as if it were the only one; then the mean of what was found, and of what was restored.

    Not an attack of its own in the catalogue: ensembles that say ``by_round`` run their matching recipes so as well where several
    rounds are seen under a defense with fresh randomness. Of each round the start that fits best is kept; examples of a batch are
    aligned with those of the first round by assignment. Three candidates follow: the mean of what was found
    (``…_rounds``), and of what the defense's attacker makes of each round's find the mean (``…_rounds_restored``) and, of three
    rounds or more, the median (``…_rounds_median``). The referee judges them beside the joint search.

    Departs from the paper: there is none. Cost: of one joint search. Known weakness: errors that rounds have in common stay.

    Attributes:
        rounds: How many are seen.
    """

    rounds: int = 2

    def cost(self) -> Cost:
        """Count every round."""
        alone = super().cost()
        return dataclasses.replace(alone, restarts=alone.restarts * self.rounds)

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Search round by round, restore, combine."""
        found: list[list[Reconstruction]] = [[] for _ in observations]
        restored: list[list[Reconstruction]] = [[] for _ in observations]
        for index in range(self.rounds):
            alone = [_only(observation, index) for observation in observations]
            own = dataclasses.replace(context, seed=context.seed.child("round", index))
            for target, best in enumerate(_best(super().run(alone, own), len(alone))):
                found[target].append(best)
                if Knowledge.DEFENSE in observations[target].threat.knows:
                    restored[target].append(alone[target].adversary.finish(best.replace(stance="informed"), alone[target]))
        return [c for raw, own in zip(found, restored, strict=True) for c in self._combined(raw, own)]

    def _combined(self, found: list[Reconstruction], restored: list[Reconstruction]) -> list[Reconstruction]:
        raw = _aligned(found)
        common = found[0].replace(
            inputs=raw.mean(0),
            recipe=f"{found[0].recipe}_rounds",
            variables={},
            first_loss=math.fsum(each.first_loss for each in found),
            best_loss=math.fsum(each.best_loss for each in found),
            steps=sum(each.steps for each in found),
        )
        candidates = [common] if common.stance == "plain" else []
        if not restored:
            return candidates or [common]
        # Aligned as what was found was: restoring changes pictures, and not whose they are.
        clean = _aligned([c.replace(inputs=r.inputs) for c, r in zip(found, restored, strict=True)], found)
        informed = common.replace(stance="informed", unfinished=common.inputs)
        candidates.append(informed.replace(inputs=clean.mean(0), recipe=f"{common.recipe}_restored"))
        if len(clean) >= ENOUGH_FOR_MEDIAN:
            candidates.append(informed.replace(inputs=clean.quantile(0.5, 0), recipe=f"{common.recipe}_median"))
        return candidates


def by_round(attack: object, observation: Observation, *, fresh: bool) -> ByRound | None:
    """Return a matching attack that takes rounds one by one; None where that is no use.

    Args:
        attack: Of an ensemble.
        observation: What was seen.
        fresh: Whether the defense draws anew in every round.
    """
    rounds = len(observation.updates)
    if type(attack) is not InvertingGradients or attack.stance not in ("plain", "informed") or rounds < 2 or not fresh:
        return None
    if observation.adversary.arrives(observation).noise_std is not None:
        return None  # one input explains all rounds, and their likelihoods multiply
    settings = {field.name: getattr(attack, field.name) for field in dataclasses.fields(attack)}
    return ByRound(**{**settings, "title": attack.title or attack.card.name, "rounds": rounds})


def _only(observation: Observation, index: int) -> Observation:
    """Return the observation with one of its rounds."""
    return observation.replace(
        learners=(observation.learners[index],),
        updates=(observation.updates[index],),
        payloads=observation.payloads[index : index + 1],
        threat=dataclasses.replace(observation.threat, rounds=1),
    )


def _best(candidates: Sequence[Reconstruction], targets: int) -> list[Reconstruction]:
    """Return each target's candidate with the least loss."""
    own: list[list[Reconstruction]] = [[] for _ in range(targets)]
    for candidate in candidates:
        own[candidate.target].append(candidate)
    return [min(many, key=lambda c: c.best_loss if math.isfinite(c.best_loss) else math.inf) for many in own]


def _aligned(rounds: Sequence[Reconstruction], by: Sequence[Reconstruction] | None = None) -> Tensor:
    """Return inputs (R, B, ...), the examples of every round in the order of the first, by least squared distance of ``by``."""
    guide = [each.inputs for each in by or rounds]
    ordered = [rounds[0].inputs]
    for each, own in zip(rounds[1:], guide[1:], strict=True):
        apart = (guide[0][:, None] - own[None]).square().flatten(2).mean(2)  # (B, B)
        _, order = linear_sum_assignment(torch.nan_to_num(apart, nan=1e6).cpu().numpy())
        ordered.append(each.inputs[torch.as_tensor(order, device=each.inputs.device)])
    return torch.stack(ordered).clamp(0, 1)
