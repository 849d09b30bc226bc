"""Gaussian noise on the update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.parts.label_evidence import label_under_noise
from gradveil.records import Observation, Update, WhatArrives
from gradveil.study.checks import check_number, check_whole
from gradveil.tensors import check_finite

__all__ = ["GaussianNoise", "NoisyUpdateAdversary"]


@dataclass(frozen=True)
class NoisyUpdateAdversary(OpenAdversary):
    """Knows how much noise lies on the update: a candidate at the truth leaves a residual of that size, and nothing is exact.

    Averaging over own draws of the noise does not help: it compares with a variance of (1 + 1/n) std² instead of std².
    """

    std: float
    sharers: int = 1

    def arrives(self, observation: Observation) -> WhatArrives:
        """Tell the noise on every entry, and how likely it makes each label.

        The mean over the clients of a secure aggregate has less of it.
        """
        std = self.std / math.sqrt(self.sharers * observation.threat.clients)
        return super().arrives(observation).replace(exact=frozenset, noise_std=std, label_evidence=label_under_noise(std))


@DEFENSES.register(
    DefenseCard(
        name="gaussian_noise",
        summary="Adds independent Gaussian noise to every entry of the update (GNP).",
        paper="Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019",
        url="https://arxiv.org/abs/1906.08935",
        cost="one random number per weight; accuracy falls as the noise nears the size of the update's entries",
        weakness="averages out over rounds on the same data, and strong image priors see through it; without clipping it "
        "carries no differential-privacy guarantee",
        acts_on=("update",),
        ladder=({"std": 1e-4}, {"std": 1e-3}, {"std": 1e-2}, {"std": 1e-1}),
        off={"std": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Defense):
    """Gaussian noise, elementwise, on all weights: ``sent = u + N(0, std²)``.

    ``std`` is a standard deviation in the units of the update. A gradient and global minus local weights differ by the learning
    rate, so the same ``std`` is far stronger on the latter. Chain it after ``clipping`` for differential privacy.
    With ``sharers`` n each client adds N(0, std²/n), so that the sum of n of them carries N(0, std²): enough for who sees sums
    alone (a secure aggregate), and n times less variance before a server that sees every update. What is proved says which of
    the two. Clients that collude, or add nothing, take their share of the noise away.
    It is the "GNP" of Xu et al. 2025, whose δ is a variance: ``std`` = √δ (0.3873 for δ = 0.15, their setting for CIFAR-10).

    Departs from the paper: none in the mathematics. Where training takes several steps, noise is added once, to the update.

    Cost: one pass over the weights. Known weakness: the noise is independent from round to round, so several rounds on the same
    data average it out; what the attacker knows is `NoisyUpdateAdversary`.

    Attributes:
        std: Standard deviation of the noise; 0 is off.
        sharers: Clients that share it, each adding std / √sharers.
    """

    std: float = 0.01
    sharers: int = 1

    def __post_init__(self) -> None:
        """Refuse a negative or endless amount of noise, and no sharers."""
        check_number("gaussian_noise", "std", self.std)
        check_whole("gaussian_noise", "sharers", self.sharers, 1)

    @property
    def own_std(self) -> float:
        """Standard deviation of what one client adds."""
        return self.std / math.sqrt(self.sharers)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Add the noise; the same seed, round and position in a chain give the same bits."""
        check_finite(update.weights)
        if self.std == 0:
            return update, state
        generator = view.generator("gaussian_noise")

        def noisy(value: Tensor) -> Tensor:
            return value + self.own_std * torch.randn(value.shape, generator=generator, device=value.device, dtype=value.dtype)

        return update.replace(weights={name: noisy(value) for name, value in update.weights.items()}), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who knows the noise."""
        return NoisyUpdateAdversary(self.std, self.sharers) if self.std else OpenAdversary()
