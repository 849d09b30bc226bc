"""The strength of noise as the papers of the InvRE family write it."""

from __future__ import annotations

import math

__all__ = ["noise_std"]


def noise_std(delta: float, variance: bool) -> float:
    """Return the standard deviation that δ stands for: the InvRE paper calls it a variance here and a strength there.

    >>> noise_std(0.25, variance=True), noise_std(0.25, variance=False)
    (0.5, 0.25)
    """
    return math.sqrt(delta) if variance else delta
