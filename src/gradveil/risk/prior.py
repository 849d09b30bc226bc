"""What an attacker knows of the data beforehand: mean and leading directions of public records, and what these leave out.

The one place where `gradveil.risk` makes a prior; whoever has another basis of public records hands in a `Prior` of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.errors import UsageError
from gradveil.randomness import Seed

__all__ = ["FEWEST", "RANK", "WORDS", "Prior", "public_prior"]

RANK = 256
"""Directions kept, where public records are enough."""
FEWEST = 16
"""Public records that a prior takes at least."""
HELD_OUT = 10
"""Every so many public records are kept from the fit, to see what the directions leave out of records that are new."""
OUTSIDE = 8
"""Held-out records that stand for what the directions leave out."""
EXACT = 1500
"""Records or values up to which directions come from a whole decomposition; beyond, from random starts."""
SPARE, POWERS = 32, 4
WORDS = {
    "same": "{0}, not {1}",
    "other": "pieces of built-in photographs",
    "none": "draws of a law with a spectrum of 1/f², of no record",
}
"""What is said of each source of public records; told the data and what is done to the records in question."""
OF_CLASS = 16
"""Public records of a class, beside those held out, from which it has a mean of its own."""
RANGES = 10.0
"""By how much public records may spread more or less than those that are scored."""


@dataclass(frozen=True, eq=False)
class Prior:
    """A Gaussian prior of low rank, and samples of what it leaves out.

    Attributes:
        mean: μ, (m,).
        basis: U, (m, r) with orthonormal columns.
        variances: λ, (r,), falling.
        outside: (k, m) what μ and U leave of public records that they were not fitted to.
        records: How many public records it was made of.
        source: Where they are from, in words.
        means: For each label with a mean of its own, (m,): what is expected of a record whose label is known.
    """

    mean: Tensor
    basis: Tensor
    variances: Tensor
    outside: Tensor
    records: int
    source: str = ""
    means: Mapping[int, Tensor] = field(default_factory=dict)

    def mean_of(self, label: int | None) -> Tensor:
        """Return what is expected of a record with a label, or of one whose label nobody knows."""
        return self.mean if label is None else self.means.get(label, self.mean)

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.basis.shape[1]

    @property
    def kept(self) -> float:
        """The share of the variance of new records that lies along the directions."""
        left = float(self.outside.square().sum(1).mean()) if len(self.outside) else 0.0
        total = float(self.variances.sum()) + left
        return float(self.variances.sum()) / total if total > 0 else 0.0


def public_prior(
    public: Tensor,
    *,
    like: Tensor,
    rank: int | None = None,
    most: int = RANK,
    source: str = "",
    seed: Seed | None = None,
    labels: Tensor | None = None,
) -> Prior:
    """Return mean, covariance of low rank, and what is left out, of public records.

    Args:
        public: (n, ...) records that are not scored.
        like: (k, ...) those that are.
        rank: Directions kept; None takes ``most``, or half of the public records where they are fewer.
        most: Directions that are enough where nobody asks for a number.
        source: Where the public records are from.
        seed: Of random starts, where there are many values.
        labels: (n,) of the public records: classes with enough of them get means of their own, and directions are those in which
            records differ from the mean of their class. For releases that give labels away: whoever reads the label begins there.

    Raises:
        UsageError: One sentence on public records that do not fit.
    """
    if public.shape[1:] != like.shape[1:]:
        shapes = tuple(public.shape[1:]), tuple(like.shape[1:])
        raise UsageError(
            f"public records have shape {shapes[0]} and the scored ones {shapes[1]}; give public records of one shape"
        )
    if len(public) < FEWEST:
        raise UsageError(f"a prior takes at least {FEWEST} public records, and there are {len(public)}; give more of them")
    _check_range(public, like)
    flat = public.flatten(1).double().cpu()
    held = torch.zeros(len(flat), dtype=torch.bool)
    held[HELD_OUT - 1 :: HELD_OUT] = True
    fitted, size = flat[~held], flat.shape[1]
    highest = min(len(fitted) - 1, size)
    if rank is not None and not 1 <= rank <= highest:
        why = f"{len(public)} public records" if highest < size else f"{size} values a record"
        raise UsageError(
            f"rank {rank} is out of reach: {why} carry at most {highest} directions; lower it, or give more public records"
        )
    kept = rank or max(1, min(most, len(fitted) // 2, size))
    mean, means = fitted.mean(0), {} if labels is None else _means(fitted, labels.cpu()[~held])
    values, basis = _directions(_apart(fitted, mean, means, labels, ~held), kept, (seed or Seed(0)).child("prior"))
    if not float(values[0]) > 1e-12:
        raise UsageError("all public records are alike, so they tell nothing of how records differ; give others")
    basis = basis[:, values > 1e-12 * values[0]]
    values = values[values > 1e-12 * values[0]]
    new = _apart(flat[held], mean, means, labels, held)[:OUTSIDE]
    return Prior(mean, basis, values, new - (new @ basis) @ basis.T, len(public), source, means)


def _means(records: Tensor, labels: Tensor) -> dict[int, Tensor]:
    """Return the mean of every class with enough records."""
    if labels.is_floating_point() or labels.ndim != 1:
        return {}
    names, counts = labels.unique(return_counts=True)
    return {int(name): records[labels == name].mean(0) for name, count in zip(names, counts, strict=True) if count >= OF_CLASS}


def _apart(records: Tensor, mean: Tensor, means: Mapping[int, Tensor], labels: Tensor | None, rows: Tensor) -> Tensor:
    """Return records about the means of their classes, or about that of all."""
    if not means or labels is None:
        return records - mean
    return records - torch.stack([means.get(label, mean) for label in labels.cpu()[rows].tolist()])


def _check_range(public: Tensor, like: Tensor) -> None:
    if not bool(torch.isfinite(public).all()):
        raise UsageError("public records have values that are not finite; remove them")
    low, high, own_low, own_high = (float(each) for side in (public, like) for each in (side.min(), side.max()))
    spread, own = high - low, own_high - own_low
    if own > 0 and spread > 0 and not 1 / RANGES <= spread / own <= RANGES:
        raise UsageError(
            f"public records reach from {low:g} to {high:g}, the scored ones from {own_low:g} to {own_high:g}; scale them alike"
        )


def _directions(centred: Tensor, kept: int, seed: Seed) -> tuple[Tensor, Tensor]:
    """Return the leading variances and directions (m, kept): whole, or by power steps from random starts."""
    count, size = centred.shape
    if min(count, size) <= EXACT:
        _, singular, right = torch.linalg.svd(centred, full_matrices=False)
        return singular[:kept].square() / (count - 1), right[:kept].T.contiguous()
    block = torch.randn((size, min(size, kept + SPARE)), generator=seed.generator("starts"), dtype=torch.float64)
    for _ in range(POWERS):
        block, _ = torch.linalg.qr(centred.T @ (centred @ block))
    _, singular, right = torch.linalg.svd(centred @ block, full_matrices=False)
    return singular[:kept].square() / (count - 1), block @ right[:kept].T
