"""The page of `gradveil risk`: the extremes as pictures, of built-in data or on demand, and never of user data unasked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gradveil.cli import main
from gradveil.errors import UsageError
from gradveil.report.risk_page import write_risk_page
from tests.unit.report.example_results import HOSTILE, pictures
from tests.unit.report.test_report_certificates import text_of

BASE = ["risk", "--records", "3", "--model", "mlp(hidden=[8])", "--quiet"]


def result(rows: int = 12, name: str = "mlp") -> dict[str, object]:
    def one(defense: str, shift: float) -> dict[str, object]:
        scores = [0.3 + 0.01 * row - shift for row in range(rows)]
        records = [
            {
                "row": row,
                "label": None if row == 0 else 1,
                "invre": value,
                "low": value - 0.01,
                "high": value + 0.01,
                "mode": "gram",
            }
            for row, value in enumerate(scores)
        ]
        bands = {"minimal": 0, "moderate": rows, "high": 0}
        told = {"model": name, "defense": defense, "mean_invre": sum(scores) / rows, "bands": bands, "seconds": 3.0}
        return {**told, "notes": [HOSTILE], "records": records}

    return {
        "meaning": "a low one does not acquit",
        "data": {"name": HOSTILE},
        "assessments": [one("none", 0.0), one("pruning", 0.1)],
    }


def test_the_extremes_stand_beside_their_undefended_scores(tmp_path: Path) -> None:
    shown = dict(enumerate(pictures(12)))
    path = write_risk_page(tmp_path / "risk.html", result(), shown, private=False)
    text, page = text_of(path), path.read_text(encoding="utf-8")
    assert page.count("<img") == 20 and "does not acquit" in text and "must not leave" not in text
    assert "row 11, class 1 0.410 0.400 to 0.420" in text  # most exposed without a defense
    assert "row 11, class 1 0.410 → 0.310 0.300 to 0.320" in text
    assert "row 0 0.300 → 0.200" in text and "class None" not in text
    assert HOSTILE not in page


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
