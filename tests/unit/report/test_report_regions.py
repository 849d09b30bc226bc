"""Records nearly identified, and the target region: on the page where they were measured, and absent without a gap elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradveil.report import write_report
from gradveil.study.load import load_run
from tests.unit.report.example_results import make_results

HEADING = "Nearly identified, and the part of the picture that matters"


def change_cells(folder: Path, change: Any) -> None:
    for path in (folder / "cells").glob("*.json"):
        if not path.name.endswith(".timing.json"):
            cell = json.loads(path.read_text(encoding="utf-8"))
            change(cell)
            path.write_text(json.dumps(cell), encoding="utf-8")


def add_region(cell: dict[str, Any]) -> None:
    group = {"psnr": {"median": 17.25, "low": 16.0, "high": 18.0, "n": 16}, "ssim": {"median": 0.4, "n": 16}}
    cell["region"] = {"share": 0.3, "area": 0.4375, "selected": group, "plain": group, "data_mean": group}


def test_the_page_tells_the_nearest_few_and_the_region(tmp_path: Path) -> None:
    make_results(tmp_path)
    change_cells(tmp_path, add_region)
    first = load_run(tmp_path).cells[0]
    assert first.region is not None and first.region.informed is None and first.region.data_mean is not None
    assert first.selected.iip_5 is not None
    assert first.selected.iip_5.count == min(16, first.selected.identified.count + 2)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert HEADING in page and "17.2\u00a0dB (16.0–18.0)" in page and "44 % of the picture" in page.replace("\u00a0", " ")


def test_without_a_region_its_columns_are_left_out(tmp_path: Path) -> None:
    make_results(tmp_path)
    change_cells(tmp_path, lambda cell: cell.update(region={"unavailable": "no pictures"}))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert HEADING in page and "Target region" not in page


def test_results_of_older_versions_have_no_such_table(tmp_path: Path) -> None:
    make_results(tmp_path)
    change_cells(tmp_path, lambda cell: [cell["selected"].pop(name) for name in ("iip_3", "iip_5")])
    assert HEADING not in write_report(tmp_path).read_text(encoding="utf-8")
