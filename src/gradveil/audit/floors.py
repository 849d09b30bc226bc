"""The least mean error that any attacker of a cell can have, where Gaussian noise covers the release (Van Trees).

No clipping is needed, so this exists for plain ``gaussian_noise`` too. It is about the *mean* over records drawn from the
candidates and smoothed with N(0, `SMOOTHING`²), as the theorem needs a density; a single record can be rebuilt far better.
The theorem needs a release that is smooth in the input, too. The gradient of a network with kinks, as those of ReLU, jumps, and
jumps tell of the input what no derivative shows; so there is no floor for one (`gradveil.learning.smoothness`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradveil.audit.scene import Subject, build_learner
from gradveil.defenses import parts_of
from gradveil.defenses.base import Defense
from gradveil.defenses.clipping import Clipping
from gradveil.defenses.dp_sgd import DPSGD
from gradveil.defenses.gaussian_noise import GaussianNoise
from gradveil.defenses.none import NoDefense
from gradveil.errors import GradveilError
from gradveil.learning import Learner
from gradveil.learning.smoothness import why_not_smooth
from gradveil.randomness import Seed
from gradveil.risk.exposure import defended_release
from gradveil.risk.mean_error import MeanErrorBound, mean_error_bound, mean_error_from_spectra, smoothed_score
from gradveil.spectra.jacobians import Jacobian
from gradveil.spectra.spectrum import DENSE_ENTRIES
from gradveil.study.proved import MeanError

__all__ = ["SMOOTHING", "as_floor", "mean_error_of_cell"]

SMOOTHING = 0.1
"""τ of the prior, in units of the input's range; no floor can be above τ², that is 20 dB."""
INPUTS = 32
"""Inputs over which the mean information is taken; its interval says what that leaves open."""
PROBES = 16
"""Random directions for the trace of Jᵀ J; their scatter is part of the interval."""


def mean_error_of_cell(subject: Subject) -> MeanError:
    """Return the floor under the mean error of a cell whose updates hold one record each, or why there is none."""
    reason = _why_not(subject)
    if reason:
        return MeanError(reason=reason)
    seed = Seed(subject.cell.seed).child("mean error")
    try:
        learner = build_learner(subject.cell, subject.dataset, subject.defense)
        one = subject.candidates[:1].to(learner.device), subject.candidate_labels[:1].to(learner.device)
        kinks = why_not_smooth(learner, *one)
        if kinks:
            return MeanError(reason=f"no floor: {kinks}")
        return _floor(subject, learner, seed)
    except GradveilError as error:
        return MeanError(reason=str(error))


def _why_not(subject: Subject) -> str:
    cell, parts = subject.cell, [part for part in parts_of(subject.defense) if not isinstance(part, NoDefense)]
    noisy = [index for index, part in enumerate(parts) if _adds_gaussian_noise(part)]
    if not noisy:
        return "the release carries no Gaussian noise"
    before = parts[: noisy[0]]
    if len(noisy) > 1 or noisy[0] != len(parts) - 1 or not all(isinstance(part, Clipping) for part in before):
        return "only one Gaussian noise at the end, after nothing but clipping, has a smooth law that is known"
    if cell.batch_size * cell.clients > 1 or cell.rounds > 1:
        return "it is counted for one record in one update only"
    if isinstance(parts[-1], DPSGD) and cell.shares != "gradient":
        return "noise in each local step bends the path of the next, so the law of the update is not Gaussian"
    if subject.seen.attacked:
        return "the model was trained on the audited records, and what its weights tell about them is not counted"
    if subject.learner.running:
        return "running statistics of BatchNorm are sent beside the noisy update, as they are"
    return ""


def _adds_gaussian_noise(part: Defense) -> bool:
    return (isinstance(part, GaussianNoise) and part.std > 0) or (isinstance(part, DPSGD) and part.noise_multiplier > 0)


def _floor(subject: Subject, learner: Learner, seed: Seed) -> MeanError:
    count = min(INPUTS, len(subject.candidates))
    noise = torch.randn(subject.candidates[:count].shape, generator=seed.generator("smoothing"))
    smoothed = subject.candidates[:count] + SMOOTHING * noise
    grams, traces, std = [], [], 0.0
    for index in range(count):
        own = seed.child(index)
        release = defended_release(
            learner, smoothed[index], subject.candidate_labels[index], subject.defense, own, dtype=torch.float32
        )
        std = release.shared_noise
        if release.jacobian.inputs * release.jacobian.outputs <= DENSE_ENTRIES:
            grams.append(_gram(release.jacobian))
        else:
            traces.append(_trace(release.jacobian, own))
    size = subject.candidates[0].numel()
    if grams:
        bound = mean_error_bound(grams, noise_std=std, score=smoothed_score(size, SMOOTHING))
    else:
        # One singular value with the whole trace: this form needs no more than the sum of their squares.
        roots = [[math.sqrt(trace)] for trace in traces]
        bound = mean_error_from_spectra(roots, dimension=size, noise_std=std, score_trace=size / SMOOTHING**2)
    return as_floor(bound, std)


def as_floor(bound: MeanErrorBound, noise_std: float) -> MeanError:
    """Return a bound with its PSNR: that of the lower end of the interval, the most that is sure."""
    sure = replace(bound, value=bound.value if bound.low is None else bound.low)
    return MeanError(
        mse=bound.value,
        low=bound.low,
        high=bound.high,
        psnr=sure.psnr,
        n=bound.n,
        form=bound.form,
        confidence=bound.confidence,
        smoothing=SMOOTHING,
        noise_std=noise_std,
    )


def _gram(jacobian: Jacobian) -> np.ndarray[Any, np.dtype[np.float64]]:
    columns = jacobian.push(torch.eye(jacobian.inputs, dtype=jacobian.at.dtype, device=jacobian.at.device)).double()
    gram: np.ndarray[Any, np.dtype[np.float64]] = (columns @ columns.T).cpu().numpy()
    return gram


def _trace(jacobian: Jacobian, seed: Seed) -> float:
    """Estimate tr JᵀJ without bias, from ‖J v‖² along random v."""
    probes = torch.randn((PROBES, jacobian.inputs), generator=seed.generator("probes")).to(jacobian.at)
    return float(jacobian.push(probes).double().square().sum() / PROBES)
