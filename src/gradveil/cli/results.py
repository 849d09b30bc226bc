"""What an audit prints at its end: the verdict, one row per defense, and reasons for doubt; the words are the report's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.cli.output import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gradveil.run.estimate import Estimate, TrainingEstimate
    from gradveil.study.results import Cell, Results, Share, Summary, Utility
    from gradveil.study.risks import Risk
    from gradveil.verdict.status import Setting

__all__ = ["print_estimate", "print_results", "results_as_dict"]

WIDEST = 1000
"""More characters than a table can need: spellings of defenses are folded."""


def print_results(folder: Path) -> None:
    """Print the verdict and a table per setting of a results folder."""
    from gradveil.study.load import load_results
    from gradveil.verdict.status import choose_headline
    from gradveil.verdict.words import headline_sentence, progress_sentence, sentence, setting_words

    results = load_results(folder)
    headline = choose_headline(results)
    out = console()
    out.print(f"\n{sentence(headline_sentence(headline))}")
    if results.missing:
        out.print(progress_sentence(results))
    for setting in headline.settings:
        out.print(f"\n{setting_words(setting.cells[0])} · attacked by {setting.cells[0].ensemble}")
        _print_whole(_table(setting), out)
    _print_doubts(results, out)
    scored = next((cell.risk for cell in results.cells if cell.risk is not None and cell.risk.defended is not None), None)
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
            _identified(cell.exposed),
            _count(cell.plain),
            _count(cell.informed),
            db(psnr.median if psnr else None),
            f"{percent(bar.value)}, {db(cell.bar_psnr.value if cell.bar_psnr else None)}",
            *((_accuracy(cell), points(cell.utility.difference if cell.utility else None)) if trained else ()),
            *((_invre(cell),) if scored else ()),
            f"{status}{' *' if cell.warnings and not cell.failures else ''}",
        )
    return table


def _invre(cell: Cell) -> str:
    """Return the mean score of the records and the most that any of them may have."""
    side = cell.risk.defended if cell.risk is not None else None
    return "–" if side is None or side.high is None else f"{side.mean:.2f}, ≤ {side.high:.2f}"


def _accuracy(cell: Cell) -> str:
    return "–" if cell.accuracy is None else f"{100 * cell.accuracy.value:.1f}\u00a0%"


def _identified(share: Share) -> str:
    from gradveil.verdict.numbers import interval

    return f"{share.count}/{share.n} [{interval(share.low, share.high)}]"


def _count(summary: Summary | None) -> str:
    return "–" if summary is None else f"{summary.identified.count}/{summary.identified.n}"


def _print_doubts(results: Results, out: Console) -> None:
    """Print every failed check and warning once, with the defenses it is about."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in results.cells:
        for check in (*cell.failures, *cell.warnings):
            found.setdefault((check.level, check.sentence, check.remedy), []).append(cell.defense.spelling)
    for (level, sentence, remedy), defenses in sorted(found.items()):
        where = "all" if len(defenses) == len(results.cells) else ", ".join(dict.fromkeys(defenses))
        mark = "no verdict" if level == "fail" else "*"
        out.print(f"{mark} {where}: {sentence} {remedy}".rstrip())
    for line in results.notes:
        out.print(f"note: {line}")


def results_as_dict(folder: Path) -> dict[str, Any]:
    """Return what `print_results` prints as plain JSON values."""
    from gradveil.study.load import load_results
    from gradveil.verdict.status import choose_headline, status_of
    from gradveil.verdict.words import headline_sentence

    results = load_results(folder)
    headline = choose_headline(results)
    rows = [
        {**_row(cell), "verdict": status_of(cell, setting.undefended).value}
        for setting in headline.settings
        for cell in setting.cells
    ]
    return {"headline": headline_sentence(headline).replace("\u00a0", " "), "missing": results.missing, "cells": rows}


def _row(cell: Cell) -> dict[str, Any]:
    psnr = cell.selected.psnr
    return {
        "key": cell.key,
        "defense": cell.defense.spelling,
        "setting": dict(cell.settings),
        "n": cell.n,
        "candidates": cell.candidates,
        "identified": vars(cell.exposed),
        "plain": vars(cell.plain.identified) if cell.plain else None,
        "informed": vars(cell.informed.identified) if cell.informed else None,
        "psnr": vars(psnr) if psnr else None,
        "bar": vars(cell.bar) if cell.bar else None,
        "utility": _utility(cell.utility) if cell.utility else None,
        "risk": _risk(cell.risk) if cell.risk else None,
        "checks": [vars(check) for check in (*cell.failures, *cell.warnings)],
    }


def _risk(risk: Risk) -> dict[str, Any]:
    found = {name: getattr(risk, name) for name in ("defended", "undefended", "pearson", "spearman")}
    return {
        **{"reason": risk.reason, "meaning": risk.meaning, "attack": risk.attack, "n": risk.n, "notes": list(risk.notes)},
        **{name: vars(value) if value else None for name, value in found.items()},
        "records": [vars(record) for record in risk.records],
    }


def _utility(utility: Utility) -> dict[str, Any]:
    found = {name: getattr(utility, name) for name in ("accuracy", "undefended", "difference", "pmm")}
    ratios = {name: getattr(utility, name) for name in ("time_ratio", "up_ratio", "total_ratio")}
    return {name: vars(value) if value else None for name, value in found.items()} | ratios


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
    cost = f"about {duration(estimate.seconds)} and {size(estimate.memory_mb * 1e6)} of memory"
    workers = count(estimate.workers, "worker process", "worker processes")
    out.print(f"{work}: {cost} with {workers} on {estimate.device}. This is an estimate, from timing one step on this machine.")
