"""Utility: one federated training per defense and seed, kept like a cell, and what the pairs of them say about a defense.

Of a cut model the parties of vertical learning train together, else clients who share updates do. A training does not depend on
the attack or on the batch size under attack, so all cells with the same data, model, cut and defense share it. The undefended
training of the same seed is always among them: accuracy means little without it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gradveil.run.pairs import pair_up
from gradveil.study.cell import Cell
from gradveil.study.codec import decode
from gradveil.study.declare import part_of
from gradveil.study.federation import UtilitySettings
from gradveil.study.kept import KeptTraining, KeptUtility
from gradveil.study.proved import Guarantee
from gradveil.study.results import TrainingBytes, Utility
from gradveil.study.settings import DataSource, ModelSource
from gradveil.study.training import BASELINE, Training
from gradveil.study.training_result import RoundRecord, TrainingRecord

__all__ = [
    "all_trainings",
    "cell_utility",
    "check_trainings",
    "train_once",
    "trainings_of",
]

CHECKPOINTS = 10


def trainings_of(cell: Cell, utility: UtilitySettings) -> list[Training]:
    """Return the trainings behind one cell's utility, one per seed; the seeds follow on from the cell's.

    Which party is attacked, and what of it is seen, plays no part: the parties train together.
    """
    return [
        Training.of(
            utility,
            **dataclasses.asdict(part_of(DataSource, cell)),
            **dataclasses.asdict(part_of(ModelSource, cell)),
            defense=cell.defense,
            seed=cell.seed + index,
            device=cell.device,
            cut=cell.cut,
            parts=cell.parts,
        )
        for index in range(utility.seeds)
    ]


def all_trainings(cells: Iterable[Cell], utility: UtilitySettings) -> list[Training]:
    """Return every training of a run once, seed by seed, undefended first: a run that is stopped early has whole pairs."""
    wanted = [training for cell in cells for training in trainings_of(cell, utility)]
    both = [each for training in wanted for each in (training.undefended(), training)]
    return sorted(dict.fromkeys(both), key=lambda training: (training.seed, training.defense != BASELINE))


def check_trainings(cells: Iterable[Cell], utility: UtilitySettings) -> None:
    """Deal the records out to the clients of every undefended training, so that none fails for want of records later.

    Raises:
        UsageError: One sentence about the split, the model or the data.
    """
    from gradveil.federation.setup import build_federation
    from gradveil.federation.vertical_training import build_vertical

    for training in all_trainings(cells, utility):
        if training.defense != BASELINE:
            continue
        if training.cut:
            build_vertical(training.federation(), training.cut, training.parts)
        else:
            build_federation(training.federation())


def train_once(
    training: Training, *, key: str = "", work: Path | None = None, report: Callable[[int, int], None] | None = None
) -> TrainingRecord:
    """Train once and return what the report and the recommendation need.

    Args:
        training: The settings.
        key: Under which the result is kept.
        work: Folder for checkpoints, from which a killed training goes on; None keeps none.
        report: Told ``(rounds done, rounds planned)``.
    """
    from gradveil.federation.engine import run_training
    from gradveil.federation.vertical_training import train_vertical

    def told(record: RoundRecord) -> None:
        if report is not None:
            report(record.round, training.rounds)

    # A checkpoint a round would cost small models more time than the rounds a killed training repeats.
    every = max(1, training.rounds // CHECKPOINTS)
    settings: dict[str, Any] = {"out": work, "on_round": told, "latency": True, "checkpoint_every": every}
    if training.cut:
        result = train_vertical(training.federation(), cut=training.cut, parts=training.parts, **settings)
    else:
        result = run_training(training.federation(), **settings)
    return result.kept(key, training, _chance(training))


def _chance(training: Training) -> float:
    """Return the accuracy of always naming the most frequent class; of masks, the mean Dice of calling every pixel foreground."""
    from gradveil.data import load_source
    from gradveil.learning.task import dice

    data = load_source(training)
    if data.dense:
        return float(dice(data.targets >= 0, data.targets).mean())
    counts = data.counts()
    return max(counts) / sum(counts)


def cell_utility(
    utility: UtilitySettings, own: Sequence[TrainingRecord | None], undefended: Sequence[TrainingRecord | None]
) -> Utility | None:
    """Return the utility of a cell from the trainings that are done, or None where no pair is.

    Args:
        utility: What the plan asked for.
        own: The cell's trainings, one per seed; None where one is not done.
        undefended: The trainings they are paired with, in the same order.
    """
    pairs = [(a, b) for a, b in zip(own, undefended, strict=True) if a is not None and b is not None and _trained(a, b)]
    if not pairs:
        return None
    sides = list(zip(*pairs, strict=True))
    known = [{each.settings.seed: each.final_accuracy or 0.0 for each in side} for side in sides]
    means = pair_up(*known)
    up, down = ([statistics.fmean(getattr(each.bytes, name) for each in side) for side in sides] for name in ("up", "down"))
    return Utility(
        settings=_told(utility, pairs[0][0].settings),
        seeds=tuple(a.settings.seed for a, _ in pairs),
        trainings=tuple(a.key for a, _ in pairs),
        baseline=tuple(b.key for _, b in pairs),
        accuracy=means["accuracy"],
        undefended=means["undefended"],
        difference=means["difference"],
        pmm=means.get("pmm"),
        chance=pairs[0][0].chance,
        bytes=TrainingBytes(up=up[0], down=down[0], undefended_up=up[1], undefended_down=down[1]),
        guarantee=_weakest([a.guarantee for a, _ in pairs]),
    )


def _told(utility: UtilitySettings, training: KeptTraining) -> KeptUtility:
    """Return how the trainings went, without what is about clients where there were parties."""
    if not training.cut:
        return decode(KeptUtility, utility.as_dict())
    about_clients = ("clients", "clients_per_round", "partition", "aggregation")
    told = {name: value for name, value in utility.as_dict().items() if name not in about_clients}
    return decode(KeptUtility, {**told, "cut": training.cut, "parts": training.parts})


def _weakest(guarantees: Sequence[Guarantee | None]) -> Guarantee | None:
    """Return what holds for every seed: no guarantee where one has none, else the largest ε."""
    known = [each for each in guarantees if each is not None]
    if len(known) < len(guarantees):
        return None
    return max(known, key=lambda each: math.inf if each.epsilon is None else each.epsilon)


def _trained(*records: TrainingRecord) -> bool:
    return all(record.final_accuracy is not None for record in records)
