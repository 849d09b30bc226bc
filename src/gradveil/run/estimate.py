"""What a plan will take, before it runs: cells, optimisation steps, and a rough idea of time and memory.

The number of steps follows from the ensemble and from what the defense lets an attacker try. Time is measured: every attacker of
every cell is run for a few steps on a real update (`gradveil.run.pace`), and the referee judges what they found. It is an
estimate all the same: other work on the machine is not in it, and compilation only roughly.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.client_runs import run_clients
from gradveil.attacks.ensembles import line_up, resolve
from gradveil.audit.materials import Materials
from gradveil.audit.party import own_data
from gradveil.audit.scene import Subject, build_learner, build_subject
from gradveil.audit.threat import threat_of
from gradveil.client.send import send
from gradveil.client.timing import best_seconds, run_seconds
from gradveil.data import Dataset
from gradveil.defenses import build_defense
from gradveil.errors import UsageError
from gradveil.federation.latency import measure_latency
from gradveil.federation.setup import build_federation
from gradveil.federation.vertical_training import build_vertical, measure_party
from gradveil.randomness import Seed
from gradveil.records import Batch, Reconstruction
from gradveil.run.grid import cells_of, check_inputs
from gradveil.run.pace import attack_seconds, judging_seconds
from gradveil.run.power import MOST_LEAKS, always_measured, curve_of
from gradveil.run.trainings import all_trainings
from gradveil.spectra.spectrum import DENSE_ENTRIES
from gradveil.study.cell import Cell
from gradveil.study.federation import UtilitySettings
from gradveil.study.plan import Plan
from gradveil.study.training import BASELINE, Training

__all__ = ["CellEstimate", "Estimate", "PowerEstimate", "TrainingEstimate", "estimate_plan"]

ENOUGH_SECONDS = 0.25
LONG_SECONDS = 15.0
BESIDE = 1.1
"""Time on top of attackers and referee, as a factor: nulls, metrics, intervals; measured on the default plan."""
ROOM = 1.25
"""Memory on top of the largest step, as a factor."""
START_SECONDS = 6.0
"""Importing torch and loading data, once per worker."""
MOST_STEPS = 1_000_000
RISK_UPDATES = 450
EXACT_UPDATES = 30
"""What the risk of one record costs, in updates of one client: by leading singular values, or where J is small enough to hold."""
DEAR_SECONDS = 0.05
AT_ONCE = 16
"""A client that takes less is timed among so many, as attackers run it on their candidates."""
LATENCY_SECONDS = 5.0
"""What a training spends at its end on timing a client with and without the defense."""


@dataclass(frozen=True)
class CellEstimate:
    """What one cell will take."""

    cell: Cell
    stances: tuple[str, ...]
    steps: int
    seconds: float


@dataclass(frozen=True)
class TrainingEstimate:
    """What all trainings with one defense will take."""

    training: Training
    seeds: int
    seconds: float


@dataclass(frozen=True)
class PowerEstimate:
    """What the points of power curves at one setting will take: what one takes, and how many there are at most."""

    point: CellEstimate
    points: int


@dataclass(frozen=True)
class Estimate:
    """What a plan will take.

    Attributes:
        rows: One estimate per cell, in plan order.
        workers: Processes that share the cells.
        memory_mb: Peak of all workers together; on a GPU, of the GPU.
        device: Where it runs.
        trainings: One estimate per defense that is trained with.
        power: Points of power curves, at most: one estimate per setting that is tried.
    """

    rows: tuple[CellEstimate, ...]
    workers: int
    memory_mb: int
    device: str
    trainings: tuple[TrainingEstimate, ...] = ()
    power: tuple[PowerEstimate, ...] = ()

    @property
    def steps(self) -> int:
        """Candidate-steps of all cells and points of power curves."""
        return sum(row.steps for row in self.rows) + sum(each.points * each.point.steps for each in self.power)

    @property
    def seconds(self) -> float:
        """Wall time: no shorter than the longest cell or training."""
        points = [each.point.seconds for each in self.power]
        single = [row.seconds for row in self.rows] + [each.seconds / each.seeds for each in self.trainings] + points
        total = sum(row.seconds for row in self.rows) + sum(each.seconds for each in self.trainings)
        total += sum(each.points * each.point.seconds for each in self.power)
        return START_SECONDS + max(total / self.workers, max(single))

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as plain JSON values."""
        return {
            "cells": len(self.rows),
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "memory_mb": self.memory_mb,
            "workers": self.workers,
            "device": self.device,
            "estimate": True,
            "rows": [
                {
                    "cell": row.cell.as_dict(),
                    "stances": list(row.stances),
                    "steps": row.steps,
                    "seconds": round(row.seconds, 1),
                }
                for row in self.rows
            ],
            "trainings": [
                {"training": each.training.as_dict(), "seeds": each.seeds, "seconds": round(each.seconds, 1)}
                for each in self.trainings
            ],
            "power": [
                {
                    "defense": each.point.cell.defense,
                    "points": each.points,
                    "steps": each.point.steps,
                    "seconds": round(each.points * each.point.seconds, 1),
                }
                for each in self.power
            ],
        }


