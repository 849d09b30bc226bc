"""Optimisers over many candidates at once. Each row of a flat (N, D) matrix is one candidate with its own state; rows never mix.

One call of ``advance`` spends exactly one evaluation of value and gradient per candidate, so a budget in steps means the same for
all optimisers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from gradveil.learning.adam import AdamRule, adam_step, begun

__all__ = ["LBFGS", "Adam", "Optimiser", "Schedule", "learning_rate_at"]

Schedule = Literal["constant", "steps", "cosine"]
Memory = dict[str, Any]
Numbers = Mapping[str, float | Tensor]

MOST_HALVINGS = 20
SEARCHING = AdamRule(interpolated=True, outside=1e-12)
"""Gradients of a distance that falls to nothing become tiny, so the root gets little beside it."""


def learning_rate_at(schedule: Schedule, base: float, step: int, steps: int) -> float:
    """Return the step size: constant; a tenth after 3/8, 5/8 and 7/8 of the way; or half a cosine down to a fiftieth."""
    if schedule == "steps":
        return base * 0.1 ** sum(step >= steps * share for share in (3 / 8, 5 / 8, 7 / 8))
    if schedule == "cosine":
        return base * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / max(1, steps))))
    return base


class Optimiser(Protocol):
    """Proposes points; told their values and gradients, moves on.

    Attributes:
        patience: How many evaluations in a row may be not finite before a candidate counts as lost.
    """

    patience: ClassVar[int]

    def start(self, points: Tensor) -> Memory:
        """Return the memory of candidates that start at ``points`` (N, D); ``memory["trial"]`` is where to evaluate next."""
        ...

    def numbers(self, step: int, steps: int) -> dict[str, float]:
        """Return all that `advance` asks of the step, by name."""
        ...

    def advance(self, memory: Memory, values: Tensor, gradients: Tensor, active: Tensor, numbers: Numbers) -> Memory:
        """Use the values (N,) and gradients (N, D) at the trial points; rows that are not ``active`` stay where they are.

        A function of tensors whatever the step, so that it can be recorded once for all of them.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam (Kingma and Ba 2015), optionally on the sign of the gradient (Geiping et al. 2020)."""

    patience: ClassVar[int] = 0
    learning_rate: float = 0.1
    signed: bool = False
    schedule: Schedule = "cosine"

    def start(self, points: Tensor) -> Memory:
        """Begin with empty moments."""
        return {"trial": points, "mean": torch.zeros_like(points), "square": torch.zeros_like(points)}

    def numbers(self, step: int, steps: int) -> dict[str, float]:
        """Return the learning rate, and how much of the moments is there."""
        mean, square = begun(step, SEARCHING)
        return {"rate": learning_rate_at(self.schedule, self.learning_rate, step, steps), "mean": mean, "square": square}

    def advance(self, memory: Memory, values: Tensor, gradients: Tensor, active: Tensor, numbers: Numbers) -> Memory:
        """Take one Adam step."""
        direction = gradients.sign() if self.signed else gradients
        there = numbers["mean"], numbers["square"]
        move, mean, square = adam_step(direction, memory["mean"], memory["square"], there, rate=numbers["rate"], rule=SEARCHING)
        moved = memory["trial"] - move
        return {"trial": torch.where(active[:, None], moved, memory["trial"]), "mean": mean, "square": square}


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """Limited-memory BFGS with Armijo backtracking, every candidate at its own pace.

    Each evaluation either accepts a candidate's trial point (and proposes the next full step) or halves its step; a candidate
    that cannot make progress forgets its curvature pairs and starts again along the negative gradient.
    """

    # A line search probes bad points on purpose; after a full round of halvings and a fresh start there are no good ones left.
    patience: ClassVar[int] = 2 * MOST_HALVINGS
    history: int = 20
    learning_rate: float = 1.0
    sufficient_decrease: float = 1e-4

    def start(self, points: Tensor) -> Memory:
        """Begin with no curvature; the first evaluation is at the start itself."""
        n, d = points.shape
        return {
            "trial": points,
            "point": points,
            "value": torch.full((n,), float("inf"), dtype=points.dtype, device=points.device),
            "gradient": torch.zeros_like(points),
            "direction": torch.zeros_like(points),
            "stride": torch.ones(n, dtype=points.dtype, device=points.device),
            "halvings": torch.zeros(n, dtype=torch.int64, device=points.device),
            "s": torch.zeros((n, self.history, d), dtype=points.dtype, device=points.device),
            "y": torch.zeros((n, self.history, d), dtype=points.dtype, device=points.device),
        }

    def numbers(self, step: int, steps: int) -> dict[str, float]:
        """Return nothing: every candidate has a pace of its own."""
        return {}

    def advance(self, memory: Memory, values: Tensor, gradients: Tensor, active: Tensor, numbers: Numbers) -> Memory:
        """Accept or halve, per candidate."""
        slope = (memory["gradient"] * memory["direction"]).sum(1)
        bound = memory["value"] + self.sufficient_decrease * memory["stride"] * slope
        finite = torch.isfinite(values) & torch.isfinite(gradients).all(1)
        accept = active & finite & (torch.isinf(memory["value"]) | (values <= bound))
        first = torch.isinf(memory["value"])

        s_new, y_new = memory["trial"] - memory["point"], gradients - memory["gradient"]
        curved = accept & ~first & ((s_new * y_new).sum(1) > 1e-10 * (s_new.norm(dim=1) * y_new.norm(dim=1) + 1e-30))
        s = _push(memory["s"], s_new, curved)
        y = _push(memory["y"], y_new, curved)
        take = accept[:, None]
        point = torch.where(take, memory["trial"], memory["point"])
        gradient = torch.where(take, gradients, memory["gradient"])
        value = torch.where(accept, values, memory["value"])

        # Counted, not read off the stride: the first stride along a steep gradient is tiny already.
        stuck = active & ~accept & (memory["halvings"] >= MOST_HALVINGS)
        s, y = torch.where(stuck[:, None, None], 0, s), torch.where(stuck[:, None, None], 0, y)
        renewed = accept | stuck
        fresh = _two_loop(gradient, s, y)
        direction = torch.where(renewed[:, None], fresh, memory["direction"])
        no_history = (y.square().sum((1, 2)) == 0) & renewed
        cautious = self.learning_rate * torch.clamp(1 / gradient.abs().sum(1).clamp_min(1e-30), max=1.0)
        full = torch.where(no_history, cautious, torch.full_like(cautious, self.learning_rate))
        stride = torch.where(renewed, full, memory["stride"] * 0.5)
        trial = torch.where(active[:, None], point + stride[:, None] * direction, memory["trial"])
        return {
            "trial": trial,
            "point": point,
            "value": value,
            "gradient": gradient,
            "direction": direction,
            "stride": stride,
            "halvings": torch.where(renewed, 0, memory["halvings"] + 1),
            "s": s,
            "y": y,
        }


def _push(store: Tensor, new: Tensor, where: Tensor) -> Tensor:
    """Append ``new`` as the most recent pair in the rows given by ``where``."""
    shifted = torch.cat([store[:, 1:], new[:, None]], dim=1)
    return torch.where(where[:, None, None], shifted, store)


def _two_loop(gradient: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Return minus the inverse-Hessian estimate times the gradient, per row; empty pairs contribute nothing."""
    inner = (s * y).sum(2)  # (N, M)
    rho = torch.where(inner > 0, 1 / inner.clamp_min(1e-38), torch.zeros_like(inner))
    q = gradient
    alphas = []
    for index in reversed(range(s.shape[1])):
        alpha = rho[:, index] * (s[:, index] * q).sum(1)
        q = q - alpha[:, None] * y[:, index]
        alphas.append(alpha)
    size = y[:, -1].square().sum(1)
    gamma = torch.where(size > 0, inner[:, -1] / size.clamp_min(1e-38), torch.ones_like(size))
    q = gamma[:, None] * q
    for index, alpha in zip(range(s.shape[1]), reversed(alphas), strict=True):
        beta = rho[:, index] * (y[:, index] * q).sum(1)
        q = q + (alpha - beta)[:, None] * s[:, index]
    return -q
