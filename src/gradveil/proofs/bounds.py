"""What no attacker can exceed, in numbers: the formulas behind certificates, plain numbers in and out.

One release adds N(0, (σ C)²) to something of norm C at most (σ is the noise multiplier), and there are T of them. Compare the law
of what is sent with that of noise alone. An attack that would succeed with probability κ on noise alone, for the best guess and
over the draw of the record, succeeds on the real releases with probability at most γ(κ), the largest chance that an event of
probability κ under noise alone can have under the real law (Balle, Cherubin and Hayes 2022, https://arxiv.org/abs/2201.04845;
Hayes, Mahloujifar and Balle 2023, https://arxiv.org/abs/2302.07225). The radius is C and not 2 C, since the other side is noise.

* Every release counts (no sampling): γ(κ) = Φ(Φ⁻¹(κ) + √T / σ), exact, for rounds that depend on each other too.
* Poisson sampling at rate q, one release: γ(κ) = (1 - q) κ + q Φ(Φ⁻¹(κ) + 1 / σ), exact.
* Poisson sampling, T releases: the likelihood ratio is r = Π_t [1 - q + q exp((2 x_t - 1) / (2 σ²))]. For every λ ≥ 0,
  γ(κ) ≤ λ κ + E_P[max(0, 1 - λ / r)], with equality at the best λ. The expectation is of a value in [0, 1] under the real law
  P, so a Monte Carlo mean and an empirical Bernstein margin bound it (Maurer and Pontil 2009, https://arxiv.org/abs/0907.3740);
  λ is chosen on other draws. No assumption on the tails of r is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.study.checks import check_number, check_share, check_whole

__all__ = [
    "SampledBound",
    "advantage_bound",
    "gaussian_bound",
    "mixed_bound",
    "sampled_advantage",
    "sampled_bound",
]

Ratios = npt.NDArray[np.float64]
SAMPLES = 100_000
CONFIDENCE = 0.999
CHUNK = 50_000
"""Draws made at once, over all steps one after the other: little memory for any number of steps."""


def shift(noise_multiplier: float, steps: int) -> float:
    """Return μ = √T / σ: how many standard deviations the releases can move; 0 without releases, infinite without noise."""
    check_number("", "noise_multiplier", noise_multiplier)
    check_whole("", "steps", steps, 0)
    if steps == 0:
        return 0.0
    return math.sqrt(steps) / noise_multiplier if noise_multiplier else math.inf


def gaussian_bound(kappa: float, *, noise_multiplier: float, steps: int = 1) -> float:
    """Return Φ(Φ⁻¹(κ) + √T / σ), the most any attack can reach after T noisy releases (C1).

    Args:
        kappa: Probability of success of the best guess that ignores the releases.
        noise_multiplier: σ, the noise over the largest norm of what is released; 0 gives 1 (nothing is proved).
        steps: T, releases that the unit takes part in; 0 gives κ back.

    >>> round(gaussian_bound(1 / 256, noise_multiplier=1.0), 4)
    0.0485
    """
    check_share("", "kappa", kappa)
    mu = shift(noise_multiplier, steps)
    if mu == 0 or kappa in (0.0, 1.0):
        return 1.0 if math.isinf(mu) else float(kappa)
    return float(ndtr(ndtri(kappa) + mu))


def mixed_bound(kappas: Sequence[float], weights: Sequence[float], *, noise_multiplier: float, steps: int = 1) -> float:
    """Return E_y[Φ(Φ⁻¹(κ_y) + √T / σ)], for an attacker who knows y, such as the label, before any release (C3).

    Args:
        kappas: κ_y for every value of y.
        weights: How often each y occurs; they are brought to sum 1, and values that never occur are left out.
        noise_multiplier: σ.
        steps: T.
    """
    shares = _shares(kappas, weights)
    return math.fsum(w * gaussian_bound(k, noise_multiplier=noise_multiplier, steps=steps) for k, w in shares)


@dataclass(frozen=True)
class SampledBound:
    """A bound that Monte Carlo took part in.

    Attributes:
        bound: Holds with the confidence named.
        estimate: The value without the margin.
        confidence: Probability, over the draws, that ``bound`` holds; 1 where the formula is exact.
        samples: Draws behind the mean; 0 where the formula is exact.
    """

    bound: float
    estimate: float
    confidence: float = 1.0
    samples: int = 0


def sampled_bound(
    kappa: float,
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int = 1,
    samples: int = SAMPLES,
    confidence: float = CONFIDENCE,
    seed: Seed | None = None,
) -> SampledBound:
    """Return the most any attack can reach after T releases with Poisson sampling (C2).

    Args:
        kappa: Probability of success of the best guess that ignores the releases.
        noise_multiplier: σ.
        sampling_rate: q, probability of the record to be part of each release, by independent coins.
        steps: T.
        samples: Draws; half of them choose λ, half bound the expectation.
        confidence: Of the bound, one-sided.
        seed: Where the draws come from.
    """
    check_share("", "kappa", kappa)
    exact = _exact(kappa, noise_multiplier, sampling_rate, steps)
    if exact is not None:
        return SampledBound(exact, exact)
    tuning, judging = _draws(noise_multiplier, sampling_rate, steps, samples, seed)
    log_lambda = _best_lambda(tuning, kappa)
    mean, margin = _excess(judging, log_lambda, confidence)
    paid = kappa * math.exp(min(log_lambda, 700.0))
    # Leaving the record out of some steps never reveals more of it, so the exact value without sampling is a bound too.
    most = min(1.0, gaussian_bound(kappa, noise_multiplier=noise_multiplier, steps=steps))
    estimate = max(kappa, min(most, paid + mean))
    return SampledBound(max(kappa, min(most, paid + mean + margin)), estimate, confidence, len(judging))


def sampled_advantage(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int = 1,
    samples: int = SAMPLES,
    confidence: float = CONFIDENCE,
    seed: Seed | None = None,
) -> SampledBound:
    """Return the total variation between the sampled releases and noise alone: E_P[max(0, 1 - 1 / r)], see `advantage_bound`."""
    check_share("", "sampling_rate", sampling_rate)
    whole = advantage_bound(noise_multiplier=noise_multiplier, steps=steps)
    if sampling_rate in (0, 1) or steps <= 1 or noise_multiplier == 0:
        # One release: with probability 1 - q it is noise alone. Without noise, taking part once is seen at once.
        rate = 1 - (1 - sampling_rate) ** steps
        return SampledBound(rate * whole, rate * whole)
    _, judging = _draws(noise_multiplier, sampling_rate, steps, samples, seed)
    mean, margin = _excess(judging, 0.0, confidence)
    return SampledBound(min(whole, mean + margin), min(whole, mean), confidence, len(judging))


def advantage_bound(*, noise_multiplier: float, steps: int = 1, replaced: bool = False, collision: float = 0.0) -> float:
    """Return how much the releases can add to the probability of success, whatever the attacker knows beforehand (C4).

    Against noise alone it is the total variation 2 Φ(μ / 2) - 1 with μ = √T / σ: no attacker succeeds more often by more than
    this than the best guess from the same knowledge. With ``replaced`` the comparison is with the releases of another record
    drawn in the same way: the change has norm 2 C, so μ doubles, and what two draws share by chance is taken off.

    Args:
        noise_multiplier: σ; 0 gives 1 (nothing is proved).
        steps: T; 0 gives 0.
        replaced: Compare with another record instead of with noise.
        collision: Pr[Z = Z'], the probability that the other record is the same one; only with ``replaced``.
    """
    check_share("", "collision", collision)
    mu = shift(noise_multiplier, steps) * (2 if replaced else 1)
    variation = 1.0 if math.isinf(mu) else math.erf(mu / math.sqrt(8.0))
    return variation * (1 - collision) if replaced else variation


def _exact(kappa: float, sigma: float, rate: float, steps: int) -> float | None:
    check_share("", "sampling_rate", rate)
    if shift(sigma, steps) == 0 or rate == 0:
        return float(kappa)
    if rate == 1:
        return gaussian_bound(kappa, noise_multiplier=sigma, steps=steps)
    if sigma == 0:
        missed = (1 - rate) ** steps
        return missed * kappa + 1 - missed
    return (1 - rate) * kappa + rate * gaussian_bound(kappa, noise_multiplier=sigma) if steps == 1 else None


def _draws(sigma: float, rate: float, steps: int, samples: int, seed: Seed | None) -> tuple[Ratios, Ratios]:
    """Return log r under the real law, in two independent halves."""
    if samples < 1000:
        raise UsageError(f"samples is {samples}; a certified mean needs at least 1000 draws")
    generator = (seed or Seed(0)).numpy("sampled releases")
    log_ratios = []
    for start in range(0, samples, CHUNK):
        size = min(CHUNK, samples - start)
        total = np.zeros(size)
        for _ in range(steps):
            x = sigma * generator.standard_normal(size) + (generator.random(size) < rate)
            total += np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma**2))
        log_ratios.append(total)
    everything = np.concatenate(log_ratios)
    return everything[: samples // 2], everything[samples // 2 :]


def _best_lambda(log_ratios: Ratios, kappa: float) -> float:
    """Return the log λ at which r exceeds λ with probability κ under noise alone: Q(r > λ) = E_P[1 / r; r > λ]."""
    descending = np.sort(log_ratios)[::-1]
    with np.errstate(over="ignore"):
        tail = np.cumsum(np.exp(-descending)) / len(descending)
    return float(descending[min(int(np.searchsorted(tail, kappa)), len(descending) - 1)])


def _excess(log_ratios: Ratios, log_lambda: float, confidence: float) -> tuple[float, float]:
    """Return the mean of max(0, 1 - λ / r) and its one-sided empirical Bernstein margin."""
    check_share("", "confidence", confidence, open_ends=True)
    values = -np.expm1(np.minimum(0.0, log_lambda - log_ratios))
    n, log_risk = len(values), math.log(2 / (1 - confidence))
    margin = math.sqrt(2 * float(values.var(ddof=1)) * log_risk / n) + 7 * log_risk / (3 * (n - 1))
    return float(values.mean()), margin


def _shares(kappas: Sequence[float], weights: Sequence[float]) -> list[tuple[float, float]]:
    if len(kappas) != len(weights) or any(not (math.isfinite(w) and w >= 0) for w in weights):
        raise UsageError("every kappa needs a weight, a number at least 0")
    total = math.fsum(weights)
    if total == 0:
        raise UsageError("no group holds a candidate, so there is nothing to bound")
    return [(kappa, weight / total) for kappa, weight in zip(kappas, weights, strict=True) if weight > 0]
