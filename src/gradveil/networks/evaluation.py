"""Refiner's evaluation network: how much of a picture is noise.

The network sees x_r = (1 − r) x + r v with v ~ U(0, 1) and answers r. Refiner steers its robust data by the gradient of the
answer, and the same answer is a metric of reconstructions: above 0.6 people no longer recognise the picture (so the paper).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.networks.base import NETWORKS, NetworkCard
from gradveil.networks.initial import initialise

__all__ = ["EvaluationNetwork", "evaluation_32", "mix", "tiles", "windows"]

WIDTHS = (128, 256, 512)


class EvaluationNetwork(nn.Module):
    """Predict the noise fraction of pictures: three convolutions 3×3 of stride 2, ReLU, one linear layer, sigmoid.

    Paper: Fan et al., Refiner, Section 3.3.2 and Appendix D. Departs from the paper: pictures of another size are not resized but
    cut into tiles of 32×32, mirrored where they are smaller, and the answers are averaged. Resizing would average the noise away:
    seven times less noise would be seen in a picture of 224×224.

    Args:
        size: Side of the tiles.
        channels: Colours the first layer takes; grey pictures are repeated.
        widths: Kernels of the three convolutions.
        generator: Draws the first weights; None is a fixed seed.
    """

    def __init__(
        self,
        size: int = 32,
        channels: int = 3,
        widths: tuple[int, ...] = WIDTHS,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        """Build the layers; the global generator is left alone."""
        super().__init__()
        if size < 2 ** len(widths) or size % 2 ** len(widths):
            raise UsageError(f"the evaluation network halves {size} pixels {len(widths)} times; give a multiple of 8")
        self.size, self.channels = size, channels
        with torch.random.fork_rng(devices=[]):
            ends = zip((channels, *widths[:-1]), widths, strict=True)
            self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in ends)
            self.head = nn.Linear(widths[-1] * (size // 2 ** len(widths)) ** 2, 1)
        initialise(self, generator)

    def features(self, images: Tensor) -> Tensor:
        """Return the last rectified maps (B, 512, 4, 4) of pictures that have the network's own size and colours."""
        hidden = 2 * images - 1  # centred, so that a grey picture starts near zero
        for convolution in self.convolutions:
            hidden = torch.relu(convolution(hidden))
        return hidden

    def logits(self, images: Tensor) -> Tensor:
        """Return the answer (B,) before the sigmoid, of pictures that have the network's own size and colours."""
        answer: Tensor = self.head(self.features(images).flatten(1))
        return answer.squeeze(1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the noise fraction (B,) in [0, 1] of pictures (B, C, H, W) in [0, 1], of any size, grey or colour."""
        if images.ndim != 4 or images.shape[1] not in (1, self.channels):
            raise UsageError(
                f"the evaluation network takes pictures (B, 1 or {self.channels}, H, W), not shape {tuple(images.shape)}"
            )
        cut = tiles(images.expand(-1, self.channels, -1, -1), self.size)  # (B, tiles, C, size, size)
        batch, count = cut.shape[:2]
        return torch.sigmoid(self.logits(cut.flatten(0, 1))).reshape(batch, count).mean(1)


def tiles(images: Tensor, size: int) -> Tensor:
    """Cut pictures (B, C, H, W) into squares (B, tiles, C, size, size) that cover them; small pictures are mirrored outwards."""
    if images.shape[2] == images.shape[3] == size:
        return images[:, None]
    rows, columns = windows(images.shape[2], size, images.device), windows(images.shape[3], size, images.device)
    cut = images[:, :, rows]  # (B, C, down, size, W)
    cut = cut[..., columns]  # (B, C, down, size, across, size)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def windows(length: int, size: int, device: torch.device) -> Tensor:
    """Return row numbers (windows, size): evenly spread windows that cover an axis, or one to and fro over a short axis."""
    inside = torch.arange(size, device=device)
    if length < size:
        period = max(1, 2 * length - 2)
        place = inside % period
        return torch.minimum(place, period - place).clamp_max(length - 1)[None]
    count = -(-length // size)
    starts = [round(index * (length - size) / max(1, count - 1)) for index in range(count)]
    return torch.tensor(starts, device=device)[:, None] + inside


def mix(images: Tensor, noise: Tensor, ratios: Tensor) -> Tensor:
    """Return (1 − r) x + r v, with one ratio (B,) per picture."""
    r = ratios.reshape(-1, *[1] * (images.ndim - 1)).to(images.dtype)
    return (1 - r) * images + r * noise


@NETWORKS.register(
    NetworkCard(
        name="evaluation-32",
        summary="Refiner's evaluation network: the fraction of noise in a picture, from 0 to 1.",
        paper="Fan et al., Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning, USENIX Security 2025",
        url="https://arxiv.org/abs/2212.02042",
        cost="about 39 million multiplications per 32×32 tile",
        weakness="A picture that is not noisy but wrong counts as noise-free: it sees noise, not meaning.",
        family="evaluation",
        size=32,
        channels=3,
    )
)
def evaluation_32(
    size: int = 32, channels: int = 3, widths: tuple[int, ...] = WIDTHS, *, generator: torch.Generator | None = None
) -> EvaluationNetwork:
    """Conv 3×3 stride 2 with 128, 256 and 512 kernels, ReLU; linear; sigmoid. Any size by tiles, grey by repetition."""
    return EvaluationNetwork(size, channels, tuple(widths), generator=generator)
