"""What an attacker believes of an input before seeing anything: a mean and a few directions, learned from public records.

``x = mu + V diag(s) z + e``, with z standard normal of r coordinates, V the leading principal directions, s their deviations
and e what lies outside them. Nobody searches for e, but it is there: whoever compares counts what it does to the evidence as
noise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext, PublicRecords
from gradveil.errors import UsageError
from gradveil.records import Observation

__all__ = ["LEAST_RECORDS", "LinearPrior", "fit_prior", "prior_for", "refused"]

LEAST_RECORDS = 32
"""Public records with which anything is learned at all."""
HELD_SHARE, MOST_HELD = 0.25, 512
"""Of the public records, those that directions are not fitted to: on the others their own directions look too good."""
MOST_SQUARE = 4096
"""Rows of the largest matrix that is decomposed; of more records of larger inputs so many are used."""
LEAST_OF_CLASS = 50
CLASS_WEIGHT = 10.0
"""Records that the mean of all counts for in the mean of a class."""
FEW = 128
"""Directions below which a prior is so coarse that it is worth saying."""
NEGLIGIBLE = 1e-10
"""Share of the largest variance below which a direction is none."""


@dataclass(frozen=True, eq=False)
class LinearPrior:
    """Mean and whitened principal directions.

    Attributes:
        means: (K + 1, m): of every class with enough records, and of all records in the last row and for the other classes.
        synthesis: (m, r): V diag(s), from coordinates to inputs.
        analysis: (r, m): diag(1/s) Vᵀ, from inputs to coordinates.
        rest: Variance of one input value outside the directions, in the mean over values and held-out records.
        held: (H, ...) public records that had no part in V.
        held_targets: (H,) their labels.
        source: Of the public records.
    """

    means: Tensor
    synthesis: Tensor
    analysis: Tensor
    rest: float
    held: Tensor
    held_targets: Tensor
    source: str

    @property
    def rank(self) -> int:
        """Number r of coordinates."""
        return self.synthesis.shape[1]

    def mean_of(self, targets: Tensor) -> Tensor:
        """Return (B, ...) what is expected of inputs with these labels; soft or unknown labels get the mean of all."""
        if targets.is_floating_point() or targets.ndim != 1:
            rows = torch.full((len(targets),), len(self.means) - 1, device=self.means.device)
        else:
            last = len(self.means) - 1
            rows = torch.where((targets >= 0) & (targets < last), targets.to(self.means.device), last)
        return self.means[rows].reshape(len(targets), *self.held.shape[1:])

    def decode(self, coordinates: Tensor, mean: Tensor) -> Tensor:
        """Return inputs (B, ...) from coordinates (B, r) about a mean (B, ...); safe under vmap."""
        return mean + (coordinates @ self.synthesis.T).reshape(mean.shape)

    def encode(self, inputs: Tensor, mean: Tensor) -> Tensor:
        """Return the coordinates (..., r) of inputs (..., *shape) about a mean that broadcasts with them."""
        apart = inputs - mean
        return apart.reshape(*apart.shape[: apart.ndim - self.held.ndim + 1], -1) @ self.analysis.T

    def to(self, reference: Tensor) -> LinearPrior:
        """Return the prior in the precision and on the device of a tensor."""
        return replace(
            self,
            means=self.means.to(reference),
            synthesis=self.synthesis.to(reference),
            analysis=self.analysis.to(reference),
            held=self.held.to(reference),
            held_targets=self.held_targets.to(reference.device),
        )


def prior_for(observation: Observation, context: AttackContext, rank: int, *, by_class: bool, name: str) -> LinearPrior:
    """Return what the public records of a context teach about inputs, in the precision of the attacked client; learned once.

    Raises:
        UsageError: There are no public records, too few, constant ones, or of another shape or range than the attacked inputs.
    """
    public = context.public
    if public is None:
        raise UsageError(f"attack {name!r} learns from public records and was given none; hand some in as the context's `public`")
    if tuple(public.inputs.shape[1:]) != tuple(observation.input_shape):
        own, other = "×".join(map(str, observation.input_shape)), "×".join(map(str, public.inputs.shape[1:]))
        raise UsageError(f"public records have shape {other} and attacked inputs {own}; bring public records to that shape first")
    reference = next(iter(observation.learner.weights.values()))
    # The records themselves stay in the memory beside what was learned, so that no others can have their identity.
    key = ("linear prior", id(public), rank, by_class, reference.dtype, str(reference.device))
    if key not in context.memory:
        with warnings.catch_warnings():
            # An attacker makes do with the directions there are; who fits a prior by hand is told.
            warnings.simplefilter("ignore", RuntimeWarning)
            fitted = fit_prior(public, rank, by_class=by_class, device=reference.device)
        context.memory[key] = (public, fitted.to(reference))
    found: LinearPrior = context.memory[key][1]
    return found


def refused(learn: Callable[[], object]) -> str | None:
    """Return in one sentence why public records teach nothing; None where they do."""
    try:
        learn()
    except UsageError as error:
        return str(error)
    return None


def fit_prior(public: PublicRecords, rank: int, *, by_class: bool = True, device: torch.device | None = None) -> LinearPrior:
    """Return mean and principal directions of public records; the same records give the same bits.

    Three quarters of the records (or all but 512) tell the directions; the others how far records lie along them and outside,
    since directions fit the records they were fitted to better than any other.

    Args:
        public: The records.
        rank: Directions wanted; as many as the records support are given, with a warning where these are few.
        by_class: Take the mean of a class for records of that class where there are at least 50 of them.
        device: Where to compute; results are there, in double precision.
    """
    count, size = len(public.inputs), math.prod(public.inputs.shape[1:])
    if count < LEAST_RECORDS:
        raise UsageError(f"{count} public records teach nothing about inputs; give at least {LEAST_RECORDS}")
    if not bool(torch.isfinite(public.inputs).all()) or float(public.inputs.min()) < 0 or float(public.inputs.max()) > 1:
        low, high = float(public.inputs.min()), float(public.inputs.max())
        raise UsageError(f"public records reach from {low:.4g} to {high:.4g}; bring them to [0, 1], where attacked inputs live")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(public.inputs.device)
    held, fitted = order.split([min(MOST_HELD, int(count * HELD_SHARE)), count - min(MOST_HELD, int(count * HELD_SHARE))])
    if size > MOST_SQUARE:
        fitted = fitted[:MOST_SQUARE]
    inputs = public.inputs.to(device=device, dtype=torch.float64).flatten(1)
    targets = public.targets.to(inputs.device)
    held, fitted = held.to(inputs.device), fitted.to(inputs.device)
    means = _means(inputs[fitted], targets[fitted], by_class=by_class)
    rows = _rows(targets, len(means))
    directions = _directions(inputs[fitted] - means[rows[fitted]], rank)
    apart = inputs[held] - means[rows[held]]
    along = apart @ directions
    variances = along.square().mean(0)
    kept = variances > NEGLIGIBLE * variances.max() if len(variances) else variances > 0
    if not bool(kept.any()) or not bool(variances.max() > 0):
        raise UsageError("all public records are the same, which teaches nothing about how inputs differ; give different ones")
    directions, deviations = directions[:, kept], variances[kept].sqrt()
    rest = float((apart - along[:, kept] @ directions.T).square().mean())
    shape = public.inputs.shape[1:]
    return LinearPrior(
        means=means,
        synthesis=directions * deviations,
        analysis=(directions / deviations).T.contiguous(),
        rest=rest,
        held=inputs[held].reshape(-1, *shape),
        held_targets=targets[held],
        source=public.source,
    )


def _means(inputs: Tensor, targets: Tensor, *, by_class: bool) -> Tensor:
    """Return (K + 1, m) means: of every class drawn towards that of all, which stands last."""
    whole = inputs.mean(0)
    if not by_class or targets.is_floating_point() or targets.ndim != 1 or len(targets) == 0:
        return whole[None]
    counts = torch.bincount(targets.clamp_min(0))
    found = []
    for label, records in enumerate(counts.tolist()):
        if records < LEAST_OF_CLASS:
            found.append(whole)
            continue
        total = inputs[targets == label].sum(0)
        found.append((total + CLASS_WEIGHT * whole) / (records + CLASS_WEIGHT))
    return torch.stack([*found, whole])


def _rows(targets: Tensor, means: int) -> Tensor:
    """Return the row of the mean of every record."""
    last = means - 1
    if last == 0 or targets.ndim != 1:
        return torch.full((len(targets),), last, device=targets.device)
    return torch.where((targets >= 0) & (targets < last), targets, last)


def _directions(apart: Tensor, rank: int) -> Tensor:
    """Return (m, r) orthonormal leading directions of centred records (P, m), the strongest first.

    The largest entry of each is positive, so that they do not hang on what a library makes of signs.
    """
    count, size = apart.shape
    most = min(size, count - 1)
    if most < min(rank, size, FEW):
        warnings.warn(
            f"{count} public records support {most} directions, not the {rank} asked for; the prior has rank {most}",
            RuntimeWarning,
            stacklevel=3,
        )
    rank = min(rank, most)
    if size <= count or size <= MOST_SQUARE // 4:
        vectors = torch.linalg.eigh(apart.T @ apart).eigenvectors[:, -rank:].flip(1)
    else:
        values, left = torch.linalg.eigh(apart @ apart.T)
        values, left = values[-rank:].flip(0), left[:, -rank:].flip(1)
        kept = values > NEGLIGIBLE * values[0].clamp_min(1e-300)
        vectors = (apart.T @ left[:, kept]) / values[kept].sqrt()
    turned = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    upward: Tensor = vectors * torch.where(turned == 0, 1.0, turned)
    return upward
