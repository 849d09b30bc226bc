"""A page of ``gradveil risk``: the most and least exposed records as pictures, model by model and defense by defense.

It shows training records, so it is made for built-in data, or where the user asked for a private file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gradveil.errors import UsageError
from gradveil.report.pictures import Array, Picture, data_uri
from gradveil.report.render import page_assets, page_template, write_whole_page
from gradveil.study.risks import Assessment, RecordRisk, RiskResult

__all__ = ["write_risk_page"]

SHOWN = 5


def write_risk_page(path: Path, result: RiskResult, pictures: Mapping[int, Array], *, private: bool) -> Path:
    """Write the page of an assessment and return its path.

    Args:
        path: The file to write.
        result: What ``gradveil risk`` found.
        pictures: For every row that was scored, its picture (C, H, W) in [0, 1].
        private: Whether the pictures are of the user's own data, and the page must say so.

    Raises:
        UsageError: The file cannot be written.
    """
    style, policy = page_assets(show_pictures=True)
    page = page_template("risk_page.html.jinja").render(
        style=Markup(style),
        policy=policy,
        private=private,
        result=result,
        views=[_view(each, result, pictures) for each in result.assessments],
    )
    try:
        write_whole_page(path, page)
    except OSError as error:
        raise UsageError(f"cannot write the page to {str(path)!r}: {error.strerror or error}") from error
    return path


def _view(each: Assessment, result: RiskResult, pictures: Mapping[int, Array]) -> dict[str, Any]:
    """Return one model and defense with its extremes, by exposure where there is one; InvRE beside that without a defense."""
    bare = next((other for other in result.assessments if other.model == each.model and other.defense == "none"), None)
    undefended = {record.row: record.invre for record in bare.records} if bare is not None and bare is not each else {}
    exposed = next((own for own in result.exposures if (own.model, own.defense) == (each.model, each.defense)), None)
    decibels = {own.row: own.exposure for own in exposed.records} if exposed is not None else {}
    ranked = sorted(each.ranked, key=lambda record: -(decibels.get(record.row) or 0.0))
    count = min(SHOWN, (len(ranked) + 1) // 2)
    groups = [("most exposed", ranked[:count]), ("least exposed", ranked[count:][-count:][::-1])]

    def entry(record: RecordRisk) -> dict[str, Any]:
        told = decibels.get(record.row)
        alt = f"row {record.row}, InvRE {record.invre:.3f}" if told is None else f"row {record.row}, exposure {told:.1f} dB"
        shown = pictures.get(record.row)
        return {
            "record": record,
            "picture": None if shown is None else Picture(uri=data_uri(shown), alt=alt),
            "undefended": undefended.get(record.row),
            "decibels": told,
        }

    return {
        "each": each,
        "exposed": exposed,
        "extremes": [(name, [entry(record) for record in group]) for name, group in groups if group],
    }
