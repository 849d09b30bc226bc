"""From an error map to the noise of the shadow defense: equalised, remembered, weaker in the foreground, scaled to the image.

All functions take one map per image, (B, H, W), and never mix images. Maps are per pixel and shared by the channels, so noise
lies where the pixel lies. Equation numbers are those of the paper (`gradveil.defenses.shadow.defense`).

Letters: B images, C channels, H × W pixels, T temperature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradveil.models.grad_cam import top_share

__all__ = [
    "SCHEDULES",
    "amplitude",
    "equalise",
    "error_map",
    "foreground_map",
    "foreground_weight",
    "inverse_softmax",
    "reduce_foreground",
    "relative_noise",
    "scaled_noise",
    "softmax_map",
    "stretch",
]

LEVELS = 256
SCHEDULES = ("increase", "fix", "decrease")


def error_map(images: Tensor, imagined: Tensor) -> Tensor:
    """Return M (B, H, W): the squared distance of the colours of each pixel, for images (B, C, H, W)."""
    return (images - imagined).square().sum(1)


def inverse_softmax(errors: Tensor, temperature: float) -> Tensor:
    """Return N¹ (10) up to a positive factor per image: 1 / softmax(M / T), divided by its largest entry.

    The factor cancels in the next step, which stretches each map to the grey levels; without it softmax underflows at low
    temperatures and its inverse is infinite. What the imagined attacker rebuilds best gets the largest value, one.
    """
    return torch.exp((errors.amin((1, 2), keepdim=True) - errors) / temperature)


def stretch(maps: Tensor) -> Tensor:
    """Return each map brought to [0, 255]; a constant map has no contrast and becomes zero."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    spread = high - low
    safe = torch.where(spread > 0, spread, torch.ones_like(spread))
    return torch.where(spread > 0, (LEVELS - 1) * (maps - low) / safe, torch.zeros_like(maps))


def equalise(maps: Tensor) -> Tensor:
    """Return G (13): each map's own histogram of 256 grey levels made even; whole levels from 0 to 255, in the order of the map.

    The share of pixels up to a level, counted from above the darkest one, becomes the new level: the darkest pixels get 0 and the
    brightest 255. A constant map becomes zero.
    """
    levels = stretch(maps).round().to(torch.int64).flatten(1)  # (B, HW)
    counts = torch.zeros((len(maps), LEVELS), dtype=torch.float64, device=maps.device)
    counts.scatter_add_(1, levels, torch.ones_like(levels, dtype=torch.float64))
    shares = counts.cumsum(1) / levels.shape[1]  # (B, 256)
    darkest = shares[:, :1]
    above = torch.where(darkest < 1, 1 - darkest, torch.ones_like(darkest))
    table = ((LEVELS - 1) * (shares - darkest) / above).round()
    return table.gather(1, levels).reshape(maps.shape).to(maps.dtype)


def softmax_map(maps: Tensor, temperature: float) -> Tensor:
    """Return σ(map / T) over the pixels of each image (11); sums to one."""
    return torch.softmax(maps.flatten(1) / temperature, dim=1).reshape(maps.shape)


def relative_noise(errors: Tensor, temperature: float, *, equalised: bool = True) -> Tensor:
    """Return N² (12) of error maps; without equalisation N¹ is only stretched to the same grey levels."""
    # In double precision: at temperature 20 the N¹ of a good likeness differ in their fifth digit, and have 256 levels between
    # them.
    first = inverse_softmax(errors.double(), temperature)
    return softmax_map(equalise(first) if equalised else stretch(first), temperature).to(errors.dtype)


def foreground_map(saliency: Tensor, share: float, temperature: float) -> Tensor:
    """Return L_CAM (8, 9): σ(mask · saliency / T), with a mask of the most salient pixels."""
    return softmax_map(top_share(saliency, share) * saliency, temperature)


def foreground_weight(progress: float, least: float, most: float) -> float:
    """Return α_CAM (16): the share of the training that is over, within [least, most]."""
    return min(most, max(least, progress))


def reduce_foreground(noise: Tensor, foreground: Tensor, weight: float) -> Tensor:
    """Return N⁴ (15) of N³ and L_CAM."""
    return noise - weight * noise.sign() * foreground


def amplitude(strength: float, progress: float, schedule: str) -> float:
    """Return w_N (18): ``increase`` grows from α to e α over the training, ``decrease`` is its mirror image, ``fix`` is α."""
    return strength * {"increase": math.exp(progress), "fix": 1.0, "decrease": math.exp(1 - progress)}[schedule]


def scaled_noise(noise: Tensor, images: Tensor, size: float) -> Tensor:
    """Return N (17), (B, 1, H, W): N⁴ scaled so that its largest entry is ``size`` times the image's largest value.

    The paper divides by max(N⁴), which is near zero or negative where the foreground took everything away, and explodes there.
    Here it is max |N⁴|, the same wherever the largest entry is positive, and |N| never exceeds size · max(x). A map of zeros
    gives no noise, and so does a black image.
    """
    largest = noise.abs().amax((1, 2), keepdim=True)
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    bright = images.flatten(1).amax(1).reshape(-1, 1, 1).abs()
    return (size * bright * (noise / safe)).unsqueeze(1)
