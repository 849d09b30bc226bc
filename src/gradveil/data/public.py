"""Public inputs for an attacker's rehearsal: never records of the audited data, adapted to any input shape.

An attacker who must choose between recipes tries them on inputs of its own. Pictures come from one photograph that is held
back from `photos`; for signals and feature vectors, where no photograph helps, smooth random curves are drawn.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.data.photos import PUBLIC_PHOTOGRAPH, Photograph
from gradveil.errors import UsageError
from gradveil.randomness import Seed

__all__ = ["cut", "public_images", "read_photograph"]

LUMA = (0.299, 0.587, 0.114)
WAVES = 8
MOST_ZOOM = 6.0


def public_images(shape: tuple[int, ...], count: int, seed: Seed) -> Tensor:
    """Return ``count`` public inputs of one shape, in [0, 1].

    Pictures (C, H, W) are random crops of the public photograph, of random size and mirrored half of the time, resized with
    antialiasing: colour for C = 3, otherwise luma in every channel. Other ranks, such as signals (C, T) or features (F,), get
    sums of slow sine waves along the last axis with random phases, stretched to [0, 1].

    Args:
        shape: Shape of one input.
        count: How many.
        seed: Equal seeds give equal inputs.
    """
    if count < 1 or not shape or min(shape) < 1:
        raise UsageError(f"cannot make {count} public inputs of shape {shape}; ask for at least one, with no empty axis")
    generator = seed.generator("public images")
    if len(shape) == 3:
        photograph = read_photograph(PUBLIC_PHOTOGRAPH)
        return torch.stack([cut(photograph, shape, generator) for _ in range(count)])
    return torch.stack([_signal(shape, generator) for _ in range(count)])


def read_photograph(photograph: Photograph, reduction: int = 1) -> Tensor:
    """Return a built-in photograph (3, H, W) in [0, 1]."""
    pixels = torch.from_numpy(np.array(photograph.read(reduction)))
    return pixels.permute(2, 0, 1).to(torch.float32) / 255


def cut(photograph: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Cut a window with the proportions of the input, at least twice its size where the photograph allows, and resize it."""
    channels, height, width = shape
    # Capped, or most crops of a small input would show the whole motorcycle.
    largest = min(photograph.shape[1] / height, photograph.shape[2] / width, MOST_ZOOM)
    smallest = min(2.0, largest)
    zoom = smallest + (largest - smallest) * float(torch.rand((), generator=generator)) ** 2
    h, w = max(1, math.floor(height * zoom)), max(1, math.floor(width * zoom))
    y = int(torch.randint(photograph.shape[1] - h + 1, (), generator=generator))
    x = int(torch.randint(photograph.shape[2] - w + 1, (), generator=generator))
    window = photograph[:, y : y + h, x : x + w]
    if float(torch.rand((), generator=generator)) < 0.5:
        window = window.flip(2)
    if channels != 3:
        window = (window * torch.tensor(LUMA)[:, None, None]).sum(0, keepdim=True)  # (3, h, w) -> (1, h, w)
    resized = F.interpolate(window[None], size=(height, width), mode="bilinear", antialias=True, align_corners=False)[0]
    return resized.clamp(0, 1).expand(channels, height, width).contiguous()


def _signal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Sum sine waves of 1 to `WAVES` periods with amplitude 1/periods, one draw per channel, stretched to [0, 1]."""
    rows, length = math.prod(shape[:-1]), shape[-1]
    periods = torch.arange(1, WAVES + 1, dtype=torch.float32)[:, None]  # (waves, 1)
    phases = torch.rand((rows, WAVES, 1), generator=generator)
    amplitudes = torch.randn((rows, WAVES, 1), generator=generator) / periods
    time = torch.linspace(0, 1, length)
    curves = (amplitudes * torch.sin(2 * math.pi * (periods * time + phases))).sum(1)  # (rows, waves, T) -> (rows, T)
    low, high = curves.amin(1, keepdim=True), curves.amax(1, keepdim=True)
    return ((curves - low) / (high - low).clamp_min(1e-6)).clamp(0, 1).reshape(shape)
