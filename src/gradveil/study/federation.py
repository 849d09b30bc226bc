"""Everything that decides a federated training run, in one frozen record."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from gradveil.errors import UsageError, suggest
from gradveil.study.local_training import TrainingSettings
from gradveil.study.reading import read_text

__all__ = ["AGGREGATIONS", "SERVER_OPTIMIZERS", "FederationSettings"]

AGGREGATIONS = ("fedavg", "scaffold")
SERVER_OPTIMIZERS = ("sgd", "adam")
_CHOICES = {
    "aggregation": AGGREGATIONS,
    "server_optimizer": SERVER_OPTIMIZERS,
    "optimizer": ("sgd", "adam"),
    "batch_norm": ("eval", "train"),
}
_COUNTS = {
    "clients": 1,
    "clients_per_round": 1,
    "rounds": 1,
    "local_epochs": 0,
    "local_steps": 0,
    "minibatch": 0,
    "evaluate_every": 1,
    "seed": 0,
}


@dataclass(frozen=True, kw_only=True)
class FederationSettings:
    """One federated training run. Equal settings, data and code give equal weights on one machine.

    Attributes:
        data: Built-in name or path.
        labels: Path of a label file, or empty.
        scale: How values of files come to [0, 1]; empty is auto.
        read: How files are read otherwise; see `gradveil.study.reading`.
        model: Built-in spelling, ``module:factory`` or ``file.py:factory``.
        weights: Weights to start from, or empty for fresh ones from the seed.
        defense: Spelling of the defense or chain every client runs.
        clients: Clients there are.
        clients_per_round: Clients drawn in every round, without replacement.
        rounds: Rounds to train.
        partition: How records are dealt out: ``iid``, ``dirichlet(alpha=0.5)``, ``by_owner``, ``class_balance(rho=0.5)``.
        local_epochs: Passes of a client over its records in one round.
        local_steps: Optimiser steps of a client in one round; above 0 it wins over epochs.
        minibatch: Records per local step; 0 takes all.
        learning_rate: Of the local steps.
        momentum: Of the local steps, fresh in every round; sgd only.
        optimizer: ``sgd`` or ``adam`` for the local steps.
        aggregation: ``fedavg``, or ``scaffold`` with control variates from the decoded updates.
        server_optimizer: ``sgd`` or ``adam``, on the aggregate as if it were a gradient.
        server_learning_rate: 1 with plain sgd is federated averaging; adam wants about 0.01.
        server_momentum: For sgd.
        batch_norm: ``train`` normalises with the statistics of the minibatch and tracks running ones; ``eval`` uses the running
            statistics the model came with, and leaves them.
        test_share: Share of the records held out for evaluation, where the data has no test split of its own.
        evaluate_every: Evaluate after every so many rounds, and after the last.
        loss: Registered loss or ``module:function``.
        seed: Root of all randomness. Runs that differ only in the defense share partition, sampling, batches and first weights.
        device: ``cpu`` or ``cuda``.
    """

    data: str = "photos"
    labels: str = ""
    scale: str = ""
    read: str = ""
    model: str = "convnet"
    weights: str = ""
    defense: str = "none"
    clients: int = 10
    clients_per_round: int = 10
    rounds: int = 20
    partition: str = "iid"
    local_epochs: int = 1
    local_steps: int = 0
    minibatch: int = 32
    learning_rate: float = 0.1
    momentum: float = 0.0
    optimizer: Literal["sgd", "adam"] = "sgd"
    aggregation: Literal["fedavg", "scaffold"] = "fedavg"
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0
    batch_norm: Literal["eval", "train"] = "train"
    test_share: float = 0.2
    evaluate_every: int = 1
    loss: str = "cross_entropy"
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing, in one sentence each."""
        object.__setattr__(self, "read", read_text(self.read))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} is {getattr(self, name)!r}{suggest(str(getattr(self, name)), choices)}")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name} is {value!r}; it must be a whole number, at least {least}")
        for name in ("learning_rate", "server_learning_rate"):
            if not (_is_number(getattr(self, name)) and getattr(self, name) > 0):
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be a number above 0")
        for name in ("momentum", "server_momentum"):
            if not (_is_number(getattr(self, name)) and 0 <= getattr(self, name) < 1):
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be at least 0 and below 1")
        if not (_is_number(self.test_share) and 0 < self.test_share < 1):
            raise UsageError(f"test_share is {self.test_share!r}; it must lie between 0 and 1")
        self._check_together()

    def _check_together(self) -> None:
        if self.clients_per_round > self.clients:
            raise UsageError(
                f"clients_per_round is {self.clients_per_round}, but there are {self.clients} clients; ask for no more than those"
            )
        if self.local_steps == 0 and self.local_epochs == 0:
            raise UsageError("local_epochs and local_steps are both 0, so that clients would not train; set one of them")
        if self.optimizer == "adam" and self.momentum:
            raise UsageError("momentum is for optimizer = 'sgd'; adam has its own")
        if self.server_optimizer == "adam" and self.server_momentum:
            raise UsageError("server_momentum is for server_optimizer = 'sgd'; adam has its own")
        if self.aggregation == "scaffold" and (self.optimizer != "sgd" or self.momentum):
            raise UsageError(
                "scaffold's control variates are mean gradients only for plain local sgd; set optimizer = 'sgd' and momentum = 0"
            )

    def training(self) -> TrainingSettings:
        """Return the settings of one client's local training."""
        counted = {"local_steps": self.local_steps} if self.local_steps else {"epochs": self.local_epochs}
        return TrainingSettings(
            shares="weights",
            minibatch=self.minibatch,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            batch_norm=self.batch_norm,
            **counted,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, in order."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> FederationSettings:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
