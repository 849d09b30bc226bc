"""InvRE: one number for how well attackers of all ranks could do, in [0, 1] (Xu et al. 2025, Definition 2).

    T_k = Σ_{i≤k} σ_i / (σ_i - σ_{i+1})     how hard the k-th rank is to reach; σ_{d+1} = 0
    P_k = (1 / T_k) / Σ_j (1 / T_j)          how likely an attacker of rank k is
    score = Σ_k P_k τ_k                      expected error, τ_k with its noise term from `gradveil.risk.invloss`
    InvRE = 1 / (1 + exp(β (score - α)))     β = 5, α the mean score over a reference set (`gradveil.risk.calibration`)

Equal singular values make T infinite. What is done about them is a choice, named in every result:

* ``merge`` (default): values closer than the tolerance are one step; no attacker stops between them, and T counts the step once.
* ``clamp``: every gap is at least the tolerance. One near-tie then makes all later ranks nearly impossible.
* ``strict``: the formula as it stands; a tie ends it.

The tolerance (1e-4 of σ_1) is the same for rank and gaps and in all modes, and lies far above the rounding of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gradveil.errors import Unreliable, UsageError, suggest
from gradveil.risk.invloss import InvLoss, RankVariances, Residual, inversion_loss
from gradveil.spectra.spectrum import Spectrum
from gradveil.study.risks import RiskScore

__all__ = [
    "BETA",
    "BLIND_TO_NOISE",
    "GAP_RULES",
    "TOLERANCE",
    "GapRule",
    "RiskScore",
    "Weights",
    "invre",
    "rank_weights",
    "risk_score",
]

GapRule = Literal["merge", "clamp", "strict"]
GAP_RULES = ("merge", "clamp", "strict")
NOISE_FORMS = ("paper", "inverse")
TOLERANCE = 1e-4
BETA = 5.0
BLIND_TO_NOISE = (
    "under noise the smallest singular values decide, and mode leading does not compute them; score with mode gram or dense"
)
LONGEST_TAIL = 100_000
STEPS = 6


@dataclass(frozen=True, eq=False)
class Weights:
    """How likely an attacker of each rank is.

    Attributes:
        ranks: The ranks k at which attackers stop, ascending; empty where the Jacobian is zero.
        effort: T_k at these ranks.
        likelihood: P_k; sums to 1 over these ranks.
        rank: Number of singular values above the tolerance.
        merged: How many of them were too close to their neighbour to stop between.
    """

    ranks: Tensor
    effort: Tensor
    likelihood: Tensor
    rank: int
    merged: int


def rank_weights(values: Tensor, *, gap_rule: str = "merge", tolerance: float = TOLERANCE, following: float = 0.0) -> Weights:
    """Return T_k and P_k of a spectrum.

    Args:
        values: Singular values, largest first.
        gap_rule: merge, clamp or strict.
        tolerance: Share of σ_1 below which a singular value counts as zero, and a gap as a tie.
        following: The singular value after the last one given; 0 where that was the last.

    Raises:
        Unreliable: ``strict`` and no rank can be reached, because σ_1 = σ_2.
    """
    if gap_rule not in GAP_RULES:
        raise UsageError(f"there is no gap rule {gap_rule!r}{suggest(gap_rule, GAP_RULES)}")
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance is {tolerance}; give a share of the largest singular value between 0 and 1")
    sigma = values.double()
    if len(sigma) == 0 or float(sigma[0]) <= 0:
        nothing = torch.zeros(0, dtype=torch.float64)
        return Weights(nothing.long(), nothing, nothing, 0, 0)
    floor = tolerance * float(sigma[0])
    rank = int((sigma > floor).sum())
    after = torch.cat([sigma[1:rank], sigma.new_tensor([following if rank == len(sigma) and following > floor else 0.0])])
    sigma = sigma[:rank]
    gaps = (sigma - after).clamp(min=0)
    ends = torch.ones(rank, dtype=torch.bool)
    if gap_rule == "merge":
        ends = gaps > floor
        ends[-1] = True
        # The last one given may be tied with the one that follows it and was not computed; it still ends a step here.
        gaps = gaps.clamp(min=floor)
    elif gap_rule == "clamp":
        gaps = gaps.clamp(min=floor)
    effort = (sigma / gaps)[ends].cumsum(0)
    likelihood = 1 / effort
    if not float(likelihood.sum()) > 0:
        raise Unreliable("the two largest singular values are equal, so gap_rule='strict' reaches no rank; use 'merge'")
    ranks = ends.nonzero().flatten() + 1
    return Weights(ranks, effort, likelihood / likelihood.sum(), rank, rank - len(ranks))


def invre(score: float, alpha: float, beta: float = BETA) -> float:
    """Return the logistic of Definition 2 without overflow.

    >>> invre(0.3, 0.3)
    0.5
    """
    return 1 / (1 + math.exp(min(700.0, max(-700.0, beta * (score - alpha)))))


def risk_score(
    spectrum: Spectrum,
    *,
    alpha: float,
    beta: float = BETA,
    gap_rule: str = "merge",
    tolerance: float = TOLERANCE,
    residual: Residual = "complete",
    data_noise: float | Tensor | RankVariances = 0.0,
    shared_noise: float | Tensor | RankVariances = 0.0,
    noise_form: str = "inverse",
) -> RiskScore:
    """Return InvRE of one record, with the noise of a defense where it has any.

    Args:
        spectrum: All singular values, or the leading ones; then the rest is extrapolated, and ``low`` and ``high`` say how much
            that could change.
        alpha: From `gradveil.risk.calibration`.
        beta: 5 in the paper.
        gap_rule: merge, clamp or strict.
        tolerance: For rank and gaps.
        residual: complete or paper.
        data_noise: See `gradveil.risk.invloss.inversion_loss`.
        shared_noise: The same.
        noise_form: ``inverse`` takes the error the linear attacker really makes; ``paper`` divides noise terms by m or p, as
            Theorems 2 and 3 print them, which bounds nothing and all but hides noise where many values are shared.

    Raises:
        UsageError: There is noise, and only leading singular values are known: noise acts through the smallest ones.
    """
    if noise_form not in NOISE_FORMS:
        raise UsageError(f"there is no noise form {noise_form!r}{suggest(noise_form, NOISE_FORMS)}")
    if not spectrum.whole and (_acts(data_noise) or _acts(shared_noise)):
        raise UsageError(BLIND_TO_NOISE)
    loss = inversion_loss(spectrum, data_noise=data_noise, shared_noise=shared_noise, residual=residual, tolerance=tolerance)
    if spectrum.dead:
        # No rank can be reached: the attacker is left with what he had before, an error of the whole record.
        least = float(loss.signal[0]) if spectrum.energy > 0 else 1.0
        return _record(least, least, least, least, 0.0, Weights(*(torch.zeros(0),) * 3, 0, 0), alpha, beta, gap_rule)
    truncated = not spectrum.whole
    known = spectrum.values
    if truncated and len(known) > 1:
        # The last value only serves as the neighbour of the one before it.
        weights = rank_weights(known[:-1], gap_rule=gap_rule, tolerance=tolerance, following=float(known[-1]))
    else:
        weights = rank_weights(known, gap_rule=gap_rule, tolerance=tolerance)
    truncated = truncated and weights.rank >= len(known) - 1
    signal, noise = (
        float(weights.likelihood @ loss.signal[weights.ranks]),
        float(weights.likelihood @ (loss.noise if noise_form == "paper" else loss.noise_total)[weights.ranks]),
    )
    total = float(weights.likelihood @ loss.noise_total[weights.ranks])
    if not truncated:
        score = signal + noise
        return _record(score, score, score, signal, total, weights, alpha, beta, gap_rule)
    share, tail = _tail(spectrum, weights, loss)
    least, most = (1 - share) * signal, (1 - share) * signal + share * float(loss.signal[weights.ranks[-1]])
    signal = (1 - share) * signal + share * tail
    return _record(signal + noise, least + noise, most + noise, signal, total, weights, alpha, beta, gap_rule)


def _acts(noise: float | Tensor | RankVariances) -> bool:
    values = noise.values if isinstance(noise, RankVariances) else torch.as_tensor(noise)
    return bool((values != 0).any())


def _tail(spectrum: Spectrum, weights: Weights, loss: InvLoss) -> tuple[float, float]:
    """Estimate how likely attackers beyond the known ranks are, and their mean τ.

    Where σ falls smoothly, T grows per rank by -1 / (d ln σ / dk) on average, times a factor for the unevenness of gaps. The
    slope beyond the known ranks, and how τ falls there, were estimated along with the spectrum; the factor is read off the upper
    half of the known.
    """
    ranks, effort = weights.ranks, weights.effort
    last, top = int(ranks[-1]), min(spectrum.inputs, spectrum.outputs)
    beyond = torch.arange(last + 1, min(top, last + LONGEST_TAIL) + 1, dtype=torch.float64)
    if len(beyond) == 0 or spectrum.tail_ranks is None or spectrum.tail_values is None:
        return 0.0, 0.0
    half = int((ranks <= last / 2).sum().clamp(min=1)) - 1
    first = int(ranks[half])
    fallen = math.log(float(spectrum.values[first - 1] / spectrum.values[last - 1])) if last > first else 0.0
    steps = (last - first) ** 2 / fallen if fallen > 0 else 0.0
    factor = float(effort[-1] - effort[half]) / steps if steps > 0 else 1.0
    growth = factor * _growth(spectrum, beyond, last)
    likely = 1 / (float(effort[-1]) + growth.cumsum(0))
    tau = _falling(spectrum, beyond, last, float(loss.signal[last]))
    mass = float(likely.sum())
    return mass / (mass + float((1 / effort).sum())), float((likely * tau).sum() / mass)


def _growth(spectrum: Spectrum, beyond: Tensor, last: int) -> Tensor:
    """Return -1 / (d ln σ / dk) at ranks beyond the last, from the estimated singular values in a few broad steps."""
    assert spectrum.tail_ranks is not None and spectrum.tail_values is not None
    ranks, values = spectrum.tail_ranks.numpy(), spectrum.tail_values.numpy()
    floor = TOLERANCE * float(spectrum.values[0])
    edges = np.unique(np.geomspace(last, max(last + 1.0, float(ranks[-1])), STEPS + 1).round())
    curve_ranks = np.concatenate([[last], ranks])
    curve = np.log(np.maximum(np.concatenate([[float(spectrum.values[last - 1])], values]), floor))
    levels = np.interp(edges, curve_ranks, np.minimum.accumulate(curve))
    slopes = np.diff(edges) / np.maximum(-np.diff(levels), 1e-9)
    place = np.clip(np.searchsorted(edges, beyond.numpy(), side="left") - 1, 0, len(slopes) - 1)
    return torch.from_numpy(slopes[place])


def _falling(spectrum: Spectrum, beyond: Tensor, last: int, at_end: float) -> Tensor:
    """Return τ at ranks beyond the last, between the estimated ones on straight lines."""
    if spectrum.tail_ranks is None or spectrum.tail_energy is None or spectrum.energy <= 0:
        return torch.full_like(beyond, at_end)
    ranks = np.concatenate([[last], spectrum.tail_ranks.numpy()])
    levels = np.concatenate([[at_end], spectrum.tail_energy.numpy() / spectrum.energy])
    return torch.from_numpy(np.interp(beyond.numpy(), ranks, levels))


def _record(
    score: float, least: float, most: float, signal: float, total: float, weights: Weights, alpha: float, beta: float, rule: str
) -> RiskScore:
    value = invre(score, alpha, beta)
    return RiskScore(
        invre=value,
        score=score,
        signal=signal,
        noise_total=total,
        relative=1 / max(score, 1e-12),
        low=invre(most, alpha, beta),
        high=invre(least, alpha, beta),
        rank=weights.rank,
        merged=weights.merged,
        alpha=alpha,
        beta=beta,
        gap_rule=rule,
    )
