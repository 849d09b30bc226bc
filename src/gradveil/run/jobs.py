"""The units of work of a run: cells and trainings, their keys, and how far the run is with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gradveil.audit.cell import run_cell
from gradveil.audit.materials import Materials
from gradveil.audit.power import measure_rung
from gradveil.provenance import code_version, own_files_digest
from gradveil.run.power import Curve, Measured, Point, of_cell
from gradveil.run.trainings import train_once
from gradveil.storage.run_folder import Store
from gradveil.study.cell import Cell
from gradveil.study.rung import RungTask
from gradveil.study.training import Training

__all__ = ["Board", "Job", "Progress", "cell_key", "do_job", "read_point", "training_key"]


@dataclass(frozen=True)
class Progress:
    """How far a run is; steps of cells not yet begun are extrapolated from those that are.

    Attributes:
        done_cells: Cells, and points of power curves, whose result is there or not needed any more.
        cells: All of them.
        done_steps: Attack steps done in this run.
        steps: Attack steps of this run, as far as is known.
        label: What is being worked on.
        done_trainings: Trainings whose result is there.
        trainings: All trainings; 0 where no utility was asked for.
        done_rounds: Federated rounds done, in trainings of this run or before.
        rounds: All of them.
    """

    done_cells: int
    cells: int
    done_steps: int
    steps: int
    label: str
    done_trainings: int = 0
    trainings: int = 0
    done_rounds: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class Job:
    """One unit of work and of resumption, and the key under which its result is kept.

    Attributes:
        work: What to do.
        key: Of its result.
        curves: Of a point of a power curve, those that may need it.
    """

    work: Cell | Training | RungTask
    key: str
    curves: tuple[Curve, ...] = ()

    @property
    def label(self) -> str:
        """What to call it while it runs."""
        if isinstance(self.work, Cell):
            return self.work.defense
        if isinstance(self.work, RungTask):
            return self.work.label
        return f"training with {self.work.defense}, seed {self.work.seed}"


def cell_key(cell: Cell, materials: Materials | None = None) -> str:
    """Return the key of a cell's result; loads the data once per source to know its content."""
    own = own_files_digest((cell.model, cell.loss, cell.ensemble, cell.defense))
    return cell.key(code=code_version(), own=own, **_content(cell, materials or Materials()))


def training_key(training: Training, materials: Materials | None = None) -> str:
    """Return the key of a training's result; what only attacks depend on plays no part in it."""
    code, own = code_version(attacks=False), own_files_digest((training.model, training.loss, training.defense))
    return training.key(code=code, own=own, **_content(training, materials or Materials()))


def _content(work: Cell | Training, materials: Materials) -> dict[str, str | int]:
    weights = hashlib.sha256(Path(work.weights).read_bytes()).hexdigest() if work.weights else ""
    return {"data": materials.digest(work), "weights": weights, "torch": torch.__version__, "threads": 1}


def do_job(job: Job, out: str, report: Callable[[int, int], None] | None, materials: Materials) -> str:
    """Do one unit of work, keep its result, and return its key.

    Args:
        job: What to do.
        out: The results folder.
        report: Told ``(done, planned)`` on the way, in attack steps or federated rounds.
        materials: What the run has read and built so far.
    """
    store = Store(Path(out))
    if isinstance(job.work, Cell):
        found = run_cell(job.work, materials=materials, key=job.key, report=report, work=store.partial_folder(job.key))
        store.write_cell(found.result, found.pictures)
    elif isinstance(job.work, RungTask):
        point = Point(job.work, job.key)
        if any(curve.wants(point, lambda each: read_point(store, each)) for curve in job.curves):
            shelf = store.partial_folder(job.key, "power")
            store.write_rung(measure_rung(job.work, materials=materials, key=job.key, report=report, work=shelf))
    else:
        store.write_training(train_once(job.work, key=job.key, work=store.work_folder(job.key), report=report))
    return job.key


def read_point(store: Store, point: Point) -> Measured | None:
    """Return what is known of a point of a power curve, with its canaries; None where it is not measured yet."""
    if point.is_cell:
        cell = store.read_cell(point.key)
        return None if cell is None else (of_cell(cell), ())
    record = store.read_rung(point.key)
    return None if record is None else (record.rung, record.checks)


@dataclass
class Board:
    """Keeps count of cells, trainings and what is done of those at work, and shows them."""

    jobs: list[Job]
    done: set[str]
    on_progress: Callable[[Progress], None] | None
    on_finish: Callable[[str], None] = lambda key: None
    begun: dict[str, tuple[int, int]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def finish(self, job: Job) -> None:
        """Count a job as done."""
        self.done.add(job.key)
        self.finished.add(job.key)
        self.on_finish(job.key)
        self.show(job.label)

    def show(self, label: str) -> None:
        """Tell how far the run is."""
        if self.on_progress is None:
            return
        cells = [job.key for job in self.jobs if not isinstance(job.work, Training)]
        trainings = {job.key: job.work.rounds for job in self.jobs if isinstance(job.work, Training)}
        done, total = self._steps(cells)
        rounds = sum(each if key in self.done else self.begun.get(key, (0, 0))[0] for key, each in trainings.items())
        self.on_progress(
            Progress(
                len(self.done.intersection(cells)),
                len(cells),
                done,
                total,
                label,
                done_trainings=len(self.done & trainings.keys()),
                trainings=len(trainings),
                done_rounds=rounds,
                rounds=sum(trainings.values()),
            )
        )

    def _steps(self, cells: list[str]) -> tuple[int, int]:
        begun = {key: self.begun[key] for key in cells if key in self.begun}
        finished = self.finished.intersection(cells)
        planned = sum(steps for _, steps in begun.values())
        # A finished cell counts in full: attacks may stop before their last step.
        done = sum(steps if key in finished else now for key, (now, steps) in begun.items())
        known = len(begun.keys() | finished)
        to_run = len(cells) - len(self.done.intersection(cells)) + len(finished)
        return done, round(planned / known * to_run) if known else 0
