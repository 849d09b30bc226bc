"""One step of Adam (Kingma and Ba 2015) on one tensor, for everyone who takes one: clients, servers, attackers and defenses.

They do not all take the same step, and results must not change by a bit with the place the formula stands in; so what differs is
named in an `AdamRule` instead of being written down again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["AdamRule", "AdamStep", "adam_step", "begun"]


@dataclass(frozen=True)
class AdamRule:
    """What one Adam has that another has not.

    Attributes:
        keep: Share of the old mean and of the old mean square that stays.
        take: Share of the new gradient and of its square that comes in. It is a field of its own because 1 - 0.9 is not 0.1 in
            double precision.
        interpolated: Whether the means move by ``take`` of the difference (`torch.lerp`) instead of being weighted sums; the two
            differ in the last bits.
        corrected: Whether the means are corrected for having begun at zero.
        inside: Added under the root. It keeps the root's derivative finite where a gradient is exactly zero (dead units), for
            those who differentiate through the step.
        outside: Added to the root.
    """

    keep: tuple[float, float] = (0.9, 0.999)
    take: tuple[float, float] = (0.1, 0.001)
    interpolated: bool = False
    corrected: bool = True
    inside: float = 0.0
    outside: float = 1e-8


class AdamStep(NamedTuple):
    """What one step gives: what to subtract, and the two means to remember."""

    move: Tensor
    mean: Tensor
    square: Tensor


USUAL = AdamRule()


Shares = tuple[float | Tensor, float | Tensor]


def begun(step: int, rule: AdamRule = USUAL) -> tuple[float, float]:
    """Return how much of the two means is there after this step, both having begun at zero."""
    first, second = (1 - keep ** (step + 1) for keep in rule.keep)
    return first, second


def adam_step(
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int | Shares,
    *,
    rate: float | Tensor | None = None,
    rule: AdamRule = USUAL,
) -> AdamStep:
    """Return what to subtract from a tensor with this gradient; nothing is changed in place, and vmap and autograd go through.

    Args:
        gradient: At the tensor.
        mean: What was remembered of earlier gradients; zeros at the start.
        square: What was remembered of their squares.
        step: Number of the step, from 0; or what its `begun` gives, where a recorded step cannot count.
        rate: Learning rate; None gives the direction, for those who look at it before they go.
        rule: Which Adam.
    """
    mean, square = (
        old.lerp(new, take) if rule.interpolated else keep * old + take * new
        for old, new, keep, take in zip((mean, square), (gradient, gradient.square()), rule.keep, rule.take, strict=True)
    )
    first, second = mean, square
    if rule.corrected:
        shares = begun(step, rule) if isinstance(step, int) else step
        first, second = (each / share for each, share in zip((mean, square), shares, strict=True))
    spread = (second + rule.inside if rule.inside else second).sqrt() + rule.outside
    return AdamStep((first if rate is None else rate * first) / spread, mean, square)
