"""How often a record is named first on a list of candidates, where what is sent is exact or carries Gaussian noise.

An attacker with candidates compares what each would have sent. Under Gaussian noise of covariance C the likelihoods of the truth
i and another candidate j differ by N(d² / 2, d²) with d_ij² = Δfᵀ C⁻¹ Δf, exactly. So the truth is ahead of j as often as
N(d / √2, 1) is ahead of N(0, 1), and of many as often as the integral below says, which takes candidates to be independent of one
another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import special

__all__ = ["SIZE", "named_first"]

SIZE = 256
"""Candidates on the list that is told."""
REACH, STEP = 9.0, 0.02


def named_first(distances: Sequence[float], size: int = SIZE) -> float:
    """Return how often the truth is first of ``size`` candidates, the others at such distances d as those given.

    Args:
        distances: d_ij to a sample of other candidates; infinite where nothing is hidden.
        size: Candidates, the truth among them.

    >>> round(named_first([0.0, 0.0], 2), 4), named_first([float("inf")])
    (0.5, 1.0)
    """
    z: npt.NDArray[np.float64] = np.arange(-REACH, REACH, STEP)
    ahead = np.minimum(np.asarray(distances, dtype=np.float64) / np.sqrt(2), 1e6)
    behind = np.log(special.ndtr(z[:, None] + ahead[None]).mean(1))  # of a candidate drawn like those given
    density = np.exp(-0.5 * z**2 + (size - 1) * behind) / np.sqrt(2 * np.pi)
    return min(1.0, float(density.sum() * STEP))
