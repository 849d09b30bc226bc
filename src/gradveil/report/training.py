"""One training as ``gradveil train`` keeps it: training.json in, frozen records out, for a page of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError
from gradveil.study.fields import Fields, Malformed, read_json
from gradveil.study.load import check_format, without_folders
from gradveil.study.load_utility import read_curve, read_guarantee
from gradveil.study.results import Curve, Guarantee

__all__ = ["Round", "Training", "is_training", "load_training"]

TRAINING_FORMAT = "gradveil-training-1"
FILE = "training.json"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One federated round."""

    number: int
    accuracy: float | None
    loss: float | None
    f1: float | None
    bytes_up: float | None
    bytes_down: float | None
    client_seconds: float | None
    refused: int
    counters: Mapping[str, float]
    note: str


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training, finished or not.

    Attributes:
        settings: Every setting, by name.
        data: What was trained and tested on.
        rounds: One per round so far.
        curve: Accuracy by round.
        planned: Rounds asked for.
        bytes_up_ratio: Bytes that clients sent, relative to sending every update whole.
        guarantee: Differential privacy of all rounds so far; None where the folder does not say.
    """

    version: str
    command: str
    settings: Mapping[str, Any]
    data: Mapping[str, Any]
    builtin_data: bool
    rounds: tuple[Round, ...]
    curve: Curve
    planned: int
    finished: bool
    final_accuracy: float | None
    best_accuracy: float | None
    bytes_up: float | None
    bytes_down: float | None
    bytes_up_ratio: float | None
    refused: int
    seconds: float | None
    provenance: Mapping[str, Any]
    guarantee: Guarantee | None = None

    @property
    def defense(self) -> str:
        """Spelling of the defense."""
        return str(self.settings.get("defense", "none"))

    @property
    def score(self) -> str:
        """What the accuracies are called."""
        return "Dice" if self.data.get("score") == "dice" else "Accuracy"

    @property
    def counters(self) -> tuple[str, ...]:
        """Names of what the defense counted."""
        return tuple(dict.fromkeys(name for each in self.rounds for name in each.counters))


def is_training(folder: Path) -> bool:
    """Whether a folder holds a training and no audit."""
    return (folder / FILE).is_file() and not (folder / "run.json").is_file()


def load_training(folder: Path, *, share: bool = False) -> Training:
    """Return the training a folder holds.

    Args:
        folder: The folder that ``gradveil train --out`` wrote.
        share: Whether the result may leave the building; for user data, folders are then cut from every path.

    Raises:
        UsageError: The file is damaged, of another format, or has no round yet.
    """
    path = folder / FILE
    try:
        raw = read_json(path)
    except Malformed as error:
        raise UsageError(f"{str(path)!r} is damaged: no JSON object; run the same `gradveil train` command again") from error
    check_format(path, raw.get("format"), TRAINING_FORMAT)
    builtin = Fields(raw.get("data"), FILE).flag("builtin") is True
    found = Fields(without_folders(raw) if share and not builtin else raw, FILE)
    rounds = tuple(_round(each) for each in found.parts("rounds"))
    if not rounds:
        raise UsageError(
            f"the training in {str(folder)!r} has no finished round yet; the same `gradveil train` command continues it"
        )
    return _training(found, rounds, builtin)


def _training(found: Fields, rounds: tuple[Round, ...], builtin: bool) -> Training:
    sent, latency = found.part("bytes"), found.part("latency")
    up, dense = sent.number("up_per_round"), sent.number("dense_per_round")
    seconds = [each.client_seconds for each in rounds if each.client_seconds is not None]
    settings = found.mapping("settings")
    return Training(
        version=found.text("version", "unknown"),
        command=found.text("command"),
        settings=settings,
        data=found.mapping("data"),
        builtin_data=builtin,
        rounds=rounds,
        curve=read_curve(found, Fields(settings, FILE).whole("seed"), seconds, latency),
        planned=Fields(settings, FILE).whole("rounds", len(rounds)) or len(rounds),
        finished=found.flag("finished") is True,
        final_accuracy=found.number("final_accuracy"),
        best_accuracy=found.number("best_accuracy"),
        bytes_up=sent.number("up"),
        bytes_down=sent.number("down"),
        bytes_up_ratio=up / dense if up is not None and dense else None,
        refused=found.whole("refused", 0) or 0,
        seconds=found.number("seconds"),
        provenance=found.mapping("provenance"),
        guarantee=read_guarantee(found.part("guarantee")),
    )


def _round(each: Fields) -> Round:
    counters = each.part("counters")
    counted = {name: counters.number(name) for name in each.mapping("counters")}
    return Round(
        number=each.whole("round", 0) or 0,
        accuracy=each.number("accuracy"),
        loss=each.number("loss"),
        f1=each.number("f1"),
        bytes_up=each.number("bytes_up"),
        bytes_down=each.number("bytes_down"),
        client_seconds=each.number("client_seconds"),
        refused=each.whole("refused", 0) or 0,
        counters={name: value for name, value in counted.items() if value is not None},
        note=each.text("note"),
    )
