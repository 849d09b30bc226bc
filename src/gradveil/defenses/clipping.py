"""Clipping of the update's norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.errors import UsageError
from gradveil.learning.learner import Learner
from gradveil.records import Update
from gradveil.study.checks import check_choice, check_number
from gradveil.tensors import Named, check_finite

__all__ = ["SCOPES", "ClippedUpdateAdversary", "Clipping", "Scope", "clip"]

Scope = Literal["global", "layer"]
SCOPES = ("global", "layer")


def clip(named: Named, bound: float, scope: Scope) -> Named:
    """Return the tensors scaled so that no group exceeds the bound: each times min(1, bound / ‖group‖).

    Groups are all tensors, or those of one layer. Differentiable, safe under vmap; a zero group is left as it is.
    """
    factors = {name: _factor([named[name] for name in group], bound) for group in _groups(named, scope) for name in group}
    return {name: value * factors[name].to(value.dtype) for name, value in named.items()}


def _groups(names: Iterable[str], scope: Scope) -> list[list[str]]:
    """Group names: one group, or one per module, so that weight and bias of a layer share a factor."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0] if scope == "layer" else "", []).append(name)
    return list(groups.values())


def _factor(values: list[Tensor], bound: float) -> Tensor:
    # Double precision keeps squares of large and tiny entries; the hardware of "mps" has none.
    wide = torch.float32 if values[0].device.type == "mps" else torch.float64
    norms = torch.stack([torch.linalg.vector_norm(value, dtype=wide) for value in values])
    # bound / max(norm, bound) is min(1, bound / norm) without a division by zero, and exactly 1 inside the bound.
    norm: Tensor = torch.linalg.vector_norm(norms)
    return bound / norm.clamp(min=bound)


@dataclass(frozen=True)
class ClippedUpdateAdversary(OpenAdversary):
    """Clips what the dummies produce in the same way. A factor per layer is left, so every tensor still counts as exact."""

    bound: float
    scope: Scope

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        """Clip, differentiably."""
        return clip(update, self.bound, self.scope)


@DEFENSES.register(
    DefenseCard(
        name="clipping",
        summary="Scales the update down to a given norm, as a whole or layer by layer.",
        paper="McMahan, Ramage, Talwar and Zhang, Learning Differentially Private Recurrent Language Models, ICLR 2018",
        url="https://arxiv.org/abs/1710.06963",
        cost="one pass over the weights; slows training down where the bound is far below the usual norm",
        weakness="changes only the length of the update or of its layers: attacks that compare directions do not notice it",
        acts_on=("update",),
        ladder=({"bound": 4.0}, {"bound": 1.0}, {"bound": 0.25}, {"bound": 0.05}),
        off={"bound": None},
    )
)
@dataclass(frozen=True, kw_only=True)
class Clipping(Defense):
    """Norm clipping: ``sent = u · min(1, bound / ‖u‖₂)``, over all weights or within each layer.

    A layer is a module: its weight and bias share one factor. Parameters that belong to the model itself form one layer.

    Departs from the paper: the paper's per-layer bounds add up to the global one (S = √Σ S_l²); here ``bound`` holds for each
    layer. Clipping the gradient of every single example, as DP-SGD does, is `example_clipping`.

    Cost: one pass over the weights. Known weakness: no protection by itself; it limits what noise must cover. Chain them:
    ``clipping(bound=1) + gaussian_noise(std=0.01)``.

    Attributes:
        bound: Largest norm that is sent; None is off.
        scope: ``global`` clips all weights together, ``layer`` each layer by itself.
    """

    bound: float | None = 1.0
    scope: Scope = "global"

    def __post_init__(self) -> None:
        """Refuse a bound that nothing fits in, and unknown scopes."""
        if self.bound is not None:
            check_number("clipping", "bound", self.bound, open_below=True)
        if str(self.scope) == "example":
            raise UsageError("clipping: the gradients of single examples are clipped by 'example_clipping'")
        check_choice("clipping", "scope", self.scope, SCOPES)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Clip the update."""
        check_finite(update.weights)
        if self.bound is None:
            return update, state
        return update.replace(weights=clip(update.weights, self.bound, self.scope)), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who clips too."""
        return OpenAdversary() if self.bound is None else ClippedUpdateAdversary(self.bound, self.scope)
