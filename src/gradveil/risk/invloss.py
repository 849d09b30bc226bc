"""InvLoss: the error of a linear attacker of rank k, per record and k (Xu et al. 2025, Theorems 1 to 3).

With J = U Σ Vᵀ the Jacobian of what is shared, the attacker of rank k inverts the k largest singular values and gets

    clean               τ_k = Σ_{i>k} (v_iᵀ x)²                                   Theorem 1
    noise ε on data     τ_k + Σ_{i≤k} (v_iᵀ ε)² / m                               Theorem 2
    noise ε on shares   τ_k + Σ_{i≤k} (u_iᵀ ε)² / (σ_i² p)                        Theorem 3

**As printed, Theorems 2 and 3 are no upper bounds.** The inverse turns noise ε on shares into Σ_{i≤k} (u_iᵀ ε)² / σ_i² and noise
on data into Σ_{i≤k} (v_iᵀ ε)², without any 1/p or 1/m: dividing claims a small part of the error it really makes. Both forms are
returned, the paper's as ``noise``, that of the inverse as ``noise_total``. The second is what such an attacker gets; who knows
something of the data gets more. **A high risk warns, a low one does not acquit.**

Departs from the paper: τ_k is the complete residual ‖x‖² - Σ_{i≤k} (v_iᵀ x)² by default. The paper's sum stops at d = min(m, p);
where p < m it forgets the part of x that no v_i sees. ``residual="paper"`` keeps the paper's. All is relative to ‖x‖²
("normalized example").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.errors import UsageError
from gradveil.spectra.spectrum import Spectrum
from gradveil.study.risks import MEANING

__all__ = ["MEANING", "InvLoss", "RankVariances", "Residual", "inversion_loss"]

Residual = Literal["complete", "paper"]


@dataclass(frozen=True, eq=False)
class RankVariances:
    """Gaussian noise that differs from one singular vector to the next, as what it adds to the expected error.

    Attributes:
        values: v_iᵀ C v_i (data) or u_iᵀ C u_i (shares) for noise of covariance C, one per singular value.
    """

    values: Tensor


@dataclass(frozen=True, eq=False)
class InvLoss:
    """The error for every rank k = 0 … len(values), relative to ‖x‖².

    Attributes:
        signal: τ_k.
        noise: The noise term as the paper has it, over m or p.
        noise_total: The noise term of the inverse itself, not divided.
    """

    signal: Tensor
    noise: Tensor
    noise_total: Tensor


def inversion_loss(
    spectrum: Spectrum,
    *,
    data_noise: float | Tensor | RankVariances = 0.0,
    shared_noise: float | Tensor | RankVariances = 0.0,
    residual: Residual = "complete",
    tolerance: float = 0.0,
) -> InvLoss:
    """Return the errors of Theorems 1 to 3 for every rank.

    Args:
        spectrum: Of one record.
        data_noise: Noise on the input: its standard deviation, for the expected error; its variance along each right singular
            vector; or the noise itself (m entries; needs right singular vectors).
        shared_noise: The same on what is shared (left singular vectors; p entries).
        residual: ``complete`` or ``paper``.
        tolerance: Singular values below this share of the largest count as zero: nobody inverts them, so no noise is amplified.
    """
    if residual not in ("complete", "paper"):
        raise UsageError(f"residual is {residual!r}; choose complete or paper")
    if residual == "paper" and not spectrum.whole:
        raise UsageError("the paper's residual needs all singular values; use mode gram or dense, or residual='complete'")
    energy = spectrum.energy
    squares = spectrum.projections.double().square()
    seen = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
    total = float(seen[-1]) if residual == "paper" else energy
    signal = (total - seen).clamp(min=0)
    on_data = _noise(data_noise, spectrum.right, len(squares), "data_noise", "right")
    on_shared = _noise(shared_noise, spectrum.left, len(squares), "shared_noise", "left")
    floor = tolerance * float(spectrum.values[0]) if len(spectrum.values) else 0.0
    kept = (spectrum.values > floor) & (spectrum.values > 0)
    amplified = torch.where(kept, on_shared / spectrum.values.square().clamp(min=1e-300), 0.0)
    paper = on_data / spectrum.inputs + amplified / spectrum.outputs
    return InvLoss(
        signal=_relative(signal, energy),
        noise=_relative(_cumulative(paper), energy),
        noise_total=_relative(_cumulative(on_data + amplified), energy),
    )


def _noise(noise: float | Tensor | RankVariances, vectors: Tensor | None, count: int, name: str, side: str) -> Tensor:
    """Return (v_iᵀ ε)² for all i; its expectation where only a standard deviation, or variances, are known."""
    if isinstance(noise, RankVariances):
        if len(noise.values) != count or not bool((noise.values >= 0).all()):
            raise UsageError(f"{name} has {len(noise.values)} variances for {count} singular values; give each one from 0 on")
        return noise.values.double()
    if not isinstance(noise, Tensor):
        if not noise >= 0 or noise == float("inf"):
            raise UsageError(f"{name} is {noise}; give a standard deviation from 0 on, or the noise itself")
        return torch.full((count,), float(noise) ** 2, dtype=torch.float64)
    if vectors is None:
        raise UsageError(f"{name} was given entry by entry, which needs the {side} singular vectors; ask for {side}=True")
    return (vectors.T.double() @ noise.reshape(-1).double()).square()


def _cumulative(values: Tensor) -> Tensor:
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def _relative(values: Tensor, energy: float) -> Tensor:
    """Divide by ‖x‖²; for a black input, which has none, nothing is missing and noise counts as it is."""
    return values / energy if energy > 0 else values
