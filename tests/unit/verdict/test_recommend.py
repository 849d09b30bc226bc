"""The recommendation: what it chooses, when it refuses, and what it says beside."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradveil.errors import Unreliable, UsageError
from gradveil.study.load import load_run
from gradveil.verdict.recommend import Recommendation, Requirements, recommend
from tests.unit.report.example_results import DEFENSES, FAIL, Example, make_results

NONE = DEFENSES[0]
WEAK = Example("pruning(rate=0.5)", 15, 14, 28.0, accuracy=0.84, time=1.01)
MIDDLE = Example("pruning(rate=0.9)", 6, 8, 18.0, accuracy=0.835, time=1.02)
STRONG = Example("pruning(rate=0.99)", 1, 1, 10.0, accuracy=0.6, time=1.02)
SLOW = Example("top_k(keep=0.1)", 1, 2, 11.0, bytes_up=6330, accuracy=0.838, time=1.9)
LADDER = (NONE, WEAK, MIDDLE, STRONG, SLOW)


def ask(folder: Path, *defenses: Example, seeds: int = 3, grid: Any = ({},), missing: int = 0, **asked: Any) -> Recommendation:
    make_results(folder, defenses=defenses or LADDER, seeds=seeds, grid=grid, missing=missing)
    return recommend(load_run(folder), Requirements(**asked))


def change(folder: Path, index: int, alter: Callable[[dict[str, Any]], None]) -> None:
    key = json.loads((folder / "run.json").read_text())["cells"][index]
    path = folder / "cells" / f"{key}.json"
    cell = json.loads(path.read_text())
    alter(cell)
    path.write_text(json.dumps(cell))


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({"max_accuracy_drop": 1, "max_time": 1.2}, "pruning(rate=0.9)"),
        ({"max_accuracy_drop": 1}, "top_k(keep=0.1)"),
        ({"max_accuracy_drop": 100}, "pruning(rate=0.99)"),
        ({"max_bytes_ratio": 0.2}, "top_k(keep=0.1)"),
        ({"max_identified": 0.4, "max_time": 1.5}, "pruning(rate=0.99)"),
    ],
)
def test_the_least_leak_within_the_limits_wins(asked: dict[str, Any], chosen: str, tmp_path: Path) -> None:
    found = ask(tmp_path, **asked)
    assert found.chosen is not None and found.chosen.spelling == chosen
    assert found.sentence.startswith(f"use {chosen}: it ")


def test_the_sentence_holds_the_numbers(tmp_path: Path) -> None:
    said = ask(tmp_path, max_accuracy_drop=1, max_time=1.2).as_dict()["sentence"]
    assert "the only one of 4 defenses within the limits" in said
    assert "8 of 16 records identified (50 %, 95 % interval 22–72 %)" in said
    assert "points over 3 paired seeds, 1.02× client time, 1.00× bytes up" in said
    assert "\n" not in said


def test_ties_go_to_accuracy_then_to_time(tmp_path: Path) -> None:
    better = replace(STRONG, spelling="a", accuracy=0.7)
    assert ask(tmp_path / "1", NONE, STRONG, better, max_accuracy_drop=50).as_dict()["recommended"] == "a"
    faster = replace(STRONG, spelling="b", time=1.0)
    assert ask(tmp_path / "2", NONE, STRONG, faster, max_accuracy_drop=50).as_dict()["recommended"] == "b"


def test_none_qualifies_and_the_nearest_is_named_with_its_limit(tmp_path: Path) -> None:
    found = ask(tmp_path, max_accuracy_drop=0.3, max_time=1.2)
    assert found.chosen is None
    assert found.sentence.startswith("none qualifies: ")
    assert "pruning(rate=0.9) comes nearest, but loses 0.5 points of accuracy (limit 0.3)" in found.sentence
    assert "may let 72\u00a0% be identified (limit 5\u00a0%)" in ask(tmp_path, NONE, MIDDLE, max_identified=0.05).sentence
    assert "takes 1.90× client time (limit 1.2×)" in ask(tmp_path, NONE, SLOW, max_time=1.2).sentence
    assert "sends 0.10× bytes (limit 0.05×)" in ask(tmp_path, NONE, SLOW, max_bytes_ratio=0.05).sentence


def test_what_leaks_no_less_than_no_defense_is_not_recommended(tmp_path: Path) -> None:
    found = ask(tmp_path, NONE, WEAK, max_accuracy_drop=5)
    assert found.chosen is None and "leaks no less than no defense (15 of 16)" in found.sentence


def test_what_the_intervals_do_not_show_is_said(tmp_path: Path) -> None:
    near = replace(STRONG, spelling="near", informed=2, plain=2)
    notes = " ".join(ask(tmp_path, NONE, STRONG, near, max_accuracy_drop=50).notes)
    assert "the difference in leakage to near lies inside the interval" in notes
    almost = replace(STRONG, spelling="almost", plain=13, informed=13)
    notes = " ".join(ask(tmp_path, NONE, almost, max_accuracy_drop=50).notes)
    assert "overlaps that of no defense" in notes and "broken all the same" in notes
    alone = ask(tmp_path, NONE, replace(STRONG, informed=None), max_accuracy_drop=50)
    assert alone.notes[0] == "no attacker of quick-1 knew this defense; one who does may find more"
    clear = ask(tmp_path, NONE, STRONG, max_accuracy_drop=50)
    assert (
        clear.notes == alone.notes[1:] == ("power was not measured, so nothing shows how strong these attackers are against it",)
    )


def test_the_interval_of_accuracy_is_a_note_or_with_strict_a_limit(tmp_path: Path) -> None:
    make_results(tmp_path, defenses=(NONE, MIDDLE), seeds=3)

    def widen(cell: dict[str, Any]) -> None:
        cell["utility"]["difference"] |= {"value": -0.005, "low": -0.03, "high": 0.02}

    change(tmp_path, 1, widen)
    found = recommend(load_run(tmp_path), Requirements(max_accuracy_drop=1))
    assert found.chosen is not None and "reaches a drop of 3.0 points" in " ".join(found.notes)
    refused = recommend(load_run(tmp_path), Requirements(max_accuracy_drop=1, strict=True))
    assert refused.chosen is None and "may lose 3.0 points of accuracy (limit 1)" in refused.sentence


def test_one_seed_is_told_and_not_enough_for_strict(tmp_path: Path) -> None:
    found = ask(tmp_path, seeds=1, max_accuracy_drop=1, max_time=1.2)
    assert "accuracy comes from one seed" in " ".join(found.notes)
    with pytest.raises(Unreliable, match="one seed gives no interval"):
        ask(tmp_path, seeds=1, max_accuracy_drop=1, strict=True)


def test_a_cell_that_failed_a_check_is_left_out_and_named(tmp_path: Path) -> None:
    found = ask(tmp_path, NONE, replace(STRONG, checks=[FAIL]), MIDDLE, max_accuracy_drop=50)
    assert found.as_dict()["recommended"] == "pruning(rate=0.9)"
    assert "pruning(rate=0.99) was left out: a trust check failed (The matching loss never fell" in found.notes[-1]
    with pytest.raises(Unreliable, match="no defense can be judged"):
        ask(tmp_path, NONE, replace(STRONG, checks=[FAIL]), max_accuracy_drop=50)


def test_accuracy_nobody_measured_is_no_ground(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"accuracy was not measured in this run.*--utility 20"):
        ask(tmp_path, seeds=0, max_accuracy_drop=1)
    make_results(tmp_path, defenses=LADDER, seeds=3)
    change(tmp_path, 3, lambda cell: cell.pop("utility"))
    found = recommend(load_run(tmp_path), Requirements(max_accuracy_drop=100, max_time=1.5))
    assert found.as_dict()["recommended"] == "pruning(rate=0.9)"
    assert "pruning(rate=0.99) was left out: accuracy was not measured" in found.notes


@pytest.mark.parametrize(
    ("defenses", "says"),
    [
        ((STRONG, MIDDLE), "the undefended update was not measured"),
        ((replace(NONE, checks=[FAIL]), MIDDLE), "a check failed on the undefended update"),
        ((replace(NONE, plain=0, psnr=9.0), MIDDLE), "does not break even the undefended update"),
    ],
)
def test_attackers_who_prove_nothing_recommend_nothing(defenses: tuple[Example, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(Unreliable, match=says):
        ask(tmp_path, *defenses, max_accuracy_drop=1)


def test_an_undefended_cell_that_is_not_done_yet_is_not_asked_for_in_the_plan(tmp_path: Path) -> None:
    with pytest.raises(Unreliable, match='add "none" to the plan'):
        ask(tmp_path / "whole", STRONG, MIDDLE, max_accuracy_drop=1)
    with pytest.raises(Unreliable, match="the same command goes on"):
        ask(tmp_path / "begun", STRONG, MIDDLE, NONE, missing=1, max_accuracy_drop=1)


def test_one_defense_alone_is_not_called_the_only_one_of_one(tmp_path: Path) -> None:
    found = ask(tmp_path, NONE, MIDDLE, max_accuracy_drop=1)
    assert "it is within the limits, and no other defense was judged; 8 of 16" in found.as_dict()["sentence"]


def test_the_guarantee_of_what_is_recommended_is_noted(tmp_path: Path) -> None:
    proved = replace(STRONG, spelling="clipping(bound=1.0) + gaussian_noise(std=1.0)")
    notes = ask(tmp_path / "proved", NONE, proved, max_accuracy_drop=100).as_dict()["notes"]
    assert any(each.startswith("differential privacy of the whole training: ε = 8.75") for each in notes)
    assert not any(
        "differential" in each for each in ask(tmp_path / "not", NONE, STRONG, max_accuracy_drop=100).as_dict()["notes"]
    )


def test_too_few_seeds_to_tell_are_named_as_the_cause(tmp_path: Path) -> None:
    make_results(tmp_path, defenses=LADDER, seeds=2)
    for index in range(len(LADDER)):
        change(tmp_path, index, lambda cell: cell["utility"]["undefended"].update(value=0.6, low=0.0, high=1.0, n=2))
    with pytest.raises(Unreliable, match=r"60\s% accuracy \(0–100\s% over 2 seeds\).*; ask for more seeds, or train longer"):
        recommend(load_run(tmp_path), Requirements(max_accuracy_drop=1))


def test_a_federation_that_learned_nothing_recommends_nothing(tmp_path: Path) -> None:
    make_results(tmp_path, defenses=LADDER, seeds=3)
    for index in range(len(LADDER)):
        change(tmp_path, index, lambda cell: cell["utility"].update(chance=0.9))
    with pytest.raises(Unreliable, match="not clearly more than the 90"):
        recommend(load_run(tmp_path), Requirements(max_accuracy_drop=1))


def test_no_defense_at_all_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no defense was measured in these rows"):
        ask(tmp_path, NONE, max_accuracy_drop=1)


def test_several_settings_count_with_their_worst(tmp_path: Path) -> None:
    grid = [{"batch_size": 1}, {"batch_size": 4}]
    found = ask(tmp_path, grid=grid, max_accuracy_drop=1, max_time=1.2)
    assert found.chosen is not None and found.chosen.identified.count == 8
    assert len(found.candidates) == 4


def test_updates_and_embeddings_are_not_weighed_together(tmp_path: Path) -> None:
    grid = [{"cut": ""}, {"cut": "cut1"}]
    alone = ask(tmp_path / "alone", max_accuracy_drop=1, max_time=1.2)
    for cut, other in (("", "cut1"), ("none", "cut1"), ("cut1", "none")):
        found = ask(tmp_path / f"both{cut}", grid=grid, max_accuracy_drop=1, max_time=1.2, cut=cut)
        assert found.as_dict()["recommended"] == alone.as_dict()["recommended"]
        assert f"5\u00a0rows of other cuts left out; ask for them with --cut {other}" in found.notes
    vertical = ask(tmp_path / "cut", grid=[{"cut": "cut1"}], max_accuracy_drop=1, max_time=1.2)
    assert vertical.as_dict()["recommended"] == alone.as_dict()["recommended"] and vertical.notes == alone.notes
    beside = tmp_path / "beside"
    make_results(beside, defenses=LADDER, seeds=3, grid=grid)
    loaded = load_run(beside)
    kept = tuple(cell for cell in loaded.cells if cell.settings.cut or cell.defense.is_none)
    found = recommend(replace(loaded, cells=kept), Requirements(max_accuracy_drop=1, max_time=1.2))
    assert found.as_dict()["recommended"] == alone.as_dict()["recommended"], "the horizontal row is there for comparison"
    with pytest.raises(UsageError, match="no row with cut 'cut2'"):
        ask(tmp_path / "wrong", grid=grid, max_accuracy_drop=1, cut="cut2")


def test_what_is_not_done_in_every_setting_cannot_be_judged(tmp_path: Path) -> None:
    grid = [{"batch_size": 1}, {"batch_size": 4}]
    found = ask(tmp_path, grid=grid, missing=1, max_accuracy_drop=1)
    assert found.as_dict()["recommended"] == "pruning(rate=0.9)"
    assert "top_k(keep=0.1) was left out: measured in 1 of 2 settings" in found.notes
    assert "1\u00a0cell is not done yet, so the answer may change" in found.notes


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "give at least one limit"),
        ({"max_accuracy_drop": -1}, "--max-accuracy-drop is -1; give a number between 0 and 100"),
        ({"max_time": float("nan")}, "--max-time is nan"),
        ({"max_identified": 5}, "--max-identified is 5; give a number between 0 and 1"),
        ({"max_bytes_ratio": float("inf")}, "--max-bytes-ratio is inf; give a number of at least 0"),
        ({"max_time": 1.2, "strict": True}, "--strict is about --max-accuracy-drop"),
    ],
)
def test_limits_that_mean_nothing_are_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Requirements(**asked)
    assert says in str(caught.value)


def with_levels(folder: Path, *defenses: Example) -> Recommendation:
    make_results(folder, defenses=defenses, seeds=3, levels=True)
    return recommend(load_run(folder), Requirements(max_accuracy_drop=90.0, level="list"))


def test_a_level_is_judged_by_its_own_numbers(tmp_path: Path) -> None:
    """By pictures the sparse update is best; by a list it leaks everything."""
    sparse = Example("top_k(keep=0.01)", 0, 0, 10.0)
    found = with_levels(tmp_path, NONE, sparse, MIDDLE)
    assert found.chosen is not None and found.chosen.spelling == MIDDLE.spelling
    assert "9 of 16 records pointed out on a list" in found.as_dict()["sentence"]
    told = next(each for each in found.as_dict()["candidates"] if each["defense"] == sparse.spelling)
    assert told["reasons"] == ["leaks no less than no defense (16 of 16)"]
    pictures = recommend(load_run(tmp_path), Requirements(max_accuracy_drop=90.0))
    assert pictures.chosen is not None and pictures.chosen.spelling == sparse.spelling
    assert any("16 of 16 records pointed out on a list of 128" in note for note in pictures.as_dict()["notes"]), (
        "and says what a list adds"
    )
    doubt = "that few pictures were rebuilt may not be its doing: the information is there, our search did not get it"
    assert any(doubt in note for note in pictures.notes)
    assert not any(doubt in note for note in found.notes), "who asks about lists is told about lists"


def test_a_level_nobody_measured_recommends_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unreliable, match=r"list was not measured .*audit again"):
        ask(tmp_path, max_accuracy_drop=90, level="list")
    with pytest.raises(UsageError, match="did you mean 'list'"):
        Requirements(max_accuracy_drop=1.0, level="lists")


def test_without_power_the_recommendation_says_so(tmp_path: Path) -> None:
    missing = "power was not measured, so nothing shows how strong these attackers are against it"
    assert missing in ask(tmp_path / "1", NONE, STRONG, max_accuracy_drop=90).notes
    make_results(tmp_path / "2", defenses=[NONE, STRONG], seeds=3, levels=True)
    assert missing not in recommend(load_run(tmp_path / "2"), Requirements(max_accuracy_drop=90.0)).notes
