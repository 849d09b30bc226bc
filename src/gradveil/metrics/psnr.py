"""Peak signal-to-noise ratio on a data range of 1, capped."""

from __future__ import annotations

from torch import Tensor

from gradveil.metrics.base import METRICS, MetricCard
from gradveil.metrics.mse import mean_squared_error

__all__ = ["PSNR_CAP", "peak_signal_to_noise"]

# 60 dB is a root-mean-square error of 0.001, a quarter of one 8-bit step: beyond it there is nothing left to hide, and without a
# cap one exact reconstruction would make every mean and every plot infinite.
PSNR_CAP = 60.0


@METRICS.register(
    MetricCard(
        name="psnr",
        summary="Mean squared error on a logarithmic scale, for data in [0, 1], capped at 60 dB.",
        cost="One pass over the data.",
        weakness="A constant grey image scores 10 to 14 dB on natural images, so values near that are no evidence of a leak.",
        higher_is_better=True,
        perfect=PSNR_CAP,
        unit="dB",
    )
)
def peak_signal_to_noise(reconstructed: Tensor, original: Tensor) -> Tensor:
    r"""Return :math:`\min(60, 10 \log_{10} (1 / \mathrm{MSE}))` for each example.

    The peak is 1, the length of the range that all inputs of this package live in. Published figures differ where the authors
    measured on normalised images without putting the range back, or averaged the MSE over a batch before the logarithm.

    Args:
        reconstructed: (N, ...) in [0, 1].
        original: (N, ...) in [0, 1], same shape.

    Returns:
        (N,) in dB, double precision, at most 60.

    Example:
        >>> import torch
        >>> [round(value, 3) for value in peak_signal_to_noise(torch.zeros(2, 4), torch.tensor([[0.0] * 4, [0.1] * 4])).tolist()]
        [60.0, 20.0]
    """
    floor = 10.0 ** (-PSNR_CAP / 10.0)
    return (-10.0 * mean_squared_error(reconstructed, original).clamp_min(floor).log10()).clamp_max(PSNR_CAP)
