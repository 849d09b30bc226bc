"""Matching objectives: how far apart two sets of named tensors are, as one scalar that is zero at the truth.

All are safe under vmap and finite (with finite derivatives) where either side is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradveil.attacks.engine.lean_distances import squared_distance, unit_distance
from gradveil.records import Comparison
from gradveil.registry import Card, Registry

__all__ = ["OBJECTIVES", "Objective"]

Objective = Callable[[Comparison], Tensor]
TINY = 1e-24
"""Added to squared norms. The derivative of rsqrt cubes 1 / sqrt(TINY), which must not overflow where a layer is silent."""

OBJECTIVES: Registry[Objective, Card] = Registry("objective", "gradveil.attacks.engine.objectives")


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum()


def _pairs(comparison: Comparison) -> list[tuple[Tensor, Tensor]]:
    return [(value, comparison.observed[name]) for name, value in comparison.simulated.items()]


def _unit_distance(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return |s/|s| - o/|o||^2 / 2 over all pairs together."""
    if pairs[0][0].is_cuda:
        return unit_distance([s for s, _ in pairs], [o for _, o in pairs], TINY)
    left = (_sum([s.square().sum() for s, _ in pairs]) + TINY).rsqrt()
    right = (_sum([o.square().sum() for _, o in pairs]) + TINY).rsqrt()
    return 0.5 * _sum([(s * left - o * right).square().sum() for s, o in pairs])


def _squared_distance(left: Tensor, right: Tensor) -> Tensor:
    return squared_distance(left, right) if left.is_cuda else (left - right).square().sum()


@OBJECTIVES.register(Card(name="cosine", summary="One minus the cosine of the angle between the whole updates; blind to scale."))
def cosine(comparison: Comparison) -> Tensor:
    """Return 1 - <s, o> / (|s| |o|) over all tensors together.

    Computed as |s/|s| - o/|o||^2 / 2, which is the same number: the difference from one loses all digits in float32 once the
    angle is small, long before the image is good, and then neither the best iterate nor the best restart can be told.
    """
    return _unit_distance(_pairs(comparison))


@OBJECTIVES.register(
    Card(name="layer_cosine", summary="Mean over tensors of one minus the cosine; blind to each tensor's scale.")
)
def layer_cosine(comparison: Comparison) -> Tensor:
    """Return the mean over tensors of 1 - <s, o> / (|s| |o|), leaving out tensors seen as zero."""
    terms, counts = [], []
    for s, o in _pairs(comparison):
        size = o.square().sum()
        seen = (size > 0).to(size)
        terms.append(seen * _unit_distance([(s, o)]))
        counts.append(seen)
    return _sum(terms) / _sum(counts).clamp_min(1)


@OBJECTIVES.register(Card(name="l2", summary="Sum of squared differences; sees scale."))
def l2(comparison: Comparison) -> Tensor:
    """Return |s - o|^2 over all tensors."""
    return _sum([_squared_distance(s, o) for s, o in _pairs(comparison)])


@OBJECTIVES.register(
    Card(
        name="relative_l2",
        summary="Mean over tensors of squared difference over squared size; sees scale, weighs layers equally.",
    )
)
def relative_l2(comparison: Comparison) -> Tensor:
    """Return the mean over tensors of |s - o|^2 / |o|^2, leaving out tensors seen as zero."""
    terms, counts = [], []
    for s, o in _pairs(comparison):
        size = o.square().sum()
        seen = (size > 0).to(size)
        terms.append(seen * _squared_distance(s, o) / (size + TINY))
        counts.append(seen)
    return _sum(terms) / _sum(counts).clamp_min(1)
