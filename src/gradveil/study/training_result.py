"""What a training run leaves behind: one record per round, and the result of all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradveil.study.federation import FederationSettings

if TYPE_CHECKING:
    from gradveil.tensors import Named

__all__ = ["TRAINING_FORMAT", "Latency", "RoundRecord", "TrainingResult", "summary_of"]

TRAINING_FORMAT = "gradveil-training-1"


@dataclass(frozen=True)
class RoundRecord:
    """One finished round; docs/results-format.md has the JSON form.

    Attributes:
        round: From 1.
        accuracy: Share of test records classified right after this round, of masks the mean Dice; None where not evaluated.
        loss: Mean task loss over the test records; None where it was not evaluated.
        bytes_up: Tensors all clients of the round sent.
        bytes_down: Tensors the server sent to them.
        client_seconds: Time spent in clients, all together.
        seconds: Time of the whole round.
        clients: Who took part.
        refused: Clients without a part in the aggregate: refused by the server, or with nothing finite to send.
        reasons: Client to sentence, for those.
        counters: What the defense counts in its state, mean over the clients of the round.
        note: Why the round changed nothing, where it did not.
        f1: F1 of class 1 over the test records, where there are two classes.
        score: What the accuracy is: ``accuracy``, or ``dice`` of masks.
    """

    round: int
    accuracy: float | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    client_seconds: float
    seconds: float = 0.0
    clients: tuple[int, ...] = ()
    refused: int = 0
    reasons: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    f1: float | None = None
    score: str = "accuracy"

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values, in order; what other data has not, such as F1, is left out."""
        values = dataclasses.asdict(self) | {"clients": list(self.clients)}
        usual = {"f1": None, "score": "accuracy"}
        return {name: value for name, value in values.items() if name not in usual or value != usual[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoundRecord:
        """Return the record that `as_dict` gave."""
        return cls(**{**values, "clients": tuple(values["clients"])})


@dataclass(frozen=True)
class Latency:
    """One client's round with and without the defense, on the same client, measured in turns.

    Attributes:
        defended_ms: Best time with the defense, in milliseconds.
        undefended_ms: Best time without.
    """

    defended_ms: float
    undefended_ms: float

    @property
    def ratio(self) -> float:
        """Normalised on-device latency: defended over undefended time."""
        return self.defended_ms / self.undefended_ms

    def as_dict(self) -> dict[str, float]:
        """Return plain JSON values."""
        return {
            "defended_ms": round(self.defended_ms, 3),
            "undefended_ms": round(self.undefended_ms, 3),
            "ratio": round(self.ratio, 4),
        }


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What `train` returns.

    Attributes:
        settings: As asked for.
        rounds: One record per round so far.
        weights: The global model's trainable tensors.
        buffers: Its other tensors.
        seconds: Time of all rounds, those before a resumption included.
        data: What was trained and tested on, in plain values.
        latency: Where it was asked for.
        dense_bytes: Of one update without any encoding.
        guarantee: Differential privacy after the rounds so far, or why there is none, in plain values.
    """

    settings: FederationSettings
    rounds: tuple[RoundRecord, ...]
    weights: Named
    buffers: Named
    seconds: float
    data: Mapping[str, Any] = field(default_factory=dict)
    latency: Latency | None = None
    dense_bytes: int = 0
    guarantee: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accuracies(self) -> list[float]:
        """Accuracy after every evaluated round."""
        return [record.accuracy for record in self.rounds if record.accuracy is not None]

    @property
    def final_accuracy(self) -> float | None:
        """Accuracy after the last evaluated round."""
        return self.accuracies[-1] if self.accuracies else None

    @property
    def best_accuracy(self) -> float | None:
        """Best accuracy of any evaluated round."""
        return max(self.accuracies, default=None)

    @property
    def score(self) -> str:
        """What the accuracies are: ``accuracy``, or ``dice`` of masks."""
        return self.rounds[0].score if self.rounds else "accuracy"

    @property
    def final_f1(self) -> float | None:
        """F1 after the last evaluated round, where there are two classes."""
        found = [record.f1 for record in self.rounds if record.f1 is not None]
        return found[-1] if found else None

    @property
    def bytes_up(self) -> int:
        """Bytes of all clients in all rounds."""
        return sum(record.bytes_up for record in self.rounds)

    @property
    def bytes_down(self) -> int:
        """Bytes to all clients in all rounds."""
        return sum(record.bytes_down for record in self.rounds)

    @property
    def refused(self) -> int:
        """Refusals in all rounds."""
        return sum(record.refused for record in self.rounds)

    @property
    def finished(self) -> bool:
        """Whether all rounds asked for are done."""
        return len(self.rounds) >= self.settings.rounds


def summary_of(result: TrainingResult, provenance: Mapping[str, Any], *, version: str, command: str) -> dict[str, Any]:
    """Return training.json of docs/results-format.md."""
    rounds = max(len(result.rounds), 1)
    return {
        "format": TRAINING_FORMAT,
        "version": version,
        "command": command,
        "settings": result.settings.as_dict(),
        "data": dict(result.data),
        "parameters": sum(value.numel() for value in result.weights.values()),
        "rounds": [record.as_dict() for record in result.rounds],
        "finished": result.finished,
        "final_accuracy": result.final_accuracy,
        "best_accuracy": result.best_accuracy,
        **({} if result.final_f1 is None else {"final_f1": result.final_f1}),
        "bytes": {
            "up": result.bytes_up,
            "down": result.bytes_down,
            "up_per_round": result.bytes_up / rounds,
            "down_per_round": result.bytes_down / rounds,
            "dense_per_round": result.dense_bytes * _clients_per_round(result.rounds),
        },
        "latency": result.latency.as_dict() if result.latency else None,
        "refused": result.refused,
        "guarantee": dict(result.guarantee),
        "seconds": round(result.seconds, 3),
        "provenance": dict(provenance),
    }


def _clients_per_round(rounds: Sequence[RoundRecord]) -> float:
    return sum(len(record.clients) for record in rounds) / max(len(rounds), 1)
