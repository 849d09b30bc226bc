"""Fisher information leakage of a release with Gaussian noise, for comparison with InvRE.

    FIL   = σ_1 / s             largest singular value over the noise (Hannun, Guo and van der Maaten 2021)
    dFIL  = ‖J‖_F² / (s² m)     mean over the input values; 1 / dFIL bounds the mean squared error of *unbiased* attackers from
                                below (Maeng et al. 2023)

Attackers with a prior are biased, so neither bounds them. Without noise both are infinite: nothing is bounded.
"""

from __future__ import annotations

import math

from gradveil.errors import UsageError
from gradveil.spectra.spectrum import Spectrum

__all__ = ["diagonal_leakage", "fisher_leakage"]


def fisher_leakage(spectrum: Spectrum, noise: float) -> float:
    """Return FIL at noise of standard deviation ``noise``; infinite without noise, 0 where nothing depends on the input."""
    _check(noise)
    if spectrum.dead:
        return 0.0
    return float(spectrum.values[0]) / noise if noise > 0 else math.inf


def diagonal_leakage(spectrum: Spectrum, noise: float) -> float:
    """Return dFIL; an estimate where the spectrum is in mode ``leading``."""
    _check(noise)
    if spectrum.dead:
        return 0.0
    return spectrum.frobenius / (noise**2 * spectrum.inputs) if noise > 0 else math.inf


def _check(noise: float) -> None:
    if not 0 <= noise < math.inf:
        raise UsageError(f"noise is {noise}; give a standard deviation from 0 on")
