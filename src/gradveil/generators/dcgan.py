"""A DCGAN: the plain generator that the generative attack of the Refiner paper searches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.generators.base import NETWORKS, NetworkCard
from gradveil.generators.initial import initialise

__all__ = ["DCGAN", "dcgan_32"]

LATENT = 128
WIDTH = 96


class DCGAN(nn.Module):
    """Map normal latent codes to pictures by transposed convolutions 4×4 with BatchNorm and ReLU, and a tanh.

    Departs from the paper: pictures lie in [0, 1] (half of tanh plus one half), 32 pixels instead of 64, and the discriminator it
    was trained against is regularised by R1 and has no BatchNorm (`gradveil.generators.discriminator`).

    Args:
        size: Side of the pictures: 8, 16, 32, 64 ...
        channels: 1 for grey, 3 for colour.
        latent: Entries of z.
        width: Kernels at half the final size; doubled at every smaller size, at most fourfold.
        generator: Draws the first weights; None is a fixed seed.
    """

    def __init__(
        self,
        size: int = 32,
        channels: int = 3,
        latent: int = LATENT,
        width: int = WIDTH,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        """Build the layers; the global generator is left alone."""
        super().__init__()
        doublings = size.bit_length() - 3  # from 4 to size
        if size < 8 or size & (size - 1):
            raise UsageError(f"a DCGAN makes pictures whose side is a power of two, 8 or more, not {size}")
        if channels not in (1, 3) or latent < 1 or width < 1:
            raise UsageError(
                f"a DCGAN needs 1 or 3 channels and a latent code and width of at least 1, not {channels}, {latent}, {width}"
            )
        self.size, self.channels, self.latent = size, channels, latent
        widths = [width * min(4, 2**index) for index in reversed(range(doublings))]
        with torch.random.fork_rng(devices=[]):
            layers: list[nn.Module] = [nn.ConvTranspose2d(latent, widths[0], 4, bias=False)]
            for given, out in zip(widths, (*widths[1:], channels), strict=True):
                layers += [nn.BatchNorm2d(given), nn.ReLU()]
                layers += [nn.ConvTranspose2d(given, out, 4, stride=2, padding=1, bias=out == channels)]
            self.layers = nn.Sequential(*layers)
        initialise(self, generator)

    def forward(self, z: Tensor) -> Tensor:
        """Return pictures (B, C, size, size) in [0, 1] for latent codes z (B, latent)."""
        images: Tensor = self.layers(z[:, :, None, None])
        return 0.5 + 0.5 * torch.tanh(images)


@NETWORKS.register(
    NetworkCard(
        name="dcgan-32",
        summary="DCGAN of 32×32 colour pictures (photographs).",
        paper="Radford et al., Unsupervised Representation Learning with Deep Convolutional GANs, ICLR 2016",
        url="https://arxiv.org/abs/1511.06434",
        cost="trained in minutes on a GPU; a picture costs tens of millions of multiplications",
        weakness="A small network trained for minutes on thousands of pictures: textures and outlines, not faithful objects.",
        family="generator",
        size=32,
        channels=3,
    )
)
def dcgan_32(
    size: int = 32, channels: int = 3, latent: int = LATENT, width: int = WIDTH, *, generator: torch.Generator | None = None
) -> DCGAN:
    """Transposed convolutions 4×4 with BatchNorm and ReLU from a latent code of 128 to 32×32."""
    return DCGAN(size, channels, latent, width, generator=generator)
