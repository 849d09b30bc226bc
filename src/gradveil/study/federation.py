"""Everything that decides a federated training run, in one frozen record, and what an audit asks for of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gradveil.errors import UsageError
from gradveil.study.declare import again, check_values, key
from gradveil.study.local_training import TrainingSettings
from gradveil.study.readers import whole
from gradveil.study.settings import Common, DataSource, Federation, ModelSource

__all__ = ["FederationSettings", "UtilitySettings"]


@dataclass(frozen=True, kw_only=True)
class FederationSettings(Common, Federation, ModelSource, DataSource):
    """One federated training run. Equal settings, data and code give equal weights on one machine.

    What each setting means stands where it is declared. Runs that differ only in the defense share partition, sampling, batches
    and first weights.
    """

    model: str = again(ModelSource, "model", "convnet")

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing, in one sentence each."""
        check_values(self)
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
        self.training()

    def training(self) -> TrainingSettings:
        """Return the settings of one client's local training."""
        counted = {"local_steps": self.local_steps} if self.local_steps else {"epochs": self.local_epochs}
        return TrainingSettings(
            shares="weights",
            minibatch=self.minibatch,
            shuffle=self.shuffle,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            batch_norm=self.batch_norm,
            dropout=self.dropout,
            **counted,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, in order."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> FederationSettings:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class UtilitySettings(Federation):
    """The federated trainings of an audit: one for every defense and seed, and as many undefended ones to pair them with."""

    clients_per_round: int = again(Federation, "clients_per_round", 5)
    minibatch: int = again(Federation, "minibatch", 16)
    seeds: int = key(
        3,
        whole(1),
        "trainings per defense, each paired with an undefended one",
        docs="trainings per defense, each paired with one of the same seed without a defense; fewer than 3 give wide "
        "intervals or none",
    )

    def __post_init__(self) -> None:
        """Check every value; names are looked up later, by `gradveil.run.grid`."""
        check_values(self, "utility ")
        if self.clients_per_round > self.clients:
            raise UsageError(
                f"utility clients_per_round is {self.clients_per_round} and there are {self.clients} clients; "
                "let at most all of them train in a round"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, in order."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> UtilitySettings:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)
