"""What ``gradveil risk`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gradveil.cli.output import console

if TYPE_CHECKING:
    from rich.table import Table

    from gradveil.study.exposures import Exposure, RecordExposure
    from gradveil.study.risks import Assessment, Ranked, RecordRisk, RiskResult

__all__ = ["print_risk"]

SHOWN = 5


def print_risk(result: RiskResult, out: Path | None, page: Path | None) -> None:
    """Print the most and least exposed records per model and defense, the ranking, and what the numbers mean."""
    screen = console()
    scores = {(each.model, each.defense): each for each in result.assessments}
    exposures = {(each.model, each.defense): each for each in result.exposures}
    for name in dict.fromkeys([*scores, *exposures]):
        scored, exposed = scores.get(name), exposures.get(name)
        screen.print(f"\n{' · '.join((*name, *_means(scored, exposed)))}")
        if exposed is not None and exposed.owners:
            screen.print(_owners(exposed))
        screen.print(_table(scored, exposed))
        for sentence in filter(None, _notes(scored, exposed)):
            screen.print(f"note: {sentence}")
    for place, row in enumerate(result.ranking, start=1):
        screen.print(f"{place}. {_ranked(row)}")
    for sentence in result.notes:
        screen.print(f"note: {sentence}")
    if exposures:
        public = next(iter(exposures.values())).public
        known = f"{public.rank} directions of {public.records} public records ({public.source})"
        screen.print(f"{result.exposure_meaning} The attacker knows {known}, {100 * public.kept:.0f} % of the variance.")
    if scores:
        screen.print(result.meaning)
    if out is not None:
        screen.print(f"results: {out / 'risk.json'}")
    if page is not None:
        screen.print(f"page: {page}")


def _ranked(row: Ranked) -> str:
    beside = "" if row.mean_invre is None else f" (mean InvRE {row.mean_invre:.3f}, which orders nothing)"
    return f"{row.model} · {row.defense}: mean exposure {row.exposure:.1f} dB{beside}"


def _notes(scored: Assessment | None, exposed: Exposure | None) -> list[str]:
    found = list(scored.notes) if scored else []
    return [*found, *([exposed.reason, exposed.unlisted, exposed.unattained, exposed.range, exposed.doubt] if exposed else [])]


def _means(scored: Assessment | None, exposed: Exposure | None) -> list[str]:
    found = []
    if exposed is not None and exposed.mean_attained is not None and exposed.mean_by_label is not None:
        found.append(f"mean attained {exposed.mean_attained:.1f} dB (labels alone {exposed.mean_by_label:.1f})")
    if exposed is not None and exposed.mean is not None and exposed.mean_linear is not None:
        found.append(f"mean exposure {exposed.mean:.1f} dB ({exposed.mean_linear:.1f} if it were linear)")
    if exposed is not None and exposed.mean_listed is not None:
        found.append(f"named on a list of 256: {100 * exposed.mean_listed:.0f} %")
    if scored is not None:
        found.append(f"mean InvRE {scored.mean_invre:.3f} · mode {scored.mode}")
    seconds = (scored.seconds if scored else 0.0) + (exposed.seconds if exposed else 0.0)
    return [*found, f"{seconds:.1f} s"]


def _table(scored: Assessment | None, exposed: Exposure | None) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    paper = ("InvRE", "range", "score", "rank") if scored else ()
    for name in ("", "row", "label", "attained", "exposure", "linear", "list", *paper):
        table.add_column(name, no_wrap=True)
    scores = {record.row: record for record in scored.records} if scored else {}
    exposures = {record.row: record for record in exposed.records} if exposed else {}
    rows = sorted(dict.fromkeys([*scores, *exposures]), key=lambda row: _order(scores.get(row), exposures.get(row)))
    groups = (("most exposed", rows[:SHOWN]), ("least exposed", rows[SHOWN:][-SHOWN:]))
    for word, group in groups:
        for place, row in enumerate(group):
            table.add_row("" if place else word, *_cells(row, scores.get(row), exposures.get(row), bool(scored)))
    return table


def _order(score: RecordRisk | None, exposure: RecordExposure | None) -> tuple[float, float]:
    """Put the most exposed first: by the oracle's decibels, where there are none by what was attained, and by InvRE."""
    known = (exposure.exposure, exposure.attained) if exposure is not None else ()
    decibels = next((value for value in known if value is not None), 0.0)
    return -decibels, -(score.invre if score is not None else 0.0)


def _db(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} dB"


def _owners(exposed: Exposure) -> Table:
    """Return the most exposed owners, of as many as there are."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("owner", "records", "attained, mean", "most", "exposure, mean", "most"):
        table.add_column(name, no_wrap=True)
    for own in exposed.owners[:SHOWN]:
        values = (own.mean_attained, own.worst_attained, own.mean, own.worst)
        table.add_row(own.owner, str(own.n), *(_db(value) for value in values))
    if len(exposed.owners) > SHOWN:
        table.caption = f"the {SHOWN} most exposed of {len(exposed.owners)} owners"
    return table


def _cells(row: int, score: RecordRisk | None, exposure: RecordExposure | None, scored: bool) -> list[str]:
    known = score or exposure
    label = "–" if known is None or known.label is None else str(known.label)
    found = [str(row), label]
    for value in (exposure.attained, exposure.exposure, exposure.linear) if exposure else (None, None, None):
        found.append(_db(value))
    found.append("–" if exposure is None or exposure.listed is None else f"{100 * exposure.listed:.0f} %")
    if not scored or score is None:
        return found
    span = f"{score.low:.3f}–{score.high:.3f}" if score.low < score.high else ""
    return [*found, f"{score.invre:.3f}", span, f"{score.score:.4f}", str(score.rank)]
