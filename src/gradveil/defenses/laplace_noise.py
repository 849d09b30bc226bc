"""Laplace noise on the update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.gaussian_noise import NoisyUpdateAdversary
from gradveil.records import Update
from gradveil.study.checks import check_number
from gradveil.tensors import check_finite

__all__ = ["LaplaceNoise", "draw_laplace"]


def draw_laplace(like: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Return Laplace noise of density exp(-|z| / scale) / (2 scale), as the difference of two exponential draws."""
    # In single precision at least, and from u in [0, 1): log1p(-u) is then finite, so no draw is infinite.
    wide = torch.promote_types(like.dtype, torch.float32)
    u, v = (torch.rand(like.shape, generator=generator, device=like.device, dtype=wide) for _ in range(2))
    return (scale * (torch.log1p(-v) - torch.log1p(-u))).to(like.dtype)


@DEFENSES.register(
    DefenseCard(
        name="laplace_noise",
        summary="Adds independent Laplace noise to every entry of the update.",
        paper="Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019",
        url="https://arxiv.org/abs/1906.08935",
        cost="two random numbers per weight; accuracy falls as the noise nears the size of the update's entries",
        weakness="as Gaussian noise of the same variance: averages out over rounds on the same data",
        acts_on=("update",),
        ladder=({"scale": 1e-4}, {"scale": 1e-3}, {"scale": 1e-2}, {"scale": 1e-1}),
        off={"scale": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class LaplaceNoise(Defense):
    """Laplace noise, elementwise, on all weights: ``sent = u + Lap(0, scale)``.

    ``scale`` is the b of the density exp(-|z| / b) / 2b, not a standard deviation: the variance is 2 b².

    Departs from the paper: none in the mathematics. Where training takes several steps, noise is added once, to the update.

    Cost: one pass over the weights. Known weakness: as `GaussianNoise`. The attacker treats it as Gaussian noise of the same
    variance, std = √2 · scale: least squares ranks candidates rightly, though least absolute deviations would need half the
    entries for the same certainty.

    Attributes:
        scale: The b of the Laplace law; 0 is off.
    """

    scale: float = 0.01

    def __post_init__(self) -> None:
        """Refuse a negative or endless amount of noise."""
        check_number("laplace_noise", "scale", self.scale)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Add the noise; the same seed, round and position in a chain give the same bits."""
        check_finite(update.weights)
        if self.scale == 0:
            return update, state
        generator = view.generator("laplace_noise")
        noisy = {name: value + draw_laplace(value, self.scale, generator) for name, value in update.weights.items()}
        return update.replace(weights=noisy), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who knows the noise by its equivalent standard deviation."""
        return NoisyUpdateAdversary(math.sqrt(2) * self.scale) if self.scale else OpenAdversary()
