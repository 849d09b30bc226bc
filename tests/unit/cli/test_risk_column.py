"""Risk in what an audit prints: a column and its meaning, and every record's score in JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradveil.cli import output
from gradveil.cli.results import print_results, results_as_dict
from gradveil.study.load import load_run
from tests.unit.report.example_results import make_results
from tests.unit.report.test_report_certificates import change


def test_the_table_has_the_mean_and_the_most_and_says_what_they_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_results(load_run(make_results(tmp_path)))
    said = capsys.readouterr().out
    assert "InvRE" in said and "0.44, ≤ 0.54" in said
    own = load_run(make_results(tmp_path)).cells[3].exposure
    assert own is not None and f"{own.mean:.1f}, ≤ {own.worst:.1f} dB" in said.replace("\u00a0", " ")
    assert f"{own.mean_attained:.1f}, ≤ {own.worst_attained:.1f} dB" in said.replace("\u00a0", " ")
    words = " ".join(said.split())
    assert "exposure of clipping(bound=1.0) + gaussian_noise(std=0.05): no decibels" in words and "is no bound" in words
    assert "does not acquit" in words


def test_json_has_every_score_with_and_without_the_defense(tmp_path: Path) -> None:
    row = results_as_dict(load_run(make_results(tmp_path)))["cells"][3]
    assert row["defense"] == "gaussian_noise(std=0.1)" and len(row["risk"]["records"]) == 16
    assert row["risk"]["defended"]["mean"] < row["risk"]["undefended"]["mean"]
    assert row["exposure"]["mean"] < 6 and len(row["exposure"]["records"]) == 16
    assert row["risk"]["defended"]["mode"] == "leading" and set(row["risk"]["correlation"]["spearman"]) == {"value", "p"}


def test_without_scores_there_is_no_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def without(cell: dict[str, Any]) -> None:
        cell["risk"] = None
        del cell["exposure"]

    folder = change(make_results(tmp_path), without)
    print_results(load_run(folder))
    said = capsys.readouterr().out
    assert "InvRE" not in said and "exposure" not in said
    assert {row["risk"] for row in results_as_dict(load_run(folder))["cells"]} == {None}


def test_the_verdict_stays_in_the_table_however_narrow_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WIDE", 70)
    print_results(load_run(make_results(tmp_path)))
    lines = capsys.readouterr().out.splitlines()
    (head,) = [line for line in lines if line.split()[:2] == ["defense", "verdict"]]
    rows = [line for line in lines if line.startswith((" none ", " gaussian_noise", " pruning"))]
    assert head.split()[-1] == "InvRE"
    assert rows and all("≤" in row and row[head.index("verdict") : head.index("label")].strip() for row in rows)
