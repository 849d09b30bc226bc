"""What one attacker with a list found: numbers that say how well each candidate explains each release, and how to weigh them.

How to weigh them is learned without the truth: the attacker lets the defended client send candidates of its own list and fits a
conditional logit to these releases, ``P(i | release) = exp(Σ_m w_m f_m(i)) / Σ_j exp(Σ_m w_m f_m(j))`` with ``w_m >= 0``, which
is convex. The same releases tell how often it will be right, and above which score a candidate is there at all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from torch import Tensor

from gradveil.attacks.listing.joint import Joint
from gradveil.attacks.listing.presence import Presence
from gradveil.significance import mcnemar

__all__ = ["Evidence", "Ranking"]

RIDGE = 1e-4
"""Weight of the prior on the weights, per release: without it, weights of a list that is told apart exactly grow for ever."""
CLEAR = 0.01
"""Probability of naming so many more of one's own releases with a feature, were it worth nothing."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What an attacker says of one list for each release.

    Attributes:
        scores: (R, N) the higher, the likelier; minus infinity where a candidate is not on the list.
        rehearsed: Share of its own releases of which it named the candidate; None where there were none.
        presence: How it tells whether the record is on the list at all.
    """

    scores: Tensor
    rehearsed: float | None
    presence: Presence


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one attacker has to say about all candidates.

    Attributes:
        name: Of the attacker.
        informed: Whether it uses more of the defense than the client's own code.
        features: (R, N, F) of the releases under attack; the higher, the better a candidate explains the release.
        own: (S, N, F) the same of releases the attacker made.
        truth: (S,) which candidate is behind each of those.
        apart: (S, N) which candidates each of those is told from: all but those that filled its update.
        draws: How often each candidate was sent through the client.
        optimal: Whether the only feature is the log-likelihood, which nothing can improve on.
        joint: What fits all candidates of a list together, where several records are in an update; one feature more.
        signs: (R, N) and (S, N) one feature more, for where the attacker names clearly more of its own releases with it.
    """

    name: str
    informed: bool
    features: Tensor
    own: Tensor
    truth: Tensor
    apart: Tensor
    draws: int = 0
    optimal: bool = False
    joint: Joint | None = None
    signs: tuple[Tensor, Tensor] | None = None

    def of(self, releases: Tensor) -> Evidence:
        """Return the same with one row for each of some releases, of which one may be asked about several times."""
        joint = self.joint and dataclasses.replace(self.joint, seen=self.joint.seen[releases])
        signs = self.signs and (self.signs[0][releases], self.signs[1])
        return dataclasses.replace(self, features=self.features[releases], joint=joint, signs=signs)

    def _fitted_together(self, listed: Tensor, chosen: Tensor) -> Evidence:
        """Return the same with one more feature, which depends on who else is on a list."""
        if self.joint is None:
            return self
        fitted = self._with(self.joint.shares(self.joint.seen, listed), self.joint.shares(self.joint.own, chosen))
        return dataclasses.replace(fitted, joint=None)

    def _with(self, seen: Tensor, own: Tensor) -> Evidence:
        """Return the same with one more feature."""
        features, more = torch.cat([self.features, seen[..., None]], -1), torch.cat([self.own, own[..., None]], -1)
        return dataclasses.replace(self, features=features, own=more)

    def _rehearsed(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, and the scores that they give to the attacker's own releases."""
        weights = self._weights(chosen)
        return weights, (self.own @ weights).masked_fill(~chosen, float("-inf"))

    def ranking(self, listed: Tensor, own_listed: Tensor) -> Ranking:
        """Rank the candidates of each release's list.

        Args:
            listed: (R, N) which candidates are on the list of each release.
            own_listed: (N, N) which candidates would be, around each of them; the attacker's own releases are told from those.
        """
        chosen = (own_listed[self.truth] & self.apart).scatter(1, self.truth[:, None], True)
        evidence = self._fitted_together(listed, chosen)
        weights, rehearsed = evidence._rehearsed(chosen)
        if self.signs is not None:
            signed = evidence._with(*self.signs)
            more, better = signed._rehearsed(chosen)
            without, by_signs = (_named(each, self.truth).tolist() for each in (rehearsed, better))
            if sum(by_signs) > sum(without) and mcnemar(by_signs, without) < CLEAR:
                evidence, weights, rehearsed = signed, more, better
        scores = (evidence.features @ weights).masked_fill(~listed, float("-inf"))
        share = float(_named(rehearsed, self.truth).double().mean()) if len(self.truth) else None
        return Ranking(scores=scores, rehearsed=share, presence=Presence.learned(rehearsed, self.truth))

    def _weights(self, chosen: Tensor) -> Tensor:
        """Return the weights under which the attacker's own releases are explained best, in units of the features."""
        size = _spread(self.own, self.truth, chosen)
        if self.optimal or not len(self.truth):
            return torch.ones_like(size) if self.optimal else 1 / size
        features = (self.own / size).numpy()
        found = fit_logit(features, self.truth.numpy(), chosen.numpy())
        return torch.from_numpy(found) / size


def _spread(features: Tensor, truth: Tensor, chosen: Tensor) -> Tensor:
    """Return how far the truth usually lies from the best other candidate in each feature: where it is decided who is named."""
    if not len(truth):
        return features.new_ones(features.shape[-1])
    others = features.masked_fill(~chosen.scatter(1, truth[:, None], False)[..., None], float("-inf")).amax(1)
    own = features[torch.arange(len(truth)), truth]
    lead = (own - others).abs()
    size = torch.where(torch.isfinite(lead), lead, torch.zeros_like(lead)).median(0).values
    return torch.where(size > 0, size, torch.ones_like(size))


def _named(scores: Tensor, truth: Tensor) -> Tensor:
    own = scores.gather(1, truth[:, None])
    return (own > scores.scatter(1, truth[:, None], float("-inf"))).all(1)


def fit_logit(
    features: npt.NDArray[np.float64], truth: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Return non-negative weights (F,) that make the right candidates likeliest.

    Args:
        features: (S, N, F).
        truth: (S,) the right candidate.
        chosen: (S, N) the candidates it is told from, itself among them.
    """
    rows = np.arange(len(truth))
    relative = features - features[rows, truth][:, None]  # the right one at zero
    allowed = np.where(chosen, 0.0, -np.inf)

    def loss(weights: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        scores = relative @ weights + allowed
        top = scores.max(1, keepdims=True)
        shares = np.exp(scores - top)
        total = shares.sum(1, keepdims=True)
        slope = np.einsum("sn,snf->f", shares / total, relative) / len(rows)
        value = float((np.log(total) + top).mean()) + 0.5 * RIDGE * float(weights @ weights)
        return value, slope + RIDGE * weights

    count = features.shape[-1]
    start = np.full(count, 1.0 / count)
    fitted = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(0.0, None)] * count)
    found: npt.NDArray[np.float64] = fitted.x
    # All weights at zero rank nothing; then no feature told anything, and any will do.
    return found if bool((found > 0).any()) else start
