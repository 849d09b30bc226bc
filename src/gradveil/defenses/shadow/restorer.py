"""A filter that takes the shadow's noise off pictures, learned in closed form from pairs an attacker makes himself.

The noise of the shadow defense lies on few pixels, with one sign, at a known height. What a pixel carries of it shows in its
neighbours, but not linearly: a filter must notice that a pixel sticks out by about that height, and leave edges alone. So the
3 x 3 patch around each pixel goes through many fixed random ReLU units, and their linear combination that predicts the noise is
found by ridge regression (random features, Rahimi and Recht 2007; Huang et al. 2006, https://doi.org/10.1016/j.neucom.2005.12.126).
No descent, no seed to choose, a second of work.

Letters: B images, C channels, H × W pixels, K = 9 pixels of a patch, F numbers that describe one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LEAST", "Restorer", "fit_restorer"]

SIDE = 3
CENTRE = SIDE * SIDE // 2
LEAST = 2
"""Smallest image whose border can be mirrored for a patch of three."""
UNITS = 512
RIDGE = 1e-3
"""Relative to the mean square of the features; a tenth and ten times of it change little."""
ROUGHNESS = 0.035
"""Standard deviation of white noise on the pictures learned from: those an attack finds are not exact either."""
TOO_MUCH = 1.5
"""A filter that takes off so many times what it took off the pictures it learned from mistakes the picture for noise."""
DIM = 0.2
"""Weight of a patch's brightness beside its differences, which say more."""


@dataclass(frozen=True, eq=False)
class Restorer:
    """Predicts the noise of each pixel, relative to its largest possible height, and takes it off.

    Attributes:
        units: (F, UNITS) random weights.
        offsets: (UNITS,) their biases.
        coefficients: (F + UNITS, 1) what ridge regression found.
        usual: How much it takes off the pictures it learned from: root mean square over the largest possible noise.
    """

    units: Tensor
    offsets: Tensor
    coefficients: Tensor
    usual: float = 0.0

    def clean(self, noisy: Tensor, height: float) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) without noise that is at most ``height`` times the largest value of an image.

        And for each of them (B,) whether to believe it: how much noise there is, is known, and a filter that finds far more has
        met pictures unlike those it learned from.
        """
        cleaned, taken = [noisy[:0]], [0.0] * len(noisy)
        for place, image in enumerate(noisy.split(1)):
            top = _top(image, height)
            found = _described(image / top, self.units, self.offsets) @ self.coefficients.to(image)  # (HW, 1)
            cleaned.append((image - top * found.reshape(1, 1, *image.shape[2:])).clamp(0, 1))
            taken[place] = float(((image - cleaned[-1]) / top).square().mean().sqrt())
        return torch.cat(cleaned), torch.tensor([each <= TOO_MUCH * self.usual for each in taken], device=noisy.device)


def fit_restorer(clean: Tensor, noisy: Tensor, height: float, generator: torch.Generator) -> Restorer:
    """Return the filter that best predicts ``noisy - clean`` from ``noisy``, all (B, C, H, W).

    Args:
        clean: Pictures of one's own.
        noisy: The same as the defense would change them.
        height: Largest noise over the largest value of an image.
        generator: Draws the random units, on the processor.
    """
    numbers = _numbers(noisy.shape[1])
    units = 2 * torch.randn((numbers, UNITS), generator=generator) / numbers**0.5
    offsets = 0.5 * torch.randn(UNITS, generator=generator)
    rough = ROUGHNESS * torch.randn(noisy.shape, generator=generator)
    units, offsets, rough = (each.to(noisy) for each in (units, offsets, rough))
    gram = torch.zeros((numbers + UNITS, numbers + UNITS), dtype=torch.float64, device=noisy.device)
    product = torch.zeros((numbers + UNITS, 1), dtype=torch.float64, device=noisy.device)
    # One image at a time: the features of all pixels of one are five hundred times its size.
    for x, y in zip(clean.split(1), (noisy + rough).split(1), strict=True):
        top = _top(y, height)
        seen = _described(y / top, units, offsets)
        wanted = ((y - x) / top).mean(1).reshape(-1, 1)  # (1, C, H, W) -> (HW, 1): the channels share the noise
        gram += (seen.T @ seen).double()
        product += (seen.T @ wanted).double()
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    found = Restorer(units, offsets, torch.linalg.solve(gram, product))
    tops = torch.stack([_top(y, height) for y in noisy]).reshape(-1, 1, 1, 1)
    taken = ((noisy - found.clean(noisy, height)[0]) / tops).square().mean((1, 2, 3)).sqrt()
    return dataclasses.replace(found, usual=float(taken.mean()))


def _top(image: Tensor, height: float) -> Tensor:
    """Largest noise of an image; the noisy image's largest value stands for the original's, in learning and in use alike."""
    return (height * image.amax()).clamp_min(1e-12)


def _numbers(channels: int) -> int:
    return channels * SIDE * SIDE + SIDE * SIDE + 2


def _described(image: Tensor, units: Tensor, offsets: Tensor) -> Tensor:
    """Return features (HW, F + UNITS): differences to the middle, plain and sorted, brightness, one, and random units of them."""
    edge = SIDE // 2
    channels, pixels = image.shape[1], image.shape[2] * image.shape[3]
    cut = F.unfold(F.pad(image, (edge, edge, edge, edge), mode="reflect"), SIDE)  # (1, C, H, W) -> (1, C K, HW)
    patch = cut[0].T.reshape(pixels, channels, SIDE * SIDE)
    differences = patch - patch[:, :, CENTRE : CENTRE + 1]
    ordered = differences.mean(1).sort(1).values  # rank statistics: what a median filter looks at
    brightness = DIM * patch.mean((1, 2)).unsqueeze(1)
    plain = torch.cat([differences.flatten(1), brightness, ordered, torch.ones_like(brightness)], 1)
    return torch.cat([plain, torch.relu(plain @ units.to(plain) + offsets.to(plain))], 1)
