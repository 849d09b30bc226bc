"""The report of one training: what `gradveil train` keeps becomes a page, finished or not, and damage one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradveil.cli import main
from gradveil.errors import UsageError
from gradveil.report import write_report
from gradveil.study.load import is_training, load_training
from tests.unit.report.example_results import HOSTILE, make_results
from tests.unit.report.example_trainings import ROUND, guarantee, make_training


def text_of(page: Path) -> str:
    body = re.sub(r"<(script|style)>.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split()).replace("\u00a0", " ")


def test_a_training_becomes_a_page(tmp_path: Path) -> None:
    page = write_report(make_training(tmp_path))
    text = text_of(page)
    assert page == tmp_path / "report.html"
    assert "Accuracy 61.0 % after round 4, trained with pruning(rate=0.9)" in text
    assert "0.80× sending updates whole" in text and "31 ms a round, 1.05× that without a defense" in text
    assert "fallback rate" in text and "not finished" not in text
    html = page.read_text(encoding="utf-8")
    (line,) = re.findall(r'<polyline points="([^"]+)" class="curve rung-0"', html)
    assert len(line.split()) == 3  # round 2 was not evaluated


def test_nothing_is_said_about_privacy(tmp_path: Path) -> None:
    assert "It says nothing about what updates give away" in text_of(write_report(make_training(tmp_path)))


def test_what_is_proved_is_said_with_its_assumptions(tmp_path: Path) -> None:
    assert "Differential privacy no guarantee: x." in text_of(write_report(make_training(tmp_path)))
    text = text_of(write_report(make_training(tmp_path, guarantee=guarantee("clipping", 4))))
    assert "guarantee ε = 17.5 per client" in text and "counts of examples are public" in text
    assert "Differential privacy" not in text_of(write_report(make_training(tmp_path, guarantee=None)))


def test_an_unfinished_training_says_how_to_go_on(tmp_path: Path) -> None:
    settings = {"rounds": 20, "defense": "none"}
    text = text_of(write_report(make_training(tmp_path, finished=False, settings=settings)))
    assert "not finished: 4 of 20 rounds are done" in text


@pytest.mark.parametrize("private", [False, True])
def test_folders_of_user_data_stay_inside(private: bool, tmp_path: Path) -> None:
    html = write_report(make_training(tmp_path), private=private).read_text(encoding="utf-8")
    assert ("ward-7" in html) == private
    assert ("must not leave the building" in html) == private


def test_an_audit_stays_an_audit(tmp_path: Path) -> None:
    make_training(make_results(tmp_path))
    assert not is_training(tmp_path)
    assert "what updates give away" in text_of(write_report(tmp_path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "damaged"),
        ("[]", "damaged"),
        ('{"format": "gradveil-training-9"}', "reads 'gradveil-training-1'"),
        ('{"format": "gradveil-training-1"}', "no finished round yet"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "training.json").write_text(content)
    with pytest.raises(UsageError, match=says):
        load_training(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_odd_values_and_hostile_names_do_no_harm(tmp_path: Path) -> None:
    odd = [{**ROUND, "round": 1, "accuracy": float("nan"), "loss": float("inf"), "note": HOSTILE, "counters": {HOSTILE: 1.0}}]
    settings = {"model": HOSTILE, "defense": HOSTILE, "rounds": 1}
    page = write_report(make_training(tmp_path, rounds=odd, settings=settings, final_accuracy=None, latency=None, bytes={}))
    assert HOSTILE not in page.read_text(encoding="utf-8")
    text = text_of(page)
    assert "Not evaluated yet" in text and "No round was evaluated yet" in text
    assert not re.search(r"\b(nan|inf)\b", text, re.IGNORECASE)