def estimate_plan(plan: Plan, workers: int | None = None) -> Estimate:
    """Estimate a plan; loads its data and builds its models.

    Args:
        plan: What would run.
        workers: Processes; None is as many as an audit would start.
    """
    check_inputs(plan)
    cells = cells_of(plan)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers do
    try:
        rows = _rows(cells)
        trainings = _trainings(cells, plan.utility) if plan.utility is not None else []
        power = _power(cells, plan.power)
    finally:
        torch.set_num_threads(before)
    device = cells[0].device
    jobs = len(cells) + sum(each.seeds for each in trainings) + sum(each.points for each in power)
    count = workers or (1 if device != "cpu" else max(1, min(jobs, os.cpu_count() or 1)))
    return Estimate(
        tuple(rows), count, _memory_mb(device) * (count if device == "cpu" else 1), device, tuple(trainings), tuple(power)
    )


def _trainings(cells: list[Cell], utility: UtilitySettings) -> list[TrainingEstimate]:
    """Time one client for a step or two with every defense, and multiply."""
    rows = []
    for training in all_trainings(cells, utility.replace(seeds=1)):
        settings = training.federation()
        if training.cut:
            rows.append(TrainingEstimate(training, utility.seeds, utility.seeds * _vertical_seconds(training)))
            continue
        federation = build_federation(settings)
        size = max(len(part) for part in federation.parts)
        steps = settings.training().steps(size)
        few = min(2, steps)
        short = build_federation(settings.replace(local_steps=few), federation.train, federation.test)
        timed = measure_latency(short, seconds=ENOUGH_SECONDS)
        client = timed.defended_ms / 1000 * steps / few
        # Each test record costs about a third of a trained one: no backward pass.
        looks = utility.rounds / utility.evaluate_every * client * len(federation.test) / max(1, 3 * size)
        measured = LATENCY_SECONDS if training.defense != BASELINE else 0.0
        once = utility.rounds * utility.clients_per_round * client + looks + min(measured, 60 * client)
        rows.append(TrainingEstimate(training, utility.seeds, utility.seeds * once))
    return rows


def _power(cells: list[Cell], asked: bool) -> list[PowerEstimate]:
    """Count the points of all curves once, as if every one that may be needed were."""
    materials, by_key = Materials(), {cell.key(): cell for cell in cells}
    wanted = [cell for cell in cells if asked or always_measured(cell)]
    curves = [curve_of(cell, Cell.key, by_key, materials) for cell in wanted]
    count: dict[Cell, int] = {}
    for curve in curves:
        count[curve.planted[0].task.cell] = min(MOST_LEAKS, len(curve.planted))
    for task in dict.fromkeys(point.task for curve in curves for point in curve.ladder if not point.is_cell):
        count[task.cell] = count.get(task.cell, 0) + 1
    return [PowerEstimate(row, count[row.cell]) for row in _rows(list(count))]


def _vertical_seconds(training: Training) -> float:
    """Time a party for one step, count the label owner as another, and multiply; a test record costs a third of a trained one."""
    built = build_vertical(training.federation(), training.cut, training.parts)
    timed = measure_party(built, seconds=ENOUGH_SECONDS)
    parties = len(built.federation.parties)
    step = (parties * timed.defended_ms + timed.undefended_ms) / 1000
    looks = training.rounds / training.evaluate_every * step * built.batches * len(built.test) / (3 * len(built.train))
    measured = LATENCY_SECONDS if training.defense != BASELINE else 0.0
    return training.rounds * built.steps * step + looks + min(measured, 60 * step)


