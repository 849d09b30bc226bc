"""A linear-Gaussian model of what a client sends about a record, taken at a point, and the posterior mean under it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.adversary import OpenAdversary, overrides
from gradveil.attacks.base import AttackContext
from gradveil.attacks.linear_evidence import Evidence, at_once, entries, slopes, values
from gradveil.attacks.linear_noise import Release, spread_of
from gradveil.attacks.pca_prior import LinearPrior
from gradveil.tensors import Named

__all__ = ["LinearModel", "Posterior", "Read"]

T = TypeVar("T")

TOGETHER = 0.5
"""Share of the covariance of the model's errors that is taken as records show it; the rest as if entries erred alone."""
ROUNDING = 1e-10
"""Variance that is never doubted away, as a share of the signal's in a tensor."""
KEPT_NUMBERS = 2**26
"""Numbers that are kept for other updates of the same client; what came first goes first."""
KEPT, LAST = "kept by linear models", "last of linear models"


@dataclass(frozen=True)
class Read:
    """A posterior mean.

    Attributes:
        point: (B, r) coordinates.
        first_loss: Half of the squared residuals in units of their errors, at the point of the model; no prior.
        loss: The same at the posterior mean, as far as the model is right.
        slope: Norm of its slope at the point of the model.
    """

    point: Tensor
    first_loss: float
    loss: float
    slope: float


