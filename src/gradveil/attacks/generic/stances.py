"""Ways to compare that survive what a defense does to single entries, whatever that is.

* magnitudes: signs may be lies, sizes are not.
* robust: any entries may have been replaced by anything; those that fit worst count least (iteratively reweighted least squares).
* learned: what arrives of each entry, and how surely, was learned from the client's own code on public inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.attacks.base import AttackContext
from gradveil.attacks.generic.probe import Probe, Reliance, raw_updates
from gradveil.learning.learner import Learner
from gradveil.records import AdversaryModel, Comparison, Observation
from gradveil.tensors import Named

__all__ = ["GAIN", "WEIGHT", "Learned", "Magnitudes", "Renewing", "Robust", "renewed", "renewing_of", "robust_weights"]

WEIGHT = "weight/"
GAIN = "gain/"
OUTLIER = 3.0
"""Residuals beyond so many robust standard deviations hardly count."""
NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a normal number with standard deviation one."""
PASSES = 3
LEAST_SCALE = 1e-3
"""Of a tensor's median size; the scale of residuals that the attacker can make is never taken to be smaller."""


@dataclass(frozen=True)
class Renewing(OpenAdversary):
    """Compares with the help of constants that are renewed from the dummies every few steps."""

    settles: ClassVar[bool] = False
    """Whether they are left alone once schedules have settled; else iterates compete only right after a renewal."""

    def renews(self, context: AttackContext) -> bool:
        """Whether there is anything to renew."""
        return True

    def renew(
        self, learners: tuple[Learner, ...], inputs: Tensor, targets: Tensor, constants: Named, context: AttackContext, step: int
    ) -> list[Named]:
        """Return, per round, what is renewed, one row per candidate, under the names it has in the evidence."""
        raise NotImplementedError


def renewing_of(adversary: AdversaryModel, context: AttackContext) -> Renewing | None:
    """Return an adversary that has something to renew as such."""
    return adversary if isinstance(adversary, Renewing) and adversary.renews(context) else None


def renewed(
    renewing: Renewing, learners: tuple[Learner, ...], leaves: Named, constants: Named, context: AttackContext, step: int
) -> Named:
    """Return the constants of a search that are renewed at one step, for all candidates."""
    targets = leaves["label_logits"].softmax(-1) if "label_logits" in leaves else constants["labels"]
    per_round = renewing.renew(learners, leaves["inputs"].clamp(0, 1), targets, constants, context, step)
    return {f"{r}|{n}": v for r, named in enumerate(per_round) for n, v in named.items()}


@dataclass(frozen=True)
class Magnitudes(OpenAdversary):
    """Compares absolute values.

    At the truth both sides coincide whichever signs were turned; a sign says at most one bit of an entry, so little is lost.

    Cost: nothing. Known weakness: the absolute value has a kink at zero, where entries of the dummies change sign.
    """

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare sizes."""
        return Comparison(
            {n: v.abs() for n, v in simulated.items()}, {n: v.abs() for n, v in prefixed(evidence, OBSERVED).items()}
        )


@dataclass(frozen=True)
class Robust(Renewing):
    """Weighs each entry by (1 + (r / 3 σ)²)⁻², with r its residual and σ that of its tensor: Geman and McClure's estimator.

    σ is the median absolute residual over .6745, taken from the dummies as they are, at the scale that fits them best; so it
    falls as the search goes on, and entries that were replaced stand out more and more. Weights are renewed as straight-through
    offsets are, and held once schedules have settled.

    Cost: one raw update for each renewal. Known weakness: where more than half of a tensor was replaced, the median is of lies.
    """

    settles: ClassVar[bool] = True

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update, and weights of one."""
        seen = observation.updates[round_index].weights
        return with_prefix(seen, OBSERVED) | with_prefix({n: torch.ones_like(v) for n, v in seen.items()}, WEIGHT)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Weigh both sides alike."""
        weight, observed = prefixed(evidence, WEIGHT), prefixed(evidence, OBSERVED)
        return Comparison({n: v * weight[n] for n, v in simulated.items()}, {n: v * weight[n] for n, v in observed.items()})

    def renew(
        self, learners: tuple[Learner, ...], inputs: Tensor, targets: Tensor, constants: Named, context: AttackContext, step: int
    ) -> list[Named]:
        """Return the weights that the dummies' residuals ask for."""
        found = []
        for index, learner in enumerate(learners):
            raw = raw_updates(learner, inputs, targets)
            observed = prefixed(prefixed(constants, f"{index}|"), OBSERVED)
            found.append(with_prefix(vmap(robust_weights)(raw, observed), WEIGHT))
        return [{n: v.detach() for n, v in each.items()} for each in found]


