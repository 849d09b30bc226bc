"""Run a plan: cell by cell, in worker processes, resumable at any moment.

A cell is the unit of work and of resumption: its result is a pure function of its settings, the data, the weights, the code and
the execution mode, so a run that was killed and started again ends with the same bytes. So is a training, where the plan asks for
utility; a cell is given its utility as soon as trainings are done, and in the end it is the same whichever ended first. Workers
use one thread each; two threads per worker on two cores would be slower, and the thread count is part of what decides the bits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradveil.audit.cell import run_cell
from gradveil.audit.materials import Materials
from gradveil.errors import GradveilError
from gradveil.run.describe import describe_run
from gradveil.run.grid import cells_of
from gradveil.run.guard import starts_again_in_workers
from gradveil.run.jobs import Board, Job, Progress, cell_key, do_job, training_key
from gradveil.run.power_settlement import PowerSettlement
from gradveil.run.trainings import all_trainings, cell_utility, trainings_of
from gradveil.storage.run_folder import Store
from gradveil.study.cell import Cell
from gradveil.study.federation import UtilitySettings
from gradveil.study.load import load_run
from gradveil.study.plan import Plan
from gradveil.study.run_result import Run
from gradveil.study.training import Training

UNGUARDED = (
    "run_audit was called outside `if __name__ == '__main__':`, which every worker process would run again, so all cells run in "
    "this one; put the call under that line to use all cores"
)
__all__ = ["Progress", "cell_key", "run_audit", "run_cell", "run_cells"]


def run_audit(
    plan: Plan,
    out: Path,
    *,
    command: str = "",
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    materials: Materials | None = None,
) -> Run:
    """Run every cell and training of a plan that is not already in ``out``, and return the run with all its cells."""
    materials = materials or Materials()
    cells = cells_of(plan, materials)
    return run_cells(
        cells,
        out,
        lambda keys: describe_run(plan, cells, keys, command, materials),
        materials=materials,
        utility=plan.utility,
        power=plan.power,
        workers=workers,
        on_progress=on_progress,
    )


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    describe: Callable[[list[str]], Run],
    *,
    utility: UtilitySettings | None = None,
    power: bool = False,
    attack: bool = True,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    materials: Materials | None = None,
) -> Run:
    """Run the cells whose results are not already in ``out``, and the trainings behind their utility.

    Args:
        cells: What to run.
        out: Results folder.
        describe: Says what the run is, given the cells' keys.
        utility: How to train with the cells' defenses; None trains with none.
        power: Whether power curves are measured for all cells; those whose ensemble claims to be a judgement have one anyway.
        attack: Whether cells are attacked; otherwise only the trainings are run, and the run has no cells.
        workers: Processes; by default one per core on a CPU and one on a GPU.
        on_progress: Told after every cell, and every second while processes work.
        materials: What was read and built on the way here.
    """
    store = Store(out)
    materials = materials or Materials()
    keys = [cell_key(cell, materials) for cell in cells]
    settlement = _UtilitySettlement(store, dict(zip(keys, cells, strict=True)), utility, materials)
    keys = keys if attack else []
    jobs = [Job(cell, key) for cell, key in zip(cells, keys, strict=attack)]
    curves = PowerSettlement(store, dict(zip(keys, cells, strict=attack)), power, materials)
    jobs += curves.jobs
    jobs += [Job(training, key) for training, key in settlement.trainings.items()]
    described = describe(keys)
    with store.lock():
        store.write_run(described)
        done = {key for key in keys if store.read_cell(key) is not None}
        done |= curves.done()
        store.clear_shelves({job.key for job in jobs} - done)
        done |= {key for key in settlement.trainings.values() if store.read_training(key) is not None}

        def settle(key: str = "") -> None:
            settlement.settle(key)
            curves.settle(key)

        settle()
        board = Board(jobs, done, on_progress, settle)
        todo = [job for job in jobs if job.key not in done]
        # Chains first and the undefended cell last: the longest work must not be left for one worker at the end. What points of
        # power curves are needed depends on all cells.
        todo.sort(key=_order)
        board.show("starting")
        on_gpu = any(cell.device != "cpu" for cell in cells)
        count = min(len(todo), workers or (1 if on_gpu else os.cpu_count() or 1))
        if count > 1 and starts_again_in_workers():
            warnings.warn(UNGUARDED, stacklevel=3)
            count = 1
        if count <= 1:
            _one_by_one(todo, out, board, materials)
        else:
            _in_processes(todo, out, count, board)
    # Where nothing was attacked there are trainings alone, and no cell to read.
    return load_run(out) if attack else replace(described, out=out)


def _order(job: Job) -> tuple[int, bool, int]:
    if not isinstance(job.work, Cell):
        return 1 + isinstance(job.work, Training), False, 0  # as they come: seed by seed, and point by point
    return 0, job.work.defense == "none", -job.work.defense.count("+")


class _UtilitySettlement:
    """Knows which trainings a cell's utility is made of, and writes it down when they are done."""

    def __init__(self, store: Store, cells: dict[str, Cell], utility: UtilitySettings | None, materials: Materials) -> None:
        self._store, self._cells, self._utility = store, cells, utility
        asked = all_trainings(cells.values(), utility) if utility is not None else []
        self.trainings = {training: training_key(training, materials) for training in asked}

    def settle(self, key: str = "") -> None:
        """Give cells their utility: all of them, or those that a finished cell or training concerns."""
        if self._utility is None:
            return
        for name, cell in self._cells.items():
            own = trainings_of(cell, self._utility)
            if not own:
                continue
            mine = [self.trainings[training] for training in own]
            undefended = [self.trainings[training.undefended()] for training in own]
            if key and key not in (name, *mine, *undefended):
                continue
            read = self._store.read_training
            found = cell_utility(self._utility, [read(each) for each in mine], [read(each) for each in undefended])
            if found is not None:
                self._store.give_utility(name, found)