@dataclass(frozen=True, eq=False)
class Posterior:
    """Normal equations ``(matrix + 1) a = -vector`` of a = (z, n): coordinates, and how much there is of each record's error.

    Attributes:
        matrix: (C + N, C + N).
        vector: (C + N,).
        misfit: rhoᵀ D⁻¹ rho at the point, where D is the part of C that entries err alone.
        point: (B, r) the point of the model.
    """

    matrix: Tensor
    vector: Tensor
    misfit: float
    point: Tensor

    def mean(self, strength: float) -> Read:
        """Return the posterior mean where C is multiplied by ``strength``."""
        at = torch.zeros_like(self.vector)
        at[: self.point.numel()] = self.point.reshape(-1).to(at)
        weight = torch.ones_like(self.vector)
        weight[: self.point.numel()] = strength
        slope = self.vector + weight * at
        step = -torch.linalg.solve(self.matrix + weight.diag(), slope)
        found = (at + step)[: self.point.numel()].reshape(self.point.shape).to(self.point)
        after = self.misfit + float(2 * self.vector @ step + step @ self.matrix @ step)
        return Read(found, self.misfit / 2, after / 2, float(self.vector[: self.point.numel()].norm()))


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Models what a client sends with given labels.

    Attributes:
        prior: Of inputs.
        labels: (B,).
        inputs: (N, B, ...) public records on which the error of the model is measured.
        context: Keeps what other updates with these labels can use.
    """

    prior: LinearPrior
    labels: Tensor
    inputs: Tensor
    context: AttackContext

    @property
    def mean(self) -> Tensor:
        """(B, ...) what is expected of the inputs."""
        return self.prior.mean_of(self.labels)

    @property
    def start(self) -> Tensor:
        """(B, r) the coordinates of the mean."""
        return self.mean.new_zeros((len(self.labels), self.prior.rank))

    def posterior(self, evidence: Evidence, release: Release, point: Tensor, near: float) -> Posterior:
        """Return the normal equations of the model taken at a point.

        Args:
            evidence: What is compared.
            release: What arrives of it.
            point: (B, r).
            near: Deviation about the point, in units of the prior's, of the records on which errors are measured.
        """
        value = next(iter(self._slopes(evidence, point)))[0]
        at = release.shifted(evidence.residuals(value), evidence.compare(value).simulated)
        weighed = self._weighed(evidence, release, point, near)
        rho = {n: v.flatten().double() + weighed.means[n] for n, v in at.items()}
        vector = torch.stack([weighed.rows[n] @ (v / weighed.alone[n]) for n, v in rho.items()]).sum(0)
        misfit = torch.stack([(v.square() / weighed.alone[n]).sum() for n, v in rho.items()]).sum()
        return Posterior(weighed.matrix, vector, float(misfit), point)

    def _weighed(self, evidence: Evidence, release: Release, point: Tensor, near: float) -> _Weighed:
        """Return the part of the model that is the same whatever was seen, where what was seen decides nothing but residuals."""
        adversary = evidence.adversary
        if not isinstance(adversary, OpenAdversary) or overrides(adversary, "compare") or bool(point.any()):
            return self._weigh(evidence, release, point, near)
        learners = tuple((learner.content, learner.settings) for learner in evidence.observation.learners)
        key = (learners, repr(adversary), self.labels.tolist(), len(self.inputs), evidence.share, near)
        # Of the last labels alone: it is large, and rehearsals are many with the same.
        last = self.context.memory.get(LAST)
        if last is None or last[0] != key or last[1] is not self.prior or last[2] is not release:
            last = self.context.memory[LAST] = (key, self.prior, release, self._weigh(evidence, release, point, near))
        weighed: _Weighed = last[3]
        return weighed

    def _weigh(self, evidence: Evidence, release: Release, point: Tensor, near: float) -> _Weighed:
        pieces = list(self._slopes(evidence, point))
        at = evidence.residuals(pieces[0][0])
        pushed = [release.scaled(evidence.push(piece)) for piece in pieces]
        columns = {name: _rows(torch.cat([each[name] for each in pushed])) for name in at}
        coordinates = near * self.prior.encode(self.inputs, self.mean).flatten(1)
        found = [vmap(evidence.residuals)(piece) for piece in self._records(evidence, point, near)]
        away = release.scaled({n: torch.cat([each[n] for each in found]) - v for n, v in at.items()})
        errors = {n: _rows(v) - coordinates.double() @ columns[n] for n, v in away.items()}
        finite = torch.stack([torch.isfinite(v).all(1) for v in errors.values()]).all(0)
        return _weigh(columns, {n: v[finite] for n, v in errors.items()}, release)

    def _slopes(self, evidence: Evidence, point: Tensor) -> Iterable[tuple[Named, Named]]:
        made = lambda: slopes(evidence, self.prior, self.mean, point, self.labels)  # noqa: E731
        return self._kept("slopes", evidence, point, made, point.numel())

    def _records(self, evidence: Evidence, point: Tensor, near: float) -> Iterable[Named]:
        """Return what the client produces from records about the point, whatever is outside the directions left as it is."""
        own = self.prior.encode(self.inputs, self.mean)
        outside = self.inputs - self.prior.decode(
            own.flatten(0, 1), self.mean.repeat(len(own), *[1] * (self.mean.ndim - 1))
        ).reshape(self.inputs.shape)
        moved = torch.stack([self.prior.decode(point + near * each, self.mean) for each in own]) + outside
        made = lambda: values(lambda x: evidence.simulate(x, self.labels), moved, at_once(evidence, self.mean))  # noqa: E731
        return self._kept("records", evidence, point, made, len(moved))

    def _kept(self, what: str, evidence: Evidence, point: Tensor, make: Callable[[], Iterator[T]], rows: int) -> Iterable[T]:
        """Return what was made before for these labels, where it is not of one update alone, nor too much to keep."""
        numbers = rows * entries(evidence.observation)
        if bool(point.any()) or numbers > KEPT_NUMBERS:
            return make()
        learners = tuple((learner.content, learner.settings) for learner in evidence.observation.learners)
        told = (repr(evidence.adversary), tuple(self.labels.shape), tuple(self.labels.flatten().tolist()), len(self.inputs))
        key = (what, id(self.prior), learners, *told)
        shelf: OrderedDict[Hashable, tuple[int, LinearPrior, list[T]]] = self.context.memory.setdefault(KEPT, OrderedDict())
        if key not in shelf:
            # The prior stays beside what was made with it, so that no other can have its identity.
            shelf[key] = (numbers, self.prior, list(make()))
            while sum(size for size, _, _ in shelf.values()) > KEPT_NUMBERS and len(shelf) > 1:
                shelf.popitem(last=False)
        return shelf[key][2]


def _rows(value: Tensor) -> Tensor:
    """Return (N, p) in double precision."""
    return value.reshape(len(value), -1).double()


@dataclass(frozen=True, eq=False)
class _Weighed:
    """What every tensor says of the unknowns a = (z, n), up to what was seen.

    Attributes:
        rows: (C + N, p) by tensor: derivatives, and errors of records.
        means: (p,) mean errors.
        alone: (p,) variances with which entries err alone.
        matrix: rows D⁻¹ rowsᵀ over all tensors.
    """

    rows: Named
    means: Named
    alone: Named
    matrix: Tensor


def _weigh(columns: Named, errors: Named, release: Release) -> _Weighed:
    """Put together what every tensor says.

    Errors of N records have a mean, and a covariance S about it. C is D + ``TOGETHER`` S, where D is the noise and, entry by
    entry, the rest of S; the other part has rank N and is carried as N more unknowns, standard normal as the coordinates are.
    """
    rows, means, alone, parts = {}, {}, {}, []
    for name, column in columns.items():
        error, count = errors[name], len(errors[name])
        means[name] = error.mean(0) if count else torch.zeros_like(column[0])
        about, noise = error - means[name], release.error(name)
        own = (1 - TOGETHER) * spread_of(about) if count else torch.zeros_like(column[0])
        own = own + (noise.flatten().double() if isinstance(noise, Tensor) else noise)
        alone[name] = own + ROUNDING * column.square().sum(0).mean() + torch.finfo(torch.float64).tiny ** 0.5
        rows[name] = torch.cat([column, about * (TOGETHER / max(1, count)) ** 0.5])
        parts.append((rows[name] / alone[name]) @ rows[name].T)
    return _Weighed(rows, means, alone, torch.stack(parts).sum(0))
