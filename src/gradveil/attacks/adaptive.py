"""Attackers who know a defense without trusting its author: every defense is judged by them, beside the attacker it brings.

* plain: ignores the defense.
* straight_through: applies the defense's own code to the dummy update and treats it as the identity in the backward pass; the
  difference is an offset renewed every few steps.
* averaged: the same over many draws of a random defense (expectation over transformation, Athalye et al. 2018).
* zero_mask: compares only where what was seen is not exactly zero, which undoes every kind of pruning without knowing which.
* magnitudes, robust, learned: ways to compare that survive what is done to single entries (`gradveil.attacks.generic.stances`).
  Each runs only where it tells the truth from other inputs clearly better than comparing values does, which the attacker measures
  on public inputs of its own sent through the client's code.
* simulated: no way to compare, and so no stance of a search: the whole attack is made of what public records send through the
  defended client (`gradveil.attacks.kernel_regression`). It needs nothing but the client's code, so no author can switch it off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import MASK, OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.client_runs import run_clients
from gradveil.attacks.generic.probe import Compare, Probe, probe_of, raw_updates
from gradveil.attacks.generic.stances import Learned, Magnitudes, Renewing, Robust, robust_weights
from gradveil.errors import UsageError, suggest
from gradveil.learning.learner import Learner
from gradveil.records import AdversaryModel, Comparison, Knowledge, Observation
from gradveil.tensors import Named

__all__ = [
    "AUTHORLESS",
    "FIRST_STANCES",
    "LEARNED_STANCES",
    "SIMULATED",
    "STANCES",
    "StraightThrough",
    "ZeroMask",
    "adversary_for",
    "confusions",
    "stances_for",
]

FIRST_STANCES = ("plain", "informed", "straight_through", "averaged", "zero_mask")
"""Those of ensembles published before there were others."""
LEARNED_STANCES = ("magnitudes", "robust", "learned")
STANCES = (*FIRST_STANCES, *LEARNED_STANCES)
"""Of searches."""
SIMULATED = "simulated"
AUTHORLESS = tuple(stance for stance in (*STANCES, SIMULATED) if stance not in ("plain", "informed"))
"""Stances that take account of a defense and need nobody to describe it."""
OFFSET = "offset/"
DRAWS = 4
REFRESH_EVERY = 25
CONFUSED = 1e-3
"""Confusion below which there is nothing to gain: the truth as good as coincides."""
CLEARER = 0.7
"""Times the confusion of comparing values: what is not below it says nothing that values do not say."""


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
class StraightThrough(Renewing):
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

    def renews(self, context: AttackContext) -> bool:
        """Tell whether there is the client's code to run."""
        return context.simulate is not None

    def renew(
        self, learners: tuple[Learner, ...], inputs: Tensor, targets: Tensor, constants: Named, context: AttackContext, step: int
    ) -> list[Named]:
        """Return the offsets of the dummies, per round."""
        return [with_prefix(each, OFFSET) for each in self.offsets(learners, inputs, targets, context, step)]

    def offsets(
        self, learners: tuple[Learner, ...], inputs: Tensor, targets: Tensor, context: AttackContext, step: int
    ) -> list[Named]:
        """Return, per round and candidate (leading axis), the mean over draws of defended minus raw update of its dummies."""
        if context.simulate is None:
            return [{} for _ in learners]
        total = [{n: -v for n, v in raw_updates(learner, inputs, targets).items()} for learner in learners]
        for draw in range(self.draws):
            ran = run_clients(context, inputs, targets, step * self.draws + draw)
            for index, so_far in enumerate(total):
                total[index] = {n: v + ran[index][n] / self.draws for n, v in so_far.items()}
        return [{n: v.detach() for n, v in each.items()} for each in total]


def adversary_for(stance: str, observation: Observation, context: AttackContext | None = None) -> AdversaryModel:
    """Return the adversary model behind a stance; without a context nothing is known of what the client's code does."""
    if stance == "informed":
        return observation.adversary
    if stance == "learned":
        return Learned(probe_of(observation, context) if context is not None else None)
    if stance in ("straight_through", "averaged"):
        return StraightThrough(draws=DRAWS if stance == "averaged" else 1)
    simple: dict[str, OpenAdversary] = {
        "plain": OpenAdversary(),
        "zero_mask": ZeroMask(),
        "magnitudes": Magnitudes(),
        "robust": Robust(),
    }
    if stance not in simple:
        raise UsageError(f"there is no stance called {stance!r}{suggest(stance, STANCES)}")
    return simple[stance]


def stances_for(observation: Observation, context: AttackContext, asked: Collection[str] = STANCES) -> tuple[str, ...]:
    """Return the stances worth running against this observation, plain first.

    Args:
        observation: What was seen.
        context: What the attacker works with.
        asked: Stances somebody would take; the client's code is run for nothing else.
    """
    stances = ["plain"]
    known = Knowledge.DEFENSE in observation.threat.knows
    if known and type(observation.adversary) is not OpenAdversary:
        stances.append("informed")
    if known and context.simulate is not None:
        stances.append("averaged" if context.random_defense else "straight_through")
    if context.simulate is not None and _zero_share(observation) > 0.01:
        stances.append("zero_mask")
    if known and set(asked) & set(LEARNED_STANCES):
        stances += _clearer(observation, context)
    if known and context.simulate is not None and SIMULATED in asked:
        stances.append(SIMULATED)
    return tuple(stances)


def _clearer(observation: Observation, context: AttackContext) -> list[str]:
    """Return the stances that tell the attacker's own inputs apart clearly better than comparing values, or a zero mask, does."""
    probe = probe_of(observation, context)
    if probe is None:
        return []
    found = confusions(probe)
    known = min(found["plain"], found["zero_mask"])
    return [stance for stance in LEARNED_STANCES if known > CONFUSED and found[stance] < CLEARER * known]


def confusions(probe: Probe) -> dict[str, float]:
    """Return, per way of comparing, how hard it is to tell the truth of a defended update (`Probe.confusion`)."""

    def learned(row: int) -> Compare:
        known = probe.reliance(0, without=row)
        return lambda raw, sent: Comparison(
            {n: v * known.gain[n] * known.weight[n] for n, v in raw.items()}, {n: v * known.weight[n] for n, v in sent.items()}
        )

    ways: dict[str, Compare] = {
        "plain": Comparison,
        "zero_mask": lambda raw, sent: Comparison({n: v * (sent[n] != 0) for n, v in raw.items()}, sent),
        "magnitudes": lambda raw, sent: Comparison({n: v.abs() for n, v in raw.items()}, {n: v.abs() for n, v in sent.items()}),
        "robust": _compare_robustly,
    }
    found = {name: probe.confusion(_always(way)) for name, way in ways.items()}
    return {**found, "learned": probe.confusion(learned)}


def _always(way: Compare) -> Callable[[int], Compare]:
    return lambda _: way


def _compare_robustly(raw: Named, sent: Named) -> Comparison:
    weight = robust_weights(raw, sent)
    return Comparison({n: v * weight[n] for n, v in raw.items()}, {n: v * weight[n] for n, v in sent.items()})


def _zero_share(observation: Observation) -> float:
    values = observation.update.weights.values()
    return float(sum((v == 0).sum() for v in values)) / max(1, sum(v.numel() for v in values))