def _one_by_one(todo: list[Job], out: Path, board: Board, materials: Materials) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job in todo:

            def report(done: int, planned: int, job: Job = job) -> None:
                board.begun[job.key] = (done, planned)
                board.show(job.label)

            do_job(job, str(out), report, materials)
            board.finish(job)
    finally:
        torch.set_num_threads(before)


_counts: Any = None
"""In a worker: the shared (done, planned) steps of every job, two numbers per job."""
_materials = Materials()
"""In a worker: what it has read and built so far; a process pool has no other place for what its jobs share."""


def _worker_start(counts: Any) -> None:
    global _counts
    _counts = counts
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the run is killed: it would wait for work for ever, and nobody would see it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back inside the block: a process whose starting is broken off complains at length.

    Processes started there never see Ctrl-C, and end when their parent says so.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    came: list[int] = []
    # The mask is what the processes inherit; it does not keep another thread from taking a signal that this one then answers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Only the main thread answers signals, and only it may say how.
    held = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    answers = {each: signal.signal(each, lambda number, _: came.append(number)) for each in held}
    try:
        yield
    finally:
        for each, answer in answers.items():
            signal.signal(each, signal.SIG_DFL if answer is None else answer)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in came:
            signal.raise_signal(number)


def _work_in_process(index: int, job: Job, out: str) -> str:
    def report(done: int, planned: int) -> None:
        _counts[2 * index], _counts[2 * index + 1] = done, planned

    return do_job(job, out, report, _materials)


def _in_processes(todo: list[Job], out: Path, count: int, board: Board) -> None:
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 2 * len(todo), lock=False)
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count, mp_context=context, initializer=_worker_start, initargs=(counts,)) as pool:
        try:
            with _uninterrupted():
                pending: dict[Future[str], Job] = {
                    pool.submit(_work_in_process, i, job, str(out)): job for i, job in enumerate(todo)
                }
            while pending:
                finished, _ = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                board.begun = {job.key: (counts[2 * i], counts[2 * i + 1]) for i, job in enumerate(todo) if counts[2 * i + 1]}
                for future in finished:
                    future.result()
                    board.finish(pending.pop(future))
                if not finished:
                    board.show("working")
        except BrokenProcessPool as error:
            why = "for lack of memory, or because a script that calls run_audit has no `if __name__ == '__main__':`"
            raise GradveilError(f"a worker process died, perhaps {why}; the same command continues") from error
        except Exception:
            pool.shutdown(wait=False, cancel_futures=True)  # cells at work are finished and kept
            raise
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise
