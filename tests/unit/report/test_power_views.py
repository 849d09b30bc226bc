"""Power on the page: a curve and its weaker settings where they were measured, and nothing where they were not."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gradveil.metrics import share_of
from gradveil.report import write_report
from gradveil.report.power_views import END, power_chart, power_rows
from gradveil.study.codec import encode
from gradveil.study.evidence import Power, Rung
from gradveil.study.load import load_run
from gradveil.study.measures import Bar
from gradveil.study.results import CellResult
from tests.unit.report.example_results import make_results

NULL = Bar(null="grey", value=0.0, high=0.19)


def rung(count: int, **changes: Any) -> Rung:
    return Rung(identified=share_of(count, 16), null=NULL, psnr=15.0, **changes)


CURVE = Power(
    ensemble="standard-4, at most 40 steps",
    ladder=(rung(16, spelling="none"), rung(15, spelling="gaussian_noise(std=<b>)")),
    planted=(rung(0, leak=0.1), rung(14, leak=0.5), rung(16, leak=1.0)),
    a50=0.27,
    shown=True,
)
SILENT = Power(ensemble="quick-3", planted=(rung(0, leak=1.0),), reason="broken as it is, so no weaker setting was tried")


def folder_with(folder: Path, powers: dict[str, Power]) -> Path:
    made = make_results(folder)
    for path in (made / "cells").glob("*.json"):
        cell = json.loads(path.read_text())
        if cell.get("cell", {}).get("defense") in powers:
            path.write_text(json.dumps({**cell, "power": encode(powers[cell["cell"]["defense"]])}))
    return made


def page_of(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def section(page: str) -> str:
    found = re.search(r'<section id="power">.*?</section>', page, flags=re.DOTALL)
    return found[0] if found else ""


def cells(folder: Path, powers: dict[str, Power]) -> tuple[CellResult, ...]:
    return load_run(folder_with(folder, powers)).cells


STRONG, WEAK = "gaussian_noise(std=0.1)", "gaussian_noise(std=0.01)"


def test_a_curve_stands_on_the_page_with_who_attacked_and_what_was_found_at_weaker_settings(tmp_path: Path) -> None:
    shown = section(page_of(folder_with(tmp_path, {STRONG: CURVE, WEAK: SILENT})))
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", shown)))
    assert "none: 16 of 16, broken; gaussian_noise(std=<b>): 15 of 16, broken" in text
    assert "<b>" not in shown  # the spelling is somebody's text
    assert "standard-4, at most 40 steps" in text and "0.27" in text and "16 of 16" in text
    assert "broken as it is" in text and "no leak tried" in text
    assert shown.count("<svg") == 1  # one point is no curve


def test_without_power_there_is_no_section(tmp_path: Path) -> None:
    assert section(page_of(folder_with(tmp_path, {}))) == ""


def test_a_chart_is_ordered_by_loudness_and_says_its_numbers(tmp_path: Path) -> None:
    (row,) = power_rows(cells(tmp_path, {STRONG: CURVE}), "power-0")
    assert row.chart is not None
    drawn = ElementTree.fromstring(str(row.chart))
    places = [float(mark.attrib["cx"]) for mark in drawn.iter("circle")]
    assert places == sorted(places) and len(places) == 4  # no leak at all, and three weights
    middle = (places[0] + places[-1]) / 2
    assert abs(places[2] - middle) < 0.2  # equally loud
    said = (drawn.findtext("desc") or "").replace("\xa0", " ")
    assert "0.1: 0 %" in said and "1: 100 %" in said
    assert END > 2


def test_heights_follow_the_shares(tmp_path: Path) -> None:
    found = next(cell for cell in cells(tmp_path, {STRONG: CURVE}) if cell.power is not None)
    drawn = ElementTree.fromstring(str(power_chart(found, CURVE, "x")))
    heights = [float(mark.attrib["cy"]) for mark in drawn.iter("circle")][1:]
    assert heights == sorted(heights, reverse=True) and heights[0] - heights[-1] > 100
