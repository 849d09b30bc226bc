"""A floor under the mean squared error of every attacker, biased ones and those with a prior included (Van Trees).

A release y = f(x) + N(0, s² I) with Jacobian J of f carries the Fisher information I(x) = Jᵀ J / s² about the input. With S the
covariance of the prior's score ∇ log π(x), every estimate obeys

    E |x̂ - x|² / d  >=  (1 / d) tr((E I(x) + S)⁻¹)  >=  d / (E tr I(x) + tr S),

the mean being over inputs and noise (Van Trees 1968; Gill and Levit, Bernoulli 1995). No clipping is needed, only Gaussian noise
and a smooth f: off the gradient of a ReLU network, which jumps, an attacker reads what J does not show, and the formula is no
floor there (tests/unit/audit/test_floors.py has a network that breaks it). It bounds the *mean*: single records can be rebuilt
far better. Real images have no smooth density; smoothed with N(0, τ²) they have one, with S at most I / τ², and the floor is then
about the smoothed images, J being taken at them.

The mean over inputs is that of a sample, so the floor comes with an interval over the sample. The trace of an inverse is convex,
so the linear interval of the first form errs low, which is the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

from gradveil.errors import UsageError
from gradveil.study.checks import check_number, check_share, check_whole

__all__ = ["MeanErrorBound", "mean_error_bound", "mean_error_from_spectra", "smoothed_score"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MeanErrorBound:
    """The least mean squared error per entry that any attacker has, over the prior.

    Attributes:
        value: The floor with the sample's mean information.
        low: Lower limit of its interval over the sample; None where a single input leaves none.
        high: Upper limit.
        n: Inputs in the sample.
        form: ``matrix`` (the tighter) or ``trace``.
        confidence: Of the interval.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    form: str
    confidence: float

    @property
    def psnr(self) -> float | None:
        """The floor as a ceiling on the PSNR of the mean error, in dB; None where the floor is 0."""
        return -10 * math.log10(self.value) if self.value > 0 else None


def smoothed_score(dimension: int, smoothing: float) -> Array:
    """Return I / τ², the largest score covariance of a prior smoothed with N(0, τ²)."""
    if not (math.isfinite(smoothing) and smoothing > 0):
        raise UsageError(f"smoothing is {smoothing!r}; it must be above 0, or the prior has no score")
    return np.eye(dimension) / smoothing**2


def mean_error_bound(
    grams: Sequence[npt.ArrayLike], *, noise_std: float, score: npt.ArrayLike, steps: int = 1, confidence: float = 0.95
) -> MeanErrorBound:
    """Return (1 / d) tr((E I + S)⁻¹) from Jᵀ J of a sample of inputs.

    Args:
        grams: One (d, d) matrix Jᵀ J for each input.
        noise_std: s, the standard deviation of the noise; 0 gives a floor of 0 (nothing is proved).
        score: (d, d) covariance S of the prior's score; see `smoothed_score`.
        steps: Releases of the same function with fresh noise.
        confidence: Of the interval over the sample.
    """
    matrices = [np.asarray(gram, dtype=np.float64) for gram in grams]
    prior = np.asarray(score, dtype=np.float64)
    if not matrices or prior.ndim != 2 or any(m.shape != prior.shape or prior.shape[0] != prior.shape[1] for m in matrices):
        raise UsageError("the mean error needs at least one matrix JᵀJ, all of the shape (d, d) of the score covariance")
    if not all(np.isfinite(m).all() for m in (*matrices, prior)):
        raise UsageError("a matrix JᵀJ or the score covariance has entries that are not finite")
    n, scale = len(matrices), _scale(noise_std, steps)
    if math.isinf(scale):
        return MeanErrorBound(0.0, 0.0, 0.0, n, "matrix", confidence)
    mean = scale * sum(matrices[1:], start=matrices[0].copy()) / n + prior
    spectrum, basis = np.linalg.eigh(mean)
    if spectrum[0] <= 1e-12 * max(spectrum[-1], 0.0) or spectrum[0] <= 0:
        raise UsageError("some direction has neither prior nor information, so no floor exists; give a score of full rank")
    dimension = len(spectrum)
    inverse_square = (basis / spectrum**2) @ basis.T
    # First-order change of the floor with each input's information.
    slopes = np.array([-scale * float(np.sum(inverse_square * m)) / dimension for m in matrices])
    half = _half_width(slopes, confidence)
    value = float(np.sum(1 / spectrum)) / dimension
    low, high = (None, None) if half is None else (max(0.0, value - half), value + half)
    return MeanErrorBound(value, low, high, n, "matrix", confidence)


def mean_error_from_spectra(
    spectra: Sequence[npt.ArrayLike],
    *,
    dimension: int,
    noise_std: float,
    score_trace: float,
    steps: int = 1,
    confidence: float = 0.95,
) -> MeanErrorBound:
    """Return d / (E tr I + tr S) from the singular values of the Jacobians, which is all this form needs.

    Args:
        spectra: For every input, the singular values of its Jacobian (all that are not zero).
        dimension: d, entries of the input.
        noise_std: s; 0 gives a floor of 0.
        score_trace: tr S; d / τ² for a prior smoothed with N(0, τ²).
        steps: Releases of the same function with fresh noise.
        confidence: Of the interval over the sample.
    """
    traces = np.array([float(np.square(np.asarray(values, dtype=np.float64)).sum()) for values in spectra])
    if not len(traces) or not np.isfinite(traces).all() or dimension < 1:
        raise UsageError("the mean error needs finite singular values of at least one Jacobian and a dimension at least 1")
    if not (math.isfinite(score_trace) and score_trace > 0):
        raise UsageError(f"score_trace is {score_trace!r}; it must be above 0, or the prior has no score")
    scale = _scale(noise_std, steps)
    if math.isinf(scale):
        return MeanErrorBound(0.0, 0.0, 0.0, len(traces), "trace", confidence)
    information = scale * float(traces.mean())
    half = _half_width(scale * traces, confidence)

    def floor(trace: float) -> float:
        return dimension / (max(0.0, trace) + score_trace)

    low, high = (None, None) if half is None else (floor(information + half), floor(information - half))
    return MeanErrorBound(floor(information), low, high, len(traces), "trace", confidence)


def _scale(noise_std: float, steps: int) -> float:
    check_number("", "noise_std", noise_std)
    check_whole("", "steps", steps, 0)
    if steps == 0:
        return 0.0
    return steps / noise_std**2 if noise_std else math.inf


def _half_width(values: Array, confidence: float) -> float | None:
    check_share("", "confidence", confidence, open_ends=True)
    n = len(values)
    if n < 2:
        return None
    return float(student.ppf(0.5 + confidence / 2, n - 1) * values.std(ddof=1) / math.sqrt(n))
