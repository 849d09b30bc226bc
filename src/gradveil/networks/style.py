"""A style-based generator with a mapping and a synthesis part, small enough to ship.

The shadow defense imagines an attacker with such a generator and fine-tunes the synthesis part; GIAS and GIFD search its spaces.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.networks.base import NETWORKS, NetworkCard
from gradveil.randomness import Seed

__all__ = ["EqualConv", "EqualLinear", "Mapping", "StyleGenerator", "Synthesis"]

PAPER = "Karras et al., Analyzing and Improving the Image Quality of StyleGAN, CVPR 2020"
URL = "https://arxiv.org/abs/1912.04958"
WIDTHS = {4: 256, 8: 256, 16: 128, 32: 64, 64: 32}
SMALLEST = 4
LATENT = 128


class EqualLinear(nn.Module):
    """A linear layer whose weights are kept at unit scale and scaled when used, so that one learning rate suits every layer."""

    def __init__(self, given: int, out: int, *, bias: float = 0.0, rate: float = 1.0, generator: torch.Generator) -> None:
        """Draw unit weights; ``rate`` slows the layer down, as the mapping needs."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn((out, given), generator=generator) / rate)
        self.bias = nn.Parameter(torch.full((out,), bias / rate))
        self.scale, self.rate = rate / math.sqrt(given), rate

    def forward(self, inputs: Tensor, gain: float = 1.0) -> Tensor:
        """Return gain (W x + b) with both at their working scale; a gain before a leaky ReLU is one after it."""
        return F.linear(inputs, self.weight * (gain * self.scale), self.bias * (gain * self.rate))


class EqualConv(nn.Module):
    """A convolution that keeps the size, with equalised learning rate as in `EqualLinear`."""

    def __init__(self, given: int, out: int, kernel: int, *, generator: torch.Generator) -> None:
        """Draw unit weights."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn((out, given, kernel, kernel), generator=generator))
        self.bias = nn.Parameter(torch.zeros(out))
        self.scale = 1 / math.sqrt(given * kernel * kernel)

    def forward(self, inputs: Tensor, gain: float = 1.0) -> Tensor:
        """Return the convolution with the weights at their working scale, times a gain."""
        return F.conv2d(inputs, self.weight * (gain * self.scale), self.bias * gain, padding=self.weight.shape[-1] // 2)


class StyledConv(nn.Module):
    """A convolution whose input channels are scaled by a style, and whose output is brought back to unit variance.

    Scaling the weights per example and scaling the maps before and after a shared convolution are the same numbers; the second
    needs no grouped convolution and works under ``vmap``.
    """

    def __init__(self, given: int, out: int, kernel: int, latent: int, *, rgb: bool, generator: torch.Generator) -> None:
        """Draw unit weights; colour layers are not demodulated and have no activation."""
        super().__init__()
        self.style = EqualLinear(latent, given, bias=1.0, generator=generator)
        self.weight = nn.Parameter(torch.randn((out, given, kernel, kernel), generator=generator))
        self.bias = nn.Parameter(torch.zeros(out))
        self.scale, self.rgb = 1 / math.sqrt(given * kernel * kernel), rgb

    def forward(self, inputs: Tensor, w: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the maps (B, out, H, W) for inputs (B, given, H, W) and styles w (B, latent)."""
        style = self.style(w)  # (B, given)
        weight = self.weight * self.scale
        maps = F.conv2d(inputs * style[:, :, None, None], weight, padding=weight.shape[-1] // 2)
        if self.rgb:
            return maps + self.bias[None, :, None, None]
        power = style.square() @ weight.square().sum((2, 3)).T  # (B, out)
        maps = maps * torch.rsqrt(power + 1e-8)[:, :, None, None]
        if noise is not None:
            maps = maps + noise
        return F.leaky_relu(maps + self.bias[None, :, None, None], 0.2) * math.sqrt(2)


class Mapping(nn.Module):
    """From a normal latent code z to the style w: layers of equal width, slowed down a hundredfold."""

    def __init__(self, latent: int, depth: int, *, generator: torch.Generator) -> None:
        """Build ``depth`` layers."""
        super().__init__()
        self.layers = nn.ModuleList(EqualLinear(latent, latent, rate=0.01, generator=generator) for _ in range(depth))

    def forward(self, z: Tensor) -> Tensor:
        """Return w (B, latent) for z (B, latent); z is first brought to unit length per entry."""
        hidden = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-8)
        for layer in self.layers:
            hidden = F.leaky_relu(layer(hidden, math.sqrt(2)), 0.2)
        return hidden


