"""What trainings leave behind, as values: the one declaration of training.json and of utility/KEY.json (docs/results-format.md).

A `TrainingResult` is what ``gradveil train`` returns and keeps, with the weights beside it. A `TrainingRecord` is the part that
is the same on every run, which an audit keeps for its utility; times are kept apart from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from gradveil.study.codec import BESIDE, OMITTED, decode, named
from gradveil.study.kept import KeptTraining
from gradveil.study.proved import Guarantee
from gradveil.study.training import TRAINING_FORMAT as UTILITY_FORMAT
from gradveil.study.training import Training

if TYPE_CHECKING:
    from gradveil.tensors import Named
else:
    Named = Any  # the codec reads hints, and tensors are none of its business

__all__ = [
    "TRAINING_FORMAT",
    "Curve",
    "Latency",
    "Round",
    "RoundRecord",
    "Traffic",
    "TrainingRecord",
    "TrainingResult",
    "TrainingTiming",
    "UpDown",
]

TRAINING_FORMAT = "gradveil-training-1"


@dataclass(frozen=True, kw_only=True)
class Round:
    """What is the same on every run about one finished round.

    Attributes:
        round: From 1.
        accuracy: Share of test records classified right after this round, of masks the mean Dice; None where not evaluated.
        loss: Mean task loss over the test records; None where it was not evaluated.
        bytes_up: Tensors all clients of the round sent.
        bytes_down: Tensors the server sent to them.
        refused: Clients without a part in the aggregate: refused by the server, or with nothing finite to send.
        counters: What the defense counts in its state, mean over the clients of the round.
    """

    round: int
    accuracy: float | None = None
    loss: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    refused: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundRecord(Round):
    """One finished round.

    Attributes:
        client_seconds: Time spent in clients, all together.
        seconds: Time of the whole round.
        clients: Who took part.
        reasons: Client to sentence, for those who were refused.
        note: Why the round changed nothing, where it did not.
        f1: F1 of class 1 over the test records, where there are two classes.
        score: What the accuracy is: ``accuracy``, or ``dice`` of masks.
    """

    KEYS = (
        *("round", "accuracy", "loss", "bytes_up", "bytes_down", "client_seconds", "seconds", "clients", "refused", "reasons"),
        *("counters", "note", "f1", "score"),
    )

    client_seconds: float | None = None
    seconds: float = 0.0
    clients: tuple[int, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    f1: float | None = field(default=None, metadata=OMITTED)
    score: str = field(default="accuracy", metadata=OMITTED)

    def measured(self) -> Round:
        """Return what is the same on every run."""
        return Round(**{each.name: getattr(self, each.name) for each in fields(Round)})


@dataclass(frozen=True, kw_only=True)
class Latency:
    """One client's round with and without the defense, on the same client, measured in turns.

    Attributes:
        defended_ms: Best time with the defense, in milliseconds.
        undefended_ms: Best time without.
    """

    KEYS = ("defended_ms", "undefended_ms", "ratio")

    defended_ms: float
    undefended_ms: float

    @property
    def ratio(self) -> float:
        """Normalised on-device latency: defended over undefended time."""
        return round(self.defended_ms / self.undefended_ms, 4) if self.undefended_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How one training went: accuracy by round, and what it took; rounds that were not evaluated are left out."""

    seed: int | None
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    client_seconds: float | None = None
    latency: Latency | None = None

    @classmethod
    def of(cls, seed: int | None, rounds: Sequence[Round], client_seconds: Sequence[float], latency: Latency | None) -> Curve:
        """Draw the curve of a training.

        Args:
            seed: Where the settings say it.
            rounds: In order.
            client_seconds: One per round; the median counts, so one that the machine was busy in does not.
            latency: Where it was measured.
        """
        seen = [(each.round, each.accuracy) for each in rounds if each.accuracy is not None]
        return cls(
            seed=seed,
            rounds=tuple(number for number, _ in seen),
            accuracy=tuple(accuracy for _, accuracy in seen),
            client_seconds=statistics.median(client_seconds) if client_seconds else None,
            latency=latency,
        )


@dataclass(frozen=True, kw_only=True)
class UpDown:
    """Bytes of a whole training in either direction."""

    up: float = 0
    down: float = 0


@dataclass(frozen=True, kw_only=True)
class Traffic(UpDown):
    """The same with what a round takes; ``dense_per_round`` is what one would send up without any encoding."""

    up_per_round: float = 0
    down_per_round: float = 0
    dense_per_round: float = 0

    @property
    def ratio(self) -> float | None:
        """Bytes that clients sent, relative to sending every update whole."""
        return self.up_per_round / self.dense_per_round if self.dense_per_round else None


