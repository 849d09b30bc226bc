"""Which reconstruction belongs to which record of a batch."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.metrics.base import check_pair

__all__ = ["assign"]


def assign(reconstructed: Tensor, originals: Tensor) -> Tensor:
    """Return the order of the reconstructions that brings the smallest total mean squared error.

    The gradient of a batch does not depend on the order of its records, so an attack returns them in any order. Assignment is one
    to one: the best guess cannot be counted for several records, as taking each record's nearest reconstruction would.

    Args:
        reconstructed: (B, ...) in [0, 1].
        originals: (B, ...) in [0, 1].

    Returns:
        (B,) indices such that ``reconstructed[assign(reconstructed, originals)]`` is in the order of ``originals``.

    Example:
        >>> originals = torch.tensor([[0.0], [0.5], [1.0]])
        >>> assign(torch.tensor([[0.9], [0.1], [0.4]]), originals).tolist()
        [1, 2, 0]
    """
    rebuilt, truth = check_pair(reconstructed, originals)
    rebuilt, truth = rebuilt.reshape(len(rebuilt), -1), truth.reshape(len(truth), -1)  # (B, D)
    # Row by row and by differences: a batch is small, and expanding the square would lose the distances of near-perfect guesses.
    cost = torch.stack([(rebuilt - row).square().mean(dim=1) for row in truth])  # (record, reconstruction)
    _, columns = linear_sum_assignment(cost.detach().cpu().numpy())
    return torch.as_tensor(columns, dtype=torch.int64, device=reconstructed.device)