class Block(nn.Module):
    """Two styled convolutions at one size (one at the smallest), and the colours they add."""

    def __init__(self, given: int, out: int, channels: int, latent: int, *, first: bool, generator: torch.Generator) -> None:
        """Build the layers."""
        super().__init__()
        self.up = None if first else StyledConv(given, out, 3, latent, rgb=False, generator=generator)
        self.keep = StyledConv(given if first else out, out, 3, latent, rgb=False, generator=generator)
        self.colour = StyledConv(out, channels, 1, latent, rgb=True, generator=generator)


class Synthesis(nn.Module):
    """From styles to pictures: a learned 4×4 start, doubled until the size is reached; the colours of all sizes are summed."""

    def __init__(
        self, size: int, channels: int, latent: int, widths: dict[int, int], *, noise: bool, generator: torch.Generator
    ) -> None:
        """Build one block per size from 4 to ``size``."""
        super().__init__()
        sides = [side for side in (4, 8, 16, 32, 64, 128, 256) if side <= size]
        self.latent, self.depth = latent, 2 * len(sides)
        self.start = nn.Parameter(torch.randn((1, widths[SMALLEST], SMALLEST, SMALLEST), generator=generator))
        before = (widths[SMALLEST], *(widths[side] for side in sides))
        self.blocks = nn.ModuleList(
            Block(given, widths[side], channels, latent, first=side == SMALLEST, generator=generator)
            for given, side in zip(before, sides, strict=False)
        )
        self.strengths = nn.Parameter(torch.zeros(2 * len(sides))) if noise else None
        if noise:
            for index, side in enumerate(sides):
                self.register_buffer(f"noise{index}", torch.randn((2, side, side), generator=generator))

    def forward(self, w: Tensor) -> Tensor:
        """Return pictures (B, C, size, size) in [0, 1] for w (B, latent), or one w per layer (B, depth, latent)."""
        styles = w if w.ndim == 3 else w[:, None].expand(-1, self.depth, -1)
        hidden = self.start.expand(len(w), -1, -1, -1)
        colours: Tensor | None = None
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if block.up is not None:
                hidden = block.up(_double(hidden), styles[:, 2 * index - 1], self._noise(index, 0))
            hidden = block.keep(hidden, styles[:, 2 * index], self._noise(index, 1))
            added = block.colour(hidden, styles[:, 2 * index + 1])
            colours = added if colours is None else _double(colours) + added
        assert colours is not None
        # A smooth end instead of a clamp: an attacker's gradient never vanishes outright.
        return 0.5 + 0.5 * torch.tanh(colours)

    def _noise(self, index: int, part: int) -> Tensor | None:
        if self.strengths is None:
            return None
        maps: Tensor = getattr(self, f"noise{index}")
        return self.strengths[2 * index + part] * maps[part]


def _double(images: Tensor) -> Tensor:
    return F.interpolate(images, scale_factor=2, mode="bilinear", align_corners=False)


