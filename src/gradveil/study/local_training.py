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
        shuffle: Whether every epoch after the first goes through the examples in an order of its own, drawn by the client.
        optimizer: ``sgd`` or ``adam``.
        learning_rate: Step size.
        momentum: For sgd.
        batch_norm: ``eval`` uses running statistics; ``train`` uses those of the batch.
        dropout: Whether dropout layers are on, with masks drawn by the client.
        clients: More than one: inputs hold the batches of that many clients and the update is their mean (a secure aggregate).
    """

    shares: Literal["gradient", "weights"] = "gradient"
    local_steps: int = 1
    epochs: int = 0
    minibatch: int = 0
    shuffle: bool = False
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    batch_norm: Literal["eval", "train"] = "eval"
    dropout: bool = False
    clients: int = 1

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        for name, allowed in (("shares", ("gradient", "weights")), ("optimizer", OPTIMIZERS), ("batch_norm", ("eval", "train"))):
            check_choice("", name, getattr(self, name), allowed)
        for name, least in (("local_steps", 1), ("epochs", 0), ("minibatch", 0), ("clients", 1)):
            check_whole("", name, getattr(self, name), least)
        check_number("", "learning_rate", self.learning_rate, open_below=True)
        check_number("", "momentum", self.momentum, below=1)
        if self.shares == "gradient" and (self.local_steps > 1 or self.epochs > 0):
            raise UsageError("a client that takes several local steps shares weights, not a gradient: set shares = 'weights'")
        if self.optimizer == "adam" and self.momentum:
            raise UsageError("momentum is for optimizer = 'sgd'; adam has its own")
        if self.shuffle and self.epochs == 0:
            raise UsageError("shuffle draws an order for every epoch; count local_epochs instead of local_steps, or leave it out")

    def steps(self, examples: int) -> int:
        """Return the number of optimiser steps on ``examples`` examples."""
        return self.epochs * self.steps_of_an_epoch(examples) if self.epochs else self.local_steps

    def steps_of_an_epoch(self, examples: int) -> int:
        """Return how many minibatches ``examples`` examples fill; the last may be smaller."""
        return -(-examples // (self.minibatch or examples))

    def minibatch_indices(self, step: int, examples: int) -> list[int] | None:
        """Return the places of one step in the order of the epoch, or None for the whole batch."""
        size = self.minibatch
        if size == 0 or size >= examples:
            return None
        if self.epochs == 0:
            return [(step * size + offset) % examples for offset in range(size)]
        start = (step % self.steps_of_an_epoch(examples)) * size
        return list(range(start, min(start + size, examples)))

    def sizes(self, examples: int) -> list[int]:
        """Return how many examples are in each step."""
        if self.shares == "gradient":
            return [examples]
        chosen = [self.minibatch_indices(step, examples) for step in range(self.steps(examples))]
        return [examples if places is None else len(places) for places in chosen]

    def reach(self, examples: int) -> float:
        """Return how many mean gradients an update adds up, each times the learning rate, to first order in it.

        One for every step, and with momentum m what later steps still carry of it: step t of T counts 1 + m + ... + m^(T-1-t).

        >>> TrainingSettings(shares="weights", local_steps=3).reach(1)
        3.0
        >>> TrainingSettings(shares="weights", local_steps=2, momentum=0.5).reach(1)
        2.5
        """
        total, carried = 0.0, 0.0
        for _ in range(self.steps(examples)):
            carried = 1 + self.momentum * carried
            total += carried
        return total

    def replace(self, **changes: Any) -> TrainingSettings:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)