@dataclass(frozen=True, kw_only=True)
class TrainingTiming:
    """What differs from run to run: all of it, client time by round, and the latency of one client's round."""

    key: str = ""
    seconds: float | None = None
    client_seconds: tuple[float, ...] = ()
    latency: Latency | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """One training behind the utility of cells, without what differs from run to run.

    Attributes:
        chance: Accuracy of always naming the most frequent class.
        timing: Kept in a file of its own.
    """

    KEYS = ("format", "key", "training", "chance", "final_accuracy", "best_accuracy", "bytes", "guarantee", "rounds")
    format = UTILITY_FORMAT

    key: str = ""
    settings: KeptTraining = field(default_factory=lambda: decode(KeptTraining, {}), metadata=named("training"))
    chance: float | None = None
    final_accuracy: float | None
    best_accuracy: float | None = None
    bytes: UpDown = UpDown()
    guarantee: Guarantee | None = None
    rounds: tuple[Round, ...] = ()
    timing: TrainingTiming = field(default=TrainingTiming(), metadata=BESIDE)

    @property
    def curve(self) -> Curve:
        """Accuracy by round."""
        return Curve.of(self.settings.said("seed"), self.rounds, self.timing.client_seconds, self.timing.latency)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingResult:
    """What `run_training` returns.

    Attributes:
        version: Of gradveil, where it was kept.
        command: That ran it.
        data: What was trained and tested on, in plain values.
        parameters: Trainable numbers of the model.
        rounds: One record per round so far.
        final_f1: F1 after the last evaluated round, where there are two classes.
        bytes: Of all rounds so far.
        latency: Where it was asked for.
        guarantee: Differential privacy after the rounds so far, or why there is none, against a server that sees every update.
        guarantee_of_sums: The same against who sees nothing but the sum of each round, where that is another.
        seconds: Time of all rounds, those before a resumption included.
        provenance: Where it ran.
        weights: The global model's trainable tensors.
        buffers: Its other tensors.
    """

    KEYS = (
        *("format", "version", "command", "settings", "data", "parameters", "rounds", "finished", "final_accuracy"),
        *("best_accuracy", "final_f1", "bytes", "latency", "refused", "guarantee", "guarantee_of_sums", "seconds", "provenance"),
    )
    format = TRAINING_FORMAT

    version: str = "unknown"
    command: str = ""
    settings: KeptTraining = field(default_factory=lambda: decode(KeptTraining, {}))
    data: Mapping[str, Any] = field(default_factory=dict)
    parameters: int = 0
    rounds: tuple[RoundRecord, ...] = ()
    final_f1: float | None = field(default=None, metadata=OMITTED)
    bytes: Traffic = Traffic()
    latency: Latency | None = None
    guarantee: Guarantee | None = None
    guarantee_of_sums: Guarantee | None = field(default=None, metadata=OMITTED)
    seconds: float | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    weights: Named = field(default_factory=dict, metadata=BESIDE)
    buffers: Named = field(default_factory=dict, metadata=BESIDE)

    @classmethod
    def of(cls, rounds: Sequence[RoundRecord], weights: Named, *, dense_bytes: int = 0, **more: Any) -> TrainingResult:
        """Return the result of some rounds.

        Args:
            rounds: One record per round.
            weights: The global model's trainable tensors.
            dense_bytes: Of one update without any encoding.
            more: The other fields.
        """
        many = max(len(rounds), 1)
        up, down = (sum(getattr(record, name) for record in rounds) for name in ("bytes_up", "bytes_down"))
        dense = dense_bytes * (sum(len(record.clients) for record in rounds) / many)
        f1 = [record.f1 for record in rounds if record.f1 is not None]
        return cls(
            rounds=tuple(rounds),
            weights=weights,
            parameters=sum(value.numel() for value in weights.values()),
            final_f1=f1[-1] if f1 else None,
            bytes=Traffic(up=up, down=down, up_per_round=up / many, down_per_round=down / many, dense_per_round=dense),
            seconds=round(sum(record.seconds for record in rounds), 3),
            **more,
        )

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
    def builtin_data(self) -> bool:
        """Whether the data came with gradveil, so that nothing about it is secret."""
        return self.data.get("builtin") is True

    @property
    def counters(self) -> tuple[str, ...]:
        """Names of what the defense counted."""
        return tuple(dict.fromkeys(name for each in self.rounds for name in each.counters))

    @property
    def refused(self) -> int:
        """Refusals in all rounds."""
        return sum(record.refused for record in self.rounds)

    @property
    def planned(self) -> int:
        """Rounds asked for."""
        return len(self.rounds) if "rounds" in self.settings.unread else self.settings.rounds

    @property
    def finished(self) -> bool:
        """Whether all rounds asked for are done."""
        return len(self.rounds) >= self.planned

    @property
    def curve(self) -> Curve:
        """Accuracy by round."""
        seconds = [each.client_seconds for each in self.rounds if each.client_seconds is not None]
        return Curve.of(self.settings.said("seed"), self.rounds, seconds, self.latency)

    def kept(self, key: str, training: Training, chance: float) -> TrainingRecord:
        """Return what an audit keeps of this training, under its key."""
        return TrainingRecord(
            key=key,
            settings=decode(KeptTraining, training.as_dict()),
            chance=chance,
            final_accuracy=self.final_accuracy,
            best_accuracy=self.best_accuracy,
            bytes=UpDown(up=self.bytes.up, down=self.bytes.down),
            guarantee=self.guarantee,
            rounds=tuple(record.measured() for record in self.rounds),
            timing=TrainingTiming(
                key=key,
                seconds=self.seconds,
                client_seconds=tuple(each.client_seconds or 0.0 for each in self.rounds),
                latency=self.latency,
            ),
        )