def robust_weights(simulated: Named, observed: Named) -> Named:
    """Return the factor on each entry, the root of its weight; safe under vmap.

    The scale that fits the dummies best starts as the ratio of median sizes, and is fitted again with the weights it leads to.
    """
    names = [name for name, value in simulated.items() if value.numel()]
    told = {n: (observed[n] != 0) | (simulated[n] != 0) for n in names}
    sizes = [(_middle(observed[n], told[n]), _middle(simulated[n], told[n])) for n in names]
    scale = torch.stack([left for left, _ in sizes]).sum() / torch.stack([right for _, right in sizes]).sum().clamp_min(1e-30)
    found: Named = {}
    for _ in range(PASSES):
        found = {n: _factors(scale * simulated[n] - observed[n], observed[n], told[n]) for n in names}
        along = torch.stack([(found[n].square() * simulated[n] * observed[n]).sum() for n in names]).sum()
        size = torch.stack([(found[n] * simulated[n]).square().sum() for n in names]).sum()
        scale = torch.where(along > 0, along / size.clamp_min(1e-30), scale)
    return {n: found.get(n, torch.ones_like(v)) for n, v in simulated.items()}


def _factors(residual: Tensor, observed: Tensor, told: Tensor) -> Tensor:
    least = LEAST_SCALE * _middle(observed, observed != 0)
    spread = torch.maximum(_middle(residual, told), least).clamp_min(1e-30) / NORMAL_MEDIAN
    return 1 / (1 + (residual / (OUTLIER * spread)).square())


def _middle(value: Tensor, told: Tensor) -> Tensor:
    """Return the median absolute value of entries that say something: zeros on both sides agree about nothing."""
    return torch.where(told, value.abs(), torch.nan).flatten().nanmedian().nan_to_num(0.0)


@dataclass(frozen=True, eq=False)
class Learned(OpenAdversary):
    """Expects ``gain · raw`` of each entry, and weighs it by how exactly that arrived of the attacker's own inputs.

    An entry that never arrives has weight next to nothing, one that is turned a gain below zero, one that is noisy the weight of
    its noise; whoever wrote the defense need not say which is which. What differs from record to record is not learned.

    Cost: eight runs of the client before the search. Known weakness: masks that follow the data.

    Attributes:
        probe: What the client's code did to the attacker's own inputs; None compares as an attacker who ignores the defense.
    """

    probe: Probe | None = field(default=None, repr=False)

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update, gains and weights."""
        seen = observation.updates[round_index].weights
        if self.probe is None:
            ones = {n: torch.ones_like(v) for n, v in seen.items()}
            learned = Reliance(ones, ones)
        else:
            learned = self.probe.learned(round_index)
        return with_prefix(seen, OBSERVED) | with_prefix(learned.gain, GAIN) | with_prefix(learned.weight, WEIGHT)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare what should have arrived with what did, entry by entry in units of its error."""
        gain, weight, observed = (prefixed(evidence, part) for part in (GAIN, WEIGHT, OBSERVED))
        return Comparison(
            {n: v * gain[n] * weight[n] for n, v in simulated.items()}, {n: v * weight[n] for n, v in observed.items()}
        )
