"""Attackers who know Refiner: one restores the raw picture from the robust one, one fits raw and robust pictures together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import Defense
from gradveil.defenses.parts.denoising import denoise_images
from gradveil.defenses.refiner.refinement import Scope, project_on_ball
from gradveil.defenses.refiner.restorer import restorer_for
from gradveil.learning.learner import GradientHook, Learner
from gradveil.records import Observation, Reconstruction, WhatArrives
from gradveil.tensors import Named

__all__ = ["DeblendingAdversary", "MixtureAdversary", "deblend", "noise_of"]

NOISE = "noise"
UNIFORM_STD = 1 / math.sqrt(12)
NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a normal number with standard deviation one."""
MARGIN = 1.25
"""Noise that went through an attack is correlated, and looks weaker in the finest differences than it is."""
MOSTLY_ROBUST = 0.5
"""Share λ of the robust gradient from which the de-blended robust picture is the better estimate."""


def deblend(robust: Tensor, blend: float) -> Tensor:
    """Return the estimate ``(x* - α / 2) / (1 - α)`` of the raw inputs, denoised where they are pictures.

    The start of the refinement is (1 - α) x + α v with v uniform: mean 1/2 and standard deviation 1 / √12, so that noise of
    α / (√12 (1 - α)) is left after the subtraction. The descent adds to it, and an attack's own smoothness takes from it; the
    denoiser is therefore told what the picture itself shows, and never less than the law.
    """
    scaled = (robust - blend * 0.5) / (1 - blend)
    if scaled.ndim != 4 or blend == 0:
        return scaled.clamp(0, 1)
    known = blend * UNIFORM_STD / (1 - blend)
    cleaned = [denoise_images(each, MARGIN * max(known, noise_of(each))) for each in scaled.split(1)]
    return torch.cat(cleaned).clamp(0, 1)


def noise_of(images: Tensor) -> float:
    """Return the standard deviation of white noise on pictures (B, C, H, W), from their finest diagonal differences.

    The median of their absolute values ignores the few that are edges (Donoho and Johnstone 1994,
    https://doi.org/10.1093/biomet/81.3.425).
    """
    if min(images.shape[2:]) < 2:
        return 0.0
    left, right = images[..., :-1], images[..., 1:]
    crossed = (left[..., :-1, :] - left[..., 1:, :] - right[..., :-1, :] + right[..., 1:, :]) / 2
    return float(crossed.abs().median()) / NORMAL_MEDIAN


