"""pFGD: the lowest frequencies of every tensor are removed."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.learning.learner import Learner
from gradveil.records import Observation, Update, WhatArrives
from gradveil.study.checks import check_number
from gradveil.tensors import Named, check_finite, map_tensors

__all__ = ["PFGD", "HighPassAdversary", "dct4", "high_pass", "removed"]

KEEP_UP_TO = 2**22
"""Entries of a tensor up to which its tables are kept: they take two to four times its memory, once per size."""


def dct4(vector: Tensor) -> Tensor:
    """Return the orthonormal DCT-IV of a vector: ``X_k = sqrt(2/n) sum_j x_j cos(pi (j + 1/2)(k + 1/2) / n)``.

    The transform is symmetric and orthogonal, so it is its own inverse. For even n it is taken from one FFT of length n / 2,

        z_j = (x_2j + i x_(n-1-2j)) e^(-i pi (4j + 1) / 4n),   y_k = e^(-i pi k / n) FFT(z)_k,
        X_2k = Re y_k,   X_(n-1-2k) = -Im y_k,

    up to the factor sqrt(2/n); for odd n from one of length 2n. O(n log n), differentiable and under vmap. Half precision is
    transformed in single precision.
    """
    n = vector.shape[-1]
    if n == 0:
        return vector
    real = vector if vector.dtype in (torch.float32, torch.float64) else vector.float()
    # Tables of large tensors are not kept: a few of them would take more memory than the model.
    kept = _kept_gpu_tables if real.device.type == "cuda" else _kept_tables
    before, after = (kept if n <= KEEP_UP_TO else _twiddles)(n, real.dtype, real.device)
    if n % 2:
        transformed: Tensor = (torch.fft.fft(real * before, n=2 * n)[..., :n] * after).real
    else:
        pairs = torch.complex(real[..., 0::2].contiguous(), real.flip(-1)[..., 0::2].contiguous())
        halves = torch.fft.fft(pairs * before) * after
        transformed = torch.stack([halves.real, -halves.imag.flip(-1)], -1).flatten(-2)
    return (transformed * math.sqrt(2 / n)).to(vector.dtype)


def _twiddles(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    # Angles in double precision: in single precision j / 2n is too coarse for millions of entries.
    index = torch.arange(n if n % 2 else n // 2, dtype=torch.float64, device=device)
    if n % 2:
        angles = -math.pi * index / (2 * n), -math.pi * (2 * index + 1) / (4 * n)
    else:
        angles = -math.pi * (4 * index + 1) / (4 * n), -math.pi * index / n
    kind = torch.complex64 if dtype == torch.float32 else torch.complex128
    before, after = (torch.polar(torch.ones_like(angle), angle).to(kind) for angle in angles)
    return before, after


def _tables(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    # A table first made in inference mode could not be used by autograd later.
    with torch.inference_mode(False):
        return _twiddles(n, dtype, device)


_kept_tables = functools.lru_cache(maxsize=32)(_tables)
# Never dropped: a recorded step of an attack goes on reading them.
_kept_gpu_tables = functools.cache(_tables)


def removed(entries: int, rate: float) -> int:
    """Return how many of ``entries`` coefficients are removed: ⌊rate · entries⌋, so small tensors lose none."""
    # Rounded first: 0.29 · 100 is 28.999999999999996 in floating point, and means 29.
    return math.floor(round(rate * entries, 6))


def high_pass(value: Tensor, rate: float) -> Tensor:
    """Remove the lowest frequencies of a tensor read as one long vector: a fixed linear projection."""
    count = removed(value.numel(), rate)
    if count == 0:
        return value
    spectrum = dct4(value.reshape(-1))
    kept = torch.cat([torch.zeros_like(spectrum[:count]), spectrum[count:]])
    return dct4(kept).reshape(value.shape)


@dataclass(frozen=True)
class HighPassAdversary(OpenAdversary):
    """Removes the same frequencies from what the dummies produce; at the truth the two coincide exactly.

    Nothing is left to guess: the projection is fixed, linear and public. Tensors too small to lose a coefficient arrive whole.
    """

    rate: float

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        """Project every tensor."""
        return map_tensors(lambda value: high_pass(value, self.rate), update)

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that the tensors are exact that lose nothing."""
        weights = observation.update.weights
        whole = frozenset(name for name, value in weights.items() if removed(value.numel(), self.rate) == 0)
        return super().arrives(observation).replace(exact=lambda: whole)


@DEFENSES.register(
    DefenseCard(
        name="pfgd",
        summary="Removes the lowest frequencies of every tensor of the update.",
        paper="Palihawadana, Wiratunga, Kalutarage and Wijekoon, Mitigating Gradient Inversion Attacks in Federated Learning "
        "with Frequency Transformation, ESORICS workshops 2023",
        url="https://doi.org/10.1007/978-3-031-54129-2_44",
        cost="two Fourier transforms per tensor; no bytes are saved",
        weakness="a fixed public projection: an attacker projects its own update in the same way and loses nothing but what was "
        "removed; tensors below 1 / rate entries, as most biases, arrive whole",
        acts_on=("update",),
        ladder=({"rate": 0.01}, {"rate": 0.1}, {"rate": 0.5}, {"rate": 0.9}),
        off={"rate": 0.0},
    )
)
@dataclass(frozen=True, kw_only=True)
class PFGD(Defense):
    """Pruned frequency-based gradient defence: ``sent = C D C u`` for every tensor read as one long vector.

    C is the orthonormal DCT-IV, its own inverse, and D zeroes the first ⌊rate · n⌋ coefficients, those of the lowest frequencies.

    Departs from the paper: none in the mathematics, as far as its released code tells (type IV, flattened tensors, 1 %). The
    code's round trip of the initial weights through the transform changes nothing and is left out. Where training takes several
    steps, the update of the round is projected once. The ladder goes beyond the paper's 1 %.

    Cost: O(n log n) per tensor. The update is sent whole, although n - ⌊rate · n⌋ numbers would do. Known weakness: as a fixed
    linear projection it hides only what it removes; `HighPassAdversary` matches the rest exactly. Earlier comparisons did not
    attack it so.

    Attributes:
        rate: Share of coefficients to remove from each tensor; 0 is off.
    """

    rate: float = 0.01

    def __post_init__(self) -> None:
        """Refuse anything but a share below one."""
        check_number("pfgd", "rate", self.rate, below=1.0)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Project every weight tensor by itself."""
        check_finite(update.weights)
        if self.rate == 0:
            return update, state
        return update.replace(weights=map_tensors(lambda value: high_pass(value, self.rate), update.weights)), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who projects too."""
        return HighPassAdversary(self.rate) if self.rate else OpenAdversary()
