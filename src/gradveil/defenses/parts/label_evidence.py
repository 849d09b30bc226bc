"""What a defense's attacker can say about the label of one example, from the last bias alone.

Without a defense that bias is p - e_c: the predicted probabilities, less one at the label c.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradveil.records import LabelEvidence

__all__ = ["among_the_zeros", "label_under_noise"]


def label_under_noise(std: float | None = None) -> LabelEvidence:
    """Return the reader ``E_c = min_{s >= 0} |b - s (p - e_c)|² / 2 std²``, up to a constant: lower is likelier.

    With Gaussian noise of known size that is the negative log-likelihood of the label. The factor s, of clipping or of local
    steps, is fitted.

    Args:
        std: Of the noise on the bias; None leaves the scale of the evidence open.
    """

    def read(bias: Tensor, prediction: Callable[[], Tensor]) -> Tensor:
        seen, expected = bias.double(), prediction().double()
        along, squares = seen @ expected - seen, expected.square().sum() - 2 * expected + 1
        # The least square over s: what is left of b once its part along p - e_c is taken off.
        explained = along.clamp_min(0).square() / squares.clamp_min(torch.finfo(squares.dtype).tiny)
        return (-explained / (2 * (std or 1.0) ** 2)).to(bias)

    return read


def among_the_zeros(bias: Tensor, prediction: Callable[[], Tensor]) -> Tensor | None:
    """Tell zeros from entries that arrived: where the largest are withheld, the label's is.

    Which of the zeros it is the bias does not say; equal evidence leaves that to the rest of the layer.
    """
    arrived = bias != 0
    return None if bool(arrived.all()) else arrived.to(bias)
