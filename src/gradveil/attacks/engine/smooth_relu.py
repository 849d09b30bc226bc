"""Make matching losses of ReLU networks informative.

A ReLU's derivative is a step, so the backward signal of a ReLU network does not move with its input and the matching loss gives
almost no direction. The attacker's copy replaces relu(z) by softplus(c z / s) s / c, with s the layer's own scale and a
sharpness c that grows from 2 to 100 while the attack runs; at the end it is a ReLU to within a percent of that scale. Our own
construction; measured in docs/attacks.md.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.learning.learner import Learner

__all__ = ["SHARPNESS", "all_children", "has_relu", "sharpness_at", "smooth_learner", "with_sharpness"]

SHARPNESS = "gradveil_sharpness"
"""How the buffers of stand-ins are called; one call sets them all."""


class _SmoothReLU(nn.Module):
    """Stands in for ``nn.ReLU`` in the attacker's copy of a model."""

    gradveil_sharpness: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(SHARPNESS, torch.tensor(1.0))

    def forward(self, z: Tensor) -> Tensor:
        centred = z.detach() - z.detach().mean()
        scale = centred.square().mean().sqrt().clamp_min(1e-12) / self.gradveil_sharpness
        smooth: Tensor = F.softplus(z / scale) * scale
        return smooth


def all_children(parent: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children by name; one module under several names comes once for each, unlike in ``named_children``.

    One ReLU or one pool that stands in many places of a row of layers is common, and each place wants its stand-in.
    """
    return [(name, child) for name, child in parent.named_modules(remove_duplicate=False) if name and "." not in name]


def has_relu(learner: Learner) -> bool:
    """Whether the model has ``nn.ReLU`` modules; calls of ``functional.relu`` inside user code cannot be replaced."""
    return any(isinstance(module, nn.ReLU) for module in learner.model.modules())


def smooth_learner(learner: Learner) -> Learner:
    """Return a learner whose ReLUs have a smooth derivative; set its sharpness with `with_sharpness`."""
    model = copy.deepcopy(learner.model)
    for parent in list(model.modules()):
        for name, child in all_children(parent):
            if isinstance(child, nn.ReLU):
                setattr(parent, name, _SmoothReLU())
    reference = next(iter(learner.weights.values()))
    added = {n: b.to(reference) for n, b in model.named_buffers() if n.endswith(SHARPNESS)}
    return learner.replace(model=model, buffers={**learner.buffers, **added})


def with_sharpness(learner: Learner, sharpness: Tensor) -> Learner:
    """Return the learner with all its smooth ReLUs at one sharpness, in units of each layer's own scale."""
    return learner.replace(buffers={n: sharpness if n.endswith(SHARPNESS) else b for n, b in learner.buffers.items()})


def sharpness_at(step: int, steps: int, *, start: float = 2.0, end: float = 100.0, settle: float = 0.9) -> float:
    """Grow geometrically from ``start`` to ``end`` over the first ``settle`` of the way, then stay."""
    share = min(1.0, step / max(1.0, settle * steps))
    return start * math.exp(share * math.log(end / start))
