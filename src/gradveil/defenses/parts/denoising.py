"""A small denoiser for attackers who know how much noise lies on an image.

Sliding-window transform denoising (Yaroslavsky; the one-patch form of BM3D, Dabov et al. 2007, https://doi.org/10.1109/TIP.2007.901238).
Letters: B images, C channels, H × W pixels, P = C·h·w entries of a patch, L patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["denoise_images", "denoise_in_subspace"]

PATCH = 8
THRESHOLD = 2.7
"""In standard deviations; the value of Dabov et al."""
PASSES = 6
SHRINKS = 0.7
"""Passes of `denoise_in_subspace`, and the factor by which the noise is taken to fall in each."""
MOST_CHANNELS = 4
"""Up to this many channels are transformed together, which is where colour images gain most; more are treated one by one."""


def denoise_images(images: Tensor, std: float) -> Tensor:
    """Return images (B, C, H, W) in [0, 1] with white noise of ``std`` taken off; anything else, or std 0, comes back as it is.

    Every patch is transformed by an orthonormal cosine transform over channels, rows and columns, in which white noise stays
    white and an image has few large coefficients. First, coefficients below 2.7 std are zeroed. The result is the pilot of a
    Wiener filter, s² / (s² + std²), on the noisy coefficients. Overlapping patches are averaged, sparser ones with more weight.
    """
    if images.ndim != 4 or std == 0 or images.numel() == 0:
        return images
    if images.shape[1] > MOST_CHANNELS:
        single = images.reshape(-1, 1, *images.shape[2:])  # (B, C, H, W) -> (B*C, 1, H, W)
        return denoise_images(single, std).reshape(images.shape)
    # One image at a time: all patches of one are 64 times its size.
    return torch.cat([_denoise_one(image, std) for image in images.split(1)])


def denoise_in_subspace(images: Tensor, bases: Sequence[Tensor], std: float) -> Tensor:
    """Return images (B, C, H, W) with noise taken off that lies in a known subspace, one per image; other inputs as they are.

    Outside the subspace an image is exact, so a denoised image is kept only inside it, and the result is denoised again: the
    exact part tells the denoiser more each time (projections onto what is known, alternating with a prior). The noise per
    pixel is std √(k / m) at first, for k of m dimensions, and less after every pass.

    Args:
        images: In [0, 1].
        bases: Orthonormal rows (k, m) for every image.
        std: Standard deviation of the noise along each row.
    """
    if images.ndim != 4 or std == 0 or images.numel() == 0:
        return images
    finished = []
    for image, basis in zip(images.split(1), bases, strict=True):
        flat, rows = image.reshape(-1), basis.to(image)
        exact = flat - rows.T @ (rows @ flat)
        level, current = std * math.sqrt(len(rows) / flat.numel()), image
        for _ in range(PASSES if len(rows) else 0):
            smooth = denoise_images(current, level).reshape(-1)
            current = (exact + rows.T @ (rows @ smooth)).reshape(image.shape)
            level *= SHRINKS
        finished.append(current.clamp(0, 1))
    return torch.cat(finished)


def _denoise_one(image: Tensor, std: float) -> Tensor:
    channels, height, width = image.shape[1:]
    window = (min(PATCH, height), min(PATCH, width))
    basis = torch.kron(_cosines(channels), torch.kron(_cosines(window[0]), _cosines(window[1]))).to(image)  # (P, P)
    noisy = basis @ F.unfold(image, window)  # (1, C, H, W) -> (1, P, L)
    kept = (noisy.abs() > THRESHOLD * std).to(image)
    kept[:, 0] = 1.0  # a patch's mean is never in doubt, and a patch always has some weight
    pilot = _average(basis.T @ (noisy * kept), 1 / kept.sum(1), (height, width), window)
    power = (basis @ F.unfold(pilot, window)).square()
    gain = power / (power + std**2)
    gain[:, 0] = 1.0
    result = _average(basis.T @ (noisy * gain), 1 / gain.square().sum(1), (height, width), window)
    return result.clamp(0, 1)


def _average(patches: Tensor, weight: Tensor, size: tuple[int, int], window: tuple[int, int]) -> Tensor:
    """Put patches (1, P, L) back in place, averaging where they overlap."""
    total = F.fold(patches * weight, size, window)
    return total / F.fold(weight.expand_as(patches).contiguous(), size, window)


def _cosines(n: int) -> Tensor:
    """Return the orthonormal DCT-II matrix (n, n), one basis vector per row."""
    k = torch.arange(n, dtype=torch.float64)
    rows = math.sqrt(2 / n) * torch.cos(math.pi * (k + 0.5) * k.unsqueeze(1) / n)
    return torch.cat([rows[:1] / math.sqrt(2), rows[1:]])
