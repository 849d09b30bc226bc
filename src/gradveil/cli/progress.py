"""How far an audit is, on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gradveil.cli.output import console, note

if TYPE_CHECKING:
    from gradveil.run.pool import Progress

__all__ = ["Clock", "show_progress"]

Report = Callable[["Progress"], None]
LINE_EVERY = 30.0
"""Seconds between lines about the same cell, where there is no terminal."""


class Clock:
    """Tells the time left from how fast the work went since this run began; what was done before it does not count."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start with the first report."""
        self._now = now
        self._begun: tuple[float, float] | None = None

    def left(self, done: float) -> float | None:
        """Return the seconds left at a share done, or None while there is nothing to go by."""
        now = self._now()
        if self._begun is None:
            self._begun = (now, done)
        start, before = self._begun
        if done >= 1:
            return 0.0
        return (now - start) * (1 - done) / (done - before) if done > before else None


def share_done(progress: Progress) -> float:
    """Return how much is done: by steps where they are counted, else by cells; a training weighs as much as a cell."""
    cells = progress.done_cells / progress.cells if progress.cells else 1.0
    attacked = min(1.0, progress.done_steps / progress.steps) if progress.steps > 0 else cells
    if not progress.rounds:
        return attacked
    trained = progress.done_rounds / progress.rounds
    return (attacked * progress.cells + trained * progress.trainings) / (progress.cells + progress.trainings)


def counted(progress: Progress) -> str:
    """Return what is done in words."""
    cells = f"{progress.done_cells}/{progress.cells} cells"
    return f"{cells}, {progress.done_trainings}/{progress.trainings} trainings" if progress.trainings else cells


def time_left(seconds: float | None) -> str:
    """Return the time left in words."""
    from gradveil.verdict.numbers import duration

    return "time left not known yet" if seconds is None else f"about {duration(seconds)} left"


@contextlib.contextmanager
def show_progress(*, quiet: bool) -> Iterator[Report]:
    """Give a function that shows progress while the block runs."""
    if quiet:
        yield lambda progress: None
    elif console(err=True).is_terminal:
        with _bar() as report:
            yield report
    else:
        yield _lines()


@contextlib.contextmanager
def _bar() -> Iterator[Report]:
    from rich import progress as bars

    clock = Clock()
    columns = (
        bars.BarColumn(bar_width=30),
        bars.TextColumn(
            "{task.percentage:>3.0f} % · {task.fields[cells]} · {task.fields[left]} · {task.description}", markup=False
        ),
    )
    with bars.Progress(*columns, console=console(err=True), transient=True) as display:
        task = display.add_task("starting", total=1.0, cells="", left="")

        def report(progress: Progress) -> None:
            done = share_done(progress)
            left = time_left(clock.left(done))
            display.update(task, completed=done, description=progress.label, cells=counted(progress), left=left)

        yield report


def _lines(now: Callable[[], float] = time.monotonic) -> Report:
    clock, last = Clock(now), (-1, -LINE_EVERY)  # what was done, and when

    def report(progress: Progress) -> None:
        nonlocal last
        done, left = share_done(progress), clock.left(share_done(progress))
        ended = progress.done_cells + progress.done_trainings
        if ended == last[0] and now() - last[1] < LINE_EVERY:
            return
        last = (ended, now())
        note(f"{counted(progress)} · {done:.0%} · {time_left(left)} · {progress.label}")

    return report
