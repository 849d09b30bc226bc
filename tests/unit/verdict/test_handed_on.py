"""What verdict and words are made of: every count, bound and name in a sentence is the one it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradveil.metrics import share_of
from gradveil.risk.exposure import Assessment
from gradveil.study.evidence import Power, Rung
from gradveil.study.levels import Level, Levels, Listed, ListLevel
from gradveil.study.limits import parse_limit
from gradveil.study.load import load_run
from gradveil.study.measures import Bar, Summary
from gradveil.study.results import Bars, CellResult, Check, Defense
from gradveil.study.risks import RiskRecord
from gradveil.verdict import numbers
from gradveil.verdict.level_words import power_words
from gradveil.verdict.levels import NO_OWNERS, OLD, bar_of, level_of
from gradveil.verdict.limits import compare, compare_assessments, compare_risk
from gradveil.verdict.recommend import Recommendation, Requirements, recommend
from gradveil.verdict.status import choose_headline
from gradveil.verdict.words import _against_null, setting_words, trust
from tests.unit.report.example_results import DEFENSES, FAIL, Example, make_results

NONE = DEFENSES[0]
STRONG = Example("pruning(rate=0.99)", 1, 1, 10.0, accuracy=0.6, time=1.02)


def spaced(text: str) -> str:
    return text.replace("\u00a0", " ")


SPELLED: list[tuple[Callable[[], str], str]] = [
    (lambda: numbers.duration(59.4), "59 s"),
    (lambda: numbers.duration(59.6), "1 min 0 s"),
    (lambda: numbers.duration(61), "1 min 1 s"),
    (lambda: numbers.duration(3599), "59 min 59 s"),
    (lambda: numbers.duration(3600), "1 h 0 min"),
    (lambda: numbers.duration(None), "–"),
    (lambda: numbers.significant(1.234e-5), "0.000012"),
    (lambda: numbers.significant(1.234e-6), "1.2e-06"),
    (lambda: numbers.significant(1.234e-6, 3), "1.23e-06"),
    (lambda: numbers.significant(123456789.0), "123456789"),
    (lambda: numbers.significant(1234567890.0), "1.2e+09"),
    (lambda: numbers.significant(-0.0456, 1), "-0.05"),
    (lambda: numbers.significant(0.0456, 3), "0.0456"),
    (lambda: numbers.significant(None), "–"),
    (lambda: numbers.percent(0.0005), "0.1 %"),
    (lambda: numbers.percent(0.00049), "0 %"),
    (lambda: numbers.percent(0.01), "1 %"),
    (lambda: numbers.percent(0.99), "99 %"),
    (lambda: numbers.percent(0.9996), "100 %"),
    (lambda: numbers.percent(0.125), "13 %"),
    (lambda: numbers.interval(None, 0.5), "interval not available"),
    (lambda: numbers.interval(0.5, None), "interval not available"),
    (lambda: numbers.interval(0.002, 0.7), "0.2–70 %"),
    (lambda: numbers.size(1000), "1.0 kB"),
    (lambda: numbers.size(123456), "123 kB"),
    (lambda: numbers.size(5e6), "5.0 MB"),
    (lambda: numbers.size(None), "–"),
    (lambda: numbers.ms(999), "999 ms"),
    (lambda: numbers.ms(1000), "1.0 s"),
    (lambda: numbers.ms(None), "–"),
    (lambda: numbers.times(9.994), "9.99×"),
    (lambda: numbers.times(10.0), "10×"),
    (lambda: numbers.times(0.0), "0.00×"),
    (lambda: numbers.times(None), "–"),
    (lambda: numbers.count(1, "cell is", "cells are"), "1 cell is"),
    (lambda: numbers.count(2, "cell is", "cells are"), "2 cells are"),
    (lambda: numbers.count(0, "record"), "0 records"),
    (lambda: numbers.db(None), "–"),
    (lambda: numbers.db(31.04), "31.0 dB"),
]


def test_numbers_are_spelled_to_the_edge() -> None:
    for said, expected in SPELLED:
        assert spaced(said()) == expected


def cell(defense: str, count: int = 0, n: int = 100, **more: Any) -> CellResult:
    return CellResult(defense=Defense(spelling=defense), selected=Summary(identified=share_of(count, n)), **more)


def test_the_bar_is_the_best_null_or_chance() -> None:
    assert bar_of(cell("x", candidates=8)) == Bar(null="chance", value=0.125, high=0.125)
    measured = Bar(null="grey", value=0.2, high=0.4)
    assert bar_of(cell("x", candidates=8, bar=Bars(identified=measured))) == measured
    assert bar_of(cell("x")).value == 0.0


@pytest.mark.parametrize(
    ("draws", "said"), [(0, "the best null, "), (1, "the best null, "), (2, "the largest of 2 tries of the ")]
)
def test_a_null_of_one_try_is_no_largest(draws: int, said: str) -> None:
    bar = Bars(identified=Bar(null="grey", value=0.25, high=0.4, draws=draws))
    told = spaced(_against_null(cell("x", candidates=8, bar=bar)))
    assert told.startswith(said) and told.endswith("reaches 25 %")


@pytest.mark.parametrize(
    ("a50", "said"),
    [
        (0.0, "as it is (a50 is 0)"),
        (1.0, "only where the raw update is all that is seen (a50 is 1)"),
        (0.5, "once a leak of the raw update is 50 % of what is seen (a50)"),
        (None, "they find 31 of 32 with a leak of weight 0.10"),
    ],
)
def test_a_power_is_told_to_its_ends(a50: float | None, said: str) -> None:
    planted = (Rung(leak=0.01, identified=share_of(16, 32)), Rung(leak=0.1, identified=share_of(31, 32)))
    told = spaced(power_words(cell("x", power=Power(planted=planted, a50=a50, shown=True))))
    assert told.startswith("These attackers were shown to win: they find ") and f"{said}." in told


def test_a_level_that_is_not_there_says_its_name_and_why() -> None:
    reached = Level(attacker="a", share=share_of(3, 4))
    for levels, name, reason in (
        (None, "label", OLD),
        (Levels(), "label", OLD),
        (Levels(label=Level(reason="No labels.")), "label", "No labels."),
        (Levels(), "owner", NO_OWNERS),
        (Levels(), "list", OLD),
        (Levels(listed=ListLevel()), "presence", OLD),
        (Levels(listed=ListLevel(reason="None fits.")), "presence", "None fits."),
        (Levels(listed=ListLevel(reason="None fits.")), "list", "None fits."),
        (Levels(listed=ListLevel(reason="None fits.")), "list_owner", "None fits."),
        (Levels(listed=ListLevel(lists={"random": Listed(share=share_of(1, 2))})), "list_owner", NO_OWNERS),
        (Levels(label=reached), "owner", NO_OWNERS),
    ):
        found = level_of(cell("x", levels=levels), name)
        assert (found.name, found.reason, found.share) == (name, reason, None)
    there = level_of(cell("x", levels=Levels(label=reached)), "label")
    assert (there.name, there.reason, there.share, there.attacker) == ("label", "", reached.share, "a")


def test_what_was_judged_is_counted() -> None:
    cells = [cell("none"), cell("a"), cell("b"), cell("c")]
    assert compare([parse_limit("identified>0.5")], cells).judged == 3
    assert compare([parse_limit("identified>0.5"), parse_limit("identified[a]>0.5")], cells).judged == 4
    assert compare([parse_limit("identified[a]>0.5")], [], missing=["k"]).judged == 0


def records(*invres: float) -> list[RiskRecord]:
    return [
        RiskRecord(pseudonym=f"r-{index}", invre=value, low=value - 0.1, high=value + 0.1) for index, value in enumerate(invres)
    ]


def test_scores_are_judged_by_defense_and_named_by_record() -> None:
    found = compare_risk(
        [parse_limit("invre>0.5")], [("none", records(0.9)), ("a", records(0.2, 0.6, 0.45)), ("b", records(0.1))]
    )
    assert (found.judged, [each.defense for each in found.violations], found.doubts) == (2, ["a"], ())
    (violation,) = found.violations
    assert violation.bound == pytest.approx(0.7)
    assert violation.sentence == "a is beyond invre>0.5: InvRE of r-1 is 0.600, at most 0.700; 2 of 3 records"
    assert compare_risk([parse_limit("invre[c]>0.5")], [("a", records(0.9))]).doubts == (
        "the limit 'invre[c]>0.5' fits no cell of this run",
    )


def test_assessments_are_judged_model_by_model() -> None:
    def assessed(model: str, defense: str, *invres: float) -> Assessment:
        made = object.__new__(Assessment)
        rows = tuple(replace_row(row, each) for row, each in enumerate(records(*invres)))
        for name, value in {"model": model, "defense": defense, "records": rows}.items():
            object.__setattr__(made, name, value)
        return made

    def replace_row(row: int, record: RiskRecord) -> Any:
        return type("Row", (), {"row": row + 5, "invre": record.invre, "low": record.low, "high": record.high})()

    found = compare_assessments(
        [parse_limit("invre>0.5")],
        [assessed("m", "none", 0.9), assessed("m", "a", 0.3, 0.6), assessed("n", "a", 0.1), assessed("n", "b", 0.2)],
    )
    assert found.judged == 3
    assert [each.sentence for each in found.violations] == [
        "a is beyond invre>0.5: InvRE of row 6 under m is 0.600, at most 0.700; 1 of 2 records"
    ]


def test_violations_carry_the_bound_that_was_compared() -> None:
    (found,) = compare([parse_limit("identified>0.1")], [cell("a", 30)]).violations
    assert found.bound == share_of(30, 100).low and "30 of 100 records identified" in found.sentence
    (maybe,) = compare([parse_limit("identified>0.1")], [cell("none", 90), cell("a", 9)]).doubts
    assert f"9 of 100 records identified, at most {share_of(9, 100).upper:.1%} (exact" in maybe


def recommended(folder: Path, *defenses: Example, **asked: Any) -> Recommendation:
    return recommend(load_run(make_results(folder, defenses=(NONE, *defenses), seeds=3)), Requirements(**asked))


def test_the_answer_counts_who_was_judged_and_who_fits(tmp_path: Path) -> None:
    others = [replace(STRONG, spelling=name, plain=more, informed=more) for name, more in (("b", 2), ("c", 3))]
    bad = replace(STRONG, spelling="d", accuracy=0.1)
    found = recommended(tmp_path, STRONG, *others, bad, max_accuracy_drop=50)
    assert found.sentence.startswith("use pruning(rate=0.99): it leaks least of the 3 of 4 defenses within the limits;")
    assert "the difference in leakage to b and c" in " ".join(found.notes) or "to b, c lies" in " ".join(found.notes)


@pytest.mark.parametrize(("near", "said"), [(3, "to n0, n1, n2 lies"), (4, "to n0, n1, n2 and 1 more lies")])
def test_only_so_many_near_ones_are_named(near: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.verdict.recommend.MOST_NAMED", 3)
    same = [replace(STRONG, spelling=f"n{index}", plain=1, informed=1, accuracy=0.55) for index in range(near)]
    assert said in " ".join(recommended(tmp_path, STRONG, *same, max_accuracy_drop=50).notes)


def test_a_candidate_as_json_holds_its_numbers(tmp_path: Path) -> None:
    found = recommended(tmp_path, STRONG, max_accuracy_drop=50)
    assert found.chosen is not None
    told = found.chosen.as_dict()
    assert (told["defense"], told["qualifies"], told["reasons"]) == ("pruning(rate=0.99)", True, [])
    assert (told["identified"]["count"], told["identified"]["n"]) == (1, 16)
    assert told["time_ratio"] == pytest.approx(1.02) and told["bytes_ratio"] == pytest.approx(1.0)
    assert told["accuracy"]["value"] == pytest.approx(0.6, abs=0.02) and told["difference"]["value"] < -0.2


def test_other_cells_without_a_verdict_are_counted(tmp_path: Path) -> None:
    for failing, words in ((1, "1 other cell has no verdict"), (2, "2 other cells have no verdict")):
        bad = [replace(each, checks=[FAIL]) for each in DEFENSES[1 : 1 + failing]]
        run = load_run(make_results(tmp_path / str(failing), defenses=(NONE, *bad, DEFENSES[4])))
        assert words in spaced(" ".join(trust(choose_headline(run), run).reasons))


def test_failed_checks_of_the_undefended_cell_and_of_others_are_told_apart(tmp_path: Path) -> None:
    failed = replace(NONE, checks=[FAIL])
    run = load_run(make_results(tmp_path, defenses=(failed, replace(DEFENSES[1], checks=[FAIL]), DEFENSES[2])))
    found = trust(choose_headline(run), run)
    assert found.level == "fail"
    assert [spaced(each) for each in found.reasons][-1] == "1 other cell has no verdict either; see the checks."


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({}, "one client’s update"),
        ({"clients": 3}, "aggregate of 3 clients"),
        ({"local_steps": 1}, "1 local step ·"),
        ({"local_steps": 4}, "4 local steps ·"),
        ({"rounds": 2}, "2 rounds"),
        ({"batch_size": 8}, "batch of 8"),
    ],
)
def test_a_setting_is_told_in_words(setting: dict[str, Any], words: str, tmp_path: Path) -> None:
    (found, *_) = load_run(make_results(tmp_path, defenses=(NONE,))).cells
    settings = replace(found.settings, **setting)
    told = spaced(setting_words(replace(found, settings=settings)))
    assert words in told
    assert ("rounds" in told) == ("rounds" in setting)


def test_a_check_that_only_warns_is_no_failure() -> None:
    warned = cell("x", checks=(Check(name="a", level="warn", sentence="Few."),))
    assert compare([parse_limit("identified>0.5")], [cell("none", 90), warned]).doubts == ()
