"""Outpost: prune, and add noise where the Fisher information is high, as strong as the weights are spread."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import MASK, OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.pruning import prune
from gradveil.learning.learner import Learner
from gradveil.records import Comparison, Observation, WhatArrives
from gradveil.study.checks import check_number
from gradveil.tensors import Named, check_finite

__all__ = ["Outpost", "OutpostAdversary", "fisher_mask", "risk"]

SURELY_KEPT = 3.0
"""Noisy entries beyond so many standard deviations of the noise were not pruned: one in 370 errs."""


def risk(weights: Tensor) -> Tensor:
    """Return min(Var(θ), 1) of one tensor of weights; 0 for fewer than two entries, whose variance is not a number."""
    if weights.numel() < 2:
        return torch.zeros((), dtype=weights.dtype, device=weights.device)
    return weights.var().clamp_max(1.0)


def fisher_mask(gradient: Named, share: float) -> Named:
    """Return, per tensor, 1 where the empirical Fisher information is among the top ``share`` of all tensors' entries.

    The information of a position is the mean of g² over the first axis (all positions of a vector share one value), so a mask is
    the same for all rows. The threshold is the percentile 100 (1 - share) over the positions of all tensors together.
    """
    # Scaled to one, or squares of tiny gradients would vanish and those of huge ones overflow.
    peaks = [value.abs().max() for value in gradient.values() if value.numel()]
    if share <= 0 or not peaks:
        return {n: torch.zeros_like(v) for n, v in gradient.items()}
    largest = torch.stack(peaks).max()
    information = {n: _mean_square(v / torch.where(largest > 0, largest, torch.ones_like(largest))) for n, v in gradient.items()}
    every = torch.cat([value.reshape(-1) for value in information.values()])
    position = math.ceil(round((1 - share) * (every.numel() - 1), 6))
    threshold = every.kthvalue(position + 1).values
    return {n: (information[n] >= threshold).to(v).expand_as(v) for n, v in gradient.items()}


def _mean_square(value: Tensor) -> Tensor:
    if value.numel() == 0:
        return value.reshape(-1)
    return value.square().mean(0) if value.ndim else value.square()


@dataclass(frozen=True)
class OutpostAdversary(OpenAdversary):
    """Knows the noise of each tensor from the global weights, and reads from the zeros where none was added.

    Noise covers all rows of a position or none, and 80 % of the entries are pruned; so a position with a single zero is free of
    noise, and what is not zero there is exact. Elsewhere an entry counts only if it is too large to be noise alone. Whether a
    smaller one is noise on a pruned entry cannot be told, and which later steps were left alone is chance.

    Attributes:
        noise: As the defense's.
    """

    noise: float

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that nothing is exact, every tensor being pruned or noisy.

        Incomplete: noisy entries that were pruned and those that were not are told apart by size only.
        """
        return super().arrives(observation).replace(exact=frozenset, incomplete=True)

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update and the mask of entries that were surely sent."""
        learner, seen = observation.learners[round_index], observation.updates[round_index].weights
        masks = {name: self._mask(value, self._std(name, learner, observation)) for name, value in seen.items()}
        return with_prefix(seen, OBSERVED) | with_prefix(masks, MASK)

    def _std(self, name: str, learner: Learner, observation: Observation) -> float:
        """Return the noise on one tensor of the update, if every step adds some."""
        std = self.noise * float(risk(learner.weights[name]))
        settings = learner.settings
        if settings.shares == "weights":
            std *= settings.learning_rate * math.sqrt(settings.steps(observation.examples // settings.clients))
        return std / math.sqrt(settings.clients)

    def _mask(self, value: Tensor, std: float) -> Tensor:
        if value.ndim == 0 or value.numel() == 0:
            return torch.ones_like(value)
        noisy = (value != 0).all(0)
        return torch.where(noisy, (value.abs() > SURELY_KEPT * std), value != 0).to(value)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare what was surely sent."""
        mask, observed = prefixed(evidence, MASK), prefixed(evidence, OBSERVED)
        return Comparison({n: v * mask[n] for n, v in simulated.items()}, {n: v * mask[n] for n, v in observed.items()})


@DEFENSES.register(
    DefenseCard(
        name="outpost",
        summary="Prunes the gradient and adds noise where its Fisher information is high, more where weights are spread.",
        paper="Wang, Hugh and Li, More than Enough is Too Much: Adaptive Defenses against Gradient Leakage in Production "
        "Federated Learning, INFOCOM 2023",
        url="https://github.com/TL-System/plato",
        cost="a selection per tensor and one over all of them, and random numbers, at a share of steps that falls",
        weakness="networks with narrow weights, which leak most, get the least noise; late steps are mostly left alone; "
        "zeros show where there is no noise",
        acts_on=("gradient",),
        ladder=(
            {"rate": 0.2, "noise": 0.2},
            {"rate": 0.5, "noise": 0.4},
            {"rate": 0.8, "noise": 0.8},
            {"rate": 0.9, "noise": 8.0},
        ),
        off={"rate": 0.0, "noise": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class Outpost(Defense):
    """Outpost: with probability 1 / (1 + decay · step), ``sent_l = prune_rate(g_l) + F_l · N(0, (noise · min(Var θ_l, 1))²)``.

    F_l is 1 at positions whose Fisher information, the mean of g² over the first axis, is in the top ``share`` of the whole
    model. Pruning is per tensor, at its own percentile, and comes first; so noise also falls on pruned entries.

    Departs from the paper: written after the version of the authors' framework that worked; since a later change its released
    loop throws the result away and returns the gradients as they were. ``step`` counts the steps done in this round: the
    released count is a product of epoch and batch that begins at 1, so that one client in nine would send its first step raw.
    Noise is drawn anew at every step; the released seed is fixed. A tensor of one entry has no variance and gets no noise, and
    survives pruning.

    Cost: below two sorts of the gradient. Known weakness: `OutpostAdversary`.

    Attributes:
        decay: How fast the probability to act falls with local steps.
        share: Share of positions that get noise.
        rate: Share of entries pruned in each tensor.
        noise: Noise in units of the risk.
    """

    decay: float = 0.125
    share: float = 0.4
    rate: float = 0.8
    noise: float = 0.8

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        check_number("outpost", "decay", self.decay)
        check_number("outpost", "rate", self.rate, below=1.0)
        check_number("outpost", "noise", self.noise)
        check_number("outpost", "share", self.share, below=1.0)

    def probability(self, step: int) -> float:
        """Return how likely a step is perturbed."""
        return 1 / (1 + self.decay * step)

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Toss the coin of this step, then prune and add noise."""
        check_finite(gradient, "the gradient")
        if self.rate == 0 and self.noise == 0:
            return gradient, state
        generator = view.generator("outpost")
        if float(torch.rand((), generator=generator, device=generator.device)) >= self.probability(view.step):
            return gradient, state
        masks, weights = fisher_mask(gradient, self.share), view.weights or view.learner.weights
        sent = {}
        for name, value in gradient.items():
            drawn = torch.randn(value.shape, generator=generator, device=value.device, dtype=value.dtype)
            std = self.noise * risk(weights[name]) if name in weights else 0.0
            sent[name] = prune(value, self.rate) + masks[name] * std * drawn
        return sent, state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who reads from the zeros where there is noise."""
        return OutpostAdversary(self.noise) if self.rate or self.noise else OpenAdversary()
