"""The page of `gradveil risk`: the extremes as pictures, of built-in data or on demand, and never of user data unasked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradveil.cli import main
from gradveil.errors import UsageError
from gradveil.report.risk_page import write_risk_page
from gradveil.study.codec import decode, encode
from gradveil.study.exposures import Exposure, RecordExposure
from gradveil.study.risks import Assessment, RecordRisk, RiskData, RiskResult, RiskScore
from tests.unit.report.example_results import HOSTILE, pictures
from tests.unit.report.test_report_certificates import text_of

BASE = ["risk", "--records", "3", "--model", "mlp(hidden=[8])", "--quiet"]


def result(rows: int = 12, name: str = "mlp") -> RiskResult:
    def record(row: int, value: float) -> RecordRisk:
        score = RiskScore(value, 0.9, 0.9, 0.0, 1.1, value - 0.01, value + 0.01, 64, 0, 0.99, 5.0, "merge")
        return RecordRisk(**vars(score), row=row, label=None if row == 0 else 1, mode="gram", seconds=0.25, notes=(HOSTILE,))

    def one(defense: str, shift: float) -> Assessment:
        records = tuple(record(row, 0.3 + 0.01 * row - shift) for row in range(rows))
        return Assessment(model=name, defense=defense, records=records)

    return RiskResult(
        meaning="a low one does not acquit",
        alpha=0.99,
        data=RiskData(name=HOSTILE),
        assessments=(one("none", 0.0), one("pruning", 0.1)),
    )


def test_what_is_written_is_read() -> None:
    assert decode(RiskResult, json.loads(json.dumps(encode(result().ranked()), allow_nan=False))) == result().ranked()


def test_the_extremes_stand_beside_their_undefended_scores(tmp_path: Path) -> None:
    shown = dict(enumerate(pictures(12)))
    path = write_risk_page(tmp_path / "risk.html", result(), shown, private=False)
    text, page = text_of(path), path.read_text(encoding="utf-8")
    assert page.count("<img") == 20 and "does not acquit" in text and "must not leave" not in text
    assert "row 11, class 1 0.410 0.400 to 0.420" in text  # most exposed without a defense
    assert "row 11, class 1 0.410 → 0.310 0.300 to 0.320" in text
    assert "row 0 0.300 → 0.200" in text and "class None" not in text
    assert HOSTILE not in page


def test_with_exposure_the_extremes_are_by_exposure(tmp_path: Path) -> None:
    def record(row: int) -> RecordExposure:
        return RecordExposure(row=row, exposure=12.0 - row, linear=13.0 - row, error=0.01, null=0.1, listed=0.5)

    exposures = (
        Exposure(model="mlp", defense="none", records=tuple(record(row) for row in range(12))),
        Exposure(model="mlp", defense="pruning", reason=f"no decibels: {HOSTILE}"),
    )
    path = write_risk_page(
        tmp_path / "risk.html", replace(result(), exposures=exposures), dict(enumerate(pictures(12))), private=False
    )
    text = text_of(path)
    first, last = text.index("row 0 12.0 dB"), text.index("row 11, class 1 1.0 dB")
    assert first < last and "Mean exposure 6.5 dB above knowing nothing (7.5 if the release were linear)" in text
    assert "named on a list of 256: 50 %" in text and "no decibels" in text and "no bound" in text
    assert HOSTILE not in path.read_text(encoding="utf-8")


def test_a_private_page_says_so_and_few_records_are_not_shown_twice(tmp_path: Path) -> None:
    path = write_risk_page(tmp_path / "risk.html", result(3), dict(enumerate(pictures(3))), private=True)
    assert "must not leave the building" in text_of(path)
    assert path.read_text(encoding="utf-8").count("<img") == 2 * 3


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the page"):
        write_risk_page(tmp_path / "file" / "risk.html", result(2), {}, private=False)


def test_built_in_data_is_shown_and_user_data_only_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--data", "digits", "--out", str(tmp_path / "builtin")]) == 0
    assert "risk.html" in capsys.readouterr().out
    assert (tmp_path / "builtin" / "risk.html").read_text().count("data:image") == 3
    # Called as built-in data is, and still the user's own.
    own = tmp_path / "digits.npz"
    np.savez(own, x=np.random.default_rng(0).random((6, 8, 8), dtype=np.float32), y=np.arange(6) % 3)
    assert main([*BASE, "--data", str(own), "--out", str(tmp_path / "shared")]) == 0
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {"risk.json"}
    assert main([*BASE, "--data", str(own), "--out", str(tmp_path / "own"), "--private"]) == 0
    page = (tmp_path / "own" / "risk-private.html").read_text()
    assert "must not leave the building" in page and page.count("data:image") == 3
    assert len(json.loads((tmp_path / "own" / "risk.json").read_text())["assessments"]) == 1
    capsys.readouterr()
    assert main([*BASE, "--data", str(own), "--private"]) == 2
    assert "--out" in capsys.readouterr().err
