"""What a generator is trained against: tells pictures of the data from generated ones."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.networks.style import WIDTHS, EqualConv, EqualLinear

__all__ = ["Discriminator"]

GROUP = 4
"""Pictures that are compared with each other, so that a generator cannot repeat one picture."""


class Residual(nn.Module):
    """Two convolutions, then half the size; a 1×1 convolution carries the input past them."""

    def __init__(self, given: int, out: int, *, generator: torch.Generator) -> None:
        """Build the layers."""
        super().__init__()
        self.first = EqualConv(given, given, 3, generator=generator)
        self.second = EqualConv(given, out, 3, generator=generator)
        self.past = EqualConv(given, out, 1, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return maps of half the size."""
        hidden = _rectified(self.second, _rectified(self.first, inputs))
        halved: Tensor = F.avg_pool2d(hidden, 2) + self.past(F.avg_pool2d(inputs, 2))
        return halved / math.sqrt(2)


class Discriminator(nn.Module):
    """Residual convolutions down to 4×4, the spread within groups of pictures as one more channel, two linear layers.

    Args:
        size: Side of the pictures, a power of two from 8.
        channels: 1 for grey, 3 for colour.
        widths: Kernels at each size, by side.
        generator: Draws the first weights.
    """

    def __init__(self, size: int, channels: int, widths: dict[int, int] | None = None, *, generator: torch.Generator) -> None:
        """Build the layers."""
        super().__init__()
        table = widths or WIDTHS
        sides = [side for side in (256, 128, 64, 32, 16, 8, 4) if side <= size]
        width = [table.get(side, min(table.values())) for side in sides]
        self.colours = EqualConv(channels, width[0], 1, generator=generator)
        ends = itertools.pairwise(width)
        self.blocks = nn.ModuleList(Residual(given, out, generator=generator) for given, out in ends)
        self.last = EqualConv(width[-1] + 1, width[-1], 3, generator=generator)
        self.hidden = EqualLinear(width[-1] * 16, width[-1], generator=generator)
        self.score = EqualLinear(width[-1], 1, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores (B,) of pictures (B, C, size, size) in [0, 1]; high for pictures of the data."""
        hidden = _rectified(self.colours, 2 * images - 1)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = _rectified(self.last, torch.cat((hidden, _spread(hidden)), 1))
        score: Tensor = self.score(_rectified(self.hidden, hidden.flatten(1)))
        return score.squeeze(1)


def _rectified(layer: EqualConv | EqualLinear, inputs: Tensor) -> Tensor:
    return F.leaky_relu(layer(inputs, math.sqrt(2)), 0.2)


def _spread(maps: Tensor) -> Tensor:
    """Return the mean standard deviation within groups as a map (B, 1, H, W)."""
    batch, _, height, width = maps.shape
    group = math.gcd(GROUP, batch)
    grouped = maps.reshape(group, batch // group, -1)
    spread = (grouped.var(0, unbiased=False) + 1e-8).sqrt().mean(1)  # (batch / group,)
    return spread.repeat(group)[:, None, None, None].expand(-1, 1, height, width)
