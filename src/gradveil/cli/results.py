"""What an audit prints at its end: the verdict, one row per defense, and reasons for doubt; the words are the report's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradveil.cli.output import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gradveil.run.estimate import Estimate, TrainingEstimate
    from gradveil.study.measures import Share, Summary
    from gradveil.study.results import CellResult
    from gradveil.study.run_result import Run
    from gradveil.verdict.status import Setting

__all__ = ["print_estimate", "print_results", "results_as_dict"]

WIDEST = 1000
"""More characters than a table can need: spellings of defenses are folded."""


def print_results(run: Run) -> None:
    """Print the verdict and a table per setting of a run."""
    from gradveil.verdict.status import choose_headline
    from gradveil.verdict.words import headline_sentence, progress_sentence, sentence, setting_words

    headline = choose_headline(run)
    out = console()
    out.print(f"\n{sentence(headline_sentence(headline))}")
    if run.missing:
        out.print(progress_sentence(run))
    for setting in headline.settings:
        out.print(f"\n{setting_words(setting.cells[0])} · attacked by {setting.cells[0].ensemble}")
        _print_whole(_table(setting), out)
    _print_doubts(run, out)
    scored = next((cell.risk for cell in run.cells if cell.risk is not None and cell.risk.defended is not None), None)
    if scored is not None:
        out.print(f"InvRE: exposure without an attack, mean over records and the most that any may score. {scored.meaning}")


def _print_whole(table: Table, out: Console) -> None:
    """Print a table as wide as it must be: cut to the screen it would lose its last column, the verdict."""
    from rich.measure import Measurement

    needed = Measurement.get(out, out.options.update(width=WIDEST), table).maximum
    before, out.width = out.width, max(out.width, needed)
    out.print(table)
    out.width = before


def _table(setting: Setting) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from gradveil.verdict.numbers import db, percent, points
    from gradveil.verdict.status import bar_of, status_of

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("defense", overflow="fold", min_width=26, max_width=60)
    trained = any(cell.utility is not None for cell in setting.cells)
    scored = any(cell.risk is not None and cell.risk.defended is not None for cell in setting.cells)
    more = (*(("accuracy", "change") if trained else ()), *(("InvRE",) if scored else ()))
    columns = ("identified", "plain", "informed", "PSNR", "best null", *more, "verdict")
    for name in columns:
        table.add_column(name, justify="left", no_wrap=True)
    for cell in setting.cells:
        bar, psnr = bar_of(cell), cell.selected.psnr
        status = status_of(cell, setting.undefended).value
        table.add_row(
            cell.defense.spelling,
            _identified(cell.identified),
            _count(cell.plain),
            _count(cell.informed),
            db(psnr.median if psnr else None),
            f"{percent(bar.value)}, {db(cell.bar.psnr.value if cell.bar.psnr else None)}",
            *((_accuracy(cell), points(cell.utility.difference if cell.utility else None)) if trained else ()),
            *((_invre(cell),) if scored else ()),
            f"{status}{' *' if cell.warnings and not cell.failures else ''}",
        )
    return table


def _invre(cell: CellResult) -> str:
    """Return the mean score of the records and the most that any of them may have."""
    side = cell.risk.defended if cell.risk is not None else None
    return "–" if side is None or side.high is None else f"{side.mean:.2f}, ≤ {side.high:.2f}"


def _accuracy(cell: CellResult) -> str:
    return "–" if cell.accuracy is None else f"{100 * cell.accuracy.value:.1f}\u00a0%"


def _identified(share: Share) -> str:
    from gradveil.verdict.numbers import interval

    return f"{share.count}/{share.n} [{interval(share.low, share.high)}]"


def _count(summary: Summary | None) -> str:
    return "–" if summary is None else f"{summary.identified.count}/{summary.identified.n}"


def _print_doubts(run: Run, out: Console) -> None:
    """Print every failed check and warning once, with the defenses it is about."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in run.cells:
        for check in (*cell.failures, *cell.warnings):
            found.setdefault((check.level, check.sentence, check.remedy), []).append(cell.defense.spelling)
    for (level, sentence, remedy), defenses in sorted(found.items()):
        where = "all" if len(defenses) == len(run.cells) else ", ".join(dict.fromkeys(defenses))
        mark = "no verdict" if level == "fail" else "*"
        out.print(f"{mark} {where}: {sentence} {remedy}".rstrip())
    for line in run.notes:
        out.print(f"note: {line}")


