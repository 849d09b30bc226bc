"""Certificates: what no attacker can exceed, for releases with Gaussian noise; for everything else, why there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradveil.client.guarantees import privacy_of
from gradveil.defenses.base import Defense
from gradveil.proofs.bounds import CONFIDENCE, SAMPLES, advantage_bound, mixed_bound, sampled_advantage, sampled_bound
from gradveil.randomness import Seed
from gradveil.risk.candidates import Prior, closeness_prior, identification_prior
from gradveil.study.checks import check_whole
from gradveil.study.proved import Certificate, Guarantee

__all__ = ["Certificate", "certificate_from", "certificate_of"]

PSNR = (15.0, 20.0, 25.0)


def certificate_of(
    defense: Defense,
    *,
    candidates: Tensor | int,
    labels: Tensor | None = None,
    guesses: int = 1,
    known: int | None = None,
    psnr: Sequence[float] = PSNR,
    steps: int = 1,
    sampling_rate: float = 1.0,
    delta: float = 1e-5,
    layers: int | None = None,
    samples: int = SAMPLES,
    confidence: float = CONFIDENCE,
    seed: Seed | None = None,
) -> Certificate:
    """Return what no attacker can exceed against a defense or chain, or why there is no certificate.

    Certified are ``clipping + gaussian_noise`` (the whole update, so every record of the client with it) and ``dp_sgd`` (one
    record, even if the attacker knows all others), with the same neighbours allowed as in `gradveil.risk.privacy_of`.

    Args:
        defense: A defense or chain.
        candidates: As in `certificate_from`.
        labels: As in `certificate_from`.
        guesses: As in `certificate_from`.
        known: As in `certificate_from`.
        psnr: As in `certificate_from`.
        steps: Noisy releases a unit takes part in; see `gradveil.risk.privacy_of`.
        sampling_rate: Poisson sampling of records, for ``dp_sgd`` only.
        delta: For ε, which is told beside the certificate.
        layers: Number of layers, needed where ``clipping`` acts on each by itself.
        samples: As in `certificate_from`.
        confidence: As in `certificate_from`.
        seed: As in `certificate_from`.
    """
    proved = privacy_of(defense, steps=steps, sampling_rate=sampling_rate, delta=delta, layers=layers)
    return certificate_from(
        proved,
        candidates=candidates,
        labels=labels,
        guesses=guesses,
        known=known,
        psnr=psnr,
        samples=samples,
        confidence=confidence,
        seed=seed,
    )


def certificate_from(
    proved: Guarantee,
    *,
    candidates: Tensor | int,
    labels: Tensor | None = None,
    guesses: int = 1,
    known: int | None = None,
    psnr: Sequence[float] = PSNR,
    samples: int = SAMPLES,
    confidence: float = CONFIDENCE,
    seed: Seed | None = None,
) -> Certificate:
    """Return the certificate that follows from a guarantee, whose noise, releases and unit are all it needs.

    Args:
        proved: What `gradveil.risk.privacy_of` or one of its relatives returned.
        candidates: (M, ...) inputs in [0, 1] among which the record was drawn, or only their number (then nothing is said of
            PSNR).
        labels: (M,) labels of the candidates, where the attacker knows the record's label beforehand. An attacker who reads the
            label off the update needs no allowance.
        guesses: Reconstructions made from one update; each record of a batch counts as hit if any of them hits it.
        known: Candidates that the attacker may rule out beforehand. None takes the other records of the update where the unit is
            a record (its noise must hide it even from someone who knows them), else 0.
        psnr: In dB; a bound is given for each.
        samples: Monte Carlo draws, for a sampling rate below 1 and several steps.
        confidence: Of bounds by Monte Carlo, one-sided, for each bound by itself.
        seed: Where Monte Carlo draws from.
    """
    for name, value, least in (("guesses", guesses, 1), ("known", known or 0, 0)):
        check_whole("", name, value, least)
    if proved.epsilon is None or proved.noise_multiplier is None:
        return Certificate(reason=proved.reason)
    count = candidates if isinstance(candidates, int) else len(candidates)
    known = (guesses - 1 if proved.unit == "record" else 0) if known is None else known
    pointing = identification_prior(count, labels=labels, guesses=guesses, known=known)
    bounds = _Bounds(proved, samples, confidence, seed)
    near = {}
    if not isinstance(candidates, int):
        for level in psnr:
            error = 10 ** (-level / 10)
            near[f"{level:g}"] = bounds.most(closeness_prior(candidates, error, labels=labels, guesses=guesses, known=known))
    return Certificate(
        identified=bounds.most(pointing),
        psnr=near,
        advantage=bounds.advantage(),
        unit=proved.unit,
        noise_multiplier=proved.noise_multiplier,
        steps=proved.steps,
        sampling_rate=proved.sampling_rate,
        epsilon=proved.epsilon if math.isfinite(proved.epsilon) else None,
        delta=proved.delta,
        candidates=count,
        chance=pointing.kappa,
        label_known=labels is not None,
        confidence=confidence if bounds.sampled else 1.0,
        assumptions=_assumptions(proved, count, labels is not None, guesses),
    )


@dataclass(frozen=True)
class _Bounds:
    """The bounds of one mechanism, by formula or by Monte Carlo."""

    proved: Guarantee
    samples: int
    confidence: float
    seed: Seed | None

    @property
    def sampled(self) -> bool:
        """Whether Monte Carlo is needed."""
        return 0 < self.proved.sampling_rate < 1 and self.proved.steps > 1

    def most(self, prior: Prior) -> float:
        """Return the mean over the groups of the prior."""
        sigma, steps = self.proved.noise_multiplier or 0.0, self.proved.steps
        if self.proved.sampling_rate == 1:
            return mixed_bound(prior.kappas, prior.weights, noise_multiplier=sigma, steps=steps)
        bounds = {kappa: self._sampled(kappa) for kappa in set(prior.kappas)}
        return min(1.0, math.fsum(w * bounds[k] for k, w in zip(prior.kappas, prior.weights, strict=True)))

    def _sampled(self, kappa: float) -> float:
        return sampled_bound(kappa, **self._mechanism()).bound

    def advantage(self) -> float:
        """Return the bound that holds whatever the attacker knows beforehand."""
        if self.proved.sampling_rate == 1:
            return advantage_bound(noise_multiplier=self.proved.noise_multiplier or 0.0, steps=self.proved.steps)
        return sampled_advantage(**self._mechanism()).bound

    def _mechanism(self) -> dict[str, Any]:
        return {
            "noise_multiplier": self.proved.noise_multiplier,
            "sampling_rate": self.proved.sampling_rate,
            "steps": self.proved.steps,
            "samples": self.samples,
            "confidence": self.confidence,
            "seed": self.seed,
        }


def _assumptions(proved: Guarantee, count: int, label_known: bool, guesses: int) -> tuple[str, ...]:
    whose = "nothing of the client" if proved.unit == "client" else "nothing of the record"
    knows = "its label and the list of candidates" if label_known else "the list of candidates"
    return (
        f"the record was drawn from {count} candidates, all equally likely, and of it the attacker knows {knows} beforehand",
        f"{whose} is in the model at the start or in anything else that is sent; {proved.steps} noisy "
        f"release{'s are' if proved.steps != 1 else ' is'} all there is",
        *([f"one update holds {guesses} records, and a record counts where any of {guesses} guesses hits it"] * (guesses > 1)),
        # The first two of the guarantee are about neighbours and the number of releases, which are said above for this reading.
        *proved.assumptions[1 if proved.sampling_rate < 1 else 2 :],
    )
