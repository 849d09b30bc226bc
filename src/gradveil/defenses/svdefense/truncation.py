"""Truncated singular value decomposition of a weight matrix with channel weights: the mathematics of SVDefense.

    A = (I / max I) W = U S V^T,   s_i = S_i^2 / sum S^2,   e = - sum s_i log s_i,   k = least k with s_1 + ... + s_k > T

The decomposition comes from the eigenvectors of the smaller Gram matrix in double precision, A A^T or A^T A, which costs one
product and one small eigenproblem. Squaring loses half of the digits, so singular values below about 1e-8 of the largest one
are noise; none of them is kept unless the threshold is that near to one, and then they weigh nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ChannelWeights", "Truncation", "channel_weights", "rank_above", "spectral_entropy", "truncate", "what_is_read"]

ChannelWeights = Literal["squared", "absolute", "none"]

DEAD = 1e-10
"""Channels with less than this share of the largest weight count as dead.

What such a channel would have sent is 1e-10 of the update, far below what single precision resolves of the others, and U S holds
its square, which must stay clear of the smallest numbers.
"""
_ROUNDING = 1e-15
"""Eigenvalues of the Gram matrix below this share of the largest one, times its size, cannot be told from zero."""


@dataclass(frozen=True)
class Truncation:
    """What is left of a matrix W, in double precision: ``W V_k V_k^T``.

    Attributes:
        scale: (p,) channel weights I, zero where a channel is dead; None where all weigh the same.
        left: (p, k) left singular vectors of the weighted matrix.
        sigma: (k,) its singular values.
        right: (k, q) its right singular vectors, as rows.
        projected: (p, k) ``W V_k``; with ``right`` it gives the truncated matrix without any division.
        entropy: Of the whole spectrum, natural logarithm.
        rank: Of the weighted matrix.
        residual: Share of the energy of W that is cut off, from 0 to 1.
    """

    scale: Tensor | None
    left: Tensor
    sigma: Tensor
    right: Tensor
    projected: Tensor
    entropy: float
    rank: int
    residual: float

    @property
    def whole(self) -> Tensor:
        """Return the truncated matrix."""
        return self.projected @ self.right


def channel_weights(matrix: Tensor, kind: ChannelWeights) -> Tensor | None:
    """Return I, one weight per row: the row's L2 norm (squared), the root of its L1 norm (absolute), or None.

    Rows below `DEAD` of the largest weight get zero.
    """
    largest = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
    return _weights_in_units(matrix / largest, largest, kind)


def _weights_in_units(unit: Tensor, largest: Tensor, kind: ChannelWeights) -> Tensor | None:
    """Return the channel weights of ``unit * largest``: in units of the largest entry squares neither overflow nor vanish."""
    if kind == "none":
        return None
    if kind == "squared":
        weights = torch.linalg.vector_norm(unit, dim=1) * largest
    else:
        weights = torch.linalg.vector_norm(unit, ord=1, dim=1).sqrt() * largest.sqrt()
    return torch.where(weights > DEAD * weights.max(), weights, torch.zeros_like(weights))


def spectral_entropy(energies: Tensor) -> float:
    """Return ``- sum s log s`` of the energies' shares; zeros are left out, and all zeros have entropy 0.

    >>> round(spectral_entropy(torch.tensor([1.0, 1.0, 0.0])), 6)
    0.693147
    """
    total = energies.sum()
    if not bool(total > 0):
        return 0.0
    shares = energies / total
    shares = shares[shares > 0]
    return max(0.0, float(-(shares * shares.log()).sum()))


def rank_above(energies: Tensor, threshold: float) -> int:
    """Return the least k whose first energies hold strictly more than the threshold's share, between 1 and the number above zero.

    >>> rank_above(torch.tensor([3.0, 1.0]), 0.75)
    2
    """
    rank = max(1, int((energies > 0).sum()))
    total = energies.sum()
    if not bool(total > 0):
        return 1
    enough = (energies.cumsum(0) / total > threshold).nonzero()
    return min(rank, int(enough[0]) + 1) if len(enough) else rank


def truncate(matrix: Tensor, *, weights: ChannelWeights, beta: float, threshold: float | None) -> Truncation:
    """Truncate one matrix.

    Args:
        matrix: (p, q), finite.
        weights: How channels are weighted.
        beta: Sensitivity of the adaptive threshold ``1 - exp(-beta e)``.
        threshold: A fixed threshold instead, or None.
    """
    largest = matrix.abs().amax().double()
    if not bool(largest > 0):
        nothing = matrix.double()
        return _nothing(nothing, channel_weights(nothing, weights))
    # In units of the largest entry: the Gram matrix squares what is squared already by the channel weights. Passes over the
    # matrix in double precision cost as much as the eigenproblem, so there are few: one copy, one division, one norm.
    unit = matrix.to(torch.float64, copy=True).div_(largest)
    scale = _weights_in_units(unit, largest, weights)
    relative = None if scale is None else scale / scale.max()
    vectors, energies, tall = _gram_factors(unit, relative)
    entropy = spectral_entropy(energies)
    limit = threshold if threshold is not None else -math.expm1(-beta * entropy)
    k = rank_above(energies, limit)
    sigma = energies[:k].sqrt()
    kept = vectors[:, :k] if tall or relative is None else vectors[:, :k] * relative[:, None]
    right = kept.T if tall else (kept.T @ unit) / sigma[:, None]  # (k, q)
    projected = unit @ right.T  # (p, k)
    left = projected / sigma if tall else vectors[:, :k]
    if relative is not None:
        # Not the eigenvectors: their rounding is 1e-16 of the loudest channel, and the server divides it by I.
        left = projected * relative[:, None] / sigma
    # W V V^T projects orthogonally, so what is cut off is the difference of the energies.
    residual = 1 - float((torch.linalg.vector_norm(projected) / torch.linalg.vector_norm(unit)).square())
    rank = int((energies > 0).sum())
    return Truncation(scale, left, sigma * largest, right, projected * largest, entropy, rank, min(1.0, max(0.0, residual)))


def what_is_read(matrix: Tensor, weights: ChannelWeights, beta: float, threshold: float | None) -> Tensor:
    """Return what is left of a matrix (p, q) once it was truncated, sent and read; nothing is looked at, so vmap goes through.

    The same as the product of the factors of `truncate`, up to rounding: directions that are cut off are multiplied by zero.
    """
    largest = matrix.abs().amax().double()
    unit = matrix.double() / torch.where(largest > 0, largest, torch.ones_like(largest))
    scale = _weights_in_units(unit, largest, weights)
    tiny = torch.finfo(unit.dtype).tiny
    relative = None if scale is None else scale / scale.max().clamp_min(tiny)
    vectors, energies, tall = _gram_factors(unit, relative)
    total = energies.sum().clamp_min(tiny)
    shares = energies / total
    entropy = (-torch.special.xlogy(shares, shares).sum()).clamp_min(0)
    limit = -torch.expm1(-beta * entropy) if threshold is None else threshold
    # A direction is kept where those before it do not hold enough, and the first in any case.
    short = energies.cumsum(0) / total <= limit
    kept = torch.cat([torch.ones_like(short[:1]), short[:-1]]) & (energies > 0)
    basis = torch.where(kept, vectors, 0.0)
    if not tall:
        rows = basis if relative is None else basis * relative[:, None]
        basis = (rows.mT @ unit).mT / torch.where(kept, energies, 1.0).sqrt()  # (q, p)
    whole = (unit @ basis) @ basis.mT * largest
    alive = 1.0 if scale is None else (scale > 0)[:, None]
    return (whole * alive).to(matrix.dtype)


def _gram_factors(matrix: Tensor, relative: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """Return eigenvectors and falling eigenvalues of the smaller Gram matrix of the weighted matrix, and whether it is A^T A."""
    rows, columns = matrix.shape
    tall = rows > columns
    if tall:
        weighted = matrix if relative is None else matrix * relative[:, None]
        gram = weighted.T @ weighted
    else:
        gram = matrix @ matrix.T
        # Weighing the small Gram matrix saves a pass over the large one.
        gram = gram if relative is None else gram * relative[:, None] * relative
    energies, vectors = torch.linalg.eigh(gram)
    energies, vectors = energies.flip(0).clamp_min(0), vectors.flip(1)
    noise = _ROUNDING * max(rows, columns) * energies[0]
    return vectors, torch.where(energies > noise, energies, torch.zeros_like(energies)), tall


def _nothing(matrix: Tensor, scale: Tensor | None) -> Truncation:
    """Return the truncation of a matrix of zeros: rank 1 on the wire, and zero."""
    rows, columns = matrix.shape
    right = torch.zeros((1, columns), dtype=matrix.dtype, device=matrix.device)
    right[0, 0] = 1
    zeros = torch.zeros((rows, 1), dtype=matrix.dtype, device=matrix.device)
    return Truncation(scale, zeros, zeros[0], right, zeros, 0.0, 0, 0.0)