def results_as_dict(run: Run) -> dict[str, Any]:
    """Return what `print_results` prints as plain JSON values; parts of a cell are as its file has them."""
    from gradveil.study.codec import encode
    from gradveil.verdict.status import choose_headline, status_of
    from gradveil.verdict.words import headline_sentence

    headline = choose_headline(run)
    rows = [
        {**encode(_row(cell)), "verdict": status_of(cell, setting.undefended).value}
        for setting in headline.settings
        for cell in setting.cells
    ]
    return {"headline": headline_sentence(headline).replace("\u00a0", " "), "missing": len(run.missing), "cells": rows}


def _row(cell: CellResult) -> dict[str, Any]:
    ratios = {name: getattr(cell.utility, name, None) for name in ("time_ratio", "up_ratio", "total_ratio")}
    means = {name: getattr(cell.utility, name, None) for name in ("accuracy", "undefended", "difference", "pmm")}
    return {
        "key": cell.key,
        "defense": cell.defense.spelling,
        "setting": cell.settings,
        "n": cell.n,
        "candidates": cell.candidates,
        "identified": cell.identified,
        "plain": cell.plain.identified if cell.plain else None,
        "informed": cell.informed.identified if cell.informed else None,
        "psnr": cell.selected.psnr,
        "bar": cell.bar.identified,
        "utility": {**means, **ratios} if cell.utility else None,
        "risk": cell.risk,
        "checks": (*cell.failures, *cell.warnings),
    }


def _training_table(trainings: Sequence[TrainingEstimate]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from gradveil.verdict.numbers import duration

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("data", "model", "trained with", "rounds", "seeds", "about"):
        table.add_column(name, justify="right" if name in ("rounds", "seeds", "about") else "left", overflow="fold")
    for each in trainings:
        training = each.training
        rounds, seeds = str(training.rounds), str(each.seeds)
        model = f"{training.model} · {training.cut}" if training.cut else training.model
        table.add_row(training.data, model, training.defense, rounds, seeds, duration(each.seconds))
    return table


def print_estimate(estimate: Estimate) -> None:
    """Print what a plan will take."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from gradveil.verdict.numbers import count, duration, size

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("data", "model", "state", "batch", "local steps", "defense", "ensemble", "steps", "about"):
        table.add_column(name, justify="right" if name in ("batch", "local steps", "steps", "about") else "left", overflow="fold")
    for row in estimate.rows:
        cell = row.cell
        model = f"{cell.model} · {cell.cut}" if cell.cut else cell.model
        where = (cell.data, model, cell.state, str(cell.batch_size), str(cell.local_steps), cell.defense, cell.ensemble)
        table.add_row(*where, f"{row.steps:,}", duration(row.seconds))
    out = console()
    out.print(table)
    work = f"{count(len(estimate.rows), 'cell')}, {estimate.steps:,} optimisation steps"
    if estimate.trainings:
        out.print(_training_table(estimate.trainings))
        work += f", {count(sum(each.seeds for each in estimate.trainings), 'training')}"
    if estimate.power:
        work += f", at most {count(sum(each.points for each in estimate.power), 'point')} of power curves"
    cost = f"about {duration(estimate.seconds)} and {size(estimate.memory_mb * 1e6)} of memory"
    workers = count(estimate.workers, "worker process", "worker processes")
    out.print(f"{work}: {cost} with {workers} on {estimate.device}. This is an estimate, from timing one step on this machine.")
