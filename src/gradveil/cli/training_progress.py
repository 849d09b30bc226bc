"""How far a training is, on stderr: a bar with accuracy and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gradveil.cli.output import console, note
from gradveil.cli.progress import Clock, time_left

if TYPE_CHECKING:
    from gradveil.study.training_result import RoundRecord

__all__ = ["accurate", "show_rounds", "words"]

Report = Callable[["RoundRecord"], None]
LINE_EVERY = 10.0
"""Seconds between lines, where there is no terminal."""


SCORES = {"accuracy": "accuracy", "dice": "Dice"}
"""What the accuracy of a training is called."""


@contextlib.contextmanager
def show_rounds(rounds: int, *, quiet: bool) -> Iterator[Report | None]:
    """Give a function that shows finished rounds while the block runs."""
    if quiet:
        yield None
    elif console(err=True).is_terminal:
        with _bar(rounds) as report:
            yield report
    else:
        yield _lines(rounds)


def accurate(share: float | None) -> str:
    """Return an accuracy with the digit that trainings differ in."""
    return "not measured" if share is None else f"{100 * share:.1f} %"


def words(record: RoundRecord, rounds: int, left: float | None) -> str:
    """Return one round in words."""
    told = f"round {record.round}/{rounds}"
    if record.accuracy is not None:
        told += f" · {SCORES[record.score]} {accurate(record.accuracy)}"
    if record.f1 is not None:
        told += f" · F1 {accurate(record.f1)}"
    if record.refused:
        told += f" · {record.refused} refused"
    return f"{told} · {time_left(left)}"


@contextlib.contextmanager
def _bar(rounds: int) -> Iterator[Report]:
    from rich import progress as bars

    clock = Clock()
    columns = (bars.BarColumn(bar_width=30), bars.TextColumn("{task.description}", markup=False))
    with bars.Progress(*columns, console=console(err=True), transient=True) as display:
        task = display.add_task("starting", total=rounds)

        def report(record: RoundRecord) -> None:
            left = clock.left(record.round / rounds)
            display.update(task, completed=record.round, description=words(record, rounds, left))

        yield report


def _lines(rounds: int, now: Callable[[], float] = time.monotonic) -> Report:
    clock, last = Clock(now), -LINE_EVERY

    def report(record: RoundRecord) -> None:
        nonlocal last
        left = clock.left(record.round / rounds)
        if now() - last >= LINE_EVERY or record.round == rounds:
            last = now()
            note(words(record, rounds, left))

    return report
