"""What a plan asks for when it asks for utility: how the federation trains that measures accuracy, bytes and time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gradveil.errors import UsageError
from gradveil.study.keys import KEYS, read_value

__all__ = ["UtilitySettings"]


@dataclass(frozen=True, kw_only=True)
class UtilitySettings:
    """The federated trainings of an audit: one for every defense and seed, and as many undefended ones to pair them with.

    Attributes:
        rounds: Federated rounds of one training.
        clients: Clients that share the data.
        clients_per_round: Clients that train in one round.
        partition: How the records are dealt out to the clients.
        local_epochs: Passes of a client over its records in one round.
        minibatch: Records of one local step; 0 takes all of a client's.
        learning_rate: Of the local steps.
        aggregation: How the server combines what it receives.
        test_share: Share of the records that no client trains on and accuracy is measured on.
        evaluate_every: Rounds between two looks at the accuracy; the last round always counts.
        seeds: Trainings per defense, each paired with an undefended one of the same seed.
    """

    rounds: int = 20
    clients: int = 10
    clients_per_round: int = 5
    partition: str = "iid"
    local_epochs: int = 1
    minibatch: int = 16
    learning_rate: float = 0.1
    aggregation: str = "fedavg"
    test_share: float = 0.2
    evaluate_every: int = 1
    seeds: int = 3

    def __post_init__(self) -> None:
        """Check every value; names are looked up later, by `Plan.check`."""
        for key in KEYS:
            if key.section == "utility":
                object.__setattr__(self, key.name, read_value(key, f"utility {key.name}", getattr(self, key.name)))
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
