"""More kinds of pictures than a training set holds, so that the evaluation network judges noise and not the subject.

A few thousand photographs teach nothing about X-rays, digits, dark or flat pictures. Crops at four scales, grey, low contrast,
hard edges, cut-out darkness and plain colours are made from them; the noise is then mixed in at the size the network sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.networks.evaluation import mix, windows

__all__ = ["mixed_batch", "vary"]

LUMA = (0.299, 0.587, 0.114)
SCALES = (1.0, 0.75, 0.5, 0.25)
"""Side of a crop by the side of the stored picture: one quarter of a batch each."""

GREY, CONTRAST, INVERT, EDGES, DARK, PLAIN = 0.35, 0.5, 0.1, 0.1, 0.1, 0.04
GREY_NOISE = 0.75
"""How often a grey picture gets grey noise, as data with one channel does; else each colour gets its own."""

MIRRORED = 7
"""Every seventh picture of a batch is shown mirrored."""

SMALL = (8, 14, 20, 28)
ENDS = 11
"""Half of the ratios come from the paper's grid 0, 0.1, ..., 1, the others from U(0, 1)."""


def mixed_batch(stored: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pictures (B, 3, size, size) with noise mixed in, and the ratios (B,).

    Args:
        stored: Pictures as bytes (B, C, side, side).
        size: Side of the pictures wanted.
        generator: On the device of the pictures.
    """
    images, grey = vary(stored, size, generator)
    count, device = len(images), images.device
    noise = torch.rand(images.shape, generator=generator, device=device)
    one = (grey & (_uniform(count, generator) < GREY_NOISE))[:, None, None, None]
    noise = torch.where(one, noise[:, :1], noise)
    ratios = _uniform(count, generator)
    grid = torch.randint(ENDS, (count,), generator=generator, device=device) / (ENDS - 1)
    ratios = torch.where(_uniform(count, generator) < 0.5, grid, ratios)
    return _mirror(mix(images, noise, ratios), generator), ratios


def vary(stored: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return varied pictures (B, 3, size, size) in [0, 1] and which of them (B,) are grey."""
    parts = torch.tensor_split(stored, len(SCALES))
    images = torch.cat([_crop(part, scale, size, generator) for part, scale in zip(parts, SCALES, strict=True) if len(part)])
    images = images.expand(-1, 3, -1, -1)
    count = len(images)

    def chosen(share: float) -> Tensor:
        return (_uniform(count, generator) < share)[:, None, None, None]

    def between(low: float, high: float) -> Tensor:
        return (low + (high - low) * _uniform(count, generator))[:, None, None, None]

    images = torch.where(chosen(0.5), images.flip(3), images)
    grey = chosen(GREY) if stored.shape[1] == 3 else torch.ones_like(chosen(1.0))
    luma = (images * images.new_tensor(LUMA)[None, :, None, None]).sum(1, keepdim=True)
    images = torch.where(grey, luma, images)
    mean = images.mean((1, 2, 3), keepdim=True)
    contrast = (mean + (images - mean) * between(0.0, 1.4) + between(-0.3, 0.3)).clamp(0, 1)
    images = torch.where(chosen(CONTRAST), contrast, images)
    edge, steepness = between(0.2, 0.8), between(10, 100)
    images = torch.where(chosen(EDGES), torch.sigmoid((images - edge) * steepness), images)
    images = torch.where(chosen(DARK), torch.where(images > edge, images, torch.zeros_like(images)), images)
    images = torch.where(chosen(INVERT), 1 - images, images)
    return torch.where(chosen(PLAIN), images[:, :, :1, :1], images), grey.flatten()


def _crop(stored: Tensor, scale: float, size: int, generator: torch.Generator) -> Tensor:
    """Cut a square at a random place out of each picture and bring it to ``size``, with antialiasing."""
    count, _, height, width = stored.shape
    side = max(2, round(scale * min(height, width)))
    if side < min(height, width) or height != width:
        y = torch.randint(height - side + 1, (count,), generator=generator, device=stored.device)
        x = torch.randint(width - side + 1, (count,), generator=generator, device=stored.device)
        inside = torch.arange(side, device=stored.device)
        each = torch.arange(count, device=stored.device)[:, None, None]
        rows, columns = (y[:, None] + inside)[:, :, None], (x[:, None] + inside)[:, None, :]
        stored = stored.permute(0, 2, 3, 1)[each, rows, columns].permute(0, 3, 1, 2)
    images = stored.to(torch.float32) / 255
    if side == size:
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=side > size, align_corners=False).clamp(0, 1)


def _mirror(images: Tensor, generator: torch.Generator) -> Tensor:
    """Show some pictures as the network will see smaller ones: a corner, mirrored outwards, its noise with it."""
    size = images.shape[3]
    choice = int(torch.randint(len(SMALL), (), generator=generator, device=images.device))
    to_and_fro = windows(min(SMALL[choice], size), size, images.device)[0]
    places = torch.arange(0, len(images), MIRRORED, device=images.device)
    return images.index_copy(0, places, images[places][:, :, to_and_fro][:, :, :, to_and_fro])


def _uniform(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand((count,), generator=generator, device=generator.device)
