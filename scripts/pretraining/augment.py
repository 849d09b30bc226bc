"""The same random changes for real and generated pictures, so that a discriminator cannot learn a few thousand pictures by heart.

Colour, translation and cut-out after Zhao et al., Differentiable Augmentation for Data-Efficient GAN Training, NeurIPS 2020;
every change is differentiable, so the generator learns through it and does not imitate it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["augment"]

SHIFT = 0.125
CUT = 0.4


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return changed pictures (B, C, H, W); the generator is on their device."""
    return _cut(_shift(_recolour(images, generator), generator), generator)


def _uniform(images: Tensor, generator: torch.Generator, count: int = 1) -> Tensor:
    return torch.rand((count, len(images), 1, 1, 1), generator=generator, device=images.device)


def _recolour(images: Tensor, generator: torch.Generator) -> Tensor:
    brightness, saturation, contrast = _uniform(images, generator, 3).unbind(0)
    images = images + 0.5 * (brightness - 0.5)
    if images.shape[1] > 1:
        grey = images.mean(1, keepdim=True)
        images = grey + (images - grey) * 2 * saturation
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + (images - mean) * (contrast + 0.5)


def _places(images: Tensor, low: int, high: int, generator: torch.Generator) -> Tensor:
    return torch.randint(low, high + 1, (len(images), 1), generator=generator, device=images.device)


def _shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each picture by up to an eighth of its side; what comes in is black."""
    side = images.shape[3]
    most = int(SHIFT * side + 0.5)
    line = torch.arange(side, device=images.device)
    rows = line + _places(images, -most, most, generator)  # (B, side)
    columns = line + _places(images, -most, most, generator)
    inside = ((rows >= 0) & (rows < side))[:, None, :, None] & ((columns >= 0) & (columns < side))[:, None, None, :]
    rows, columns = rows.clamp(0, side - 1), columns.clamp(0, side - 1)
    shape = images.shape
    images = images.gather(2, rows[:, None, :, None].expand(shape))
    return images.gather(3, columns[:, None, None, :].expand(shape)) * inside


def _cut(images: Tensor, generator: torch.Generator) -> Tensor:
    """Blacken a square at a random place."""
    side = images.shape[3]
    half = int(CUT * side / 2)
    line = torch.arange(side, device=images.device)
    rows = (line - _places(images, 0, side - 1, generator)).abs() < half
    columns = (line - _places(images, 0, side - 1, generator)).abs() < half
    return images * ~(rows[:, None, :, None] & columns[:, None, None, :])
