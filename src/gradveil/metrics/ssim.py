"""Structural similarity with a Gaussian window, for images, volumes and one-dimensional signals."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradveil.metrics.base import METRICS, MetricCard, Unavailable, check_pair

__all__ = ["structural_similarity"]

WINDOW = 11
SIGMA = 1.5
C1 = 0.01**2  # (K1 L)^2 with the data range L = 1
C2 = 0.03**2  # (K2 L)^2


@METRICS.register(
    MetricCard(
        name="ssim",
        summary="Agreement of local mean, contrast and structure in a Gaussian 11 x 11 window, averaged over the image.",
        paper="Wang et al., Image quality assessment: from error visibility to structural similarity, 2004",
        url="https://doi.org/10.1109/TIP.2003.819861",
        cost="Five small blurs per channel.",
        weakness="Flat regions score high whatever the content, and papers differ in the window: many use a 7 x 7 box.",
        higher_is_better=True,
        perfect=1.0,
    )
)
def structural_similarity(reconstructed: Tensor, original: Tensor) -> Tensor:
    r"""Return the mean structural similarity of each example.

    .. math:: \frac{(2\mu_x\mu_y + C_1)(2\sigma_{xy} + C_2)}{(\mu_x^2 + \mu_y^2 + C_1)(\sigma_x^2 + \sigma_y^2 + C_2)}

    with local moments under a Gaussian window of 11 taps, :math:`\sigma = 1.5`, wherever it lies inside the image. The same as
    ``skimage.metrics.structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1)``.
    An axis shorter than 11 takes the largest odd window that fits, with the same sigma, renormalised: 8 x 8 digits have a window
    of 7 x 7, and along an axis of length 1 or 2 nothing is averaged. Such values do not compare with those of larger images.

    Args:
        reconstructed: (N, C, T), (N, C, H, W) or (N, C, D, H, W) in [0, 1]. Channels are scored apart and averaged.
        original: Same shape.

    Returns:
        (N,) in [-1, 1], double precision, 1 for a perfect reconstruction.

    Raises:
        Unavailable: For (N, D), whose entries have no neighbours.
    """
    # Variances are differences of nearly equal numbers; in single precision their error is of the order of C2.
    x, y = check_pair(reconstructed, original)
    if x.ndim < 3:
        raise Unavailable(f"SSIM compares neighbourhoods, and inputs of shape (N, {', '.join(map(str, x.shape[1:]))}) have none")
    mean_x, mean_y = _blur(x), _blur(y)
    variances = _blur(x * x) - mean_x * mean_x + _blur(y * y) - mean_y * mean_y
    covariance = _blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x.square() + mean_y.square() + C1)
    structure = (2 * covariance + C2) / (variances + C2)
    return (luminance * structure).flatten(1).mean(dim=1)  # (N, C, ...) -> (N,)


def _blur(images: Tensor) -> Tensor:
    """Blur every axis after (N, C), keeping only positions where the window fits."""
    for axis in range(2, images.ndim):
        window = _window(images.shape[axis])
        inside = images.shape[axis] - len(window) + 1
        # A sum of shifted views: several times faster than conv1d in double precision, and the same bits for any batch size.
        blurred = window[0] * images.narrow(axis, 0, inside)
        for shift in range(1, len(window)):
            blurred = torch.add(blurred, images.narrow(axis, shift, inside), alpha=window[shift])
        images = blurred
    return images


def _window(length: int) -> list[float]:
    """Return the window for an axis: odd, at most 11 taps, summing to one."""
    radius = (min(WINDOW, length) - 1) // 2
    weights = [math.exp(-0.5 * (offset / SIGMA) ** 2) for offset in range(-radius, radius + 1)]
    return [weight / sum(weights) for weight in weights]
