"""Noise on the training inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.laplace_noise import draw_laplace
from gradveil.defenses.parts.denoising import denoise_images
from gradveil.records import Batch, Observation, Reconstruction, WhatArrives
from gradveil.study.checks import check_choice, check_number
from gradveil.tensors import check_finite

__all__ = ["DataNoise", "NoisyDataAdversary"]


@dataclass(frozen=True)
class NoisyDataAdversary(OpenAdversary):
    """Knows that the update is exact, for noisy inputs: inverts those, then takes the noise off the finished image.

    Over several rounds one input is fitted to draws that differ; what is found is near their mean, and denoised as that.
    The attacker then says that it is incomplete. Inputs that are not images (B, C, H, W) are left as they are: nothing is known
    about them that noise does not also have.
    """

    std: float

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that it is incomplete over several rounds, each of which draws its own noise."""
        return super().arrives(observation).replace(incomplete=len(observation.updates) > 1)

    def finish(self, reconstruction: Reconstruction, observation: Observation) -> Reconstruction:
        """Denoise with the strength that the known noise has in the mean of the rounds seen."""
        left = self.std / math.sqrt(len(observation.updates))
        return reconstruction.replace(inputs=denoise_images(reconstruction.inputs, left))


@DEFENSES.register(
    DefenseCard(
        name="data_noise",
        summary="Adds independent noise to every input before training, and keeps the result inside [0, 1] (DNP).",
        cost="one random number per input value; accuracy falls with the noise, as with any augmentation by noise",
        weakness="the update is exact for the noisy inputs, so an attacker inverts those and denoises the images afterwards",
        acts_on=("data",),
        ladder=({"std": 0.05}, {"std": 0.1}, {"std": 0.2}, {"std": 0.4}),
        off={"std": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class DataNoise(Defense):
    """Noise on the data: ``trained on = clamp(x + z, 0, 1)`` with z of mean 0 and standard deviation ``std``.

    Departs from the paper: this is common practice without one source ("DNP" of Xu et al. 2025, image-level DP). Their δ is a
    variance: DNP at δ is ``std`` = √δ here (0.2646 for δ = 0.07, their setting for CIFAR-10). The result is clamped,
    because inputs live in [0, 1] everywhere; at large ``std`` the noise that remains is therefore a little smaller. ``std`` is a
    standard deviation for both laws (Laplace: b = std / √2). One draw per round, shared by all local steps of the round.

    Cost: one pass over the batch. Known weakness: natural images are easily denoised; see `NoisyDataAdversary`.

    Attributes:
        std: Standard deviation of the noise, in units of the input range; 0 is off.
        law: ``gaussian`` or ``laplace``.
    """

    std: float = 0.1
    law: Literal["gaussian", "laplace"] = "gaussian"

    def __post_init__(self) -> None:
        """Refuse a negative or endless amount of noise, and other laws."""
        check_number("data_noise", "std", self.std)
        check_choice("data_noise", "law", self.law, ("gaussian", "laplace"))

    def protect_batch(self, batch: Batch, view: ClientView, state: State) -> tuple[Batch, State]:
        """Add the noise once per round."""
        inputs = batch.inputs
        check_finite({"inputs": inputs}, "the batch")
        if self.std == 0:
            return batch, state
        generator = view.generator("data_noise")
        if self.law == "laplace":
            noise = draw_laplace(inputs, self.std / math.sqrt(2), generator)
        else:
            noise = self.std * torch.randn(inputs.shape, generator=generator, device=inputs.device, dtype=inputs.dtype)
        return batch.replace(inputs=(inputs + noise).clamp(0, 1)), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who denoises."""
        return NoisyDataAdversary(self.std) if self.std else OpenAdversary()
