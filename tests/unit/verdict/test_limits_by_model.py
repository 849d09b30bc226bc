"""Limits on scores and decibels, model by model: every count, bound and sentence; and the edges of numbers in words."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gradveil.errors import LeakAboveLimit, Unreliable, UsageError
from gradveil.metrics import share_of
from gradveil.study.exposures import Exposure, PublicRecords, RecordExposure
from gradveil.study.levels import Level, Levels, Reach
from gradveil.study.limits import parse_limit
from gradveil.study.measures import Estimate, Spread, Summary
from gradveil.study.results import CellResult, Defense
from gradveil.study.risks import NO_BAND, RiskRecord
from gradveil.verdict import numbers, words
from gradveil.verdict.candidates import Candidate, Requirements
from gradveil.verdict.levels import level_of
from gradveil.verdict.limits import Outcome, compare, compare_assessments, compare_risk, enforce


def spaced(text: str) -> str:
    return text.replace("\u00a0", " ")


def exposed(model: str, defense: str, *decibels: float | None, reason: str = "") -> Exposure:
    records = tuple(RecordExposure(row=row + 5, exposure=value, null=0.1) for row, value in enumerate(decibels))
    return Exposure(model=model, defense=defense, public=PublicRecords(), records=records, reason=reason)


def assessed(model: str, defense: str, *invres: float) -> Any:
    records = tuple(SimpleNamespace(row=row + 2, invre=v, low=v - 0.1, high=v + 0.1) for row, v in enumerate(invres))
    return SimpleNamespace(model=model, defense=defense, records=records)


def test_decibels_are_judged_by_the_worst_record_of_every_defense_and_model() -> None:
    limits = [parse_limit("exposure>6"), parse_limit("exposure[b]>20")]
    shown = [
        exposed("m", "none", 30.0),
        exposed("m", "a", 3.0, 9.5, 7.0),
        exposed("m", "b", 6.0),
        exposed("n", "a", 4.0, None),
        exposed("n", "b", None, reason="No law."),
        exposed("o", "a", 1.0),
    ]
    found = compare_assessments(limits, [], shown)
    assert found.judged == 7, "of two models two by the first limit and one by the second, of the third one"
    (violation,) = found.violations
    assert violation.limit is limits[0] and (violation.defense, violation.bound) == ("a", 9.5)
    assert violation.sentence == "a is beyond exposure>6: row 6 under m is exposed by 9.5 dB; 2 of 3 records"
    assert found.doubts == (
        "a: there is no exposure (not of every record)",
        "b: there is no exposure (No law.)",
        "the limit 'exposure[b]>20' fits no cell of this run",
    )
    lost = compare_assessments([parse_limit("exposure[c]>6")], [], shown[:2])
    assert lost.doubts == ("the limit 'exposure[c]>6' fits no cell of this run",) and lost.judged == 0


def test_scores_and_decibels_that_nobody_has_cannot_be_judged() -> None:
    decibels, scores = [parse_limit("exposure>6"), parse_limit("exposure>7")], [parse_limit("invre>0.5")]
    nothing = compare_assessments([*decibels, *scores], [], [])
    assert nothing.judged == 3 and nothing.doubts == ("exposure was not scored", "invre was not scored")
    assert nothing.remarks == (f"the limit 'invre>0.5' is no band: {NO_BAND}",) and not nothing.violations
    found = compare_assessments(scores, [assessed("m", "none", 0.9), assessed("m", "a", 0.2, 0.7), assessed("n", "a", 0.45)])
    assert found.judged == 2 and not found.doubts
    assert [each.defense for each in found.violations] == ["a", "a"]
    assert [each.bound for each in found.violations] == pytest.approx([0.8, 0.55])
    assert found.violations[0].sentence.endswith("InvRE of row 3 under m is 0.700, at most 0.800; 1 of 2 records")
    half = compare_assessments([*decibels, *scores], [assessed("m", "a", 0.2)])
    assert half.judged == 3 and half.doubts == ("exposure was not scored",)


def test_scores_without_an_audit_are_compared_defense_by_defense() -> None:
    records = [RiskRecord(pseudonym=f"r{row}", invre=v, low=v, high=v + 0.05) for row, v in enumerate((0.3, 0.5, 0.45))]
    scored = [("none", records), ("a", records), ("b", [])]
    limits = [parse_limit("invre>0.5"), parse_limit("invre[c]>0.1"), parse_limit("invre[a]>0.6"), parse_limit("invre>0.55")]
    found = compare_risk(limits, scored)
    assert (found.judged, len(found.violations)) == (5, 1)
    assert found.violations[0].sentence == "a is beyond invre>0.5: InvRE of r1 is 0.500, at most 0.550; 1 of 3 records"
    assert found.doubts == ("the limit 'invre[c]>0.1' fits no cell of this run",)
    told = found.as_dict()
    assert told["violations"] == [
        {"limit": "invre>0.5", "defense": "a", "bound": pytest.approx(0.55), "sentence": found.violations[0].sentence}
    ]
    assert (told["passed"], told["doubts"], "remarks" in told) == (False, list(found.doubts), False)
    assert Outcome((), (), 3, ("r",)).as_dict() == {"passed": True, "violations": [], "doubts": [], "remarks": ["r"]}
    with pytest.raises(LeakAboveLimit, match="a is beyond"):
        enforce(found)
    with pytest.raises(Unreliable, match="the limits cannot be judged: x; y"):
        enforce(Outcome((), ("x", "y"), 0))
    enforce(Outcome((), (), 0))


def test_sizes_are_spelled_to_the_edge() -> None:
    for value, told in (
        (0, "0 B"),
        (99.6, "100 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_940, "99.9 kB"),
        (100_000, "100 kB"),
        (999_000, "999 kB"),
        (1_000_000, "1.0 MB"),
        (100e6, "100 MB"),
        (5e12, "5000 GB"),
    ):
        assert spaced(numbers.size(value)) == told


def test_estimates_and_spreads_are_spelled_with_the_interval_they_have() -> None:
    whole = Estimate(value=0.5, low=0.4, high=0.6, n=3)
    assert spaced(numbers.points(replace(whole, value=-0.012, low=-0.02, high=0.0001))) == "−1.2 (−2.0 to 0.0)"
    assert spaced(numbers.ratio(replace(whole, value=0.98, low=0.95, high=1.01))) == "0.980 (0.950–1.010)"
    for alone in (replace(whole, low=None), replace(whole, high=None), replace(whole, low=0.4, high=0.4)):
        assert numbers.ratio(alone) == "0.500"
    assert numbers.ratio(None) == numbers.points(None) == numbers.spread(None) == "–"
    told = Spread(median=31.04, low=28.1, high=33.06)
    assert spaced(numbers.spread(told, "dB")) == "31.0 dB (28.1–33.1)" and spaced(numbers.spread(told)) == "31 (28–33)"
    assert spaced(numbers.spread(replace(told, low=None), "dB")) == "31.0 dB"
    assert spaced(numbers.spread(replace(told, high=None))) == "31"


def test_what_given_weights_have_seen_is_not_known() -> None:
    assert words.tested_words("").startswith("records nobody trained on")
    assert words.tested_words("w.pt") == "records that this training did not use; whether the given weights saw them is not known"


def test_the_widest_end_is_named_only_where_its_attacker_had_no_time() -> None:
    own = share_of(2, 40)

    def told(*reached: Reach) -> Any:
        level = Level(attacker="top", share=own, reached=reached)
        return level_of(
            CellResult(defense=Defense(spelling="x"), selected=Summary(identified=own), levels=Levels(label=level)), "label"
        )

    assert (told().upper, told().hurried, told().attacker) == (own.upper, "", "top")
    few = share_of(1, 5)
    found = told(Reach(attacker="slow", share=few), Reach(attacker="low", share=share_of(0, 40)))
    assert (found.upper, found.hurried) == (few.upper, "the attacker 'slow' had time for 5")
    assert told(Reach(attacker="even", share=share_of(5, 40))).hurried == ""


def test_candidates_are_ranked_by_leak_then_accuracy_then_time() -> None:
    def made(**changes: Any) -> Candidate:
        settings: dict[str, Any] = {
            "spelling": "x",
            "identified": share_of(1, 20),
            "accuracy": None,
            "difference": Estimate(value=-0.1, low=-0.2, high=0.0, n=3),
            "time": 1.5,
            "sent": 2.0,
            "doubts": (),
            "excess": (),
        }
        return Candidate(**(settings | changes))

    assert made().rank() == (round(share_of(1, 20).high, 9), 0.1, 1.5)
    assert made(difference=None, time=None).rank()[1:] == (float("inf"), float("inf"))
    assert made().qualifies and not made(doubts=("d",)).qualifies and not made(excess=(("e", 0.1),)).qualifies
    told = made(doubts=("d",), excess=(("e", 0.1), ("f", 0.2))).as_dict()
    assert (told["reasons"], told["qualifies"], told["time_ratio"], told["bytes_ratio"]) == (["d", "e", "f"], False, 1.5, 2.0)
    assert told["accuracy"] is None and cast("Any", told["difference"])["value"] == -0.1


@pytest.mark.parametrize(
    ("text", "bound", "told"),
    [("psnr>20", 33.06, "median psnr 31.04, at most 33.06 (95 %)"), ("mse<0.5", 0.25, "median mse 0.375, at least 0.25 (95 %)")],
)
def test_a_limit_on_a_measure_is_broken_by_the_bound_that_is_worse(text: str, bound: float, told: str) -> None:
    summary = Summary(
        identified=share_of(9, 10), psnr=Spread(median=31.04, low=28.1, high=33.06), mse=Spread(median=0.375, low=0.25, high=0.5)
    )
    cell = CellResult(defense=Defense(spelling="a"), selected=summary)
    (violation,) = compare([parse_limit(text)], [cell]).violations
    assert violation.bound == bound and violation.sentence == f"a is beyond {text}: {told}"
    assert compare([parse_limit("invre>0.5"), parse_limit(text)], [cell]).remarks == (
        f"the limit 'invre>0.5' is no band: {NO_BAND}",
    )


def test_plain_json_holds_what_can_be_written() -> None:
    value = {"a": [1.5, float("nan"), (float("inf"), "x")], 2: {"b": None, "c": True}}
    assert json.loads(numbers.plain_json(value)) == {"a": [1.5, None, [None, "x"]], "2": {"b": None, "c": True}}
    assert numbers.plain_json({"é": 1}) == '{\n  "é": 1\n}' and numbers.plain_json(2.5) == "2.5"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"max_time": -1.0}, "--max-time is -1; give a number of at least 0"),
        ({"max_identified": 2.0}, "--max-identified is 2; give a number between 0 and 1"),
        ({"max_accuracy_drop": 101.0}, "--max-accuracy-drop is 101; give a number between 0 and 100"),
    ],
)
def test_a_requirement_out_of_range_is_told_its_range(asked: dict[str, float], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Requirements(**cast("Any", asked))
    assert str(caught.value) == told
