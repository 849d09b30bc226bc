"""CENSOR as published and as released, to be measured and rejected. Neither is registered.

Two things differ from `gradveil.defenses.censor`. Algorithm 1 of the paper sends the **raw gradient** where no trial lowers the
loss. The released code also projects with a factor ‖g‖ missing, so that its candidates are not orthogonal, and tries them with a
step of 1e-4 whatever the learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.defenses.base import ClientView, State
from gradveil.defenses.censor import Censor, select_candidate
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch, Update
from gradveil.tensors import Named

__all__ = ["PaperCensor", "ReleasedCensor", "raw_share", "released_directions"]

RELEASED_STEP = 1e-4


def released_directions(drawn: Tensor, gradient: Tensor) -> Tensor:
    """Return the released projection of each row of ``drawn`` (T, ...): r - (<r, g> / ‖g‖) g with ‖r‖ = 1, scaled to ‖g‖.

    The coefficient of a projection is <r, g> / ‖g‖². Without the second ‖g‖, <released, g> is <r, g> (1 - ‖g‖) before scaling, so
    the longer the gradient and the smaller the tensor, the more of the raw direction is sent.
    """
    count = drawn.shape[0]
    rows, flat = drawn.reshape(count, -1).double(), gradient.reshape(-1).double()
    if flat.numel() == 0:
        return torch.zeros((count, *gradient.shape), dtype=torch.float64)
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    length = torch.linalg.vector_norm(flat)
    rows = rows - ((rows @ flat) / length.clamp_min(1e-300)).unsqueeze(1) * flat
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-300) * length
    found: Tensor = rows.reshape(count, *gradient.shape)
    return found


@dataclass(frozen=True, kw_only=True)
class PaperCensor(Censor):
    """Algorithm 1: exact projection, and the raw gradient where no trial lowers the loss."""

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Send the best candidate if it lowers the loss, else the raw update."""
        with torch.no_grad():
            chosen = select_candidate(self._candidates(update.weights, view), self._judged(view), update.weights)
        if chosen.fell_back:
            return update, state
        return update.replace(weights={n: chosen.weights[n].to(v.dtype) for n, v in update.weights.items()}), state

    def _judged(self, view: ClientView) -> ClientView:
        return view


@dataclass(frozen=True, kw_only=True)
class ReleasedCensor(PaperCensor):
    """The released code: the wrong projection and a fixed trial step of 1e-4, with the raw fallback."""

    def _project(self, drawn: Named, gradient: Named) -> Named:
        return {name: released_directions(drawn[name], value) for name, value in gradient.items()}

    def _judged(self, view: ClientView) -> ClientView:
        settings = view.learner.settings.replace(learning_rate=RELEASED_STEP)
        return replace(view, learner=view.learner.replace(settings=settings))


def raw_share(defense: Censor, learner: Learner, batches: Sequence[Batch], seed: Seed) -> float:
    """Return the share of clients whose raw gradient is sent, bit by bit."""
    raw = 0
    for index, batch in enumerate(batches):
        view = ClientView(learner=learner, seed=seed.child(index), weights=learner.weights, raw_batch=batch, batch=batch)
        gradient = learner.update(batch.inputs, batch.targets)
        sent, _ = defense.protect_update(Update(gradient, examples=len(batch)), view, {})
        raw += all(torch.equal(sent.weights[name], value) for name, value in gradient.items())
    return raw / len(batches)