class StyleGenerator(nn.Module):
    """Map normal latent codes to pictures: ``forward(z) = synthesis(mapping(z))``.

    Departs from the paper: fewer kernels and a latent code of 128, bilinear doubling instead of a filtered transposed
    convolution, a tanh at the end, and no random noise between the layers. The same z always gives the same picture, which the
    shadow defense and gradient matching need; ``noise=True`` adds fixed noise maps with learned strengths.

    Args:
        size: Side of the pictures: 8, 16, 32, 64, 128 or 256.
        channels: 1 for grey, 3 for colour.
        latent: Entries of z and of w.
        depth: Layers of the mapping.
        widths: Kernels at each size, by side.
        noise: Add fixed noise maps, the same at every call.
        generator: Draws the first weights; None is a fixed seed.
    """

    def __init__(
        self,
        size: int = 32,
        channels: int = 3,
        latent: int = LATENT,
        depth: int = 4,
        widths: dict[int, int] | None = None,
        noise: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        """Build both parts; the global generator is left alone."""
        super().__init__()
        if size not in (8, 16, 32, 64, 128, 256):
            raise UsageError(f"the style generator makes pictures of 8, 16, 32, 64, 128 or 256 pixels, not {size}")
        if channels not in (1, 3) or latent < 1 or depth < 1:
            raise UsageError(
                f"the style generator needs 1 or 3 channels and a latent code and depth of at least 1, not {channels}, {latent} "
                f"and {depth}"
            )
        drawn = generator if generator is not None else Seed(0).generator("first weights")
        # JSON has words for keys; sizes past the table keep its last width.
        known = {int(side): int(width) for side, width in (widths or WIDTHS).items()}
        known = {side: known.get(side, min(known.values())) for side in (4, 8, 16, 32, 64, 128, 256)}
        self.size, self.channels, self.latent = size, channels, latent
        self.mapping = Mapping(latent, depth, generator=drawn)
        self.synthesis = Synthesis(size, channels, latent, known, noise=noise, generator=drawn)

    def forward(self, z: Tensor) -> Tensor:
        """Return pictures (B, C, size, size) in [0, 1] for latent codes z (B, latent)."""
        images: Tensor = self.synthesis(self.mapping(z))
        return images


def _card(name: str, size: int, channels: int) -> NetworkCard:
    colour = "grey" if channels == 1 else "colour"
    subject = "chest X-rays" if channels == 1 else "photographs"
    return NetworkCard(
        name=name,
        summary=f"Style-based generator of {size}×{size} {colour} pictures ({subject}), with mapping and synthesis parts.",
        paper=PAPER,
        url=URL,
        cost="trained in minutes on a GPU; a picture costs well under a billion multiplications",
        weakness="A small network trained for minutes on thousands of pictures: textures and outlines, not faithful objects.",
        family="generator",
        size=size,
        channels=channels,
        flip=channels == 3,
    )


@NETWORKS.register(_card("style-32", 32, 3))
def style_32(size: int = 32, channels: int = 3, **settings: object) -> StyleGenerator:
    """StyleGAN-like: 4 mapping layers of 128, weight demodulation, summed colours; deterministic."""
    return StyleGenerator(size, channels, **settings)  # type: ignore[arg-type]


@NETWORKS.register(_card("style-32-grey", 32, 1))
def style_32_grey(size: int = 32, channels: int = 1, **settings: object) -> StyleGenerator:
    """StyleGAN-like: 4 mapping layers of 128, weight demodulation, summed colours; deterministic."""
    return StyleGenerator(size, channels, **settings)  # type: ignore[arg-type]


@NETWORKS.register(_card("style-64", 64, 3))
def style_64(size: int = 64, channels: int = 3, **settings: object) -> StyleGenerator:
    """StyleGAN-like: 4 mapping layers of 128, weight demodulation, summed colours; deterministic."""
    return StyleGenerator(size, channels, **settings)  # type: ignore[arg-type]


@NETWORKS.register(_card("style-64-grey", 64, 1))
def style_64_grey(size: int = 64, channels: int = 1, **settings: object) -> StyleGenerator:
    """StyleGAN-like: 4 mapping layers of 128, weight demodulation, summed colours; deterministic."""
    return StyleGenerator(size, channels, **settings)  # type: ignore[arg-type]
