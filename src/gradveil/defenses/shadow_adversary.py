"""The attacker who knows the shadow defense: inverts the noisy image, then takes off noise made by the same recipe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import ClientView, State
from gradveil.defenses.shadow import Shadow
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, Reconstruction

__all__ = ["ShadowAdversary", "common_share"]


def common_share(draws: Tensor) -> Tensor:
    """Return, per image, the factor by which the mean of S draws of noise (S, B, ...) best predicts one more draw (B,).

    With c the mean product of two different draws and t the mean square of one, the least squares factor of the mean is
    c / (c + (t - c) / S): one where all draws agree, near zero where they have nothing in common. Below zero counts as zero.
    """
    flat = draws.flatten(2)
    count = len(flat)
    if count == 1:
        return torch.ones_like(flat[0, :, 0])
    total = flat.square().sum((0, 2)) / count
    common = (flat.sum(0).square().sum(1) - count * total) / (count * (count - 1))
    common = torch.minimum(common.clamp_min(0), total)
    below = common + (total - common) / count
    return torch.where(below > 0, common / below.clamp_min(torch.finfo(below.dtype).tiny), torch.zeros_like(below))


@dataclass(frozen=True)
class ShadowAdversary(OpenAdversary):
    """Knows that the update is exact for x + N(x), that N follows from x by a public recipe, and what the generator is.

    The search is that of an attacker who ignores the defense, because the gradient of x + N is an ordinary gradient. What it
    finds is y ≈ x + N(x). The attacker solves this for x by iteration from x = y, ``x ← (x + y - N(x)) / 2``: shadows of its
    own, fitted to the current x and the global model, make N. What it does not know is where the client's latent codes started.
    So it makes N from several starts, and subtracts no more of their mean than they have in common (`common_share`): if starts
    mattered little all of it, if they decided everything next to nothing. Of the iterates it keeps, per image, the one that
    explains y best.

    The noise of later rounds holds earlier rounds' maps, of models and shadows the attacker may not have seen: there it uses the
    maps of the round itself and says that it is incomplete.

    Attributes:
        defense: What the client runs.
        iterations: Of the fixed point.
        starts: Shadows.
    """

    defense: Shadow
    iterations: int = 2
    starts: int = 3

    def incomplete_for(self, observation: Observation) -> bool:
        """True for later rounds: maps are then a mean over rounds."""
        return len(observation.updates) > 1 or any(update.round > 0 for update in observation.updates)

    def finish(self, reconstruction: Reconstruction, observation: Observation) -> Reconstruction:
        """Subtract the noise the client would have added to what is left."""
        found = reconstruction.inputs
        if found.ndim != 4 or found.shape[1] not in (1, 3):
            return reconstruction
        clients = observation.learner.settings.clients
        learner = observation.learner.replace(settings=observation.learner.settings.replace(clients=1))
        parts = zip(found.chunk(clients), reconstruction.targets.chunk(clients), strict=True)
        cleaned = [self._cleaned(learner, inputs, targets, observation.update.round) for inputs, targets in parts]
        return reconstruction.replace(inputs=torch.cat(cleaned))

    def _cleaned(self, learner: Learner, noisy: Tensor, targets: Tensor, round_index: int) -> Tensor:
        # Codes are fitted once and kept; maps and shadows are made anew from each guess, as the client made them from x.
        recipe = dataclasses.replace(self.defense.quick(), noise_momentum=0.0, until=max(self.defense.until, round_index + 1))
        noisy = noisy.detach().clamp(0, 1)
        clean, best = noisy, noisy
        least = torch.full((len(noisy),), torch.inf, dtype=noisy.dtype, device=noisy.device)
        states: list[State] = [{} for _ in range(self.starts)]
        for iteration in range(self.iterations + 1):
            batch = Batch(clean, targets, tuple(str(row) for row in range(len(clean))))
            draws = []
            for start in range(self.starts):
                view = ClientView(learner, Seed(start).child("shadow's attacker"), round=round_index, weights=learner.weights)
                drawn, state = recipe.noise(batch, view, states[start])
                states[start] = {name: value for name, value in state.items() if not name.startswith("shadow/")}
                draws.append(drawn)
            made = torch.stack(draws)
            noise = common_share(made)[:, None, None, None] * made.mean(0)
            gap = (noisy - (clean + noise).clamp(0, 1)).square().flatten(1).sum(1)
            if iteration:
                best = torch.where((gap < least)[:, None, None, None], clean, best)
                least = torch.minimum(gap, least)
            clean = (0.5 * (clean + noisy - noise)).clamp(0, 1)
        return best
