"""What a defense does beyond what comparing undoes: gains and errors, measured on the attacker's own public records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.attacks.base import USES_THE_DEFENSE, AttackContext
from gradveil.attacks.linear_evidence import Evidence, evidence_of, rehearsed
from gradveil.records import Observation
from gradveil.tensors import Named, stack

__all__ = ["Release", "known_noise", "learn_release", "release_of", "spread_of"]

TENSOR_WEIGHT = 4.0
"""Records that the variance of a whole tensor counts for in that of one of its entries."""
DIFFERENT = 3.0
TINY = 1e-300
EXACT = 1e-8
"""Share of the variance over records below which what arrives differs from what is compared by rounding alone."""


@dataclass(frozen=True, eq=False)
class Release:
    """How what is seen follows from what would be compared: ``seen = s + (gain - 1)(s - centre) + offset + error``.

    Attributes:
        noise: Variance of the error of every entry, where that is known and one.
        variance: The same by name, where it was learned.
        gain: Of every entry, by name; empty where everything arrives as it is but for the error.
        shift: offset - (gain - 1) centre, by name.
    """

    noise: float = 0.0
    variance: Named = field(default_factory=dict)
    gain: Named = field(default_factory=dict)
    shift: Named = field(default_factory=dict)

    def shifted(self, residuals: Named, simulated: Named) -> Named:
        """Return residuals whose mean is zero at the truth; safe under vmap."""
        if not self.gain:
            return residuals
        return {n: v + (self.gain[n] - 1) * simulated[n] + self.shift[n] for n, v in residuals.items()}

    def scaled(self, slopes: Named) -> Named:
        """Return derivatives, or errors, as they arrive."""
        return {name: value * self.gain[name] for name, value in slopes.items()} if self.gain else slopes

    def error(self, name: str) -> Tensor | float:
        """Return the variance of the error of a tensor."""
        return self.variance[name] if self.variance else self.noise


def known_noise(observation: Observation, stance: str) -> float | None:
    """Return the deviation of Gaussian noise on what a stance compares, where its adversary model knows it."""
    return observation.adversary.arrives(observation).noise_std if stance == "informed" else None


def learn_release(
    observation: Observation, context: AttackContext, stance: str, inputs: Tensor, targets: Tensor, *, share: float = 1.0
) -> Release:
    """Return what the client's code does to records of the attacker's own, beyond what comparing undoes.

    Args:
        observation: What was seen; it says how the client is replayed, and nothing is learned from it.
        context: What the attacker works with.
        stance: Who does not use the defense learns nothing.
        inputs: (N, B, ...) the records.
        targets: (B,) their labels.
        share: Of the entries that are looked at.
    """
    std = known_noise(observation, stance)
    if std is not None:
        return Release(noise=std**2)
    if stance not in USES_THE_DEFENSE or (context.observe is None and context.simulate is None):
        return Release()
    seen = rehearsed(observation, context, stance, inputs, targets)
    return release_of([evidence_of(each, stance, context, share=share) for each in seen], inputs, targets)


def release_of(rehearsals: Sequence[Evidence], inputs: Tensor, targets: Tensor) -> Release:
    """Return gains and errors of what arrives of known records.

    Signs, levels and ranks get the gain with which they follow their entry about the mean over records, and what is left is taken
    for uncorrelated noise. A tensor that arrives as it is compared is left alone.
    """
    pairs = [each.compare(each.simulate(own, targets)) for each, own in zip(rehearsals, inputs, strict=True)]
    compared, seen = stack([pair.simulated for pair in pairs]), stack([pair.observed for pair in pairs])
    gain, shift, variance = {}, {}, {}
    touched = False
    for name, value in compared.items():
        left, right = value.double(), seen[name].double()
        about, arrived = left - left.mean(0), right - right.mean(0)
        exact = bool((right - left).square().sum() <= EXACT * about.square().sum())
        own = torch.ones_like(about[0]) if exact else _gains(about, arrived)
        touched = touched or not exact
        gain[name] = own.to(value)
        shift[name] = torch.zeros_like(value[0]) if exact else (right.mean(0) - own * left.mean(0)).to(value)
        # Two numbers, mean and gain, were fitted to every entry's pairs.
        spread = spread_of(arrived - own * about) * len(left) / max(1, len(left) - 2)
        variance[name] = torch.zeros_like(value[0]) if exact else spread.to(value)
    return Release(variance=variance, gain=gain, shift=shift) if touched else Release()


def _gains(about: Tensor, arrived: Tensor) -> Tensor:
    """Return the gain of every entry from centred pairs (N, ...): what chance explains of it is not believed.

    Least squares for the whole tensor, and none where it is within three standard deviations of nothing: the gains of noise are
    as large as a tensor is small. Where gains of entries differ by more than three standard deviations of what chance would make
    of equal ones, each of its own, drawn towards the tensor's (empirical Bayes).
    """
    size, along = about.square().sum(0), (about * arrived).sum(0)
    total, seen = size.sum(), size > 0
    overall = along.sum() / total.clamp_min(TINY)
    alone = torch.where(seen, along / size.clamp_min(TINY), overall)
    count = int(seen.sum())
    error = (arrived - alone * about).square().sum() / max(1, count * (len(about) - 2))
    beyond = (size * (alone - overall).square()).sum() - error * count
    if count > 1 and bool(beyond > DIFFERENT * error * (2 * count) ** 0.5):
        differ = beyond / total
        return overall + (alone - overall) * differ / (differ + error / size.clamp_min(TINY))
    sure = overall.square() * total > DIFFERENT**2 * error
    return torch.where(sure, overall, 0.0).expand_as(size)


def spread_of(errors: Tensor) -> Tensor:
    """Return the mean square (...) of errors (N, ...) of every entry, drawn towards that of the whole tensor."""
    squares = errors.square()
    whole = squares.mean() if squares.numel() else squares.new_zeros(())
    return (squares.sum(0) + TENSOR_WEIGHT * whole) / (len(squares) + TENSOR_WEIGHT)
