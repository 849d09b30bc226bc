"""The attacker who knows the shadow defense: inverts the noisy image, then takes the noise off with a filter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import ClientView, State
from gradveil.defenses.parts.recent import Recent, content_of
from gradveil.defenses.shadow.defense import Shadow
from gradveil.defenses.shadow.noise import amplitude, foreground_weight, reduce_foreground, scaled_noise
from gradveil.defenses.shadow.restorer import LEAST, Restorer, fit_restorer
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, Reconstruction, WhatArrives

__all__ = ["ShadowAdversary", "common_share", "public_pairs"]

FEWEST = 8
"""Public pictures from which a filter is worth learning."""
MOST = 64
"""Of more, so many are enough: each gives a patch per pixel."""
KEPT = 4
_FILTERS: Recent[Restorer] = Recent(KEPT)
"""Filters made lately; one serves all observations of a round."""


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


def public_pairs(defense: Shadow, public: Tensor, learner: Learner, round_index: int) -> Tensor:
    """Return public images (B, C, H, W) as clients with this defense would train on them in this round, in few steps.

    Neither labels nor the model are needed: the shadow is not fine-tuned, which changes where the noise lies and not what it
    looks like, and the foreground is taken to be the same everywhere, as it nearly is at the paper's temperature.
    """
    recipe = dataclasses.replace(
        defense.quick(), fit_steps=0, foreground=0.0, noise_momentum=0.0, until=max(defense.until, round_index + 1)
    )
    own = learner.replace(settings=learner.settings.replace(clients=1), noise={})
    view = ClientView(own, Seed(0).child("shadow's restorer"), round=round_index, weights=own.weights)
    labels = torch.zeros(len(public), dtype=torch.int64, device=public.device)
    made = recipe.noise(Batch(public, labels), view, {})[0].squeeze(1)  # (B, H, W)
    total = made.sum((1, 2), keepdim=True)
    shares = made / torch.where(total > 0, total, torch.ones_like(total))  # N³, whose entries sum to one
    if defense.foreground:
        weight = foreground_weight(min(1.0, round_index / defense.rounds), defense.foreground_least, defense.foreground_most)
        shares = reduce_foreground(shares, torch.full_like(shares, 1 / shares[0].numel()), weight)
    return (public + scaled_noise(shares, public, _height(defense, round_index))).clamp(0, 1)


def _height(defense: Shadow, round_index: int) -> float:
    """Largest noise of a round over the largest value of an image."""
    return amplitude(defense.strength, min(1.0, round_index / defense.rounds), defense.schedule)


def _restorer(defense: Shadow, public: Tensor, learner: Learner, round_index: int) -> Restorer:
    pictures = public[:MOST].detach().to(next(iter(learner.weights.values()))).clamp(0, 1)

    def make() -> Restorer:
        noisy = public_pairs(defense, pictures, learner, round_index)
        units = Seed(0).child("shadow's restorer").generator("units")
        return fit_restorer(pictures, noisy, _height(defense, round_index), units)

    # Neither labels nor the model decide what the noise looks like, see `public_pairs`.
    return _FILTERS.get((content_of(pictures), defense, round_index), make)


@dataclass(frozen=True)
class ShadowAdversary(OpenAdversary):
    """Knows that the update is exact for x + N(x), that N follows from x by a public recipe, and what the generator is.

    The search is that of an attacker who ignores the defense, because the gradient of x + N is an ordinary gradient. What it
    finds is y ≈ x + N(x).

    An attacker with public pictures runs the defense's own code on them, learns from these pairs what the noise looks like, and
    filters y (`gradveil.defenses.shadow.restorer`). It need not know where the noise of this record lies: noise on few pixels,
    of one sign and at a known height, shows itself.

    Without public pictures, or where the filter takes off more than the noise can be because it met another kind of picture, it
    leaves y as it is. The recipe alone does not help: `subtracted` solves for x by iteration from x = y,
    ``x ← (x + y - N(x)) / 2``, with shadows of its own, fitted to the current x and the global model, that make N. What it does
    not know is where the client's latent codes started. So it makes N from several starts, and subtracts no more of their mean
    than they have in common (`common_share`); of the iterates it keeps, per image, the one that explains y best. That was further
    from the truth than y.

    The noise of later rounds holds earlier rounds' maps, of models and shadows the attacker may not have seen: there it uses
    the maps of the round itself and says that it is incomplete.

    Attributes:
        defense: What the client runs.
        iterations: Of the fixed point.
        starts: Shadows.
    """

    defense: Shadow
    iterations: int = 2
    starts: int = 3

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that it is incomplete for later rounds: maps are then a mean over rounds."""
        later = len(observation.updates) > 1 or any(update.round > 0 for update in observation.updates)
        return super().arrives(observation).replace(incomplete=later)

    def finish(self, reconstruction: Reconstruction, observation: Observation) -> Reconstruction:
        """Filter the noise off with what public pictures taught; where nothing was learned, keep what was found."""
        found, public, when = reconstruction.inputs, observation.pictures, observation.update.round
        if found.ndim != 4 or found.shape[1] not in (1, 3):
            return reconstruction
        filtered, believed = found, torch.zeros(len(found), dtype=torch.bool, device=found.device)
        if public is not None and len(public) >= FEWEST and public.shape[1:] == found.shape[1:] and min(found.shape[2:]) >= LEAST:
            restorer = _restorer(self.defense, public, observation.learner, when)
            filtered, believed = restorer.clean(found.detach().clamp(0, 1), _height(self.defense, when))
        return reconstruction.replace(inputs=torch.where(believed[:, None, None, None], filtered, found))

    def subtracted(self, learner: Learner, noisy: Tensor, targets: Tensor, round_index: int) -> Tensor:
        """Return noisy inputs less what the client would have added to what is left; no use but to show that it is none."""
        # Codes are fitted once and kept; maps and shadows are made anew from each guess, as the client made them from x.
        recipe = dataclasses.replace(self.defense.quick(), noise_momentum=0.0, until=max(self.defense.until, round_index + 1))
        noisy = noisy.detach().clamp(0, 1)
        clean, best = noisy, noisy
        least = noisy.new_full(noisy.shape[:1], torch.inf)
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
