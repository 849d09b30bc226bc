"""What words are made of: every level with all its numbers, settings and costs as they are, and what was not tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradveil.metrics import share_of
from gradveil.study.codec import decode
from gradveil.study.evidence import Power, Rung
from gradveil.study.kept import KeptCell
from gradveil.study.levels import Level, Levels, Listed, ListLevel, Reach, Sensitivity
from gradveil.study.measures import Bar, Estimate, Share, Summary
from gradveil.study.results import Bars, CellResult, Defense, Sent, Timing, Utility
from gradveil.study.risks import RiskRecord
from gradveil.verdict.level_words import list_words, not_tried, strength_lines
from gradveil.verdict.levels import View, bar_of, level_of, levels_of
from gradveil.verdict.limits import _by_row
from gradveil.verdict.words import _by_list, _few, costs, setting_words

N = 20
NULL = Bar(null="grey", value=0.1, high=0.2, draws=3)
SOME, MORE, FEW = share_of(4, N), share_of(9, N), share_of(3, 4)


def spaced(text: str) -> str:
    return text.replace("\u00a0", " ")


def level(name: str, share: Share = SOME, *others: Reach) -> Level:
    return Level(attacker=name, share=share, null=NULL, reached=(Reach(attacker=name, share=share), *others))


def cell(spelling: str = "mine", levels: Levels | None = None, **more: Any) -> CellResult:
    return CellResult(
        defense=Defense(spelling=spelling),
        n=N,
        candidates=256,
        selected=Summary(identified=SOME),
        bar=Bars(identified=NULL),
        levels=levels,
        **more,
    )


LISTED = Listed(
    share=SOME,
    attacker="b",
    null=NULL,
    size=48,
    reached=(Reach(attacker="b", share=SOME, owners=MORE, rehearsed=0.25), Reach(attacker="c", share=FEW, rehearsed=0.75)),
    owners=SOME,
    owners_null=NULL,
    sensitivity=Sensitivity(d=1.0, at={"10": 0.5, "1000000": 0.01}),
)
LEVELS = Levels(
    label=level("a"),
    owners=level("d", SOME, Reach(attacker="e", share=FEW)),
    listed=ListLevel(lists={"random": LISTED}, presence=level("f")),
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("label", View(name="label", share=SOME, attacker="a", null=NULL, upper=SOME.upper)),
        (
            "owner",
            View(
                name="owner",
                share=SOME,
                attacker="d",
                null=NULL,
                upper=FEW.upper,
                size=256,
                hurried="the attacker 'e' had time for 4",
            ),
        ),
        (
            "list",
            View(
                name="list",
                share=SOME,
                attacker="b",
                null=NULL,
                upper=FEW.upper,
                size=48,
                hurried="the attacker 'c' had time for 4",
            ),
        ),
        ("list_owner", View(name="list_owner", share=SOME, attacker="b", null=NULL, upper=MORE.upper, size=48)),
        ("presence", View(name="presence", share=SOME, attacker="f", null=NULL, upper=SOME.upper)),
    ],
)
def test_a_level_shows_all_that_was_measured(name: str, expected: View) -> None:
    assert level_of(cell(levels=LEVELS), name) == expected


def test_pictures_are_shown_with_null_and_candidates() -> None:
    found = level_of(cell(levels=LEVELS), "picture")
    assert (found.name, found.share, found.null, found.size) == ("picture", SOME, bar_of(cell()), 256)
    assert found.attacker and found.upper == SOME.upper and not found.hurried and not found.reason
    assert [view.name for view in levels_of(cell(levels=LEVELS))] == ["label", "list", "picture"]


@pytest.mark.parametrize("low", [0.05, 0.15, 0.25])
def test_a_level_is_open_where_its_lower_end_is_above_every_null(low: float) -> None:
    share = replace(SOME, low=low)
    assert View(name="label", share=share, null=NULL).open == (low > NULL.top)
    assert not View(name="label", share=share).open and not View(name="label", null=NULL).open


def test_a_list_is_told_with_its_rehearsal_and_other_sizes() -> None:
    told = spaced(list_words(cell(levels=LEVELS)))
    assert told == (
        "Of releases of their own, attackers who hold a list of 48 named up to 75 %; "
        "among 10 candidates expect about 50 %, among a million 1 %"
    )
    always = replace(LISTED, sensitivity=Sensitivity(low=1.0, at={"10": 0.5, "1000000": 0.01}))
    least = cell(levels=Levels(listed=ListLevel(lists={"random": always})))
    assert "expect at least 50 %" in spaced(list_words(least))
    bare = replace(LISTED, sensitivity=None)
    assert list_words(cell(levels=Levels(listed=ListLevel(lists={"random": bare})))).endswith("75\u00a0%")
    assert list_words(cell()) == list_words(cell(levels=Levels(label=level("a")))) == ""


def test_what_was_not_tried_is_named_once() -> None:
    power = Power(planted=(Rung(leak=0.1, identified=SOME),))
    asked = "how strong these attackers are against the defense (power)"
    full = cell(levels=LEVELS, power=power)
    assert not_tried([full]) == [] and not_tried([cell("none", levels=LEVELS)]) == []
    assert not_tried([full, cell(levels=LEVELS), cell("none", levels=LEVELS)]) == [asked]
    assert not_tried([cell(levels=LEVELS, power=Power(reason="No time."))]) == [asked]
    told = not_tried([cell(power=power), cell("other", power=power)])
    assert (
        len(told) == 2 and told[0].startswith("labels: ") and told[1].startswith("an attacker who holds a list of candidates: ")
    )
    lines = strength_lines([cell("none"), full, cell("b", levels=LEVELS, power=power)])
    assert lines[0].startswith("all defenses: ") and [line.partition(":")[0] for line in lines[1:]] == ["not measured"] * 2
    apart = strength_lines([full, cell("b", levels=LEVELS)])
    assert [line.partition(":")[0] for line in apart] == ["mine", "b"]


def settings(**changes: Any) -> KeptCell:
    base = {"data": "digits", "model": "lenet", "batch_size": 1, "clients": 1, "rounds": 1, "local_steps": 1}
    return decode(KeptCell, {**base, **changes})


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"local_steps": 1}, "local_steps", "1 local step"),
        ({"local_steps": 5}, "local_steps", "5 local steps"),
        ({"local_epochs": 1}, "local_epochs", "1 local epoch"),
        ({"local_epochs": 4}, "local_epochs", "4 local epochs"),
        ({"minibatch": 6}, "minibatch", "minibatches of 6"),
        ({"shuffle": True}, "shuffle", "shuffled"),
        ({"shuffle": False}, "shuffle", "in one order"),
        ({"dropout": True}, "dropout", "dropout on"),
        ({"dropout": False}, "dropout", "dropout off"),
        ({"clients": 1}, "clients", "one client’s update"),
        ({"clients": 7}, "clients", "aggregate of 7 clients"),
        ({"rounds": 1}, "rounds", "1 round"),
        ({"rounds": 3}, "rounds", "3 rounds"),
        ({"batch_size": 9}, "batch_size", "batch of 9"),
        ({"cut": "cut1"}, "cut", "vertical, cut1"),
        ({"cut": ""}, "cut", "horizontal"),
        ({"cut": "cut1", "party": 1}, "party", "party 1"),
        ({"cut": "cut1", "parts": "halves"}, "parts", "halves"),
        ({"momentum": 0.5}, "momentum", "momentum 0.5"),
        ({"state": "untrained"}, "state", "untrained"),
    ],
)
def test_each_setting_is_told_as_it_is(changes: dict[str, Any], field: str, words: str) -> None:
    assert spaced(setting_words(cell(settings=settings(**changes)), (field,))) == words


@pytest.mark.parametrize("seeds", [1, 4])
def test_costs_are_told_beside_the_undefended(seeds: int) -> None:
    utility = Utility(
        accuracy=Estimate(value=0.5, low=0.4, high=0.6, n=seeds),
        undefended=Estimate(value=0.7, low=0.7, high=0.7, n=seeds),
        difference=Estimate(value=-0.2, low=-0.3, high=-0.1, n=seeds),
        time_ratio=3.0,
    )
    found = cell(
        utility=utility, bytes=Sent(up=5000, dense=10_000), timing=Timing(defense_ms=12.0, undefended_ms=6.0), settings=settings()
    )
    told = {name: spaced(words) for name, words in costs(found, None)}
    assert told["Bytes per update"] == "5.0 kB, 0.50× an undefended update"
    assert told["Client time per update"] == "12 ms, 2.00× undefended; 3.00× for a whole local training"
    many = "1 seed" if seeds == 1 else "4 seeds"
    assert told["Accuracy"].startswith(f"50.0 % (40.0–60.0), {many}; undefended 70.0 %; −20.0 (−30.0 to −10.0) points")
    same = {name: spaced(words) for name, words in costs(cell(bytes=Sent(up=1000, dense=1000)), None)}
    assert same["Bytes per update"] == "1.0 kB, as many as undefended"
    assert same["Accuracy"] == same["Client time per update"] == "not measured in this run"


def test_scores_keep_both_their_ends() -> None:
    row = type("Row", (), {"row": 3, "invre": 0.5, "low": 0.25, "high": 0.75})()
    each: Any = type("Found", (), {"model": "m", "records": (row,)})()
    assert _by_row(each) == [RiskRecord(pseudonym="row 3 under m", invre=0.5, low=0.25, high=0.75)]


def test_lists_of_both_cells_are_told_beside_each_other() -> None:
    def listed(share: Share, size: int = 48) -> CellResult:
        return cell(levels=Levels(listed=ListLevel(lists={"random": replace(LISTED, share=share, size=size)})))

    told = _by_list(listed(share_of(19, 20)), listed(share_of(3, 20), 24))
    assert told == "; who holds a list of 24 candidates points out 19 of 20 without it and 3 of 20 with it"
    assert _by_list(listed(SOME), cell()) == _by_list(cell(), listed(SOME)) == ""


def test_few_hits_are_told_beside_the_null() -> None:
    told = spaced(_few(cell()))
    assert told.startswith("4 of 20 identified; the largest of 3 tries of the best null, ") and told.endswith(" reaches 10 %")
