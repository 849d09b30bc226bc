"""Utility in the report: privacy against accuracy, the table to decide by, curves, and patience with what is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gradveil.report import write_report
from gradveil.report.utility_charts import curve_panels, decision_chart
from gradveil.study.load import load_run
from gradveil.study.measures import Estimate
from gradveil.verdict.numbers import accuracy, points, ratio
from tests.unit.report.example_results import DEFENSES, FAIL, HOSTILE, make_results
from tests.unit.report.example_trainings import training_key

SVG = "{http://www.w3.org/2000/svg}"


def page(folder: Path, **changes: Any) -> str:
    return write_report(make_results(folder, **{"seeds": 3, **changes})).read_text(encoding="utf-8")


def rows(html: str) -> list[list[str]]:
    """Return the cells of the table to decide by, as text."""
    table = re.search(r'<table data-sortable id="decision-table">.*?</table>', html, re.DOTALL)
    assert table is not None
    found = re.findall(r"<tr>(.*?)</tr>", table.group(0), re.DOTALL)[1:]
    return [
        [
            " ".join(re.sub(r"<[^>]+>", " ", cell).split()).replace("\u00a0", " ")
            for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)
        ]
        for row in found
    ]


def test_without_utility_the_page_says_nothing_of_it(tmp_path: Path) -> None:
    html = page(tmp_path, seeds=0)
    assert "Privacy against accuracy" not in html and "decision-table" not in html
    assert "not measured" in html


def test_the_table_has_what_a_decision_needs(tmp_path: Path) -> None:
    found = rows(page(tmp_path))
    assert [row[1].split(" rung")[0] for row in found] == [example.spelling for example in DEFENSES]
    results = load_run(tmp_path)
    utility = results.cells[5].utility
    assert utility is not None and utility.difference is not None and utility.pmm is not None
    row = found[5]  # top_k(keep=0.1)
    assert row[2].startswith("13 of 16")
    assert row[3] == accuracy(utility.accuracy).replace("\u00a0", " ")
    assert row[4] == points(utility.difference) and row[4].startswith("−1.1")
    assert row[5] == ratio(utility.pmm) and row[5].startswith("0.98")
    assert row[6:] == ["1.19×", "0.20×", "0.60×", "yes", "no guarantee"]
    assert found[7][10] == "ε = 8.75 per client"  # clipping + gaussian_noise, of the whole training
    assert found[0][4:9] == ["0.0", "1.000", "1.00×", "1.00×", "1.00×"]


def test_guarantees_are_told_in_full(tmp_path: Path) -> None:
    html = page(tmp_path)
    assert html.count("<summary>The guarantees in full</summary>") == 2  # of what was attacked, and of the training
    assert "ε = 4.38 at δ = 1e-05 per client after 1 releases" in html
    assert "ε = 8.75 at δ = 1e-05 per client after 2 releases" in html
    assert html.count("counts of examples are public") == 2  # every assumption once in each


def test_without_any_guarantee_there_is_nothing_to_explain(tmp_path: Path) -> None:
    html = page(tmp_path, defenses=DEFENSES[:3])
    assert "The guarantees in full" not in html
    assert {row[10] for row in rows(html)} == {"no guarantee"}


def test_a_folder_that_does_not_know_of_guarantees_is_read(tmp_path: Path) -> None:
    folder = make_results(tmp_path, seeds=3)
    for path in (folder / "cells").glob("*.json"):
        cell = json.loads(path.read_text())
        if "utility" in cell:
            del cell["utility"]["guarantee"], cell["defense"]["guarantee"]
            path.write_text(json.dumps(cell))
    html = write_report(folder).read_text(encoding="utf-8")
    assert {row[10] for row in rows(html)} == {"–"}


def test_one_seed_has_no_interval_and_says_so(tmp_path: Path) -> None:
    html = page(tmp_path, seeds=1)
    assert "so there is no interval" in html
    assert all(re.fullmatch(r"\d+\.\d %", row[3]) for row in rows(html))


def test_marks_tell_plain_from_informed_by_shape(tmp_path: Path) -> None:
    cells = load_run(make_results(tmp_path, seeds=3)).cells
    for narrow in (False, True):
        root = ElementTree.fromstring(decision_chart(cells, narrow=narrow))
        classes = [each.get("class") for each in root.iter() if each.tag.endswith("circle")]
        assert classes.count("plain") == len(DEFENSES)
        assert classes.count("informed") == len(DEFENSES) - 1  # nobody needs to know no defense
        assert [each.get("class") for each in root.iter() if each.tag.endswith("rect")] == ["null-band"]
        whiskers = [each for each in root.iter() if each.get("class") == "thin-whisker"]
        assert len(whiskers) >= 2 * 2 * len(DEFENSES)


def test_a_whisker_that_leaves_the_plot_has_no_cap(tmp_path: Path) -> None:
    cells = load_run(make_results(tmp_path, seeds=3)).cells
    cell = cells[0]
    assert cell.utility is not None
    wide = replace(cell, utility=replace(cell.utility, accuracy=Estimate(value=0.83, low=-0.5, high=1.5, n=2)))

    def lines(shown: Any) -> int:
        return str(decision_chart([shown, *cells[1:]])).count("thin-whisker")

    assert lines(wide) == lines(cell) - 2


def test_there_is_a_panel_per_defense_with_a_line_per_rung(tmp_path: Path) -> None:
    cells = load_run(make_results(tmp_path, seeds=3)).cells
    panels = curve_panels(cells)
    assert [panel.name for panel in panels] == ["gaussian_noise", "top_k", "clipping + gaussian_noise"]
    for panel, numbers in zip(panels, (["2", "3", "4"], ["5", "6", "7"], ["8"]), strict=True):
        root = ElementTree.fromstring(panel.chart)
        lines = [each.get("class") or "" for each in root.iter() if each.tag.endswith("polyline")]
        assert lines == ["curve bare", *(f"curve rung-{i}" for i in range(len(numbers)))]
        labels = sorted(each.text or "" for each in root.iter() if each.get("class") == "number")
        assert labels == numbers


def test_undefended_alone_has_a_curve_too(tmp_path: Path) -> None:
    assert [panel.name for panel in curve_panels(load_run(make_results(tmp_path, defenses=DEFENSES[:1], seeds=2)).cells)] == [
        "none"
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "gradveil-utility-9"}', '{"format": "gradveil-utility-1"}'])
def test_a_damaged_training_costs_its_curve_only(text: str, tmp_path: Path) -> None:
    make_results(tmp_path, seeds=1)
    key = training_key(DEFENSES[1], 0)
    (tmp_path / "utility" / f"{key}.json").write_text(text)
    (tmp_path / "utility" / f"{key}.timing.json").unlink()
    results = load_run(tmp_path)
    utility = results.cells[1].utility
    assert utility is not None and utility.accuracy.value == pytest.approx(0.82, abs=0.05)
    assert utility.time_ratio is None
    assert results.cells[1].time_ratio == results.cells[1].timing.ratio
    write_report(tmp_path)


def test_time_falls_back_to_what_clients_took(tmp_path: Path) -> None:
    make_results(tmp_path, seeds=1)
    path = tmp_path / "utility" / f"{training_key(DEFENSES[1], 0)}.timing.json"
    timing = json.loads(path.read_text())
    path.write_text(json.dumps({**timing, "latency": None, "client_seconds": [0.6, 0.6, 60.0]}))
    utility = load_run(tmp_path).cells[1].utility
    assert utility is not None and utility.time_ratio == pytest.approx(1.5)


def test_a_key_cannot_leave_the_folder(tmp_path: Path) -> None:
    make_results(tmp_path / "in", seeds=1)
    run = json.loads((tmp_path / "in" / "run.json").read_text())
    path = tmp_path / "in" / "cells" / f"{run['cells'][1]}.json"
    cell = json.loads(path.read_text())
    (tmp_path / "in" / "utility" / f"{training_key(DEFENSES[1], 0)}.json").rename(tmp_path / "out.json")
    cell["utility"]["trainings"] = ["../../out"]
    path.write_text(json.dumps(cell))
    utility = load_run(tmp_path / "in").cells[1].utility
    assert utility is not None and utility.curves == ()


def test_odd_numbers_are_never_printed(tmp_path: Path) -> None:
    make_results(tmp_path, seeds=3)
    for path in (tmp_path / "cells").glob("*.json"):
        if ".timing" in path.name:
            continue
        cell = json.loads(path.read_text())
        cell["utility"]["pmm"] = {"value": float("nan")}
        cell["utility"]["difference"] = "lots"
        cell["utility"]["bytes"] = {"up": float("inf"), "undefended_up": 0}
        path.write_text(json.dumps(cell))
    html = re.sub(r"<script>.*?</script>", "", write_report(tmp_path).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|infinity|undefined)\b", re.sub(r"<[^>]+>", " ", html), re.IGNORECASE)
    assert rows(html)[1][4:6] == ["–", "–"]


def test_a_shared_report_of_user_data_shows_no_folder_of_a_training(tmp_path: Path) -> None:
    html = page(tmp_path, builtin=False)
    assert "ward-7" not in html and "decision-table" in html


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    html = page(tmp_path, hostile=True, defenses=[DEFENSES[0], replace(DEFENSES[1], spelling=f"x('{HOSTILE}')")])
    assert HOSTILE not in html


def test_a_defense_without_verdict_is_not_decided_by(tmp_path: Path) -> None:
    failing = [DEFENSES[0], replace(DEFENSES[2], checks=[FAIL]), DEFENSES[6]]
    assert [row[1].split(" rung")[0] for row in rows(page(tmp_path, defenses=failing))] == ["none", "top_k(keep=0.01)"]


def test_numbers_are_spelt_with_their_interval() -> None:
    known = Estimate(value=0.8734, low=0.85, high=0.9, n=3)
    assert accuracy(known) == "87.3\u00a0% (85.0–90.0)"
    assert accuracy(Estimate(value=0.5, n=1)) == "50.0\u00a0%"
    assert points(Estimate(value=-0.012, low=-0.02, high=0.004, n=3)) == "−1.2 (−2.0 to +0.4)"
    assert points(Estimate(value=-0.0001, n=1)) == "0.0"
    assert ratio(None) == "–"
