"""What an audit prints at its end: the verdict, one row per defense, and reasons for doubt; the words are the report's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradveil.cli.output import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gradveil.run.estimate import Estimate, TrainingEstimate
    from gradveil.study.measures import Summary
    from gradveil.study.results import CellResult
    from gradveil.study.run_result import Run
    from gradveil.verdict.levels import View
    from gradveil.verdict.status import Setting

__all__ = ["print_estimate", "print_results", "results_as_dict"]

WIDEST = 1000
"""More characters than a table can need: spellings of defenses are folded."""


def print_results(run: Run) -> None:
    """Print the verdict and a table per setting of a run."""
    from gradveil.verdict.level_words import strength_lines
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
    for line in strength_lines(run.cells):
        out.print(line)
    _print_doubts(run, out)
    exposed = [cell.exposure for cell in run.cells if cell.exposure is not None]
    if any(each.mean is not None or each.mean_attained is not None for each in exposed):
        out.print(f"attained, exposure: decibels without a search, mean over records and most. {exposed[0].meaning}")
    for reason, defenses in _reasons(run).items():
        out.print(f"exposure of {', '.join(defenses)}: {reason}")
    scored = next((cell.risk for cell in run.cells if cell.risk is not None and cell.risk.defended is not None), None)
    if scored is not None:
        out.print(f"InvRE: a score without an attack, mean over records and the most that any may score. {scored.meaning}")


def _reasons(run: Run) -> dict[str, list[str]]:
    """Return why defenses have no exposure, or why it leaves much open."""
    found: dict[str, list[str]] = {}
    for cell in run.cells:
        for reason in (cell.exposure.reason, cell.exposure.unattained, cell.exposure.range) if cell.exposure is not None else ():
            if reason:
                found.setdefault(reason, []).append(cell.defense.spelling)
    return {reason: list(dict.fromkeys(names)) for reason, names in found.items()}


def _print_whole(table: Table, out: Console) -> None:
    """Print a table as wide as it must be: cut to the screen it would lose its last columns."""
    from rich.measure import Measurement

    needed = Measurement.get(out, out.options.update(width=WIDEST), table).maximum
    before, out.width = out.width, max(out.width, needed)
    out.print(table)
    out.width = before


def _table(setting: Setting) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from gradveil.verdict.levels import LEVELS, level_of
    from gradveil.verdict.numbers import db, points
    from gradveil.verdict.status import status_of

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("defense", overflow="fold", min_width=26, max_width=60)
    trained = any(cell.utility is not None for cell in setting.cells)
    scored = any(cell.risk is not None and cell.risk.defended is not None for cell in setting.cells)
    exposed = any(_decibels(cell) != ("–", "–") for cell in setting.cells)
    more = (
        *(("accuracy", "change") if trained else ()),
        *(("attained", "exposure") if exposed else ()),
        *(("InvRE",) if scored else ()),
    )
    owned = any(level_of(cell, "owner").share is not None for cell in setting.cells)
    levels = (*LEVELS, *(("owner",) if owned else ()))
    told = any(cell.gap is not None for cell in setting.cells)
    searched = ("search\nfailed", "info\ngone") if told else ()
    columns = (*levels, "plain", "informed", *searched, "PSNR", "null\nPSNR", *more)
    table.add_column("verdict", min_width=18, max_width=20)
    for name in columns:
        table.add_column(name, justify="left", no_wrap=True)
    for cell in setting.cells:
        psnr = cell.selected.psnr
        status = status_of(cell, setting.undefended).value
        table.add_row(
            cell.defense.spelling,
            f"{status}{' *' if cell.warnings and not cell.failures else ''}",
            *(_level(level_of(cell, name)) for name in levels),
            _count(cell.plain),
            _count(cell.informed),
            *(_searched(cell) if told else ()),
            db(psnr.median if psnr else None),
            db(cell.bar.psnr.value if cell.bar.psnr else None),
            *((_accuracy(cell), points(cell.utility.difference if cell.utility else None)) if trained else ()),
            *(_decibels(cell) if exposed else ()),
            *((_invre(cell),) if scored else ()),
        )
    return table


def _decibels(cell: CellResult) -> tuple[str, str]:
    """Return what a regression attained of the records and how exposed they are, each the mean and the most."""
    own = cell.exposure
    if own is None:
        return "–", "–"
    pairs = ((own.mean_attained, own.worst_attained), (own.mean, own.worst))
    first, second = ("–" if mean is None or most is None else f"{mean:.1f}, ≤ {most:.1f}\u00a0dB" for mean, most in pairs)
    return first, second


def _invre(cell: CellResult) -> str:
    """Return the mean score of the records and the most that any of them may have."""
    side = cell.risk.defended if cell.risk is not None else None
    return "–" if side is None or side.high is None else f"{side.mean:.2f}, ≤ {side.high:.2f}"


def _accuracy(cell: CellResult) -> str:
    return "–" if cell.accuracy is None else f"{100 * cell.accuracy.value:.1f}\u00a0%"


def _level(view: View) -> str:
    """Return what was got at a level, its null, and below its interval; a dash where nobody looked, as a line below explains."""
    from gradveil.verdict.numbers import interval, percent

    share = view.share
    if share is None:
        return "–"
    null = "" if view.null is None else f"  null {percent(view.null.value)}"
    return f"{share.count}/{share.n}{null}\n[{interval(share.low, share.high)}]"


def _searched(cell: CellResult) -> tuple[str, str]:
    """Return for how many records the search failed, and for how many a wrong picture explains the update as well."""
    if cell.gap is None:
        return "–", "–"
    failed, gone = cell.gap.search_failed, cell.gap.information_gone
    return f"{failed.count}/{failed.n}", f"{gone.count}/{gone.n}"


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
    from gradveil.verdict.level_words import power_words
    from gradveil.verdict.levels import levels_of

    ratios = {name: getattr(cell.utility, name, None) for name in ("time_ratio", "up_ratio", "total_ratio")}
    means = {name: getattr(cell.utility, name, None) for name in ("accuracy", "undefended", "difference", "pmm")}
    return {
        "key": cell.key,
        "defense": cell.defense.spelling,
        "setting": cell.settings,
        "n": cell.n,
        "candidates": cell.candidates,
        "identified": cell.identified,
        "strongest": cell.strongest.name,
        "levels": {view.name: view for view in levels_of(cell)} | ({"owner": cell.levels.owners} if cell.levels else {}),
        "list": cell.levels.listed if cell.levels else None,
        "gap": cell.gap,
        "power": cell.power,
        "power_sentence": power_words(cell).replace("\u00a0", " "),
        "plain": cell.plain.identified if cell.plain else None,
        "informed": cell.informed.identified if cell.informed else None,
        "psnr": cell.selected.psnr,
        "bar": cell.bar.identified,
        "utility": {**means, **ratios} if cell.utility else None,
        "risk": cell.risk,
        "exposure": cell.exposure,
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
