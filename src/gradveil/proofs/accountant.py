"""How much differential privacy a number of noisy releases costs: plain numbers in, epsilon out.

One release adds N(0, (σ C)²) to a sum in which one unit (a record, a client) has a share of norm C at most; σ is the noise
multiplier.

* Every unit in every release (q = 1): the T-fold Gaussian mechanism is a Gaussian mechanism with μ = √T / σ, and its curve
  δ(ε) = Φ(μ/2 - ε/μ) - exp(ε) Φ(-μ/2 - ε/μ) is exact (Balle and Wang 2018, https://arxiv.org/abs/1805.06530).
* Every unit in each release by an independent coin of probability q (Poisson sampling): an upper bound by Rényi differential
  privacy of the sampled Gaussian (Mironov, Talwar and Zhang 2019, https://arxiv.org/abs/1908.10530), converted as by Canonne,
  Kamath and Steinke 2020 (https://arxiv.org/abs/2004.00010). ``method="prv"`` asks Opacus for a tighter one (extra ``dp``).

Neighbours differ by adding or removing one unit, or by one unit whose contribution is set to zero. For neighbours that differ by
*replacing* one unit the change has norm 2 C: count half the noise multiplier.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr, logsumexp

from gradveil.errors import UsageError
from gradveil.study.checks import check_choice, check_number, check_share, check_whole

__all__ = ["Method", "epsilon", "gaussian_delta", "gaussian_epsilon", "noise_for", "sampled_gaussian_rdp"]

Method = Literal["rdp", "prv"]
LOG_EXCESS = tuple(math.log(0.02) + 0.3 * step for step in range(39))
"""log(α - 1) of the orders α of Rényi privacy that are tried first; every order gives a valid bound, and the best is kept."""
GRID = 16
"""Points per standard deviation of the quadrature; its error falls exponentially with it."""
MOST_POINTS = 2_000_000
"""Of the quadrature; orders that need more are left out, which only makes the bound looser."""
FARTHEST = 1e100
"""Standard deviations beyond which μ² overflows on the way to ε; what is left there is no privacy in any case."""
REACH = 12.0
"""Standard deviations to either side that the quadrature covers."""


def gaussian_delta(mu: float, eps: float) -> float:
    """Return the exact δ(ε) of a Gaussian mechanism whose means lie μ standard deviations apart."""
    if mu == 0:
        return 0.0
    upper, lower = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
    # exp(a) - exp(b) without cancellation; both logarithms are at most 0.
    return float(-math.exp(upper) * math.expm1(min(0.0, lower - upper)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact ε(δ) of a Gaussian mechanism with parameter μ.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    if mu > FARTHEST:
        return math.inf
    high = 1.0
    while gaussian_delta(mu, high) > delta:
        high *= 2
    return float(brentq(lambda eps: gaussian_delta(mu, eps) - delta, 0.0, high, xtol=1e-12))


def sampled_gaussian_rdp(noise_multiplier: float, sampling_rate: float, order: float) -> float:
    """Return the Rényi divergence of one sampled Gaussian release: log E[r(x)^α] / (α - 1), with x ~ N(0, σ²).

    r(x) = 1 - q + q exp((2x - 1) / (2σ²)). The expectation is a one-dimensional integral of an analytic function that falls off
    as a Gaussian, for which the trapezoidal rule converges exponentially; so one formula serves whole and broken orders.
    """
    sigma, q = noise_multiplier, sampling_rate
    x: npt.NDArray[np.float64] = np.arange(-REACH * sigma, order + REACH * sigma, min(sigma, sigma**2) / GRID)
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
    density = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi)) + math.log(x[1] - x[0])
    return max(0.0, float(logsumexp(order * ratio + density))) / (order - 1)


def epsilon(
    *, noise_multiplier: float, steps: int = 1, sampling_rate: float = 1.0, delta: float = 1e-5, method: Method = "rdp"
) -> float:
    """Return ε(δ) after a number of releases.

    Args:
        noise_multiplier: Standard deviation of the noise on the sum, over the largest norm of one unit's share.
        steps: Releases the unit may be part of.
        sampling_rate: Probability of being part of each, by independent coins; 1 is every time.
        delta: Probability with which ε may fail.
        method: For a sampling rate below 1: ``rdp`` (an upper bound) or ``prv`` (tighter; needs Opacus).

    >>> round(epsilon(noise_multiplier=1.0, steps=1000, sampling_rate=0.01), 2)
    2.1
    """
    _check(noise_multiplier, steps, sampling_rate, delta, method)
    if steps == 0 or sampling_rate == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    everyone = gaussian_epsilon(math.sqrt(steps) / noise_multiplier, delta)
    if sampling_rate == 1:
        return everyone
    sampled = _prv if method == "prv" else _rdp
    # Leaving units out never reveals more of them, so the exact value without sampling is a bound too.
    return min(everyone, sampled(noise_multiplier, steps, sampling_rate, delta))


def _rdp(noise_multiplier: float, steps: int, sampling_rate: float, delta: float) -> float:
    def bound(log_excess: float) -> float:
        order = 1 + math.exp(log_excess)
        if (order + 2 * REACH * noise_multiplier) * GRID / min(noise_multiplier, noise_multiplier**2) > MOST_POINTS:
            return math.inf
        divergence = steps * sampled_gaussian_rdp(noise_multiplier, sampling_rate, order)
        return divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)

    tried = [bound(each) for each in LOG_EXCESS]
    best = int(np.argmin(tried))
    if not math.isfinite(tried[best]):
        return math.inf
    around = (LOG_EXCESS[max(0, best - 1)], LOG_EXCESS[min(len(LOG_EXCESS) - 1, best + 1)])
    refined = minimize_scalar(bound, bounds=around, method="bounded", options={"xatol": 1e-3})
    return max(0.0, min(tried[best], float(refined.fun)))


def _prv(noise_multiplier: float, steps: int, sampling_rate: float, delta: float) -> float:
    try:
        from opacus.accountants import PRVAccountant
    except ImportError as error:
        raise UsageError("method 'prv' asks Opacus, which is not installed; pip install 'gradveil[dp]', or use 'rdp'") from error
    accountant = PRVAccountant()
    accountant.history = [(noise_multiplier, sampling_rate, steps)]
    with warnings.catch_warnings():
        # It first asks its own Rényi accountant for a range, and warns that that range could be narrower.
        warnings.simplefilter("ignore", UserWarning)
        return float(accountant.get_epsilon(delta=delta))


def noise_for(
    target_epsilon: float, *, steps: int = 1, sampling_rate: float = 1.0, delta: float = 1e-5, method: Method = "rdp"
) -> float:
    """Return the smallest noise multiplier (to three digits, rounded up) that keeps ε at or below the target."""
    check_number("", "epsilon", target_epsilon, open_below=True)

    def spent(sigma: float) -> float:
        return epsilon(noise_multiplier=sigma, steps=steps, sampling_rate=sampling_rate, delta=delta, method=method)

    low, high = 0.0, 1.0
    while spent(high) > target_epsilon:
        low, high = high, 2 * high
    while high - low > 5e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > target_epsilon else (low, middle)
    return high


def _check(noise_multiplier: float, steps: int, sampling_rate: float, delta: float, method: str) -> None:
    check_number("", "noise_multiplier", noise_multiplier)
    check_whole("", "steps", steps, 0)
    check_share("", "sampling_rate", sampling_rate)
    check_share("", "delta", delta, open_ends=True)
    check_choice("", "method", method, ("rdp", "prv"))
