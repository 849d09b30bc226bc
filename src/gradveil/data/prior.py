"""Public records to learn from that are not of the audited data: other pictures, or draws from a law that says almost nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradveil.data.photos import PHOTOGRAPHS
from gradveil.data.public import cut, public_images, read_photograph
from gradveil.errors import UsageError
from gradveil.randomness import Seed

__all__ = ["other_pictures", "stationary"]

CONTRAST = 0.25
"""Standard deviation of a value about mid-grey: that of CIFAR-10's pixels."""
ALIKE = 0.9
"""Correlation of two colours at one place, about that of photographs."""


def other_pictures(shape: tuple[int, ...], count: int, seed: Seed, *, photos: bool) -> Tensor:
    """Return crops of the built-in photographs, of random size and place; for signals and feature vectors, smooth curves.

    Args:
        shape: Of one input.
        count: How many.
        seed: Equal seeds give equal inputs.
        photos: Whether the photographs of `photos` may be used; else all come from the public one.
    """
    if len(shape) != 3 or not photos:
        return public_images(shape, count, seed)
    generator = seed.generator("other pictures")
    pictures = [read_photograph(each, each.reduction) for each in PHOTOGRAPHS]
    return torch.stack([cut(pictures[index % len(pictures)], shape, generator) for index in range(count)])


def stationary(shape: tuple[int, ...], count: int, seed: Seed) -> Tensor:
    """Return draws of a Gaussian law with a spectrum of 1/f²: mid-grey in the mean, the same everywhere, smooth as nature is.

    Of (C, H, W) the spectrum is that of planes, the colours correlated; else that of the last axis. Clipped to [0, 1].
    """
    if count < 1 or not shape or min(shape) < 1:
        raise UsageError(f"cannot draw {count} inputs of shape {shape}; ask for at least one, with no empty axis")
    axes = (-2, -1) if len(shape) == 3 else (-1,)
    size = [shape[axis] for axis in axes]
    frequencies = torch.meshgrid(*(torch.fft.fftfreq(length, dtype=torch.float64) for length in size), indexing="ij")
    radius = torch.stack([each.square() for each in frequencies]).sum(0).sqrt()
    # The mean counts as half of the slowest wave: it varies most, and not without bounds.
    amplitude = 1 / radius.clamp_min(0.5 / max(size))
    amplitude = amplitude * math.sqrt(math.prod(size) / float(amplitude.square().sum()))
    white = torch.randn((count, *shape), generator=seed.generator("stationary"), dtype=torch.float64)
    if len(shape) == 3 and shape[0] > 1:
        common = torch.randn((count, 1, *size), generator=seed.generator("stationary colours"), dtype=torch.float64)
        white = math.sqrt(ALIKE) * common + math.sqrt(1 - ALIKE) * white
    drawn = torch.fft.ifftn(torch.fft.fftn(white, dim=axes) * amplitude, dim=axes).real
    found: Tensor = (0.5 + CONTRAST * drawn).clamp(0, 1).float()
    return found
