"""Which numbers of a table differ from the undefended ones by more than chance: the daggers of the shadow paper."""

from __future__ import annotations

from dataclasses import dataclass

from gradveil.significance import LEVEL, daggers
from gradveil.study.results import CellResult
from gradveil.verdict.status import Setting

__all__ = ["METRICS", "Daggers", "setting_daggers"]

METRICS = ("psnr", "ssim", "lpips")


@dataclass(frozen=True, kw_only=True)
class Daggers:
    """The marks of one table.

    Attributes:
        marks: Key of the cell, then metric, to ``""``, ``"†"`` or ``"‡"``.
        sentence: What they mean; empty where nothing is marked.
    """

    marks: dict[str, dict[str, str]]
    sentence: str = ""

    def of(self, cell: CellResult, metric: str) -> str:
        """Return the mark of one number."""
        return self.marks.get(cell.key, {}).get(metric, "")


def setting_daggers(setting: Setting) -> Daggers:
    """Test every defense against the undefended cell of its setting, record by record; without that cell, nothing is marked."""
    baseline = setting.undefended
    if baseline is None or len(setting.cells) < 2:
        return Daggers(marks={})
    marks: dict[str, dict[str, str]] = {cell.key: {} for cell in setting.cells}
    for metric in METRICS:
        columns = {cell.key: _column(cell, metric) for cell in setting.cells}
        for key, mark in daggers({key: values for key, values in columns.items() if values}, baseline.key).items():
            marks[key][metric] = mark
    used = {mark for row in marks.values() for mark in row.values() if mark}
    said = {
        "†": f"† differs from the undefended value (Wilcoxon signed-rank test over the records, p < {LEVEL:g})",
        "‡": "‡ differs from every other row",
    }
    parts = [text for mark, text in said.items() if mark in used or (mark == "†" and used)]
    caution = "Not corrected for the number of rows; records of one batch share an update, which makes p too small."
    return Daggers(marks=marks, sentence=f"{'; '.join(parts)}. {caution}" if parts else "")


def _column(cell: CellResult, metric: str) -> dict[str, float]:
    values = {record.pseudonym: getattr(record, metric) for record in cell.records}
    return {name: value for name, value in values.items() if value is not None}
