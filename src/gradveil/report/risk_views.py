"""The section on risk without an attack: who is most and least exposed, and whether the score foretold what attacks did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from gradveil.report.pictures import CAP_DB, Picture, data_uri, read_pictures
from gradveil.report.svg import Scale, drawing, nice_ticks, tag
from gradveil.study.results import CellResult
from gradveil.study.risks import CellRisk, Coefficient, RiskRecord

__all__ = ["Exposed", "exposed", "risk_section", "scatter", "told_coefficient"]

SHOWN = 5
LEAST_ERROR = 10 ** (-CAP_DB / 10)
"""Errors below it are drawn there, as pictures of 60 dB are."""
FORETOLD = 0.05
"""Largest p of a correlation that is called one."""


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """One record of the extremes: its picture, where it may be shown, and its scores and errors."""

    pseudonym: str
    picture: Picture | None
    undefended: float
    defended: float | None
    error: float | None
    defended_error: float | None


def risk_section(
    cells: Sequence[CellResult], undefended: CellResult | None, best: CellResult | None, show_pictures: bool
) -> dict[str, Any] | None:
    """Return what the template shows for one setting; None where no cell was scored or says why not."""
    asked, told = [cell for cell in cells if cell.risk is not None], [cell for cell in cells if cell.exposure is not None]
    if not asked and not told:
        return None
    found = [cell for cell in asked if cell.risk is not None and cell.risk.records]
    first = undefended if undefended in found else (found[0] if found else None)
    beside = best if best in found and best is not first else None
    leading = [cell for cell in (first, beside) if cell is not None]
    return {
        "meaning": next((cell.risk.meaning for cell in asked if cell.risk is not None), ""),
        "exposure": _decibels(told),
        "cells": found,
        "reasons": [(cell, cell.risk.reason) for cell in asked if cell.risk is not None and cell.risk.reason],
        "notes": list(dict.fromkeys(note for cell in found if cell.risk is not None for note in cell.risk.notes)),
        "first": first,
        "beside": beside,
        "extremes": exposed(first, beside, show_pictures) if first is not None else [],
        "panels": [_panel(cell, index) for index, cell in enumerate(leading)],
        "more": [_panel(cell, index) for index, cell in enumerate(found) if cell not in leading],
        "sentence": _foretold(first.risk if first is not None else None),
    }


def _decibels(cells: Sequence[CellResult]) -> dict[str, Any] | None:
    """Return what is shown of exposure: cells with numbers, what they mean, and why others have none."""
    known = [(cell, cell.exposure) for cell in cells if cell.exposure is not None]
    if not known:
        return None
    public = next((own.public for _, own in known if own.records), None)
    return {
        "meaning": known[0][1].meaning,
        "public": public,
        "cells": [cell for cell, own in known if own.records],
        "reasons": [(cell, own.reason) for cell, own in known if own.reason],
        "owners": [(cell, own.owners[:SHOWN], len(own.owners)) for cell, own in known if own.owners],
        "notes": list(dict.fromkeys(note for _, own in known for note in (*own.notes, own.doubt, own.unlisted) if note)),
        "ranges": [(cell, own.range) for cell, own in known if own.range],
        "unlearned": [(cell, own.unattained) for cell, own in known if own.unattained],
    }


def exposed(cell: CellResult, beside: CellResult | None, show_pictures: bool) -> list[tuple[str, list[Exposed]]]:
    """Return the most and the least exposed records without a defense, at most five of each."""
    assert cell.risk is not None
    scored = sorted(cell.risk.records, key=lambda record: (-_bare(record), record.pseudonym))
    count = min(SHOWN, (len(scored) + 1) // 2)
    groups = [("most exposed", scored[:count]), ("least exposed", scored[count:][-count:][::-1])]
    arrays = read_pictures(cell) if show_pictures else {}
    rows = {record.pseudonym: index for index, record in enumerate(cell.records)}
    others = (
        {record.pseudonym: record for record in beside.risk.records} if beside is not None and beside.risk is not None else {}
    )

    def entry(record: RiskRecord) -> Exposed:
        original = arrays["original"][rows[record.pseudonym]] if "original" in arrays and record.pseudonym in rows else None
        other = others.get(record.pseudonym)
        alt = f"record {record.pseudonym}, InvRE {_bare(record):.3f}"
        return Exposed(
            pseudonym=record.pseudonym,
            picture=Picture(uri=data_uri(original), alt=alt) if original is not None else None,
            undefended=_bare(record),
            defended=other.invre if other is not None else None,
            error=record.error,
            defended_error=other.error if other is not None else None,
        )

    return [(name, [entry(record) for record in group]) for name, group in groups if group]


def _bare(record: RiskRecord) -> float:
    return record.invre if record.undefended is None else record.undefended


def _panel(cell: CellResult, index: int) -> dict[str, Any]:
    return {"cell": cell, "chart": scatter(cell, f"risk-{cell.key}-{index}")}


def scatter(cell: CellResult, ident: str) -> Markup | None:
    """Draw every record at its score and at the error of the best attack on it; None where there are fewer than two."""
    risk = cell.risk
    points = [(r.invre, max(LEAST_ERROR, r.error)) for r in risk.records if r.error is not None] if risk is not None else []
    if risk is None or len(points) < 2:
        return None
    ticks = nice_ticks(min(score for score, _ in points), max(score for score, _ in points), 3)
    powers = _powers([error for _, error in points])
    x, y = Scale(ticks[0], ticks[-1], 62.0, 342.0), Scale(powers[0], powers[-1], 246.0, 36.0)
    digits = max(len(f"{tick:g}".partition(".")[2]) for tick in ticks)
    grid = [
        *(tag("line", x1=x.start, x2=x.end, y1=y(power), y2=y(power), class_="grid") for power in powers),
        *(tag("text", f"{10.0**power:g}", x=x.start - 8, y=y(power) + 4, text_anchor="end", class_="tick") for power in powers),
        *(tag("line", x1=x(tick), x2=x(tick), y1=y.end, y2=y.start, class_="grid") for tick in ticks),
        *(tag("text", f"{tick:.{digits}f}", x=x(tick), y=y.start + 17, text_anchor="middle", class_="tick") for tick in ticks),
        tag(
            "text", "InvRE: higher is more exposed", x=(x.start + x.end) / 2, y=y.start + 40, text_anchor="middle", class_="label"
        ),
        tag("text", "mean squared error", x=x.start, y=16, class_="label"),
    ]
    shape = "informed" if risk.correlation.attack == "informed" else "plain"
    return drawing(
        *grid,
        *(tag("circle", cx=x(score), cy=y(math.log10(error)), r=4.5, class_=shape) for score, error in points),
        width=360,
        height=292,
        ident=ident,
        title=f"Risk against measured error, {cell.defense.spelling or 'none'}",
        desc=f"One mark per record, {len(points)} in all. Pearson {told_coefficient(risk.correlation.pearson)}, "
        f"Spearman {told_coefficient(risk.correlation.spearman)}.",
        class_="chart frontier",
    )


def _powers(errors: Sequence[float]) -> list[float]:
    """Return powers of ten, or of its root, that hold all errors."""
    low, high = math.log10(min(errors)), math.log10(max(errors))
    ticks = [float(power) for power in range(math.floor(low), math.ceil(high + 1e-9) + 1)]
    if len(ticks) < 2:
        ticks.append(ticks[0] + 1)
    step = math.ceil((len(ticks) - 1) / 5)
    return [ticks[0] + step * index for index in range(math.ceil((ticks[-1] - ticks[0]) / step) + 1)]


def told_coefficient(found: Coefficient | None) -> str:
    """Return a correlation with its p.

    >>> told_coefficient(Coefficient(value=-0.41, p=0.0004))
    '−0.41 (p < 0.001)'
    """
    if found is None:
        return "not defined"
    p = "" if found.p is None else " (p < 0.001)" if found.p < 0.001 else f" (p = {found.p:.3f})"
    return f"{found.value:.2f}".replace("-", "−") + p


def _foretold(risk: CellRisk | None) -> str:
    """Say whether the score told which records fall, in this run."""
    told = risk.correlation if risk is not None else None
    if told is None or told.spearman is None or told.spearman.p is None:
        return (
            "Whether the score foretold the error cannot be said: there are too few records, or all scores or errors are equal."
        )
    words = f"Spearman {told_coefficient(told.spearman)} over {told.n} records"
    if told.spearman.p > FORETOLD:
        return f"In this run the score did not tell which records were rebuilt better ({words}): do not rank records by it."
    if told.spearman.value < 0:
        start = f"In this run records with a higher score were rebuilt better ({words})"
        if told.contrast is None:
            return f"{start}, as they should be."
        null = f"contrast alone {told_coefficient(told.contrast)}, given contrast {told_coefficient(told.partial)}"
        more = told.partial is not None and told.partial.value < 0 and (told.partial.p or 0.0) <= FORETOLD
        return f"{start}, {'also beyond' if more else 'but no better than can be shown from'} their contrast ({null})."
    return f"In this run records with a higher score were rebuilt worse ({words}): here the score misleads, and attacks decide."
