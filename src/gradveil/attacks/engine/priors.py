"""What an attacker believes about inputs before seeing the update.

All are safe under vmap and work for any number of spatial axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["energy", "total_variation"]


def total_variation(inputs: Tensor) -> Tensor:
    """Return the sum over spatial axes of the mean absolute difference between neighbours, for inputs (B, C, ...)."""
    terms = [inputs.diff(dim=axis).abs().mean() for axis in range(2, inputs.ndim) if inputs.shape[axis] > 1]
    return torch.stack(terms).sum() if terms else inputs.sum() * 0


def energy(inputs: Tensor) -> Tensor:
    """Return the mean squared distance to mid-grey."""
    return (inputs - 0.5).square().mean()
