"""Progress: the time left is honest, and nothing but stderr is used."""

from __future__ import annotations

import dataclasses
import io

import pytest

from gradveil.cli import progress as shown
from gradveil.cli.progress import Clock, counted, share_done, show_progress, time_left
from gradveil.run.pool import Progress


class Watch:
    """A clock that goes when told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_work_of_an_earlier_run_does_not_make_this_one_fast() -> None:
    watch = Watch()
    clock = Clock(watch)
    assert clock.left(0.5) is None
    watch.seconds += 10
    assert clock.left(0.75) == pytest.approx(10)
    watch.seconds += 10
    assert clock.left(1.0) == 0


def test_steps_count_where_they_are_known() -> None:
    assert share_done(Progress(1, 4, 0, 0, "")) == 0.25
    assert share_done(Progress(1, 4, 90, 100, "")) == 0.9
    assert share_done(Progress(0, 0, 0, 0, "")) == 1.0
    assert time_left(None) == "time left not known yet"
    assert time_left(65) == "about 1\u00a0min 5\u00a0s left"


def test_a_training_weighs_as_much_as_a_cell() -> None:
    half = Progress(2, 2, 100, 100, "", done_trainings=0, trainings=2, done_rounds=0, rounds=40)
    assert share_done(half) == 0.5
    assert share_done(dataclasses.replace(half, done_rounds=20)) == 0.75
    assert share_done(dataclasses.replace(half, done_rounds=40)) == 1.0
    assert counted(half) == "2/2 cells, 0/2 trainings" and counted(Progress(1, 2, 0, 0, "")) == "1/2 cells"


def test_a_finished_training_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = shown._lines(Watch())
    for done in (0, 0, 1):
        report(Progress(1, 1, 0, 0, "x", done_trainings=done, trainings=2, done_rounds=4 * done, rounds=8))
    assert [line.split(" · ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "1/1 cells, 0/2 trainings",
        "1/1 cells, 1/2 trainings",
    ]


def test_without_a_terminal_there_is_a_line_per_cell_and_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch()
    report = shown._lines(watch)
    for _ in range(3):
        report(Progress(0, 2, 0, 0, "none"))
        watch.seconds += 1
    report(Progress(1, 2, 0, 0, "none"))
    watch.seconds += 31
    report(Progress(1, 2, 0, 0, "pruning"))
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(" · ")[0] for line in said.err.splitlines()] == ["0/2 cells", "1/2 cells", "1/2 cells"]


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(quiet=True) as report:
        report(Progress(1, 2, 0, 0, "none"))
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with show_progress(quiet=False) as report:
        report(Progress(1, 2, 0, 0, "[red]none"))
        report(Progress(2, 2, 0, 0, "[red]none"))
    assert "2/2 cells" in terminal.getvalue()
    assert "[red]none" in terminal.getvalue()
