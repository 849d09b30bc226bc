"""The daggers of the report's tables: where they stand, what they say, and where there are none."""

from __future__ import annotations

import re
from pathlib import Path

from gradveil.report import write_report
from gradveil.report.daggers import setting_daggers
from gradveil.study.load import load_run
from gradveil.verdict.status import settings_of
from tests.unit.report.example_results import make_results


def test_marks_follow_the_records(tmp_path: Path) -> None:
    make_results(tmp_path)
    setting = settings_of(load_run(tmp_path).cells)[0]
    found = setting_daggers(setting)
    base = setting.undefended
    assert base is not None and not any(found.marks[base.key].values())
    bare = {record.pseudonym: record.psnr for record in base.records}
    for cell in setting.defended:
        moved = [record.psnr != bare[record.pseudonym] for record in cell.records if record.psnr is not None]
        if all(moved) and len({(record.psnr or 0) > (bare[record.pseudonym] or 0) for record in cell.records}) == 1:
            # Sixteen records that all moved one way: p = 2 / 2^16.
            assert found.of(cell, "psnr") in ("†", "‡"), cell.defense.spelling
    assert "Wilcoxon" in found.sentence and "Not corrected" in found.sentence


def test_the_page_shows_them_with_their_meaning(tmp_path: Path) -> None:
    make_results(tmp_path)
    page = write_report(tmp_path).read_text()
    assert re.search(r"dB[^<]*(<[^>]+>)?[^<]*[†‡]", page) or "†</td>" in page or "‡</td>" in page
    assert "Wilcoxon signed-rank test" in page
