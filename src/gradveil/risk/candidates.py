"""A finite list of candidates as the attacker's prior: how often a guess hits (κ)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import UsageError

__all__ = ["Prior", "closeness_prior", "identification_prior"]

CHUNK_ENTRIES = 2**24


@dataclass(frozen=True)
class Prior:
    """Probability of success of the best guess that looks at no release.

    Attributes:
        kappas: For every group that the attacker can tell apart beforehand (every label, or one group of all).
        weights: Share of the candidates in each group.
    """

    kappas: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def kappa(self) -> float:
        """Mean over the groups: what guessing reaches."""
        return sum(k * w for k, w in zip(self.kappas, self.weights, strict=True))


def identification_prior(count: int, *, labels: Tensor | None = None, guesses: int = 1, known: int = 0) -> Prior:
    """Return κ for pointing out the record among the candidates, each as likely as the others.

    Args:
        count: M, the number of candidates.
        labels: (M,) labels of the candidates where the attacker knows the record's label beforehand; None where it does not.
        guesses: Reconstructions that come with one update, of which any may hit.
        known: Other records of the update that the attacker may know, and rule out.
    """
    groups = _groups(count, labels)
    kappas = tuple(min(1.0, guesses / max(1, len(group) - known)) for group in groups)
    return Prior(kappas, tuple(len(group) / count for group in groups))


def closeness_prior(candidates: Tensor, error: float, *, labels: Tensor | None = None, guesses: int = 1, known: int = 0) -> Prior:
    """Return an upper bound of κ for coming within a mean squared error of the record.

    Candidates that one guess at distance r covers lie within 2 r of each other, so κ is at most the largest share of candidates
    within 2 r of one of them: mean squared error 4 η for η.

    Args:
        candidates: (M, ...) inputs, each as likely as the others.
        error: η; PSNR t is 10^(-t / 10).
        labels: As in `identification_prior`.
        guesses: As in `identification_prior`.
        known: As in `identification_prior`.
    """
    if candidates.ndim < 1 or candidates.numel() == 0 or not bool(torch.isfinite(candidates).all()) or not error >= 0:
        raise UsageError("closeness needs at least one candidate, finite values, and an error at least 0")
    rows = candidates.detach().reshape(len(candidates), -1).double()
    groups = _groups(len(rows), labels)
    kappas = []
    for group in groups:
        near = _most_neighbours(rows[group], error)
        kappas.append(min(1.0, guesses * near / max(1, len(group) - known)))
    return Prior(tuple(kappas), tuple(len(group) / len(rows) for group in groups))


def _groups(count: int, labels: Tensor | None) -> list[list[int]]:
    if count < 1:
        raise UsageError("there are no candidates, so no attacker can be asked to point one out")
    if labels is None:
        return [list(range(count))]
    if len(labels) != count:
        raise UsageError(f"{count} candidates need as many labels, not {len(labels)}")
    groups: dict[int, list[int]] = {}
    for index, label in enumerate(labels.tolist()):
        groups.setdefault(label, []).append(index)
    return list(groups.values())


def _most_neighbours(rows: Tensor, error: float) -> int:
    step = max(1, CHUNK_ENTRIES // max(1, rows.shape[1]))
    most = 0
    for start in range(0, len(rows), step):
        # Without the matrix-product shortcut, whose rounding could drop a duplicate.
        distance = torch.cdist(rows[start : start + step], rows, compute_mode="donot_use_mm_for_euclid_dist")
        near = distance.square() / rows.shape[1] <= 4 * error * (1 + 1e-9)
        most = max(most, int(near.sum(1).max()))
    return most
