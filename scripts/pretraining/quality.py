"""How good a network is, measured without downloading anything.

The numbers are named for what they are. A Fréchet Inception distance needs Inception; here the features come from a small
convolutional network with fixed random weights, so they compare networks trained by this package with each other and with the
anchors beside them, and with nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.networks.evaluation import mix
from gradveil.randomness import Seed

__all__ = ["RandomFeatures", "calibration", "generator_quality", "kernel_distance", "memorisation", "precision_recall"]

SIDE = 32
WIDTHS = (48, 96, 192)
NEIGHBOURS = 3
MOST = 1000
"""Pictures compared at most: distances grow with the square."""

GRID = tuple(index / 10 for index in range(11))


class RandomFeatures(nn.Module):
    """Fixed random convolutions: pictures of any size in, the mean and spread of every map of three layers out.

    Random weights see colour, contrast, edges and their scale; they do not see what a picture shows.
    """

    def __init__(self) -> None:
        """Draw the kernels from a fixed seed, so that numbers can be compared between runs and machines."""
        super().__init__()
        generator = Seed(0).generator("random features")
        given = 3
        for index, width in enumerate(WIDTHS):
            kernel = torch.randn((width, given, 3, 3), generator=generator) * math.sqrt(2 / (9 * given))
            self.register_buffer(f"kernel{index}", kernel)
            given = width

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, 672) of pictures (B, 1 or 3, H, W) in [0, 1]."""
        hidden = 2 * images.expand(-1, 3, -1, -1) - 1
        if hidden.shape[2:] != (SIDE, SIDE):
            hidden = F.interpolate(hidden, size=(SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
        found = []
        for index in range(len(WIDTHS)):
            hidden = torch.relu(F.conv2d(hidden, getattr(self, f"kernel{index}"), stride=2, padding=1))
            found += [hidden.mean((2, 3)), hidden.std((2, 3))]
        return torch.cat(found, 1)


def kernel_distance(first: Tensor, second: Tensor) -> float:
    """Return the unbiased squared maximum mean discrepancy of two sets of features, kernel (⟨a, b⟩ / d + 1)³.

    Zero for equal distributions; may be slightly below zero by chance. Features (N, d) are first brought to the mean and spread
    of the second set.
    """
    _enough(first, second, 2)
    mean, spread = second.mean(0), second.std(0).clamp_min(1e-6)
    x, y = ((each.double() - mean) / spread for each in (first, second))
    within = [_off_diagonal_mean((each @ each.T / each.shape[1] + 1) ** 3) for each in (x, y)]
    between = ((x @ y.T / x.shape[1] + 1) ** 3).mean()
    return float(within[0] + within[1] - 2 * between)


def _off_diagonal_mean(matrix: Tensor) -> Tensor:
    count = len(matrix)
    return (matrix.sum() - matrix.diagonal().sum()) / (count * (count - 1))


def precision_recall(generated: Tensor, real: Tensor, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """Return improved precision and recall (Kynkäänniemi et al. 2019) of features.

    Precision: share of generated pictures inside the reach of real ones, where the reach of a picture is the distance to its
    third-nearest fellow. Recall: the same with the roles changed.
    """
    _enough(generated, real, neighbours + 1)
    mean, spread = real.mean(0), real.std(0).clamp_min(1e-6)
    x, y = (generated - mean) / spread, (real - mean) / spread
    return _covered(x, y, neighbours), _covered(y, x, neighbours)


def _covered(points: Tensor, centres: Tensor, neighbours: int) -> float:
    reach = torch.cdist(centres, centres).kthvalue(neighbours + 1, dim=1).values  # the nearest is the point itself
    return float((torch.cdist(points, centres) <= reach).any(1).float().mean())


def memorisation(generated: Tensor, train: Tensor, held_out: Tensor) -> float:
    """Return how much nearer generated pictures lie to training pictures than held-out ones do: a ratio of median distances.

    Near 1 or above: no sign of copying. Far below 1: pictures of the training set come back. Distances between pixels at 16×16.
    """
    small = [F.interpolate(each, size=(16, 16), mode="bilinear", antialias=True, align_corners=False).flatten(1) for each in
             (generated, train, held_out)]  # fmt: skip
    own, fresh = (torch.cdist(each, small[1]).amin(1).median() for each in (small[0], small[2]))
    return float(own / fresh.clamp_min(1e-6))


def _enough(first: Tensor, second: Tensor, least: int) -> None:
    if min(len(first), len(second)) < least:
        raise UsageError(f"comparing pictures needs at least {least} of each kind, not {len(first)} and {len(second)}")


@torch.no_grad()
def generator_quality(generator: nn.Module, train: Tensor, held_out: Tensor, seed: Seed) -> dict[str, Any]:
    """Measure a generator against pictures it has not seen.

    Args:
        generator: In eval mode, with ``latent``.
        train: Training pictures as bytes (N, C, H, W).
        held_out: The same for pictures kept back.
        seed: Draws latent codes and the pictures compared.

    Returns:
        Kernel distance to the held-out pictures, with two anchors (training pictures, uniform noise), precision, recall,
        memorisation, and the number of pictures.
    """
    device = next(generator.parameters()).device
    count = min(MOST, len(held_out))
    real, seen = (_sample(each, count, seed, role).to(device) for each, role in ((held_out, "held-out"), (train, "train")))
    z = torch.randn((count, int(generator.latent)), generator=seed.generator("codes")).to(device)  # type: ignore[arg-type]
    made = torch.cat([generator(part) for part in z.split(100)])
    noise = torch.rand(made.shape, generator=seed.generator("noise")).to(device)
    features = RandomFeatures().to(device)
    f_real, f_seen, f_made, f_noise = (
        torch.cat([features(part) for part in each.split(100)]) for each in (real, seen, made, noise)
    )
    precision, recall = precision_recall(f_made, f_real)
    everything = train.to(device).to(torch.float32) / 255
    return {
        "kernel_distance_random_features": kernel_distance(f_made, f_real),
        "kernel_distance_of_training_pictures": kernel_distance(f_seen, f_real),
        "kernel_distance_of_noise": kernel_distance(f_noise, f_real),
        "precision_random_features": precision,
        "recall_random_features": recall,
        "memorisation_distance_ratio": memorisation(made, everything, real),
        "pictures_compared": count,
    }


def _sample(images: Tensor, count: int, seed: Seed, role: str) -> Tensor:
    rows = torch.randperm(len(images), generator=seed.generator(role))[:count]
    return images[rows].to(torch.float32) / 255


@torch.no_grad()
def calibration(network: nn.Module, images: Tensor, seed: Seed) -> Mapping[str, Any]:
    """Measure an evaluation network on pictures (N, C, H, W) in [0, 1]: its mean answer at eleven ratios.

    Returns:
        ``mean`` answers at 0, 0.1, ..., 1, the largest ``bias`` from the ratio, the ``spread`` between pictures at the worst
        ratio, and whether the means are ``monotone``.
    """
    device = next(network.parameters()).device
    means, spreads = [], []
    for index, ratio in enumerate(GRID):
        noise = torch.rand(images.shape, generator=seed.generator("noise", round=index))
        mixed = mix(images, noise, torch.full((len(images),), ratio))
        answers = torch.cat([network(part.to(device)) for part in mixed.split(100)]).double()
        means.append(float(answers.mean()))
        spreads.append(float(answers.std()))
    return {
        "mean": [round(value, 4) for value in means],
        "bias": max(abs(mean - ratio) for mean, ratio in zip(means, GRID, strict=True)),
        "spread": max(spreads),
        "monotone": all(low < high for low, high in itertools.pairwise(means)),
        "pictures": len(images),
    }
