"""A client whose training is somebody else's: all that is there is the finished update, and what can still be done to it.

Frameworks call filters on what a client is about to send. A defense that needs more than the update protects nothing there, so it
is refused before anything is trained.
"""

from __future__ import annotations

import torch

from gradveil.client.needs import unmet_need
from gradveil.client.update import ClientResult, horizontal_fault
from gradveil.defenses.base import ClientView, Defense, State
from gradveil.errors import UsageError
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch, Update
from gradveil.tensors import check_finite

__all__ = ["check_finished", "protect_finished"]

NOBODY = Batch(torch.empty(0), torch.empty(0))


def check_finished(defense: Defense, instead: str) -> None:
    """Raise `UsageError` for a defense that needs more than the finished update; ``instead`` says what to use."""
    fault = horizontal_fault(defense) or unmet_need(defense, (), f"which a finished update does not have any more; {instead}")
    if fault:
        raise UsageError(fault)


def protect_finished(
    update: Update, learner: Learner, defense: Defense, seed: Seed, *, state: State | None = None
) -> ClientResult:
    """Protect and encode an update that was trained elsewhere, as `run_client` does after its own training.

    Args:
        update: Global minus local tensors, and the examples and the round behind them.
        learner: The global model; nothing is trained with it.
        defense: One that `check_finished` lets through.
        seed: Root of this release's randomness.
        state: What the defense kept from the last round.
    """
    check_finite(update.weights, "the client's update")
    view = ClientView(learner=learner, seed=seed, round=update.round, weights=learner.weights)
    protected, state = defense.protect_update(update, view, {} if state is None else state)
    check_finite(protected.weights, "the defended update")
    return ClientResult(defense.encode(protected, view), state, NOBODY)
