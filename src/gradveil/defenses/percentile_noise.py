"""Gaussian noise as large as the update: its size is a share of a high percentile of the update's own entries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.parts.label_evidence import label_under_noise
from gradveil.records import Observation, Update, WhatArrives
from gradveil.study.checks import check_number
from gradveil.tensors import Named, check_finite

__all__ = ["PercentileNoise", "PercentileNoiseAdversary", "estimate_scale", "magnitude_percentile"]

BINS = 160
"""Magnitudes the attacker tells apart when it takes the noise off the distribution of what was seen."""
SWEEPS = 150
"""Steps of expectation-maximisation per trial of the noise."""
TRIALS = 24
"""Halvings of the interval in which the noise must lie."""


def magnitude_percentile(update: Named, percentile: float) -> Tensor:
    """Return a percentile of |u| over all entries of all tensors that are not zero, in double precision; 0 where there are none.

    Between two entries it is interpolated linearly, as numpy does. `torch.quantile` refuses more than 16 million entries, so the
    largest are selected instead, as many as there may be from the lower neighbour on, which is also cheaper than sorting all.
    """
    found = [value.reshape(-1) for value in update.values() if value.numel()]
    if not found:
        return torch.zeros((), dtype=torch.float64)
    entries = torch.cat(found).abs()
    falling = entries.topk(entries.numel() - math.floor(percentile / 100 * (entries.numel() - 1))).values.double()
    last = (entries != 0).sum() - 1  # place of the smallest that counts, were all of them sorted falling
    place = percentile / 100 * last.clamp_min(0).double()
    below = place.floor()
    low = falling.gather(0, (last.clamp_min(0) - below.long()).reshape(1))
    high = falling.gather(0, (last - below.long() - 1).clamp_min(0).reshape(1))
    return (low + (place - below) * (high - low)).reshape(())


def estimate_scale(seen: Tensor, share: float, percentile: float) -> float:
    """Return the standard deviation s of the noise, from noisy entries alone.

    The noise is s = share · q, with q the percentile of the clean magnitudes, and clean and noisy entries differ by N(0, s²).
    For a trial s, expectation-maximisation finds the distribution of clean magnitudes that explains best what was seen; its
    percentile falls as s rises, while s / share rises. Where they meet is the estimate. It takes exact zeros of the clean update
    for small entries, so it errs to the low side where there are many.
    """
    magnitudes = seen.detach().reshape(-1).abs().double().cpu()
    largest = float(magnitudes.max()) if magnitudes.numel() else 0.0
    if largest == 0:
        return 0.0
    # A grid that is fine near zero, where most entries of a gradient are, and reaches the largest.
    edges = largest * torch.linspace(0, 1, BINS + 1, dtype=torch.float64) ** 3
    counts = torch.histogram(magnitudes, edges).hist
    low, high = 0.0, float(magnitudes.square().mean().sqrt())
    for _ in range(TRIALS):
        trial = (low + high) / 2
        if _clean_percentile(counts, edges, trial, percentile) > trial / share:
            low = trial
        else:
            high = trial
    return (low + high) / 2


def _clean_percentile(counts: Tensor, edges: Tensor, std: float, percentile: float) -> float:
    """Return the percentile of clean magnitudes, deconvolved from a histogram of noisy ones."""
    centres = (edges[:-1] + edges[1:]) / 2
    # (seen bin, clean bin): the chance that |centre + std z| falls between two edges.
    above = torch.special.ndtr((edges[:, None] - centres) / std)
    under = torch.special.ndtr((-edges[:, None] - centres) / std)
    chance = ((above[1:] - above[:-1]) + (under[:-1] - under[1:])).clamp_min(1e-300)
    share = counts / counts.sum()
    clean = share.clone().clamp_min(1e-12)
    for _ in range(SWEEPS):
        clean = clean * (chance.T @ (share / (chance @ clean)))
    total = (clean / clean.sum()).cumsum(0)
    index = min(int(torch.searchsorted(total, percentile / 100)), BINS - 1)
    before = float(total[index - 1]) if index else 0.0
    inside = (percentile / 100 - before) / max(float(total[index]) - before, 1e-300)
    return float(edges[index] + inside * (edges[index + 1] - edges[index]))


@dataclass(frozen=True)
class PercentileNoiseAdversary(OpenAdversary):
    """Does not know the noise, because it depends on the clean update, but estimates it from what it sees.

    Of an aggregate only the mean is seen; its noise is estimated as if it came from one client with the mean's own percentile.
    """

    share: float
    percentile: float

    def arrives(self, observation: Observation) -> WhatArrives:
        """Tell the estimated noise per entry, or none where nothing but zeros was sent; every entry is noisy, none exact."""
        seen = torch.cat([value.reshape(-1) for value in observation.update.weights.values()])
        share = self.share / math.sqrt(observation.threat.clients)
        std = estimate_scale(seen, share, self.percentile) or None
        return super().arrives(observation).replace(exact=frozenset, noise_std=std, label_evidence=label_under_noise())


@DEFENSES.register(
    DefenseCard(
        name="percentile_noise",
        summary="Adds Gaussian noise whose size is a multiple of a high percentile of the update's own entries.",
        paper="Hatamizadeh et al., Do Gradient Inversion Attacks Make Federated Learning Unsafe?, IEEE TMI 2023",
        url="https://arxiv.org/abs/2202.06924",
        cost="one random number per weight and the selection of two entries; accuracy falls as the noise nears the size of the "
        "update's entries",
        weakness="averages out over rounds on the same data; the noise follows the data, so it carries no differential-privacy "
        "guarantee at any strength",
        acts_on=("update",),
        ladder=({"share": 0.01}, {"share": 0.1}, {"share": 0.5}, {"share": 1.0}, {"share": 2.0}),
        off={"share": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class PercentileNoise(Defense):
    """Noise in units of the update: ``sent = u + N(0, s²)``, with ``s = share · percentile_95(|u_i|, u_i ≠ 0)``.

    One s for all tensors, from the entries of all of them together, once per round: the Gaussian privacy filter that
    Hatamizadeh et al. use with NVIDIA FLARE. Unlike ``gaussian_noise`` it is as strong on a gradient as on weights after local
    steps.

    Departs from the paper: buffers of the model neither count nor get noise; they are sent by their own rule. The released filter
    takes the percentile over BatchNorm statistics too.

    Cost: one pass and a selection. Known weakness: independent noise in every round averages out; and a few large entries, as a
    last layer has them, stay far above noise that is measured at the 95th percentile. The attacker estimates the noise: on a
    LeNet within 11 % of the truth, 23 % too low where half of the clean entries are zero (ReLU, one example).

    Attributes:
        share: σ₀, the noise over the percentile; 0 is off.
        percentile: Of the magnitudes that are not zero.
    """

    share: float = 0.1
    percentile: float = 95.0

    def __post_init__(self) -> None:
        """Refuse a negative share and a percentile that is none."""
        check_number("percentile_noise", "share", self.share)
        check_number("percentile_noise", "percentile", self.percentile, open_below=True, below=100)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Measure the update and add the noise; the same seed, round and position in a chain give the same bits."""
        check_finite(update.weights)
        if self.share == 0:
            return update, state
        std = self.share * magnitude_percentile(update.weights, self.percentile)  # a tensor: the host need not wait for it
        generator = view.generator("percentile_noise")

        def noisy(value: Tensor) -> Tensor:
            return value + std.to(value) * torch.randn(value.shape, generator=generator, device=value.device, dtype=value.dtype)

        return update.replace(weights={name: noisy(value) for name, value in update.weights.items()}), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who estimates the noise."""
        return PercentileNoiseAdversary(self.share, self.percentile) if self.share else OpenAdversary()