@dataclass(frozen=True)
class DeblendingAdversary(OpenAdversary):
    """Knows that the update is exact for robust data: inverts that, then takes the blended noise off the finished picture.

    With public pictures it learns what the defense does to them, and filters (`gradveil.defenses.refiner.restorer`); without, it
    de-blends and denoises. Every round draws its own noise, but one input is fitted for all rounds seen; over several the
    attacker is incomplete.

    Attributes:
        blend: α of the defense.
        defense: What the client runs; None never filters.
    """

    blend: float
    defense: Defense | None = None

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that it is incomplete over several rounds, each of which has robust data of its own."""
        return super().arrives(observation).replace(incomplete=len(observation.updates) > 1)

    def finish(self, reconstruction: Reconstruction, observation: Observation) -> Reconstruction:
        """Filter, or de-blend and denoise."""
        return reconstruction.replace(
            inputs=_restored(reconstruction.inputs, self.blend, self.defense, reconstruction, observation)
        )


@dataclass(frozen=True)
class MixtureAdversary(OpenAdversary):
    """Knows the ball: what is sent is a mixture of the gradients of x and x*, and x* is made of x and noise.

    The dummies stand for the raw x. The unknown v gives the robust data, x* = (1 - α) x + α v: v is the noise with whatever the
    descent added, so it is not kept inside [0, 1]. The mixing weight is not guessed: it follows from both gradients and the known
    radius, λ = min(1, ε / ‖g(x*) - g(x)‖), with the defense's own code. So every local step, every layer and every client of
    an aggregate has its own λ, and the residual vanishes at the truth. Where λ is large the raw gradient says little, and the
    finished picture is the robust one, filtered or de-blended.

    Attributes:
        blend: α of the defense.
        epsilon: Radius of the ball.
        scope: As the defense's.
        relative: As the defense's.
        prior: Weight of the prior on v, a normal law with the mean and variance of the uniform one.
        defense: What the client runs; None never filters.
    """

    blend: float
    epsilon: float
    scope: Scope
    relative: bool
    prior: float = 1e-4
    defense: Defense | None = None

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that the dummies are the data before the defense, and nothing exact: a mixture is the gradient of no input.

        Incomplete over several rounds: what is fitted is shared by them, what the client drew is not.
        """
        several = len(observation.updates) > 1
        return super().arrives(observation).replace(exact=frozenset, raw_inputs=True, incomplete=several)

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        """Return v of all clients (clients, B, ...): grey, with a trace of noise to break symmetries."""
        clients = observation.learner.settings.clients
        shape = (clients, observation.examples // clients, *observation.input_shape)
        like = next(iter(observation.update.weights.values()))
        return {NOISE: (0.5 + 0.01 * torch.randn(shape, generator=generator)).to(like)}

    def of_client(self, variables: Named, client: int) -> Named:
        """Return v of one client."""
        return {NOISE: variables[NOISE][client]}

    def on_gradient(self, learner: Learner, variables: Named) -> GradientHook:
        """Mix in the gradient of the robust data."""
        noise = variables[NOISE]

        def mix(step: int, weights: Named, gradient: Named, inputs: Tensor, targets: Tensor) -> Named:
            chosen = learner.rows_at(step, noise.shape[0])
            own = noise if chosen is None else noise[chosen]
            robust = (1 - self.blend) * inputs + self.blend * own
            found = learner.gradient(weights, robust, targets, learner.noise_at(step, chosen))
            return project_on_ball(found, gradient, self.epsilon, self.scope, self.relative)[0]

        return mix

    def penalty(self, variables: Named) -> Tensor:
        """Return the negative log-prior of v per number, by its weight."""
        return self.prior * 0.5 * ((variables[NOISE] - 0.5) / UNIFORM_STD).square().mean()

    def finish(self, reconstruction: Reconstruction, observation: Observation) -> Reconstruction:
        """Take the raw estimate where mostly the raw gradient was sent, the restored robust one where it was not."""
        fitted = reconstruction.variables.get(NOISE)
        if fitted is None:
            return reconstruction
        noise = fitted.reshape(reconstruction.inputs.shape).to(reconstruction.inputs)
        robust = (1 - self.blend) * reconstruction.inputs + self.blend * noise
        if self.share(observation, reconstruction, robust) < MOSTLY_ROBUST:
            return reconstruction
        return reconstruction.replace(inputs=_restored(robust, self.blend, self.defense, reconstruction, observation))

    def share(self, observation: Observation, reconstruction: Reconstruction, robust: Tensor) -> float:
        """Return the mean λ at the first step that a reconstruction implies."""
        learner, targets = observation.learner, reconstruction.targets
        size = observation.examples // learner.settings.clients
        rows = list(range(size))
        raw, found = (
            learner.gradient(learner.weights, x[:size], targets[:size], learner.noise_at(0, rows))
            for x in (reconstruction.inputs, robust)
        )
        return float(project_on_ball(found, raw, self.epsilon, self.scope, self.relative)[1].mean())


def _restored(
    robust: Tensor, blend: float, defense: Defense | None, reconstruction: Reconstruction, observation: Observation
) -> Tensor:
    """Return the raw inputs that robust ones came from: by the learned filter, or de-blended where there is none."""
    restorer = restorer_for(defense, observation, robust, reconstruction.targets) if defense is not None else None
    return deblend(robust, blend) if restorer is None else restorer.clean(robust)
