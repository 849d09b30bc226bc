"""Certificates on the page: bound, matching attack and best attack side by side, or "no certificate"."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradveil.report import write_report
from gradveil.study.load import load_run
from gradveil.verdict.words import costs
from tests.unit.report.example_results import DEFENSES, make_results


def text_of(path: Path) -> str:
    page = re.sub(r"<(style|script).*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    for path in (folder / "cells").glob("*.json"):
        cell = json.loads(path.read_text())
        if "defense" in cell:
            edit(cell)
            path.write_text(json.dumps(cell))
    return folder


def test_bound_matching_attack_and_best_attack_stand_side_by_side(tmp_path: Path) -> None:
    folder = make_results(tmp_path)
    noisy = next(cell for cell in load_run(folder).cells if "clipping" in cell.defense.spelling)
    text = text_of(write_report(folder))
    found = noisy.selected.identified
    assert re.search(rf"at most 27 % 3 of 16 · 19 % \(7–43 %\) {found.count} of {found.n}", text)
    assert "at most 51 % at most 27 % at most 27 % of records can be identified by anyone" in text
    assert "no certificate" in text and "the record was drawn from 128 candidates" in text


def test_without_any_certificate_there_is_nothing_to_explain(tmp_path: Path) -> None:
    text = text_of(write_report(make_results(tmp_path, defenses=DEFENSES[:3])))
    assert "What no attacker can exceed" not in text and "no certificate" in text


def test_a_bound_of_all_records_is_said_to_prove_nothing(tmp_path: Path) -> None:
    def edit(cell: dict[str, Any]) -> None:
        if cell["certificate"]["identified"] is not None:
            cell["certificate"] |= {"identified": 1.0, "matching": None}

    text = text_of(write_report(change(make_results(tmp_path), edit)))
    assert "nothing proved" in text and "did not run" in text


def test_a_folder_that_does_not_know_of_certificates_is_read(tmp_path: Path) -> None:
    folder = change(make_results(tmp_path), lambda cell: cell.pop("certificate"))
    assert all(cell.certificate is None for cell in load_run(folder).cells)
    text = text_of(write_report(folder))
    assert "no certificate" not in text and "What no attacker can exceed" not in text


def test_odd_values_do_not_reach_the_page(tmp_path: Path) -> None:
    def edit(cell: dict[str, Any]) -> None:
        cell["certificate"] |= {"identified": "high", "psnr": {"20": None, "25": "x"}, "matching": [1], "assumptions": 7}

    folder = change(make_results(tmp_path), edit)
    found = load_run(folder).cells[0].certificate
    assert found is not None and (found.identified, found.psnr, found.matching, found.assumptions) == (None, {}, None, ())
    assert "nan" not in text_of(write_report(folder)).lower().split()


def test_the_first_screen_says_what_is_certified(tmp_path: Path) -> None:
    cell = next(cell for cell in load_run(make_results(tmp_path)).cells if "clipping" in cell.defense.spelling)
    assert dict(costs(cell, None))["Certificate"].startswith("at most 27 % of records")


def test_a_setting_off_the_ladder_names_no_rung(tmp_path: Path) -> None:
    folder = change(make_results(tmp_path), lambda cell: cell["defense"].update(rung=None, rungs=5))
    assert "rung None" not in text_of(write_report(folder))
