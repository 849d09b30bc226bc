"""Settings in results: typed, written as they always were, and honest about what a file does not say."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gradveil.report.render import render_report, render_training
from gradveil.storage.study_file import read_study
from gradveil.study.cell import Cell
from gradveil.study.codec import decode, encode
from gradveil.study.federation import FederationSettings, UtilitySettings
from gradveil.study.kept import LATER, Kept, KeptCell, KeptTraining, KeptUtility
from gradveil.study.measures import Share, Summary
from gradveil.study.results import CellResult
from gradveil.study.run_result import Run
from gradveil.study.training import Training
from gradveil.study.training_result import Round, RoundRecord, TrainingRecord, TrainingResult
from gradveil.verdict.words import setting_words, utility_words

RESULTS = Path(__file__).parents[3] / "results"
CELL = {**Cell(model="mlp", batch_size=4, learning_rate=1, cut="cut1").as_dict(), "ensemble": "quick-3", "threads": 2}
NOBODY = Summary(n=1, identified=Share(value=0.0, low=0.0, high=0.8, count=0, n=1))


def result(**settings: Any) -> CellResult:
    return CellResult(settings=decode(KeptCell, settings), selected=NOBODY)


def told(**settings: Any) -> str:
    """Return the page of a run of one cell."""
    return render_report(Run(cells=(result(**settings),)), private=False)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (KeptCell, CELL),
        (KeptTraining, Training(defense="dgp", seed=3).as_dict()),
        (KeptTraining, Training(cut="cut1").as_dict()),
        (KeptTraining, FederationSettings(momentum=0.5).as_dict()),
        (KeptUtility, UtilitySettings(rounds=7).as_dict()),
        (KeptUtility, {"rounds": 7, "seeds": 3, "cut": "cut1", "parts": "whole"}),
    ],
)
def test_what_is_asked_is_written_to_the_letter_and_read_again(kind: type[Kept], asked: dict[str, Any]) -> None:
    kept = decode(kind, asked)
    assert json.dumps(encode(kept)) == json.dumps(asked)
    assert decode(kind, json.loads(json.dumps(encode(kept)))) == kept
    assert {name: getattr(kept, name) for name in asked} == asked


def test_older_cells_have_what_later_settings_mean() -> None:
    cells = [cell for path in RESULTS.glob("*.json.xz") for cell in read_study(path).get("cells", [])]
    older = [cell for cell in cells if "cut" not in cell["cell"]]
    assert len(older) >= 10 and set(LATER) <= {each.name for each in fields(Cell)}
    for cell in older:
        settings = decode(CellResult, cell).settings
        assert settings.records == cell["cell"]["records"]
        assert (settings.cut, settings.threads, settings.shares) == ("", 1, cell["cell"]["shares"])
        assert settings.said("bn_statistics") is False and settings.said("risk") is None, "there was no risk to ask for"


def test_keys_and_values_of_other_versions_are_kept() -> None:
    foreign = {**CELL, "patience": 3, "optimizer": "lion", "batch_size": "many", "records": None}
    settings = decode(KeptCell, foreign)
    assert (settings.optimizer, settings.batch_size, settings.records) == ("sgd", 1, 16)
    assert settings.as_dict() == {name: value for name, value in foreign.items() if value is not None}
    assert decode(KeptCell, encode(settings)) == settings
    assert (
        setting_words(result(**foreign), ["patience", "optimizer", "batch_size"])
        == "patience 3 · optimizer lion · batch size many"
    )


def test_values_that_would_be_refused_today_are_read() -> None:
    odd = {"clients": 2, "clients_per_round": 9, "partition": "gone(x=1)", "momentum": 7.0, "device": "abacus"}
    assert decode(KeptTraining, odd).clients_per_round == decode(KeptUtility, odd).clients_per_round == 9
    record = decode(TrainingRecord, {"training": odd, "final_accuracy": 0.5})
    assert record.settings.device == "abacus"


def test_a_default_is_never_shown_as_measured() -> None:
    assert "batch of" not in setting_words(result(model="mlp")) and setting_words(result(model="mlp")) == "mlp"
    assert result().ensemble == "the ensemble of this run" and result(ensemble="quick-3").ensemble == "quick-3"
    assert "<dt>model</dt>" not in told() and "<dt>model</dt>" in told(model="mlp")
    words = utility_words(decode(KeptUtility, {"rounds": 2}))
    assert (
        words == "? of ? clients in each of 2 rounds, records dealt out ?, ? local epochs, minibatches of ?, learning rate ?, ?"
    )
    assert TrainingRecord(final_accuracy=None, rounds=(Round(round=1),)).curve.seed is None


def test_a_training_that_does_not_say_its_rounds_has_those_it_has() -> None:
    training = TrainingResult.of([RoundRecord(round=1, accuracy=0.5)], {})
    assert (training.planned, training.finished) == (1, True)
    page = render_training(training, private=False)
    assert "<dt>model</dt>" not in page and "photos" not in page
    asked = TrainingResult.of([RoundRecord(round=1)], {}, settings=decode(KeptTraining, FederationSettings().as_dict()))
    assert (asked.planned, asked.finished) == (20, False)
