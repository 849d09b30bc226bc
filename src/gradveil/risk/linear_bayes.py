"""The error of a linear-Bayes attacker who knows the derivative of the release at the record: exposure above knowing nothing.

With a public mean μ and covariance Σ = U Λ Uᵀ, J the derivative at the record x, and C what stands between the linear picture and
what is seen,

    K = Σ Jᵀ (J Σ Jᵀ + C)⁻¹        MSE = (|(I - K J)(x - μ)|² + tr(K C Kᵀ)) / m        exposure = 10 log10(|x - μ|² / (m MSE))

C is diagonal, one value for each layer of the release: noise of known strength, rounding, what the directions of Σ leave out of
records, and, where asked for, the curvature of the release, E |f(x + Σ^½ ξ) - f(x) - J Σ^½ ξ|² by value. All of it lives in r × r
matrices (Woodbury), so nothing here grows with the number of shared values. Variance outside the rank is error that stays.

It is an oracle: no attacker has J at the record before knowing the record. And it is no bound: pictures are not Gaussian, and a
better prior gets more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.risk.prior import Prior
from gradveil.tensors import Named

__all__ = ["Linearised", "decibels", "posterior_error"]


@dataclass(frozen=True, eq=False)
class Linearised:
    """A release at one record, along the directions of a prior.

    Attributes:
        grams: For each layer l (r + 1, r + 1): Dᵀ J_lᵀ J_l D with D the directions U and, last, x - μ.
        along: Uᵀ(x - μ), (r,).
        energy: |x - μ|².
        inputs: m.
    """

    grams: Named
    along: Tensor
    energy: float
    inputs: int


def posterior_error(release: Linearised, prior: Prior, noise: Mapping[str, float], *, data_noise: float = 0.0) -> float:
    """Return the MSE per value of the linear-Bayes attacker at one record.

    Args:
        release: The record's.
        prior: Of public records.
        noise: C: variance of every value of each layer.
        data_noise: Standard deviation of white noise on the record itself, before it goes into the release.
    """
    whole = _weighed(release.grams, noise)
    rank, spread = prior.rank, prior.variances.double()
    gram, seen = whole[:rank, :rank], whole[:rank, rank]
    # What is estimated first is the record with its noise; a Wiener step then takes the noise off.
    width = (spread + data_noise**2).sqrt()
    shrink = spread / width
    values, vectors = torch.linalg.eigh(width[:, None] * gram * width[None])
    values = values.clamp(min=0)
    inverse = (vectors / (1 + values)) @ vectors.T
    found = shrink * (inverse @ (width * seen))
    bias = float((release.along - found).square().sum()) + max(0.0, release.energy - float(release.along.square().sum()))
    carried = shrink[:, None] * vectors * (values.sqrt() / (1 + values))
    blurred = shrink[:, None] * (inverse @ (width[:, None] * gram)) * data_noise
    return (bias + float(carried.square().sum()) + float(blurred.square().sum())) / release.inputs


def _weighed(grams: Named, noise: Mapping[str, float]) -> Tensor:
    total: Tensor | None = None
    for layer, gram in grams.items():
        part = gram.double().cpu() / max(noise[layer], 1e-300)
        total = part if total is None else total + part
    assert total is not None
    return total


def decibels(null: float, error: float) -> float:
    """Return by how much an error lies below that of knowing nothing.

    >>> decibels(0.1, 0.01)
    10.0
    """
    return 10 * math.log10(null / max(error, 1e-300))
