"""Mean squared error over all entries of an example."""

from __future__ import annotations

from torch import Tensor

from gradveil.metrics.base import METRICS, MetricCard, check_pair

__all__ = ["mean_squared_error"]


@METRICS.register(
    MetricCard(
        name="mse",
        summary="Mean squared difference over all entries of an example.",
        cost="One pass over the data.",
        weakness="Blind to structure: a blurred or grey image can score like a recognisable one with the wrong brightness.",
        higher_is_better=False,
        perfect=0.0,
        unit="squared intensity",
    )
)
def mean_squared_error(reconstructed: Tensor, original: Tensor) -> Tensor:
    r"""Return :math:`\frac1D \sum_d (\hat x_d - x_d)^2` for each example.

    Args:
        reconstructed: (N, ...) in [0, 1].
        original: (N, ...) in [0, 1], same shape.

    Returns:
        (N,), double precision, 0 for a perfect reconstruction.

    Example:
        >>> import torch
        >>> mean_squared_error(torch.full((2, 3), 0.5), torch.tensor([[0.5, 0.5, 0.5], [0.0, 0.0, 1.0]])).tolist()
        [0.0, 0.25]
    """
    reconstructed, original = check_pair(reconstructed, original)
    return (reconstructed - original).square().reshape(len(original), -1).mean(dim=1)  # (N, ...) -> (N, D) -> (N,)
