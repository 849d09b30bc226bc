"""Run a plan: cell by cell, in worker processes, resumable at any moment.

A cell is the unit of work and of resumption: its result is a pure function of its settings, the data, the weights, the code and
the execution mode, so a run that was killed and started again ends with the same bytes. Workers use one thread each; two threads
per worker on two cores would be slower, and the thread count is part of what decides the bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradveil.audit.cells import Cell
from gradveil.audit.describe import code_version, describe_run
from gradveil.audit.measure import run_cell
from gradveil.audit.plan import Plan
from gradveil.audit.store import Store
from gradveil.audit.subjects import load_cell_data
from gradveil.errors import GradveilError
from gradveil.registry import import_object, parse_call, split_chain

__all__ = ["AuditResult", "Progress", "run_audit", "run_cell", "run_cells"]


@dataclass(frozen=True)
class Progress:
    """How far a run is; steps of cells not yet begun are extrapolated from those that are."""

    done_cells: int
    cells: int
    done_steps: int
    steps: int
    label: str


@dataclass(frozen=True)
class AuditResult:
    """What a run produced."""

    out: Path
    cells: list[dict[str, Any]]
    missing: list[str]


def cell_key(cell: Cell, digests: dict[tuple[str, str, str], str]) -> str:
    """Return the key of a cell's result; loads the data once per source to know its content."""
    source = (cell.data, cell.labels, cell.scale)
    if source not in digests:
        digests[source] = load_cell_data(cell).digest()
    weights = hashlib.sha256(Path(cell.weights).read_bytes()).hexdigest() if cell.weights else ""
    return cell.key(
        data=digests[source], weights=weights, code=code_version(), own=_own_code(cell), torch=torch.__version__, threads=1
    )


def _own_code(cell: Cell) -> str:
    """Return a digest of the user's files that the cell names; what they import in turn is not followed."""
    digest = hashlib.sha256()
    for spelling in (cell.model, cell.loss, cell.ensemble, *split_chain(cell.defense)):
        name, _ = parse_call(spelling)
        module, colon, _ = name.rpartition(":")
        if colon and not module.endswith(".py"):
            import_object(name)
            module = getattr(sys.modules[module], "__file__", None) or ""
        if module:
            digest.update(Path(module).read_bytes())
    return digest.hexdigest()


def run_audit(
    plan: Plan,
    out: Path,
    *,
    command: str = "",
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> AuditResult:
    """Run every cell of a plan that is not already in ``out``, and return all of them."""
    return run_cells(plan.cells(), out, lambda keys: describe_run(plan, keys, command), workers=workers, on_progress=on_progress)


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    describe: Callable[[list[str]], dict[str, Any]],
    *,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> AuditResult:
    """Run the cells whose results are not already in ``out``.

    Args:
        cells: What to run.
        out: Results folder.
        describe: Makes run.json from the cells' keys.
        workers: Processes; by default one per core on a CPU and one on a GPU.
        on_progress: Told after every cell, and every second while processes work.
    """
    store = Store(out)
    digests: dict[tuple[str, str, str], str] = {}
    keys = [cell_key(cell, digests) for cell in cells]
    with store.lock():
        store.write_run(describe(keys))
        todo = [(cell, key) for cell, key in zip(cells, keys, strict=True) if store.read_cell(key) is None]
        # Chains first and the undefended cell last: the longest work must not be left for one worker at the end.
        todo.sort(key=lambda pair: (pair[0].defense == "none", -pair[0].defense.count("+")))
        board = _Board(len(cells), on_progress, done=len(cells) - len(todo))
        board.show("starting")
        on_gpu = any(cell.device != "cpu" for cell in cells)
        count = min(len(todo), workers or (1 if on_gpu else os.cpu_count() or 1))
        if count <= 1:
            _one_by_one(todo, out, board)
        else:
            _in_processes(todo, out, count, board)
        found = {key: store.read_cell(key) for key in keys}
    return AuditResult(out, [c for c in found.values() if c is not None], [key for key, c in found.items() if c is None])


@dataclass
class _Board:
    """Keeps count of cells and steps and shows them."""

    cells: int
    on_progress: Callable[[Progress], None] | None
    done: int = 0
    begun: dict[str, tuple[int, int]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def finish(self, key: str, label: str) -> None:
        self.done += 1
        self.finished.add(key)
        self.show(label)

    def show(self, label: str) -> None:
        if self.on_progress is None:
            return
        planned = sum(steps for _, steps in self.begun.values())
        # A finished cell counts in full: attacks may stop before their last step.
        done = sum(steps if key in self.finished else now for key, (now, steps) in self.begun.items())
        known = len(self.begun.keys() | self.finished)
        to_run = self.cells - self.done + len(self.finished)
        total = round(planned / known * to_run) if known else 0
        self.on_progress(Progress(self.done, self.cells, done, total, label))


def _work(cell: Cell, key: str, out: str, report: Callable[[int, int], None] | None) -> str:
    result = run_cell(cell, key=key, report=report)
    Store(Path(out)).write_cell(key, result.record, result.timing, result.pictures)
    return key


def _one_by_one(todo: list[tuple[Cell, str]], out: Path, board: _Board) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for cell, key in todo:

            def report(done: int, planned: int, key: str = key, label: str = cell.defense) -> None:
                board.begun[key] = (done, planned)
                board.show(label)

            _work(cell, key, str(out), report)
            board.finish(key, cell.defense)
    finally:
        torch.set_num_threads(before)


_counts: Any = None
"""In a worker: the shared (done, planned) steps of every cell, two numbers per cell."""


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
    """Hold Ctrl-C back inside the block; processes started there never see it, and end when their parent says so."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work_in_process(index: int, cell: Cell, key: str, out: str) -> str:
    def report(done: int, planned: int) -> None:
        _counts[2 * index], _counts[2 * index + 1] = done, planned

    return _work(cell, key, out, report)


def _in_processes(todo: list[tuple[Cell, str]], out: Path, count: int, board: _Board) -> None:
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 2 * len(todo), lock=False)
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count, mp_context=context, initializer=_worker_start, initargs=(counts,)) as pool:
        try:
            with _uninterrupted():
                pending: dict[Future[str], Cell] = {
                    pool.submit(_work_in_process, i, cell, key, str(out)): cell for i, (cell, key) in enumerate(todo)
                }
            while pending:
                finished, _ = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                board.begun = {key: (counts[2 * i], counts[2 * i + 1]) for i, (_, key) in enumerate(todo) if counts[2 * i + 1]}
                for future in finished:
                    board.finish(future.result(), pending.pop(future).defense)
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
