"""A filter from Refiner's robust pictures back to the raw ones, learned in closed form from pairs an attacker makes himself.

The descent adds to the blended noise what the evaluation network and the model ask for: a pattern that is not white, so that
no denoiser for white noise fits it, but much the same on every picture. So the attacker runs the defense's own code on public
pictures and predicts each raw pixel linearly from the 9 x 9 robust patch around it, by ridge regression: a Wiener filter whose
statistics are measured instead of assumed. No descent, no seed to choose, a few seconds of work, nearly all of it the defense's.
The least error is had by shrinking towards the mean, and a pale picture is nearer to other pale pictures than to its original; so
what is predicted gets its contrast back.

Letters: B images, C channels, H × W pixels, K = 81 pixels of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.defenses.base import ClientView, Defense
from gradveil.defenses.parts.recent import Recent, content_of
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation

__all__ = ["LEAST_SIDE", "PER_NUMBER", "Restorer", "fit_restorer", "public_pairs", "restorer_for", "with_contrast"]

SIDE = 9
LEAST_SIDE = SIDE // 2 + 1
"""Smallest image whose border can be mirrored for such a patch."""
RIDGE = 1e-3
"""Relative to the mean square of the features; a tenth and ten times of it change less than 0.1 dB."""
MOST_CONTRAST = 2.0
"""Largest factor on contrast. A filter that needs more correlates with the truth by less than one half, and would then be further
from it than the mean is."""
PER_NUMBER = 32
"""Public pixels for each coefficient from which a filter is worth learning: 8 colour pictures of 32 x 32, or 31 of 16 x 16."""
MOST = 32
"""Of more, so many are enough: each gives a patch per pixel, and costs a run of the defense."""
TINY = 1e-12
KEPT = 4


@dataclass(frozen=True, eq=False)
class Restorer:
    """Predicts each raw pixel from the robust ones around it.

    Attributes:
        coefficients: (C K + 1, C) what ridge regression found, with its contrast restored, in float64.
    """

    coefficients: Tensor

    def clean(self, robust: Tensor) -> Tensor:
        """Return the raw images (B, C, H, W) that robust ones most likely came from."""
        cleaned = []
        for image in robust.split(1):
            found = _patches(image) @ self.coefficients.to(image)  # (HW, C)
            cleaned.append(found.T.reshape(image.shape).clamp(0, 1))
        return torch.cat(cleaned) if cleaned else robust


_FILTERS: Recent[Restorer] = Recent(KEPT)
"""Filters made lately; one serves all observations of a round."""


def fit_restorer(clean: Tensor, robust: Tensor, most_contrast: float = MOST_CONTRAST) -> Restorer:
    """Return the filter that predicts ``clean`` from ``robust``, both (B, C, H, W), best but for the contrast of ``clean``.

    ``most_contrast`` of one leaves the filter of least error as it is.
    """
    channels = clean.shape[1]
    numbers = _numbers(channels)
    gram = torch.zeros((numbers, numbers), dtype=torch.float64, device=clean.device)
    product = torch.zeros((numbers, channels), dtype=torch.float64, device=clean.device)
    # One image at a time: the patches of one are 81 times its size.
    for x, seen in zip(clean.split(1), robust.split(1), strict=True):
        patches = _patches(seen).double()
        gram += patches.T @ patches
        product += patches.T @ x.reshape(channels, -1).T.double()
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(numbers, dtype=gram.dtype, device=gram.device)
    found = torch.linalg.solve(gram + ridge, product)
    spread = clean.double().var((0, 2, 3), correction=0)
    return Restorer(with_contrast(found, gram, spread, most_contrast))


def with_contrast(coefficients: Tensor, gram: Tensor, spread: Tensor, most: float = MOST_CONTRAST) -> Tensor:
    """Return a filter whose predictions have the variance of the truth, and the mean they had.

    Args:
        coefficients: (C K + 1, C); the last feature is the constant one.
        gram: (C K + 1, C K + 1) products of the features, summed over all pixels.
        spread: (C,) variance of the truth.
        most: Largest factor on contrast.
    """
    count = gram[-1, -1]
    mean = gram[-1] @ coefficients / count  # (C,)
    own = ((coefficients * (gram @ coefficients)).sum(0) / count - mean.square()).clamp_min(0)
    # Where nothing is predicted but the mean there is no contrast to restore; where all is, none is taken.
    gain = torch.where(own > TINY, spread / own.clamp_min(TINY), 1.0).sqrt().clamp(1, most)
    brought = coefficients * gain
    brought[-1] += mean * (1 - gain)
    return brought


def public_pairs(
    defense: Defense, public: Tensor, learner: Learner, group: int, classes: int, targets: Tensor, draw: int = 0
) -> Tensor:
    """Return public images (B, C, H, W) as a client with this defense would train on them.

    Args:
        defense: The defense, on its own.
        public: Public images.
        learner: The global model that the data is refined for.
        group: Examples of one client, which are refined together.
        classes: Labels there are. Which one a picture gets matters little: they take turns.
        targets: Targets of any example, for their shape and type.
        draw: Which of the client's draws.
    """
    noise = {name: value.new_zeros((len(value), group, *value.shape[2:])) for name, value in learner.noise.items()}
    own = learner.replace(settings=learner.settings.replace(clients=1), noise=noise)
    turns = torch.arange(len(public), device=public.device) % max(1, classes)
    labels = turns.reshape(-1, *[1] * (targets.ndim - 1)).expand(-1, *targets.shape[1:]).to(targets.dtype)
    seed, made = Seed(0).child("refiner's restorer", *([draw] if draw else [])), []
    for index, start in enumerate(range(0, len(public), group)):
        batch = Batch(public[start : start + group], labels[start : start + group])
        view = ClientView(own, seed.child(index), weights=own.weights, raw_batch=batch, batch=batch)
        made.append(defense.protect_batch(batch, view, {})[0].inputs)
    return torch.cat(made)


def restorer_for(defense: Defense, observation: Observation, inputs: Tensor, targets: Tensor) -> Restorer | None:
    """Return the filter for what an attack found, or None where there are no public pictures to learn it from.

    Where several rounds were seen, what was found is near the mean of as many draws, and so are the pictures it is learned from.
    """
    public, learner = observation.pictures, observation.learner
    group = max(1, observation.examples // learner.settings.clients)
    if public is None or inputs.ndim != 4 or public.shape[1:] != inputs.shape[1:] or min(inputs.shape[2:]) < LEAST_SIDE:
        return None
    count = min(len(public), max(MOST, group)) // group * group  # whole clients only
    if count * inputs[0, 0].numel() < PER_NUMBER * _numbers(inputs.shape[1]):
        return None
    pictures = public[:count].detach().to(next(iter(learner.weights.values()))).clamp(0, 1)
    if not bool(torch.isfinite(pictures).all()):
        return None  # one entry that is not finite would spoil every coefficient, and every picture that is filtered

    rounds = len(observation.updates)

    def make() -> Restorer:
        each = [public_pairs(defense, pictures, learner, group, observation.classes, targets, draw) for draw in range(rounds)]
        return fit_restorer(pictures, torch.stack(each).mean(0) if rounds > 1 else each[0])

    shape = group, observation.classes, tuple(targets.shape[1:]), targets.dtype, rounds
    return _FILTERS.get((content_of(pictures), defense, learner.content, learner.settings, *shape), make)


def _numbers(channels: int) -> int:
    return channels * SIDE * SIDE + 1


def _patches(image: Tensor) -> Tensor:
    """Return (HW, C K + 1): the patch around each pixel of one image (1, C, H, W), mirrored at the border, and a one."""
    edge = SIDE // 2
    cut = F.unfold(F.pad(image - 0.5, (edge, edge, edge, edge), mode="reflect"), SIDE)[0].T  # (1, C, H, W) -> (HW, C K)
    return torch.cat([cut, torch.ones_like(cut[:, :1])], 1)