def _rows(cells: list[Cell]) -> list[CellEstimate]:
    materials = Materials()
    clients: dict[Cell, float] = {}
    rows = []
    for cell in cells:
        bare = cell.replace(defense="none", ensemble="quick", state=_untrained(cell))
        if bare not in clients:
            clients[bare] = _client_seconds(bare, materials.dataset(cell))
        rows.append(_row(cell, materials.dataset(cell), clients[bare]))
    return rows


def _row(cell: Cell, dataset: Dataset, client: float) -> CellEstimate:
    """Line the attackers up against one real update, and add up what they would spend on all of them."""
    ensemble = resolve(cell.ensemble, threat_of(cell).sees)
    single = cell.replace(records=cell.batch_size * cell.clients, state=_untrained(cell))
    subject = build_subject(single, dataset, 0)
    context = subject.context(MOST_STEPS)
    attacks = line_up(ensemble, subject.targets[0].observation, context)
    if not attacks:
        raise UsageError(f"no attack of {ensemble.name!r} applies to {cell.model!r} at batch size {cell.batch_size}")
    observation, updates = subject.targets[0].observation, cell.targets + ensemble.rehearsals
    defended = client if context.simulate is None else _defended_seconds(cell, _batch(cell, dataset), context)
    steps, seconds = 0, 0.0
    found: list[Reconstruction] = []
    for attack in attacks:
        cost = attack.cost()
        steps += min(cost.steps, context.budget) * cost.restarts * attack.hypotheses(observation, context) * updates
        pace = attack_seconds(attack, observation, context, updates, defended)
        seconds += pace.seconds
        found += pace.found
    seconds += judging_seconds(observation, found, updates)
    stances = tuple(dict.fromkeys(attack.stance for attack in attacks))
    return CellEstimate(cell, stances, steps, BESIDE * seconds + _risk_seconds(cell, subject, client))


def _risk_seconds(cell: Cell, subject: Subject, client: float) -> float:
    """Return what scores with and without the defense take; those of defenses that only add noise come with the undefended."""
    if cell.risk == "off":
        return 0.0
    size = subject.candidates[0].numel() * subject.learner.parameters
    each = (EXACT_UPDATES if size <= DENSE_ENTRIES else RISK_UPDATES) * client / cell.batch_size
    observation = subject.targets[0].observation
    plain = observation.adversary.arrives(observation).plain_search
    return cell.targets * cell.batch_size * cell.clients * each * (1 if plain else 2)


def _untrained(cell: Cell) -> str:
    """Training first would take its own time, and one step takes as long at any weights."""
    return "given" if cell.weights else "untrained"


def _batch(cell: Cell, dataset: Dataset) -> Batch:
    size = cell.batch_size * cell.clients
    batch = own_data(cell, dataset).batch([index % len(dataset) for index in range(size)])
    return Batch(batch.inputs.to(cell.device), batch.targets.to(cell.device))


def _client_seconds(cell: Cell, dataset: Dataset) -> float:
    """Time one client's update without a defense."""
    learner = build_learner(cell, dataset, build_defense("none"))
    batch = _batch(cell, dataset)
    one = batch.replace(inputs=batch.inputs[: cell.batch_size], targets=batch.targets[: cell.batch_size])
    return _seconds(lambda: send(learner, one, build_defense("none"), Seed(0)), cell.device)


def _defended_seconds(cell: Cell, batch: Batch, context: AttackContext) -> float:
    """Time one run of the defended client among as many as attackers run at once; alone where that is long already."""

    def many(count: int) -> Callable[[], object]:
        inputs, targets = (value.expand(count, *value.shape) for value in (batch.inputs, batch.targets))
        return lambda: run_clients(context, inputs, targets, 0)

    alone = _seconds(many(1), cell.device)
    return alone if alone >= DEAR_SECONDS else _seconds(many(AT_ONCE), cell.device) / AT_ONCE


def _seconds(work: Callable[[], object], device: str) -> float:
    """Return the shortest of a few runs within a fraction of a second; the first, which warms up, only if it is long."""
    first = run_seconds(work, device)
    return first if first >= LONG_SECONDS else best_seconds([work], device, seconds=ENOUGH_SECONDS, most=math.inf)[0]


def _memory_mb(device: str) -> int:
    """Return the peak so far, which holds the largest step measured, with room for judging."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated() / 2**20 * ROOM)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit * ROOM)
