"""How a client trains locally: everything that decides the update beside model, data and defense."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from gradveil.errors import UsageError
from gradveil.study.checks import check_choice, check_number, check_whole

__all__ = ["TrainingSettings"]

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Local training of one client in one round.

    Attributes:
        shares: ``gradient`` sends the gradient of one batch (FedSGD); ``weights`` sends global minus local weights (FedAvg).
        local_steps: Optimiser steps; ignored where ``epochs`` is above 0.
        epochs: Passes over the batch, each in minibatches; 0 counts steps instead.
        minibatch: Examples per step, in order and wrapping around; 0 takes the whole batch each step.
        optimizer: ``sgd`` or ``adam``.
        learning_rate: Step size.
        momentum: For sgd.
        batch_norm: ``eval`` uses running statistics; ``train`` uses those of the batch.
        clients: More than one: inputs hold the batches of that many clients and the update is their mean (a secure aggregate).
    """

    shares: Literal["gradient", "weights"] = "gradient"
    local_steps: int = 1
    epochs: int = 0
    minibatch: int = 0
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    batch_norm: Literal["eval", "train"] = "eval"
    clients: int = 1

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        for name, allowed in (("shares", ("gradient", "weights")), ("optimizer", OPTIMIZERS), ("batch_norm", ("eval", "train"))):
            check_choice("", name, getattr(self, name), allowed)
        for name, least in (("local_steps", 1), ("epochs", 0), ("minibatch", 0), ("clients", 1)):
            check_whole("", name, getattr(self, name), least)
        check_number("", "learning_rate", self.learning_rate, open_below=True)
        if self.shares == "gradient" and (self.local_steps > 1 or self.epochs > 0):
            raise UsageError("a client that takes several local steps shares weights, not a gradient: set shares = 'weights'")

    def steps(self, examples: int) -> int:
        """Return the number of optimiser steps on ``examples`` examples."""
        if self.epochs == 0:
            return self.local_steps
        size = self.minibatch or examples
        return self.epochs * -(-examples // size)

    def minibatch_indices(self, step: int, examples: int) -> list[int] | None:
        """Return the examples of one step, or None for the whole batch."""
        size = self.minibatch
        if size == 0 or size >= examples:
            return None
        if self.epochs == 0:
            return [(step * size + offset) % examples for offset in range(size)]
        per_epoch = -(-examples // size)
        start = (step % per_epoch) * size
        return list(range(start, min(start + size, examples)))

    def replace(self, **changes: Any) -> TrainingSettings:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)
