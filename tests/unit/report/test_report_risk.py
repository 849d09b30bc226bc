"""Risk on the page: scores with and without the defense, the extremes, the correlation, and no picture that must not leave."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gradveil.report import write_report
from gradveil.report.risk_views import exposed, risk_section, scatter, told_coefficient
from gradveil.study.load import load_run
from gradveil.study.risks import Coefficient
from tests.unit.report.example_results import HOSTILE, make_results
from tests.unit.report.test_report_certificates import change, text_of


def section(path: Path) -> str:
    page = path.read_text(encoding="utf-8")
    found = re.search(r'<section id="risk">.*?</section>', page, re.DOTALL)
    assert found is not None
    return found.group(0)


def without(cell: dict[str, Any]) -> None:
    cell["risk"] = None
    del cell["exposure"]


def test_both_scores_the_correlation_and_the_meaning_are_there(tmp_path: Path) -> None:
    folder = make_results(tmp_path)
    cell = load_run(folder).cells[0]
    assert cell.risk is not None and cell.risk.defended is not None and cell.risk.correlation.spearman is not None
    text = text_of(write_report(folder))
    assert "a low one does not acquit" in text
    assert f"Spearman {told_coefficient(cell.risk.correlation.spearman)}" in text and "n = 16" in text
    assert f"{cell.risk.defended.mean:.3f}" in text and "leading" in text and "20 s" in text


def test_the_extremes_are_those_of_the_undefended_update(tmp_path: Path) -> None:
    cells = load_run(make_results(tmp_path)).cells
    bare, noisy = cells[0], cells[3]
    assert bare.risk is not None and noisy.risk is not None
    (_, most), (_, least) = exposed(bare, noisy, show_pictures=True)
    ranked = sorted(bare.risk.records, key=lambda record: -record.invre)
    assert [entry.pseudonym for entry in most] == [record.pseudonym for record in ranked[:5]]
    assert [entry.pseudonym for entry in least] == [record.pseudonym for record in ranked[:-6:-1]]
    defended = {record.pseudonym: record.invre for record in noisy.risk.records}
    assert all(entry.defended == defended[entry.pseudonym] and entry.picture is not None for entry in (*most, *least))


@pytest.mark.parametrize(("builtin", "private", "pictures"), [(True, False, True), (False, False, False), (False, True, True)])
def test_pictures_of_user_data_stay_in_the_building(tmp_path: Path, builtin: bool, private: bool, pictures: bool) -> None:
    page = section(write_report(make_results(tmp_path, builtin=builtin), private=private))
    assert ("data:image" in page) == pictures
    assert ("Names are pseudonyms" in page) != pictures
    assert "r-" in page


def test_a_score_that_foretells_nothing_is_said_to(tmp_path: Path) -> None:
    def tell(value: float, p: float) -> str:
        def edit(cell: dict[str, Any]) -> None:
            cell["risk"]["correlation"]["spearman"] = {"value": value, "p": p}

        return text_of(write_report(change(make_results(tmp_path), edit)))

    assert "did not tell which records" in tell(-0.3, 0.3)
    assert "rebuilt better (Spearman −0.70 (p = 0.004) over 16 records), but no better than can be shown from" in tell(
        -0.7, 0.004
    )
    assert "here the score misleads" in tell(0.7, 0.0001)


def test_every_correlation_stands_beside_its_null(tmp_path: Path) -> None:
    def edit(cell: dict[str, Any]) -> None:
        cell["risk"]["correlation"] |= {"spearman": {"value": -0.7, "p": 0.004}, "partial": {"value": -0.6, "p": 0.02}}

    text = text_of(write_report(change(make_results(tmp_path / "a"), edit)))
    assert "also beyond their contrast (contrast alone 0.85 (p < 0.001), given contrast −0.60 (p = 0.020))" in text
    page = section(write_report(make_results(tmp_path / "b")))
    assert page.count("contrast alone") == page.count("given contrast") == page.count("<figure>") > 0
    assert "Contrast alone" in page and "Given contrast" in page
    assert not re.search("minimal|moderate", page)


def test_folders_with_bands_and_no_null_are_read(tmp_path: Path) -> None:
    def edit(cell: dict[str, Any]) -> None:
        cell["risk"]["defended"]["bands"] = {"minimal": 0, "moderate": 0, "high": 16}
        cell["risk"]["correlation"] = {"attack": "plain", "spearman": {"value": -0.7, "p": 0.004}, "n": 16}
        for record in cell["risk"]["records"]:
            record["band"] = "high"
            del record["contrast"]

    text = text_of(write_report(change(make_results(tmp_path), edit)))
    assert "rebuilt better (Spearman −0.70 (p = 0.004) over 16 records), as they should be" in text


def test_a_correlation_that_does_not_exist_is_not_a_number_on_the_page(tmp_path: Path) -> None:
    def edit(cell: dict[str, Any]) -> None:
        cell["risk"]["correlation"] = {"attack": "informed", "pearson": None, "spearman": None, "n": 16}

    text = text_of(write_report(change(make_results(tmp_path), edit)))
    assert "not defined" in text and "cannot be said" in text


def test_folders_without_scores_are_read(tmp_path: Path) -> None:
    folder = change(make_results(tmp_path), without)
    assert 'id="risk"' not in write_report(folder).read_text(encoding="utf-8")
    assert risk_section(load_run(folder).cells, None, None, True) is None


def test_a_reason_stands_where_there_are_no_scores(tmp_path: Path) -> None:
    def edit(cell: dict[str, Any]) -> None:
        cell["risk"] = {
            "reason": f"{HOSTILE} is BatchNorm on the statistics of the batch",
            "meaning": "a low one does not acquit",
        }

    path = write_report(change(make_results(tmp_path), edit))
    assert "No score for none : " in text_of(path) and "statistics of the batch." in text_of(path)
    assert HOSTILE not in path.read_text(encoding="utf-8")


def test_odd_values_do_not_reach_the_page(tmp_path: Path) -> None:
    def edit(cell: dict[str, Any]) -> None:
        cell["risk"]["records"][0]["invre"] = "high"
        cell["risk"]["records"][1]["error"] = None
        cell["risk"]["defended"] |= {"worst": None, "mode": 3}
        cell["risk"]["undefended"] = []

    folder = change(make_results(tmp_path), edit)
    risk = load_run(folder).cells[0].risk
    assert risk is not None and len(risk.records) == 15 and risk.undefended is None
    text = text_of(write_report(folder))
    assert "nan" not in text.lower().split() and "None" not in text


def test_a_scatter_holds_every_record_even_where_all_scores_or_errors_are_equal(tmp_path: Path) -> None:
    def edit(cell: dict[str, Any]) -> None:
        for record in cell["risk"]["records"]:
            record |= {"invre": 0.5, "error": 0.0}

    for folder in (make_results(tmp_path / "a"), change(make_results(tmp_path / "b"), edit)):
        drawn = scatter(load_run(folder).cells[0], "x")
        assert drawn is not None and str(drawn).count("<circle") == 16
    cell = json.loads(next((tmp_path / "a" / "cells").glob("*[0-9a-f].json")).read_text())
    assert cell["risk"]["records"]


def test_coefficients_as_people_write_them() -> None:
    assert told_coefficient(None) == "not defined"
    assert told_coefficient(Coefficient(value=0.5, p=None)) == "0.50"
    assert told_coefficient(Coefficient(value=-0.123, p=0.0421)) == "−0.12 (p = 0.042)"


def test_the_floor_under_the_mean_error_stands_in_the_table_of_certificates(tmp_path: Path) -> None:
    text = text_of(write_report(make_results(tmp_path)))
    assert "at least 0.0021 (0.0019–0.0023) , at most 27.2" in text.replace("\u00a0", " ")
    assert "Van Trees" in text


def test_exposure_stands_beside_what_attacks_gained(tmp_path: Path) -> None:
    folder = make_results(tmp_path)
    cell = load_run(folder).cells[3]
    assert cell.exposure is not None and cell.exposure.worst is not None and cell.exposure.mean_gain is not None
    assert cell.exposure.mean_attained is not None and cell.exposure.mean_attained < (cell.exposure.mean or 0)
    text = text_of(write_report(folder)).replace("\u00a0", " ")
    for value in (
        cell.exposure.mean,
        cell.exposure.worst,
        cell.exposure.mean_linear,
        cell.exposure.mean_gain,
        cell.exposure.mean_attained,
    ):
        assert f"{value:.1f} dB" in text
    assert "0.61 (p = 0.012)" in text and "128 directions of 600 public records (photos, not attacked)" in text
    assert "7 other records of the update count as noise" in text and "0.7 dB" in text and "5.3 dB" in text
    page = section(write_report(folder))
    assert 'id="exposure-table"' in page and "attack it instead: made up" in page


def test_exposure_is_shown_where_there_is_no_invre(tmp_path: Path) -> None:
    def alone(cell: dict[str, Any]) -> None:
        cell["risk"] = None

    folder = make_results(tmp_path)
    assert "exposure-table" in section(write_report(change(folder, alone)))


def test_owners_come_first_where_data_name_them(tmp_path: Path) -> None:
    folder = make_results(tmp_path, owners=True)
    first = load_run(folder).cells[0].exposure
    assert first is not None and first.owners and first.owners[0].worst == first.worst
    text = text_of(write_report(folder)).replace("\u00a0", " ")
    assert f"{first.owners[0].owner} ({first.owners[0].n} records): exposure {first.owners[0].mean:.1f} dB" in text
    assert "Most exposed owner, mean" in text
    bare = write_report(make_results(tmp_path / "bare"))
    assert "Most exposed owner" not in text_of(bare)
