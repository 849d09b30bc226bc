"""A small U-Net for masks: down by pooling, up by repeating, and a shortcut across at every size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.models.base import MODELS, ModelCard
from gradveil.models.layers import make_activation, make_norm, make_normalize, picture_shape

__all__ = ["unet"]


@MODELS.register(
    ModelCard(
        name="unet",
        summary="A small U-Net: one output for every pixel, for data with masks.",
        paper="Ronneberger, Fischer and Brox, U-Net: Convolutional Networks for Biomedical Image Segmentation, 2015",
        url="https://arxiv.org/abs/1505.04597",
        inputs="pictures whose sides can be halved as often as there are levels",
        cost="30 thousand parameters with a width of 8 and two levels; 7 million multiplications per 32×32 picture.",
    )
)
def unet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 8,
    levels: int = 2,
    norm: str = "group",
    activation: str = "relu",
    normalize: str | None = None,
) -> nn.Module:
    """Return a U-Net that maps (B, C, H, W) to (B, classes, H, W).

    Smaller than the paper's: a width of 8 instead of 64, two halvings instead of four, padded convolutions, average pooling, and
    pixels repeated instead of transposed convolutions.

    Args:
        input_shape: (C, H, W).
        classes: Outputs per pixel; 1 for a mask.
        width: Channels at full size; doubled at every level.
        levels: How often the picture is halved.
        norm: group, batch or none, after each convolution.
        activation: See `gradveil.models.layers.ACTIVATIONS`.
        normalize: Input normalisation inside the model, or None.
    """
    channels, height, across = picture_shape("unet", input_shape)
    if width < 1 or levels < 1:
        raise UsageError(f"unet: width is {width} and levels is {levels}; give at least 1 of each")
    if height % 2**levels or across % 2**levels:
        raise UsageError(
            f"unet halves pictures {levels} times, and {height} x {across} pixels cannot be; lower levels, or give sides that "
            f"are multiples of {2**levels}"
        )
    return _UNet(channels, classes, width, levels, norm, activation, make_normalize(normalize, input_shape))


class _UNet(nn.Module):
    """See `unet`."""

    def __init__(
        self, channels: int, classes: int, width: int, levels: int, norm: str, activation: str, normalize: nn.Module
    ) -> None:
        super().__init__()
        self.normalize = normalize
        sizes = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            _two(before, after, norm, activation) for before, after in zip([channels, *sizes[:-1]], sizes, strict=True)
        )
        self.pool = nn.AvgPool2d(2)
        self.repeat = nn.Upsample(scale_factor=2, mode="nearest")
        self.up = nn.ModuleList(_two(sizes[k + 1] + sizes[k], sizes[k], norm, activation) for k in reversed(range(levels)))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one logit per class and pixel."""
        features, across = self.normalize(inputs), []
        for level, block in enumerate(self.down):
            features = block(features if level == 0 else self.pool(features))
            across.append(features)
        for block, shortcut in zip(self.up, reversed(across[:-1]), strict=True):
            features = block(torch.cat([self.repeat(features), shortcut], dim=1))
        logits: Tensor = self.head(features)
        return logits


def _two(before: int, after: int, norm: str, activation: str) -> nn.Sequential:
    """Two 3×3 convolutions, each with its norm and activation."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        make_norm(norm, after),
        make_activation(activation),
        nn.Conv2d(after, after, 3, padding=1),
        make_norm(norm, after),
        make_activation(activation),
    )
